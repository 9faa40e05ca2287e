"""Programs that a loader must refuse: valid flatbuffers that contradict their description or themselves.

Each attack changes the program of a good export as ExecuTorch's own classes hold it, and is written by ExecuTorch's
own serialiser. `ATTACKS` names them; `written` makes the files.
"""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from edge_qkv.description import DESCRIPTION, FINGERPRINT
from edge_qkv.export import operator

sys.setrecursionlimit(max(sys.getrecursionlimit(), 5000))  # programs are nested, and copied as such

Program = Any  # executorch.exir.schema.Program, which is imported where it is needed
Attack = Callable[[Program], None]

# Places of the arguments in a call of our operator; its output comes last, twice.
ARGUMENTS = {name: place for place, name in enumerate((*operator.INPUTS, *operator.ATTRIBUTES))}
_ATTENTION, _READ_ATTENTION = "edge_qkv::unified_kv_attention", "edge_qkv::unified_kv_read_attention"


def forward(program: Program) -> Any:
    return next(plan for plan in program.execution_plan if plan.name == "forward")


def _calls(plan: Any, name: str) -> list[Any]:
    calls = [instruction.instr_args for instruction in plan.chains[0].instructions]
    return [call for call in calls if hasattr(call, "op_index") and plan.operators[call.op_index].name == name]


def _attention(plan: Any) -> Any:
    return _calls(plan, _ATTENTION)[0]


def _add(plan: Any, value: Any) -> int:
    """Index of a new value."""
    from executorch.exir.schema import EValue

    plan.values.append(EValue(value))
    return len(plan.values) - 1


def _text(name: str, change: Callable[[str], str]) -> Attack:
    """Another of the two texts by which a program describes itself."""

    def attack(program: Program) -> None:
        plan = next(plan for plan in program.execution_plan if plan.name == name)
        value = plan.values[plan.outputs[0]].val
        value.string_val = change(value.string_val)

    return attack


def _described(**facts: str) -> Attack:
    """Another description than that of the program."""

    def change(text: str) -> str:
        for name, value in facts.items():
            text, count = re.subn(rf"^{name} .*$", f"{name} {value}", text, flags=re.MULTILINE)
            assert count == 1, name
        return text

    return _text(DESCRIPTION, change)


def _read_by_the_second(text: str) -> str:
    """The description with a second layer that reads the rows of the first."""
    kind = text[text.index("kind layer") : text.index("pattern")]
    late = kind.replace("kind layer", "kind late").replace("rows unified", "rows of layer")
    return text.replace(kind, kind + late).replace("pattern layer layer", "pattern layer late")


def _on(find: Callable[[Any], Any], change: Callable[[Any], None] | None = None, **fields: Any) -> Attack:
    """Other fields of what `find` finds in the plan."""

    def attack(program: Program) -> None:
        found = find(forward(program))
        for name, value in fields.items():
            assert hasattr(found, name), name
            setattr(found, name, value)
        if change:
            change(found)

    return attack


def _input(place: int, **fields: Any) -> Attack:
    return _on(lambda plan: plan.values[plan.inputs[place]].val, **fields)


def _output(**fields: Any) -> Attack:
    return _on(lambda plan: plan.values[plan.outputs[0]].val, **fields)


def cache(plan: Any, name: str) -> Any:
    tensors = (value.val for value in plan.values if getattr(value.val, "extra_tensor_info", None))
    return next(tensor for tensor in tensors if tensor.extra_tensor_info.fully_qualified_name == name)


def _cache(**fields: Any) -> Attack:
    return _on(lambda plan: cache(plan, "kv_0"), **fields)


def _rows(count: int) -> Attack:
    """Every cache, and the description, with another number of rows."""

    def attack(program: Program) -> None:
        for name in ("kv_0", "kv_1"):
            cache(forward(program), name).sizes = [1, 1, count, 8]
        _described(cache_rows=str(count))(program)

    return attack


def _named(name: str | None) -> Attack:
    return _on(lambda plan: cache(plan, "kv_1").extra_tensor_info, fully_qualified_name=name)


