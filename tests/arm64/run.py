"""`make test-arm64`: the library on emulated 64-bit ARM processors, built by a cross compiler and run by qemu.

1. Each object of the kernel has the instructions of its set, and none of a later one; each processor takes its set.
2. The native tests (`ctest`) on each processor.
3. The bundled model in an arm64 Python, with the onnxruntime wheel for aarch64: the host's tokens, all of them.
4. Instructions a token: time under emulation says nothing.

Left out: snapshot_program and attack_program, which tests on the host drive (one is killed by a preloaded library, the
other reads files that PyTorch has made), and the ExecuTorch engine, which has not been built for arm64 yet.

What cannot be downloaded is skipped, loudly, and is an error with EDGE_QKV_ARM64=required; all else that goes wrong
always is one. Everything is kept in build/arm64.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
BUILD = ROOT / "build" / "arm64"
NATIVE = BUILD / "native"

SYSROOT = "/usr/aarch64-linux-gnu"
COMPILER, EMULATOR, BOOTSTRAP = "aarch64-linux-gnu-g++", "qemu-aarch64", "mmdebstrap"
# Program -> the package of Debian and Ubuntu that has it.
TOOLS = {COMPILER: "g++-aarch64-linux-gnu", EMULATOR: "qemu-user", BOOTSTRAP: "mmdebstrap"}

# Instruction set -> the instructions of its own in the kernel's object, in the order of the sets.
ISAS = {"armv8": None, "dotprod": "sdot", "i8mm": "smmla"}
# Processor as qemu names it -> the instruction set that the library must take there.
PROCESSORS = {"cortex-a53": "armv8", "cortex-a76": "dotprod", "max,sve=off": "i8mm"}

PROMPT, GOLDEN_TOKENS = "KING HENRY.\n", 64
# fp32 weights, for onnxruntime rounds activations of others otherwise on processors without integer products.
CACHES = ("fp16", "int8")
DEBIAN, PYTHON = "bookworm", "3.11"
WHEELS = ("numpy", "onnxruntime", "tokenizers")
PLATFORMS = ("manylinux_2_28_aarch64", "manylinux_2_27_aarch64", "manylinux2014_aarch64")
CPUINFO = "processor\t: 0\nFeatures\t: fp asimd\nCPU implementer\t: 0x41\nCPU architecture: 8\nCPU part\t: 0xd03\n"

# The 1.2B Q-MQA, a token after so many.
HEADS, LAYERS, CONTEXT = 32, 22, 32768
DEPTHS = (1024, 4096)


class Failed(Exception):
    """A build or a test went wrong."""


class Unavailable(Exception):
    """Something cannot be downloaded or installed here."""


def run(*command: object, failure: type[Exception] = Failed, **environment: str) -> subprocess.CompletedProcess:
    words = [str(word) for word in command]
    done = subprocess.run(words, capture_output=True, text=True, env=os.environ | environment, timeout=1800)
    if done.returncode != 0:
        raise failure(f"{' '.join(words)}\n{done.stdout}{done.stderr}ended with {done.returncode}")
    return done


def at_once(work: Callable, items: Iterable) -> list:
    """The results of work(item), as many at a time as there are processors."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(work, items))


@contextmanager
def step(title: str):
    print(f"== {title}", flush=True)
    start = time.monotonic()
    yield
    print(f"   {time.monotonic() - start:.0f} s", flush=True)


# ---- what is needed ----


def need(*tools: str) -> None:
    """Installs what is not there, where that is possible."""

    def missing() -> list[str]:
        return [TOOLS[name] for name in tools if shutil.which(name) is None]

    if not missing():
        return
    why = "only root can install them" if os.geteuid() != 0 else "there is no apt-get"
    if os.geteuid() == 0 and shutil.which("apt-get"):
        environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
        for command in (("update",), ("install", "-y", "--no-install-recommends", *missing())):
            done = subprocess.run(["apt-get", "-q", *command], capture_output=True, text=True, env=environment)
        why = (done.stdout + done.stderr).strip()
    if missing():
        raise Unavailable(f"missing: {', '.join(missing())} ({why})\ninstall: apt-get install {' '.join(missing())}")


def tool(name: str) -> str:
    """cmake, ninja and edge-qkv are beside the interpreter."""
    return shutil.which(name, path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])) or name


def emulated(processor: str, prefix: Path | str = SYSROOT) -> dict[str, str]:
    return {"QEMU_CPU": processor, "QEMU_LD_PREFIX": str(prefix)}


# ---- the native tests ----


def build() -> None:
    options = ("-DCMAKE_BUILD_TYPE=Release", "-DEDGE_QKV_BUILD_TESTS=ON", "-DEDGE_QKV_EXECUTORCH=OFF")
    tools = (f"-DCMAKE_TOOLCHAIN_FILE={HERE / 'toolchain.cmake'}", f"-DCMAKE_MAKE_PROGRAM={tool('ninja')}")
    run(tool("cmake"), "-S", ROOT, "-B", NATIVE, "-G", "Ninja", *tools, *options)
    run(tool("cmake"), "--build", NATIVE)


