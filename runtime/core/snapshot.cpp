#include "snapshot.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <iterator>

#include "checksum.h"
#include "error.h"
#include "file.h"
#include "snapshot_format.h"

#if !defined(__BYTE_ORDER__) || __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "Snapshots are little-endian and mapped as they are: this host cannot use them."
#endif

namespace edge_qkv {
namespace {

using namespace snapshot_format;

constexpr size_t kPiece = size_t{1} << 20;  // bytes that are checked, read or written at once

// ---- writing ----

[[noreturn]] void refuse_save(const std::string& path, const std::string& why,
                              eqkv_status status = EQKV_INVALID_ARGUMENT) {
  throw Error(status, "The snapshot cannot be saved to " + path + ": " + why + ".");
}

// `.NAME.partial` beside the file NAME that `path` names.
std::string partial_name(const std::string& path) {
  const size_t name = path.rfind('/') + 1;  // 0 where there is no slash
  return path.substr(0, name) + "." + path.substr(name) + ".partial";
}

// The file beside `path` that becomes `path`, or is removed.
class PartialFile {
 public:
  explicit PartialFile(const std::string& path) : path_(path), name_(partial_name(path)) {
    struct stat there = {};
    if (path.empty()) refuse_save("\"\"", "the path is empty");
    if (stat(path.c_str(), &there) == 0 && !S_ISREG(there.st_mode))
      refuse_save(path, "it is not a file");
    for (int tries = 100; !open_locked(); --tries) {
      if (tries == 0) refuse_save(path, name_ + " is replaced all the time");
    }
  }

  ~PartialFile() {
    if (!renamed_) unlink(name_.c_str());
    flock(file_.get(), LOCK_UN);  // also where a process that was forked meanwhile holds the file open
  }

  const File& file() const { return file_; }

