"""Breaks one thing after the other on purpose and says whether the tests notice: `python tests/mutations/run.py`.

Each line of MUTATIONS changes a few characters of a source file, runs the quick tests that are expected to fail, and
puts the file back as it was. `caught`: a test failed. `MISSED`: all passed. The editable installation reads Python
sources where they are, so the change is made in the working tree: a file with uncommitted changes is refused, and while
this runs nobody else should build or test there. Native changes are compiled into build/mutations, about a minute the
first time.

Arguments: words; only mutations whose description has one of them are tried. --list: only list them. The exit code is
1 where a mutation was missed, or has no place in the sources any more.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from native_build import build  # noqa: E402

CORE, ATTENTION = ("core_test",), ("attention_test", "--quick")  # native programs; all other commands are pytest's


@dataclass(frozen=True)
class Mutation:
    what: str
    file: str
    text: str  # is there exactly once
    instead: str
    tests: Sequence[str]  # a native program with its options, or what pytest takes


_FUNCTION = ("tests/export/test_onnx_function.py",)
MUTATIONS = (
    Mutation(
        "a wrong rotation in the ONNX function",
        "export/onnx/function.py",
        "{out}_right = Add (",
        "{out}_right = Sub (",
        _FUNCTION,
    ),
    Mutation(
        "a window one row too long in the ONNX function",
        "export/onnx/function.py",
        "recent = Greater (",
        "recent = GreaterOrEqual (",
        _FUNCTION,
    ),
    Mutation(
        "the key weight left out of the ONNX function",
        "export/onnx/function.py",
        'keys = "keys_weighted"',
        "pass",
        _FUNCTION,
    ),
    Mutation(
        "a window one row too short in the reference",
        "edge_qkv/attention.py",
        "(row > query - spec.window)",
        "(row > query - spec.window + 1)",
        _FUNCTION,
    ),
    Mutation(
        "rows counted without the margin",
        "edge_qkv/config.py",
        "self.sinks + self.window + (margin or self.window))",
        "self.sinks + self.window + margin)",
        ("tests/test_config.py",),
    ),
    Mutation(
        "a layer that reads the rows of another than it should",
        "edge_qkv/config.py",
        "found.append(last[spec.rows_of])",
        "found.append(next(iter(last.values())))",
        ("tests/test_config.py",),
    ),
    Mutation(
        "an ExecuTorch program with a layer's buffers in another order",
        "export/executorch/program.py",
        "self.names[tensor.layer].append(buffer_name(tensor))",
        "self.names[tensor.layer].insert(0, buffer_name(tensor))",
        ("tests/test_every_variant.py", "-k", "test_executorch and gemma"),
    ),
    Mutation(
        "readers of a cache that the check of an ExecuTorch program does not know",
        "export/executorch/program.py",
        "enumerate(config.rows_from) if source != layer)",
        "enumerate(config.rows_from) if source == layer)",
        ("tests/test_every_variant.py", "-k", "test_executorch and gemma"),
    ),
    Mutation(
        "a window one row too long in Core ML",
        "export/coreml/program.py",
        "passed = row <= query - spec.window",
        "passed = row < query - spec.window",
        ("tests/export/test_coreml.py", "-k", "what_the_decoder_computes"),
    ),
    Mutation(
        "the text of a stop string kept in the conversation",
        "edge_qkv/tokenizer.py",
        "stopped(len(ends) - _pieces_before(given + min(found), ends))",
        "stopped(0)",
        ("tests/test_text.py",),
    ),
    Mutation(
        "a rewind beyond the margin that evaluates nothing again",
        "runtime/core/session.cpp",
        "if (!can_go_back_to(length)) {",
        "if (length < 0) {",
        CORE,
    ),
    Mutation(
        "a prompt that keeps tokens whose rows are gone",
        "runtime/core/session.cpp",
        "if (!can_go_back_to(static_cast<int64_t>(kept))) kept = 0;",
        "",
        CORE,
    ),
    Mutation(
        "one page too many given back",
        "runtime/core/cache.cpp",
        "const size_t end = to_page_start(row_bytes(i) * static_cast<size_t>(first));",
        "const size_t end = to_whole_pages(row_bytes(i) * static_cast<size_t>(first));",
        CORE,
    ),
    Mutation(
        "moved rows turned by one position too many",
        "runtime/core/overflow.cpp",
        "rotations.emplace_back(kind, -distance);",
        "rotations.emplace_back(kind, -distance - 1);",
        CORE,
    ),
    Mutation(
        "a snapshot that leaves out the page of its first live row",
        "runtime/core/snapshot.cpp",
        "const uint64_t end = (first_live * row_bytes) & ~(alignment - 1);",
        "const uint64_t end = (first_live * row_bytes + alignment - 1) & ~(alignment - 1);",
        CORE,
    ),
    Mutation(
        "values cached with the width of keys",
        "runtime/core/description.cpp",
        "add(Part::kValue, kind.value_dim);",
        "add(Part::kValue, kind.head_dim);",
        CORE,
    ),
    Mutation(
        "a row too few that the next token sees",
        "runtime/core/layout.cpp",
        "return last_rows(tensor, length, tensor.window - 1);",
        "return last_rows(tensor, length, tensor.window - 2);",
        CORE,
    ),
    Mutation(
        "a plan without the margin of rewinds",
        "runtime/core/plan.cpp",
        "plan.cache = resident_bytes(layout, context, exact.margin, exact.prefill_chunk);",
        "plan.cache = resident_bytes(layout, context, 1, exact.prefill_chunk);",
        CORE,
    ),
    Mutation(
        "a repetition penalty that favours negative logits",
        "runtime/core/sampler.cpp",
        ": logit * options_.repetition_penalty;",
        ": logit / options_.repetition_penalty;",
        CORE,
    ),
    Mutation(
        "a window one row too short in the kernel",
        "runtime/attention/rows.h",
        "begin >= p.sinks ? to - p.window : 0;",
        "begin >= p.sinks ? to - p.window + 1 : 0;",
        ATTENTION,
    ),
    Mutation(
        "the key weight left out of keys that are not rotated",
        "runtime/attention/rows.h",
        "    weigh_row(p, out, out);\n",
        "",
        ATTENTION,
    ),
    Mutation(
        "the rotary offset left out",
        "runtime/attention/rows.h",
        "const int half = p.rotary_dim / 2, at = p.rotary_offset;",
        "const int half = p.rotary_dim / 2, at = 0;",
        ATTENTION,
    ),
    Mutation(
        "the scales of keys for those of values",
        "runtime/attention/rows.h",
        "{p.value_cache, p.value_scales, p.value_dim}",
        "{p.value_cache, p.key_scales, p.value_dim}",
        ATTENTION,
    ),
)


def try_tests(tests: Sequence[str]) -> tuple[bool, str]:
    """Whether one of the tests fails, and which; or why none did."""
    if tests in (CORE, ATTENTION):
        options = "-DCMAKE_BUILD_TYPE=Release", "-DEDGE_QKV_EXECUTORCH=OFF"
        try:
            program = build("mutations", *options, targets=(tests[0],)) / tests[0]
        except AssertionError as error:
            return False, f"it does not compile: {str(error)[-300:]}"
        command = [str(program), *tests[1:]]
    else:
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-m", "not slow", "-p", "no:cacheprovider", *tests]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as running:
        for line in running.stdout:
            if line.startswith("FAILED"):  # of both
                running.kill()
                return True, line.removeprefix("FAILED").strip(" :\n").split(" - ")[0]
    # Anything but a crash is none: pytest that collects or runs no test ends with an error, too.
    return running.returncode < 0, f"{' '.join(tests)} ended with {running.returncode}"


def verdict(mutation: Mutation) -> tuple[bool, str]:
    """Whether it was caught, and by what."""
    path = ROOT / mutation.file
    if subprocess.run(["git", "diff", "--quiet", "HEAD", "--", mutation.file], cwd=ROOT).returncode:
        sys.exit(f"{mutation.file} has uncommitted changes; commit them first")
    original = path.read_text()
    if original.count(mutation.text) != 1:
        return False, f"its text is in {mutation.file} {original.count(mutation.text)} times, not once"
    try:
        path.write_text(original.replace(mutation.text, mutation.instead))
        return try_tests(mutation.tests)
    finally:
        path.write_text(original)


def main(words: Sequence[str]) -> int:
    chosen = [m for m in MUTATIONS if all(w == "--list" for w in words) or any(w in m.what for w in words)]
    missed = 0
    for mutation in chosen:
        if "--list" in words:
            print(f"{mutation.file}: {mutation.what}")
            continue
        began = time.monotonic()
        caught, why = verdict(mutation)
        missed += not caught
        seconds = time.monotonic() - began
        print(
            f"{'caught' if caught else 'MISSED'}  {mutation.what} ({mutation.file}), {seconds:.0f} s: {why}", flush=True
        )
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