def objects_keep_to_their_instructions() -> None:
    own = list(ISAS.values())
    for place, isa in enumerate(ISAS):
        (built,) = NATIVE.rglob(f"attention_kernel_{isa}.cpp.o")
        listing = run("aarch64-linux-gnu-objdump", "-d", "--no-show-raw-insn", built).stdout
        used = {mnemonic for mnemonic in own if mnemonic and re.search(rf"\t{mnemonic}\t", listing)}
        if own[place] not in used | {None} or used & set(own[place + 1 :]):
            raise Failed(f"the object of {isa} uses {', '.join(used) or 'none'} of {own}")


def takes_its_instruction_set(processor: str) -> None:
    """By itself, and where EDGE_QKV_ISA asks for another: an earlier one is taken, a later one is not."""
    bench = (EMULATOR, NATIVE / "attention_bench", "--depths", 0, "--tokens", 1, "--rounds", 1)
    best, order = PROCESSORS[processor], list(ISAS)
    for asked in ("", *ISAS):
        expected = min(asked or best, best, key=order.index)
        taken = run(*bench, **emulated(processor), EDGE_QKV_ISA=asked).stdout.split(";")[0]
        if taken != f"instruction set: {expected}":
            raise Failed(f"{processor}, EDGE_QKV_ISA={asked}: {taken}, expected {expected}")


def each_processor_takes_its_instruction_set() -> None:
    at_once(takes_its_instruction_set, PROCESSORS)


def native_tests() -> None:
    """Every test that ctest knows, on every processor."""
    listed = json.loads(run(tool("ctest"), "--test-dir", NATIVE, "--show-only=json-v1").stdout)["tests"]
    if {test["name"] for test in listed} < {"attention", "core"}:
        raise Failed("ctest lists no native tests")

    def work(job: tuple[dict, str]) -> str:
        test, processor = job
        start = time.monotonic()
        done = run(EMULATOR, *test["command"], **emulated(processor))
        last = done.stdout.strip().split("\n")[-1]
        if not re.fullmatch(r"[1-9]\d* passed, 0 failed", last):
            raise Failed(f"{processor}: {test['name']}: {done.stdout}")
        print(f"   {processor}: {test['name']}: {last} ({time.monotonic() - start:.0f} s)", flush=True)

    # the longest first
    at_once(work, [(test, processor) for test in listed for processor in PROCESSORS])


# ---- the bundled model ----


def once(folder: Path, fill: Callable[[Path], None]) -> Path:
    """A folder that is filled by the first run; what a failed one has left there is no such folder."""
    if not folder.exists():
        part = folder.with_name(folder.name + ".part")
        shutil.rmtree(part, ignore_errors=True)
        fill(part)
        part.rename(folder)
    return folder


def debian(folder: Path) -> None:
    need(BOOTSTRAP)
    packages = "--include=python3,libstdc++6,libgomp1"
    options = ("--quiet", "--architectures=arm64", "--variant=extract", packages)
    run(BOOTSTRAP, *options, DEBIAN, folder, failure=Unavailable)
    (folder / "proc").mkdir(exist_ok=True)
    (folder / "proc/cpuinfo").write_text(CPUINFO)  # qemu shows the host's, which onnxruntime makes nothing of


