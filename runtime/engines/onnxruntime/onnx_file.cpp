#include "onnx_file.h"

#include <sys/stat.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <memory>

#include "core/error.h"

namespace edge_qkv::ort {
namespace {

// Field numbers of onnx.proto.
constexpr uint64_t kGraph = 7, kMetadata = 14;  // of ModelProto
constexpr uint64_t kKey = 1, kValue = 2;        // of StringStringEntryProto
// Wire types of protobuf.
constexpr int kVarint = 0, kFixed64 = 1, kBytes = 2, kFixed32 = 5;

// A key and a value; what is longer is none of ours and is not read into memory.
constexpr uint64_t kMostEntryBytes = kMostMetadataBytes + 64;
// The size of a protobuf is an int.
constexpr uint64_t kMostFileBytes = (uint64_t{1} << 31) - 1;

// A stretch of protobuf: fields until `end`. Positions are checked before a byte is read.
class Walker {
 public:
  Walker(const std::string& path, FILE* file, uint64_t bytes) : path_(path), file_(file), end_(bytes) {}

  [[noreturn]] void refuse(const char* why) const {
    throw Error(EQKV_BAD_PACKAGE,
                path_ + ": is not a whole ONNX file (" + why + "); export the model again.");
  }

  bool more() const { return at_ < end_; }

  // The next field's number and, where its content has a length, that; what has none is skipped.
  uint64_t field(uint64_t* length) {
    const uint64_t tag = varint();
    if (tag >> 3 == 0 || tag >> 32 != 0) refuse("a field has no valid number");
    *length = 0;
    switch (static_cast<int>(tag & 7)) {
      case kVarint:
        varint();
        break;
      case kFixed64:
        skip(8);
        break;
      case kFixed32:
        skip(4);
        break;
      case kBytes:
        *length = varint();
        if (*length > end_ - at_) refuse("a field reaches beyond its end");
        break;
      default:
        refuse("a field has no valid type");
    }
    return tag >> 3;
  }

  void skip(uint64_t bytes) {
    if (bytes > end_ - at_) refuse("it ends inside a field");
    // kMostFileBytes fits a long, where that has 32 bits.
    if (std::fseek(file_, static_cast<long>(bytes), SEEK_CUR) != 0) refuse(std::strerror(errno));
    at_ += bytes;
  }

  std::string text(uint64_t bytes) {
    std::string out(static_cast<size_t>(bytes), '\0');
    if (bytes > end_ - at_ || std::fread(&out[0], 1, out.size(), file_) != out.size()) {
      refuse("it ends inside a field");
    }
    at_ += bytes;
    return out;
  }

  // Reads what lies in the next `bytes`, a message inside this one, with function(*this).
  template <class Function>
  void inside(uint64_t bytes, Function function) {
    const uint64_t outer = end_;
    end_ = at_ + bytes;
    while (more()) function();
    end_ = outer;
  }

 private:
  uint64_t varint() {
    uint64_t value = 0;
    for (int shift = 0; shift < 64; shift += 7) {
      const int byte = at_ < end_ ? std::getc(file_) : EOF;
      if (byte == EOF) refuse("it ends inside a number");
      ++at_;
      if (shift == 63 && byte > 1) break;
      value |= static_cast<uint64_t>(byte & 0x7f) << shift;
      if (byte < 0x80) return value;
    }
    refuse("a number is too long");
  }

  const std::string& path_;
  FILE* const file_;
  uint64_t at_ = 0;
  uint64_t end_;
};

void read_entry(Walker& walker, uint64_t bytes, std::map<std::string, std::string>* texts) {
  if (bytes > kMostEntryBytes) return walker.skip(bytes);
  std::string key, value;
  walker.inside(bytes, [&] {
    uint64_t length = 0;
    const uint64_t number = walker.field(&length);
    if (number == kKey) {
      key = walker.text(length);
    } else if (number == kValue) {
      value = walker.text(length);
    } else {
      walker.skip(length);
    }
  });
  if (is_metadata(key) && !texts->emplace(key, value).second) {
    walker.refuse("its metadata names a key twice");
  }
}

}  // namespace

FileMetadata read_onnx_file(const std::string& path) {
  struct stat status = {};
  const std::unique_ptr<FILE, int (*)(FILE*)> file(std::fopen(path.c_str(), "rbe"), std::fclose);
  if (!file || fstat(fileno(file.get()), &status) != 0) {
    throw Error(EQKV_BAD_PACKAGE, path + ": cannot be read (" + std::strerror(errno) + ").");
  }
  FileMetadata found;
  found.bytes = static_cast<uint64_t>(status.st_size);
  Walker walker(path, file.get(), found.bytes);
  if (found.bytes > kMostFileBytes) walker.refuse("it has more than 2 GiB");
  bool graph = false;
  while (walker.more()) {
    uint64_t length = 0;
    const uint64_t number = walker.field(&length);
    if (number == kMetadata) {
      read_entry(walker, length, &found.texts);
    } else {
      graph = graph || number == kGraph;
      walker.skip(length);
    }
  }
  if (!graph) walker.refuse("it has no graph");
  if (stat((path + ".data").c_str(), &status) == 0) found.bytes += static_cast<uint64_t>(status.st_size);
  return found;
}

}  // namespace edge_qkv::ort
