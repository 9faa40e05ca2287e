"""What the results of `edge-qkv bench` are made of, kind by kind; `schema.md` says what it means."""

from __future__ import annotations

from typing import Any

_NUMBER, _COUNT, _TEXT = (int, float), int, str
_MAYBE_COUNT, _MAYBE_NUMBER, _MAYBE_TEXT = (int, type(None)), (int, float, type(None)), (str, type(None))
_FIGURE = {"median": _NUMBER, "least": _NUMBER, "most": _NUMBER, "repeats": _COUNT}
_MEMORY = {"resident": _COUNT, "anonymous": _COUNT, "peak": _COUNT}
_CACHE = {"cache_used": _COUNT, "cache_committed": _COUNT, "cache_reserved": _COUNT}
_MACHINE = {
    "date": _TEXT,
    "board": _MAYBE_TEXT,
    "processor": _TEXT,
    "cores": _COUNT,
    "instruction_set": _TEXT,
    "memory": _MAYBE_COUNT,
    "system": _TEXT,
    "python": _TEXT,
    "edge_qkv": _TEXT,
}
_OPTIONS = {"threads": _COUNT, "repeats": _COUNT, "seconds": _NUMBER}
_DECODED = [{"depth": _COUNT, "tokens": [_COUNT], "ms_per_token": _FIGURE, "memory": _MEMORY | _CACHE}]
_VERIFIED = {"tokens": _COUNT, "equal": _COUNT, "largest_shortfall": _NUMBER, "allowed_shortfall": _NUMBER}
_LEFT_OUT = [{"depth": _COUNT, "needs": _COUNT, "available": _COUNT}]
# What a result holds: a field that is not there was not measured, except for those of `ALWAYS`.
SHAPES: dict[str, Any] = {
    "package": {
        "machine": _MACHINE,
        "options": _OPTIONS,
        "package": {
            "name": _TEXT,
            "engine": _TEXT,
            "version": _MAYBE_TEXT,
            "weights": _TEXT,
            "cache": _TEXT,
            "variant": _TEXT,
            "parameters": _COUNT,
            "context": _COUNT,
            "cache_bytes_per_token": _COUNT,
            "file_bytes": _COUNT,
            "packed": bool,
        },
        "load": {
            "cold": {"open_ms": _FIGURE, "first_token_ms": _FIGURE},
            "warm": {"open_ms": _FIGURE, "first_token_ms": _FIGURE},
            "cached_after_drop": _NUMBER,
        },
        "decode": {
            "loaded": _MEMORY | _CACHE,
            "depths": _DECODED,
            "left_out": _LEFT_OUT,
            "planned": {"depth": _COUNT, "cache": _COUNT, "expected": _COUNT, "total": _COUNT},
            "verified": _VERIFIED,
        },
        "prefill": [{"depth": _COUNT, "start": _COUNT, "tokens": _COUNT, "tokens_per_second": _FIGURE}],
        "first_token": [{"tokens": _COUNT, "milliseconds": (dict, type(None))}],
        "threads": [
            {
                "threads": _COUNT,
                "prefill_tokens_per_second": _FIGURE,
                "depths": [{"depth": _COUNT, "ms_per_token": _FIGURE}],
            }
        ],
        "restore": {
            "tokens": _COUNT,
            "snapshot_bytes": _COUNT,
            "prefill_seconds": _NUMBER,
            "prefill_measured": _TEXT,
            "save_ms": _FIGURE,
            "restore_ms": _FIGURE,
            "prefill_over_restore": _NUMBER,
        },
    },
    "variants": {
        "machine": _MACHINE,
        "options": _OPTIONS,
        "model": _TEXT,
        "layers": _COUNT,
        "target": _TEXT,
        "weights": _TEXT,
        "cache": _TEXT,
        "context": _COUNT,
        "variants": [
            {
                "variant": _TEXT,
                "file_bytes": _COUNT,
                "cache_planned": _COUNT,
                "cache_reserved": _COUNT,
                "cache_paper": _MAYBE_COUNT,
                "depths": _DECODED,
                "left_out": _LEFT_OUT,
                "verified": _VERIFIED,
            }
        ],
    },
    "peers": {
        "machine": _MACHINE,
        "options": _OPTIONS,
        "model": _TEXT,
        "left_out": [{"name": _TEXT, "why": _TEXT}],
        "contestants": [
            {
                "name": _TEXT,
                "variant": _TEXT,
                "target": _TEXT,
                "weights": _TEXT,
                "cache": _TEXT,
                "cache_bytes_per_token": _COUNT,
                "file_bytes": _COUNT,
                "parameters": _COUNT,
                "difference": _MAYBE_NUMBER,
                "perplexity_change": _NUMBER,
                "decode": [{"depth": _COUNT, "ms": [_NUMBER], "ms_per_token": _FIGURE, "memory": (dict, type(None))}],
                "verified": {"equal": _COUNT, "tokens": _COUNT},
                "prefill": [{"tokens": _COUNT, "seconds": [_NUMBER], "tokens_per_second": _FIGURE}],
                "notes": [_TEXT],
            }
        ],
        "targets": [
            {"ours": _TEXT, "what": _TEXT, "wanted": _NUMBER, "kind": _TEXT, "ratios": [_NUMBER], "note": _TEXT},
        ],
    },
    "attention": {
        "machine": _MACHINE,
        "options": _OPTIONS,
        "attention": {
            **dict.fromkeys(("heads", "head_dim", "kv_heads", "layers", "tokens"), _COUNT),
            "threads": [_COUNT],
            "results": [
                {
                    "depth": _COUNT,
                    "operator": _TEXT,
                    "ms": [_NUMBER],
                    "ms_per_layer": _FIGURE,
                    "times_faster": (dict, type(None)),
                }
            ],
            "scaling": [
                {
                    "depth": _COUNT,
                    "operator": _TEXT,
                    "from": _COUNT,
                    "threads": _COUNT,
                    "ratios": [_NUMBER],
                    "times_faster": _FIGURE,
                }
            ],
            "left_out": [{"operator": _TEXT, "why": _TEXT}],
        },
        "targets": [
            {
                "what": _TEXT,
                "wanted": _NUMBER,
                "kind": _TEXT,
                "ratios": [_NUMBER],
                "ratio": (dict, type(None)),
                "met": (bool, type(None)),
                "note": _TEXT,
            }
        ],
    },
    "quality": {
        "machine": _MACHINE,
        "options": {"threads": _COUNT},
        "command": _TEXT,
        "data": {"name": _TEXT, "sha256": _TEXT, "train_bytes": _COUNT, "held_out_bytes": _COUNT},
        "recipe": {"steps": _COUNT, "batch": _COUNT, "context": _COUNT, "learning_rate": _NUMBER},
        "seeds": [_COUNT],
        "model": {"vocab_size": _COUNT, "positions": _TEXT, "layers": _COUNT, "width": _COUNT, "heads": _COUNT},
        "variants": [
            {
                "variant": _TEXT,
                "parameters": _COUNT,
                "cache_bytes_per_token": _COUNT,
                "mlp_width": _COUNT,
                "attention_scale": _NUMBER,
                "weight_decay": _NUMBER,
                "perplexity": _NUMBER,
                "paper": _MAYBE_NUMBER,
                "paper_says": _MAYBE_TEXT,
                "runs": [{"seed": _COUNT, "perplexity": _NUMBER, "bits_per_byte": _NUMBER, "minutes": _NUMBER}],
            }
        ],
    },
}
ALWAYS = {"machine", "options", "package", "model", "layers", "target", "weights", "cache", "context", "variants"}
ALWAYS |= {"command", "data", "recipe", "seeds"}
