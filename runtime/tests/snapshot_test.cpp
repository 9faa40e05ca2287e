// Snapshots: what was saved comes back, and whatever else a file holds is refused.
#include "core/snapshot.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <functional>
#include <limits>
#include <set>
#include <thread>
#include <utility>

#include "core/checksum.h"
#include "core/memory.h"
#include "core/session.h"
#include "fake_engine.h"
#include "temporary.h"
#include "test.h"

using namespace edge_qkv;
using namespace edge_qkv::test;

namespace {

constexpr size_t kHeader = 256, kLine = 48;

std::function<void()> before_flock;  // called once, before the next flock

std::vector<int32_t> some_tokens(size_t count) {
  std::vector<int32_t> tokens(count);
  for (size_t i = 0; i < count; ++i) tokens[i] = static_cast<int32_t>((i * i + 3) % kVocab);
  return tokens;
}

// A session that has evaluated tokens, and what it saved.
struct Saved {
  explicit Saved(const CacheLayout& layout = kLayouts[4], size_t count = 150)
      : model(std::make_shared<FakeModel>(layout)), session(model, {300, 64}) {
    const std::vector<int32_t> tokens = some_tokens(count);
    session.evaluate(tokens.data(), count, nullptr);
    session.save(path);
    bytes = read_file(path);
  }

  // The status with which a session that holds other tokens refuses `file`; EQKV_OK where it does not.
  // Whatever happens, a refusal must leave that session as it was.
  eqkv_status restore(const std::string& file, std::string* sentence = nullptr) {
    unlink(other.c_str());  // it may be mapped
    write_file(other, file);
    try {
      target.restore(other);
      return EQKV_OK;
    } catch (const Error& error) {
      if (sentence) *sentence = error.what();
      EXPECT(target.tokens() == kBefore && target.sample() == 6);
      return error.status();
    }
  }

  uint64_t field(size_t offset) const {
    uint64_t value;
    std::memcpy(&value, bytes.data() + offset, sizeof value);
    return value;
  }

  // The file with `size` bytes at `offset` replaced, and checksums that fit again.
  std::string with(size_t offset, const void* value, size_t size) const {
    std::string changed = bytes;
    std::memcpy(changed.data() + offset, value, size);
    const auto sum_to = [&](size_t at, const char* data, size_t count) {
      Checksum sum;
      sum.add(data, count);
      const uint64_t result = sum.value();
      std::memcpy(changed.data() + at, &result, sizeof result);
    };
    if (offset >= kHeader) {
      sum_to(152, changed.data() + kHeader, kLine * field(56));
      sum_to(240, changed.data() + kHeader, changed.size() - kHeader);
    }
    sum_to(248, changed.data(), 248);
    return changed;
  }
  template <class Number>
  std::string with(size_t offset, Number value) const {
    return with(offset, &value, sizeof value);
  }

  const std::vector<int32_t> kBefore = {1, 2, 3};
  TemporaryDirectory directory;
  const std::string path = directory / "snapshot", other = directory / "other";
  const std::string partial = directory / ".snapshot.partial";  // while it is written
  std::shared_ptr<FakeModel> model;
  Session session;
  Session target = Session(model, {300, 64});
  bool started = (target.evaluate(kBefore.data(), 3, nullptr), true);
  std::string bytes;
};

// The sentence with which `file` is refused; "" where it is not, or with another status.
std::string refusal(Saved& saved, const std::string& file, eqkv_status status = EQKV_BAD_SNAPSHOT) {
  std::string sentence;
  return saved.restore(file, &sentence) == status ? sentence : "";
}

bool says(const std::string& sentence, const std::string& words) {
  return sentence.find(words) != std::string::npos;
}

}  // namespace

#if defined(__linux__)
// Instead of the C library's, so that a test can do something between two calls of a save.
extern "C" int flock(int descriptor, int operation) {
  if (before_flock) std::exchange(before_flock, nullptr)();
  return static_cast<int>(syscall(SYS_flock, descriptor, operation));
}
#endif

