// The part of ONNX Runtime's C ABI that we use, so that the build needs none of its headers.
//
// ONNX Runtime hands out a table of function pointers, OrtApi, that only ever grows at its end; a
// function is known by its slot. tests/runtime/test_ort_abi.py holds slots, signatures, enums and
// structs against the official header. Its enums are int here, as they are in the ABI.
#pragma once

#include <cstddef>
#include <cstdint>

// Opaque objects, under their official names so that the test can compare signatures.
struct OrtAllocator;
struct OrtApi;
struct OrtCustomOp;
struct OrtCustomOpDomain;
struct OrtEnv;
struct OrtKernelContext;
struct OrtKernelInfo;
struct OrtMemoryInfo;
struct OrtOpAttr;
struct OrtRunOptions;
struct OrtSession;
struct OrtSessionOptions;
struct OrtShapeInferContext;
struct OrtStatus;
struct OrtTensorTypeAndShapeInfo;
struct OrtTypeInfo;
struct OrtValue;

namespace edge_qkv::ort {

// All that we need is there since ONNX Runtime 1.20.
constexpr uint32_t kApiVersion = 20;

// OrtApiBase
struct ApiBase {
  const OrtApi* (*GetApi)(uint32_t version);
  const char* (*GetVersionString)();
};

// ONNXTensorElementDataType
constexpr int kUndefined = 0, kFloat = 1, kInt8 = 3, kInt64 = 7, kFloat16 = 10;
// OrtErrorCode
constexpr int kFail = 1, kInvalidArgument = 2;
// OrtLoggingLevel, ExecutionMode, OrtAllocatorType, OrtMemType
constexpr int kLogFatal = 4, kSequential = 0, kDeviceAllocator = 0, kMemTypeDefault = 0;
// OrtOpAttrType
constexpr int kAttributeInt = 1;
// OrtCustomOpInputOutputCharacteristic
constexpr int kRequired = 0, kOptional = 1;

// slot, name, result, parameters
#define EDGE_QKV_ORT_FUNCTIONS(X)                                                                      \
  X(0, CreateStatus, OrtStatus*, (int code, const char* message))                                      \
  X(1, GetErrorCode, int, (const OrtStatus*))                                                          \
  X(2, GetErrorMessage, const char*, (const OrtStatus*))                                               \
  X(3, CreateEnv, OrtStatus*, (int log_level, const char* log_id, OrtEnv**))                           \
  X(7, CreateSession, OrtStatus*,                                                                      \
    (const OrtEnv*, const char* path, const OrtSessionOptions*, OrtSession**))                         \
  X(9, Run, OrtStatus*,                                                                                \
    (OrtSession*, const OrtRunOptions*, const char* const* input_names, const OrtValue* const* inputs, \
     size_t input_count, const char* const* output_names, size_t output_count, OrtValue** outputs))    \
  X(10, CreateSessionOptions, OrtStatus*, (OrtSessionOptions**))                                       \
  X(11, SetOptimizedModelFilePath, OrtStatus*, (OrtSessionOptions*, const char* path))                 \
  X(13, SetSessionExecutionMode, OrtStatus*, (OrtSessionOptions*, int mode))                           \
  X(17, DisableMemPattern, OrtStatus*, (OrtSessionOptions*))                                           \
  X(19, DisableCpuMemArena, OrtStatus*, (OrtSessionOptions*))                                          \
  X(22, SetSessionLogSeverityLevel, OrtStatus*, (OrtSessionOptions*, int level))                       \
  X(24, SetIntraOpNumThreads, OrtStatus*, (OrtSessionOptions*, int threads))                           \
  X(25, SetInterOpNumThreads, OrtStatus*, (OrtSessionOptions*, int threads))                           \
  X(26, CreateCustomOpDomain, OrtStatus*, (const char* domain, OrtCustomOpDomain**))                   \
  X(27, CustomOpDomain_Add, OrtStatus*, (OrtCustomOpDomain*, const OrtCustomOp*))                      \
  X(28, AddCustomOpDomain, OrtStatus*, (OrtSessionOptions*, OrtCustomOpDomain*))                       \
  X(30, SessionGetInputCount, OrtStatus*, (const OrtSession*, size_t*))                                \
  X(31, SessionGetOutputCount, OrtStatus*, (const OrtSession*, size_t*))                               \
  X(33, SessionGetInputTypeInfo, OrtStatus*, (const OrtSession*, size_t index, OrtTypeInfo**))         \
  X(34, SessionGetOutputTypeInfo, OrtStatus*, (const OrtSession*, size_t index, OrtTypeInfo**))        \
  X(36, SessionGetInputName, OrtStatus*, (const OrtSession*, size_t index, OrtAllocator*, char**))     \
  X(37, SessionGetOutputName, OrtStatus*, (const OrtSession*, size_t index, OrtAllocator*, char**))    \
  X(39, CreateRunOptions, OrtStatus*, (OrtRunOptions**))                                               \
  X(41, RunOptionsSetRunLogSeverityLevel, OrtStatus*, (OrtRunOptions*, int level))                     \
  X(46, RunOptionsSetTerminate, OrtStatus*, (OrtRunOptions*))                                          \
  X(47, RunOptionsUnsetTerminate, OrtStatus*, (OrtRunOptions*))                                        \
  X(49, CreateTensorWithDataAsOrtValue, OrtStatus*,                                                    \
    (const OrtMemoryInfo*, void* data, size_t bytes, const int64_t* shape, size_t rank, int type,      \
     OrtValue**))                                                                                      \
  X(51, GetTensorMutableData, OrtStatus*, (OrtValue*, void**))                                         \
  X(55, CastTypeInfoToTensorInfo, OrtStatus*, (const OrtTypeInfo*, const OrtTensorTypeAndShapeInfo**)) \
  X(59, SetDimensions, OrtStatus*, (OrtTensorTypeAndShapeInfo*, const int64_t* shape, size_t rank))    \
  X(60, GetTensorElementType, OrtStatus*, (const OrtTensorTypeAndShapeInfo*, int*))                    \
  X(61, GetDimensionsCount, OrtStatus*, (const OrtTensorTypeAndShapeInfo*, size_t*))                   \
  X(62, GetDimensions, OrtStatus*, (const OrtTensorTypeAndShapeInfo*, int64_t* shape, size_t rank))    \
  X(65, GetTensorTypeAndShape, OrtStatus*, (const OrtValue*, OrtTensorTypeAndShapeInfo**))             \
  X(69, CreateCpuMemoryInfo, OrtStatus*, (int allocator_type, int memory_type, OrtMemoryInfo**))       \
  X(76, AllocatorFree, OrtStatus*, (OrtAllocator*, void*))                                             \
  X(78, GetAllocatorWithDefaultOptions, OrtStatus*, (OrtAllocator**))                                  \
  X(85, KernelInfoGetAttribute_float, OrtStatus*, (const OrtKernelInfo*, const char* name, float*))    \
  X(86, KernelInfoGetAttribute_int64, OrtStatus*, (const OrtKernelInfo*, const char* name, int64_t*))  \
  X(87, KernelInfoGetAttribute_string, OrtStatus*,                                                     \
    (const OrtKernelInfo*, const char* name, char* out, size_t* size))                                 \
  X(88, KernelContext_GetInputCount, OrtStatus*, (const OrtKernelContext*, size_t*))                   \
  X(89, KernelContext_GetOutputCount, OrtStatus*, (const OrtKernelContext*, size_t*))                  \
  X(90, KernelContext_GetInput, OrtStatus*, (const OrtKernelContext*, size_t index, const OrtValue**)) \
  X(91, KernelContext_GetOutput, OrtStatus*,                                                           \
    (OrtKernelContext*, size_t index, const int64_t* shape, size_t rank, OrtValue**))                  \
  X(93, ReleaseStatus, void, (OrtStatus*))                                                             \
  X(94, ReleaseMemoryInfo, void, (OrtMemoryInfo*))                                                     \
  X(95, ReleaseSession, void, (OrtSession*))                                                           \
  X(96, ReleaseValue, void, (OrtValue*))                                                               \
  X(97, ReleaseRunOptions, void, (OrtRunOptions*))                                                     \
  X(98, ReleaseTypeInfo, void, (OrtTypeInfo*))                                                         \
  X(99, ReleaseTensorTypeAndShapeInfo, void, (OrtTensorTypeAndShapeInfo*))                             \
  X(100, ReleaseSessionOptions, void, (OrtSessionOptions*))                                            \
  X(101, ReleaseCustomOpDomain, void, (OrtCustomOpDomain*))                                            \
  X(130, AddSessionConfigEntry, OrtStatus*, (OrtSessionOptions*, const char* key, const char* value))  \
  X(268, ShapeInferContext_GetInputTypeShape, OrtStatus*,                                              \
    (const OrtShapeInferContext*, size_t index, OrtTensorTypeAndShapeInfo**))                          \
  X(269, ShapeInferContext_GetAttribute, OrtStatus*,                                                   \
    (const OrtShapeInferContext*, const char* name, const OrtOpAttr**))                                \
  X(270, ShapeInferContext_SetOutputTypeShape, OrtStatus*,                                             \
    (const OrtShapeInferContext*, size_t index, const OrtTensorTypeAndShapeInfo*))                     \
  X(272, ReadOpAttr, OrtStatus*, (const OrtOpAttr*, int type, void* data, size_t bytes, size_t* out))  \
  X(274, KernelContext_ParallelFor, OrtStatus*,                                                        \
    (const OrtKernelContext*, void (*fn)(void*, size_t), size_t total, size_t batches,                 \
     void* user_data))

// The functions above, by name, taken out of ONNX Runtime's table.
struct Api {
#define EDGE_QKV_ORT_MEMBER(slot, name, result, parameters) result(*name) parameters;
  EDGE_QKV_ORT_FUNCTIONS(EDGE_QKV_ORT_MEMBER)
#undef EDGE_QKV_ORT_MEMBER

