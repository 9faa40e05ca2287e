"""The numpy evaluator of saved Core ML programs: numbers, states, compressed weights, damaged packages."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from edge_qkv import InputError

ct = pytest.importorskip("coremltools", reason="coremltools is not installed")

from coremltools.converters.mil import Builder as mb  # noqa: E402

from edge_qkv.export.coreml.evaluator.interpreter import load  # noqa: E402
from ml_programs import convert, ints, random, save  # noqa: E402

MODEL, WEIGHTS = "Data/com.apple.CoreML/model.mlmodel", "Data/com.apple.CoreML/weights/weight.bin"

# ---- numbers ----


def _run(tmp_path: Path, build, **inputs: np.ndarray) -> dict[str, np.ndarray]:
    return load(save(convert(build, inputs), tmp_path / "one.mlpackage")).predict(inputs)


def test_results_are_rounded_after_each_operation_and_not_within(tmp_path):
    """2049 is no fp16: lost between two operations, and not within a sum."""
    ones = np.ones((1, 2049), np.float16)

    def build(x, y):
        return (
            mb.sub(x=mb.add(x=x, y=np.float16(1)), y=x, name="between"),
            mb.linear(x=y, weight=ones, bias=np.float16([-2000]), name="linear"),
            mb.add(x=mb.matmul(x=y, y=y, transpose_y=True), y=np.float16(-2000), name="matmul"),
            mb.add(x=x, y=x, name="overflow"),
            mb.matmul(
                x=mb.mul(x=y, y=np.float16(8)), y=mb.mul(x=y, y=np.float16(-8)), transpose_y=True, name="matmul_over"
            ),
        )

    results = _run(tmp_path, build, x=np.float16([2048, 60000]), y=ones)
    assert results["between"].tolist() == [0, 0]
    assert results["linear"].tolist() == [[49]]
    assert results["matmul"].tolist() == [[48]]
    assert results["overflow"].tolist() == [4096, np.inf]
    assert results["matmul_over"].tolist() == [[-np.inf]]


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda x, i: mb.gather(x=x, indices=i, axis=0), r"gather .* indices from -1 to 3 .* \[0, 3\)"),
        (lambda x, i: mb.slice_by_index(x=x, begin=i, end=[3, 5]), r"slice_by_index .* end 5 is outside of 4"),
        (lambda x, i: mb.slice_by_index(x=x, begin=[3, 0], end=i, end_mask=[True, True]), "tensor without values"),
        (lambda x, i: mb.slice_by_index(x=x, begin=i, end=[1, 4]), r"\[2, 1\) is empty"),
        (
            lambda x, i: mb.slice_by_index(x=x, begin=[0, 4], end=i, squeeze_mask=[False, True], end_mask=[True, True]),
            "begin 4",
        ),
        (lambda x, i: mb.slice_by_size(x=x, begin=i, size=[1, 2]), r"slice_by_size .* \[-1, 3\]"),
        (
            lambda x, i: mb.slice_update(
                x=x, update=np.zeros((1, 2), np.float16), begin=i, end=mb.add(x=i, y=ints(4, 2))
            ),
            "slice_update .* end 5 is outside of 4",
        ),
        (
            lambda x, i: mb.slice_update(x=x, update=np.zeros((1, 2), np.float16), begin=i, end=[3, 4]),
            r"\[1, 1\], its update",
        ),
        (lambda x, i: mb.cast(x=i, dtype="uint16"), "cast .* -1 to 3 do not fit into uint16"),
        (lambda x, i: mb.cast(x=mb.log(x=x), dtype="int32"), "operator log"),
        (lambda x, i: mb.real_div(x=i, y=mb.sub(x=i, y=i)), "real_div of whole numbers"),
        (lambda x, i: mb.reshape(x=x, shape=mb.add(x=i, y=ints(6, 0))), "reshape"),
    ],
)
def test_what_is_not_defined_raises_and_never_wraps_around(tmp_path, build, words):
    inputs = {"x": np.zeros((3, 4), np.float16), "i": ints(-1, 3)}
    package = save(convert(build, inputs), tmp_path / "one.mlpackage")
    with pytest.raises((RuntimeError, InputError), match=words):
        load(package).predict(inputs)


# ---- states ----

CAPACITY = 8


def _cache(tokens: int):
    """Writes rows at `past` and gives all rows, as a decoder does."""

    def build(rows, past, kv):
        begin = mb.concat(values=[ints(0, 0), past, ints(0)], axis=0)
        end = mb.concat(values=[ints(1, 2), mb.add(x=past, y=ints(tokens)), ints(4)], axis=0)
        updated = mb.slice_update(x=mb.read_state(input=kv), update=rows, begin=begin, end=end)
        return mb.mul(x=mb.coreml_update_state(state=kv, value=updated), y=np.float16(2), name="twice")

    inputs = {"rows": np.zeros((1, 2, tokens, 4), np.float16), "past": ints(0)}
    return convert(build, inputs, {"kv": (1, 2, CAPACITY, 4)})


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> Path:
    """A package of two functions, `one` and `three`, that share the state kv."""
    folder = tmp_path_factory.mktemp("cache")
    parts = ct.utils.MultiFunctionDescriptor()
    for name, tokens in (("one", 1), ("three", 3)):
        parts.add_function(str(save(_cache(tokens), folder / f"{name}.mlpackage")), "main", name)
    parts.default_function_name = "one"
    ct.utils.save_multifunction(parts, str(folder / "cache.mlpackage"))
    return folder / "cache.mlpackage"


def test_states_last_from_call_to_call_and_from_function_to_function(cache):
    functions = {1: load(cache, "one"), 3: load(cache, "three")}
    assert str(functions[3].inputs["rows"]) == "float16 [1, 2, 3, 4]"
    assert str(functions[3].outputs["twice"]) == str(functions[1].states["kv"]) == "float16 [1, 2, 8, 4]"
    state, other = functions[1].make_state(), functions[3].make_state()
    expected = np.zeros((1, 2, CAPACITY, 4), np.float16)
    for seed, (tokens, past) in enumerate([(3, 0), (1, 3), (3, 4), (1, 7), (3, 5), (1, 0)]):
        rows = random(1, 2, tokens, 4, seed=seed).astype(np.float16)
        expected[:, :, past : past + tokens] = rows
        result = functions[tokens].predict({"rows": rows, "past": ints(past)}, state)["twice"]
        np.testing.assert_array_equal(result, 2 * expected)
        result[:] = rows[:] = 7  # the caller's arrays are no part of the state
        np.testing.assert_array_equal(state.read_state("kv"), expected)
    assert not other.read_state("kv").any()
    other.write_state("kv", expected)
    functions[1].predict({"rows": np.ones((1, 2, 1, 4), np.float16), "past": ints(2)}, other)
    np.testing.assert_array_equal(state.read_state("kv"), expected)
    expected[:, :, 2] = 1
    np.testing.assert_array_equal(other.read_state("kv"), expected)


@pytest.mark.parametrize("past", [6, 8, -1])
def test_rows_that_a_state_has_no_room_for_are_refused(cache, past):
    """-1: the slice would end before it begins."""
    evaluator = load(cache, "three")
    state = evaluator.make_state()
    with pytest.raises(RuntimeError, match="slice_update"):
        evaluator.predict({"rows": np.ones((1, 2, 3, 4), np.float16), "past": ints(past)}, state)
    assert not state.read_state("kv").any()


def test_wrong_inputs_and_states_are_named(cache, tmp_path):
    evaluator = load(cache, "one")
    state, rows = evaluator.make_state(), np.zeros((1, 2, 1, 4), np.float16)
    for inputs, words in [
        ({"rows": rows}, "the inputs are rows, past, not rows"),
        ({"rows": rows, "past": np.array([0])}, r"the input past is int32 \[1\], not int64 \[1\]"),
        ({"rows": rows[0], "past": ints(0)}, r"the input rows is float16 \[1, 2, 1, 4\], not float16 \[2, 1, 4\]"),
    ]:
        with pytest.raises(RuntimeError, match=words):
            evaluator.predict(inputs, state)
    with pytest.raises(RuntimeError, match=r"the state kv of .* is missing"):
        evaluator.predict({"rows": rows, "past": ints(0)})
    with pytest.raises(RuntimeError, match="no state 'key'; there are kv"):
        state.read_state("key")
    with pytest.raises(RuntimeError, match=r"the state kv is float16 .* not float32"):
        state.write_state("kv", np.zeros((1, 2, CAPACITY, 4), np.float32))


# ---- compressed weights ----


def _linear(**options):
    config = ct.optimize.coreml.OpLinearQuantizerConfig(weight_threshold=0, **options)
    return lambda m: ct.optimize.coreml.linear_quantize_weights(m, ct.optimize.coreml.OptimizationConfig(config))


def _palettes(**options):
    config = ct.optimize.coreml.OpPalettizerConfig(mode="uniform", weight_threshold=0, **options)
    return lambda m: ct.optimize.coreml.palettize_weights(m, ct.optimize.coreml.OptimizationConfig(config))


GROUPS = {"granularity": "per_grouped_channel", "group_size": 8}
COMPRESSIONS = {
    "int8": _linear(mode="linear_symmetric", dtype="int8"),
    "int8 with offsets": _linear(mode="linear", dtype="int8"),
    "uint8 of tensors": _linear(mode="linear", dtype="uint8", granularity="per_tensor"),
    "int4 in blocks": _linear(mode="linear_symmetric", dtype="int4", granularity="per_block", block_size=11),
    "int4 in large blocks": _linear(mode="linear_symmetric", dtype="int4", granularity="per_block", block_size=33),
    "uint4 in blocks with offsets": _linear(mode="linear", dtype="uint4", granularity="per_block", block_size=11),
    "int4 with offsets": _linear(mode="linear", dtype="int4"),
    "palettes of 1 bit": _palettes(nbits=1, granularity="per_tensor"),
    "palettes of 2 bits": _palettes(nbits=2, **GROUPS),
    "palettes of 3 bits": _palettes(nbits=3, **GROUPS),
    "palettes of 4 bits": _palettes(nbits=4, **GROUPS),
    "palettes of 6 bits": _palettes(nbits=6, granularity="per_tensor"),
    "palettes of 8 bits": _palettes(nbits=8, **GROUPS),
}


@pytest.fixture(scope="module")
def plain():
    """A model with matrices of 33 columns, so that rows of 4-bit codes begin within bytes; three ways to use them."""

    def build(x, i):
        wide, table = (random(n, 33, seed=n).astype(np.float16) for n in (48, 40))
        return (
            mb.linear(x=x, weight=wide, name="linear"),
            mb.gather(x=table, indices=i, axis=0, name="rows"),
            mb.gather(x=wide, indices=i, axis=1, name="columns"),
            mb.matmul(x=x, y=table, transpose_y=True, name="matmul"),
        )

    inputs = {"x": random(5, 33).astype(np.float16), "i": ints(0, 13, 32)}
    return convert(build, inputs), inputs


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_compressed_weights_are_those_that_coremltools_expands(plain, tmp_path, compression):
    model, inputs = plain
    compressed = COMPRESSIONS[compression](model)
    results = load(save(compressed, tmp_path / "compressed.mlpackage")).predict(inputs)
    expanded = ct.optimize.coreml.decompress_weights(compressed)
    expected = load(save(expanded, tmp_path / "expanded.mlpackage")).predict(inputs)
    assert "constexpr" in str(compressed.get_spec()) and "constexpr" not in str(expanded.get_spec())
    for name, result in results.items():
        np.testing.assert_array_equal(result, expected[name])


# ---- packages that cannot be evaluated ----


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """A package with a file of weights."""

    def build(x):
        return mb.linear(x=x, weight=random(64, 64).astype(np.float16), bias=np.ones(64, np.float16))

    return save(
        convert(build, {"x": np.zeros((1, 64), np.float16)}), tmp_path_factory.mktemp("whole") / "whole.mlpackage"
    )


@pytest.fixture
def package(whole, tmp_path) -> Path:
    """A copy of it, to be damaged."""
    return shutil.copytree(whole, tmp_path / whole.name)


def _edit(package: Path, change) -> None:
    model = ct.proto.Model_pb2.Model.FromString((package / MODEL).read_bytes())
    change(model, model.mlProgram.functions["main"].block_specializations["CoreML8"].operations)
    (package / MODEL).write_bytes(model.SerializeToString())


def _stored(operations):
    return next(o for o in operations if o.attributes["val"].HasField("blobFileValue")).attributes["val"]


def _set(target, **fields) -> None:
    for name, value in fields.items():
        setattr(target, name, value)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda p: shutil.rmtree(p), r"whole\.mlpackage is no package of Core ML"),
        (lambda p: (p / "Manifest.json").write_text("{"), r"Manifest\.json is damaged"),
        (lambda p: (p / "Manifest.json").write_text("[]"), r"Manifest\.json is damaged"),
        (
            lambda p: (p / "Manifest.json").write_text(
                (p / "Manifest.json").read_text().replace("com.apple.CoreML/model.mlmodel", "../../model.mlmodel")
            ),
            r"Manifest\.json is damaged",
        ),
        (lambda p: (p / MODEL).unlink(), r"model\.mlmodel cannot be read"),
        (lambda p: (p / MODEL).write_bytes(b"garbage" * 99), r"model\.mlmodel is damaged"),
        (lambda p: (p / MODEL).write_bytes((p / MODEL).read_bytes()[:-9]), r"model\.mlmodel is damaged"),
        (lambda p: (p / MODEL).write_bytes(b""), r"model\.mlmodel is no ML program"),
        (lambda p: (p / WEIGHTS).unlink(), r"weight\.bin cannot be read"),
        (lambda p: (p / WEIGHTS).write_bytes(b""), r"weight\.bin cannot be read"),
        (lambda p: (p / WEIGHTS).write_bytes(bytes(9999)), r"weight\.bin is no file of weights"),
        (lambda p: (p / WEIGHTS).write_bytes((p / WEIGHTS).read_bytes()[:-200]), r"weight\.bin is cut off"),
        (lambda p: (p / WEIGHTS).write_bytes((p / WEIGHTS).read_bytes()[:100]), r"weight\.bin .* no value at byte 64"),
        (
            lambda p: _edit(p, lambda m, o: _set(_stored(o).blobFileValue, offset=1 << 40)),
            r"weight\.bin .* no value at",
        ),
        (lambda p: _edit(p, lambda m, o: _set(_stored(o).blobFileValue, offset=128)), r"weight\.bin does not belong"),
        (
            lambda p: _edit(p, lambda m, o: _set(_stored(o).type.tensorType, dataType=21)),
            r"weight\.bin does not belong",
        ),
        (
            lambda p: _edit(p, lambda m, o: _set(_stored(o).blobFileValue, fileName="@model_path/../../../w.bin")),
            "outside of the package",
        ),
        (lambda p: _edit(p, lambda m, o: o.pop(0)), r"model\.mlmodel is damaged: .* is used before"),
        (lambda p: _edit(p, lambda m, o: o[-1].inputs.pop("x")), r"model\.mlmodel is damaged: missing .* 'x'"),
        (lambda p: _edit(p, lambda m, o: _set(m.mlProgram.functions["main"], opset="CoreML7")), "program of CoreML7"),
        (lambda p: _edit(p, lambda m, o: _set(o[-1], type="conv")), "the operator conv cannot be checked here"),
        (lambda p: _edit(p, lambda m, o: m.neuralNetwork.SetInParent()), "is no ML program"),
    ],
)
def test_damaged_packages_are_refused_by_name(package, damage, words):
    assert load(package).predict({"x": np.zeros((1, 64), np.float16)})
    damage(package)
    with pytest.raises(InputError, match=words):
        load(package)


def test_a_function_that_is_not_there_is_refused(cache):
    with pytest.raises(InputError, match=r"no function 'prefill'; choose from one, three"):
        load(cache, "prefill")


def test_no_damaged_byte_of_a_program_ends_in_a_traceback(package):
    """Each either changes nothing that matters, or is an error on purpose."""
    whole = (package / MODEL).read_bytes()
    generator = np.random.default_rng(0)
    refused = 0
    for _ in range(300):
        content = bytearray(whole)
        for at in generator.integers(0, len(whole), 2):
            content[at] = generator.integers(0, 256)
        (package / MODEL).write_bytes(content)
        try:
            load(package).predict({"x": np.zeros((1, 64), np.float16)})
        except (InputError, RuntimeError):
            refused += 1
    assert refused > 100
