// Times of the attention operator alone, by cache type, width, depth, new tokens and threads.
//
// Runs on the instruction set in use (EDGE_QKV_ISA forces one). Within a round the cache types and
// widths take turns, so that what else the machine does meets all of them: compare figures of one line.
//
//   attention_bench [--depths N,...] [--tokens N,...] [--threads N,...] [--types fp32,fp16,int8]
//                   [--heads N] [--kv-heads N] [--dims D[:V],...] [--rotary none|conjugate|read]
//                   [--key-weight] [--separate] [--reads] [--window N] [--layers N] [--milliseconds N]
//                   [--rounds N]
//
// --dims: head_dim and value_dim, the same where there is one number. --reads: an earlier layer wrote
// the rows.
// --rounds takes the place of --milliseconds where
// instructions are counted: N rounds beside the warm one.
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "attention_problem.h"
#include "core/checksum.h"

using namespace edge_qkv;

namespace {

struct Options {
  std::vector<int64_t> depths = {0, 1024, 8192, 32768};
  std::vector<int64_t> tokens = {1, 64, 512};
  std::vector<int64_t> threads = {1, 2};
  std::vector<CacheType> types = {CacheType::kFloat16, CacheType::kInt8};
  std::vector<std::string> dims = {"64"};
  Case shape = {1, 0, 32, 1, 64};
  int layers = 4;             // caches that take turns, so that none stays in a core's own cache
  double milliseconds = 600;  // a line and cache type
  int64_t rounds = 0;         // where not 0: rounds of a line, whatever they take
};

std::vector<std::string> split(const char* list, char between = ',') {
  std::vector<std::string> parts(1);
  for (; *list; ++list) {
    if (*list == between) {
      parts.emplace_back();
    } else {
      parts.back() += *list;
    }
  }
  return parts;
}

std::vector<int64_t> numbers(const char* list) {
  std::vector<int64_t> parsed;
  for (const std::string& part : split(list)) parsed.push_back(std::atoll(part.c_str()));
  return parsed;
}

template <size_t N>
int find(const char* const (&names)[N], const std::string& name) {
  for (size_t i = 0; i < N; ++i) {
    if (name == names[i]) return static_cast<int>(i);
  }
  std::fprintf(stderr, "attention_bench: %s is not known.\n", name.c_str());
  std::exit(2);
}

Options parse(int argc, char** argv) {
  Options o;
  for (int i = 1; i < argc; ++i) {
    const std::string name = argv[i];
    bool* const flags[] = {&o.shape.separate, &o.shape.key_weight, &o.shape.reads};
    if (name == "--separate" || name == "--key-weight" || name == "--reads") {
      *flags[find({"--separate", "--key-weight", "--reads"}, name)] = true;
      continue;
    }
    const char* value = i + 1 < argc ? argv[++i] : "";
    if (name == "--depths") {
      o.depths = numbers(value);
    } else if (name == "--tokens") {
      o.tokens = numbers(value);
    } else if (name == "--threads") {
      o.threads = numbers(value);
    } else if (name == "--dims") {
      o.dims = split(value);
    } else if (name == "--types") {
      o.types.clear();
      for (const std::string& type : split(value)) {
        o.types.push_back(static_cast<CacheType>(find({"fp32", "fp16", "int8"}, type)));
      }
    } else if (name == "--rotary") {
      o.shape.rotary = static_cast<Rotary>(find({"none", "conjugate", "read"}, value));
    } else {
      int64_t window = 0, layers = 0, milliseconds = 0, heads = 0, kv_heads = 0;
      const char* const names[] = {"--window", "--layers", "--milliseconds",
                                   "--rounds", "--heads",  "--kv-heads"};
      int64_t* const places[] = {&window, &layers, &milliseconds, &o.rounds, &heads, &kv_heads};
      *places[find(names, name)] = std::atoll(value);
      if (window) o.shape.window = window;
      if (layers) o.layers = static_cast<int>(layers);
      if (milliseconds) o.milliseconds = static_cast<double>(milliseconds);
      if (heads) o.shape.heads = static_cast<int>(heads);
      if (kv_heads) o.shape.kv_heads = static_cast<int>(kv_heads);
    }
  }
  return o;
}

// The layers of one cache type and width, and how long a call takes, in ms.
struct Contestant {
  std::vector<Problem> layers;
  std::vector<double> times;

