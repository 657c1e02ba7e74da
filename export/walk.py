"""The sampled walk through the candidates, on the host, in numpy: the draws of `pydflash.ops.reference.path_select`."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
_DRAFT = 3  # the purpose of a draft's random number, as in pydflash.ops.reference
_WORD = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)


def uniform(seeds: Array, positions: Array, slot: int) -> Array:
    """Uniforms [B] float32 in [0, 1) of a draft in `slot` of the block at `positions` [B], keyed by `seeds` [B].

    Source: Philox4x32-10, Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011.
    """
    key = seeds.astype(np.int64).view(np.uint64)
    keys = [key & _WORD, key >> _HALF]
    zero = np.zeros_like(key)
    counter = [
        positions.astype(np.int64).view(np.uint64) & _WORD,
        zero,
        zero + np.uint64(slot),
        zero + np.uint64(_DRAFT),
    ]
    for _ in range(10):
        product0, product1 = counter[0] * np.uint64(0xD2511F53), counter[2] * np.uint64(0xCD9E8D57)
        counter = [
            (product1 >> _HALF) ^ counter[1] ^ keys[0],
            product1 & _WORD,
            (product0 >> _HALF) ^ counter[3] ^ keys[1],
            product0 & _WORD,
        ]
        keys = [(keys[0] + np.uint64(0x9E3779B9)) & _WORD, (keys[1] + np.uint64(0xBB67AE85)) & _WORD]
    return (counter[0] >> np.uint64(8)).astype(np.float32) * np.float32(2.0**-24)


def walk(candidates: Array, scores: Array, temperature: Array, seeds: Array, starts: Array) -> tuple[Array, Array]:
    """Draw a path: each token from softmax(score / T) over the candidates of its slot.

    Args:
        candidates: [B, S-1, K] ids.
        scores: [B, S-1, K, K] (previous candidate, candidate) or [B, S-1, K] where slots are independent.
        temperature: [B] float32; rows at 0 take the best.
        seeds, starts: [B] int64, the key and the anchor's position.

    Returns: tokens [B, S-1] int64, and q [B, S-1, K] float32, the law each was drawn from.
    """
    batch, slots, k = candidates.shape
    rows, index = np.arange(batch), np.zeros(batch, np.int64)
    tokens = np.empty((batch, slots), np.int64)
    probs = np.empty((batch, slots, k), np.float32)
    divisor = np.maximum(temperature, np.finfo(np.float32).tiny)[:, None]
    for slot in range(slots):
        row = scores[rows, slot, index] if scores.ndim == 4 else scores[:, slot]
        row = np.where(np.isnan(row), -np.inf, row)
        top = row.max(-1, keepdims=True)
        with np.errstate(over="ignore", invalid="ignore"):  # towards -inf, whose weight is 0
            weights = np.where(row == top, np.float32(1), np.exp((row - top) / divisor))
        weights[top[:, 0] == -np.inf, 1:] = 0  # nothing but NaN and -inf: certain of the first
        cumulative = np.cumsum(weights, -1, dtype=np.float32)
        threshold = uniform(seeds, starts, slot + 1) * cumulative[:, -1]
        last = k - 1 - (weights > 0)[:, ::-1].argmax(-1)
        drawn = np.minimum((cumulative <= threshold[:, None]).sum(-1), last)
        index = np.where(temperature > 0, drawn, row.argmax(-1))
        greedy = np.eye(k, dtype=np.float32)[index]
        probs[:, slot] = np.where((temperature > 0)[:, None], weights / weights.sum(-1, keepdims=True), greedy)
        tokens[:, slot] = candidates[rows, slot, index]
    return tokens, probs