  void become_path() {
#if defined(F_FULLFSYNC)
    const bool durable = fcntl(file_.get(), F_FULLFSYNC) == 0 || fsync(file_.get()) == 0;
#else
    const bool durable = fsync(file_.get()) == 0;
#endif
    if (!durable) refuse_write(path_);
    if (rename(name_.c_str(), path_.c_str()) != 0) refuse_save(path_, std::strerror(errno));
    renamed_ = true;
    // The new name is seen by everyone now. That it also survives a power cut needs the directory to be
    // written, which not every system allows: no reason to fail.
    const size_t slash = path_.rfind('/');
    const std::string directory = slash == std::string::npos ? "." : path_.substr(0, slash + 1);
    const File folder(open(directory.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    if (folder) fsync(folder.get());
  }

  [[noreturn]] static void refuse_write(const std::string& path) {
    refuse_save(path, std::strerror(errno) + std::string("; free space there, or choose another place"),
                EQKV_OUT_OF_MEMORY);
  }

 private:
  // False where there is no file of ours yet: one that was there is removed once
  // it is locked, never written to, for it may have other names or be mapped;
  // and another writer may have renamed or removed the file between our opening
  // and locking it: what we then have is the finished snapshot, or nobody's.
  bool open_locked() {
    // Non-blocking, and no link followed: it may be anything.
    constexpr int kFlags = O_RDWR | O_CLOEXEC | O_NONBLOCK | O_NOFOLLOW;
    File file(open(name_.c_str(), kFlags | O_CREAT | O_EXCL, 0600));
    const bool is_new = static_cast<bool>(file);
    if (!is_new && errno == EEXIST) {
      file = File(open(name_.c_str(), kFlags));
      if (!file && errno == ENOENT) return false;
    }
    struct stat ours = {}, named = {};
    if (!file && errno == ENAMETOOLONG) {
      refuse_save(
          path_, "the name of " + name_ + ", which is written first, is too long; choose a shorter one");
    }
    if (!file) refuse_save(path_, name_ + ": " + std::strerror(errno));
    if (fstat(file.get(), &ours) != 0 || !S_ISREG(ours.st_mode)) {
      refuse_save(path_, name_ + " is in the way: it is not a file");
    }
    // Where the file system has no locks, writers are not kept apart.
    if (flock(file.get(), LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK) {
      refuse_save(path_, "it is being saved there at this moment; save again when that is done");
    }
    if (lstat(name_.c_str(), &named) != 0 || named.st_dev != ours.st_dev ||
        named.st_ino != ours.st_ino) {
      flock(file.get(), LOCK_UN);
      return false;
    }
    if (!is_new) {
      const bool removed = unlink(name_.c_str()) == 0;
      const int error = errno;
      flock(file.get(), LOCK_UN);
      if (!removed) refuse_save(path_, name_ + " is in the way: " + std::strerror(error));
      return false;
    }
    file_ = std::move(file);
    return true;
  }

  const std::string path_, name_;
  File file_;
  bool renamed_ = false;
};

// Writes content from behind the header on, and its checksum along the way.
class Writer {
 public:
  Writer(const File& file, const std::string& path) : file_(file), path_(path) {}

  void write(const void* data, size_t bytes) {
    const auto* at = static_cast<const char*>(data);
    while (bytes > 0) {
      const size_t piece = std::min(bytes, kPiece);
      sum_.add(at, piece);
      if (!write_all(file_, at, piece, at_)) PartialFile::refuse_write(path_);
      at += piece;
      at_ += piece;
      bytes -= piece;
    }
  }

  void pad_to(uint64_t offset) {
    static constexpr char kZeros[4096] = {};
    while (at_ < offset)
      write(kZeros, static_cast<size_t>(std::min<uint64_t>(sizeof kZeros, offset - at_)));
  }

  uint64_t checksum() const { return sum_.value(); }

 private:
  const File& file_;
  const std::string& path_;
  uint64_t at_ = sizeof(Header);
  Checksum sum_;
};

// ---- reading ----

// Reads content from behind the header on, and its checksum along the way.
class Reader {
 public:
  Reader(const File& file, const std::string& path) : file_(file), path_(path) {}

  [[noreturn]] void refuse(const std::string& why, eqkv_status status = EQKV_BAD_SNAPSHOT) const {
    throw Error(status, path_ + ": " + why + ".");
  }

  void read(void* out, size_t bytes) {
    if (!read_all(file_, out, bytes, at_)) {
      refuse(errno ? std::string("cannot be read: ") + std::strerror(errno) : "is truncated");
    }
    sum_.add(out, bytes);
    at_ += bytes;
  }

  void skip_to(uint64_t offset) {
    std::vector<char> piece(kPiece);
    while (at_ < offset)
      read(piece.data(), static_cast<size_t>(std::min<uint64_t>(kPiece, offset - at_)));
  }

  uint64_t checksum() const { return sum_.value(); }

 private:
  const File& file_;
  const std::string& path_;
  uint64_t at_ = sizeof(Header);
  Checksum sum_;
};

// "fp16, 10 kv of 1 x 64 with window 512, 2 kv of 1 x 64, vocabulary 4096".
std::string describe(const Header& header, const std::vector<TableLine>& table) {
  std::string text = "type " + std::to_string(header.cache_type);
  if (header.cache_type < std::size(kCacheTypes)) text = kCacheTypes[header.cache_type].name;
  std::vector<std::pair<std::string, int>> shapes;  // with how many tensors have each
  for (const TableLine& line : table) {
    std::string shape = "part " + std::to_string(line.part);
    if (line.part <= static_cast<uint32_t>(Part::kValue)) {
      CacheTensor tensor;
      tensor.part = static_cast<Part>(line.part);
      tensor.scales = line.scales != 0;
      shape = part_name(tensor);
    }
    shape += " of " + std::to_string(line.kv_heads) + " x " + std::to_string(line.dim);
    if (line.window > 0) shape += " with window " + std::to_string(line.window);
    if (line.sinks > 0) shape += " and " + std::to_string(line.sinks) + " sinks";
    const auto found = std::find_if(shapes.begin(), shapes.end(),
                                    [&](const auto& known) { return known.first == shape; });
    if (found == shapes.end()) {
      shapes.emplace_back(shape, 1);
    } else {
      ++found->second;
    }
  }
  constexpr size_t kMostShapes = 8;  // more than a model has
  for (size_t i = 0; i < std::min(shapes.size(), kMostShapes); ++i) {
    text += ", " + std::to_string(shapes[i].second) + " " + shapes[i].first;
  }
  if (shapes.size() > kMostShapes) text += " and others";
  return text + ", vocabulary " + std::to_string(header.vocab_size);
}

// The header, sound and of this model.
Header read_header(const File& file, const Reader& reader, const ModelInfo& model, uint64_t file_bytes) {
  Header header = {};
  const size_t there = static_cast<size_t>(std::min<uint64_t>(file_bytes, sizeof header));
  if (!read_all(file, &header, there, 0)) {
    reader.refuse(std::string("cannot be read: ") + std::strerror(errno));
  }
  if (std::memcmp(header.magic, kMagic, sizeof header.magic) != 0) {
    reader.refuse("is not a snapshot of a session");
  }
  if (there < sizeof header) reader.refuse("is truncated: it ends within its header");
  if (header.byte_order == kSwapped) {
    reader.refuse("was written on a machine of the other byte order and cannot be used here");
  }
  if (header.byte_order == kByteOrder && header.version > kVersion) {
    reader.refuse("has format " + std::to_string(header.version) +
                  ", of a newer version of edge-qkv than this one, which reads format " +
                  std::to_string(kVersion));
  }
  if (header.byte_order == kByteOrder && header.version > 0 && header.version < kVersion) {
    reader.refuse("has format " + std::to_string(header.version) +
                  ", of an older version of edge-qkv than this one, which reads format " +
                  std::to_string(kVersion) + "; evaluate its tokens again");
  }
  const bool known = header.byte_order == kByteOrder && header.version == kVersion &&
                     (header.flags & ~kHasLogits) == 0 &&
                     std::all_of(std::begin(header.reserved), std::end(header.reserved),
                                 [](unsigned char byte) { return byte == 0; });
  if (!known || header.header_checksum != header_checksum(header)) {
    reader.refuse("was altered: its header is damaged");
  }

  if (std::memcmp(header.fingerprint, make_header(model).fingerprint, kFingerprint) != 0) {
    reader.refuse("is a snapshot of another model; restore it in a session of the model that saved it");
  }
  return header;
}

// The table of tensors, of this model's layout; returns the first live rows.
std::vector<int64_t> read_table(Reader& reader, const Header& header, const ModelInfo& model,
                                uint64_t file_bytes) {
  constexpr uint64_t kMostTensors = 1 << 16;
  if (header.tensors > kMostTensors || sizeof header + header.tensors * sizeof(TableLine) > file_bytes) {
    reader.refuse("is truncated: it ends within its table of tensors");
  }
  std::vector<TableLine> table(static_cast<size_t>(header.tensors));
  reader.read(table.data(), table.size() * sizeof(TableLine));
  if (header.table_checksum != checksum_of(table.data(), table.size() * sizeof(TableLine))) {
    reader.refuse("was altered: its table of tensors is damaged");
  }

  const CacheLayout& layout = model.layout;
  std::vector<int64_t> first_live(layout.tensors.size());
  for (size_t i = 0; i < std::min(table.size(), first_live.size()); ++i) {
    first_live[i] = static_cast<int64_t>(table[i].first_live);
  }
  const Header ours = make_header(model);
  const std::vector<TableLine> expected = table_of(layout, first_live);
  const auto same = [](const TableLine& a, const TableLine& b) {
    return std::memcmp(&a, &b, sizeof a) == 0;
  };
  const auto differs = std::mismatch(table.begin(), table.end(), expected.begin(), expected.end(), same);
  const bool alike = differs.first == table.end() && differs.second == expected.end();
  if (header.cache_type != ours.cache_type || header.vocab_size != ours.vocab_size || !alike) {
    reader.refuse(
        "has another cache layout (" + describe(header, table) + ") than this model (" +
        describe(ours, expected) + ")" +
        (alike ? "" : ", from tensor " + std::to_string(differs.first - table.begin()) + " on"));
  }
  for (size_t i = 0; i < expected.size(); ++i) {
    const CacheTensor& tensor = layout.tensors[i];
    const int64_t first = first_live[i];
    // What the next token sees has to be there; and there is one way to say that all is.
    const bool sound =
        first == 0 || (first > tensor.sinks && table[i].first_live <= header.tokens &&
                       header.tokens <= static_cast<uint64_t>(kMostTokens) &&
                       first <= visible_rows(tensor, static_cast<int64_t>(header.tokens)).first);
    if (!sound) reader.refuse("was altered: rows that its last tokens see are not in it");
  }
  return first_live;
}

// Where everything is, which follows from the numbers before.
Places check_places(const Reader& reader, const Header& header, const std::vector<int64_t>& first_live,
                    const ModelInfo& model, uint64_t file_bytes) {
  Places places;
  const bool alignable = header.alignment >= kLeastAlignment && header.alignment <= kMostAlignment &&
                         (header.alignment & (header.alignment - 1)) == 0;
  if (!alignable ||
      !find_places(model.layout, first_live, header.tokens, header.vocab_size, header.flags & kHasLogits,
                   header.alignment, &places) ||
      places.tokens != header.tokens_offset || places.logits != header.logits_offset ||
      places.rows != header.rows_offset || places.end != header.file_bytes) {
    reader.refuse("was altered: the sizes in its header contradict each other");
  }
  if (file_bytes != header.file_bytes) {
    reader.refuse((file_bytes < header.file_bytes ? "is truncated: it has " : "was altered: it has ") +
                  std::to_string(file_bytes) + " bytes instead of " + std::to_string(header.file_bytes));
  }
  return places;
}

}  // namespace

void save_snapshot(const std::string& path, const ModelInfo& model, const CacheMemory& cache,
                   const std::vector<int32_t>& tokens, const float* logits, uint64_t alignment) {
  const CacheLayout& layout = model.layout;
  const std::vector<TableLine> table = table_of(layout, cache.first_live());
  Header header = make_header(model);
  Places places;
  find_places(layout, cache.first_live(), tokens.size(), header.vocab_size, logits != nullptr, alignment,
              &places);
  header.file_bytes = places.end;
  header.alignment = alignment;
  header.tokens = tokens.size();
  header.flags = logits ? kHasLogits : 0;
  header.tokens_offset = places.tokens;
  header.logits_offset = places.logits;
  header.rows_offset = places.rows;
  header.table_checksum = checksum_of(table.data(), table.size() * sizeof table[0]);
  RowsFile rows;
  rows.slabs = places.slabs;
  rows.gaps = places.gaps;

  PartialFile partial(path);
  Writer writer(partial.file(), path);
  writer.write(table.data(), table.size() * sizeof table[0]);
  writer.write(tokens.data(), tokens.size() * sizeof tokens[0]);
  if (logits) writer.write(logits, header.vocab_size * sizeof *logits);
  const std::vector<Slab> slabs = layout.slabs();
  for (size_t i = 0; i < slabs.size(); ++i) {
    const size_t tensor = slabs[i].tensor, row = layout.row_bytes(layout.tensors[tensor]);
    for (const RowSpan& range : cache.live(tensor, 0, static_cast<int64_t>(tokens.size()))) {
      const size_t begin = row * static_cast<size_t>(range.begin);
      writer.pad_to(rows.offset(i, tensor, begin));
      writer.write(cache.view().row(slabs[i], range.begin),
                   row * static_cast<size_t>(range.end) - begin);
    }
  }
  writer.pad_to(places.end);

  header.content_checksum = writer.checksum();
  header.header_checksum = header_checksum(header);
  if (!write_all(partial.file(), &header, sizeof header, 0)) PartialFile::refuse_write(path);
  partial.become_path();
}

Snapshot open_snapshot(const std::string& path, const ModelInfo& model, int64_t context) {
  auto rows = std::make_shared<RowsFile>();
  rows->place = path;
  rows->file = File(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));  // it may be a pipe
  Reader reader(rows->file, path);
  if (!rows->file) reader.refuse(std::string("cannot be opened: ") + std::strerror(errno));
  struct stat status = {};
  if (fstat(rows->file.get(), &status) != 0 || !S_ISREG(status.st_mode)) reader.refuse("is not a file");
  const uint64_t file_bytes = static_cast<uint64_t>(status.st_size);

  const Header header = read_header(rows->file, reader, model, file_bytes);
  Snapshot snapshot;
  snapshot.first_live = read_table(reader, header, model, file_bytes);
  Places places = check_places(reader, header, snapshot.first_live, model, file_bytes);
  if (header.tokens > static_cast<uint64_t>(context)) {
    reader.refuse("its " + std::to_string(header.tokens) + " tokens do not fit into the context of " +
                      std::to_string(context) + "; open a session with a larger context",
                  EQKV_CONTEXT_FULL);
  }
  snapshot.tokens.resize(static_cast<size_t>(header.tokens));
  reader.read(snapshot.tokens.data(), snapshot.tokens.size() * sizeof snapshot.tokens[0]);
  if (header.flags & kHasLogits) {
    snapshot.logits.resize(static_cast<size_t>(header.vocab_size));
    reader.read(snapshot.logits.data(), snapshot.logits.size() * sizeof snapshot.logits[0]);
  }
  reader.skip_to(places.end);
  if (reader.checksum() != header.content_checksum) reader.refuse("was altered: its content is damaged");
  for (const int32_t token : snapshot.tokens) {
    if (token < 0 || token >= model.description.vocab_size) {
      reader.refuse("was altered: token " + std::to_string(token) +
                    " is outside the model's vocabulary");
    }
  }
  rows->slabs = std::move(places.slabs);
  rows->gaps = std::move(places.gaps);
  snapshot.rows = std::move(rows);
  return snapshot;
}

}  // namespace edge_qkv
