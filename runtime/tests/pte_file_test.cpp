// The reader of ExecuTorch programs, and of the metadata
// in them, against files that lie about themselves.
#include "engines/executorch/pte_file.h"

#include <unistd.h>

#include <cstdint>
#include <cstring>
#include <iterator>
#include <map>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "descriptions.h"
#include "engines/executorch/model_file.h"
#include "temporary.h"
#include "test.h"

using namespace edge_qkv;
using test::TemporaryDirectory;
using test::write_file;

namespace {

constexpr uint32_t kAbsent = UINT32_MAX;                // of a table's fields
constexpr uint32_t kString = 6;                         // in EValue's union
constexpr uint32_t kKernelCall = 1, kDelegateCall = 2;  // in Instruction's
constexpr size_t kProgramSize = 16, kSegmentBase = 24, kSegmentBytes = 32;
const std::string kWeights(64, '\xee');

template <class Number>
void put(std::string* bytes, size_t at, Number value) {
  std::memcpy(&(*bytes)[at], &value, sizeof value);  // little-endian, as the tests' hosts are
}

std::string with(std::string bytes, size_t at, uint32_t value) {
  put(&bytes, at, value);
  return bytes;
}

std::string with_long(std::string bytes, size_t at, uint64_t value) {
  put(&bytes, at, value);
  return bytes;
}

// A flatbuffer that is written from its root on: what an offset points at comes after it.
class Writer {
 public:
  std::string bytes;

  size_t word(uint32_t value) {
    bytes.append(4, '\0');
    put(&bytes, bytes.size() - 4, value);
    return bytes.size() - 4;
  }

  // A table of 4-byte fields, after its vtable. Field i is 4 + 4 * i after what is returned.
  size_t table(const std::vector<uint32_t>& fields) {
    const size_t vtable = bytes.size(), vtable_size = (4 + 2 * fields.size() + 3) / 4 * 4;
    bytes.append(vtable_size, '\0');
    put(&bytes, vtable, static_cast<uint16_t>(4 + 2 * fields.size()));
    put(&bytes, vtable + 2, static_cast<uint16_t>(4 + 4 * fields.size()));
    const size_t at = word(static_cast<uint32_t>(vtable_size));
    for (size_t i = 0; i < fields.size(); ++i) {
      if (fields[i] != kAbsent) put(&bytes, vtable + 4 + 2 * i, static_cast<uint16_t>(4 + 4 * i));
      word(fields[i]);
    }
    return at;
  }

  size_t vector(const std::vector<uint32_t>& elements) {
    const size_t at = word(static_cast<uint32_t>(elements.size()));
    for (const uint32_t element : elements) word(element);
    return at;
  }

  size_t text(const std::string& content) {
    const size_t at = word(static_cast<uint32_t>(content.size()));
    bytes += content + std::string(4 - content.size() % 4, '\0');
    return at;
  }