  void run(Pool& pool, int threads, std::vector<char>& workspace) {
    for (Problem& layer : layers) {
      workspace.resize(attention_workspace_bytes(layer.p, threads));
      const auto start = std::chrono::steady_clock::now();
      attention(layer.p, workspace.data(), threads, pool.handle());
      const std::chrono::duration<double, std::milli> took = std::chrono::steady_clock::now() - start;
      times.push_back(took.count());
    }
  }
};

void measure(const Options& o, int64_t depth, int64_t tokens) {
  Case c = o.shape;
  c.past = depth, c.tokens = tokens;
  std::vector<Contestant> contestants;
  for (const std::string& dims : o.dims) {
    c.dim = static_cast<int>(numbers(split(dims.c_str(), ':').front().c_str())[0]);
    c.value_dim = static_cast<int>(numbers(split(dims.c_str(), ':').back().c_str())[0]);
    c.rotary_dim = c.rotary == Rotary::kNone ? 0 : std::min(c.dim, c.value_dim) / 2 * 2;
    for (CacheType type : o.types) {
      contestants.emplace_back();
      for (int i = 0; i < o.layers; ++i) contestants.back().layers.emplace_back(c, type);
    }
  }
  for (int64_t threads : o.threads) {
    Pool pool(static_cast<int>(threads));
    std::vector<char> workspace;
    const auto start = std::chrono::steady_clock::now();
    for (Contestant& contestant : contestants) {
      contestant.run(pool, static_cast<int>(threads), workspace);  // warm
      contestant.times.clear();
    }
    std::chrono::duration<double, std::milli> took;
    int64_t rounds = 0;
    do {
      for (Contestant& contestant : contestants)
        contestant.run(pool, static_cast<int>(threads), workspace);
      took = std::chrono::steady_clock::now() - start;
    } while (o.rounds ? ++rounds < o.rounds
                      : took.count() < o.milliseconds * static_cast<double>(contestants.size()));
    std::printf("%7lld %6lld %7lld", (long long)depth, (long long)tokens, (long long)threads);
    double first = 0;
    for (Contestant& contestant : contestants) {
      std::vector<double>& times = contestant.times;
      std::sort(times.begin(), times.end());
      const AttentionParams& p = contestant.layers[0].p;
      const double speed = (p.head_dim + p.value_dim) / times[0];
      if (first == 0) first = speed;
      std::printf("  %9.4f %9.4f %6.2fx", times[0], times[times.size() / 2], speed / first);
    }
    if (o.rounds) {
      std::printf("  outputs");
      for (const Contestant& contestant : contestants) {
        const AttentionParams& p = contestant.layers[0].p;
        Checksum sum;
        sum.add(p.output, contestant.layers[0].outputs() * sizeof *p.output);
        std::printf(" %016llx", (unsigned long long)sum.value());
      }
    }
    std::printf("\n");
    std::fflush(stdout);
  }
}

}  // namespace

int main(int argc, char** argv) {
  const Options o = parse(argc, argv);
  std::printf("instruction set: %s; %d heads on %d; ms a layer; x: products a second, to the first's\n",
              isa_name(), o.shape.heads, o.shape.kv_heads);
  std::printf("  depth tokens threads");
  for (const std::string& dims : o.dims) {
    for (CacheType type : o.types) {
      std::printf("  %9s %9s       x", dims.c_str(), cache_type_info(type).name);
    }
  }
  std::printf("\n");
  for (int64_t depth : o.depths) {
    for (int64_t tokens : o.tokens) measure(o, depth, tokens);
  }
  return 0;
}
