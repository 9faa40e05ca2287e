#include "cpu.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>

#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#elif defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>
#endif

namespace edge_qkv {
namespace {

#if defined(__x86_64__)

bool always() { return true; }

bool has_avx2() {
  // F16C has no name in older compilers' __builtin_cpu_supports. That of AVX2 asks the operating system
  // for the registers, which is all that F16C needs beyond its bit.
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  const bool f16c = __get_cpuid(1, &eax, &ebx, &ecx, &edx) && (ecx & (1u << 29));
  return f16c && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
}

#if defined(EDGE_QKV_AVXVNNI)
bool has_avxvnni() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  return has_avx2() && __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) && (eax & (1u << 4));
}
#endif

bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512vnni");
}

#elif defined(__aarch64__)

bool always() { return true; }

#if defined(__linux__)
// Bits of the Linux arm64 ABI; older system headers lack some of the names.
bool has_dotprod() {
  constexpr unsigned long kFloat16 = (1ul << 9) | (1ul << 10), kDotProduct = 1ul << 20;
  return (getauxval(AT_HWCAP) & (kFloat16 | kDotProduct)) == (kFloat16 | kDotProduct);
}
bool has_i8mm() {
  constexpr unsigned long kI8mm = 1ul << 13;
  return has_dotprod() && (getauxval(AT_HWCAP2) & kI8mm);
}
#elif defined(__APPLE__)
bool feature(const char* name) {
  int value = 0;
  size_t size = sizeof value;
  return sysctlbyname(name, &value, &size, nullptr, 0) == 0 && value != 0;
}
bool has_dotprod() {
  return feature("hw.optional.arm.FEAT_DotProd") && feature("hw.optional.arm.FEAT_FP16");
}
bool has_i8mm() { return has_dotprod() && feature("hw.optional.arm.FEAT_I8MM"); }
#else
bool has_dotprod() { return false; }
bool has_i8mm() { return false; }
#endif

#else

bool always() { return true; }

#endif

struct Level {
  const Kernel* kernel;
  bool (*supported)();
};

// What this build has, the least demanding first; that one always runs.
const Level kLevels[] = {
#if defined(__x86_64__)
    {&baseline::kKernel, always},
    {&avx2::kKernel, has_avx2},
#if defined(EDGE_QKV_AVXVNNI)
    {&avxvnni::kKernel, has_avxvnni},
#endif
    {&avx512::kKernel, has_avx512},
#elif defined(__aarch64__)
    {&armv8::kKernel, always},
    {&dotprod::kKernel, has_dotprod},
    {&i8mm::kKernel, has_i8mm},
#else
    {&baseline::kKernel, always},
#endif
};

struct Choice {
  const Kernel* kernel = nullptr;
  bool failed = false;
  char error[160] = {};

  Choice() {
#if defined(__x86_64__)
    __builtin_cpu_init();
#endif
    for (const Level& level : kLevels) {
      if (level.supported()) kernel = level.kernel;
    }
    const char* forced = std::getenv("EDGE_QKV_ISA");
    if (!forced || !*forced) return;
    const char* reason = "is not in this build";
    for (const Level& level : kLevels) {
      if (std::strcmp(forced, level.kernel->name) != 0) continue;
      if (level.supported()) {
        kernel = level.kernel;
        return;
      }
      reason = "is not supported by this processor";
    }
    failed = true;
    std::snprintf(error, sizeof error, "EDGE_QKV_ISA=%.40s %s; using %s instead.", forced, reason,
                  kernel->name);
  }
};

const Choice& choice() {
  static const Choice chosen;
  return chosen;
}

}  // namespace

const Kernel& active_kernel() { return *choice().kernel; }

const char* isa_name() { return choice().kernel->name; }

const char* isa_error() { return choice().failed ? choice().error : nullptr; }

}  // namespace edge_qkv
