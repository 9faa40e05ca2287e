#define EDGE_QKV_ISA baseline
#include "/tmp/wt-cache/runtime/core/attention_kernel.cpp"
