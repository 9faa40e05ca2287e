// The reader of ONNX metadata against files that lie about themselves.
#include "engines/onnxruntime/onnx_file.h"

#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>

#include "test.h"

using namespace edge_qkv;
using ort::OnnxFile;

namespace {

std::string varint(uint64_t value) {
  std::string out;
  for (; value >= 0x80; value >>= 7) out += static_cast<char>(value | 0x80);
  return out + static_cast<char>(value);
}

std::string bytes_field(uint64_t number, const std::string& content) {
  return varint(number << 3 | 2) + varint(content.size()) + content;
}

std::string entry(const std::string& key, const std::string& value) {
  return bytes_field(14, bytes_field(1, key) + bytes_field(2, value));
}

// ir_version, producer, a graph of 300 bytes, metadata, and fields of the other wire types.
std::string sound() {
  return varint(1 << 3) + varint(10) + bytes_field(2, "edge-qkv") +
         bytes_field(7, std::string(300, '\xff')) + entry("edge_qkv.layers", "22") +
         entry("foreign", "x") + entry("edge_qkv.cache_type", "fp16") + varint(90 << 3 | 1) +
         std::string(8, '\1') + varint(91 << 3 | 5) + std::string(4, '\1');
}

// A file with `content`, removed at the end.
class File {
 public:
  explicit File(const std::string& content) {
    const int handle = mkstemp(&path_[0]);
    FILE* file = fdopen(handle, "wb");
    std::fwrite(content.data(), 1, content.size(), file);
    std::fclose(file);
  }
  ~File() { std::remove(path_.c_str()); }
  const std::string& path() const { return path_; }

 private:
  std::string path_ = "/tmp/edge-qkv-onnx-XXXXXX";
};

OnnxFile read(const std::string& content) { return ort::read_onnx_file(File(content).path()); }

void refused(const std::string& content, const std::string& words) {
  EXPECT_ERROR(EQKV_BAD_PACKAGE, words, read(content));
}

}  // namespace

TEST(metadata, "our metadata is read, in any place and past fields that are not ours") {
  const OnnxFile found = read(sound());
  EXPECT(found.metadata.size() == 2);
  EXPECT(found.metadata.at("layers") == "22" && found.metadata.at("cache_type") == "fp16");
  EXPECT(found.bytes == sound().size());
  const OnnxFile first = read(entry("edge_qkv.a", "1") + bytes_field(7, "g"));
  EXPECT(first.metadata.at("a") == "1");
}

TEST(weights_beside, "weights beside the file count, their contents are not looked at") {
  const File file(sound());
  const std::string beside = file.path() + ".data";
  FILE* data = std::fopen(beside.c_str(), "wb");
  std::fclose(data);
  EXPECT(truncate(beside.c_str(), 1'000'000'000) == 0);  // no blocks: reading it would take time
  EXPECT(ort::read_onnx_file(file.path()).bytes == sound().size() + 1'000'000'000);
  std::remove(beside.c_str());
}

TEST(truncated, "cut at any byte, a file is refused or has lost whole entries at its end") {
  const std::string whole = sound();
  for (size_t length = 0; length < whole.size(); ++length) {
    try {
      for (const auto& item : read(whole.substr(0, length)).metadata) {
        EXPECT(item.second == "22" || item.second == "fp16");
      }
    } catch (const Error& error) {
      EXPECT(error.status() == EQKV_BAD_PACKAGE);
      EXPECT(std::string(error.what()).find("export the model again") != std::string::npos);
    }
  }
}

TEST(flipped, "any flipped bit gives an answer or one sentence") {
  const std::string whole = sound();
  for (size_t bit = 0; bit < whole.size() * 8; ++bit) {
    std::string damaged = whole;
    damaged[bit / 8] = static_cast<char>(damaged[bit / 8] ^ (1 << bit % 8));
    try {
      EXPECT(read(damaged).metadata.size() <= 3);
    } catch (const Error& error) {
      EXPECT(error.status() == EQKV_BAD_PACKAGE);
    }
  }
}

TEST(attacks, "lengths, numbers and types that lie are refused") {
  refused("", "no graph");
  refused("PK\3\4 not a model at all", "whole ONNX file");
  refused(entry("edge_qkv.a", "1"), "no graph");
  refused(varint(7 << 3 | 2) + varint(UINT64_MAX), "beyond its end");
  refused(varint(7 << 3 | 2) + varint(uint64_t{1} << 62) + "graph", "beyond its end");
  refused(std::string(11, '\xff'), "too long");
  refused(std::string(9, '\xff') + "\x7f", "too long");
  refused(varint(0 << 3 | 2) + varint(0), "no valid number");
  refused(varint((uint64_t{1} << 40) << 3), "no valid number");
  for (const int type : {3, 4, 6, 7}) refused(varint(1 << 3 | type), "no valid type");
  refused(varint(1 << 3 | 1) + "1234567", "ends inside a field");
  // An entry whose value claims to reach beyond the entry, into what follows.
  const std::string inner = bytes_field(1, "edge_qkv.a") + varint(2 << 3 | 2) + varint(50);
  refused(bytes_field(7, "g") + bytes_field(14, inner) + std::string(100, 'x'), "beyond its end");
  refused(bytes_field(7, "g") + entry("edge_qkv.a", "1") + entry("edge_qkv.a", "2"), "twice");
}

TEST(absurd, "an entry of megabytes is skipped and thousands of entries are refused") {
  EXPECT(read(bytes_field(7, "g") + entry("edge_qkv.a", std::string(1 << 22, 'x'))).metadata.empty());
  std::string many = bytes_field(7, "g");
  for (int i = 0; i < 2000; ++i) many += entry("edge_qkv." + std::to_string(i), "1");
  refused(many, "too many");
}

TEST(missing, "a file that is not there is named") {
  EXPECT_ERROR(EQKV_BAD_PACKAGE, "/nowhere/model.onnx: cannot be read",
               ort::read_onnx_file("/nowhere/model.onnx"));
}
