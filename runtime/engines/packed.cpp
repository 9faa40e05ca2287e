#include "packed.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>

#include "core/checksum.h"
#include "core/error.h"
#include "core/file.h"
#include "processor.h"

namespace edge_qkv {
namespace {

constexpr const char* kMarker = "packed.txt";
constexpr const char* kUnfinished = ".packing-";  // beginning of the name of a directory being written
// Engines believe what a file says of itself, and where: an index at its end (XNNPACK) or a graph (ONNX
// Runtime). That much is compared on every load; the weights before it can be wrong and lead nowhere.
constexpr uint64_t kCheckedBytes = 1 << 20;

[[noreturn]] void refuse(const std::string& directory, const std::string& why) {
  throw Error(EQKV_INVALID_ARGUMENT, directory + ": the packed weights cannot be written there (" + why +
                                         "); choose another directory or load the model without.");
}

std::string hexadecimal(uint64_t value) {
  char digits[17];
  std::snprintf(digits, sizeof digits, "%016llx", static_cast<unsigned long long>(value));
  return digits;
}

// FNV-1a: names a directory; what it stands for is compared in full.
std::string hash(const std::string& text) {
  uint64_t value = 0xcbf29ce484222325;
  for (const unsigned char c : text) value = (value ^ c) * 0x100000001b3;
  return hexadecimal(value);
}

// Size of the file, and the checksum of its end; empty for what is no file or cannot be read.
std::string size_and_sum(const std::string& path) {
  struct stat status = {};
  const File file(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));  // of a pipe, without waiting
  if (!file || fstat(file.get(), &status) != 0 || !S_ISREG(status.st_mode)) return "";
  const uint64_t bytes = static_cast<uint64_t>(status.st_size), checked = std::min(bytes, kCheckedBytes);
  std::string end(checked, '\0');
  if (!read_all(file, &end[0], checked, bytes - checked)) return "";
  Checksum sum;
  sum.add(end.data(), end.size());
  return std::to_string(bytes) + " " + hexadecimal(sum.value());
}

std::string read_small(const std::string& path) {
  const File file(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  char buffer[4096];
  const ssize_t bytes = file ? read(file.get(), buffer, sizeof buffer) : 0;
  return bytes > 0 ? std::string(buffer, static_cast<size_t>(bytes)) : "";
}

bool on_disk(const std::string& path) {
  const File file(open(path.c_str(), O_RDONLY | O_CLOEXEC));
  return file && fsync(file.get()) == 0;
}

// Removes a directory of this user's and the files in it. Of a link, which may lead anywhere, only the
// link; anything else is left alone.
void remove_folder(const std::string& path) {
  struct stat status = {};
  if (lstat(path.c_str(), &status) == 0 && S_ISLNK(status.st_mode)) unlink(path.c_str());
  const int descriptor = open(path.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
  if (descriptor < 0) return;
  DIR* folder = fdopendir(descriptor);  // owns the descriptor
  if (!folder) {
    close(descriptor);
    return;
  }
  const bool ours = fstat(descriptor, &status) == 0 && status.st_uid == geteuid();
  while (const dirent* entry = ours ? readdir(folder) : nullptr) {
    if (unlinkat(descriptor, entry->d_name, 0) != 0) unlinkat(descriptor, entry->d_name, AT_REMOVEDIR);
  }
  closedir(folder);
  if (ours) rmdir(path.c_str());
}

// What an interrupted process left. Only with the lock held.
void remove_unfinished(const std::string& directory) {
  DIR* folder = opendir(directory.c_str());
  if (!folder) return;
  while (const dirent* entry = readdir(folder)) {
    const std::string name = entry->d_name;
    if (name.rfind(kUnfinished, 0) == 0) remove_folder(directory + "/" + name);
  }
  closedir(folder);
}

// A new directory that is removed again, whatever is in it by then.
class TemporaryFolder {
 public:
  explicit TemporaryFolder(const std::string& directory)
      : path_(directory + "/" + kUnfinished + "XXXXXX") {
    if (!mkdtemp(&path_[0])) refuse(directory, std::strerror(errno));
  }
  ~TemporaryFolder() { remove_folder(path_); }
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

// The beginning of the name of a model's directories.
std::string name_of(const ModelInfo& info) { return "packed-" + info.fingerprint.substr(0, 16) + "-"; }

void make_directories(const std::string& path) {
  for (size_t slash = path.find('/', 1);; slash = path.find('/', slash + 1)) {
    const std::string part = path.substr(0, slash);
    if (mkdir(part.c_str(), 0755) != 0 && errno != EEXIST) refuse(path, std::strerror(errno));
    if (slash == std::string::npos) return;
  }
}

}  // namespace

PackedWeights::PackedWeights(const std::string& directory, const ModelInfo& info,
                             const std::string& engine, const std::vector<std::string>& files)
    : directory_(directory),
      files_(files),
      maker_("edge-qkv packed weights 3\nmodel " + info.fingerprint + "\n" + engine + "\nprocessor " +
             processor_name() + "\n"),
      final_(directory + "/" + name_of(info) + hash(maker_)) {}

bool PackedWeights::any(const std::string& directory, const ModelInfo& info) {
  const std::unique_ptr<DIR, int (*)(DIR*)> folder(opendir(directory.c_str()), closedir);
  while (const dirent* entry = folder ? readdir(folder.get()) : nullptr) {
    if (std::string(entry->d_name).rfind(name_of(info), 0) == 0) return true;
  }
  return false;
}

// The marker that would describe `folder` as it is; empty where a file is missing.
std::string PackedWeights::described(const std::string& folder) const {
  std::string text = maker_;
  for (const std::string& name : files_) {
    const std::string entry = size_and_sum(folder + "/" + name);
    if (entry.empty()) return "";
    text += name + " " + entry + "\n";
  }
  return text;
}

std::string PackedWeights::find() const {
  const std::string marker = described(final_);
  const bool whole = !marker.empty() && read_small(final_ + "/" + kMarker) == marker;
  return whole ? final_ + "/" + files_.front() : "";
}

void PackedWeights::write_marker(const std::string& folder) const {
  const std::string text = described(folder), path = folder + "/" + kMarker;
  if (text.empty()) refuse(directory_, "the engine wrote none");
  FILE* file = std::fopen(path.c_str(), "we");
  bool good = file && std::fwrite(text.data(), 1, text.size(), file) == text.size();
  if (file) good = std::fclose(file) == 0 && good;
  // Other users' processes may map them too.
  for (const std::string& name : files_) {
    good = good && chmod((folder + "/" + name).c_str(), 0644) == 0 && on_disk(folder + "/" + name);
  }
  good = good && on_disk(path) && chmod(folder.c_str(), 0755) == 0;
  if (!good || !on_disk(folder)) refuse(directory_, std::strerror(errno));
}

void PackedWeights::make(uint64_t bytes_needed,
                         const std::function<void(const std::string& path)>& write) const {
  if (!find().empty()) return;
  make_directories(directory_);
  const File lock(open((directory_ + "/.lock").c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644));
  if (!lock) refuse(directory_, std::strerror(errno));
  while (flock(lock.get(), LOCK_EX) != 0) {
    if (errno != EINTR) refuse(directory_, std::strerror(errno));
  }
  if (!find().empty()) return;  // another process was first
  remove_unfinished(directory_);
  struct statvfs disk = {};
  if (statvfs(directory_.c_str(), &disk) == 0) {
    const uint64_t free = static_cast<uint64_t>(disk.f_bavail) * disk.f_frsize;
    if (free < bytes_needed) {
      refuse(directory_, std::to_string(free) + " bytes are free and about " +
                             std::to_string(bytes_needed) + " are needed");
    }
  }
  const TemporaryFolder folder(directory_);
  try {
    write(folder.path() + "/" + files_.front());
  } catch (const Error& error) {
    if (error.status() != EQKV_ENGINE_FAILED) throw;
    std::string reason = error.what();
    reason.pop_back();  // the full stop
    refuse(directory_, reason);
  }
  write_marker(folder.path());
  if (access(final_.c_str(), F_OK) == 0) {  // damaged, or `find` would have found it
    const TemporaryFolder aside(directory_);
    std::rename(final_.c_str(), aside.path().c_str());
  }
  if (std::rename(folder.path().c_str(), final_.c_str()) != 0) refuse(directory_, std::strerror(errno));
  on_disk(directory_);
}

}  // namespace edge_qkv
