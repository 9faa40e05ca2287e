# The attention operator: edge_qkv_kernel, an object library that the native library and its tests link.
#
# kernel.cpp is compiled once per instruction set of the target's architecture. A source file can
# be in a target only once, so each instruction set gets a generated file that includes it.

include(CheckCXXCompilerFlag)
include(CheckCXXSourceCompiles)

# Ask the compiler, not CMAKE_SYSTEM_PROCESSOR: it knows what cpu.cpp will see.
check_cxx_source_compiles("
#if !defined(__x86_64__)
#error
#endif
int main() {}" EDGE_QKV_TARGET_X86_64)
check_cxx_source_compiles("
#if !defined(__aarch64__)
#error
#endif
int main() {}" EDGE_QKV_TARGET_AARCH64)

if(EDGE_QKV_TARGET_X86_64)
  set(_isas baseline avx2 avx512)
  check_cxx_compiler_flag(-mavxvnni EDGE_QKV_AVXVNNI)  # since GCC 11 and Clang 12
  if(EDGE_QKV_AVXVNNI)
    list(APPEND _isas avxvnni)
  endif()
  set(_flags_baseline "")
  set(_flags_avx2 -mavx2 -mfma -mf16c)
  set(_flags_avxvnni ${_flags_avx2} -mavxvnni)
  set(_flags_avx512 -mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx512vnni -mf16c -mfma)
elseif(EDGE_QKV_TARGET_AARCH64)
  set(_isas armv8 dotprod i8mm)
  set(_flags_armv8 -march=armv8-a)
  set(_flags_dotprod -march=armv8.2-a+dotprod+fp16)
  set(_flags_i8mm -march=armv8.2-a+dotprod+fp16+i8mm)
else()
  set(_isas baseline)
  set(_flags_baseline "")
endif()

add_library(edge_qkv_kernel OBJECT
  ${CMAKE_CURRENT_LIST_DIR}/attention.cpp
  ${CMAKE_CURRENT_LIST_DIR}/cpu.cpp)

foreach(_isa IN LISTS _isas)
  set(_source ${CMAKE_CURRENT_BINARY_DIR}/edge_qkv_kernel/attention_kernel_${_isa}.cpp)
  file(CONFIGURE OUTPUT ${_source} CONTENT
"#define EDGE_QKV_ISA @_isa@
#include \"@CMAKE_CURRENT_LIST_DIR@/kernel.cpp\"
" @ONLY)
  # Optimised even where no build type is chosen; fused multiply-adds, which strict C++ modes switch off.
  set_source_files_properties(${_source} PROPERTIES
    COMPILE_OPTIONS "${_flags_${_isa}};$<$<NOT:$<CONFIG:Debug>>:-O3>;-ffp-contract=fast"
    OBJECT_DEPENDS "${CMAKE_CURRENT_LIST_DIR}/kernel.cpp")
  target_sources(edge_qkv_kernel PRIVATE ${_source})
endforeach()

target_compile_definitions(edge_qkv_kernel PRIVATE $<$<BOOL:${EDGE_QKV_AVXVNNI}>:EDGE_QKV_AVXVNNI>)
target_compile_features(edge_qkv_kernel PUBLIC cxx_std_17)
target_include_directories(edge_qkv_kernel PUBLIC ${CMAKE_CURRENT_LIST_DIR}/..)
set_target_properties(edge_qkv_kernel PROPERTIES
  POSITION_INDEPENDENT_CODE ON
  CXX_VISIBILITY_PRESET hidden
  VISIBILITY_INLINES_HIDDEN ON)
