"""The parity report: numbers that can be worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from edge_qkv.errors import InputError
from edge_qkv.export import parity


def test_equal_logits_have_no_error():
    logits = np.random.default_rng(0).normal(size=(5, 7)).astype(np.float32)
    report = parity.compare(logits, logits, [1, 2, 3, 4, 5])
    assert report["max_logit_error"] == report["mean_logit_error"] == report["perplexity_change"] == 0
    assert report["top1_agreement"] == 1


def test_errors_and_agreement_are_counted():
    reference = np.zeros((4, 3), np.float32)
    reference[:, 0] = 1
    exported = reference.copy()
    exported[2] = [1, 1.5, 0]
    report = parity.compare(reference, exported, [0, 0, 0, 0])
    assert report["max_logit_error"] == 1.5
    assert report["mean_logit_error"] == pytest.approx(1.5 / 12)
    assert report["top1_agreement"] == 0.75


def test_perplexity_of_a_uniform_guess_is_the_vocabulary():
    assert parity.perplexity(np.zeros((6, 50), np.float32), [3] * 6) == pytest.approx(50)
    assert math.isnan(parity.perplexity(np.zeros((1, 50), np.float32), [3]))


def test_broken_exports_are_errors():
    logits = np.zeros((4, 3), np.float32)
    with pytest.raises(InputError, match="not finite"):
        parity.compare(logits, np.full_like(logits, np.nan), [0] * 4)
    with pytest.raises(InputError, match="gives logits"):
        parity.compare(logits, logits[:3], [0] * 4)


def test_random_tokens_are_the_same_every_time():
    assert parity.random_tokens(100, 20) == parity.random_tokens(100, 20)
    assert max(parity.random_tokens(100, 1000)) < 100
