"""The one definition of the decoder. Every exporter lowers this module; run eagerly it is the reference."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from edge_qkv import attention
from edge_qkv.config import ModelConfig
from edge_qkv.layer import QUERY, LayerSpec

# Shapes: B batch, T new tokens, N width, M mlp_width, P max_positions, E input_embeddings, L layers.
# A tuple a layer, empty where it reads an earlier one's rows: one tensor (unified) or two, each [B, G, C, D or V], and
# where they are int8 as many of scales [B, G, C].
Caches = list[tuple[Tensor, ...]]

_gelu_tanh = lambda x: F.gelu(x, approximate="tanh")  # noqa: E731
_ACTIVATION = {"gelu": F.gelu, "gelu_tanh": _gelu_tanh, "swiglu": F.silu, "geglu": F.gelu, "geglu_tanh": _gelu_tanh}


def _norm(config: ModelConfig, width: int | None = None) -> nn.Module:
    width = width or config.width
    if config.norm == "rmsnorm":
        return RMSNorm(width, config.norm_eps, config.norm_bias)
    return nn.LayerNorm(width, config.norm_eps, bias=config.norm_bias)


class RMSNorm(nn.Module):
    """x / rms(x) * weight (+ bias); arXiv 1910.07467."""

    def __init__(self, width: int, eps: float, bias: bool = False, weight: bool = True) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width)) if weight else None
        self.bias = nn.Parameter(torch.zeros(width)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        x = F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)
        return x if self.bias is None else x + self.bias


class Attention(nn.Module):
    """Projections and norms around the operator; the kind of layer decides which of them exist."""

    def __init__(self, config: ModelConfig, spec: LayerSpec, attend: Callable) -> None:
        super().__init__()
        self.spec, self.attend = spec, attend
        for name, outputs, inputs, bias in spec.matrices(config.width):
            if name in (*spec.projections, "output"):
                setattr(self, name, nn.Linear(inputs, outputs, bias))
        together = spec.qk_norm == "all"
        heads = {"query_norm": spec.heads, "key_norm": spec.kv_heads}
        for name, wanted in (("query_norm", spec.qk_norm != "none"), ("key_norm", spec.norms_keys)):
            width = spec.head_dim * (heads[name] if together else 1)
            setattr(self, name, RMSNorm(width, config.norm_eps) if wanted else None)
        self.value_norm = RMSNorm(spec.values, config.norm_eps, weight=False) if spec.value_norm else None
        self.key_weight = nn.Parameter(torch.ones(spec.head_dim)) if spec.key_weight else None

    def form_query(self, x: Tensor, key: Tensor | None) -> Tensor:  # [B, T, N] -> [B, T, H*D]
        if self.spec.query_shares_key:
            return key
        projected = self.query(x) if QUERY[self.spec.query] else None
        match self.spec.query:
            case "identity":
                return x
            case "residual":
                return x + projected
            case "residual_gelu":
                return x + F.gelu(projected)
            case _:
                return projected

    def norm_heads(self, norm: RMSNorm | None, x: Tensor) -> Tensor:
        """Queries or keys [B, T, heads*D] with their norm, of all heads together or of each."""
        if norm is None:
            return x
        if self.spec.qk_norm == "all":
            return norm(x)
        return norm(x.unflatten(-1, (-1, self.spec.head_dim))).flatten(-2)

    def norm_values(self, x: Tensor, dim: int) -> Tensor:
        """The values in rows [B, T, G*dim], each a row's first V values, with their norm."""
        if self.value_norm is None:
            return x
        rows, values = x.unflatten(-1, (-1, dim)), self.spec.values
        normed = self.value_norm(rows[..., :values])
        return (normed if values == dim else torch.cat([normed, rows[..., values:]], dim=-1)).flatten(-2)

    def forward(
        self, x: Tensor, caches: tuple[Tensor, ...] | None, past: int | Tensor, tables: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, tuple[Tensor, ...] | None]:
        spec, key, value = self.spec, None, None
        if not spec.rows_of:
            key = self.key(x)  # [B, T, G*D]
            if not spec.unified:
                value = self.norm_values(self.value(x), spec.values)  # [B, T, G*V]
        query = self.norm_heads(self.query_norm, self.form_query(x, key))  # [B, T, H*D]
        if key is not None:
            key = self.norm_heads(self.key_norm, key)
            key = self.norm_values(key, spec.head_dim) if spec.unified else key
        out, caches = self.attend(spec, query, key, value, caches, past, tables, self.key_weight)  # [B, T, H*V]
        return self.output(out), caches  # [B, T, N]