  void point(size_t from, size_t to) { put(&bytes, from, static_cast<uint32_t>(to - from)); }
};

// The instructions of a method at `plan`: a call of the first of 2 operators, one of the second, and one
// of a delegate.
void write_calls(Writer* out, size_t plan, std::map<std::string, size_t>* places) {
  std::map<std::string, size_t>& at = *places;
  out->point(plan + 28, at["operator count"] = out->vector({0, 0}));
  for (size_t i = 0; i < 2; ++i) {
    const size_t named = at["operator"] = out->table({0});
    out->point(at["operator count"] + 4 + 4 * i, named);
    out->point(named + 4, out->text("aten::add"));
  }
  out->point(plan + 24, at["chain count"] = out->vector({0}));
  const size_t chain = out->table({kAbsent, kAbsent, 0});
  out->point(at["chain count"] + 4, chain);
  at["instructions"] = chain + 12;
  out->point(at["instructions"], at["instruction count"] = out->vector({0, 0, 0}));
  const uint32_t operators[] = {kAbsent, 1};  // 0 is the default, which is not written
  for (size_t i = 0; i < 3; ++i) {
    const size_t instruction = out->table({i < 2 ? kKernelCall : kDelegateCall, 0});
    out->point(at["instruction count"] + 4 + 4 * i, instruction);
    const size_t call = out->table({i < 2 ? operators[i] : 7});
    out->point(instruction + 8, call);
    if (i == 1) at["call type"] = instruction + 4, at["call"] = instruction + 8, at["called"] = call + 4;
  }
}

using Methods = std::vector<std::pair<std::string, std::string>>;
// Where the parts of the last method lie; 4-byte words all.
using Places = std::map<std::string, size_t>;

// A program whose methods each return a text, with a segment of weights behind it.
std::string program(const Methods& methods, Places* places = nullptr) {
  Places unwanted;
  Places& at = places ? *places : unwanted;
  Writer out;
  out.bytes = std::string("\0\0\0\0ET12eh00\x20\0\0\0", 16) + std::string(24, '\0');
  at["program"] = out.table({0, 0});
  out.point(0, at["program"]);
  at["plans"] = at["program"] + 8;
  at["plan count"] = out.vector(std::vector<uint32_t>(methods.size()));
  out.point(at["plans"], at["plan count"]);
  for (size_t i = 0; i < methods.size(); ++i) {
    at["plan offset"] = at["plan count"] + 4 + 4 * i;
    const size_t plan = at["plan"] = out.table({0, kAbsent, 0, kAbsent, 0, 0, 0});
    out.point(at["plan offset"], plan);
    if (methods[i].first == "forward") write_calls(&out, plan, &at);
    at["name"] = plan + 4;
    out.point(plan + 4, at["name length"] = out.text(methods[i].first));
    at["values"] = plan + 12;
    out.point(plan + 12, at["value count"] = out.vector({0}));
    at["outputs"] = plan + 20;
    out.point(plan + 20, at["output count"] = out.vector({0}));
    at["output"] = at["output count"] + 4;
    at["value offset"] = at["value count"] + 4;
    at["value"] = out.table({kString, 0});
    out.point(at["value offset"], at["value"]);
    at["type"] = at["value"] + 4;
    at["string offset"] = at["value"] + 8;
    at["string"] = out.table({0});
    out.point(at["string offset"], at["string"]);
    at["text"] = at["string"] + 4;
    out.point(at["text"], at["text length"] = out.text(methods[i].second));
  }
  put(&out.bytes, kProgramSize, uint64_t{out.bytes.size()});
  put(&out.bytes, kSegmentBase, uint64_t{out.bytes.size()});
  put(&out.bytes, kSegmentBytes, uint64_t{kWeights.size()});
  return out.bytes + kWeights;
}

std::string sound(Places* places = nullptr) {
  return program({{"forward", ""}, {"foreign", "x"}, {kFingerprintKey, ""}, {kDescriptionKey, "22"}},
                 places);
}

// Where the vtable of the table at at[table] lies.
size_t vtable(const std::string& bytes, const Places& at, const std::string& table) {
  int32_t back = 0;
  std::memcpy(&back, &bytes[at.at(table)], sizeof back);
  return at.at(table) - static_cast<size_t>(back);
}

FileMetadata read(const std::string& content) {
  const TemporaryDirectory directory;
  write_file(directory / "model.pte", content);
  return et::read_pte_file(directory / "model.pte");
}

void refused(const std::string& content, const std::string& words) {
  EXPECT_ERROR(EQKV_BAD_PACKAGE, words, read(content));
}

std::string fixed(const std::string& text) {
  return test::replaced(test::replaced(text, "cache_rows 0", "cache_rows 128"), "prefill_chunk 0",
                        "prefill_chunk 64");
}

Methods described(const std::string& text) {
  return {{"forward", ""}, {kDescriptionKey, text}, {kFingerprintKey, std::string(64, 'a')}};
}

ModelInfo describe(const Methods& methods) {
  const TemporaryDirectory directory;
  write_file(directory / "model.pte", program(methods));
  return et::describe_pte(directory / "model.pte");
}

}  // namespace

TEST(pte_metadata,
     "what our methods of an ExecuTorch program return is read, and nothing of the others") {
  const FileMetadata found = read(sound());
  EXPECT(found.texts.size() == 2);
  EXPECT(found.texts.at(kDescriptionKey) == "22" && found.texts.at(kFingerprintKey).empty());
  EXPECT(found.bytes == sound().size());
}

