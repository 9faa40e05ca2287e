#include "pte_file.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <cerrno>
#include <cstring>
#include <set>

#include "core/error.h"
#include "core/file.h"

namespace edge_qkv::et {
namespace {

// The file: the offset of the root table, "ET" and two digits, the extended header, then the flatbuffer,
// of program_size bytes from the start of the file; the weights are in segments after it.
constexpr uint64_t kIdentifier = 4, kHeader = 8;
constexpr uint64_t kHeaderSize = 12, kProgramSize = 16, kSegmentBase = 24, kSegmentBytes = 32;
constexpr uint32_t kHeaderBytes = 32;

// Places of fields in the tables of program.fbs.
constexpr unsigned kPlans = 1;                            // of Program
constexpr unsigned kName = 0, kValues = 2, kOutputs = 4;  // of ExecutionPlan
constexpr unsigned kChains = 5, kOperators = 6;           // of it too
constexpr unsigned kInstructions = 2;                     // of Chain
constexpr unsigned kCallType = 0, kCall = 1;              // of Instruction, a union
constexpr unsigned kOperator = 0;                         // of KernelCall
constexpr unsigned kOperatorName = 0;                     // of Operator
constexpr unsigned kType = 0, kValue = 1;                 // of EValue, a union
constexpr unsigned kText = 0;                             // of String
constexpr uint8_t kString = 6;                            // of the types in EValue's union
constexpr uint8_t kKernelCall = 1, kDelegateCall = 2;     // of those in Instruction's

// Far above what an export writes; they bound the work that a file can ask for.
constexpr uint32_t kMostMethods = 1 << 10;
constexpr uint32_t kMostInstructions = 1 << 16, kMostOperators = 1 << 10;
constexpr uint32_t kMostNameBytes = 1 << 12;
// What the signed offsets of a flatbuffer span.
constexpr uint64_t kMostProgramBytes = (uint64_t{1} << 31) - 1;

// A flatbuffer of `end` bytes. A position is checked before a byte is read there, and no sum overflows:
// it is of positions below 2^31 and of offsets below 2^32, in 64 bits.
class Reader {
 public:
  Reader(const std::string& path, const File& file, uint64_t end)
      : path_(path), file_(file), end_(end) {}

  [[noreturn]] void refuse(const char* why) const {
    throw Error(EQKV_BAD_PACKAGE,
                path_ + ": is not a whole ExecuTorch program (" + why + "); export the model again.");
  }

  std::string bytes(uint64_t at, size_t count) const {
    if (at > end_ || count > end_ - at) refuse("it leads beyond its end");
    std::string out(count, '\0');
    if (!read_all(file_, &out[0], count, at)) {
      refuse(errno ? std::strerror(errno) : "it became shorter while it was read");
    }
    return out;
  }

  template <class Number>
  Number number(uint64_t at) const {
    uint64_t value = 0;
    const std::string little_endian = bytes(at, sizeof(Number));
    for (size_t i = 0; i < sizeof(Number); ++i) {
      value |= uint64_t{static_cast<uint8_t>(little_endian[i])} << 8 * i;
    }
    return static_cast<Number>(value);
  }

  // Where the offset at `at` points: always onwards.
  uint64_t follow(uint64_t at) const {
    const uint32_t offset = number<uint32_t>(at);
    if (offset < sizeof offset) refuse("an offset points at itself");
    return at + offset;
  }

  // The position of a field of `size` bytes of the table at `table`; 0 where the table lacks it.
  uint64_t find(uint64_t table, unsigned place, uint64_t size) const {
    const int64_t signed_vtable =
        static_cast<int64_t>(table) - static_cast<int32_t>(number<uint32_t>(table));
    if (signed_vtable < 0) refuse("a table's layout lies before its start");
    const uint64_t vtable = static_cast<uint64_t>(signed_vtable);
    const uint64_t vtable_size = number<uint16_t>(vtable);
    const uint64_t table_size = number<uint16_t>(vtable + 2);
    const uint64_t entry = 4 + 2 * uint64_t{place};
    if (vtable_size < 4 || vtable_size % 2 != 0 || vtable_size > end_ - vtable || table_size < 4 ||
        table_size > end_ - table) {
      refuse("a table has no valid size");
    }
    const uint64_t offset = entry + 2 <= vtable_size ? number<uint16_t>(vtable + entry) : 0;
    if (offset == 0) return 0;
    if (offset < 4 || offset + size > table_size) refuse("a field lies outside its table");
    return table + offset;
  }

  // Of one that a program of ours has.
  uint64_t field(uint64_t table, unsigned place, uint64_t size) const {
    const uint64_t at = find(table, place, size);
    if (at == 0) refuse("a table lacks a field");
    return at;
  }

  struct Vector {
    uint64_t at;  // of the first element, of 4 bytes as all are
    uint32_t count;
  };

  Vector vector(uint64_t table, unsigned place) const {
    const uint64_t at = follow(field(table, place, 4));
    const uint32_t count = number<uint32_t>(at);
    if (count > (end_ - at - 4) / 4) refuse("a vector reaches beyond its end");
    return {at + 4, count};
  }

