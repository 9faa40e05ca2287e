// Reads files that are meant to do harm, for a test that makes them: each must be refused with an Error.
//
//   attack_program model FILE...            describes each model file
//   attack_program pte FILE...              describes each ExecuTorch program
//   attack_program snapshot MODEL FILE...   restores each into a session of the model
//
// Prints a line for each file: "refused: SENTENCE" or "accepted".
#include <cstdio>
#include <cstring>

#include "core/error.h"
#include "core/session.h"
#include "engines/engines.h"
#include "engines/executorch/model_file.h"

using namespace edge_qkv;

namespace {

// A model that can hold a cache and computes nothing.
class Described : public EngineModel {
 public:
  explicit Described(ModelInfo info) : info_(std::move(info)) {}
  const ModelInfo& info() const override { return info_; }
  void release_pages() const override {}
  std::unique_ptr<EngineState> open(const CacheView&) const override {
    struct Idle : EngineState {
      void forward(const int32_t*, size_t, int64_t, size_t, float*) override {}
      void interrupt() noexcept override {}
      void resume() noexcept override {}
    };
    return std::make_unique<Idle>();
  }

 private:
  const ModelInfo info_;
};

template <class Function>
void attack(Function function) {
  try {
    function();
    std::printf("accepted\n");
  } catch (const Error& error) {
    std::printf("refused: %s\n", error.what());
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc > 2 && std::strcmp(argv[1], "model") == 0) {
    for (int i = 2; i < argc; ++i) attack([&] { describe_model(argv[i]); });
    return 0;
  }
  if (argc > 2 && std::strcmp(argv[1], "pte") == 0) {
    for (int i = 2; i < argc; ++i) attack([&] { et::describe_pte(argv[i]); });
    return 0;
  }
  if (argc > 3 && std::strcmp(argv[1], "snapshot") == 0) {
    Session session(std::make_shared<Described>(describe_model(argv[2])), {96, 16});
    const int32_t token = 1;
    session.evaluate(&token, 1, nullptr);
    for (int i = 3; i < argc; ++i) {
      attack([&] { session.restore(argv[i]); });
      if (session.length() != 1) return 1;  // a refusal changes nothing
    }
    return 0;
  }
  std::fprintf(stderr, "usage: attack_program model|pte FILE... | snapshot MODEL FILE...\n");
  return 2;
}
