"""Files that are not sound checkpoints: one clear sentence each, and nothing in them ever runs."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_checkpoint_readers import CONFIG, native

from edge_qkv.checkpoints import read_checkpoint
from edge_qkv.errors import InputError
from samples import write_2510, write_2606


def refused(path: str | Path, *parts: str) -> str:
    """Asserts that `path` is refused in one sentence that names it and contains `parts`."""
    with pytest.raises(InputError) as caught:
        read_checkpoint(str(path))
    message = str(caught.value)
    assert message.count(str(path)) == 1 and "\n" not in message and len(message) < 900
    for part in parts:
        assert part in message, message
    return message


def edited(path: Path, edit: Callable[[dict], None], **options: object) -> Path:
    """A file of arXiv 2606.04032's code with something changed in it."""
    write_2606(path, "Q-MQA", **options)
    content = torch.load(path, weights_only=True)
    edit(content)
    torch.save(content, path)
    return path


# ---- files that are no checkpoints ----


def test_missing_path_lists_the_known_formats(tmp_path):
    refused(tmp_path / "nothing.pt", "no such file", "2606.04032", "2510.23912", "model.safetensors", "random:")


def test_empty_file(tmp_path):
    (tmp_path / "a.pt").touch()
    refused(tmp_path / "a.pt", "empty")


@pytest.mark.parametrize("start", [b"", b"\x80\x02", b"\x80\x04\x95", b"PK\x03\x04", b"\x80\x02}q\x00("], ids=repr)
def test_garbage(tmp_path, start):
    (tmp_path / "a.pt").write_bytes(start + os.urandom(4096))
    refused(tmp_path / "a.pt")


def test_text_lists_the_known_formats(tmp_path):
    (tmp_path / "a.pt").write_text("To be, or not to be\n" * 50)
    refused(tmp_path / "a.pt", "known formats", "2606.04032")


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
@pytest.mark.parametrize("keep", [0.01, 0.3, 0.7, 0.97, 0.9999])
def test_truncated(tmp_path, legacy, keep):
    write_2606(tmp_path / "a.pt", "QKV", legacy=legacy)
    data = (tmp_path / "a.pt").read_bytes()
    (tmp_path / "a.pt").write_bytes(data[: int(len(data) * keep)])
    refused(tmp_path / "a.pt", "copy or save it again")


