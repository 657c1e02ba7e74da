"""Attention in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from .numbers import widened


def block_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k_block: Tensor,
    v_block: Tensor,
    lengths: Tensor,
    visibility: Tensor,
    depths: Tensor,
    window: int = 0,
    scale: float | None = None,
) -> Tensor:
    """Attention of a block over cached context and itself; see `pydflash.ops.block_attention`."""
    batch, heads, slots, dim = q.shape
    kv_heads, capacity = k_cache.shape[1:3]
    scale = dim**-0.5 if scale is None else scale
    lengths, depths = lengths.long(), depths.long().expand(batch, slots)
    rows = torch.arange(capacity, device=q.device)
    # Row r of a ring holds the newest position below lengths that is r modulo the capacity.
    newest = lengths[:, None] - 1
    held = newest - (newest - rows) % max(capacity, 1)
    query = lengths[:, None] + depths
    seen_context = (held >= 0)[:, None].expand(batch, slots, capacity)
    bits = torch.arange(slots, device=q.device)
    seen_block = ((visibility.expand(batch, slots)[..., None] >> bits) & 1).bool()
    if window > 0:
        seen_context = seen_context & (query[..., None] - held[:, None] < window)
        seen_block = seen_block & ((depths[:, :, None] - depths[:, None]).abs() < window)
    seen = torch.cat([seen_context, seen_block], -1)[:, None, None]

    grouped = widened(q).view(batch, kv_heads, heads // kv_heads, slots, dim)
    keys = widened(torch.cat([k_cache, k_block], 2))[:, :, None]
    values = widened(torch.cat([v_cache, v_block], 2))[:, :, None]
    # Rows nobody may see can hold anything, NaN included: they must not reach the products.
    used = seen.any(-2).unsqueeze(-1)
    keys, values = keys.masked_fill(~used, 0), values.masked_fill(~used, 0)
    scores = (grouped @ keys.transpose(-1, -2) * scale).masked_fill(~seen, -torch.inf)
    weights = torch.softmax(scores, -1).nan_to_num(0.0)
    out = weights @ values
    return out.reshape(batch, heads, slots, dim).to(q.dtype)