  explicit Api(const OrtApi* table) {
    const auto slots = reinterpret_cast<void* const*>(table);
#define EDGE_QKV_ORT_TAKE(slot, name, result, parameters) \
  name = reinterpret_cast<result(*) parameters>(slots[slot]);
    EDGE_QKV_ORT_FUNCTIONS(EDGE_QKV_ORT_TAKE)
#undef EDGE_QKV_ORT_TAKE
  }
};

// OrtCustomOp as of API version 20: how an operator of ours describes itself.
struct CustomOp {
  uint32_t version;
  void* (*CreateKernel)(const CustomOp*, const OrtApi*, const OrtKernelInfo*);  // before version 16
  const char* (*GetName)(const CustomOp*);
  const char* (*GetExecutionProviderType)(const CustomOp*);  // null: CPU
  int (*GetInputType)(const CustomOp*, size_t index);
  size_t (*GetInputTypeCount)(const CustomOp*);
  int (*GetOutputType)(const CustomOp*, size_t index);
  size_t (*GetOutputTypeCount)(const CustomOp*);
  void (*KernelCompute)(void* kernel, OrtKernelContext*);  // before version 16
  void (*KernelDestroy)(void* kernel);
  int (*GetInputCharacteristic)(const CustomOp*, size_t index);
  int (*GetOutputCharacteristic)(const CustomOp*, size_t index);
  int (*GetInputMemoryType)(const CustomOp*, size_t index);
  int (*GetVariadicInputMinArity)(const CustomOp*);
  int (*GetVariadicInputHomogeneity)(const CustomOp*);
  int (*GetVariadicOutputMinArity)(const CustomOp*);
  int (*GetVariadicOutputHomogeneity)(const CustomOp*);
  OrtStatus* (*CreateKernelV2)(const CustomOp*, const OrtApi*, const OrtKernelInfo*, void** kernel);
  OrtStatus* (*KernelComputeV2)(void* kernel, OrtKernelContext*);
  OrtStatus* (*InferOutputShapeFn)(const CustomOp*, OrtShapeInferContext*);
  int (*GetStartVersion)(const CustomOp*);
  int (*GetEndVersion)(const CustomOp*);
  // Pairs of an input and an output that may share memory.
  size_t (*GetMayInplace)(int** inputs, int** outputs);
  void (*ReleaseMayInplace)(int* inputs, int* outputs);
  size_t (*GetAliasMap)(int** inputs, int** outputs);
  void (*ReleaseAliasMap)(int* inputs, int* outputs);
};

}  // namespace edge_qkv::ort