def _argument(name: str, make: Callable[[Any, Any], int]) -> Attack:
    """Another value as an argument of the first attention."""

    def attack(program: Program) -> None:
        plan = forward(program)
        call = _attention(plan)
        call.args[ARGUMENTS[name]] = make(plan, call)

    return attack


def _attribute(name: str, value: Any) -> Attack:
    return _argument(name, lambda plan, _: _add(plan, value()))


def _tensor_argument(name: str, **fields: Any) -> Attack:
    """Other facts of a tensor that the first attention reads, in a copy of its own."""

    def make(plan: Any, call: Any) -> int:
        tensor = copy.deepcopy(plan.values[call.args[ARGUMENTS[name]]].val)
        for field, value in fields.items():
            assert hasattr(tensor, field), field
            setattr(tensor, field, value)
        return _add(plan, tensor)

    return _argument(name, make)


def _int(value: int) -> Callable[[], Any]:
    def make() -> Any:
        from executorch.exir.schema import Int

        return Int(value)

    return make


def _double(value: float) -> Callable[[], Any]:
    def make() -> Any:
        from executorch.exir.schema import Double

        return Double(value)

    return make


def _string(value: str) -> Callable[[], Any]:
    def make() -> Any:
        from executorch.exir.schema import String

        return String(value)

    return make


def _null() -> Any:
    from executorch.exir.schema import Null

    return Null()


def _other(name: str, other: str) -> Attack:
    """The argument `other` in the place of `name`."""
    return _argument(name, lambda _, call: call.args[ARGUMENTS[other]])


def _key_weight(values: int) -> Attack:
    """A key weight of so many values, which is a table's in the program."""
    return _all(_argument("key_weight", lambda _, call: call.args[ARGUMENTS["cos"]]),
                _tensor_argument("key_weight", sizes=[values], dim_order=[0]))  # fmt: skip


def _reads(program: Program) -> None:
    """The first attention reads rows, as if an earlier layer had written them, and writes none."""
    from executorch.exir.schema import Operator

    plan = forward(program)
    call = _attention(plan)
    plan.operators.append(Operator(_READ_ATTENTION, "out"))
    call.op_index = len(plan.operators) - 1
    for name in ("value", "kv"):
        del call.args[ARGUMENTS[name]]


def _read_by_name(program: Program) -> None:
    """The operator of all attentions is the one that reads, with the arguments of the one that writes."""
    next(o for o in forward(program).operators if o.name == _ATTENTION).name = _READ_ATTENTION


def _output_in(find: Callable[[Any, Any], int]) -> Attack:
    """The first attention writes to another value of the program."""

    def attack(program: Program) -> None:
        plan = forward(program)
        call = _attention(plan)
        call.args[-2:] = [find(plan, call)] * 2

    return attack


def _constant(plan: Any, call: Any) -> int:
    """A copy of a table's facts with those of the attention's output: a constant to write to."""
    tensor = copy.deepcopy(plan.values[call.args[ARGUMENTS["cos"]]].val)
    tensor.sizes, tensor.dim_order = [1, 3, 32], [0, 1, 2]
    return _add(plan, tensor)


def _constant_cache(plan: Any, call: Any) -> int:
    from executorch.exir.schema import TensorShapeDynamism

    tensor = copy.deepcopy(plan.values[call.args[ARGUMENTS["cos"]]].val)
    tensor.sizes, tensor.dim_order = [1, 1, 16, 8], [0, 1, 2, 3]
    tensor.shape_dynamism = TensorShapeDynamism.STATIC
    return _add(plan, tensor)


def _all(*attacks: Attack) -> Attack:
    def attack(program: Program) -> None:
        for each in attacks:
            each(program)

    return attack


def _plan(change: Callable[[Any], None]) -> Attack:
    return lambda program: change(forward(program))


def _no_forward(program: Program) -> None:
    forward(program).name = "backward"


def _swap_inputs(plan: Any) -> None:
    plan.inputs[0], plan.inputs[1] = plan.inputs[1], plan.inputs[0]


def _returns(make: Callable[[Any], int]) -> Attack:
    return _plan(lambda plan: plan.outputs.__setitem__(0, make(plan)))


def _all_rows(plan: Any) -> None:
    """The logits of the first positions that are asked for become those of every position."""
    select = _calls(plan, "aten::index_select")[-1]
    ids = plan.inputs[0]
    select.args[2] = ids  # [1, T] instead of the R positions


