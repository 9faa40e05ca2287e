#include "processor.h"

#include <cstdint>
#include <cstdio>
#include <set>

#if defined(__x86_64__) || defined(__i386__)
#include <cpuid.h>
#elif defined(__linux__)
#include <sys/auxv.h>
#elif defined(__APPLE__)
#include <sys/sysctl.h>
#endif

namespace edge_qkv {
namespace {

[[maybe_unused]] void append_hex(std::string* text, uint64_t value) {
  char buffer[24];
  std::snprintf(buffer, sizeof buffer, " %llx", static_cast<unsigned long long>(value));
  *text += buffer;
}

#if defined(__linux__) && !defined(__x86_64__) && !defined(__i386__)
// The kinds of cores, from lines such as "CPU part : 0xd0b"; a machine may have several.
std::string core_parts() {
  std::set<std::string> parts;
  if (FILE* file = std::fopen("/proc/cpuinfo", "re")) {
    char line[256];
    while (std::fgets(line, sizeof line, file)) {
      unsigned part = 0;
      if (std::sscanf(line, "CPU part : %x", &part) == 1) {
        std::string text;
        append_hex(&text, part);
        parts.insert(text);
      }
    }
    std::fclose(file);
  }
  std::string all;
  for (const std::string& part : parts) all += part;
  return all;
}
#endif

}  // namespace

#if defined(__x86_64__) || defined(__i386__)

// Family, model and stepping, the features of leaf 1 and 7, and the register states that the system
// saves: a processor may have AVX-512 or AMX and the system may not allow it. The APIC number in leaf 1
// is left out, it depends on the core that asks.
std::string processor_name() {
  std::string name = "x86";
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (__get_cpuid(1, &a, &b, &c, &d)) {
    append_hex(&name, a);
    append_hex(&name, c);
    append_hex(&name, d);
    if (c & bit_OSXSAVE) {
      unsigned low = 0, high = 0;
      __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
      append_hex(&name, uint64_t{high} << 32 | low);
    }
  }
  for (unsigned part = 0; part < 2; ++part) {
    if (!__get_cpuid_count(7, part, &a, &b, &c, &d)) continue;
    for (const unsigned value : {a, b, c, d}) append_hex(&name, value);
  }
  return name;
}

#elif defined(__linux__)

std::string processor_name() {
  std::string name = "arm";
  append_hex(&name, getauxval(AT_HWCAP));
#ifdef AT_HWCAP2
  append_hex(&name, getauxval(AT_HWCAP2));
#endif
  return name + " parts" + core_parts();
}

#elif defined(__APPLE__)

std::string processor_name() {
  char brand[128] = "unknown";
  size_t size = sizeof brand - 1;
  sysctlbyname("machdep.cpu.brand_string", brand, &size, nullptr, 0);
  return brand;
}

#else

std::string processor_name() { return "unknown"; }

#endif

}  // namespace edge_qkv
