"""What the definitions share: their precision, random numbers, and draws from weights."""

from __future__ import annotations

import torch
from torch import Tensor

TARGET, ACCEPT, RESIDUAL, DRAFT = range(4)  # what a random number is for; part of its key
_WORD = 0xFFFFFFFF


def uniform(seeds: Tensor, positions: Tensor, purpose: int, slots: Tensor | int = 0) -> Tensor:
    """Uniforms in [0, 1), strictly below 1, from the counter-based Philox4x32-10 generator.

    Args:
        seeds: [...] int64, the key.
        positions: [...] integer, the absolute position the number belongs to.
        purpose: TARGET, ACCEPT, RESIDUAL or DRAFT.
        slots: the block slot of a DRAFT draw, else 0.

    Returns: [...] float32 with 24 random bits.

    Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011.
    """
    words = (seeds.long(), positions.long(), torch.as_tensor(slots, device=seeds.device).long())
    key, position, slot = torch.broadcast_tensors(*words)
    counter = [position & _WORD, torch.zeros_like(key), slot & _WORD, torch.full_like(key, purpose)]
    return (philox([key & _WORD, (key >> 32) & _WORD], counter) >> 8).float() * 2.0**-24


def philox(key: list[Tensor], counter: list[Tensor]) -> Tensor:
    """The first output word of Philox4x32-10; all words are int64 tensors in [0, 2^32)."""
    for _ in range(10):
        # The low 64 bits of the product are right in wrapping int64 arithmetic, the sign bit is masked away.
        product0, product1 = counter[0] * 0xD2511F53, counter[2] * 0xCD9E8D57
        counter = [
            ((product1 >> 32) & _WORD) ^ counter[1] ^ key[0],
            product1 & _WORD,
            ((product0 >> 32) & _WORD) ^ counter[3] ^ key[1],
            product0 & _WORD,
        ]
        key = [(key[0] + 0x9E3779B9) & _WORD, (key[1] + 0xBB67AE85) & _WORD]
    return counter[0]


def widened(x: Tensor) -> Tensor:
    """In float32, or float64 where it is."""
    return x if x.dtype == torch.float64 else x.float()


def row_of(value: Tensor | float, batch: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[B] of a number, or of one number a row."""
    return torch.as_tensor(value, device=device).to(dtype).expand(batch)


def weights_of(logits: Tensor, temperature: Tensor) -> Tensor:
    """exp((x - max) / T) of each row [B, V], T being [B]; a row that is all NaN or -inf is certain of id 0."""
    x = widened(logits).nan_to_num(-torch.inf, torch.inf, -torch.inf)
    top = x.amax(-1, keepdim=True)
    weights = torch.where(x == top, 1.0, torch.exp((x - top) / temperature[:, None].to(x)))
    others = torch.arange(x.shape[-1], device=x.device) > 0
    return weights.masked_fill((top == -torch.inf) & others, 0.0)


def inverse_cdf(weights: Tensor, u: Tensor) -> Tensor:
    """The first id whose cumulative weight exceeds u * total; the last of positive weight at the rounding edge."""
    cumulative = weights.cumsum(-1)
    threshold = u.to(weights) * cumulative[:, -1]
    last = weights.shape[-1] - 1 - (weights > 0).flip(-1).long().argmax(-1)
    return torch.minimum((cumulative <= threshold[:, None]).sum(-1), last)
