"""What is Core ML's own: states that hold the cache of all positions, functions that are prepared once, infinities."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import numpy as np
import pytest

from conftest import TINY
from edge_qkv import InputError, Model, Session, plan
from edge_qkv.engines import coreml
from edge_qkv.package import MANIFEST

from .engines import CAPACITY, CHUNK, on

core_ml = on("coreml")
LOAD = coreml.load_function  # Core ML's own; the engine under test has the evaluator's


@core_ml
def test_tokens_near_the_end_are_evaluated_where_a_chunk_has_no_room(engine, session, ids):
    for length in (CAPACITY - CHUNK - 1, CAPACITY - CHUNK, CAPACITY - CHUNK + 1, CAPACITY - 2):
        session.rewind(0)
        session.evaluate(ids[:length])
        engine.check_rows(session.score(ids[length:]), slice(length, None))


@core_ml
def test_the_states_are_the_cache_of_the_plan(engine, model):
    made = plan(engine.package)
    with Session(model) as session:
        state = session._engine._cache._state
        held = sum(state.read_state(name).nbytes for name in state.features)
        assert held == made.cache == session.memory()["cache_reserved"] == TINY.cache_bytes(CAPACITY, "fp16")


@core_ml
def test_an_overflow_is_forgotten_with_its_tokens(engine, session, ids):
    session.evaluate(ids[:20])
    state = session._engine._cache._state
    for name in state.features:
        rows = state.read_state(name)
        rows[:, :, 10:] = np.inf
        state.write_state(name, rows)
    assert np.isnan(session.score(ids[20:22])).any()
    session.rewind(10)
    engine.check_rows(session.score(ids[10:40]), slice(10, 40))


@core_ml
def test_functions_are_prepared_once(engine, ids, monkeypatch):
    """Core ML prepares one for the device whenever it is opened; a session has its own after its model is closed."""
    opened, load = [], coreml.load_function
    monkeypatch.setattr(coreml, "load_function", lambda path, name: opened.append(name) or load(path, name))
    model = Model(engine.package)
    with Session(model, CAPACITY) as session:
        session.evaluate(ids[: CHUNK + 1])
        assert opened == ["decode", "prefill"]
        model.close()
        session.rewind(0)
        session.evaluate(ids[: CHUNK + 1])
        engine.check_rows(session.logits(), CHUNK)
        assert opened == ["decode", "prefill"]


@pytest.mark.skipif(coreml.runs_here(), reason="Core ML is here")
@core_ml
def test_a_model_that_core_ml_does_not_open_is_one_sentence(engine, monkeypatch):
    """coremltools makes an object of it all the same."""
    monkeypatch.setattr(coreml, "load_function", LOAD)
    monkeypatch.setattr(coreml, "runs_here", lambda: True)
    with pytest.raises(InputError, match=r"model\.mlpackage: Core ML cannot open it \(State.*\); export it") as refused:
        Model(engine.package)
    assert "\n" not in str(refused.value)


@pytest.mark.skipif(coreml.runs_here(), reason="Core ML is here")
@core_ml
def test_elsewhere_running_one_is_one_sentence(engine):
    run = [sys.executable, "-m", "edge_qkv", "run", str(engine.package), "--tokens", "1,2"]
    done = subprocess.run(run, capture_output=True, text=True)
    assert done.returncode == 2 and not done.stdout
    assert "Core ML runs it on macOS 15 or iOS 18 and later" in done.stderr and done.stderr.count("\n") == 1


@core_ml
@pytest.mark.parametrize("chunk", [None, "16", 0])
def test_a_manifest_without_its_chunk_is_refused(engine, tmp_path, chunk):
    copy = shutil.copytree(engine.package, tmp_path / "package")
    manifest = json.loads((copy / MANIFEST).read_text())
    (copy / MANIFEST).write_text(json.dumps(manifest | {"prefill_chunk": chunk}))
    with pytest.raises(InputError, match="does not say its prefill_chunk"):
        Model(copy)


@core_ml
@pytest.mark.parametrize("change", [{"max_positions": 128}, {"pattern": "layer*3"}, {"kv_heads": 2}])
def test_a_manifest_of_another_cache_is_refused(engine, tmp_path, change):
    copy = shutil.copytree(engine.package, tmp_path / "package")
    manifest = json.loads((copy / MANIFEST).read_text())
    config = manifest["config"]
    if "kv_heads" in change:
        change = {"kinds": {"layer": config["kinds"]["layer"] | change}}
    (copy / MANIFEST).write_text(json.dumps(manifest | {"config": config | change}))
    with pytest.raises(InputError, match=r"edge_qkv\.json and the model disagree"):
        Session(copy)
