// The smallest test frame: TEST registers a function, EXPECT notes what does not hold and goes on.
#pragma once

#include <cstdio>
#include <functional>
#include <string>
#include <vector>

#include "core/error.h"

namespace edge_qkv::test {

struct Test {
  const char* name;
  void (*run)();
};

inline std::vector<Test>& tests() {
  static std::vector<Test> all;
  return all;
}

inline bool current_good = true;

inline void expect(bool good, const char* what, const char* file, int line) {
  if (good) return;
  std::printf("  %s:%d: does not hold: %s\n", file, line, what);
  current_good = false;
}

// That `action` throws Error with `status` and a sentence that holds `words`.
inline void expect_error(eqkv_status status, const std::string& words,
                         const std::function<void()>& action, const char* file, int line) {
  try {
    action();
    std::printf("  %s:%d: no error\n", file, line);
  } catch (const Error& error) {
    const std::string sentence = error.what();
    if (error.status() == status && sentence.find(words) != std::string::npos) return;
    std::printf("  %s:%d: status %d, \"%s\"\n", file, line, error.status(), error.what());
  }
  current_good = false;
}

}  // namespace edge_qkv::test

#define EXPECT(condition) edge_qkv::test::expect((condition), #condition, __FILE__, __LINE__)
#define EXPECT_ERROR(status, words, ...) \
  edge_qkv::test::expect_error(status, words, [&] { __VA_ARGS__; }, __FILE__, __LINE__)

#define TEST(function, name)                                       \
  static void function();                                          \
  static const bool function##_registered =                        \
      (edge_qkv::test::tests().push_back({name, function}), true); \
  static void function()