TEST(pte_description, "an ExecuTorch program is described as an ONNX model is, with its fixed sizes") {
  const Methods methods = described(fixed(test::local_and_global()));
  const ModelInfo info = describe(methods);
  EXPECT(std::string(info.engine) == "executorch" && info.fingerprint == std::string(64, 'a'));
  EXPECT(info.file_bytes == program(methods).size());
  EXPECT(info.description.layers() == 6 && info.layout.tensors.size() == 6);
  EXPECT(info.description.cache_rows == 128 && info.description.prefill_chunk == 64);
}

TEST(pte_bad_description,
     "a text that an ExecuTorch program lacks is named, and sizes that it must fix") {
  for (size_t i = 1; i < 3; ++i) {
    Methods methods = described(fixed(test::uniform()));
    const std::string key = methods[i].first;
    methods.erase(methods.begin() + static_cast<std::ptrdiff_t>(i));
    EXPECT_ERROR(EQKV_BAD_PACKAGE, "it has no metadata " + key + ";", describe(methods));
  }
  for (const char* line : {"cache_rows 128", "prefill_chunk 64"}) {
    const std::string name = std::string(line).substr(0, std::string(line).find(' '));
    EXPECT_ERROR(EQKV_BAD_PACKAGE, "which a program fixes",
                 describe(described(test::replaced(fixed(test::uniform()), line, name + " 0"))));
  }
  EXPECT_ERROR(EQKV_BAD_PACKAGE, "older edge-qkv", describe(described("format 2\n")));
}

TEST(pte_truncated, "cut at any byte, an ExecuTorch program is refused") {
  const std::string whole = sound();
  for (size_t length = 0; length < whole.size(); ++length) {
    refused(whole.substr(0, length), "is not a whole ExecuTorch program");
  }
  EXPECT(read(whole + "more").texts.size() == 2);  // what follows the weights is nobody's
}

TEST(pte_flipped, "any flipped bit of an ExecuTorch program gives an answer or one sentence") {
  const std::string whole = sound();
  const TemporaryDirectory directory;
  for (size_t bit = 0; bit < whole.size() * 8; ++bit) {
    std::string damaged = whole;
    damaged[bit / 8] = static_cast<char>(damaged[bit / 8] ^ (1 << bit % 8));
    write_file(directory / "model.pte", damaged);
    try {
      EXPECT(et::read_pte_file(directory / "model.pte").texts.size() <= 2);
    } catch (const Error& error) {
      EXPECT(error.status() == EQKV_BAD_PACKAGE);
      EXPECT(std::string(error.what()).find("export the model again.") != std::string::npos);
    }
  }
}

TEST(pte_damaged,
     "random words in place of those of an ExecuTorch program give an answer or one sentence") {
  std::mt19937 random(7);
  const std::string whole = sound();
  const TemporaryDirectory directory;
  const uint32_t interesting[] = {0,          1,          3,          4,          0xff,      0xffff,
                                  0x7fffffff, 0x80000000, 0xfffffffc, 0xfffffffe, 0xffffffff};
  for (int i = 0; i < 10000; ++i) {
    std::string damaged = whole;
    for (uint32_t words = 1 + random() % 3; words > 0; --words) {
      const uint32_t value = random() % 2 ? interesting[random() % std::size(interesting)]
                                          : random() % static_cast<uint32_t>(whole.size());
      put(&damaged, random() % (whole.size() - 3), value);
    }
    write_file(directory / "model.pte", damaged);
    try {
      EXPECT(et::read_pte_file(directory / "model.pte").texts.size() <= 2);
    } catch (const Error& error) {
      EXPECT(error.status() == EQKV_BAD_PACKAGE);
    }
  }
}

