#define EDGE_QKV_ISA avx512
#include "/tmp/wt-cache/runtime/core/attention_kernel.cpp"
