"""Caches and what a round leaves behind, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from .norms import normed, rotated


def cache_append(
    k_cache: Tensor, v_cache: Tensor, k_block: Tensor, v_block: Tensor, index: Tensor, lengths: Tensor
) -> None:
    """Append gathered block rows to every layer's cache, in place; see `pydflash.ops.cache_append`."""
    capacity = k_cache.shape[3]
    valid = (index >= 0).long().cumprod(-1).bool()
    counts = valid.sum(-1, keepdim=True)
    entry = torch.arange(index.shape[1], device=index.device)
    valid &= entry >= counts - capacity
    batch, entry = valid.nonzero(as_tuple=True)
    source = index[batch, entry].long()
    row = (lengths[batch].long() + entry) % max(capacity, 1)
    for cache, block in ((k_cache, k_block), (v_cache, v_block)):
        cache[:, batch, :, row] = block[:, batch, :, source]


def context_append(
    kv: Tensor,
    k_weights: Tensor | None,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    lengths: Tensor,
    counts: Tensor,
    rotary_dim: int,
    interleaved: bool = False,
    weight_offset: float = 0.0,
    round_first: bool = True,
) -> None:
    """Keys and values of context rows, in place; see `pydflash.ops.context_append`."""
    layers, _, heads, capacity, dim = k_cache.shape
    k, v = kv.unflatten(-1, (layers, 2, heads, dim)).permute(3, 2, 0, 4, 1, 5)  # [2, layers, B, Hkv, C, D]
    if k_weights is not None:
        k = normed(k, k_weights[:, None, None, None], eps, weight_offset, round_first)
    entry = torch.arange(kv.shape[1], device=kv.device)
    positions = lengths.long()[:, None] + entry
    k = rotated(k, cos, sin, positions[:, None], rotary_dim, interleaved)
    kept = (entry < counts[:, None]) & (entry >= counts[:, None] - capacity)
    batch, entry = kept.nonzero(as_tuple=True)
    row = positions[batch, entry] % max(capacity, 1)
    for cache, new in ((k_cache, k), (v_cache, v)):
        cache[:, batch, :, row] = new[:, batch, :, entry]


def round_commit(
    tokens: Tensor,
    index: Tensor,
    num_accepted: Tensor,
    bonus: Tensor,
    active: Tensor,
    features: Tensor | None,
    features_out: Tensor | None,
    anchors: Tensor,
    lengths: Tensor,
    starts: Tensor,
    counts: Tensor,
    record: Tensor,
) -> None:
    """What follows `reject_sample` in a round, in place; see `pydflash.ops.round_commit`."""
    live = active.bool()
    total = torch.where(live, num_accepted + 1, 0).to(counts.dtype)
    slot = torch.arange(tokens.shape[1], device=tokens.device)
    source = index.long().clamp_min(0)
    if features is not None and features_out is not None:
        gathered = features.gather(1, source[..., None].expand_as(features))
        features_out.copy_(torch.where((slot < total[:, None])[..., None], gathered, features_out))
    accepted = torch.cat((tokens.gather(1, source)[:, 1:], tokens[:, :1]), 1)
    ends = slot == total[:, None] - 1
    record[:, :-1] = torch.where(ends, bonus[:, None], torch.where(slot < total[:, None], accepted, -1))
    record[:, -1] = total
    anchors.copy_(torch.where(live, bonus, anchors))
    lengths += total
    starts += total
    counts.copy_(total)