TEST(pte_header, "an ExecuTorch program's header that lies is refused") {
  const std::string whole = sound();
  const uint64_t size = whole.size(), program_bytes = size - kWeights.size();
  refused("", "ends inside its header");
  refused("PK\3\4" + std::string(100, 'x'), "of something else");
  refused(with(whole, 8, 0), "no extended header");
  refused(with(whole, 12, 24), "no extended header");
  for (const uint64_t huge : {size + 1, uint64_t{1} << 62, UINT64_MAX, UINT64_MAX - size + 1}) {
    refused(with_long(whole, kProgramSize, huge), "cut off");
    refused(with_long(whole, kSegmentBase, huge), "cut off");
    refused(with_long(whole, kSegmentBytes, huge), "cut off");
  }
  refused(with_long(whole, kSegmentBase, program_bytes - 1), "contradicts itself");
  refused(with_long(whole, kSegmentBase, 0), "contradicts itself");
  for (const uint64_t small : {uint64_t{0}, uint64_t{40}, program_bytes / 2}) {
    refused(with_long(whole, kProgramSize, small), "beyond its end");
  }
  // No weights: what is left says so.
  const std::string none = with_long(with_long(whole, kSegmentBase, 0), kSegmentBytes, 0);
  EXPECT(read(none.substr(0, program_bytes)).texts.at(kDescriptionKey) == "22");
}

TEST(pte_offsets, "offsets of an ExecuTorch program that lead outside or at themselves are refused") {
  Places at;
  const std::string whole = sound(&at);
  const uint32_t size = static_cast<uint32_t>(whole.size());
  at["root"] = 0;
  for (const char* place : {"root", "plans", "plan offset", "name", "values", "outputs", "value offset",
                            "string offset", "text"}) {
    for (const uint32_t self : {0u, 1u, 3u}) refused(with(whole, at[place], self), "at itself");
    for (const uint32_t outside : {size - static_cast<uint32_t>(at[place]), size, 0x7fffffffu,
                                   0x80000000u, 0xffffffffu, 0xfffffffcu}) {
      refused(with(whole, at[place], outside), "beyond its end");
    }
  }
}

TEST(pte_vtables,
     "vtables of an ExecuTorch program that are outside it, overlap their table or lie are refused") {
  Places at;
  const std::string whole = sound(&at);
  for (const char* table : {"program", "plan", "value", "string"}) {
    const uint32_t here = static_cast<uint32_t>(at[table]);
    refused(with(whole, here, here + 1), "before its start");
    refused(with(whole, here, 0x7fffffff), "before its start");
    refused(with(whole, here, 0x80000000), "beyond its end");
    refused(with(whole, here, here - static_cast<uint32_t>(whole.size())), "beyond its end");
    refused(with(whole, here, 0), "no valid size");  // the table is its own vtable
    // The table's first word as a vtable that overlaps it: 65535 bytes of layout.
    refused(with(whole, here, 0xffffffff), "no valid size");

    const size_t layout = vtable(whole, at, table);
    const auto sizes = [&](uint32_t vtable_size, uint32_t table_size) {
      return with(whole, layout, vtable_size | table_size << 16);
    };
    for (const uint32_t bad : {0u, 2u, 5u, 0xfffeu}) refused(sizes(bad, 8), "no valid size");
    for (const uint32_t bad : {0u, 3u, 0xffffu}) refused(sizes(4, bad), "no valid size");
    refused(sizes(4, 8), "lacks a field");
    // Every field in the table's own offset to its vtable, then beyond the table.
    for (const uint16_t bad : {uint16_t{3}, uint16_t{0x40}, uint16_t{0xffff}}) {
      std::string damaged = whole;
      const size_t fields = std::string(table) == "plan" ? 5 : std::string(table) == "string" ? 1 : 2;
      for (size_t i = 0; i < fields; ++i) put(&damaged, layout + 4 + 2 * i, bad);
      refused(damaged, "outside its table");
    }
  }
  // Two tables that share a vtable are what every writer makes.
  const uint32_t shared = static_cast<uint32_t>(at["value"] - vtable(whole, at, "program"));
  EXPECT(read(with(whole, at["value"], shared)).texts.at(kDescriptionKey) == "22");
}

