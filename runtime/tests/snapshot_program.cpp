// Saves and checks snapshots of a session on the tiny engine, for a test that kills it while it saves.
//
//   snapshot_program save PATH SEED   a session made from SEED
//   snapshot_program check PATH       prints what PATH holds
//   snapshot_program show SEED        prints what `check` prints of a session made from SEED
#include <cstdio>
#include <cstring>
#include <string>

#include "core/random.h"
#include "core/session.h"
#include "fake_engine.h"

using namespace edge_qkv;

namespace {

void evaluate_from(uint64_t seed, Session& session) {
  std::vector<int32_t> tokens(200 + seed % 100);
  for (int32_t& token : tokens) token = static_cast<int32_t>(scramble(++seed) % test::kVocab);
  session.evaluate(tokens.data(), tokens.size(), nullptr);
}

// The tokens, and the logits before and after one more, which depend on every row.
void print(Session& session) {
  for (const int32_t token : session.tokens()) std::printf("%d", token);
  for (int i = 0; i < 2; ++i) {
    for (int64_t j = 0; j < test::kVocab; ++j) std::printf(" %g", session.logits()[j]);
    const int32_t token = 1;
    session.evaluate(&token, 1, nullptr);
  }
  std::printf("\n");
}

}  // namespace

int main(int argc, char** argv) {
  const std::string command = argc > 2 ? argv[1] : "";
  Session session(std::make_shared<test::FakeModel>(test::kLayouts[4]), {400, 64});
  try {
    if (command == "save" && argc == 4) {
      evaluate_from(std::stoull(argv[3]), session);
      session.save(argv[2]);
    } else if (command == "check") {
      session.restore(argv[2]);
      print(session);
    } else if (command == "show") {
      evaluate_from(std::stoull(argv[2]), session);
      print(session);
    } else {
      std::fprintf(stderr, "usage: snapshot_program save PATH SEED | check PATH | show SEED\n");
      return 2;
    }
  } catch (const Error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
  return 0;
}
