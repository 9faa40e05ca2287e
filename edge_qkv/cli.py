"""The command line: `edge-qkv export | run | pack | inspect | plan | bench | train | demo`."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import threading
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from edge_qkv import __version__
from edge_qkv.commands import plan as plan_command
from edge_qkv.commands import run as run_command
from edge_qkv.config import CACHE_BYTES, POSITIONS
from edge_qkv.errors import Cancelled, EdgeQKVError, InputError
from edge_qkv.formats import Weights
from edge_qkv.layer import QUERY
from edge_qkv.targets import BLOCK_SIZES, TARGETS, WEIGHTS, named

_EXAMPLES = """\
examples:
  edge-qkv export checkpoint.pt --output model --tokenizer tokenizer.json
  edge-qkv run model --prompt "Once upon a time"
  edge-qkv inspect random:1.2B/Q-MQA
  edge-qkv plan model --memory 512MB
  edge-qkv bench model --output results
  edge-qkv train --data corpus.txt --output checkpoint --variant Q-MQA
  edge-qkv demo
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; returns 0, 2 after an error a user can act on, 130 after Ctrl-C or a request to end."""
    try:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, signal.default_int_handler)  # cleans up as after Ctrl-C
        argv = list(sys.argv[1:] if argv is None else argv)
        if argv[:1] == ["bench"]:  # has commands of its own
            return _bench(argv[1:])
        arguments = _parser().parse_args(argv)
        return arguments.command(arguments) or 0
    except EdgeQKVError as error:
        print(f"edge-qkv: {error}", file=sys.stderr)
        return 2
    except (KeyboardInterrupt, Cancelled):
        print("\nedge-qkv: stopped", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output has gone, as `head` does
        sys.stderr.close()
        return 0
    except OSError as error:  # a full disk, a path that is too long
        print(f"edge-qkv: {error.filename or 'the output'}: {error.strerror}", file=sys.stderr)
        return 2


def _export(arguments: argparse.Namespace) -> None:
    _need("torch", "export")
    from edge_qkv.commands.inspect import describe, inspect
    from edge_qkv.export import export_package
    from edge_qkv.export.progress import Bar

    bar = Bar()
    try:
        manifest = export_package(
            arguments.target,
            arguments.checkpoint,
            arguments.output,
            weights=arguments.weights,
            cache=arguments.cache,
            block_size=arguments.block_size,
            window=arguments.window,
            sinks=arguments.sinks,
            capacity=arguments.capacity,
            prefill_chunk=arguments.prefill_chunk,
            tokenizer=arguments.tokenizer,
            held_text=arguments.parity_text,
            parity=not arguments.no_parity,
            progress=bar,
        )
    finally:
        bar.close()
    if arguments.json:
        print(json.dumps(manifest, indent=2))
        return
    print(describe(str(arguments.output), inspect(str(arguments.output))))
    prompt = "--prompt TEXT" if "tokenizer.json" in manifest["files"] else "--tokens 1,2,3"
    runs_on = TARGETS[arguments.target].runs_on
    where = f" {runs_on}" if runs_on else ""
    print(f"\nrun it{where}: edge-qkv run {arguments.output} {prompt}")


def _pack(arguments: argparse.Namespace) -> None:
    from edge_qkv.package import Package
    from edge_qkv.packing import is_packed, pack
    from edge_qkv.tables import size

    package = Package.open(arguments.package, verify=False)
    before = is_packed(package, arguments.output)
    if not before and named(package.target).native:  # those are refused
        print(f"packing {arguments.package}: once for this processor", file=sys.stderr)
    folder = pack(arguments.package, arguments.output, arguments.threads)
    on_disk = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    print(
        f"{folder}: {'was packed already' if before else 'packed'}; all packed weights there: {size(on_disk)} on disk"
    )


def _inspect(arguments: argparse.Namespace) -> None:
    from edge_qkv.commands.inspect import describe, inspect

    facts = inspect(arguments.path)
    print(json.dumps(facts, indent=2) if arguments.json else describe(arguments.path, facts))


def _bench(argv: Sequence[str]) -> int:
    from edge_qkv.bench.__main__ import main as bench

    return bench(argv)


def _train(arguments: argparse.Namespace) -> None:
    _need("torch", "export")
    from edge_qkv.recipe import Recipe
    from edge_qkv.training import train

    recipe = Recipe(**{f.name: getattr(arguments, f.name) for f in fields(Recipe)})
    options = {n: getattr(arguments, n) for n in ("variant", "query", "positions")}
    options |= {n: getattr(arguments, n) for n in ("layers", "width", "heads", "mlp_width")}
    report = train(arguments.data, arguments.output, recipe, options, arguments.vocab_size, arguments.weights)
    print(
        f"{arguments.output}: {report['variant']}, {report['parameters']:,} parameters, held-out perplexity "
        f"{report['held_out_perplexity']:.2f}, {report['held_out_bits_per_byte']:.3f} bits a byte"
    )


def _demo(arguments: argparse.Namespace) -> None:
    _need("torch", "export")
    from edge_qkv.commands.demo import demo

    demo(arguments.output, arguments.prompt, arguments.max_tokens, arguments.threads)


def _need(module: str, extra: str) -> None:
    import importlib.util

    if importlib.util.find_spec(module) is None:
        raise InputError(f"this needs {module}, which is not installed; run pip install 'edge-qkv[{extra}]'")


class _Help(argparse.ArgumentDefaultsHelpFormatter):
    """Shows defaults where there is one."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if action.default in (None, False, []) else super()._get_help_string(action)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="edge-qkv",
        description="Language models with a unified KV cache: export a checkpoint, run it in little memory.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"edge-qkv {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, function, summary: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=summary, description=summary, formatter_class=_Help)
        added.set_defaults(command=function)
        return added

    _add_export(command("export", _export, "Export a checkpoint to a model package and compare the two."))
    added = command("run", run_command.run, "Run a package: the text that follows a prompt, as it is written.")
    run_command.add_arguments(added)
    added = command(
        "pack",
        _pack,
        "Prepare a package's weights for this processor: they load faster and take less anonymous memory.",
    )
    added.add_argument("package", help="directory written by edge-qkv export")
    added.add_argument("--output", type=Path, help="directory; default: edge-qkv below the user's cache directory")
    added.add_argument("--threads", type=int, default=0, help="0: one for each core")
    added = command("inspect", _inspect, "Show config, sizes and cache table of a checkpoint or package.")
    added.add_argument("path", help="package, checkpoint, or random:PRESET such as random:1.2B/Q-MQA")
    added.add_argument("--json", action="store_true", help="print JSON")
    _add_plan(command("plan", plan_command.run, plan_command.SUMMARY))
    command(
        "bench",
        lambda _: _bench([]),
        "Measure a package on this machine; edge-qkv bench --help says what else it does.",
    )
    _add_train(command("train", _train, "Train a small model on a text file; stop it and it goes on where it was."))
    added = command("demo", _demo, "Export the bundled model for each engine, write text, and show the memory table.")
    added.add_argument("--output", type=Path, default=Path("demo"), help="directory for the packages")
    added.add_argument("--prompt", default="KING HENRY.\n", help="text to go on from")
    added.add_argument("--max-tokens", type=int, default=128, help="tokens to write")
    added.add_argument("--threads", type=int, default=0, help="0: one for each core")
    return parser