TEST(pte_lengths, "lengths of an ExecuTorch program's vectors and texts that lie are refused") {
  Places at;
  const std::string whole = sound(&at);
  for (const char* count : {"plan count", "value count", "output count"}) {
    for (const uint32_t huge :
         {0x10000000u, 0x3fffffffu, 0x40000000u, 0x7fffffffu, 0x80000000u, 0xffffffffu}) {
      refused(with(whole, at[count], huge), "vector reaches beyond its end");
    }
  }
  refused(with(whole, at["output count"], 0), "does not return one value");
  refused(with(whole, at["output count"], 2), "does not return one value");
  refused(with(whole, at["value count"], 0), "does not return one value");
  for (const uint32_t output : {1u, 0x7fffffffu, 0x80000000u, 0xffffffffu}) {
    refused(with(whole, at["output"], output), "does not return one value");
  }
  for (const uint32_t type : {0u, 2u, 5u, 7u, 255u}) {
    refused(with(whole, at["type"], type), "returns no text");
  }
  for (const char* length : {"name length", "text length"}) {
    for (const uint32_t huge : {65537u, 0x7fffffffu, 0xffffffffu}) {
      refused(with(whole, at[length], huge), "text is too long");
    }
    refused(with(whole, at[length], 1), "no valid end");  // no zero behind it
  }
  refused(with(whole, at["text length"], 3), "no valid end");  // a zero inside it
  refused(with(whole, at["text length"], 4), "beyond its end");
  refused(with(whole, at["text length"] + 4, 0x20202020), "no valid end");
}

TEST(pte_calls, "an ExecuTorch program that calls what it does not name, or jumps, is refused") {
  Places at;
  const std::string good = sound(&at);
  for (const uint32_t other : {2u, 0x7fffffffu, 0xffffffffu}) {
    refused(with(good, at["called"], other), "an operator that it does not name");
  }
  refused(with(good, vtable(good, at, "operator"), 4 | 8 << 16), "lacks a field");
  refused(with(good, at["operator count"], 0x7fffffff), "beyond its end");
  refused(with(good, at["operator count"], 1), "an operator that it does not name");
  for (const uint32_t type : {0u, 3u, 4u, 5u, 255u}) {
    refused(with(good, at["call type"], type), "is no call");
  }
  refused(with(good, at["call"], 0x7fffffff), "beyond its end");
  refused(with(good, at["instructions"], 0xffffffff), "beyond its end");
  refused(with(good, at["instruction count"], 0x40000000), "beyond its end");
  refused(with(good, at["chain count"], 0), "one chain");
  refused(with(good, at["chain count"], 2), "one chain");
}

TEST(pte_methods, "an ExecuTorch program without forward, or with a method twice, is refused") {
  refused(program({}), "no method forward");
  refused(program({{kDescriptionKey, "22"}, {"Forward", ""}}), "no method forward");
  refused(program({{"forward", ""}, {kDescriptionKey, "1"}, {kDescriptionKey, "2"}}), "the same name");
  refused(program({{"forward", ""}, {"forward", ""}}), "the same name");
  Methods many(2000, {"forward", ""});
  refused(program(many), "too many methods");
  refused(program({{"forward", ""}, {std::string(5000, 'x'), ""}}), "too long");
  refused(program({{"forward", ""}, {kDescriptionKey, std::string(65537, 'x')}}), "too long");
  const std::string longest(65536, 'x');
  EXPECT(read(program({{"forward", ""}, {kDescriptionKey, longest}})).texts.at(kDescriptionKey) ==
         longest);
}

TEST(pte_absurd, "a terabyte of weights without blocks is described at once, of program is refused") {
  const TemporaryDirectory directory;
  const std::string path = directory / "model.pte", whole = sound();
  const uint64_t terabyte = uint64_t{1} << 40, program_bytes = whole.size() - kWeights.size();
  write_file(path, with_long(whole, kSegmentBytes, terabyte - program_bytes));
  if (truncate(path.c_str(), static_cast<off_t>(terabyte)) != 0) return;  // not on this file system
  EXPECT(et::read_pte_file(path).bytes == terabyte);
  write_file(path, with_long(with_long(whole, kSegmentBase, terabyte), kProgramSize, terabyte));
  EXPECT(truncate(path.c_str(), static_cast<off_t>(terabyte + kWeights.size())) == 0);
  EXPECT_ERROR(EQKV_BAD_PACKAGE, "more than 2 GiB before its weights", et::read_pte_file(path));
}

TEST(pte_missing, "an ExecuTorch program that is not there, or is a directory, is named") {
  EXPECT_ERROR(EQKV_BAD_PACKAGE, "/nowhere/model.pte: cannot be read",
               et::read_pte_file("/nowhere/model.pte"));
  const TemporaryDirectory directory;
  EXPECT_ERROR(EQKV_BAD_PACKAGE, directory.path(), et::read_pte_file(directory.path()));
}
