"""`edge-qkv run`: text from a package."""

from __future__ import annotations

import argparse
import json
import os
import secrets
import sys
from collections.abc import Iterator
from dataclasses import asdict, fields
from pathlib import Path

from edge_qkv import files
from edge_qkv.commands import terminal
from edge_qkv.errors import Cancelled, ContextFull, InputError
from edge_qkv.sizes import parse_tokens

SUMMARY = "Run a package: the text that follows a prompt, as it is written."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from edge_qkv.loaded import DEFAULT_CHUNK
    from edge_qkv.sampling import Sampling
    from edge_qkv.session import DEFAULT_SINKS, OVERFLOW

    add = parser.add_argument
    add("package", help="directory written by edge-qkv export")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--prompt", help="text to go on from")
    source.add_argument("--prompt-file", type=Path, help="file with the prompt; - or none: standard input")
    source.add_argument("--tokens", help="prompt as token ids, e.g. 12,7,99; the output is ids as well")
    add("--max-tokens", type=int, default=256, help="tokens to write at most")
    add("--memory", metavar="SIZE", help="budget such as 512MB; what it cannot hold is refused before loading")
    add(
        "--context",
        metavar="TOKENS",
        help="capacity; max: all that the budget or the model allows; default: max with --memory, else 4096",
    )
    add("--overflow", default="error", choices=tuple(OVERFLOW), help="what to do when the context is full")
    add(
        "--sinks",
        type=int,
        metavar="N",
        help=f"with --overflow window: first tokens to keep; default: {DEFAULT_SINKS}",
    )
    add(
        "--window",
        type=int,
        metavar="N",
        help="with --overflow window: last tokens to keep; default: half of the context, sinks included",
    )
    add(
        "--block",
        type=int,
        metavar="N",
        help="with --overflow shift: oldest tokens to drop; default: a quarter of the context",
    )
    add(
        "--packed",
        type=Path,
        metavar="DIR",
        help="packed weights in this directory; default: edge-qkv below the user's cache directory",
    )
    add(
        "--spill",
        type=Path,
        metavar="DIR",
        help="directory for caches that leave RAM; default: the system's for temporary files",
    )
    add("--restore", type=Path, metavar="FILE", help="go on from a saved conversation; the prompt is added to it")
    add("--save", type=Path, metavar="FILE", help="save the conversation at the end")
    add("--temperature", type=float, default=Sampling.temperature, help="0: always the likeliest token")
    add("--top-k", type=int, default=Sampling.top_k, help="choose among the k likeliest; 0: off")
    add("--top-p", type=float, default=Sampling.top_p, help="smallest set with this probability; 1: off")
    add("--min-p", type=float, default=Sampling.min_p, help="drop tokens below this share of the likeliest; 0: off")
    add("--repetition-penalty", type=float, default=Sampling.repetition_penalty, help="above 1: fewer repeats")
    add("--repetition-window", type=int, default=Sampling.repetition_window, help="tokens it looks back; 0: all")
    add("--seed", type=int, help="same seed, same text; default: a new one each time")
    add("--stop", action="append", default=[], metavar="TEXT", help="stop before this text; may be repeated")
    add("--threads", type=int, default=0, help="0: one for each core that this process may use")
    add(
        "--margin",
        type=int,
        default=0,
        metavar="N",
        help="rows that layers with a window keep behind it, for rewinds; 0: as many as the window",
    )
    add("--prefill-chunk", type=int, default=DEFAULT_CHUNK, help="prompt tokens evaluated at once; 0: 128")
    add("--no-verify", action="store_true", help="do not check the files' SHA-256 before loading")
    add("--json", action="store_true", help="print one JSON object at the end instead of streaming")
    add("--stats", type=Path, metavar="FILE", help="write speed and memory as JSON")
    add("--quiet", action="store_true", help="no closing line with speed and memory")


def run(arguments: argparse.Namespace) -> None:
    """Writes the text as it is generated; the figures, and what else is of interest, go to standard error."""
    from edge_qkv.sampling import Sampling
    from edge_qkv.session import Session

    for option in ("stats", "save"):  # before minutes of work, not after
        path = getattr(arguments, option)
        if path and not (path.parent.is_dir() and not path.is_dir()):
            raise InputError(f"--{option} {path}: is not a file in an existing directory")
    if arguments.save and arguments.save.exists() and not arguments.save.is_file():  # saving would replace a device
        raise InputError(f"--save {arguments.save}: is not a file; name one, which is replaced as a whole")
    if arguments.restore and not arguments.restore.is_file():
        raise InputError(f"--restore {arguments.restore}: is not a file; give one that --save has written")
    context = None if arguments.context is None else parse_tokens(arguments.context, "--context")
    if arguments.seed is None:
        arguments.seed = secrets.randbits(32)  # drawn here, so that a good result can be told how to repeat
    sampling = Sampling(**{f.name: getattr(arguments, f.name) for f in fields(Sampling)})
    prompt = _prompt(arguments)
    arguments.stop = [_as_utf8(text, "--stop") for text in arguments.stop]
    with Session(
        arguments.package,
        context=context,
        prefill_chunk=arguments.prefill_chunk,
        threads=arguments.threads,
        verify=not arguments.no_verify,
        memory=arguments.memory,
        packed=arguments.packed,
        spill=arguments.spill,
        progress=terminal.hashing(),
        overflow=arguments.overflow,
        sinks=arguments.sinks,
        window=arguments.window,
        block=arguments.block,
        margin=arguments.margin,
    ) as session:
        if arguments.restore:
            session.restore(arguments.restore)
        written, full = [], None
        try:
            for piece in _pieces(session, prompt, arguments, sampling):
                written.append(piece)
                if not arguments.json:
                    print(piece, end="", flush=True)
        except ContextFull as error:
            if not session.generated:
                raise
            full = error  # what was written up to here is the user's
        except (KeyboardInterrupt, Cancelled):
            if arguments.save and session.tokens:
                _save(session, arguments.save)
            raise
        finally:
            if written and not arguments.json:
                print(flush=True)
        if arguments.save:
            _save(session, arguments.save)
        stopped = "max_tokens" if len(session.generated) >= arguments.max_tokens else "stop"
        figures = {"seed": arguments.seed, "finish": "context" if full else stopped} | _figures(session)
        if arguments.json:
            print(json.dumps({"text": "".join(written[1:]), "tokens": session.generated, "figures": figures}, indent=2))
        if arguments.stats:
            _write_stats(arguments.stats, figures)
        if full:
            raise full
        if not arguments.quiet and not arguments.json:
            for line in _closing_lines(session, figures):
                print(line, file=sys.stderr)


