"""A model in this project's engines beside others on the same processor: `edge-qkv bench peers`."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from edge_qkv import EdgeQKVError, InputError, ModelConfig, Package, plan
from edge_qkv.bench import machine, plots, report
from edge_qkv.bench.common import add_measuring, add_output, command_line, prepare_output, run, say
from edge_qkv.bench.figures import figure, rate
from edge_qkv.bench.package import speed
from edge_qkv.bench.package.command import checked_depths
from edge_qkv.bench.package.random_weights import default_directory, named_config, random_package
from edge_qkv.bench.peers import report as peers_report
from edge_qkv.bench.peers.process import PeerDied, PeerProcess
from edge_qkv.bench.peers.report import NO_FLASH, OURS, OURS_TOO
from edge_qkv.bench.peers.rounding import perplexity_change
from edge_qkv.bench.results import Result
from edge_qkv.checks import thread_count, whole
from edge_qkv.presets import apply_variant

MODEL = "1.2B/Q-MQA"
DEPTHS = 0, 1024, 4096, 8192, 16384, 32767
PROMPTS = 512, 4096, 16384
SECONDS, PROMPT_SECONDS = 10.0, 900.0
_LONG, _SHORT = 1 << 30, 1024
_ALIKE = 64  # tokens of the prompt after which all engines of the same weights should say the same
_OTHER_MODEL = 0.7  # standard deviations between logits; those of models that have nothing in common are at 1.4

SUMMARY = "Compare a model with random weights in this project's engines and in llama.cpp and ONNX Runtime alone."


@dataclass(frozen=True)
class Contestant:
    """A model in an engine."""

    name: str
    kind: str  # of peer_engines.PEERS
    target: str  # of the package
    weights: str
    cache: str = "fp16"
    variant: str = ""  # another one than the model's
    needs: str = ""  # a module
    longest: int = _LONG  # of the prompts that it reads: those of minutes are for few


# The first is the measure of all others.
CONTESTANTS = (
    Contestant(OURS, "ours", "onnx", "int4"),
    Contestant("edge-qkv, ONNX Runtime, int8 cache", "ours", "onnx", "int4", "int8"),
    Contestant(OURS_TOO, "ours", "executorch", "8da4w", needs="executorch"),
    *(
        Contestant(f"{name}{mode}", f"llama.cpp{mode}", "gguf", "q4_0", "fp16", variant, "llama_cpp", longest)
        for name, variant, longest in (
            ("llama.cpp", "", _LONG),
            ("llama.cpp, GQA-4", "GQA-4", _SHORT),
            ("llama.cpp, multi-head", "QKV", _SHORT),
        )
        for mode in ("", NO_FLASH)
    ),
    Contestant("ONNX Runtime, GroupQueryAttention", "GroupQueryAttention", "onnx", "int4", longest=4096),
    Contestant("ONNX Runtime, our function", "function", "onnx", "int4", longest=_SHORT),
)

NOTES = f"""\
contestants, each a process of its own that waits while the others have their turn:
  {OURS:34}  this project's runtime; also with an int8 cache, and with ExecuTorch as its engine
  llama.cpp                           on a GGUF file of the same weights: one kv head, keys and values apart; as it
                                      comes (it then chooses flash attention) and without flash attention
  llama.cpp, GQA-4 and multi-head     the same sizes with 4 and with all kv heads
  ONNX Runtime, GroupQueryAttention   the package's graph with ONNX Runtime's operator in place of ours, cache in fp32
  ONNX Runtime, our function          the package without our library: the operator expanded, cache copied each token

The cache is filled with noise up to a depth. Decoding is greedy; "x" is how many times as long as the first it takes,
the median of the rounds (least..most). An engine whose tokens take longer than --seconds at a depth is not measured
deeper, and a prompt that would take longer than --prompt-seconds is left out: nothing is extrapolated. Each engine
reads what it has decoded once more as a chunk, and ends the benchmark where it then says something else. Engines that
are not installed are left out, with a note. Long prompts are for those of the same weights. Packages stay in
--directory.

examples:
  edge-qkv bench peers --output peers             the 1.2B configuration: 40 minutes, 6 GB of packages, 16 GB of memory
  edge-qkv bench peers 300M/Q-MQA --depths 0 4096 --prompts 512
