"""An engine in a process of its own that is asked one thing at a time, so that several can take turns."""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from edge_qkv import EdgeQKVError, _native
from edge_qkv.bench.common import PROGRAM, command_line, run
from edge_qkv.bench.package import speed
from edge_qkv.bench.peers.engines import Peer, open_peer
from edge_qkv.errors import one_line


class PeerDied(EdgeQKVError):
    """An engine whose process was ended, for want of memory or by a fault of its own."""


class PeerProcess:
    """Opens an engine; `ask` has it do one of ACTIONS.

    Raises `EdgeQKVError` in one sentence when that fails, `PeerDied` where the process is no more.
    """

    def __init__(self, kind: str, package: Path, threads: int, context: int) -> None:
        self._package = package
        request = json.dumps([kind, str(package), threads, context])
        command = [sys.executable, "-m", "edge_qkv.bench.peers.process", request]
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        self._process = subprocess.Popen(command, text=True, **pipes)
        self._answer()

    def ask(self, action: str, *arguments: Any) -> Any:
        self._process.send_signal(signal.SIGCONT)
        try:
            self._process.stdin.write(json.dumps([action, *arguments]) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # `_answer` finds what it ended with
        return self._answer()

    def close(self) -> None:
        self._process.kill()  # it has nothing to keep
        self._process.communicate()

    def _answer(self) -> Any:
        if line := self._process.stdout.readline():
            self._process.send_signal(signal.SIGSTOP)  # its threads would look for work, in the turn of another
            return json.loads(line)
        errors = self._process.communicate()[1].strip().splitlines()
        code = self._process.returncode
        if code == 130:  # the terminal sends Ctrl-C to both
            raise KeyboardInterrupt
        if code < 0:
            raise PeerDied(f"{self._package}: its process was killed by signal {-code}")
        last = errors[-1] if errors else f"its process ended with code {code}"
        raise EdgeQKVError(last.removeprefix(f"{PROGRAM} peer: ") if code == 2 else one_line(Exception(last)))


# ---- in that process ----


def main(argv: Sequence[str] | None = None) -> int:
    """Opens an engine, then does what each line of standard input says: JSON in, JSON out."""
    parser = command_line("peer", "For edge-qkv bench peers itself: an engine in this process.")
    parser.add_argument("request")
    return run(parser, _serve, argv)


def _serve(arguments: argparse.Namespace) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever an engine prints goes elsewhere
    kind, package, threads, context = json.loads(arguments.request)
    before = _memory()
    peer = open_peer(kind, Path(package), threads, context)
    answer: Any = None
    while True:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
        line = sys.stdin.readline()
        if not line:
            return
        action, *rest = json.loads(line)
        answer = ACTIONS[action](peer, *rest) if action != "memory" else _beyond(before)


def _depth(peer: Peer, depth: int) -> None:
    peer.fill(depth)


def _decode(peer: Peer, depth: int, count: int) -> list:
    """[milliseconds a token, the tokens]: greedy ones after `depth` tokens."""
    peer.rewind(depth)
    token, times, decoded = speed.FIRST, [], []
    for _ in range(count):
        began = time.perf_counter()
        token = int(peer.evaluate([token]).argmax())
        times.append(time.perf_counter() - began)
        decoded.append(token)
    return [median(times) * 1e3, decoded]


def _verify(peer: Peer, depth: int, decoded: list[int], allowed: float, name: str) -> list:
    """[how many of the tokens are what the engine says reading them as a chunk, what the others lack at most]."""
    peer.rewind(depth)
    return list(speed.compared(peer.score([speed.FIRST, *decoded[:-1]]), decoded, allowed, depth, name))


def _prefill(peer: Peer, length: int, vocab_size: int) -> float:
    """Seconds for a prompt of so many tokens."""
    peer.rewind(0)
    tokens = speed.prompt(length, vocab_size)
    began = time.perf_counter()
    peer.evaluate(tokens)
    return time.perf_counter() - began


def _logits(peer: Peer, length: int, vocab_size: int) -> list[float]:
    """Those after a prompt of so many tokens."""
    peer.rewind(0)
    return np.asarray(peer.evaluate(speed.prompt(length, vocab_size)), np.float64).tolist()


ACTIONS: dict[str, Callable[..., Any]] = {
    "depth": _depth,
    "decode": _decode,
    "verify": _verify,
    "prefill": _prefill,
    "logits": _logits,
}


def _memory() -> _native.MemoryInfo:
    found = _native.MemoryInfo()
    _native.call("eqkv_memory", ctypes.byref(found))
    return found


def _beyond(before: _native.MemoryInfo) -> dict[str, int]:
    """Bytes that the engine, its weights and its cache have added to the process."""
    now = _memory()
    return {"resident": now.resident - before.resident, "anonymous": now.anonymous - before.anonymous}


if __name__ == "__main__":
    sys.exit(main())