def _pieces(session, prompt: str | list[int], arguments: argparse.Namespace, sampling) -> Iterator[str]:
    """What to print before the text, once the prompt is accepted, and the pieces of the text."""
    from edge_qkv.tokenizer import until_stop

    progress = terminal.counter("prefill, tokens:", "{:,}".format, 512)
    if isinstance(prompt, str):
        pieces = session.generate(prompt, arguments.max_tokens, sampling, arguments.stop, progress)
    else:
        ids = session.generate_tokens(prompt, arguments.max_tokens, sampling, progress)
        pieces = until_stop((f"{i} " for i in ids), arguments.stop, session.take_back)
    first = next(pieces, "")
    yield prompt if isinstance(prompt, str) else ""
    yield first
    yield from pieces


def _save(session, path: Path) -> None:
    if len(session.tokens) > session.context:
        session.rewind(session.context)
        print("[the last token has no room in the context: the saved conversation ends before it]", file=sys.stderr)
    session.save(path)


def _write_stats(path: Path, figures: dict) -> None:
    if path.exists() and not path.is_file():  # a terminal, a pipe: written to, not replaced
        path.write_bytes(files.to_json(figures))
    else:
        files.write_json(path.resolve(), figures)


def _as_utf8(text: str, option: str) -> str:
    """An option's text by its bytes, whatever encoding the locale says they have."""
    return files.decode(os.fsencode(text), option)


def _prompt(arguments: argparse.Namespace) -> str | list[int]:
    if arguments.tokens is not None:
        words = arguments.tokens.replace(",", " ").split()
        bad = next((w for w in words if not (w.isascii() and w.isdigit() and len(w) < 10)), None)
        if bad is not None:
            raise InputError(f"--tokens: {bad[:40]!r} is no token id; give whole numbers separated by commas")
        return [int(w) for w in words]
    if arguments.prompt is not None:
        return _as_utf8(arguments.prompt, "--prompt")
    if arguments.prompt_file not in (None, Path("-")):
        return files.read_text(arguments.prompt_file, "--prompt-file")
    if arguments.prompt_file is None and sys.stdin.isatty():
        if arguments.restore:
            return ""  # go on from where it was
        raise InputError("no prompt; give --prompt TEXT, --prompt-file FILE or --tokens IDS, or pipe text in")
    return files.decode(files.read_stream(sys.stdin.buffer, "standard input", "the prompt"), "the prompt")


def _figures(session) -> dict:
    timing = session.timing
    rate = lambda tokens, seconds: round(tokens / seconds, 2) if seconds else None  # noqa: E731
    return {
        "isa": _isa(),
        "packed": bool(session.model.info.packed),
        "context": session.context,
        "tokens": len(session.tokens),
        "dropped": session.dropped,
        "prefill_tokens_per_second": rate(timing.prefill_tokens, timing.prefill_seconds),
        "decode_tokens_per_second": rate(timing.decode_tokens, timing.decode_seconds),
        "weight_bytes": session.model.package.weight_bytes,
        "memory": session.memory(),
    } | {"timing": asdict(timing)}


def _isa() -> str:
    from edge_qkv._native import library

    return library().eqkv_isa().decode()


def _closing_lines(session, figures: dict) -> list[str]:
    from edge_qkv.tables import size

    timing, memory = figures["timing"], figures["memory"]
    lines = [
        f"[seed {figures['seed']}; "
        f"prefill {timing['prefill_tokens']} tokens, {figures['prefill_tokens_per_second']} tokens/s; "
        f"decode {timing['decode_tokens']} tokens, {figures['decode_tokens_per_second']} tokens/s; "
        f"cache {size(memory['cache_used'])} of {size(memory['cache_reserved'])}; "
        f"peak memory {size(memory['peak_resident'])}, Python included]"
    ]
    if figures["dropped"]:
        lines.append(f"[the context overflowed: {figures['dropped']:,} tokens of the conversation were dropped]")
    trained = session.model.config.trained_context
    if trained and figures["tokens"] > trained:
        lines.append(f"[the model was trained on {trained} tokens at once and loses its thread after]")
    return lines
