"""The one definition of the decoder. Every exporter lowers this module; run eagerly it is the reference."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from edge_qkv import attention
from edge_qkv.config import QUERY, ModelConfig

# Shapes: B batch, T new tokens, N width, M mlp_width, V vocab_size, P max_positions.
# A tuple a layer: one tensor (unified) or two, each [B, G, C, D]; where they are int8, as many of scales [B, G, C].
Caches = list[tuple[Tensor, ...]]

_ACTIVATION = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "swiglu": F.silu,
    "geglu": F.gelu,
}


def _norm(config: ModelConfig) -> nn.Module:
    if config.norm == "rmsnorm":
        return RMSNorm(config.width, config.norm_eps, config.norm_bias)
    return nn.LayerNorm(config.width, config.norm_eps, bias=config.norm_bias)


class RMSNorm(nn.Module):
    """x / rms(x) * weight (+ bias); arXiv 1910.07467."""

    def __init__(self, width: int, eps: float, bias: bool) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        x = F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)
        return x if self.bias is None else x + self.bias


class Attention(nn.Module):
    """Projections around the operator; which of them exist is `config.projections`."""

    def __init__(self, config: ModelConfig, attend: Callable) -> None:
        super().__init__()
        self.config, self.attend = config, attend
        heads = {"query": config.heads, "key": config.kv_heads, "value": config.kv_heads}
        for name in config.projections:
            setattr(self, name, nn.Linear(config.width, heads[name] * config.head_dim, config.attention_bias))
        self.output = nn.Linear(config.heads * config.head_dim, config.width, config.attention_bias)

    def form_query(self, x: Tensor, key: Tensor) -> Tensor:  # [B, T, N] -> [B, T, H*D]
        if self.config.query_shares_key:
            return key
        projected = self.query(x) if QUERY[self.config.query] else None
        match self.config.query:
            case "identity":
                return x
            case "residual":
                return x + projected
            case "residual_gelu":
                return x + F.gelu(projected)
            case _:
                return projected

    def forward(
        self, x: Tensor, caches: tuple[Tensor, ...] | None, past: int | Tensor, tables: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, tuple[Tensor, ...] | None]:
        key = self.key(x)  # [B, T, G*D]
        query = self.form_query(x, key)  # [B, T, H*D]
        value = None if self.config.unified else self.value(x)  # [B, T, G*D]
        out, caches = self.attend(self.config, query, key, value, caches, past, tables)
        return self.output(out), caches  # [B, T, N]


class MLP(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.activation = _ACTIVATION[config.mlp]
        self.up = nn.Linear(config.width, config.mlp_width, config.mlp_bias)
        self.gate = nn.Linear(config.width, config.mlp_width, config.mlp_bias) if config.gated_mlp else None
        self.down = nn.Linear(config.mlp_width, config.width, config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        if self.gate is None:
            return self.down(self.activation(self.up(x)))  # [B, T, M] inside
        return self.down(self.activation(self.gate(x)) * self.up(x))


class Layer(nn.Module):
    def __init__(self, config: ModelConfig, attend: Callable, dropout: float) -> None:
        super().__init__()
        self.attention_norm = _norm(config)
        self.attention = Attention(config, attend)
        self.mlp_norm = _norm(config)
        self.mlp = MLP(config)
        self.dropout = nn.Dropout(dropout)

    def forward(
        self, x: Tensor, caches: tuple[Tensor, ...] | None, past: int | Tensor, tables: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, tuple[Tensor, ...] | None]:
        out, caches = self.attention(self.attention_norm(x), caches, past, tables)
        x = x + self.dropout(out)
        return x + self.dropout(self.mlp(self.mlp_norm(x))), caches


class Decoder(nn.Module):
    """A decoder-only transformer.

    `attend` is the attention operator (see `edge_qkv.attention.attend`); exporters pass their own.
    `dropout` acts in training only.
    """

    def __init__(self, config: ModelConfig, attend: Callable = attention.attend, dropout: float = 0.0) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.width)
        self.positions = nn.Embedding(config.max_positions, config.width) if config.positions == "learned" else None
        self.dropout = nn.Dropout(dropout)
        self.layers = nn.ModuleList(Layer(config, attend, dropout) for _ in range(config.layers))
        self.norm = _norm(config)
        self.head = nn.Linear(config.width, config.vocab_size, bias=False)
        if config.tied_head:
            self.head.weight = self.embedding.weight
        cos, sin = attention.rotary_tables(config) if config.rotary else (None, None)
        self.register_buffer("cos", cos, persistent=False)  # [P, R/2]
        self.register_buffer("sin", sin, persistent=False)  # [P, R/2]

    def init_weights(self, generator: torch.Generator) -> None:
        """GPT-2's initialisation: normal(0.02), residual outputs scaled by 1/sqrt(2 * layers)."""
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                residual = name.endswith(("attention.output.weight", "mlp.down.weight"))
                std = 0.02 / math.sqrt(2 * self.config.layers) if residual else 0.02
                nn.init.normal_(parameter, std=std, generator=generator)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(
        self,
        input_ids: Tensor,
        past: int | Tensor = 0,
        caches: Caches | None = None,
        logit_rows: Tensor | None = None,
    ) -> tuple[Tensor, Caches | None]:
        """input_ids [B, T]; past: rows already in the caches; caches from `new_caches`, updated in place.

        Returns logits [B, R, V] of the rows `logit_rows` [R] (all T when None), and the caches. Without
        caches the T tokens are a whole sequence (training).
        """
        x = self.embedding(input_ids)  # [B, T, N]
        if self.positions is not None:
            x = x + self.positions(past + torch.arange(input_ids.shape[1], device=x.device))
        x = self.dropout(x)
        tables = None if self.cos is None else (self.cos, self.sin)
        for i, layer in enumerate(self.layers):
            x, updated = layer(x, caches[i] if caches is not None else None, past, tables)
            if caches is not None:
                caches[i] = updated
        if logit_rows is not None:
            x = x.index_select(1, logit_rows)  # [B, R, N]
        return self.head(self.norm(x)), caches

    def new_caches(self, capacity: int, dtype: torch.dtype = torch.float32, batch: int = 1) -> Caches:
        """Empty caches for `capacity` tokens of float32, float16 or int8."""
        row = (batch, self.config.kv_heads, capacity)  # [B, G, C]
        kinds = [((*row, self.config.head_dim), dtype)] * self.config.caches
        if dtype == torch.int8:
            kinds += [(row, torch.float16)] * self.config.caches
        return [tuple(torch.zeros(shape, dtype=of) for shape, of in kinds) for _ in self.layers]

    def weight_names(self) -> Sequence[str]:
        """Names of the tensors a checkpoint must provide: the state dict, a tied head once."""
        return [name for name in self.state_dict() if not (self.config.tied_head and name == "head.weight")]