def _drop_last(plan: Any) -> None:
    del plan.chains[0].instructions[-1]


def _drop_attention(plan: Any) -> None:
    call = _attention(plan)
    plan.chains[0].instructions[:] = [i for i in plan.chains[0].instructions if i.instr_args is not call]


def _types() -> dict[str, Any]:
    from executorch.exir.scalar_type import ScalarType

    return ScalarType.__members__


def _static() -> Any:
    from executorch.exir.schema import TensorShapeDynamism

    return TensorShapeDynamism.STATIC


def _place() -> Any:
    from executorch.exir.schema import AllocationDetails

    return AllocationDetails(1, 0, 0)


def attacks() -> dict[str, Attack]:
    """On the tiny model of the tests: 2 layers, one cache of 1 kv head of 8, 96 positions, rotary."""
    kinds, static, place = _types(), _static(), _place()
    description = {
        "a larger chunk": {"prefill_chunk": "97"},
        "a chunk of 4096": {"prefill_chunk": "4096"},
        "a smaller chunk": {"prefill_chunk": "95"},
        "another vocabulary": {"vocab_size": "261"},
        "a smaller vocabulary": {"vocab_size": "259"},
        "more rows": {"cache_rows": "8192"},
        "fewer rows": {"cache_rows": "2048"},
        "rows that are no whole pages": {"cache_rows": "97"},
        "more positions": {"max_positions": "100000", "cache_rows": "102400"},
        "more kv heads": {"kv_heads": "2"},
        "another head": {"head_dim": "16"},
        "more layers": {"pattern": "layer layer layer"},
        "fewer layers": {"pattern": "layer"},
        "another type of cache": {"cache": "fp32"},
        "an int8 cache": {"cache": "int8"},
        "separate values": {"rows": "separate"},
        "a kind that there is not": {"pattern": "layer late"},
        "rows of no kind": {"rows": "of late"},
        "rows of its own kind": {"rows": "of layer"},
        "another format": {"format": "2"},
        "another operator": {"operator": "1"},
        "frequencies of another rotation": {"frequencies": "1.0 0.1"},
        "a frequency that is none": {"frequencies": "1.0 0.1 0.01 nan"},
        "no weights": {"weight_bits": "0"},
    }
    texts = {
        "a layer that reads the rows of another": _text(DESCRIPTION, _read_by_the_second),
        "no description": _text(DESCRIPTION, lambda _: ""),
        "a description that is cut off": _text(DESCRIPTION, lambda text: text[: text.index("pattern")]),
        "a description without a line's end": _text(DESCRIPTION, lambda text: text.rstrip("\n")),
        "a description of 1 MB": _text(DESCRIPTION, lambda text: "x 1\n" * (1 << 18) + text),
        "a description with other characters": _text(DESCRIPTION, lambda text: text.replace("layer", "l\xe4yer")),
        "a description with a zero": _text(DESCRIPTION, lambda text: text.replace("kind", "\0kind")),
        "a fingerprint that is none": _text(FINGERPRINT, lambda _: "g" * 64),
        "a short fingerprint": _text(FINGERPRINT, lambda text: text[1:]),
    }
    tensors = {
        "ids of another type": _input(0, scalar_type=kinds["INT"]),
        "ids of another rank": _input(0, sizes=[96], dim_order=[0]),
        "ids of two rows": _input(0, sizes=[2, 96]),
        "ids that are planned": _input(0, allocation_info=place),
        "ids of one length": _input(0, shape_dynamism=static),
        "past of another type": _input(1, scalar_type=kinds["FLOAT"]),
        "past of another rank": _input(1, sizes=[1], dim_order=[0]),
        "fewer rows to ask for": _input(2, sizes=[95]),
        "logits of another type": _output(scalar_type=kinds["HALF"]),
        "logits of another width": _output(sizes=[1, 96, 1]),
        "logits of another rank": _output(sizes=[96 * 260], dim_order=[0]),
        "logits that are planned": _output(allocation_info=place),
        "logits of one length": _output(shape_dynamism=static),
        "logits transposed": _output(dim_order=[0, 2, 1]),
        "inputs swapped": _plan(_swap_inputs),
        "an input less": _plan(lambda plan: plan.inputs.pop()),
        "an input twice": _plan(lambda plan: plan.inputs.__setitem__(2, plan.inputs[0])),
        "an input more": _plan(lambda plan: plan.inputs.append(plan.inputs[0])),
        "an input that does not exist": _plan(lambda plan: plan.inputs.__setitem__(0, 1 << 20)),
        "no output": _plan(lambda plan: plan.outputs.pop()),
        "two outputs": _plan(lambda plan: plan.outputs.append(plan.outputs[0])),
        "an output that does not exist": _returns(lambda _: -1),
        "an input for an output": _returns(lambda plan: plan.inputs[0]),
        "a number for an output": _returns(lambda plan: _add(plan, _int(1)())),
        "no forward": _no_forward,
        "a cache of another type": _cache(scalar_type=kinds["FLOAT"]),
        "a cache of fewer rows": _cache(sizes=[1, 1, 2048, 8]),
        "a cache of more rows": _cache(sizes=[1, 1, 8192, 8]),
        "a cache of another rank": _cache(sizes=[1, 4096, 8], dim_order=[0, 1, 2]),
        "a cache that is planned": _cache(allocation_info=place),
        "a cache under another name": _named("kv_2"),
        "a cache twice": _named("kv_0"),
        "a cache without a name": _named(None),
        "caches of no whole pages": _rows(97),
        "caches of 2^31 rows": _rows(2**31 - 8192),
        "caches of fewer rows than positions": _rows(95),
        "a cache that is a constant": _cache(data_buffer_idx=1),
    }
    operators = {
        **{
            f"{name} {value}": _attribute(name, _int(value))
            for name in ("num_heads", "kv_heads", "rotary_dim", "rotary_offset", "value_dim", "window", "sinks")
            for value in (-1, 3, 1 << 31, 1 << 62)
            if (name, value) != ("window", 3)
        },
        "value_dim 0": _attribute("value_dim", _int(0)),
        "values wider than their rows": _attribute("value_dim", _int(16)),
        "values narrower than the program has them": _all(
            _attribute("rotary", _string("on_read")), _attribute("value_dim", _int(4))
        ),
        "values that hold half of the rotated": _attribute("value_dim", _int(4)),
        "a rotation that ends outside the row": _attribute("rotary_offset", _int(2)),
        "a key weight of rotated rows": _key_weight(8),
        "a key weight of another width": _all(_attribute("rotary", _string("on_read")), _key_weight(4)),
        "a key weight longer than its constant": _all(_attribute("rotary", _string("on_read")), _key_weight(1 << 20)),
        "a key weight of two dimensions": _other("key_weight", "cos"),
        "a key weight that is a cache": _other("key_weight", "cache"),
        "rows that nobody wrote": _reads,
        "the operator that reads, with rows to write": _read_by_name,
        "reading from what is no cache": _all(_other("cache", "query"), _reads),
        "reading from a constant": _all(_argument("cache", _constant_cache), _reads),
        "reading separate values that are not there": _all(_other("value_cache", "query"), _reads),
        "scale nan": _attribute("scale", _double(float("nan"))),
        "scale inf": _attribute("scale", _double(float("inf"))),
        "scale of another type": _attribute("scale", _int(1)),
        "an unknown rotation": _attribute("rotary", _string("twice")),
        "a rotation of another type": _attribute("rotary", _int(0)),
        "no query": _argument("query", lambda plan, _: _add(plan, _null())),
        "no kv": _argument("kv", lambda plan, _: _add(plan, _null())),
        "no cache": _argument("cache", lambda plan, _: _add(plan, _null())),
        "no past": _argument("past", lambda plan, _: _add(plan, _null())),
        "no tables": _argument("cos", lambda plan, _: _add(plan, _null())),
        "a number for a tensor": _attribute("query", _int(0)),
        "a number for a tensor of another operator": _plan(
            lambda plan: _calls(plan, "aten::index_select")[-1].args.__setitem__(0, _add(plan, _int(0)()))
        ),
        "a query that is transposed": _tensor_argument("query", dim_order=[0, 2, 1]),
        "values without a cache": _other("value", "kv"),
        "a value cache that is the cache": _all(_other("value", "kv"), _other("value_cache", "cache")),
        "scales of a float cache": _other("cache_scale", "query"),
        "the query for the kv": _other("kv", "query"),
        "the kv for the query": _other("query", "kv"),
        "the query for the cache": _other("cache", "query"),
        "the query for the past": _other("past", "query"),
        "a cache in the constants": _argument("cache", _constant_cache),
        "an output in the constants": _output_in(_constant),
        "an output in a cache": _output_in(lambda _, call: call.args[ARGUMENTS["cache"]]),
        "an output in an input": _output_in(lambda plan, _: plan.inputs[0]),
        "an output that is a number": _output_in(lambda plan, _: _add(plan, _int(1)())),
        "a table shorter than the context": _all(
            _tensor_argument("cos", sizes=[2, 4]), _tensor_argument("sin", sizes=[2, 4])
        ),
        "a table longer than its constant": _all(
            _tensor_argument("cos", sizes=[4096, 4]), _tensor_argument("sin", sizes=[4096, 4])
        ),
        "a table of another width": _tensor_argument("cos", sizes=[96, 2]),
        "a table of another type": _tensor_argument("cos", scalar_type=kinds["INT"]),
        "an argument less": _plan(lambda plan: _attention(plan).args.pop(0)),
        "no arguments": _plan(lambda plan: _attention(plan).args.clear()),
        "an argument that does not exist": _plan(lambda plan: _attention(plan).args.__setitem__(0, 1 << 20)),
        "a negative argument": _plan(lambda plan: _attention(plan).args.__setitem__(0, -1)),
        "an operator that does not exist": _on(lambda plan: plan.operators[0], name="edge_qkv::nothing"),
        "an overload that does not exist": _on(lambda plan: plan.operators[0], overload="nothing"),
        "an operator outside the list": _plan(lambda plan: setattr(_attention(plan), "op_index", 1 << 16)),
        "a negative operator": _plan(lambda plan: setattr(_attention(plan), "op_index", -1)),
        "one operator for another": _plan(lambda plan: setattr(_attention(plan), "op_index", 0)),
        "a delegate that does not exist": _on(lambda plan: plan.delegates[0], id="NothingBackend"),
        "a delegate outside the list": _plan(
            lambda plan: setattr(
                next(i.instr_args for i in plan.chains[0].instructions if hasattr(i.instr_args, "delegate_index")),
                "delegate_index",
                1 << 16,
            )
        ),
        "rows of every position": _plan(_all_rows),
        "no head": _plan(_drop_last),
        "a buffer of 2^50 bytes": _on(lambda plan: plan, non_const_buffer_sizes=[0, 1 << 50]),
        "a buffer of 2^39 bytes": _on(lambda plan: plan, non_const_buffer_sizes=[0, 1 << 39]),
        "a small buffer": _on(lambda plan: plan, non_const_buffer_sizes=[0, 64]),
        "no buffer": _on(lambda plan: plan, non_const_buffer_sizes=[0]),
        "1000 buffers": _on(lambda plan: plan, non_const_buffer_sizes=[0] + [112576] * 1000),
        "an attention less": _plan(_drop_attention),
    }
    return {name: _described(**facts) for name, facts in description.items()} | texts | tensors | operators


# What these compute is defined, or garbage within the session's memory.
HARMLESS = {
    "a buffer of 2^39 bytes",  # address space alone
    "caches of 2^31 rows",  # as well
    "a value cache that is the cache",
    "frequencies of another rotation",  # by which an overflow would move rows: wrong numbers, no more
    "no kv",  # rows that nobody wrote are zeros
    "rows that nobody wrote",
}


def written(good: bytes, folder: Path) -> dict[str, Path]:
    """The attacks as files."""
    from executorch.exir._serialize._program import deserialize_pte_binary, serialize_pte_binary

    paths = {}
    for number, (name, attack) in enumerate(attacks().items()):
        file = deserialize_pte_binary(good)
        attack(file.program)
        paths[name] = folder / f"{number}.pte"
        paths[name].write_bytes(bytes(serialize_pte_binary(file)))
    return paths
