"""A config describes a model completely: its cache, its parameters, and what it refuses."""

import json
from dataclasses import replace

import pytest

from edge_qkv.config import MLP, NORM, POSITIONS, QUERY, SHARING, ModelConfig
from edge_qkv.errors import InputError
from edge_qkv.presets import VARIANTS, apply_variant, preset

SMALL = ModelConfig(vocab_size=50, max_positions=40, layers=2, width=24, heads=4, head_dim=6, kv_heads=4, mlp_width=20)

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
        config = replace(SMALL, sharing=sharing, query=query, kv_heads=kv_heads)
    except InputError:
        assert sharing.startswith("q=k") and (query != "projected" or kv_heads != 4)
        return
    for options in (
        {},
        {"attention_bias": True, "mlp_bias": True, "norm_bias": True, "mlp": "geglu"},
        {"tied_head": False, "norm": "rmsnorm", "positions": "rotary-on-read"},
    ):
        full = replace(config, **options)
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
                    config = replace(
                        SMALL,
                        sharing=sharing,
                        query=query,
                        positions=positions,
                        kv_heads=kv_heads,
                        norm=NORM[index % 2],
                        mlp=MLP[index % 4],
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
        replace(SMALL, **{field: value})


def test_contradictions_are_refused():
    with pytest.raises(InputError, match="kv_heads"):
        replace(SMALL, sharing="q=k-v", kv_heads=1)
    with pytest.raises(InputError, match="query"):
        replace(SMALL, sharing="q=k=v", query="identity")
    with pytest.raises(InputError, match="width = heads \\* head_dim"):
        replace(SMALL, query="identity", head_dim=8)
    with pytest.raises(InputError, match="rotary_dim"):
        replace(SMALL, positions="rotary-conjugate", head_dim=5)


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
        (json.dumps({"layers": 1}), "vocab_size is missing"),
        (json.dumps(SMALL.to_dict() | {"layers": "2"}), "config field layers"),
    ):
        file.write_text(text)
        with pytest.raises(InputError, match=words) as error:
            ModelConfig.from_file(file)
        assert str(file) in str(error.value)
    with pytest.raises(InputError, match="cannot be read"):
        ModelConfig.from_file(tmp_path / "absent.json")
