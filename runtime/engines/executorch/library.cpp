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
constexpr const char* kRemedy =
    "; install the Python package executorch and then edge-qkv once more from its sources (pip install "
    "--force-reinstall --no-deps .), or build with -DEDGE_QKV_EXECUTORCH=ON";

[[noreturn]] void refuse(const std::string& why) {
  throw Error(EQKV_ENGINE_MISSING, "The ExecuTorch engine cannot be opened: " + why + kRemedy + ".");
}

// Of the file that this function is in, with a slash at its end; or empty.
std::string own_directory() {
  Dl_info info = {};
  if (dladdr(reinterpret_cast<const void*>(&own_directory), &info) == 0 || !info.dli_fname) return "";
  const std::string file = info.dli_fname;
  return file.substr(0, file.rfind('/') + 1);
}

}  // namespace

const Plugin& open_plugin(const std::string& path) {
  const char* variable = std::getenv("EDGE_QKV_EXECUTORCH");
  const std::string chosen = !path.empty() ? path : variable ? variable : own_directory() + kName;
  if (access(chosen.c_str(), F_OK) != 0) {
    refuse("edge-qkv was built where there was no ExecuTorch (there is no " + chosen + ")");
  }
  void* handle = dlopen(chosen.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (!handle) {
    const char* why = dlerror();
    refuse(why ? why : chosen);
  }
  const auto function = reinterpret_cast<const Plugin* (*)()>(dlsym(handle, kPluginFunction));
  if (!function) refuse(chosen + " is another library");
  const Plugin* plugin = function();
  if (plugin->interface != kPluginInterface)
    refuse(chosen + " was built by another version of edge-qkv");
  return *plugin;
}

}  // namespace edge_qkv::et
