"""A loaded package: the weights that its sessions share, and the memory budget they live in."""

from __future__ import annotations

import os
from pathlib import Path

from edge_qkv import _native
from edge_qkv.checks import chunk_size, thread_count, whole
from edge_qkv.engines import EngineSession, ModelOptions, open_model
from edge_qkv.errors import InputError
from edge_qkv.package import Package, Progress
from edge_qkv.packing import is_packed
from edge_qkv.planning import plan
from edge_qkv.sizes import parse_size

DEFAULT_CHUNK = 128  # tokens evaluated at once; as kPrefillChunk in runtime/core/plan.h
_TRIM_LEVELS = {"workspace": 1, "idle": 2, "all": 3}


class Model:
    """A loaded package.

    threads: 0 uses one a core. verify: check every file's SHA-256 first. memory: budget in bytes, or text such as
    "512MB", for everything that this model and its sessions add to the process; what it cannot hold is refused
    before any weight is read, and sessions share it: they evaluate in turns, and the caches of those least recently
    used are moved to files when one needs the room. context, prefill_chunk: the longest session to plan the budget
    for, in tokens (None: the longest that it holds), and the largest chunk (0: `DEFAULT_CHUNK`). packed: directory of
    weights that `pack` has prepared for this processor (None: the default one; False: do not use them). spill:
    directory for caches that leave RAM (None: the system's for temporary files). progress: called as the files are
    checked, see `Package.verify`.

    Packages for coreml and gguf refuse memory, packed and spill, those for coreml threads as well. Raises `InputError`.
    """

    def __init__(
        self,
        package: str | Path,
        threads: int = 0,
        verify: bool = True,
        *,
        memory: int | str | None = None,
        context: int | None = None,
        prefill_chunk: int = DEFAULT_CHUNK,
        packed: str | Path | bool | None = None,
        spill: str | Path | None = None,
        progress: Progress | None = None,
    ) -> None:
        threads, prefill_chunk = thread_count(threads), chunk_size(prefill_chunk)
        context = None if context is None else whole(context, "context", 1)
        for name, folder in (("packed", packed), ("spill", spill)):
            if not (folder is None or isinstance(folder, bool) or Path(folder).is_dir()):
                raise InputError(f"{name} = {folder}: is not a directory")
        spill = None if spill is None else Path(spill).absolute()  # it is used later than now
        self._budget = 0 if memory is None else parse_size(memory, "memory")
        self.package = Package.open(package, verify=False)
        if self._budget:  # refused before the files are read for their hashes
            plan(
                self.package,
                packed=is_packed(self.package, packed),
                memory=self._budget,
                context=context,
                prefill_chunk=prefill_chunk,
                threads=threads,
            )
        if verify:
            self.package.verify(progress)
        options = ModelOptions(threads, self._budget, context or 0, prefill_chunk, packed, spill)
        self._engine = open_model(self.package, options)
        self.config, self.info = self.package.config, self._engine.info

    @property
    def has_budget(self) -> bool:
        return self._budget > 0

    @property
    def cache_type(self) -> str:
        return self.info.cache_type.decode()

    def trim(self, level: str = "idle") -> None:
        """Gives memory back; whatever was given up comes back by itself when it is used, and no result changes.

        'workspace': buffers between evaluations; 'idle': also the caches of all sessions but the last used, which are
        moved to files; 'all': also the cache of that one, and the pages of the weights. Sessions that another thread
        is in are left alone. The engines of coreml and gguf packages have nothing to give back.
        """
        if level not in _TRIM_LEVELS:
            raise InputError(f"level {level!r} is not known; choose one of {', '.join(_TRIM_LEVELS)}")
        self._engine.trim(_TRIM_LEVELS[level])

    def watch_pressure(self, cgroup: str | Path | None = None) -> None:
        """Linux: trims by itself when memory gets short, until the model is closed.

        cgroup: directory of a control group of version 2; None: the process's own, or else the whole system.
        """
        self._engine.watch_pressure(None if cgroup is None else os.fsencode(cgroup))

    def open_session(self, options: _native.SessionOptions) -> EngineSession:
        """For `Session`, which adds text."""
        return self._engine.open_session(options)

    def close(self) -> None:
        """Frees the memory, once the call that a thread is in has ended (this thread's, in a signal handler).

        The model must not be used afterwards; its sessions may.
        """
        self._engine.close()

    def __enter__(self) -> Model:
        return self

    def __exit__(self, *_) -> None:
        self.close()
