"""A config describes a model completely: its cache, its parameters, and what it refuses."""

import json
from dataclasses import replace

import pytest

from conftest import changed
from edge_qkv.config import NORM, POSITIONS, ModelConfig, read_pattern, write_pattern
from edge_qkv.errors import InputError
from edge_qkv.layer import MLP, QUERY, SHARING, LayerSpec, biases
from edge_qkv.presets import VARIANTS, apply_variant, preset
from mixed_models import MIXED, WINDOW

SMALL = ModelConfig.uniform(
    vocab_size=50,
    max_positions=40,
    layers=2,
    width=24,
    heads=4,
    head_dim=6,
    kv_heads=4,
    mlp_width=20,
    positions="learned",
)

# Cache bytes at 32,768 tokens in fp16, from the tables of arXiv 2606.04032.
PAPER_CACHES = {
    "300M/QKV": 2_684_354_560,
    "300M/Q=K-V": 2_684_354_560,
    "300M/Q-K=V": 1_342_177_280,
    "300M/GQA-4": 671_088_640,
    "300M/MQA": 167_772_160,
    "300M/Q-GQA-4": 335_544_320,
    "300M/Q-MQA": 83_886_080,
    "1.2B/QKV": 5_905_580_032,
    "1.2B/Q=K-V": 5_905_580_032,
    "1.2B/Q-K=V": 2_952_790_016,
    "1.2B/GQA-8": 1_476_395_008,
    "1.2B/MQA": 184_549_376,
    "1.2B/Q-MQA": 92_274_688,
}


@pytest.mark.parametrize("name", PAPER_CACHES)
def test_cache_bytes_are_the_papers(name):
    assert preset(name).cache_bytes(32768) == PAPER_CACHES[name]


def test_fp32_cache_is_twice_fp16():
    assert SMALL.cache_bytes(7, "fp32") == 2 * SMALL.cache_bytes(7, "fp16") == 7 * 2 * 2 * 4 * 6 * 4


def test_int8_cache_bytes():
    """A row of one kv head is 64 codes and a scale of 2 bytes: 1.2B Q-MQA at 32,768 tokens in under 50 MB."""
    assert preset("1.2B/Q-MQA").cache_bytes(32768, "int8") == 22 * (64 + 2) * 32768 == 47_579_136
    assert SMALL.cache_bytes(7, "int8") == 7 * 2 * 2 * 4 * (6 + 2)  # keys and values each have scales


@pytest.mark.parametrize("sharing", SHARING)
@pytest.mark.parametrize("query", QUERY)
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_parameter_count_is_that_of_the_module(sharing, query, kv_heads):
    from edge_qkv.model import Decoder

    try:
        config = changed(SMALL, sharing=sharing, query=query, kv_heads=kv_heads)
    except InputError:
        assert sharing.startswith("q=k") and (query != "projected" or kv_heads != 4)
        return
    for options in (
        {},
        {"biases": biases(True, True), "norm_bias": True, "mlp": "geglu"},
        {"tied_head": False, "norm": "rmsnorm", "positions": "rotary-on-read"},
    ):
        full = changed(config, **options)
        assert full.parameters() == sum(p.numel() for p in Decoder(full).parameters())