def wheels(folder: Path) -> None:
    """The releases that the host has, without what only their Python sides need."""
    platforms = [word for platform in PLATFORMS for word in ("--platform", platform)]
    pinned = [f"{name}=={version(name)}" for name in WHEELS]
    pip = (sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--only-binary=:all:", *platforms)
    run(*pip, "--python-version", PYTHON, "--target", folder, *pinned, failure=Unavailable)


def package(cache: str) -> Path:
    export = (sys.executable, "-m", "edge_qkv", "export", ROOT / "edge_qkv/bundled", "--no-parity", "--weights", "fp32")
    return once(BUILD / f"bundled-{cache}", lambda part: run(*export, "--cache", cache, "--output", part))


def golden_texts() -> None:
    root, site = once(BUILD / "debian", debian), once(BUILD / "-".join(map(version, WHEELS)), wheels)
    script = (HERE / "golden.py", PROMPT, GOLDEN_TOKENS, *map(package, CACHES))

    def texts(*command: object, **environment: str) -> list[dict]:
        return [json.loads(line) for line in run(*command, *script, **environment).stdout.splitlines()]

    expected = texts(sys.executable)

    def work(processor: str) -> None:
        python = (EMULATOR, root / f"usr/bin/python{PYTHON}")
        paths = {"PYTHONPATH": f"{ROOT}:{site}", "PYTHONPYCACHEPREFIX": str(BUILD / "pycache")}
        library = {"EDGE_QKV_LIBRARY": str(NATIVE / "libedge_qkv.so")}
        written = texts(*python, **emulated(processor, root), **paths, **library)
        for cache, here, there in zip(CACHES, expected, written, strict=True):
            if there["isa"] != PROCESSORS[processor] or here["tokens"] != there["tokens"]:
                raise Failed(f"{processor}, {cache} cache: not the host's text\nhost:  {here}\narm64: {there}")
        print(f"   {processor}: {' and '.join(CACHES)} cache: the host's {GOLDEN_TOKENS} tokens", flush=True)

    at_once(work, PROCESSORS)
    print("   " + "".join([PROMPT, expected[0]["text"]]).replace("\n", "\n   "))


# ---- instructions ----


def counting_plugin() -> Path:
    """Built for the version of the plugin interface that the installed qemu has."""
    errors = ""
    for number in range(1, 10):
        plugin = BUILD / f"count_instructions-{number}.so"
        source = HERE / "count_instructions.c"
        run(os.environ.get("CC", "cc"), "-O2", "-shared", "-fPIC", f"-DVERSION={number}", source, "-o", plugin)
        try:
            counted("cortex-a53", plugin, "fp16", depth=0, rounds=1)
            return plugin
        except Failed as error:
            errors = str(error)
    raise Unavailable(f"this qemu takes no plugins, which count instructions: {errors}")


def counted(processor: str, plugin: Path, cache: str, depth: int, rounds: int, isa: str = "") -> tuple[int, str]:
    """Instructions of the whole program, and the checksum of what it computes."""
    bench = (NATIVE / "attention_bench", "--heads", HEADS, "--dims", 64, "--layers", 1, "--threads", 1, "--tokens", 1)
    what = ("--types", cache, "--depths", depth, "--rounds", rounds)
    command = (EMULATOR, "-plugin", plugin, *bench, *what)
    done = run(*command, **emulated(processor), EDGE_QKV_ISA=isa)
    return int(re.search(r"instructions: (\d+)", done.stderr)[1]), done.stdout.split()[-1]


def instruction_counts() -> None:
    """A layer's attention for one token, as the difference of two runs that differ in the number of calls."""
    plugin = counting_plugin()
    cases = [(processor, cache) for processor in PROCESSORS for cache in CACHES]

    def work(case: tuple[str, str]) -> tuple[list[int], list[str]]:
        runs = [[counted(case[0], plugin, case[1], depth, rounds) for rounds in (1, 3)] for depth in DEPTHS]
        return [(many - one) // 2 for (one, _), (many, _) in runs], [checksum for (_, checksum), _ in runs]

    results = dict(zip(cases, at_once(work, cases), strict=True))
    print(f"   One token of a Q-MQA with {HEADS} heads of 64, one thread; the last column is computed from the others:")
    print(f"   {LAYERS} layers and {CONTEXT:,} tokens, each as dear as one between the two depths.")
    depths = "".join(f"{f'a layer at {depth:,}':>19}" for depth in DEPTHS)
    print(f"   {'processor':12} {'set':8} {'cache':6}{depths}{'a row and head':>17}{f'a token at {CONTEXT:,}':>20}")
    for (processor, cache), ((near, far), _) in results.items():
        slope = (far - near) / (DEPTHS[1] - DEPTHS[0])
        token = LAYERS * (far + slope * (CONTEXT - 1 - DEPTHS[1]))
        counts = f"{near:19,}{far:19,}{slope / HEADS:17.1f}{token / 1e9:18.2f}e9"
        print(f"   {processor.split(',')[0]:12} {PROCESSORS[processor]:8} {cache:6}{counts}", flush=True)
    best = "max,sve=off"
    _, checksum = counted(best, plugin, "int8", DEPTHS[0], 1, isa="dotprod")
    if checksum != results[best, "int8"][1][0]:
        raise Failed("i8mm and dotprod compute other outputs from the same int8 rows")


def main() -> int:
    BUILD.mkdir(parents=True, exist_ok=True)
    skipped = []

    def part(title: str, *work: Callable[[], None]) -> None:
        try:
            with step(title):
                for do in work:
                    do()
        except Unavailable as error:
            skipped.append(f"{title}\n{error}")

    try:
        part("cross compiler and emulator, and all that needs them", lambda: need(COMPILER, EMULATOR))
        if not skipped:
            part("build", build)
            part("instruction sets", objects_keep_to_their_instructions, each_processor_takes_its_instruction_set)
            part("native tests", native_tests)
            part("the bundled model's text", golden_texts)
            part("instructions a token", instruction_counts)
    except Failed as error:
        print(f"\ntest-arm64 FAILED\n{error}", file=sys.stderr)
        return 1
    required = os.environ.get("EDGE_QKV_ARM64") == "required"
    for what in skipped:
        print(f"\n{'!' * 80}\ntest-arm64 SKIPPED: {what}\n{'!' * 80}", file=sys.stderr)
    if skipped and required:
        print("EDGE_QKV_ARM64=required makes that an error", file=sys.stderr)
    return 1 if skipped and required else 0


if __name__ == "__main__":
    sys.exit(main())
