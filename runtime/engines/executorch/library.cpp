#include "library.h"

#include <dlfcn.h>
#include <unistd.h>

#include <cstdlib>

#include "core/error.h"

namespace edge_qkv::et {
namespace {

#if defined(__APPLE__)
constexpr const char* kName = "libedge_qkv_executorch.dylib";
#else
constexpr const char* kName = "libedge_qkv_executorch.so";
#endif
constexpr const char* kVariable = "EDGE_QKV_EXECUTORCH_LIBRARY";

[[noreturn]] void refuse(const std::string& why, const std::string& remedy) {
  throw Error(EQKV_ENGINE_MISSING, "The ExecuTorch engine cannot be opened: " + why + remedy + ".");
}

// Of the file that this function is in, with a slash at its end; or empty.
std::string own_directory() {
  Dl_info info = {};
  if (dladdr(reinterpret_cast<const void*>(&own_directory), &info) == 0 || !info.dli_fname) return "";
  const std::string file = info.dli_fname;
  return file.substr(0, file.rfind('/') + 1);
}

struct Choice {
  std::string path;
  std::string why_failed;  // before what dlopen says
  std::string remedy;
};

Choice choose(const std::string& path) {
  if (!path.empty()) {
    return {path, "", "; name libedge_qkv_executorch as engine_library, or leave it out"};
  }
  const char* variable = std::getenv(kVariable);
  if (variable && *variable) {
    return {variable, std::string("the environment variable ") + kVariable + " names " + variable + ": ",
            "; correct it, or unset it"};
  }
  const std::string beside = own_directory() + kName;
  // Only for the sentence: in an Android package a library is opened at a path that is no file's.
  const bool built = access(beside.c_str(), F_OK) == 0;
  return {beside, built ? "" : "edge-qkv was built where there was no ExecuTorch: ", kInstallRemedy};
}

}  // namespace

const Plugin& open_plugin(const std::string& path) {
  const Choice chosen = choose(path);
  void* handle = dlopen(chosen.path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (!handle) {
    const char* why = dlerror();
    refuse(chosen.why_failed + (why ? why : chosen.path), chosen.remedy);
  }
  const auto function = reinterpret_cast<const Plugin* (*)()>(dlsym(handle, kPluginFunction));
  const Plugin* plugin = function ? function() : nullptr;
  if (plugin && plugin->interface == kPluginInterface) return *plugin;
  dlclose(handle);
  refuse(chosen.path + (function ? " was built by another version of edge-qkv" : " is another library"),
         chosen.remedy);
}

}  // namespace edge_qkv::et