def test_decoder_in_pieces_equals_the_whole_sequence():
    """Every combination of choices: chunked prefill and decode through the cache give the uncached logits."""
    import torch

    from edge_qkv.model import Decoder

    torch.manual_seed(0)
    ids = torch.randint(0, 50, (1, 20))
    for sharing in SHARING:
        for query in QUERY if not sharing.startswith("q=k") else ("projected",):
            for positions in POSITIONS:
                for kv_heads in (4,) if sharing.startswith("q=k") else (1, 2, 4):
                    index = kv_heads + len(query) + len(positions)  # walks through norms and MLPs
                    config = changed(
                        SMALL,
                        sharing=sharing,
                        query=query,
                        positions=positions,
                        kv_heads=kv_heads,
                        norm=NORM[index % 2],
                        mlp=MLP[index % 5],
                        rotary_dim=4 if positions.startswith("rotary") and index % 2 else 0,
                    )
                    model = Decoder(config).eval()
                    with torch.no_grad():
                        whole, _ = model(ids)
                        caches = model.new_caches(33)
                        pieces = [model(ids[:, a:b], a, caches)[0] for a, b in ((0, 7), (7, 8), (8, 20))]
                    # fp32 sums of ~50 terms in another order; logits are of order 1
                    assert torch.allclose(whole, torch.cat(pieces, 1), atol=2e-5), config


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("layers", 0),
        ("layers", True),
        ("width", -1),
        ("vocab_size", 2.5),
        ("head_dim", 1 << 40),
        ("kv_heads", 3),
        ("sharing", "k=v"),
        ("query", "none"),
        ("mlp", "relu"),
        ("norm", "batchnorm"),
        ("positions", "alibi"),
        ("norm_eps", 0),
        ("norm_eps", float("nan")),
        ("rotary_base", 1),
        ("rotary_dim", 3),
        ("rotary_dim", 8),
        ("attention_scale", -1),
        ("attention_scale", "0.5"),
        ("tied_head", 1),
        ("window", -1),
        ("window", 41),
        ("window", 2.0),
        ("sinks", -1),
        ("sinks", 4),
        ("trained_context", 41),
    ],
)
def test_error_names_the_field(field, value):
    with pytest.raises(InputError, match=rf"config field {field} = "):
        changed(SMALL, **{field: value})


def test_contradictions_are_refused():
    with pytest.raises(InputError, match="kv_heads"):
        changed(SMALL, sharing="q=k-v", kv_heads=1)
    with pytest.raises(InputError, match="query"):
        changed(SMALL, sharing="q=k=v", query="identity")
    with pytest.raises(InputError, match="width = heads \\* head_dim"):
        changed(SMALL, query="identity", head_dim=8)
    with pytest.raises(InputError, match="rotary_dim"):
        changed(SMALL, positions="rotary-conjugate", head_dim=5)


def test_variant_names_go_both_ways():
    for name, (_, heads) in VARIANTS.items():
        variant = f"{name}-2" if heads == "some" else name
        assert apply_variant(SMALL, variant).variant == variant
    for wrong in ("QKV-2", "GQA", "K=V", ""):
        with pytest.raises(InputError, match="variant"):
            apply_variant(SMALL, wrong)


def test_config_file_round_trip_and_errors(tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(SMALL.to_dict()))
    assert ModelConfig.from_file(file) == SMALL
    for text, words in (
        ("{", "not valid JSON"),
        ("[]", "expected an object"),
        (json.dumps(SMALL.to_dict() | {"width_": 1}), "unknown config field 'width_'"),
        (json.dumps({"pattern": "layer"}), "vocab_size is missing"),
        (json.dumps(SMALL.to_dict() | {"pattern": 2}), "config field pattern"),
        (json.dumps(SMALL.to_dict() | {"pattern": "layer*9999"}), "config field pattern"),
        (json.dumps(SMALL.to_dict() | {"pattern": "local"}), "'local' is none of the kinds"),
        (json.dumps(SMALL.to_dict() | {"kinds": {"layer": {"heads": 4}}}), "config field head_dim is missing"),
        (json.dumps(SMALL.to_dict() | {"kinds": {"layer": 3}}), "kind 'layer' to be an object"),
        (json.dumps(SMALL.to_dict() | {"kinds": []}), "config field kinds"),
    ):
        file.write_text(text)
        with pytest.raises(InputError, match=words) as error:
            ModelConfig.from_file(file)
        assert str(file) in str(error.value)
    with pytest.raises(InputError, match="cannot be read"):
        ModelConfig.from_file(tmp_path / "absent.json")


# ---- layers that differ ----


