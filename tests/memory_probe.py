"""Measures what a package costs in a process of its own: `python memory_probe.py PACKAGE CONTEXT [PACKED]`.

One prompt chunk and one token are evaluated for real, once at the start of the context and once at its end; between
them the cache is filled. Every page of the model's files that is mapped is then touched, as a prompt with all of the
vocabulary at all positions would. Prints JSON, bytes beyond what the process had before the model was opened.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import sys
import threading
import time
from pathlib import Path

from edge_qkv import _native

CHUNK = 128


def status(name: str) -> int:
    return int(re.search(rf"^{name}:\s+(\d+)", Path("/proc/self/status").read_text(), re.M)[1]) * 1024


def rollup(name: str) -> int:
    return int(re.search(rf"^{name}:\s+(\d+)", Path("/proc/self/smaps_rollup").read_text(), re.M)[1]) * 1024


class PeakAnonymous(threading.Thread):
    """The largest RssAnon between start and stop, looked at every millisecond."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak, self.stopped = 0, False

    def run(self) -> None:
        while not self.stopped:
            self.peak = max(self.peak, status("RssAnon"))
            time.sleep(0.001)


def touch_model_files(*folders: str) -> None:
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, *_, path = line.split(maxsplit=5) if line.count(" ") > 4 else (line,)
        if any(path.strip().startswith(os.path.abspath(folder) + "/") for folder in folders):
            begin, end = (int(x, 16) for x in span.split("-"))
            for address in range(begin, end, 4096):
                ctypes.string_at(address, 1)


def main(package: str, context: int, packed: str | None = None) -> dict:
    handle, session = ctypes.c_void_p(), ctypes.c_void_p()
    info, plan = _native.ModelInfo(), _native.PlanInfo()
    _native.library()
    runtime = os.fsencode(_native.onnxruntime_path())
    packed_weights = os.fsencode(packed) if packed else None
    tokens = (ctypes.c_int32 * (CHUNK + 1))(*range(CHUNK + 1))
    sampler = PeakAnonymous()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before, before_anonymous = status("VmRSS"), rollup("Anonymous")
    sampler.start()

    options = _native.ModelOptions(engine_library=runtime, packed_weights=packed_weights)
    _native.call("eqkv_model_open", os.fsencode(package), ctypes.byref(options), ctypes.byref(handle))
    _native.call("eqkv_model_get_info", handle, ctypes.byref(info))
    loaded = {"resident": rollup("Rss") - before, "anonymous": rollup("Anonymous") - before_anonymous}
    loaded["peak"] = status("VmHWM") - before
    wanted = _native.SessionOptions(context=context, prefill_chunk=CHUNK)
    _native.call("eqkv_session_open", handle, ctypes.byref(wanted), ctypes.byref(session))
    chunk = min(CHUNK, context - 1)
    evaluate = lambda n: _native.call("eqkv_session_evaluate", session, tokens, ctypes.c_size_t(n), None)  # noqa: E731
    evaluate(chunk)
    first = {"resident": rollup("Rss") - before, "anonymous": rollup("Anonymous") - before_anonymous}
    if context > 2 * CHUNK + 1:
        _native.call("eqkv_session_fill", session, context - chunk - 1, 7)
        touch_model_files(package, *([packed] if packed else []))
        evaluate(chunk)
    evaluate(1)
    sampler.stopped = True
    sampler.join()
    anonymous = max(sampler.peak, rollup("Anonymous"))

    how = _native.PlanOptions(context=context, prefill_chunk=CHUNK, packed=bool(packed))
    _native.call("eqkv_plan_package", os.fsencode(package), ctypes.byref(how), ctypes.byref(plan), None)
    planned = {name: getattr(plan, name) for name, kind in plan._fields_ if kind is ctypes.c_uint64}
    return {
        "packed": bool(info.packed),
        "loaded": loaded,
        "first": first,
        "peak": status("VmHWM") - before,
        "anonymous": anonymous - before_anonymous,
        "steady_anonymous": rollup("Anonymous") - before_anonymous,
        "plan": planned,
    }


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])))
