"""Norms, rotations and gates in plain torch. They round where a module of its own would have written its output."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from .numbers import widened


def add_rms_norm(
    x: Tensor,
    delta: Tensor | None,
    weight: Tensor,
    eps: float,
    weight_offset: float = 0.0,
    round_first: bool = True,
) -> tuple[Tensor, Tensor]:
    """RMSNorm of x + delta, and the sum; see `pydflash.ops.add_rms_norm`."""
    total = x if delta is None else (widened(x) + widened(delta)).to(x.dtype)
    return normed(total, weight, eps, weight_offset, round_first), total


def swiglu(x: Tensor) -> Tensor:
    """silu of the first half of each row times the second; see `pydflash.ops.swiglu`."""
    gate, factor = x.chunk(2, -1)
    return F.silu(gate) * factor


def head_norm_rope(
    qkv: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    lengths: Tensor,
    depths: Tensor,
    k_block: Tensor,
    v_block: Tensor,
    num_heads: int,
    rotary_dim: int,
    interleaved: bool = False,
    weight_offset: float = 0.0,
    round_first: bool = True,
) -> Tensor:
    """Norm and rotation of a projection's heads; see `pydflash.ops.head_norm_rope`."""
    kv_heads, dim = k_block.shape[1], k_block.shape[3]
    q, k, v = qkv.unflatten(-1, (-1, dim)).transpose(1, 2).split((num_heads, kv_heads, kv_heads), 1)
    if q_weight is not None:
        q = normed(q, q_weight, eps, weight_offset, round_first)
    if k_weight is not None:
        k = normed(k, k_weight, eps, weight_offset, round_first)
    positions = (lengths.long()[:, None] + depths)[:, None]
    k_block.copy_(rotated(k, cos, sin, positions, rotary_dim, interleaved))
    v_block.copy_(v)
    return rotated(q, cos, sin, positions, rotary_dim, interleaved).contiguous()


def normed(x: Tensor, weight: Tensor, eps: float, weight_offset: float, round_first: bool) -> Tensor:
    wide = widened(x)
    y = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if round_first:
        y = widened(y.to(x.dtype))
    return (y * (widened(weight) + weight_offset)).to(x.dtype)


def rotated(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, rotary_dim: int, interleaved: bool) -> Tensor:
    """x [..., D] with its first rotary_dim channels turned by the tables' rows at `positions` (broadcast)."""
    rows = positions.clamp(0, cos.shape[0] - 1)
    wide, cos, sin = widened(x[..., :rotary_dim]), cos[rows], sin[rows]
    a, b = (wide[..., 0::2], wide[..., 1::2]) if interleaved else wide.chunk(2, -1)
    pair = (a * cos - b * sin, b * cos + a * sin)
    turned = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
    return torch.cat((turned.to(x.dtype), x[..., rotary_dim:]), -1)