@pytest.mark.parametrize("name", MIXED)
def test_a_model_of_several_kinds_is_counted_and_written(name, tmp_path):
    from edge_qkv.model import Decoder

    config, file = MIXED[name], tmp_path / "config.json"
    decoder = Decoder(config)
    assert config.parameters() == sum(p.numel() for p in decoder.parameters())
    file.write_text(json.dumps(config.to_dict()))
    assert ModelConfig.from_file(file) == config and hash(ModelConfig.from_file(file)) == hash(config)
    caches = decoder.new_caches(7)
    assert sum(c.numel() * 4 for layer in caches for c in layer) == 7 * config.cache_bytes_per_token("fp32")
    assert sum(t.kv_heads * t.row_bytes for t in config.cache_tensors("int8")) == config.cache_bytes_per_token("int8")


def test_a_cache_of_windows_stops_growing():
    config = MIXED["local and global"]
    local, one = 3 * 8 * 2, 16 * 2
    assert config.cache_bytes(5) == 5 * (local + one)
    assert config.cache_bytes(1000) == 2 * WINDOW * local + 1000 * one
    assert config.cache_bytes(1000, margin=3) == (WINDOW + 3) * local + 1000 * one


def test_layers_read_the_last_rows_of_a_kind_before_them():
    assert MIXED["rows of an earlier layer"].rows_from == (0, 1, 2, 2, 1)
    config = MIXED["rows of an earlier layer"]
    for pattern, words in (
        (("late_local", "local", "global", "late_global"), "of which none comes before it"),
        (("local", "late_local", "late_global", "global"), "of which none comes before it"),
    ):
        with pytest.raises(InputError, match=words):
            replace(config, pattern=pattern)
    for change, words in (
        ({"head_dim": 12}, "rows have another shape"),
        ({"rotary_base": 7.0}, "other positions"),
        ({"window": 20}, "shorter window"),
        ({"window": 0}, "shorter window"),
        ({"sinks": 3}, "fewer sinks"),
        ({"rows_of": "nothing"}, "no kind with own rows"),
        ({"rows_of": "late_global"}, "no kind with own rows"),
    ):
        kinds = {**config.kinds, "late_local": replace(config.kinds["late_local"], **change)}
        with pytest.raises(InputError, match=words):
            replace(config, kinds=kinds)


def test_patterns_are_short_to_write():
    for text, pattern in (("a*3 b", "a a a b"), ("a b a b", "a b a b"), ("local_1*2", "local_1 local_1")):
        assert read_pattern(text) == tuple(pattern.split()) and write_pattern(read_pattern(text)) == text
    for wrong in ("", "*3", "a*", "a*0x3", "A", None, 7, "a*-1"):
        with pytest.raises(InputError, match="config field pattern"):
            read_pattern(wrong)


UNIFIED = LayerSpec(heads=4, head_dim=16, kv_heads=1, mlp_width=8, sharing="q-k=v")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"value_dim": 17}, "value_dim = 17: must be at most head_dim"),
        ({"key_weight": True, "positions": "rotary-conjugate"}, "key_weight = True: needs positions"),
        ({"key_weight": True, "sharing": "qkv"}, "key_weight = True: needs keys and values in one row"),
        ({"positions": "rotary-on-read", "rotary_offset": 10, "rotary_dim": 8}, "with rotary_offset at most head_dim"),
        (
            {"positions": "rotary-conjugate", "rotary_offset": 10, "rotary_dim": 6, "value_dim": 12},
            "must all be among the first value_dim",
        ),
        ({"positions": "rotary-on-read", "rotary_frequencies": (1.0,)}, "rotary_frequencies = .* must be 8 numbers"),
        ({"positions": "rotary-on-read", "rotary_frequencies": (float("nan"),) * 8}, "rotary_frequencies"),
        ({"qk_norm": "both"}, "qk_norm"),
        ({"biases": ("querry",)}, "biases"),
        ({"norms": ("mlp", "mlp")}, "norms"),
        ({"sharing": "q=k=v", "kv_heads": 4, "value_dim": 8}, "value_dim = 8: must be head_dim when Q = K"),
    ],
)
def test_layers_that_contradict_themselves_are_refused(changes, words):
    with pytest.raises(InputError, match=words):
        replace(UNIFIED, **changes)