TEST(checksum, "the checksum is XXH64") {
  // The bytes and results of tests/sanity_test_vectors.h in xxHash 0.8.2.
  constexpr uint64_t kSeed = 2654435761u;
  std::vector<unsigned char> bytes(4160);
  uint64_t state = kSeed;
  for (unsigned char& byte : bytes) {
    byte = static_cast<unsigned char>(state >> 56);
    state *= 11400714785074694797u;
  }
  const struct {
    size_t count;
    uint64_t seed, sum;
  } cases[] = {
      {0, 0, 0xef46db3751d8e999u},   {0, kSeed, 0xac75fda2929b17efu},
      {1, 0, 0xe934a84adb052768u},   {1, kSeed, 0x5014607643a9b4c3u},
      {2, 0, 0x5d48cd60a77e23ffu},   {3, 0, 0xff7e1959cb50794au},
      {4, 0, 0x9136a0dca57457eeu},   {4, kSeed, 0xcaab286bd8e9fdb5u},
      {8, 0, 0xcdbcf538e71d1348u},   {9, 0, 0x554b1ae991eda6b6u},
      {14, 0, 0x8282dcc4994e35c8u},  {14, kSeed, 0xc3bd6bf63deb6df0u},
      {17, 0, 0x0d39a2d051a30c2cu},  {31, 0, 0x299b39a290e6d783u},
      {32, 0, 0x18b216492bb44b70u},  {33, 0, 0x55c8dc3e578f5b59u},
      {64, 0, 0xef558f8acac2b5cdu},  {129, 0, 0x41c280132d697abau},
      {222, 0, 0xb641ae8cb691c174u}, {222, kSeed, 0x20cb8ab7ae10c14au},
  };
  for (const auto& c : cases) {
    for (size_t piece = 1; piece <= c.count + 1; ++piece) {
      Checksum sum(c.seed);
      for (size_t at = 0; at < c.count; at += piece) {
        sum.add(bytes.data() + at, std::min(piece, c.count - at));
      }
      EXPECT(sum.value() == c.sum);
    }
  }
}

TEST(round_trip, "a restored session goes on exactly as the saved one, for every cache layout") {
  for (const CacheLayout& layout : all_layouts()) {
    for (const size_t count : {size_t{1}, size_t{64}, size_t{300}}) {
      Saved saved(layout, count);
      // In sessions with another capacity and margin too.
      Session larger(saved.model, {1000, 7}), short_margin(saved.model, {1000, 9, {}, 1}),
          long_margin(saved.model, {600, 50, {}, 600});
      for (Session* session : {&saved.target, &larger, &short_margin, &long_margin}) {
        session->restore(saved.path);
        EXPECT(session->tokens() == saved.session.tokens());
        EXPECT(std::equal(session->logits(), session->logits() + kVocab, saved.session.logits()));
      }
      Session plain(saved.model, {1000, 7, {}, 1000});
      std::vector<int32_t> tokens = some_tokens(count);
      tokens.insert(tokens.end(), 300, 3);
      plain.evaluate(tokens.data(), tokens.size(), nullptr);
      for (Session* session : {&larger, &short_margin, &long_margin}) {
        session->evaluate(tokens.data() + count, 300, nullptr);
        EXPECT(std::equal(session->logits(), session->logits() + kVocab, plain.logits()));
      }
    }
  }
}

TEST(other_rows, "a snapshot does not depend on how many rows a model file fixes") {
  const int64_t page = static_cast<int64_t>(page_bytes());
  for (const CacheLayout& layout : all_layouts()) {
    const Saved saved(layout);
    const std::vector<int32_t> more = some_tokens(100);
    Session plain(saved.model, {300, 64});
    plain.restore(saved.path);
    plain.evaluate(more.data(), more.size(), nullptr);
    std::string last = saved.path;
    for (const int64_t rows : {page, 4 * page, int64_t{0}, 2 * page}) {
      Session session(std::make_shared<FakeModel>(layout, 'a', rows), {300, 64});
      session.restore(last);
      last = saved.directory / std::to_string(rows);
      session.save(last);
      EXPECT(read_file(last) == saved.bytes);
      const auto fork = session.fork(saved.directory.path());
      for (Session* each : {&session, fork.get()}) {
        each->evaluate(more.data(), more.size(), nullptr);
        EXPECT(std::equal(each->logits(), each->logits() + kVocab, plain.logits()));
      }
    }
  }
}

