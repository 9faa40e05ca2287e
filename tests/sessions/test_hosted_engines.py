"""What is special to the engines that Python hosts and is not the decoder's or Core ML's."""

from __future__ import annotations

import ctypes
import sys
from dataclasses import replace

import pytest

from edge_qkv import InputError, Model, _native
from edge_qkv.targets import TARGETS

from .engines import on


def test_an_engine_may_ask_the_native_library_whether_to_stop():
    """What llama.cpp does after each operation; see engines/llama_cpp.py."""
    asked = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p)(("eqkv_is_set", _native.library()))
    for value in (0, 1, 1 << 20, -1):
        flag = ctypes.c_int32(value)
        assert asked(ctypes.addressof(flag)) is bool(value)


@on("eager")
def test_without_llama_cpp_a_package_says_what_to_install(engine, monkeypatch):
    monkeypatch.setitem(TARGETS, "gguf", replace(TARGETS["gguf"], hosted="llama_cpp"))
    monkeypatch.setitem(sys.modules, "llama_cpp", None)  # as where it is not installed
    with pytest.raises(InputError, match=r"pip install 'edge-qkv\[llama-cpp\]', which builds it from source and takes"):
        Model(engine.package)