class MLP(nn.Module):
    def __init__(self, config: ModelConfig, spec: LayerSpec) -> None:
        super().__init__()
        self.activation = _ACTIVATION[spec.mlp]
        self.gate = None
        for name, outputs, inputs, bias in spec.matrices(config.width):
            if name in ("gate", "up", "down"):
                setattr(self, name, nn.Linear(inputs, outputs, bias))

    def forward(self, x: Tensor) -> Tensor:
        if self.gate is None:
            return self.down(self.activation(self.up(x)))  # [B, T, M] inside
        return self.down(self.activation(self.gate(x)) * self.up(x))


class InputEmbedding(nn.Module):
    """What a layer adds of its own embedding of the tokens (Gemma 3n): x + norm(W2 (gelu(W1 x) * e))."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.width, config.input_embeddings, bias=False)
        self.projection = nn.Linear(config.input_embeddings, config.width, bias=False)
        self.norm = _norm(config)

    def forward(self, x: Tensor, embedded: Tensor) -> Tensor:  # [B, T, N], [B, T, E]
        return x + self.norm(self.projection(_gelu_tanh(self.gate(x)) * embedded))


class Layer(nn.Module):
    def __init__(self, config: ModelConfig, spec: LayerSpec, attend: Callable, dropout: float) -> None:
        super().__init__()
        self.spec, self.parallel, self.residual_scale = spec, config.residual == "parallel", config.residual_scale
        for name in ("attention", "attention_out", "mlp", "mlp_out"):
            setattr(self, f"{name}_norm", _norm(config) if name in spec.norms else None)
        self.attention = Attention(config, spec, attend)
        self.mlp = MLP(config, spec)
        self.input = InputEmbedding(config) if config.input_embeddings else None
        self.scalar = nn.Parameter(torch.ones(1)) if config.layer_scalars else None
        self.dropout = nn.Dropout(dropout)

    def forward(
        self,
        x: Tensor,
        caches: tuple[Tensor, ...] | None,
        past: int | Tensor,
        tables: tuple[Tensor, Tensor] | None,
        embedded: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...] | None]:
        """x [B, T, N]; embedded [B, T, E], the layer's own embedding of the tokens, or None."""
        normed = _with(self.attention_norm, x)
        out, caches = self.attention(normed, caches, past, tables)
        added = self._added(self.attention_out_norm, out)
        if self.parallel:  # an MLP without a norm of its own reads what attention reads
            read = normed if self.mlp_norm is None else self.mlp_norm(x)
            x = x + added + self._added(self.mlp_out_norm, self.mlp(read))
        else:
            x = x + added
            x = x + self._added(self.mlp_out_norm, self.mlp(_with(self.mlp_norm, x)))
        if self.input is not None:
            x = self.input(x, embedded)
        return (x if self.scalar is None else x * self.scalar), caches

    def _added(self, norm: nn.Module | None, out: Tensor) -> Tensor:
        out = self.dropout(_with(norm, out))
        return out if self.residual_scale == 1.0 else out * self.residual_scale


def _with(norm: nn.Module | None, x: Tensor) -> Tensor:
    return x if norm is None else norm(x)