TEST(without_logits, "a session without logits is saved without them") {
  Saved saved;
  saved.session.rewind(100);
  saved.session.save(saved.path);
  saved.target.restore(saved.path);
  EXPECT(saved.target.length() == 100);
  EXPECT_ERROR(EQKV_INVALID_ARGUMENT, "evaluate a token", saved.target.logits());
}

TEST(other_pages, "a snapshot of a system with other pages is mapped where they fit, else read") {
  for (const CacheLayout& layout : {kLayouts[4], kMixed[0], kMixed[1], kMixed[2], kMixed[4]}) {
    Saved saved(layout);
    std::vector<int32_t> tokens = some_tokens(150);
    tokens.push_back(1);
    Session plain(saved.model, {300, 64});
    plain.evaluate(tokens.data(), tokens.size(), nullptr);
    for (const uint64_t alignment : {uint64_t{64}, uint64_t{512}, uint64_t{65536}, uint64_t{1} << 20}) {
      save_snapshot(saved.path, saved.model->info(), saved.session.cache(), saved.session.tokens(),
                    saved.session.logits(), alignment);
      saved.target.restore(saved.path);
      EXPECT((saved.target.cache().file() != nullptr) == (alignment % page_bytes() == 0));
      EXPECT(saved.target.cache().first_live() == saved.session.cache().first_live());
      saved.target.evaluate(tokens.data() + 150, 1, nullptr);
      EXPECT(std::equal(plain.logits(), plain.logits() + kVocab, saved.target.logits()));
    }
  }
}

TEST(only_live, "only live rows are in a snapshot, where snapshot.md says that they are") {
  const TemporaryDirectory directory;
  FakeModel model(layout_of(CacheType::kFloat16, {{1, 64, 0, 512, 4}, {2, 10, 0, 0, 0}}));
  CacheMemory cache(model.info().layout, 3000);
  fill_with_noise(cache.view(), 0, 3000, 1);
  cache.grow_to(3000);
  EXPECT((cache.first_live() == std::vector<int64_t>{1976, 0}));
  save_snapshot(directory / "snapshot", model.info(), cache, std::vector<int32_t>(3000, 1), nullptr,
                4096);
  const std::string file = read_file(directory / "snapshot");
  const size_t rows = 16384;  // behind a header, two lines and 3000 tokens
  const auto holds = [&](size_t at, const Slab& slab, int64_t first, int64_t last) {
    const size_t row = cache.view().layout.row_bytes(cache.view().layout.tensors[slab.tensor]);
    return std::memcmp(file.data() + at, cache.view().row(slab, first),
                       row * static_cast<size_t>(last - first)) == 0;
  };
  EXPECT(holds(rows, {0, 0}, 0, 4) && holds(rows + 7168, {0, 0}, 1976, 3000));
  EXPECT(holds(rows + 139264, {1, 0}, 0, 3000) && holds(rows + 139264 + 61440, {1, 1}, 0, 3000));
  EXPECT(file.size() == rows + 139264 + 2 * 61440);
  const auto zeros = [&](size_t begin, size_t end) {
    return std::all_of(file.begin() + static_cast<std::ptrdiff_t>(begin),
                       file.begin() + static_cast<std::ptrdiff_t>(end), [](char c) { return c == 0; });
  };
  EXPECT(zeros(rows + 512, rows + 7168) && zeros(rows + 138240, rows + 139264));
}

