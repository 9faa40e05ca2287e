"""How the next token is chosen."""

from __future__ import annotations

from dataclasses import dataclass

from edge_qkv.errors import InputError


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen. temperature 0 is greedy; 0, 1, 0 and 1 leave a filter out.

    Filters act in this order: repetition penalty, temperature, top-k, top-p, min-p. A choice depends on the
    seed, the logits and the tokens so far alone, so the same seed and prompt give the same text, after a
    rewind as well. `seed` None draws a new one each time.
    """

    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    repetition_window: int = 64
    seed: int | None = None

    def __post_init__(self) -> None:
        for name, sound, rule in (
            ("temperature", 0 <= self.temperature < float("inf"), "must be 0 (greedy) or above"),
            ("top_k", 0 <= self.top_k < 2**31, "must be 0 (off) or above"),
            ("top_p", 0 < self.top_p <= 1, "must be above 0 and at most 1 (off)"),
            ("min_p", 0 <= self.min_p <= 1, "must be between 0 (off) and 1"),
            ("repetition_penalty", 0 < self.repetition_penalty < float("inf"), "must be above 0; 1 is off"),
            ("repetition_window", 0 <= self.repetition_window < 2**31, "must be 0 (the whole session) or above"),
            ("seed", self.seed is None or 0 <= self.seed < 2**64, "must be from 0 to 2**64 - 1"),
        ):
            if not sound:
                raise InputError(f"{name} = {getattr(self, name)}: {rule}")