class Decoder(nn.Module):
    """A decoder-only transformer.

    `attend` is the attention operator (see `edge_qkv.attention.attend`); exporters pass their own.
    `dropout` acts in training only.
    """

    def __init__(self, config: ModelConfig, attend: Callable = attention.attend, dropout: float = 0.0) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.width)
        self.positions = nn.Embedding(config.max_positions, config.width) if config.learned_positions else None
        self.dropout = nn.Dropout(dropout)
        self.layers = nn.ModuleList(Layer(config, spec, attend, dropout) for spec in config.layers)
        self.norm = _norm(config)
        self.head = nn.Linear(config.width, config.vocab_size, bias=False)
        if config.tied_head:
            self.head.weight = self.embedding.weight
        if inner := config.input_embeddings:
            every = len(config.layers) * inner
            self.layer_embedding = nn.Embedding(config.vocab_size, every)
            self.layer_projection = nn.Linear(config.width, every, bias=False)
            self.layer_projection_norm = RMSNorm(inner, config.norm_eps)
        for name, table in self.rotary_tables().items():
            self.register_buffer(name, table, persistent=False)

    def rotary_tables(self) -> dict[str, Tensor]:
        """The cosines and sines that kinds of layers share, each [P, R/2], by name of the buffer."""
        tables = {}
        for rotation, spec in _rotations(self.config).items():
            cos, sin = attention.rotary_tables(spec, self.config.max_positions)
            tables |= {f"cos{_suffix(self.config, rotation)}": cos, f"sin{_suffix(self.config, rotation)}": sin}
        return tables

    def tables_of(self, spec: LayerSpec) -> tuple[Tensor, Tensor] | None:
        """cos and sin of a kind of layers, or None without rotation."""
        if not spec.rotary:
            return None
        suffix = _suffix(self.config, spec.frequencies)
        return getattr(self, f"cos{suffix}"), getattr(self, f"sin{suffix}")

    def init_weights(self, generator: torch.Generator) -> None:
        """GPT-2's initialisation: normal(0.02), residual outputs scaled by 1/sqrt(2 * layers)."""
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                residual = name.endswith(("attention.output.weight", "mlp.down.weight"))
                std = 0.02 / math.sqrt(2 * len(self.layers)) if residual else 0.02
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
        config = self.config
        x = self.embedding(input_ids)  # [B, T, N]
        x = x if config.embedding_scale == 1.0 else x * config.embedding_scale
        embedded = self._layer_inputs(input_ids, x)
        if self.positions is not None:
            x = x + self.positions(past + torch.arange(input_ids.shape[1], device=x.device))
        x = self.dropout(x)
        if caches is None and config.rows_from != tuple(range(len(self.layers))):
            batch, tokens = input_ids.shape  # layers that read an earlier one's rows read them there
            caches = [tuple(c.to(x) for c in layer) for layer in self.new_caches(tokens, batch=batch)]
        for i, layer in enumerate(self.layers):
            source = config.rows_from[i]
            own = caches[source] if caches is not None else None
            x, updated = layer(x, own, past, self.tables_of(layer.spec), None if embedded is None else embedded[i])
            if caches is not None and source == i:
                caches[i] = updated
        if logit_rows is not None:
            x = x.index_select(1, logit_rows)  # [B, R, N]
        logits = self.head(self.norm(x))
        logits = logits if config.logit_scale == 1.0 else logits * config.logit_scale
        if config.logit_softcap:
            logits = torch.tanh(logits / config.logit_softcap) * config.logit_softcap
        return logits, caches

    def _layer_inputs(self, input_ids: Tensor, x: Tensor) -> Sequence[Tensor] | None:
        """Each layer's own embedding of the tokens, [B, T, E]: looked up, and projected from x [B, T, N] (Gemma 3n)."""
        inner = self.config.input_embeddings
        if not inner:
            return None
        shape = (len(self.layers), inner)
        looked_up = self.layer_embedding(input_ids).unflatten(-1, shape) * math.sqrt(inner)  # [B, T, L, E]
        projected = self.layer_projection(x).unflatten(-1, shape) * (1 / math.sqrt(self.config.width))
        return ((self.layer_projection_norm(projected) + looked_up) * math.sqrt(0.5)).unbind(2)

    def new_caches(self, capacity: int, dtype: torch.dtype = torch.float32, batch: int = 1) -> Caches:
        """Empty caches for `capacity` tokens of float32, float16 or int8."""
        caches: Caches = [() for _ in self.layers]
        for tensor in self.config.cache_tensors("int8" if dtype == torch.int8 else "fp32"):
            rows = (batch, tensor.kv_heads, capacity)  # [B, G, C]
            shape, of = (rows, torch.float16) if tensor.scales else ((*rows, tensor.dim), dtype)
            caches[tensor.layer] += (torch.zeros(shape, dtype=of),)
        return caches

    def weight_names(self) -> Sequence[str]:
        """Names of the tensors a checkpoint must provide: the state dict, a tied head once."""
        return [name for name in self.state_dict() if not (self.config.tied_head and name == "head.weight")]


def _rotations(config: ModelConfig) -> dict[tuple[float, ...], LayerSpec]:
    """The frequency tables of a model -> a kind that has it, in the order of the kinds."""
    found: dict[tuple[float, ...], LayerSpec] = {}
    for spec in config.kinds.values():
        if spec.rotary:
            found.setdefault(spec.frequencies, spec)
    return found


def _suffix(config: ModelConfig, frequencies: tuple[float, ...]) -> str:
    """Nothing for the first table, _1 for the second, ..."""
    i = list(_rotations(config)).index(frequencies)
    return f"_{i}" if i else ""