TEST(table, "a table that no snapshot of this model has is refused, however well the checksums fit") {
  for (const CacheLayout& layout : {kMixed[0], kMixed[2]}) {
    Saved saved(layout);
    for (size_t line = 0; line < layout.tensors.size(); ++line) {
      const size_t at = kHeader + line * kLine;
      for (size_t number = 0; number < 4; ++number) {
        uint32_t value;
        std::memcpy(&value, saved.bytes.data() + at + 4 * number, sizeof value);
        for (const uint32_t other : {value + 1, value ^ 1, ~value, value ^ (1u << 31)}) {
          EXPECT(says(refusal(saved, saved.with(at + 4 * number, other)), "another cache layout"));
        }
      }
      for (size_t number = 16; number < 40; number += 8) {
        const uint64_t value = saved.field(at + number);
        for (const uint64_t other : {value + 1, ~value, value ^ (uint64_t{1} << 63)}) {
          EXPECT(says(refusal(saved, saved.with(at + number, other)), "another cache layout"));
        }
      }
      // A first live row that no session has, or another one than the sizes say.
      const CacheTensor& tensor = layout.tensors[line];
      for (uint64_t other = 1; other < 160; ++other) {
        const int64_t first = static_cast<int64_t>(other);
        if (tensor.window > 0 && first > tensor.sinks && first <= 150 - tensor.window + 1) continue;
        EXPECT(says(refusal(saved, saved.with(at + 40, other)), "are not in it"));
      }
      if (layout.row_bytes(tensor) > 100) {  // else it is in the page of the other
        EXPECT(says(refusal(saved, saved.with(at + 40, uint64_t{0})), "contradict") ==
               (saved.field(at + 40) > 0));
      }
      for (const uint64_t other : {~uint64_t{0}, uint64_t{1} << 63, uint64_t{1} << 62}) {
        EXPECT(says(refusal(saved, saved.with(at + 40, other)), "are not in it"));
      }
    }
    EXPECT(saved.restore(saved.with(kHeader, saved.bytes[kHeader])) == EQKV_OK);
  }
}

TEST(mapped,
     "restored rows are mapped: no page of them is in RAM, and none becomes anonymous when read") {
  const TemporaryDirectory directory;
  const CacheLayout layout = uniform_layout(CacheType::kFloat16, 4, 1, 1, 4096);
  const auto model = std::make_shared<FakeModel>(layout);
  Session session(model, {1000, 0}), other(model, {1000, 0});
  session.fill(1000, 1);
  session.save(directory / "snapshot");  // 32 MB
  const uint64_t before = memory_use().anonymous;
  other.restore(directory / "snapshot");
  EXPECT(other.cache().committed_bytes() == 0);
  for (const Slab& slab : layout.slabs()) {
    EXPECT(std::memcmp(other.cache().view().row(slab, 0), session.cache().view().row(slab, 0),
                       layout.row_bytes(layout.tensors[0]) * 1000) == 0);
  }
  EXPECT(memory_use().anonymous < before + (4 << 20));
}

TEST(save_over, "saving over a snapshot does not disturb the sessions that were restored from it") {
  Saved saved;
  saved.target.restore(saved.path);
  Session third(saved.model, {300, 64});
  third.restore(saved.path);
  third.rewind(10);
  const int32_t token = 5;
  third.evaluate(&token, 1, nullptr);
  third.save(saved.path);
  third.save(saved.path);
  saved.target.rewind(149);
  saved.target.evaluate(&some_tokens(150)[149], 1, nullptr);
  EXPECT(std::equal(saved.target.logits(), saved.target.logits() + kVocab, saved.session.logits()));
  saved.target.restore(saved.path);
  EXPECT(saved.target.length() == 11 && saved.target.sample() == third.sample());
}

TEST(flipped, "a flipped bit is refused, wherever it is") {
  for (const CacheLayout& layout : {kLayouts[3], kMixed[0]}) {
    Saved saved(layout, 60);
    std::string file = saved.bytes;
    const size_t step = layout.tensors[0].window > 0 ? 997 : 13;
    for (size_t at = 0; at < file.size(); at += at < kHeader + 512 ? 1 : step) {
      const char flip = static_cast<char>(1 << at % 8);
      file[at] ^= flip;
      EXPECT(saved.restore(file) == EQKV_BAD_SNAPSHOT);
      file[at] ^= flip;
    }
    EXPECT(saved.restore(file) == EQKV_OK);
  }
}

