"""Our own declarations of ONNX Runtime's C ABI against its official header.

The header is found through EDGE_QKV_ORT_HEADERS, a directory with onnxruntime_c_api.h.
"""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
OFFICIAL = Path(os.environ.get("EDGE_QKV_ORT_HEADERS") or ROOT.parent / "shared/reference/onnxruntime")
COMPILER = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")

pytestmark = [
    pytest.mark.skipif(
        not (OFFICIAL / "onnxruntime_c_api.h").exists(),
        reason="ONNX Runtime's header is not here; set EDGE_QKV_ORT_HEADERS to its directory",
    ),
    pytest.mark.skipif(not COMPILER, reason="there is no C++ compiler"),
]

# Both headers in one program. A function of the official header counts as equal to ours when both are after
# `Plain`, which drops noexcept, reads enums as int and our structs as the official ones.
PRELUDE = """
#include <cstddef>
#include <cstdio>
#include <type_traits>
#include "onnxruntime_c_api.h"
#include "engines/onnxruntime/ort_api.h"

namespace ours = edge_qkv::ort;

template <class T> struct Plain { using type = std::conditional_t<std::is_enum_v<T>, int, T>; };
template <> struct Plain<ours::CustomOp> { using type = OrtCustomOp; };
template <> struct Plain<ours::ApiBase> { using type = OrtApiBase; };
template <class T> struct Plain<const T> { using type = const typename Plain<T>::type; };
template <class T> struct Plain<T*> { using type = typename Plain<T>::type*; };
template <class R, class... A> struct Plain<R(A...)> {
  using type = typename Plain<R>::type(typename Plain<A>::type...);
};
template <class R, class... A> struct Plain<R(A...) noexcept> {
  using type = typename Plain<R>::type(typename Plain<A>::type...);
};
template <class A, class B>
constexpr bool same = std::is_same_v<typename Plain<A>::type, typename Plain<B>::type>;

static_assert(sizeof(OrtErrorCode) == sizeof(int) && sizeof(ONNXTensorElementDataType) == sizeof(int));
"""


def run(tmp_path: Path, body: str) -> str:
    """Compiles PRELUDE and `body`, runs it and returns what it prints."""
    source, program = tmp_path / "abi.cpp", tmp_path / "abi"
    source.write_text(PRELUDE + body)
    command = [COMPILER, "-std=c++17", f"-I{OFFICIAL}", f"-I{ROOT / 'runtime'}", str(source), "-o", str(program)]
    built = subprocess.run(command, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    return subprocess.run([program], capture_output=True, text=True, check=True).stdout


def test_every_function_has_the_official_slot_and_signature(tmp_path):
    printed = run(
        tmp_path,
        """
#define CHECK(slot, name, result, parameters)                                                          \\
  static_assert(offsetof(OrtApi, name) == slot * sizeof(void*), "slot of " #name);                     \\
  static_assert(same<decltype(OrtApi::name), result(*) parameters>, "signature of " #name);            \\
  static_assert(offsetof(OrtApi, name) <= offsetof(OrtApi, SetEpDynamicOptions), #name " is too new"); \\
  ++count;
// SetEpDynamicOptions is the last function of API version 20.
static_assert(ours::kApiVersion == 20);

int main() {
  int count = 0;
  EDGE_QKV_ORT_FUNCTIONS(CHECK)
  static_assert(sizeof(OrtApi) / sizeof(void*) > 284);
  std::printf("%d", count);
}
""",
    )
    assert int(printed) > 50


def test_structs_lie_in_memory_as_the_official_ones(tmp_path):
    members = [
        "version",
        "CreateKernel",
        "GetName",
        "GetExecutionProviderType",
        "GetInputType",
        "GetInputTypeCount",
        "GetOutputType",
        "GetOutputTypeCount",
        "KernelCompute",
        "KernelDestroy",
        "GetInputCharacteristic",
        "GetOutputCharacteristic",
        "GetInputMemoryType",
        "GetVariadicInputMinArity",
        "GetVariadicInputHomogeneity",
        "GetVariadicOutputMinArity",
        "GetVariadicOutputHomogeneity",
        "CreateKernelV2",
        "KernelComputeV2",
        "InferOutputShapeFn",
        "GetStartVersion",
        "GetEndVersion",
        "GetMayInplace",
        "ReleaseMayInplace",
        "GetAliasMap",
        "ReleaseAliasMap",
    ]
    checks = "\n".join(f"CHECK(OrtCustomOp, ours::CustomOp, {member})" for member in members)
    last = members[-1]
    run(
        tmp_path,
        f"""
#define CHECK(official, own, member)                                                       \\
  static_assert(offsetof(official, member) == offsetof(own, member), "offset of " #member); \\
  static_assert(same<decltype(official::member), decltype(own::member)>, "type of " #member);
{checks}
CHECK(OrtApiBase, ours::ApiBase, GetApi)
CHECK(OrtApiBase, ours::ApiBase, GetVersionString)
static_assert(sizeof(OrtApiBase) == sizeof(ours::ApiBase));
static_assert(sizeof(ours::CustomOp) == offsetof(ours::CustomOp, {last}) + sizeof(void*), "a member is unchecked");
int main() {{}}
""",
    )


def test_enum_values_are_the_official_ones(tmp_path):
    run(
        tmp_path,
        """
static_assert(ours::kUndefined == ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED);
static_assert(ours::kFloat == ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT);
static_assert(ours::kInt64 == ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64);
static_assert(ours::kFloat16 == ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16);
static_assert(ours::kFail == ORT_FAIL);
static_assert(ours::kInvalidArgument == ORT_INVALID_ARGUMENT);
static_assert(ours::kAttributeInt == ORT_OP_ATTR_INT);
static_assert(ours::kLogFatal == ORT_LOGGING_LEVEL_FATAL);
static_assert(ours::kSequential == ORT_SEQUENTIAL);
static_assert(ours::kDeviceAllocator == OrtDeviceAllocator);
static_assert(ours::kMemTypeDefault == OrtMemTypeDefault);
static_assert(ours::kRequired == INPUT_OUTPUT_REQUIRED);
static_assert(ours::kOptional == INPUT_OUTPUT_OPTIONAL);
int main() {}
""",
    )
