"""What decides a training run besides its data: the recipe's numbers and the small model's shape."""

from __future__ import annotations

from dataclasses import dataclass, field

from edge_qkv.config import ModelConfig
from edge_qkv.errors import InputError
from edge_qkv.presets import apply_variant

HELD_TEXT = "held-out.txt"  # beside a checkpoint: text it was not trained on


def _number(default: int | float, meaning: str):
    return field(default=default, metadata={"help": meaning})


@dataclass(frozen=True)
class Recipe:
    """The numbers of a run; each is an option of `edge-qkv train`."""

    steps: int = _number(2600, "optimizer steps; with more of them a finished run goes on")
    batch: int = _number(8, "sequences a step")
    context: int = _number(512, "tokens a sequence")
    learning_rate: float = _number(1.5e-3, "peak; a cosine takes it down to a tenth")
    warmup: int = _number(100, "steps of rising learning rate")
    weight_decay: float = _number(0.1, "AdamW's, on matrices only")
    dropout: float = _number(0.1, "on embeddings and residual branches")
    held_out: float = _number(0.05, "share of the data, from its end, kept for evaluation (whole documents)")
    seed: int = _number(1234, "of weights and batches")
    evaluate_every: int = _number(250, "steps between evaluations; the run can go on from each")

    def __post_init__(self) -> None:
        for name, sound, rule in (
            ("steps", self.steps >= 1, "must be at least 1"),
            ("batch", 1 <= self.batch <= 1 << 16, f"must be from 1 to {1 << 16}"),
            ("context", 2 <= self.context <= 1 << 20, f"must be from 2 to {1 << 20}"),
            ("learning_rate", 0 < self.learning_rate < 1, "must be between 0 and 1"),
            ("warmup", self.warmup >= 0, "must be 0 or more"),
            ("weight_decay", 0 <= self.weight_decay < 10, "must be between 0 and 10"),
            ("dropout", 0 <= self.dropout < 1, "must be at least 0 and below 1"),
            ("seed", 0 <= self.seed < 2**31, "must be from 0 to 2147483647"),
            ("held_out", 0 < self.held_out < 1, "must be between 0 and 1"),
            ("evaluate_every", self.evaluate_every >= 1, "must be at least 1"),
        ):
            if not sound:
                raise InputError(f"--{name.replace('_', '-')} {getattr(self, name)}: {rule}")


def small_config(
    vocab_size: int, context: int, variant: str, query: str, positions: str, attention_scale: float = 0.0, **sizes: int
) -> ModelConfig:
    """A model that trains in about an hour on two cores, in any variant (SwiGLU, RMSNorm, tied head).

    sizes: layers, width, heads, mlp_width. Learned positions end at the training context, others at 32,768.
    """
    sizes = {"layers": 8, "width": 256, "heads": 8, "mlp_width": 688} | sizes
    if sizes["width"] < 1:
        raise InputError(f"--width {sizes['width']}: must be at least 1")
    if sizes["heads"] < 1 or sizes["width"] % sizes["heads"]:
        raise InputError(f"--width {sizes['width']} must be a multiple of --heads {sizes['heads']}")
    base = ModelConfig.uniform(
        vocab_size=vocab_size,
        max_positions=context if positions == "learned" else max(context, 32768),
        head_dim=sizes["width"] // sizes["heads"],
        kv_heads=sizes["heads"],
        mlp="swiglu",
        norm="rmsnorm",
        positions=positions,
        trained_context=context,
        attention_scale=attention_scale,
        **sizes,
    )
    return apply_variant(base, variant).with_layers(query=query)