TEST(truncated,
     "a truncated file is refused, wherever it ends, and so is one with something behind it") {
  Saved saved(kLayouts[3], 40);
  std::set<size_t> lengths = {0, 1, 7, 8, 11, 12, 16, 255, 256, 257, saved.bytes.size() - 1};
  for (size_t at = 0; at < saved.bytes.size(); at += 61) lengths.insert(at);
  for (size_t at = 4096; at < saved.bytes.size(); at += 4096) lengths.insert({at - 1, at, at + 1});
  for (const size_t length : lengths) {
    const std::string sentence = refusal(saved, saved.bytes.substr(0, length));
    EXPECT(says(sentence, length < 8 ? "is not a snapshot" : "is truncated"));
    EXPECT(says(sentence, saved.other));
  }
  EXPECT(says(refusal(saved, saved.bytes + '\0'), "was altered"));
  EXPECT(says(refusal(saved, saved.bytes + saved.bytes), "was altered"));
}

TEST(sizes, "sizes that no snapshot has are refused, however well the checksums fit") {
  Saved saved;
  constexpr uint64_t kAll = std::numeric_limits<uint64_t>::max();
  for (const size_t at : {16, 24, 32, 40, 56, 128, 136, 144, 152}) {
    const uint64_t value = saved.field(at);
    std::set<uint64_t> attacks = {0,           1,    value - 1, value + 1, value * 2,
                                  value << 32, kAll, kAll - 1,  kAll / 2};
    for (int bit = 0; bit < 64; ++bit) attacks.insert({uint64_t{1} << bit, value ^ uint64_t{1} << bit});
    for (uint64_t part = 1; part < 64; ++part) attacks.insert(kAll / part);  // products that overflow
    attacks.erase(value);
    for (const uint64_t attack : attacks)
      EXPECT(saved.restore(saved.with(at, attack)) == EQKV_BAD_SNAPSHOT);
  }
  for (const size_t at : {48, 52}) {
    for (const uint32_t attack : {3u, 4u, 0x80000001u, 0xffffffffu}) {
      EXPECT(saved.restore(saved.with(at, attack)) == EQKV_BAD_SNAPSHOT);
    }
  }
  for (size_t at = 160; at < 240; ++at) {
    EXPECT(saved.restore(saved.with(at, char{1})) == EQKV_BAD_SNAPSHOT);
  }
  Saved longer;
  longer.bytes += std::string(4096, '\0');
  longer.bytes = longer.with(kHeader, longer.bytes[kHeader]);
  EXPECT(says(refusal(longer, longer.with(16, uint64_t{longer.bytes.size()})), "contradict"));
  EXPECT(saved.restore(saved.with(32, saved.field(32))) == EQKV_OK);
}

TEST(foreign, "what a snapshot is not of is said in so many words") {
  Saved saved;
  EXPECT(says(refusal(saved, saved.with(12, uint32_t{3})), "newer version"));
  EXPECT(says(refusal(saved, saved.with(12, uint32_t{1})), "older version"));
  EXPECT(says(refusal(saved, saved.with(12, uint32_t{0})), "header is damaged"));
  EXPECT(says(refusal(saved, saved.with(12, uint32_t{0x04030201})), "newer version"));
  EXPECT(says(refusal(saved, saved.with(64, 'b')), "another model"));
  EXPECT(says(refusal(saved, saved.with(48, uint32_t{1})), "(fp16, 2 key of 2 x 21, 2 value of"));
  EXPECT(says(refusal(saved, saved.with(48, uint32_t{77})), "type 77"));
  EXPECT(says(refusal(saved, std::string(5000, 'x')), "is not a snapshot"));
  for (const int32_t token : {-1, static_cast<int32_t>(kVocab), 1 << 30}) {
    EXPECT(says(refusal(saved, saved.with(saved.field(128) + 4 * 149, token)), "vocabulary"));
  }
  // All numbers of the header in the other order.
  std::string swapped = saved.bytes;
  for (const size_t at : {8, 12, 48, 52}) std::reverse(swapped.begin() + at, swapped.begin() + at + 4);
  for (const size_t at : {16, 24, 32, 40, 56, 128, 136, 144, 152, 240, 248}) {
    std::reverse(swapped.begin() + at, swapped.begin() + at + 8);
  }
  EXPECT(says(refusal(saved, swapped), "other byte order"));

  const auto another = std::make_shared<FakeModel>(kLayouts[4], 'c');
  EXPECT_ERROR(EQKV_BAD_SNAPSHOT, "another model", Session(another, {300, 64}).restore(saved.path));
  for (size_t i = 0; i < all_layouts().size(); ++i) {
    if (i == 4) continue;
    const CacheLayout layout = all_layouts()[i];
    Session session(std::make_shared<FakeModel>(layout), {300, 64});
    EXPECT_ERROR(EQKV_BAD_SNAPSHOT, "another cache layout", session.restore(saved.path));
  }
}

