"""Processes that measure one thing each, so that memory and load times are those of a fresh process."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from dataclasses import asdict

from edge_qkv import EdgeQKVError
from edge_qkv.bench.common import PROGRAM, say
from edge_qkv.bench.package.measurements import Request
from edge_qkv.errors import one_line

# Machine -> the kernel that every processor of its kind can run, the plainest there is.
_PLAINEST = {"x86_64": "baseline", "amd64": "baseline", "aarch64": "armv8", "arm64": "armv8"}


def plainest_kernel() -> str:
    return _PLAINEST.get(platform.machine().lower(), "baseline")


class Processes:
    """Starts them one at a time, and says which."""

    def __init__(self, total: int) -> None:
        self.total, self.started = total, 0

    def measure(self, request: Request, what: str, kernel: str | None = None) -> dict:
        """What `measurements` finds, with the attention kernel of one instruction set where it is given.

        Raises `EdgeQKVError` in one sentence, whatever the process died of.
        """
        self.started += 1
        say(f"[{self.started}/{self.total}] {what}")
        command = [sys.executable, "-m", "edge_qkv.bench.package.measurements", json.dumps(asdict(request))]
        environment = os.environ | ({"EDGE_QKV_ISA": kernel} if kernel else {})
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        if done.returncode == 0:
            return json.loads(done.stdout)
        if done.returncode == 130:  # the terminal sends Ctrl-C to both
            raise KeyboardInterrupt
        last = (done.stderr.strip().splitlines() or [f"ended with code {done.returncode}"])[-1]
        if done.returncode == 2:
            raise EdgeQKVError(last.removeprefix(f"{PROGRAM} measurement: "))
        what = f"killed by signal {-done.returncode}" if done.returncode < 0 else one_line(Exception(last))
        raise EdgeQKVError(
            f"{request.package}: its process failed during {request.kind} ({what}); close what needs memory and try "
            "again"
        )
