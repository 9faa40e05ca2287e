"""The machine that figures are from."""

from __future__ import annotations

import os
import platform
import subprocess
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import edge_qkv
from edge_qkv import _native
from edge_qkv.processors import processors

# Part numbers of Arm's own cores, as the kernel reports them where a processor has no name.
_ARM = "0x41"
_ARM_PARTS = {
    "0xd03": "Cortex-A53",
    "0xd04": "Cortex-A35",
    "0xd05": "Cortex-A55",
    "0xd07": "Cortex-A57",
    "0xd08": "Cortex-A72",
    "0xd09": "Cortex-A73",
    "0xd0a": "Cortex-A75",
    "0xd0b": "Cortex-A76",
    "0xd0c": "Neoverse-N1",
    "0xd0d": "Cortex-A77",
    "0xd41": "Cortex-A78",
    "0xd44": "Cortex-X1",
    "0xd46": "Cortex-A510",
    "0xd47": "Cortex-A710",
    "0xd48": "Cortex-X2",
    "0xd4d": "Cortex-A715",
    "0xd4e": "Cortex-X3",
    "0xd80": "Cortex-A520",
    "0xd81": "Cortex-A720",
    "0xd82": "Cortex-X4",
}


def describe() -> dict[str, Any]:
    """Processor, cores that this process may use, memory in bytes, system, versions, and the date."""
    try:
        busy = os.getloadavg()[0]
    except (AttributeError, OSError):
        busy = None
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "board": _read("/proc/device-tree/model").rstrip("\0\n") or None,
        "processor": processor(_read("/proc/cpuinfo")) or _other_processor(),
        "cores": processors(),
        "instruction_set": _native.library().eqkv_isa().decode(),
        "memory": _memory(),
        "system": _system(),
        "python": platform.python_version(),
        "edge_qkv": edge_qkv.__version__,
        "load_average": busy,  # processes that wanted a core in the minute before
    }


def processor(cpuinfo: str) -> str:
    """The name in a /proc/cpuinfo, or of an Arm processor the kinds of its cores; "" where neither is there."""
    lines = [[part.strip() for part in line.split(":", 1)] for line in cpuinfo.splitlines() if ":" in line]
    names = [value for name, value in lines if name == "model name"]
    if names:
        return names[0]
    makers = [value for name, value in lines if name == "CPU implementer"]
    parts = [value for name, value in lines if name == "CPU part"]
    kinds = Counter(
        _ARM_PARTS.get(part, f"part {part}") if maker == _ARM else f"implementer {maker} part {part}"
        for maker, part in zip(makers, parts, strict=False)
    )
    return ", ".join(f"{count} x {kind}" for kind, count in kinds.items())


def available_memory() -> int | None:
    """Bytes that the kernel expects new work can have without swapping; None where it does not say."""
    for line in _read("/proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def one_line(machine: dict[str, Any]) -> str:
    """The machine of a result in a line."""
    memory = "" if machine["memory"] is None else f", {machine['memory'] / 2**30:.1f} GiB"
    board = f"{machine['board']}, " if machine["board"] else ""
    busy = machine.get("load_average")
    return (
        f"{board}{machine['processor']}, {machine['cores']} cores, {machine['instruction_set']}{memory}, "
        f"{machine['system']}, {machine['date'][:10]}" + (f", load {busy:.1f} before" if busy is not None else "")
    )


def _read(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""


def _other_processor() -> str:
    if platform.system() == "Darwin":
        command = ["sysctl", "-n", "machdep.cpu.brand_string"]
        return subprocess.run(command, capture_output=True, text=True).stdout.strip()
    return platform.processor() or platform.machine()


def _memory() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return None


def _system() -> str:
    try:
        name = platform.freedesktop_os_release()["PRETTY_NAME"]
    except (OSError, KeyError):
        name = platform.system()
    return f"{name}, {platform.system()} {platform.release()} {platform.machine()}"
