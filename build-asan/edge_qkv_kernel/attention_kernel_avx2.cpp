#define EDGE_QKV_ISA avx2
#include "/tmp/wt-cache/runtime/core/attention_kernel.cpp"