TEST(smaller_context, "a snapshot that does not fit into the context is refused with its size") {
  Saved saved;
  Session session(saved.model, {149, 64});
  EXPECT_ERROR(EQKV_CONTEXT_FULL, "150 tokens do not fit into the context of 149",
               session.restore(saved.path));
  EXPECT(session.length() == 0);
  Session exact(saved.model, {150, 64});
  exact.restore(saved.path);
  EXPECT(exact.length() == 150);
}

TEST(no_file, "what is no file is refused, to restore from as to save to") {
  Saved saved;
  const std::string absent = saved.directory / "absent", pipe = saved.directory / "pipe";
  EXPECT(mkfifo(pipe.c_str(), 0600) == 0);
  EXPECT_ERROR(EQKV_BAD_SNAPSHOT, absent, saved.target.restore(absent));
  EXPECT_ERROR(EQKV_BAD_SNAPSHOT, "cannot be opened", saved.target.restore(""));
  EXPECT_ERROR(EQKV_BAD_SNAPSHOT, "is not a file", saved.target.restore(saved.directory.path()));
  EXPECT_ERROR(EQKV_BAD_SNAPSHOT, "is not a file", saved.target.restore(pipe));
  EXPECT_ERROR(EQKV_BAD_SNAPSHOT, "is not a file", saved.target.restore("/dev/zero"));
  EXPECT(chmod(saved.path.c_str(), 0) == 0);
  if (geteuid() != 0)
    EXPECT_ERROR(EQKV_BAD_SNAPSHOT, "cannot be opened", saved.target.restore(saved.path));
  EXPECT(saved.target.tokens() == saved.kBefore);

  EXPECT_ERROR(EQKV_INVALID_ARGUMENT, "empty", saved.session.save(""));
  EXPECT_ERROR(EQKV_INVALID_ARGUMENT, "not a file", saved.session.save(saved.directory.path()));
  EXPECT_ERROR(EQKV_INVALID_ARGUMENT, "not a file", saved.session.save(pipe));
  EXPECT_ERROR(EQKV_INVALID_ARGUMENT, absent, saved.session.save(absent + "/snapshot"));
  const std::string in_the_way = saved.directory / ".absent.partial";
  EXPECT(mkfifo(in_the_way.c_str(), 0600) == 0);
  EXPECT_ERROR(EQKV_INVALID_ARGUMENT, "in the way", saved.session.save(absent));
  EXPECT(access(in_the_way.c_str(), F_OK) == 0);
}

TEST(save_fails, "a save that fails keeps the last snapshot and leaves nothing else behind") {
  Saved saved;
  saved.session.rewind(120);
  {
    const FileSizeLimit limit(saved.bytes.size() / 3);
    EXPECT_ERROR(EQKV_OUT_OF_MEMORY, "free space", saved.session.save(saved.path));
  }
  EXPECT(read_file(saved.path) == saved.bytes);
  EXPECT(access(saved.partial.c_str(), F_OK) != 0);
}

