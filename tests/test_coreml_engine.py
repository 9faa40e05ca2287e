"""Sessions on Core ML packages; Core ML predicts on Apple's systems only, so the saved program runs in NumPy here."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from conftest import TINY, needs
from eager import Expected, walk_session
from edge_qkv import Cancelled, ContextFull, InputError, Model, Sampling, Session, pack, plan
from edge_qkv.engines import coreml
from edge_qkv.package import MANIFEST

CAPACITY, CHUNK = TINY.max_positions, 16
# All of the program is fp16: weights, activations and the sums that an operation gives; logits are of order 10. A row
# of another token, or one that should be hidden, makes errors of order 1.
TOLERANCE = 0.06


@pytest.fixture(scope="module")
def package(random_package) -> tuple[torch.nn.Module, Path]:
    return random_package("coreml", cache="fp16", weights="fp16", chunk=CHUNK)


@pytest.fixture
def evaluated(monkeypatch) -> None:
    """Programs are opened by the evaluator."""
    needs("coreml")
    from edge_qkv.export.coreml.evaluator import interpreter as coreml_evaluator

    monkeypatch.setattr(coreml, "load_function", coreml_evaluator.load)


@pytest.fixture
def model(evaluated, package):
    with Model(package[1]) as model:
        yield model


@pytest.fixture(scope="module")
def ids() -> list[int]:
    return torch.randint(0, 256, (CAPACITY,), generator=torch.Generator().manual_seed(3)).tolist()


@pytest.fixture(scope="module")
def expected(package, ids) -> Expected:
    with torch.no_grad():
        return Expected(ids, package[0](torch.tensor([ids]))[0][0].numpy(), TOLERANCE)


def test_logits_are_the_decoders(model, expected):
    """At all lengths, the last chunk of the capacity among them, which is no whole one."""
    with Session(model, CAPACITY, CAPACITY) as session:
        walk_session(session, expected, CHUNK)


def test_a_prompt_gives_the_logits_of_its_last_token(model, expected):
    """Chunks that are not full, and tokens one by one near the end, where a chunk has no room."""
    with Session(model, CAPACITY) as session:
        for length in (1, 2, CHUNK - 1, CHUNK, CHUNK + 1, CAPACITY - CHUNK + 1, CAPACITY - 1, CAPACITY):
            session.rewind(0)
            session.evaluate(expected.ids[:length])
            np.testing.assert_allclose(session.logits(), expected.logits[length - 1], atol=TOLERANCE)


def test_greedy_text_is_the_decoders(model, package, ids):
    with Session(model, CAPACITY) as session:
        written = list(session.generate_tokens(ids[:20], 30, Sampling(temperature=0)))
    with torch.no_grad():
        logits = package[0](torch.tensor([ids[:20] + written]))[0][0, 19:-1]
    best = logits.max(-1).values - logits.gather(-1, torch.tensor(written)[:, None])[:, 0]
    assert len(written) == 30 and best.max() < 2 * TOLERANCE  # the likeliest, or one as likely


def test_a_snapshot_goes_on_bit_for_bit(model, ids, tmp_path):
    with Session(model, 60) as session, Session(model, CAPACITY) as other:
        session.evaluate(ids[:37])
        session.save(tmp_path / "saved")
        other.evaluate(ids[50:])
        other.restore(tmp_path / "saved")
        np.testing.assert_array_equal(session.logits(), other.logits())
        np.testing.assert_array_equal(session.score(ids[37:60]), other.score(ids[37:60]))
        with Session(model, 30) as short, pytest.raises(ContextFull, match="37 tokens do not fit"):
            short.restore(tmp_path / "saved")


def test_a_snapshot_of_another_model_is_refused(model, random_package, ids, tmp_path):
    other = random_package("coreml", cache="fp16", weights="int8", chunk=CHUNK)[1]
    with Session(model, 60) as session, Session(other, 60) as foreign:
        foreign.evaluate(ids[:9])
        foreign.save(tmp_path / "saved")
        session.evaluate(ids[:5])
        with pytest.raises(InputError, match="saved: is a snapshot of another model"):
            session.restore(tmp_path / "saved")
        assert session.tokens == ids[:5]


def test_two_sessions_and_a_fork_do_not_mix(model, expected):
    ids, half = expected.ids, CAPACITY // 2
    with Session(model, CAPACITY) as one, Session(model, CAPACITY) as two:
        one.evaluate(ids[:half])
        two.evaluate(ids[::-1])
        with one.fork() as fork:
            one.evaluate(ids[:10])
            np.testing.assert_allclose(fork.score(ids[half:]), expected.logits[half:], atol=TOLERANCE)


def test_cancel_stops_between_the_calls(model, ids):
    with Session(model, CAPACITY, CHUNK) as session:
        session.cancel()
        with pytest.raises(Cancelled):
            session.evaluate(ids[:40])
        assert session.tokens == []
        session.evaluate(ids[:40])
        assert session.tokens == ids[:40]


def test_a_filled_cache_has_its_length(model, ids):
    with Session(model, CAPACITY) as session:
        session.fill(50, seed=1)
        assert np.isfinite(session.score(ids[:20])).all()
        assert len(session.tokens) == 70


def test_the_states_are_the_cache_of_the_plan(model, package):
    made = plan(package[1])
    with Session(model) as session:
        state = session._engine._cache._state
        held = sum(state.read_state(name).nbytes for name in state.features)
        assert held == made.cache == session.memory()["cache_reserved"] == TINY.cache_bytes(CAPACITY, "fp16")


def test_a_plan_says_what_it_does_not_know(package):
    assert "Core ML" in plan(package[1]).unknown
    with pytest.raises(InputError, match="--memory: what Core ML takes"):
        plan(package[1], memory="1GB")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"memory": "1GB"}, "--memory: what Core ML takes"),
        ({"packed": "."}, "packed: is for packages that the native runtime runs"),
        ({"spill": "."}, "spill: is for packages that the native runtime runs"),
        ({"threads": 2}, "threads: is for packages that the native runtime runs"),
        ({"overflow": "shift"}, "overflow: rows cannot be moved in a coreml package"),
    ],
)
def test_options_of_other_engines_are_refused(evaluated, package, options, words):
    with pytest.raises(InputError, match=words):
        Session(package[1], **options)


def test_pressure_is_not_watched_and_nothing_is_packed(model, package):
    model.trim("all")
    with pytest.raises(InputError, match="watch_pressure"):
        model.watch_pressure()
    with pytest.raises(InputError, match="prepares its weights by itself"):
        pack(package[1])


def test_an_overflow_is_forgotten_with_its_tokens(model, expected):
    with Session(model, CAPACITY) as session:
        session.evaluate(expected.ids[:20])
        state = session._engine._cache._state
        for name in state.features:
            rows = state.read_state(name)
            rows[:, :, 10:] = np.inf
            state.write_state(name, rows)
        assert np.isnan(session.score(expected.ids[20:22])).any()
        session.rewind(10)
        np.testing.assert_allclose(session.score(expected.ids[10:40]), expected.logits[10:40], atol=TOLERANCE)


def test_a_session_goes_on_after_its_model_is_closed(evaluated, package, expected, monkeypatch):
    """With the functions that it has: Core ML prepares one for the device whenever it is opened."""
    opened, load = [], coreml.load_function
    monkeypatch.setattr(coreml, "load_function", lambda path, name: opened.append(name) or load(path, name))
    model = Model(package[1])
    with Session(model, CAPACITY) as session:
        session.evaluate(expected.ids[: CHUNK + 1])
        assert opened == ["decode", "prefill"]
        model.close()
        session.rewind(0)
        session.evaluate(expected.ids[: CHUNK + 1])
        np.testing.assert_allclose(session.logits(), expected.logits[CHUNK], atol=TOLERANCE)
        assert opened == ["decode", "prefill"]


@pytest.mark.skipif(coreml.runs_here(), reason="Core ML is here")
def test_a_model_that_core_ml_does_not_open_is_one_sentence(package, monkeypatch):
    """coremltools makes an object of it all the same."""
    monkeypatch.setattr(coreml, "runs_here", lambda: True)
    with pytest.raises(InputError, match=r"model\.mlpackage: Core ML cannot open it \(State.*\); export it") as refused:
        Model(package[1])
    assert "\n" not in str(refused.value)


@pytest.mark.skipif(coreml.runs_here(), reason="Core ML is here")
def test_elsewhere_running_one_is_one_sentence(package):
    run = [sys.executable, "-m", "edge_qkv", "run", str(package[1]), "--tokens", "1,2"]
    done = subprocess.run(run, capture_output=True, text=True)
    assert done.returncode == 2 and not done.stdout
    assert "Core ML runs it on macOS 15 or iOS 18 and later" in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.parametrize("chunk", [None, "16", 0])
def test_a_manifest_without_its_chunk_is_refused(evaluated, package, tmp_path, chunk):
    copy = shutil.copytree(package[1], tmp_path / "package")
    manifest = json.loads((copy / MANIFEST).read_text())
    (copy / MANIFEST).write_text(json.dumps(manifest | {"prefill_chunk": chunk}))
    with pytest.raises(InputError, match="does not say its prefill_chunk"):
        Model(copy)


@pytest.mark.parametrize("change", [{"max_positions": 128}, {"pattern": "layer*3"}, {"kv_heads": 2}])
def test_a_manifest_of_another_cache_is_refused(evaluated, package, tmp_path, change):
    copy = shutil.copytree(package[1], tmp_path / "package")
    manifest = json.loads((copy / MANIFEST).read_text())
    config = manifest["config"]
    if "kv_heads" in change:
        change = {"kinds": {"layer": config["kinds"]["layer"] | change}}
    (copy / MANIFEST).write_text(json.dumps(manifest | {"config": config | change}))
    with pytest.raises(InputError, match=r"edge_qkv\.json and the model disagree"):
        Session(copy)
