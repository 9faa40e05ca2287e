// Runs the tests that the other files of this program register.
#include <cstdio>

#include "test.h"

int main() {
  int passed = 0, failed = 0;
  for (const auto& test : edge_qkv::test::tests()) {
    edge_qkv::test::current_good = true;
    try {
      test.run();
    } catch (const std::exception& error) {
      std::printf("  threw: %s\n", error.what());
      edge_qkv::test::current_good = false;
    }
    std::printf("%s: %s\n", edge_qkv::test::current_good ? "ok" : "FAILED", test.name);
    std::fflush(stdout);
    edge_qkv::test::current_good ? ++passed : ++failed;
  }
  std::printf("%d passed, %d failed\n", passed, failed);
  return failed ? 1 : 0;
}
