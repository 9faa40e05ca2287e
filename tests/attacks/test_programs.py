"""Programs that contradict their description or themselves end in one sentence, twice, and the next model runs."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

LOADER = Path(__file__).with_name("load_programs.py")


def _outcomes(package: Path, programs: dict[str, Path]) -> dict[str, tuple[str | None, str | None]]:
    """What two attempts at each program ended in, by its name. No program ends the process that loads it."""
    pairs = [f"{name}={path}" for name, path in programs.items()]
    done = subprocess.run([sys.executable, str(LOADER), str(package), *pairs], capture_output=True, text=True)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0, (lines[-1:], done.stderr)
    assert lines.pop()[0] == "the good one" and [line[0] for line in lines] == list(programs)
    assert done.stderr == "", "what ExecuTorch logs belongs into the sentence"
    return {name: (first, second) for name, first, second in lines}


def _is_a_sentence(message: str) -> bool:
    return message.isprintable() and 20 < len(message) < 500 and "Traceback" not in message


def test_programs_that_contradict_themselves_are_refused(tiny_program, tmp_path):
    import programs

    files = programs.written((tiny_program / "model.pte").read_bytes(), tmp_path)
    for name, (first, second) in _outcomes(tiny_program, files).items():
        if name in programs.HARMLESS:
            assert first is None and second is None, (name, first)
        else:
            assert first == second and first and _is_a_sentence(first), (name, first, second)


def test_damaged_weights_and_cut_off_programs_end_in_a_sentence_or_not_at_all(tiny_program, tmp_path):
    """Damage at random in the weights changes numbers; a program that ends early is refused."""
    good = (tiny_program / "model.pte").read_bytes()
    random.seed(1)
    segments = int.from_bytes(good[24:32], "little")
    files = {}
    for number in range(40):
        data = bytearray(good)
        if number % 2:
            del data[random.randrange(len(data)) :]
        else:
            for _ in range(8):
                data[random.randrange(segments, len(data))] ^= 1 << random.randrange(8)
        files[f"{'cut' if number % 2 else 'flipped'} {number}"] = tmp_path / str(number)
        (tmp_path / str(number)).write_bytes(data)
    for name, (first, second) in _outcomes(tiny_program, files).items():
        assert first == second and (first is None or _is_a_sentence(first)), (name, first)
        assert name.startswith("flipped") or first is not None, name


def test_a_model_on_which_executorch_gave_up_says_to_open_it_again(tiny_program, tmp_path):
    """What it asserts in the middle of an evaluation leaves the program there."""
    import programs

    files = programs.written((tiny_program / "model.pte").read_bytes(), tmp_path)
    script = f"""import sys; sys.path.insert(0, {str(LOADER.parent)!r})
from load_programs import *
good, package, program = map(Path, sys.argv[1:])
replace(shutil.copytree(good, package), program)
with Model(package, threads=1, verify=False) as model, Session(model, 96) as one, Session(model, 96) as two:
    for session in (one, one, two):
        print(attempt(lambda: session.evaluate(TOKENS)))
evaluate(good)
"""
    program = files["a number for a tensor of another operator"]
    command = [sys.executable, "-c", script, *map(str, (tiny_program, tmp_path / "package", program))]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    first, *later = done.stdout.splitlines()
    assert "EValue is not a Tensor; open the model again." in first
    assert later == ["ExecuTorch gave up in an earlier evaluation of this model; open the model again."] * 2


@pytest.mark.parametrize("module", ["executorch.runtime", "executorch.kernels.quantized"])
@pytest.mark.parametrize("first", [True, False])
def test_the_python_side_of_executorch_lives_in_the_same_process(tiny_program, module, first):
    """Its libraries register what ours did, or the other way round: neither aborts, and the numbers stay."""
    ours = f"a = evaluate(Path({str(tiny_program)!r}))"
    script = [
        f"import sys; sys.path.insert(0, {str(LOADER.parent)!r})",
        "from load_programs import *",
        *((f"import {module}", ours) if first else (ours, f"import {module}")),
        ours.replace("a =", "b ="),
        "np.testing.assert_array_equal(a, b)",
    ]
    done = subprocess.run([sys.executable, "-c", "\n".join(script)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "register_pal" not in done.stderr