def test_zip_that_is_not_a_checkpoint(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.pt", "w") as archive:
        archive.writestr("word/document.xml", "<xml/>")
    refused(tmp_path / "a.pt", "zip archive", "known formats")


def test_recompressed_zip(tmp_path):
    write_2606(tmp_path / "a.pt", "QKV")
    with (
        zipfile.ZipFile(tmp_path / "a.pt") as old,
        zipfile.ZipFile(tmp_path / "b.pt", "w", zipfile.ZIP_DEFLATED) as new,
    ):
        for entry in old.namelist():
            new.writestr(entry, old.read(entry))
    refused(tmp_path / "b.pt", "compressed")


@pytest.mark.parametrize("content", [{"weights": {}}, {"model": {}}, {"model_config": {}}, [1, 2], torch.zeros(3)])
def test_pytorch_file_of_another_kind_lists_the_known_formats(tmp_path, content):
    torch.save(content, tmp_path / "a.pt")
    refused(tmp_path / "a.pt", "known formats")


def test_torchscript_archive(tmp_path):
    torch.jit.script(torch.nn.Linear(2, 2)).save(str(tmp_path / "a.pt"))
    refused(tmp_path / "a.pt")


def test_directory_without_the_files(tmp_path):
    refused(tmp_path, "without config.json", "known formats")
    native(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    refused(tmp_path, "without model.safetensors")


def test_part_of_a_native_checkpoint_names_its_directory(tmp_path):
    native(tmp_path)
    refused(tmp_path / "model.safetensors", "give its directory")
    refused(tmp_path / "config.json", "give its directory")


def test_special_files_and_impossible_names(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    refused(tmp_path / "pipe", "not a regular file")
    for name in ("x" * 5000, "a\0b"):
        with pytest.raises(InputError):
            read_checkpoint(name)


# ---- code in files ----


class _Touch:
    """A pickle of this creates a file when it is loaded by an unsafe reader."""

    def __init__(self, target: Path, how: Callable) -> None:
        self.target, self.how = target, how

    def __reduce__(self):
        return (self.how, (f"touch {self.target}",) if self.how is os.system else (["touch", str(self.target)],))


@pytest.mark.parametrize("how", [os.system, subprocess.check_call], ids=["system", "subprocess"])
@pytest.mark.parametrize("write", ["zip", "legacy", "pickle-2", "pickle-4", "pickle-0"])
def test_code_in_a_pickle_never_runs(tmp_path, how, write):
    target, path = tmp_path / "created", tmp_path / "a.pt"
    content = {"model_config": {}, "model_state_dict": {}, "evil": _Touch(target, how)}
    if write.startswith("pickle"):
        path.write_bytes(pickle.dumps(content, protocol=int(write[-1])))
    else:
        torch.save(content, path, _use_new_zipfile_serialization=write == "zip")
    assert not target.exists()
    message = refused(path)
    assert not target.exists()
    if write in ("zip", "legacy"):
        assert "never loaded because it could run code" in message


def test_the_malicious_sample_would_work_elsewhere(tmp_path):
    pickle.loads(pickle.dumps(_Touch(tmp_path / "created", os.system)))
    assert (tmp_path / "created").exists()


def test_pickled_module_is_refused(tmp_path):
    torch.save(torch.nn.Linear(2, 2), tmp_path / "a.pt")
    refused(tmp_path / "a.pt", "Linear", "never loaded")


# ---- tensors that do not fit ----

STATE = "model_state_dict"


def test_missing_tensor(tmp_path):
    path = edited(tmp_path / "a.pt", lambda c: c[STATE].pop("h.1.mlp.c_fc.weight"))
    refused(path, "'h.1.mlp.c_fc.weight'", "missing")


def test_unexpected_tensor(tmp_path):
    path = edited(tmp_path / "a.pt", lambda c: c[STATE].update({"h.0.attn.rotary.inv_freq": torch.ones(4)}))
    refused(path, "'h.0.attn.rotary.inv_freq'", "not part of")


def test_more_layers_than_the_config_says(tmp_path):
    refused(edited(tmp_path / "a.pt", lambda c: c["model_config"].update(n_layer=1)), "'h.1.", "not part of")


@pytest.mark.parametrize("name", ["wte.weight", "h.1.attn.c_kv.weight", "h.1.attn.c_proj.weight", "ln_f.bias"])
def test_wrong_shape(tmp_path, name):
    def cut(content: dict) -> None:
        content[STATE][name] = content[STATE][name][:-1].clone()

    refused(edited(tmp_path / "a.pt", cut), f"'{name}'", "where the config implies")


def test_rows_that_fit_no_number_of_kv_heads(tmp_path):
    def cut(content: dict) -> None:
        content[STATE]["h.0.attn.c_kv.weight"] = torch.ones(11, 32)

    refused(edited(tmp_path / "a.pt", cut), "11 rows", "kv heads")


def test_attention_of_no_known_variant(tmp_path):
    path = edited(tmp_path / "a.pt", lambda c: c[STATE].update({"h.0.attn.c_attn.weight": torch.ones(96, 32)}))
    refused(path, "none of the paper's eight variants")


def test_groups_that_contradict_the_tensors(tmp_path):
    write_2606(tmp_path / "a.pt", "Q-GQA", heads=8, groups=2)
    content = torch.load(tmp_path / "a.pt", weights_only=True)
    content["model_config"]["n_kv_groups"] = 4
    torch.save(content, tmp_path / "a.pt")
    refused(tmp_path / "a.pt", "n_kv_groups = 4", "2 kv heads")


@pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn], ids=str)
def test_tensor_that_is_no_usable_float(tmp_path, dtype):
    def convert(content: dict) -> None:
        content[STATE]["wpe.weight"] = content[STATE]["wpe.weight"].to(dtype)

    refused(edited(tmp_path / "a.pt", convert), "'wpe.weight'", str(dtype).removeprefix("torch."), "float16")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_weights_that_are_not_finite(tmp_path, dtype, value):
    def spoil(content: dict) -> None:
        content[STATE]["h.1.attn.c_q.weight"][3, 5] = value

    checkpoint = read_checkpoint(str(edited(tmp_path / "a.pt", spoil, dtype=dtype)))
    checkpoint.tensors["layers.0.attention.query.weight"]()
    for use in (checkpoint.tensors["layers.1.attention.query.weight"], checkpoint.load):
        with pytest.raises(InputError, match=r"a\.pt: tensor 'h\.1\.attn\.c_q\.weight' holds NaN or infinity"):
            use()


def test_sparse_tensor(tmp_path):
    def convert(content: dict) -> None:
        content[STATE]["wpe.weight"] = content[STATE]["wpe.weight"].to_sparse()

    refused(edited(tmp_path / "a.pt", convert), "'wpe.weight'", "dense")


def test_tensor_larger_than_its_data(tmp_path):
    def spread(content: dict) -> None:
        content["model_config"]["vocab_size"] = 1 << 27
        content[STATE]["wte.weight"] = torch.zeros(1, 1).expand(1 << 27, 32)

    refused(edited(tmp_path / "a.pt", spread), "'wte.weight'", "larger than its data")


@pytest.mark.parametrize("state", [None, 3, [torch.ones(2)], {"wte.weight": 3}, {3: torch.ones(2)}], ids=repr)
def test_state_dict_that_is_none(tmp_path, state):
    refused(edited(tmp_path / "a.pt", lambda c: c.update({STATE: state})), "state_dict()")


def test_tensor_with_and_without_prefix(tmp_path):
    path = edited(tmp_path / "a.pt", lambda c: c[STATE].update({"module.ln_f.bias": torch.ones(32)}))
    refused(path, "'ln_f.bias'", "twice")


def test_long_and_odd_names_are_kept_to_one_line(tmp_path):
    refused(edited(tmp_path / "a.pt", lambda c: c[STATE].update({"x\n" * 100_000: torch.ones(1)})), "not part of")


# ---- tied and untied heads ----


def test_untied_head_must_be_there(tmp_path):
    refused(
        edited(tmp_path / "a.pt", lambda c: c["model_config"].update(tie_word_embeddings=False)), "'lm_head.weight'"
    )
    write_2510(tmp_path / "b.pt", "original", tied=False)
    content = torch.load(tmp_path / "b.pt", weights_only=True)
    del content["model"]["lm_head.weight"]
    torch.save(content, tmp_path / "b.pt")
    refused(tmp_path / "b.pt", "'lm_head.weight'", "missing")


def test_tied_head_of_other_values(tmp_path):
    path = edited(tmp_path / "a.pt", lambda c: c["model_config"].update(tie_word_embeddings=True), tied=False)
    refused(path, "tie_word_embeddings is true", "differs")


def test_tied_head_stored_as_a_copy_is_accepted(tmp_path):
    path = edited(
        tmp_path / "a.pt", lambda c: c[STATE].update({"lm_head.weight": c[STATE]["wte.weight"].clone()}), tied=True
    )
    assert read_checkpoint(str(path)).config.tied_head


# ---- config values ----


@pytest.mark.parametrize("value", [0, -1, 2.5, "12", True, 10**30, 10**600, float("nan"), [2], torch.ones(1)], ids=type)
@pytest.mark.parametrize("field", ["n_layer", "n_embd", "n_head", "vocab_size", "n_positions", "n_inner"])
def test_absurd_size_in_a_file(tmp_path, field, value):
    refused(edited(tmp_path / "a.pt", lambda c: c["model_config"].update({field: value})), field)


@pytest.mark.parametrize("field", ["n_layer", "n_embd", "n_head", "vocab_size", "n_positions"])
def test_config_field_missing_in_a_file(tmp_path, field):
    refused(edited(tmp_path / "a.pt", lambda c: c["model_config"].pop(field)), field, "missing")


@pytest.mark.parametrize("field, value", [("n_layer", 2**27), ("vocab_size", 2**27), ("n_embd", 2**27), ("n_head", 5)])
def test_size_that_the_tensors_do_not_have(tmp_path, field, value):
    refused(edited(tmp_path / "a.pt", lambda c: c["model_config"].update({field: value})))


@pytest.mark.parametrize(
    "field, value",
    [
        ("layer_norm_epsilon", -1.0),
        ("layer_norm_epsilon", float("inf")),
        ("layer_norm_epsilon", "1e-5"),
        ("use_bias", "no"),
        ("use_bias", True),  # but the file has none
        ("tie_word_embeddings", 1),
    ],
)
def test_other_config_values_in_a_file(tmp_path, field, value):
    refused(edited(tmp_path / "a.pt", lambda c: c["model_config"].update({field: value})))


@pytest.mark.parametrize("config", [None, 3, [1], "x"], ids=repr)
def test_config_that_is_no_dictionary(tmp_path, config):
    refused(edited(tmp_path / "a.pt", lambda c: c.update(model_config=config)), "model_config is not a dictionary")


@pytest.mark.parametrize(
    "field, value",
    [
        ("query_mode", "none"),
        ("query_mode", 3),
        ("query_mode", None),
        ("query_mode", "residual"),  # but the file has no query matrix
        ("head_size", 7),
        ("num_heads", 0),
        ("block_size", 8),
        ("scale", -0.5),
        ("scale", float("nan")),
        ("scale", 10**400),
    ],
)
def test_config_values_of_the_other_paper(tmp_path, field, value):
    write_2510(tmp_path / "b.pt", "identity")
    content = torch.load(tmp_path / "b.pt", weights_only=True)
    content["model_args"][field] = value
    torch.save(content, tmp_path / "b.pt")
    refused(tmp_path / "b.pt")


# ---- our own format ----


@pytest.mark.parametrize(
    "text, part",
    [
        ("", "not valid JSON"),
        ("{", "not valid JSON"),
        ("[1]", "expected an object"),
        ("[" * 100_000, "JSON"),
        ('{"pattern": "layer"}', "missing"),
        ('{"layers": ' + "1" * 5000 + "}", "JSON"),
        ("\xff\xfe", "JSON"),
    ],
    ids=["empty", "cut", "list", "deep", "incomplete", "huge", "no text"],
)
def test_native_config_that_is_damaged(tmp_path, text, part):
    native(tmp_path)
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    refused(tmp_path, "config.json", part)


@pytest.mark.parametrize(
    "changes",
    [
        {"pattern": "layer*99999"},
        {"max_positions": 2**27},
        {"kinds": {"layer": {"heads": 3}}},
        {"pattern": True},
        {"unknown": 1},
    ],
    ids=str,
)
def test_native_config_that_is_absurd(tmp_path, changes):
    native(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG.to_dict() | changes))
    refused(tmp_path)