TEST(not_ours,
     "a file that has the name of an unfinished save keeps its content under its other names") {
  Saved saved;
  const std::string kept = saved.directory / "kept", users = saved.path + ".partial";
  write_file(users, "a file of the user");
  for (const std::string& content : {saved.bytes, std::string()}) {
    write_file(kept, content);
    EXPECT(link(kept.c_str(), saved.partial.c_str()) == 0);
    saved.target.restore(saved.path);
    if (!content.empty()) saved.target.restore(saved.partial);  // and is mapped
    saved.session.rewind(saved.session.length() - 10);
    saved.session.save(saved.path);
    EXPECT(read_file(kept) == content && access(saved.partial.c_str(), F_OK) != 0);
    if (content.empty()) continue;
    saved.target.rewind(149);
    saved.target.evaluate(&some_tokens(150)[149], 1, nullptr);  // reads every row
    saved.target.save(saved.path);
    EXPECT(read_file(saved.path) == saved.bytes);
  }
  EXPECT(read_file(users) == "a file of the user");
}

TEST(long_name, "a name that leaves no room for that of the unfinished file is one sentence") {
  Saved saved;
  const std::string longest = saved.directory / std::string(246, 'x');  // of 255
  saved.session.save(longest);
  EXPECT(read_file(longest) == saved.bytes);
  EXPECT_ERROR(EQKV_INVALID_ARGUMENT, "choose a shorter one", saved.session.save(longest + "x"));
  EXPECT(access((longest + "x").c_str(), F_OK) != 0);
}

TEST(stale, "what a killed save left behind is removed, what a running one writes is left alone") {
  Saved saved;
  const std::string& partial = saved.partial;
  write_file(partial, std::string(saved.bytes.size() * 2, 'x'));
  saved.session.save(saved.path);
  EXPECT(read_file(saved.path) == saved.bytes && access(partial.c_str(), F_OK) != 0);

  write_file(partial, "of another");
  const int other = open(partial.c_str(), O_RDWR);
  EXPECT(flock(other, LOCK_EX | LOCK_NB) == 0);
  EXPECT_ERROR(EQKV_INVALID_ARGUMENT, "being saved there", saved.session.save(saved.path));
  EXPECT(read_file(partial) == "of another");
  close(other);
  saved.session.save(saved.path);
  EXPECT(read_file(saved.path) == saved.bytes);
}

#if defined(__linux__)
TEST(finished, "a snapshot that another writer finishes just before we lock it is not written over") {
  Saved saved;
  const std::string &partial = saved.partial, theirs = std::string(5000, 'x');
  for (const bool third :
       {false, true}) {  // whether one more writer has begun meanwhile, and was killed
    write_file(partial, theirs);
    std::ifstream opened(partial, std::ios::binary);
    before_flock = [&] {
      rename(partial.c_str(), saved.path.c_str());
      if (third) write_file(partial, "y");
    };
    saved.session.save(saved.path);
    EXPECT(!before_flock && read_file(saved.path) == saved.bytes);
    EXPECT(std::string(std::istreambuf_iterator<char>(opened), {}) == theirs);
    EXPECT(access(partial.c_str(), F_OK) != 0);
  }
}
#endif

TEST(writers, "however many save to one path, it always holds the whole snapshot of one of them") {
  Saved saved;
  std::atomic<int> running{3}, whole{0}, saves{0}, failures{0};
  std::vector<std::thread> threads;
  for (int32_t i = 0; i < 3; ++i) {
    threads.emplace_back([&, i] {
      Session session(saved.model, {300, 64});
      session.fill(100 + i, static_cast<uint64_t>(i));
      for (int n = 0; n < 60; ++n) {
        try {
          session.save(saved.path);
          ++saves;
        } catch (const Error& error) {
          if (!std::strstr(error.what(), "being saved there")) ++failures;
        }
      }
      --running;
    });
  }
  while (running > 0) {
    try {
      saved.target.restore(saved.path);
      ++whole;
    } catch (const Error&) {
      ++failures;
    }
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT(whole > 0 && saves > 0 && failures == 0);
  EXPECT(access(saved.partial.c_str(), F_OK) != 0);
}