def _add_export(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("checkpoint", help="checkpoint file or directory, or random:PRESET for random weights")
    add("--target", default="onnx", choices=tuple(TARGETS), help="engine that is to run the package")
    add(
        "--weights",
        default="int4",
        choices=WEIGHTS,
        help="weight type: " + "; ".join(f"{', '.join(_weights_of(target))} for {target}" for target in TARGETS),
    )
    add("--cache", default="fp16", choices=tuple(CACHE_BYTES), help="cache type; fixed at export")
    add(
        "--block-size",
        type=int,
        choices=BLOCK_SIZES,
        help="weights that share a scale; default: "
        + ", ".join(f"{how.default_block} in {t} {n}" for t, n, how in _weight_types() if how.default_block),
    )
    add(
        "--window",
        type=int,
        default=0,
        metavar="W",
        help="a token sees the last W tokens (the cache still holds every token; see run --overflow); "
        "0: as the checkpoint says",
    )
    add("--sinks", type=int, default=0, metavar="S", help="and the first S tokens; 0: as the checkpoint says")
    add("--capacity", type=int, metavar="TOKENS", help="longest context of the package; default: all the model allows")
    add(
        "--prefill-chunk",
        type=int,
        metavar="TOKENS",
        help="most tokens of one call, where files fix it; default: "
        + ", ".join(f"{known.prefill_chunk} for {name}" for name, known in TARGETS.items() if known.prefill_chunk),
    )
    add("--output", type=Path, required=True, help="package directory to write; replaced as a whole")
    add("--tokenizer", type=Path, help="tokenizer.json; default: the one beside the checkpoint")
    add("--parity-text", type=Path, help="held-out text to compare on; default: the checkpoint's own, or random tokens")
    add("--no-parity", action="store_true", help="skip the comparison with the checkpoint")
    add("--json", action="store_true", help="print the manifest as JSON")


def _weights_of(target: str) -> list[str]:
    """The weight types of a target, with the names that they have in others."""
    return [f"{name} ({how.also})" if how.also else name for name, how in TARGETS[target].weights.items()]


def _weight_types() -> list[tuple[str, str, Weights]]:
    return [(target, name, how) for target, known in TARGETS.items() for name, how in known.weights.items()]


def _add_plan(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class, parser.epilog = argparse.RawDescriptionHelpFormatter, plan_command.EPILOG
    plan_command.add_options(parser)


def _add_train(parser: argparse.ArgumentParser) -> None:
    from edge_qkv.recipe import Recipe

    add = parser.add_argument
    add("--data", type=Path, required=True, help="UTF-8 text; <|endoftext|> separates documents")
    add("--output", type=Path, required=True, help="checkpoint directory; an interrupted run goes on")
    add("--variant", default="Q-MQA", help="QKV, Q=K-V, Q-K=V, Q=K=V, GQA-N, MQA, Q-GQA-N or Q-MQA")
    add("--query", default="projected", choices=tuple(QUERY), help="how the query is formed")
    add("--positions", default="rotary-conjugate", choices=POSITIONS, help="position encoding")
    for name, default, what in (("layers", 8, "layers"), ("width", 256, "width"), ("heads", 8, "query heads")):
        add(f"--{name}", type=int, default=default, help=what)
    add("--mlp-width", type=int, default=688, help="inner width of the MLP")
    add("--vocab-size", type=int, default=4096, help="tokens of the byte-level BPE")
    add("--weights", default="fp16", choices=("fp16", "fp32"), help="type the weights are stored in")
    for f in fields(Recipe):
        add(f"--{f.name.replace('_', '-')}", type=type(f.default), default=f.default, help=f.metadata["help"])


if __name__ == "__main__":
    sys.exit(main())