@pytest.mark.parametrize("keep", [0, 7, 100, 0.5, 0.999])
def test_native_weights_truncated(tmp_path, keep):
    native(tmp_path)
    weights = tmp_path / "model.safetensors"
    data = weights.read_bytes()
    weights.write_bytes(data[: keep if isinstance(keep, int) else int(len(data) * keep)])
    refused(tmp_path, "model.safetensors", "safetensors")


def test_native_weights_that_are_garbage(tmp_path):
    native(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(os.urandom(4096))
    refused(tmp_path, "model.safetensors")


@pytest.mark.parametrize("spoil", ["missing", "surplus", "shape", "dtype"])
def test_native_weights_that_do_not_fit(tmp_path, spoil):
    native(tmp_path)
    weights = tmp_path / "model.safetensors"
    tensors, name = load_file(weights), "layers.1.attention.key.weight"
    if spoil == "missing":
        del tensors[name]
    elif spoil == "surplus":
        name = "layers.2.attention.key.weight"
        tensors[name] = torch.ones(3)
    elif spoil == "shape":
        tensors[name] = tensors[name].T.contiguous()
    else:
        tensors[name] = tensors[name].to(torch.int8)
    save_file(tensors, weights)
    refused(tmp_path, f"'{name}'")


def test_native_weights_that_are_not_finite(tmp_path):
    native(tmp_path, dtype=torch.float16)
    weights = tmp_path / "model.safetensors"
    tensors = load_file(weights)
    tensors["norm.weight"][1] = float("nan")
    save_file(tensors, weights)
    with pytest.raises(InputError, match=r"'norm\.weight' holds NaN"):
        read_checkpoint(str(tmp_path)).load()


# ---- random ----


@pytest.mark.parametrize("spec", ["", "1.2B/Q-XQA", "1.2B/Q-GQA-5", "nothing.json", "/dev/zero"])
def test_random_of_nothing_known(spec):
    with pytest.raises(InputError, match=spec or "random:"):
        read_checkpoint(f"random:{spec}")


def test_random_of_an_absurd_config(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG.to_dict() | {"pattern": "layer*9999"}))
    with pytest.raises(InputError, match=r"config\.json: config field pattern"):
        read_checkpoint(f"random:{tmp_path / 'config.json'}")