"""


@dataclass
class Participant:
    """A contestant that takes part, and what was found of it."""

    contestant: Contestant
    package: Package
    depths: list[int]
    lengths: list[int]
    process: PeerProcess | None = None
    decode: dict[int, list[float]] = field(default_factory=dict)  # depth -> milliseconds a token, of each round
    decoded: dict[int, list[int]] = field(default_factory=dict)
    verified: list[int] = field(default_factory=lambda: [0, 0])  # tokens that are equal, of how many
    memory: dict[int, dict[str, int]] = field(default_factory=dict)
    prefill: dict[int, list[float]] = field(default_factory=dict)  # length -> seconds, of each round
    notes: list[str] = field(default_factory=list)
    difference: float | None = None
    perplexity: float = 0.0  # by which part that of the bundled model rises with such weights

    @property
    def context(self) -> int:
        deepest = self.depths[-1] + speed.TOKENS if self.depths else 1
        return min(max(deepest, *self.lengths, _ALIKE), self.package.config.max_positions)


def main(argv: Sequence[str] | None = None) -> int:
    parser = command_line("peers", SUMMARY, NOTES)
    add = parser.add_argument
    add("model", nargs="?", default=MODEL, help="a size such as 300M/Q-MQA, or a config.json; default: %(default)s")
    add_output(parser, "bench.json and bench.md")
    add_measuring(parser, 5, "rounds")
    add("--seconds", type=float, default=SECONDS, help="after which no round is added; default: %(default)s")
    add("--prompt-seconds", type=float, default=PROMPT_SECONDS, help="most for one prompt; default: %(default)s")
    add("--depths", type=int, nargs="+", metavar="N", help=f"tokens in the cache; default: {_listed(DEPTHS)}")
    add("--prompts", type=int, nargs="*", metavar="N", help=f"tokens of the prompts; default: {_listed(PROMPTS)}")
    add("--only", nargs="+", metavar="NAME", help="contestants whose name holds one of these words")
    add(
        "--directory", type=Path, help="where packages are kept; default: edge-qkv/random in the user's cache directory"
    )
    return run(parser, _peers, argv)


def _listed(numbers: Sequence[int]) -> str:
    return " ".join(map(str, numbers)) + ", as far as the model goes"


def _peers(arguments: argparse.Namespace) -> None:
    prepare_output(arguments.output)
    name, config = arguments.model, named_config(arguments.model)
    if config is None:
        raise InputError(f"{name}: is no config such as {MODEL}, and no config.json")
    rounds, threads = whole(arguments.repeats, "--repeats", 1), thread_count(arguments.threads)
    for option, value in (("seconds", arguments.seconds), ("prompt-seconds", arguments.prompt_seconds)):
        if not 0 < value < 1e6:
            raise InputError(f"--{option} {value}: must be above 0 and below 1,000,000")
    depths, most = checked_depths(config, name, arguments.depths, DEPTHS), config.max_positions
    if arguments.prompts is None:
        lengths = [n for n in PROMPTS if n <= most]
    else:
        lengths = sorted({whole(n, "--prompts", 1, most, f", the most {name} goes") for n in arguments.prompts})
    chosen = [c for c in CONTESTANTS if not arguments.only or any(word in c.name for word in arguments.only)]
    if OURS not in [c.name for c in chosen]:
        raise InputError(f"--only {' '.join(arguments.only)}: leaves out {OURS!r}, the measure of the others")
    threads = plan(config, context=1, threads=threads).threads
    options = {"threads": threads, "repeats": rounds, "seconds": arguments.seconds}
    result = Result("peers", arguments.output, machine=machine.describe(), options=options, model=name)
    directory = arguments.directory or default_directory()
    with result.kept(), ExitStack() as stack:
        participants, left_out = _opened(chosen, name, config, directory, depths, lengths, threads, stack)
        _compare_logits(participants)
        _add_perplexity(participants, directory)
        result.add("left_out", left_out)
        for depth in depths:
            _decode(participants, depth, rounds, arguments.seconds)
            result.add("contestants", [as_json(one) for one in participants])
        for i, length in enumerate(lengths):
            before = lengths[i - 1] if i else None
            _prefill(participants, length, before, rounds, arguments.seconds, arguments.prompt_seconds)
            result.add("contestants", [as_json(one) for one in participants])
        result.add("targets", peers_report.targets_as_json(result.content))
    content = result.finish()
    parts = peers_report.parts(content)
    print(json.dumps(content, indent=2) if arguments.json else report.as_text(parts))
    if arguments.output is not None:
        report.write(arguments.output, parts, plots.of_peers(content))


# ---- who takes part ----


def _opened(
    chosen: Sequence[Contestant],
    name: str,
    config: ModelConfig,
    directory: Path,
    depths: list[int],
    lengths: list[int],
    threads: int,
    stack: ExitStack,
) -> tuple[list[Participant], list[dict[str, str]]]:
    """Exports what is missing, and starts the engines; and those that are left out, and why."""
    participants, left_out = [], []
    for contestant in chosen:
        try:
            one = _package(contestant, name, config, directory, depths, lengths)
            say(f"opening {contestant.name}")
            one.process = PeerProcess(contestant.kind, one.package.path, threads, one.context)
            stack.callback(one.process.close)
        except EdgeQKVError as error:
            if contestant.name == OURS:
                raise
            say(f"{contestant.name} is left out: {error}")
            left_out.append({"name": contestant.name, "why": str(error)})
        else:
            participants.append(one)
    return participants, left_out


def _package(
    contestant: Contestant,
    name: str,
    config: ModelConfig,
    directory: Path,
    depths: list[int],
    lengths: list[int],
) -> Participant:
    if contestant.needs and importlib.util.find_spec(contestant.needs) is None:
        raise InputError(f"{contestant.needs} is not installed")
    name = Path(name).stem if name.endswith(".json") else name
    if contestant.variant:
        config, name = apply_variant(config, contestant.variant), f"{name.partition('/')[0]}/{contestant.variant}"
    package = random_package(name, config, directory, contestant.target, contestant.weights, contestant.cache)
    # llama.cpp takes a cache of noise as a copy of copies: five of it are there at a time.
    a_token, available = package.cache_bytes_per_token * 5, (machine.available_memory() or 1 << 40) // 2
    lengths = [n for n in lengths if n <= contestant.longest]
    one = Participant(contestant, package, *([n for n in ns if n * a_token <= available] for ns in (depths, lengths)))
    for what, asked, held in (("depth", depths, one.depths), ("prompt", lengths, one.lengths)):
        if missing := sorted({*asked} - {*held}):
            one.notes.append(f"{what} {missing[0]:,} and beyond left out: too little memory")
    return one


def _compare_logits(participants: Sequence[Participant]) -> None:
    """How far each engine of the same weights is from the first after the same prompt, in standard deviations.

    They round the weights in other ways, and random weights make the most of it.
    """
    first, *others = participants
    vocab_size, model = first.package.config.vocab_size, first.package.config
    length = min(_ALIKE, model.max_positions)
    want = np.array(first.process.ask("logits", length, vocab_size))
    for one in others:
        if one.package.config != model:
            continue
        with _while_it_lives(one):  # a library built for another processor ends here
            found = np.array(one.process.ask("logits", length, vocab_size))
            one.difference = float(np.sqrt(np.mean((found - want) ** 2)) / want.std())
            if not one.difference < _OTHER_MODEL:  # also where it is not a number
                raise EdgeQKVError(
                    f"{one.contestant.name}: computes another model than {first.contestant.name} (their logits after "
                    f"the same prompt are {one.difference:.2g} standard deviations apart); its speed means nothing"
                )


def _add_perplexity(participants: Sequence[Participant], directory: Path) -> None:
    found: dict[tuple[str, str], float] = {}
    for one in participants:
        form = one.contestant.target, one.contestant.weights
        if form not in found:
            found[form] = perplexity_change(*form, directory)
        one.perplexity = found[form]


# ---- what is measured ----


def _turns(participants: Sequence[Participant], rounds: int) -> Iterator[Participant]:
    """Who is next, every other round in the opposite order."""
    for turn in range(rounds):
        yield from participants[:: 1 if turn % 2 == 0 else -1]


def _decode(participants: Sequence[Participant], depth: int, rounds: int, seconds: float) -> None:
    for one in participants:
        if depth not in one.depths:
            continue
        say(f"decode at {depth:,}: filling the cache of {one.contestant.name}")
        with _while_it_lives(one, depth):
            one.process.ask("depth", depth)
            count = min(speed.TOKENS, one.package.config.max_positions - depth)
            took, one.decoded[depth] = one.process.ask("decode", depth, count)  # warm: pages of the weights, threads
            # Where a round takes too long, this one will do.
            one.decode[depth] = [took] if took * speed.TOKENS > seconds * 1e3 else []
    say(f"decode at {depth:,}: {rounds} rounds")
    for one in _turns([one for one in participants if one.decode.get(depth) == []], rounds):
        if depth not in one.depths:
            continue
        with _while_it_lives(one, depth):
            first = one.decoded[depth]
            took, tokens = one.process.ask("decode", depth, len(first))
            if tokens != first:
                raise EdgeQKVError(f"{one.contestant.name}: decoded {tokens} at depth {depth:,} after {first}")
            one.decode[depth].append(took)
    for one in participants:
        if depth not in one.depths:
            continue
        with _while_it_lives(one, depth):
            one.memory[depth] = one.process.ask("memory")
            decoded, allowed = one.decoded[depth], 2 * speed.ROUNDED_TOLERANCE
            equal, _ = one.process.ask("verify", depth, decoded, allowed, one.contestant.name)
            one.verified = [one.verified[0] + equal, one.verified[1] + len(decoded)]
            if (took := median(one.decode[depth])) * speed.TOKENS > seconds * 1e3 and depth < one.depths[-1]:
                one.notes.append(f"not measured beyond depth {depth:,}, where a token takes {took / 1e3:,.1f} s")
                one.depths = [d for d in one.depths if d <= depth]


@contextmanager
def _while_it_lives(one: Participant, depth: int | None = None) -> Iterator[None]:
    """A contestant whose process ends here takes no further part, with a note; the measure of the others must not."""
    try:
        yield
    except PeerDied as error:
        if one.contestant.name == OURS:
            raise
        say(f"{one.contestant.name} takes no further part: {error}")
        one.notes.append(f"no further part: {error}")
        one.decode.pop(depth, None)
        one.depths, one.lengths = [], []


def _prefill(
    participants: Sequence[Participant], length: int, before: int | None, rounds: int, seconds: float, limit: float
) -> None:
    active = []
    for one in participants:
        if length not in one.lengths:
            continue
        expected = median(one.prefill[before]) * length / before if before in one.prefill else 0
        if expected > limit:
            one.notes.append(f"prompts of {length:,} and more left out: longer than {limit:g} s")
            one.lengths = [n for n in one.lengths if n < length]
            continue
        active.append(one)
        one.prefill[length] = []
    vocab_size = participants[0].package.config.vocab_size
    for turn, one in enumerate(_turns(active, rounds)):
        if sum(one.prefill[length]) > seconds or length not in one.lengths:
            continue
        say(f"prefill of {length:,}, round {turn // len(active) + 1}: {one.contestant.name}")
        with _while_it_lives(one):
            one.prefill[length].append(one.process.ask("prefill", length, vocab_size))


def as_json(one: Participant) -> dict[str, Any]:
    package, contestant = one.package, one.contestant
    decode = [
        {"depth": depth, "ms": ms, "ms_per_token": figure(ms), "memory": one.memory.get(depth)}
        for depth, ms in one.decode.items()
        if ms
    ]
    prefill = [
        {"tokens": length, "seconds": found, "tokens_per_second": rate(figure(found), length)}
        for length, found in one.prefill.items()
        if found
    ]
    return {
        "name": contestant.name,
        "variant": package.config.variant,
        "target": package.target,
        "weights": package.manifest["weights"],
        "cache": "fp32" if contestant.kind == "GroupQueryAttention" else package.manifest["cache"],
        "cache_bytes_per_token": _cache_bytes(one),
        "file_bytes": package.weight_bytes,
        "parameters": package.config.parameters(),
        "difference": one.difference,
        "perplexity_change": one.perplexity,
        "decode": decode,
        "verified": {"equal": one.verified[0], "tokens": one.verified[1]},
        "prefill": prefill,
        "notes": one.notes,
    }


def _cache_bytes(one: Participant) -> int:
    """Of a token, as the contestant keeps it."""
    if one.contestant.kind != "GroupQueryAttention":
        return one.package.cache_bytes_per_token
    config = one.package.config  # a float32 key and a value, of as many heads
    return len(config.layers) * 2 * config.only.kv_heads * config.only.head_dim * 4


if __name__ == "__main__":
    sys.exit(main())
