"""`edge-qkv bench`: what is found, written and compared; wrong tokens, Ctrl-C and bad input."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path

import bench_results
import pytest

from conftest import TINY, changed, hears_ctrl_c, write_checkpoint
from edge_qkv import EdgeQKVError, Package, Session, plan
from edge_qkv.bench import figures, machine
from edge_qkv.bench.__main__ import COMMANDS, main
from edge_qkv.bench.package import speed
from edge_qkv.bench.package.command import reachable
from edge_qkv.export import export_package
from edge_qkv.processors import processors

BYTES = 2 * 8 * 4  # of the tiny model's cache, a token
PARTS = {"load", "decode", "prefill", "first_token", "threads", "restore"}
MEASURED = Path(__file__).parents[2] / "bench/measured"
QUICK = ("--only", "decode", "--repeats", "1", "--depths", "0", "40")


def _run(*arguments: object, **options) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "edge_qkv", "bench", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, **options)


@pytest.fixture(scope="module")
def measured(tiny_package, tmp_path_factory) -> tuple[Path, str, str]:
    """All sections of the tiny package: the directory that was written, and what was printed."""
    output = tmp_path_factory.mktemp("bench") / "first"
    options = ("--threads", 2, "--repeats", 2, "--depths", 95, 0, 40, "--prompts", 3, 60)
    done = _run(tiny_package, "--output", output, *options)
    assert done.returncode == 0, done.stderr
    return output, done.stdout, done.stderr


@pytest.fixture(scope="module")
def again(tiny_package, tmp_path_factory) -> Path:
    """One section of it, a second time."""
    output = tmp_path_factory.mktemp("bench") / "second"
    done = _run(tiny_package, "--output", output, *QUICK)
    assert done.returncode == 0, done.stderr
    return output


@pytest.fixture
def refused(capsys):
    """refused(*arguments) -> the one sentence it ends with; asserts exit code 2 and no figures."""

    def run(*arguments: object) -> str:
        capsys.readouterr()
        assert main([str(a) for a in arguments]) == 2
        captured = capsys.readouterr()
        assert captured.out == "" and "Traceback" not in captured.err
        last = captured.err.splitlines()[-1]
        assert last.startswith("edge-qkv bench") and ": " in last
        return last

    return run


def _sound(figure: dict) -> bool:
    return 0 < figure["least"] <= figure["median"] <= figure["most"] and figure["repeats"] >= 1


def test_the_result_has_all_parts_and_exact_cache_bytes(measured, tiny_package):
    found = bench_results.read(measured[0], "package")
    assert found["schema"] == 1 and found["complete"] is True and set(found) >= PARTS
    assert found["options"] == {"threads": 2, "repeats": 2, "seconds": 20.0}
    package = Package.open(tiny_package)
    assert found["package"]["config"] == package.config.to_dict()
    assert found["package"]["engine"] == "onnxruntime" and found["package"]["version"][0].isdigit()
    decode = found["decode"]
    assert [(row["depth"], len(row["tokens"])) for row in decode["depths"]] == [(0, 8), (40, 8), (95, 1)]
    for row in decode["depths"]:
        memory = row["memory"]
        assert memory["cache_used"] == (row["depth"] + len(row["tokens"])) * BYTES <= memory["cache_committed"]
        assert memory["cache_reserved"] == decode["planned"]["cache"] >= 96 * BYTES  # whole pages
        assert memory["peak"] >= memory["resident"]
        assert _sound(row["ms_per_token"])
    assert decode["planned"]["cache"] == plan(package, context=96).cache
    # fp32 weights and cache: the same tokens, whatever the kernel and the chunks.
    assert decode["verified"]["equal"] == decode["verified"]["tokens"] == 17
    starts = [(row["depth"], row["start"], row["tokens"]) for row in found["prefill"]]
    assert starts == [(0, 0, 96), (40, 0, 96), (95, 0, 96)]  # a chunk is as long as the context
    assert [row["tokens"] for row in found["first_token"]] == [3, 60]
    assert all(_sound(row["milliseconds"]) for row in found["first_token"])
    assert [row["threads"] for row in found["threads"]] == [1, 2]
    assert [row["depth"] for row in found["threads"][0]["depths"]] == [0, 95]
    for kind in ("cold", "warm"):
        times = found["load"][kind]
        assert _sound(times["open_ms"]) and times["first_token_ms"]["median"] > times["open_ms"]["median"]
    assert found["restore"]["tokens"] == 95
    assert _sound(found["restore"]["save_ms"]) and _sound(found["restore"]["restore_ms"])


def test_the_machine_is_described(measured):
    found = bench_results.read(measured[0], "package")["machine"]
    assert found["cores"] == processors() and found["memory"] > 1 << 26
    assert found["processor"] and found["instruction_set"] and found["date"].endswith("+00:00")
    arm = "processor\t: 0\nCPU implementer\t: 0x41\nCPU part\t: 0xd05\n"
    assert machine.processor(f"{arm}{arm}{arm.replace('0xd05', '0xd0b')}") == "2 x Cortex-A55, 1 x Cortex-A76"
    assert machine.processor(arm.replace("0x41", "0x51")) == "1 x implementer 0x51 part 0xd05"
    assert machine.processor("model name\t: Some: name\nmodel name\t: Some: name\n") == "Some: name"


def test_progress_is_counted_and_figures_are_tables(measured):
    output, out, err = measured
    lines = [line for line in err.splitlines() if line.startswith("[")]
    assert lines[0].startswith("[1/12] ") and lines[-1].startswith("[12/12] ") and len(lines) == 12
    for title in ("Decode and memory", "Prefill", "Time to the first token", "Load", "Threads", "Restore"):
        assert title in out
    assert "verified: 17 of 17 timed tokens" in out and f"{96 * BYTES:,}" in out
    text = (output / "bench.md").read_text()
    assert text.startswith("# tiny: Q-MQA") and "| decode at | ms/token |" in text and "| ---: |" in text


def test_plots_are_written_with_their_labels(measured):
    pytest.importorskip("matplotlib")
    output, *_ = measured
    for name, words in {"decode": ("ms a token", "ms, "), "memory": ("resident", "anonymous", "cache")}.items():
        assert (output / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        root = ElementTree.parse(output / f"{name}.svg").getroot()
        text = " ".join(element.text or "" for element in root.iter() if element.tag.endswith("text"))
        assert all(word in text for word in words), text
        assert f"![{name}]({name}.svg)" in (output / "bench.md").read_text()


def test_a_package_of_the_other_engine_is_measured(tiny_program, tmp_path, capsys):
    options = ("--only", "load", "decode", "first-token", "--repeats", "1", "--depths", "40", "--prompts", "60")
    assert main([str(tiny_program), *options, "--packed", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["package"]["engine"] == "executorch" and found["package"]["packed"] is True
    assert found["decode"]["depths"][0]["memory"]["cache_used"] == 48 * BYTES // 2  # fp16
    assert found["decode"]["verified"]["tokens"] == 8 and 0 <= found["load"]["cached_after_drop"] <= 1


def test_the_base_install_is_enough(tiny_package, tmp_path):
    """Here and in every process that it starts, all but numpy, onnxruntime and tokenizers are hidden."""
    hidden = ("torch", "onnx", "onnxscript", "safetensors", "tqdm", "executorch", "torchao", "matplotlib")
    (tmp_path / "sitecustomize.py").write_text(f"import sys; sys.modules.update(dict.fromkeys({hidden}))")
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"PYTHONPATH": path}
    done = _run(tiny_package, *QUICK, "--output", tmp_path / "out", env=environment)
    assert done.returncode == 0, done.stderr
    assert "no plots: matplotlib is not installed; pip install 'edge-qkv[bench]'" in done.stderr
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["bench.json", "bench.md"]
    done = _run("300M/Q-MQA", "--directory", tmp_path / "random", env=environment)
    assert done.returncode == 2 and "needs torch; run pip install 'edge-qkv[export]'" in done.stderr


@pytest.mark.parametrize("name", sorted(path.parent.name for path in MEASURED.glob("*/bench.json")))
def test_every_field_of_the_committed_results_is_described(name):
    kind = json.loads((MEASURED / name / "bench.json").read_text())["kind"]
    assert bench_results.read(MEASURED / name, kind)["complete"]


@pytest.mark.parametrize("name", ["", *COMMANDS])
def test_every_command_has_its_help(name, capsys):
    with pytest.raises(SystemExit, match=r"^0$"):
        main([*filter(None, [name]), "--help"])
    assert capsys.readouterr().out.startswith(f"usage: {f'edge-qkv bench {name}'.strip()} [-h]")
    with pytest.raises(SystemExit):
        main(["--help"])
    assert f"edge-qkv bench {name}" in capsys.readouterr().out.partition("sections")[0]


# ---- compare ----


def test_results_of_two_runs_in_one_table_and_plot(measured, again, tmp_path, capsys):
    capsys.readouterr()
    assert main(["compare", str(measured[0]), str(again / "bench.json"), "--output", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    rows = {line[:32].strip(): line[32:].split("  ") for line in out.splitlines()}
    header = next(line for line in out.splitlines() if "first" in line and "second" in line and "and" not in line)
    assert header.split() == ["first", "second"]
    both = next(line for line in out.splitlines() if line.startswith("decode at 40, ms/token"))
    assert both.endswith("x")
    alone = next(line for line in out.splitlines() if line.startswith("decode at 95, ms/token"))
    assert not alone.endswith("x")
    same = next(line for line in out.splitlines() if line.startswith("same tokens as the first column"))
    assert same.split()[-6:] == ["17", "of", "17", "16", "of", "16"] and rows
    assert (tmp_path / "bench.md").read_text().startswith("# first and second")
    if (measured[0] / "decode.svg").exists():
        assert (tmp_path / "decode.svg").exists() and (tmp_path / "memory.png").exists()
    assert main(["compare", str(measured[0]), str(again), "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["results"]) == 2


def test_results_that_cannot_be_read_are_one_sentence(measured, again, tmp_path, refused):
    good = json.loads((measured[0] / "bench.json").read_text())
    bad = tmp_path / "bad.json"

    def sentence(content: object) -> str:
        bad.write_text(content if isinstance(content, str) else json.dumps(content))
        return refused("compare", again, bad)

    assert "give at least two" in refused("compare", again)
    assert "cannot be read" in refused("compare", again, tmp_path / "none")
    assert "is not JSON" in sentence((measured[0] / "bench.json").read_text()[:-100])
    assert "is not JSON" in sentence(json.dumps(good | {"seconds": float("nan")}))
    assert "is no result of edge-qkv bench" in sentence([1])
    assert "has schema 2, this edge-qkv reads 1" in sentence(good | {"schema": 2})
    assert "another kind" in sentence(good | {"kind": "variants"})
    assert "it has no machine" in sentence({k: v for k, v in good.items() if k != "machine"})
    assert "machine.cores is null" in sentence(good | {"machine": good["machine"] | {"cores": None}})
    decode = json.loads(json.dumps(good["decode"]))
    del decode["depths"][1]["ms_per_token"]["median"]
    assert "decode.depths[1].ms_per_token has no median" in sentence(good | {"decode": decode})


def _places(part: object, path: tuple = ()) -> Iterator[tuple]:
    """The path of every value inside a result."""
    inside = part.items() if isinstance(part, dict) else enumerate(part) if isinstance(part, list) else ()
    for name, value in inside:
        yield (*path, name)
        yield from _places(value, (*path, name))


@pytest.mark.parametrize("change", [None, "", -1, 1 << 80, True, [], {}, [None], "gone"], ids=repr)
def test_a_result_that_is_damaged_anywhere_is_compared_or_refused(change, measured, again, tmp_path, capsys):
    """In one sentence: what is not read may be anything, what is read must be what it is."""
    good = json.loads((measured[0] / "bench.json").read_text())
    refused = 0
    for *path, last in _places(good):
        content = json.loads(json.dumps(good))
        inside = functools.reduce(lambda part, name: part[name], path, content)
        if change == "gone":
            del inside[last]
        else:
            inside[last] = change
        (tmp_path / "bench.json").write_text(json.dumps(content))
        capsys.readouterr()
        code, error = main(["compare", str(again), str(tmp_path)]), capsys.readouterr().err
        assert (code, error.count("\n")) == (0, 0) or (code == 2 and error.startswith("edge-qkv bench compare: ")), path
        refused += code == 2
    assert refused > 20


# ---- what is right ----


@pytest.fixture(scope="module")
def altered(tiny_checkpoint, tmp_path_factory) -> Path:
    """The tiny package with one matrix of the other sign."""
    from safetensors.torch import load_file, save_file

    folder = write_checkpoint(tmp_path_factory.mktemp("altered") / "checkpoint", TINY)
    weights = load_file(folder / "model.safetensors")
    name = next(n for n in weights if n.endswith("mlp.down.weight"))
    save_file(weights | {name: -weights[name]}, folder / "model.safetensors")
    output = folder.with_name("altered")
    export_package("onnx", str(folder), output, weights="fp32", cache="fp32", parity=False)
    return output


def test_wrong_tokens_are_an_error_and_no_figure(tiny_package, altered, tmp_path, refused):
    message = refused(tiny_package, *QUICK, "--reference", altered, "--output", tmp_path)
    assert "decoded at depth 0 was" in message and f"{altered}, reading the same tokens as a chunk, says" in message
    kept = json.loads((tmp_path / "bench.json").read_text())
    assert kept["complete"] is False and "decode" not in kept and "package" in kept


def test_tokens_are_right_within_what_rounding_moves(tiny_package, altered):
    with Session(tiny_package, context=96) as session:
        times, said = speed.decode(session, 30, 2, 60)
        session.rewind(30)
        assert len(times) == 2 and len(said) == speed.TOKENS
        assert speed.verify(session, [(30, said)])["equal"] == speed.TOKENS
        wrong = [*said[:3], (said[3] + 1) % 260, *said[4:]]
        with pytest.raises(EdgeQKVError, match=f"^token 4 decoded at depth 30 was {wrong[3]}, where"):
            speed.verify(session, [(30, wrong)])
    with Session(altered, context=96) as session, pytest.raises(EdgeQKVError, match="a wrong answer has no speed"):
        speed.verify(session, [(30, said)])


def test_runs_that_decode_other_tokens_are_an_error(tiny_package, altered):
    """As of an engine that keeps something from one run to the next: here, the whole model is exchanged between."""

    class Exchanged(Session):
        def rewind(self, length: int) -> None:
            super().rewind(length)
            self.rewound = getattr(self, "rewound", 0) + 1
            if self.rewound == 2:
                other.fill(length)
                self._engine, other._engine = other._engine, self._engine

    said = r"decoded \[.*\] at depth 20 after \[.*\] at the same depth"
    with (
        Session(altered, context=96) as other,
        Exchanged(tiny_package, context=96) as session,
        pytest.raises(EdgeQKVError, match=said),
    ):
        speed.decode(session, 20, 1, 60)


# ---- limits ----


def test_what_takes_too_long_is_left_out_or_not_repeated(tiny_package):
    with Session(tiny_package, context=96) as session:
        short, longer, longest = speed.prompts(session, [2, 50, 90], 3, 1e-9)
        assert short["milliseconds"]["repeats"] == 1
        assert longer["milliseconds"] is longest["milliseconds"] is None
    assert figures.repeat(lambda: 1.0, 5, 1e-9) == [1.0] and figures.repeat(lambda: 1.0, 5, 60) == [1.0] * 5
    assert figures.rate(figures.figure([2.0, 4.0, 8.0]), 16) == {"median": 4, "least": 2, "most": 8, "repeats": 3}
    assert figures.written(figures.figure([2.0, 4.0, 8.0])) == "4.00 (2.00..8.00)"


def test_depths_that_memory_does_not_hold_are_left_out(random_package, refused, capsys):
    """A model whose cache has a tebibyte at its full context."""
    most = 1 << 24
    config = changed(TINY, positions="none", max_positions=most, sharing="qkv", heads=64, kv_heads=64, head_dim=64)
    _, path = random_package("onnx", config)
    package = Package.open(path)
    held, left_out = reachable(package, [0, most - 1])
    assert held == [0] and left_out[0]["depth"] == most - 1
    assert left_out[0]["needs"] > 1 << 40 > left_out[0]["available"]
    assert "depth 16,777,215 is left out" in capsys.readouterr().err
    assert "are free; close what needs memory" in refused(path, "--depths", most - 1)


def test_ctrl_c_keeps_what_was_measured(tiny_package, tmp_path):
    options = ("--repeats", "1000000", "--seconds", "600", "--only", "load", "decode", "--output", str(tmp_path))
    command = [sys.executable, "-m", "edge_qkv", "bench", str(tiny_package), *options]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process = subprocess.Popen(command, start_new_session=True, preexec_fn=hears_ctrl_c, **pipes)
    for line in process.stderr:
        if "decode at" in line:
            break
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 130 and out == ""
    assert err.endswith("edge-qkv bench: stopped\n") and "Traceback" not in err
    assert f"what was measured so far is in {tmp_path / 'bench.json'}" in err
    kept = bench_results.read(tmp_path, "package")
    assert kept["complete"] is False and "load" in kept and "decode" not in kept


def test_bad_input_is_one_sentence(tiny_package, tmp_path, refused):
    assert f"{tmp_path / 'none'}: is no package" in refused(tmp_path / "none")
    assert "is not a model package" in refused(tmp_path)
    assert "--depths = 96: must be a whole number between 0 and 95" in refused(tiny_package, "--depths", 96)
    assert "--prompts = 97" in refused(tiny_package, "--prompts", 97)
    assert "--repeats = 0" in refused(tiny_package, "--repeats", 0)
    assert "--seconds 0.0: must be above 0" in refused(tiny_package, "--seconds", 0)
    assert "threads = -1" in refused(tiny_package, "--threads", -1)
    assert "--target and --cache: a package has its own" in refused(tiny_package, "--target", "onnx", "--cache", "fp16")
    assert f"{tmp_path / 'none'}: is not a directory" in refused(tiny_package, "--reference", tmp_path / "none")
    (tmp_path / "file").write_text("")
    assert "--output" in refused(tiny_package, "--output", tmp_path / "file")
    assert "variant 'Q-NONE' is not known" in refused("1.2B/Q-NONE")
    assert "--depths = 40000" in refused("1.2B/Q-MQA", "--depths", 40000)  # before anything is exported