  std::string text(uint64_t table, unsigned place, uint64_t most = kMostNameBytes) const {
    const uint64_t at = follow(field(table, place, 4));
    const uint32_t length = number<uint32_t>(at);
    if (length > most) refuse("a text is too long");
    std::string out = bytes(at + 4, size_t{length} + 1);
    if (out.find('\0') != length) refuse("a text has no valid end");
    out.pop_back();
    return out;
  }

 private:
  const std::string& path_;
  const File& file_;
  const uint64_t end_;
};

// The size of the flatbuffer in a file of `bytes`.
uint64_t program_size(const Reader& file, uint64_t bytes) {
  if (bytes < kHeader + kHeaderBytes) file.refuse("it ends inside its header");
  if (file.bytes(kIdentifier, 2) != "ET") file.refuse("its first bytes are of something else");
  // Every version that has our operators writes the header; without it, a file that was cut off could
  // not be told from a whole one.
  if (file.bytes(kHeader, 4) != "eh00" || file.number<uint32_t>(kHeaderSize) < kHeaderBytes) {
    file.refuse("it has no extended header");
  }
  const uint64_t program = file.number<uint64_t>(kProgramSize);
  const uint64_t base = file.number<uint64_t>(kSegmentBase);  // 0: no segments
  const uint64_t segments = file.number<uint64_t>(kSegmentBytes);
  if (program > bytes || base > bytes || segments > bytes - base) file.refuse("it is cut off");
  if (program > kMostProgramBytes) file.refuse("it has more than 2 GiB before its weights");
  if (base == 0 ? segments > 0 : base < program) file.refuse("its header contradicts itself");
  return program;
}

// The text that the method returns, described by the ExecutionPlan at `plan`.
std::string returned_text(const Reader& program, uint64_t plan) {
  const Reader::Vector values = program.vector(plan, kValues);
  const Reader::Vector outputs = program.vector(plan, kOutputs);
  const uint32_t output = outputs.count == 1 ? program.number<uint32_t>(outputs.at) : UINT32_MAX;
  if (output >= values.count) program.refuse("a method of its metadata does not return one value");
  const uint64_t value = program.follow(values.at + uint64_t{4} * output);
  if (program.number<uint8_t>(program.field(value, kType, 1)) != kString) {
    program.refuse("a method of its metadata returns no text");
  }
  return program.text(program.follow(program.field(value, kValue, 4)), kText, kMostMetadataBytes);
}

// What ExecuTorch does not check of `forward` at `plan`: each instruction calls a delegate or one of the
// operators that are listed, which have names. Those that jump and move are in no program of ours.
void check_instructions(const Reader& program, uint64_t plan) {
  const Reader::Vector operators = program.vector(plan, kOperators);
  if (operators.count > kMostOperators) program.refuse("it has too many operators");
  for (uint32_t i = 0; i < operators.count; ++i) {
    program.text(program.follow(operators.at + uint64_t{4} * i), kOperatorName);
  }
  const Reader::Vector chains = program.vector(plan, kChains);
  if (chains.count != 1) program.refuse("it has not one chain of instructions");
  const Reader::Vector all = program.vector(program.follow(chains.at), kInstructions);
  if (all.count > kMostInstructions) program.refuse("it has too many instructions");
  for (uint32_t i = 0; i < all.count; ++i) {
    const uint64_t instruction = program.follow(all.at + uint64_t{4} * i);
    const uint8_t type = program.number<uint8_t>(program.field(instruction, kCallType, 1));
    if (type == kDelegateCall) continue;
    if (type != kKernelCall) program.refuse("an instruction is no call");
    const uint64_t at = program.find(program.follow(program.field(instruction, kCall, 4)), kOperator, 4);
    if ((at ? program.number<uint32_t>(at) : 0) >= operators.count) {
      program.refuse("it calls an operator that it does not name");
    }
  }
}

}  // namespace

FileMetadata read_pte_file(const std::string& path) {
  struct stat status = {};
  const File file(open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!file || fstat(file.get(), &status) != 0) {
    throw Error(EQKV_BAD_PACKAGE, path + ": cannot be read (" + std::strerror(errno) + ").");
  }
  FileMetadata found;
  found.bytes = static_cast<uint64_t>(status.st_size);
  const Reader program(path, file, program_size(Reader(path, file, found.bytes), found.bytes));
  const Reader::Vector plans = program.vector(program.follow(0), kPlans);
  if (plans.count > kMostMethods) program.refuse("it has too many methods");
  std::set<std::string> names;
  for (uint32_t i = 0; i < plans.count; ++i) {
    const uint64_t plan = program.follow(plans.at + uint64_t{4} * i);
    const std::string name = program.text(plan, kName);
    if (!names.insert(name).second) program.refuse("two of its methods have the same name");
    if (name == "forward") check_instructions(program, plan);
    if (is_metadata(name)) found.texts[name] = returned_text(program, plan);
  }
  if (names.count("forward") == 0) program.refuse("it has no method forward");
  return found;
}

}  // namespace edge_qkv::et
