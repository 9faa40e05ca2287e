// The reader of ONNX metadata against files that lie about themselves, and what they describe.
#include "engines/onnxruntime/onnx_file.h"

#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>

#include "descriptions.h"
#include "engines/onnxruntime/model_file.h"
#include "test.h"

using namespace edge_qkv;

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
         bytes_field(7, std::string(300, '\xff')) + entry(kDescriptionKey, "22") +
         entry("foreign", "x") + entry(kFingerprintKey, "abc") + varint(90 << 3 | 1) +
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

FileMetadata read(const std::string& content) { return ort::read_onnx_file(File(content).path()); }

void refused(const std::string& content, const std::string& words) {
  EXPECT_ERROR(EQKV_BAD_PACKAGE, words, read(content));
}

}  // namespace

TEST(metadata, "our metadata is read, in any place and past fields that are not ours") {
  const FileMetadata found = read(sound());
  EXPECT(found.texts.size() == 2);
  EXPECT(found.texts.at(kDescriptionKey) == "22" && found.texts.at(kFingerprintKey) == "abc");
  EXPECT(found.bytes == sound().size());
  const FileMetadata first = read(entry(kFingerprintKey, "1") + bytes_field(7, "g"));
  EXPECT(first.texts.size() == 1 && first.texts.at(kFingerprintKey) == "1");
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
      for (const auto& item : read(whole.substr(0, length)).texts) {
        EXPECT(item.second == "22" || item.second == "abc");
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
      EXPECT(read(damaged).texts.size() <= 2);
    } catch (const Error& error) {
      EXPECT(error.status() == EQKV_BAD_PACKAGE);
    }
  }
}

TEST(attacks, "lengths, numbers and types that lie are refused") {
  refused("", "no graph");
  refused("PK\3\4 not a model at all", "whole ONNX file");
  refused(entry(kDescriptionKey, "1"), "no graph");
  refused(varint(7 << 3 | 2) + varint(UINT64_MAX), "beyond its end");
  refused(varint(7 << 3 | 2) + varint(uint64_t{1} << 62) + "graph", "beyond its end");
  refused(std::string(11, '\xff'), "too long");
  refused(std::string(9, '\xff') + "\x7f", "too long");
  refused(varint(0 << 3 | 2) + varint(0), "no valid number");
  refused(varint((uint64_t{1} << 40) << 3), "no valid number");
  for (const int type : {3, 4, 6, 7}) refused(varint(1 << 3 | type), "no valid type");
  refused(varint(1 << 3 | 1) + "1234567", "ends inside a field");
  // An entry whose value claims to reach beyond the entry, into what follows.
  const std::string inner = bytes_field(1, kDescriptionKey) + varint(2 << 3 | 2) + varint(50);
  refused(bytes_field(7, "g") + bytes_field(14, inner) + std::string(100, 'x'), "beyond its end");
  refused(bytes_field(7, "g") + entry(kDescriptionKey, "1") + entry(kDescriptionKey, "2"), "twice");
}

TEST(absurd, "an entry of megabytes is skipped, the longest description is read") {
  EXPECT(read(bytes_field(7, "g") + entry(kDescriptionKey, std::string(1 << 22, 'x'))).texts.empty());
  const std::string longest(1 << 16, 'x');
  EXPECT(read(bytes_field(7, "g") + entry(kDescriptionKey, longest)).texts.at(kDescriptionKey) ==
         longest);
  std::string many = bytes_field(7, "g");
  for (int i = 0; i < 2000; ++i) many += entry("edge_qkv." + std::to_string(i), "1");
  EXPECT(read(many).texts.empty());
}

TEST(described, "the two texts of an ONNX file say all that is known before it is loaded") {
  const std::string digits(64, 'a'), graph = bytes_field(7, "g");
  const auto describe = [](const std::string& content) {
    const File file(content);
    const ModelInfo info = ort::describe_onnx(file.path());
    EXPECT(info.path == file.path() && std::string(info.engine) == "onnxruntime" && !info.packed);
    EXPECT(info.file_bytes == content.size());
    return info;
  };
  const auto content = [&](const std::string& text) {
    return graph + entry(kDescriptionKey, text) + entry(kFingerprintKey, digits);
  };
  const ModelInfo info = describe(content(test::shared_rows("int8")));
  EXPECT(info.text == test::shared_rows("int8") && info.fingerprint == digits);
  EXPECT(info.description.layers() == 6 && info.layout.type == CacheType::kInt8);
  const ort::GraphNames names = ort::graph_names(info);
  EXPECT((names.inputs == std::vector<std::string>{"input_ids", "past", "logit_rows", "kv.0",
                                                   "kv_scale.0", "key.1", "value.1", "key_scale.1",
                                                   "value_scale.1", "kv.2", "kv_scale.2"}));
  EXPECT(names.outputs.front() == "logits" && names.outputs.back() == "kv_scale_out.2" &&
         names.outputs.size() == names.inputs.size() - 2);
  const auto refuses = [&](const std::string& bytes, const std::string& words) {
    const File file(bytes);
    EXPECT_ERROR(EQKV_BAD_PACKAGE, file.path() + ": " + words, ort::describe_onnx(file.path()));
  };
  refuses(graph,
          "is no model of edge-qkv, or was written by an older one: it has no metadata "
          "edge_qkv.description");
  refuses(graph + entry(kDescriptionKey, test::uniform()), "is no model of edge-qkv, or was");
  refuses(content("format 2\n"), "was written by an older edge-qkv");
  for (const std::string& bad : {std::string(), digits.substr(1), digits + "a", std::string(64, 'A')}) {
    refuses(graph + entry(kDescriptionKey, test::uniform()) + entry(kFingerprintKey, bad),
            "its metadata edge_qkv.fingerprint is not 64 hexadecimal digits");
  }
}

TEST(missing, "a file that is not there is named") {
  EXPECT_ERROR(EQKV_BAD_PACKAGE, "/nowhere/model.onnx: cannot be read",
               ort::read_onnx_file("/nowhere/model.onnx"));
}
