"""The fused ops in plain torch: the definition, and the oracle of the tests.

The functions have the names and arguments of `pydflash.fused`. They compute in float32, or in float64 where the
inputs are float64, and round where a module of its own would have written its output.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _normed(x: Tensor, weight: Tensor, eps: float, weight_offset: float, round_first: bool) -> Tensor:
    wide = _wide(x)
    y = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if round_first:
        y = _wide(y.to(x.dtype))
    return (y * (_wide(weight) + weight_offset)).to(x.dtype)


def add_rms_norm(
    x: Tensor,
    delta: Tensor | None,
    weight: Tensor,
    eps: float,
    weight_offset: float = 0.0,
    round_first: bool = True,
) -> tuple[Tensor, Tensor]:
    """RMSNorm of x + delta, and the sum; see `pydflash.fused.add_rms_norm`."""
    total = x if delta is None else (_wide(x) + _wide(delta)).to(x.dtype)
    return _normed(total, weight, eps, weight_offset, round_first), total


def swiglu(x: Tensor) -> Tensor:
    """silu of the first half of each row times the second; see `pydflash.fused.swiglu`."""
    gate, factor = x.chunk(2, -1)
    return F.silu(gate) * factor


def packed_linear(
    x: Tensor, weight: Tensor, scales: Tensor | None, bias: Tensor | None, out_features: int, format: str
) -> Tensor:
    """A linear layer from a weight in panels; see `pydflash.fused.packed_linear`."""
    panels, steps, halves, words, outputs, inputs = weight.shape
    rows = weight.permute(0, 2, 4, 1, 3, 5).reshape(panels * halves * outputs, steps * words * inputs)
    plain, wide = _wide(rows[:out_features, : x.shape[1]]), _wide(x)
    if scales is None or format != "int8":
        y = wide @ plain.to(wide.dtype).t()
    else:
        largest = wide.abs().amax(1, keepdim=True).clamp_min(1e-30)
        whole = (wide * 127 / largest).round()
        y = (whole.double() @ plain.double().t()).to(wide.dtype) * (largest / 127) * scales
    return (y if bias is None else y + _wide(bias)).to(x.dtype)


def skinny_linear(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None] | None = None,
    gated: bool = False,
) -> Tensor:
    """Up to three linear layers side by side, or gated; see `pydflash.fused.skinny_linear`."""
    held = [None] * len(weights) if biases is None else biases
    parts = []
    for weight, bias in zip(weights, held, strict=True):
        part = _wide(x) @ _wide(weight).t()
        parts.append((part if bias is None else part + _wide(bias)).to(x.dtype))
    return F.silu(parts[0]) * parts[1] if gated else torch.cat(parts, -1)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, rotary_dim: int, interleaved: bool) -> Tensor:
    """x [..., D] with its first rotary_dim channels turned by the tables' rows at `positions` (broadcast)."""
    rows = positions.clamp(0, cos.shape[0] - 1)
    wide, cos, sin = _wide(x[..., :rotary_dim]), cos[rows], sin[rows]
    a, b = (wide[..., 0::2], wide[..., 1::2]) if interleaved else wide.chunk(2, -1)
    pair = (a * cos - b * sin, b * cos + a * sin)
    turned = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
    return torch.cat((turned.to(x.dtype), x[..., rotary_dim:]), -1)


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
    """Norm and rotation of a projection's heads; see `pydflash.fused.head_norm_rope`."""
    kv_heads, dim = k_block.shape[1], k_block.shape[3]
    q, k, v = qkv.unflatten(-1, (-1, dim)).transpose(1, 2).split((num_heads, kv_heads, kv_heads), 1)
    if q_weight is not None:
        q = _normed(q, q_weight, eps, weight_offset, round_first)
    if k_weight is not None:
        k = _normed(k, k_weight, eps, weight_offset, round_first)
    positions = (lengths.long()[:, None] + depths)[:, None]
    k_block.copy_(_rotated(k, cos, sin, positions, rotary_dim, interleaved))
    v_block.copy_(v)
    return _rotated(q, cos, sin, positions, rotary_dim, interleaved).contiguous()


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
    """Keys and values of context rows, in place; see `pydflash.fused.context_append`."""
    layers, _, heads, capacity, dim = k_cache.shape
    k, v = kv.unflatten(-1, (layers, 2, heads, dim)).permute(3, 2, 0, 4, 1, 5)  # [2, layers, B, Hkv, C, D]
    if k_weights is not None:
        k = _normed(k, k_weights[:, None, None, None], eps, weight_offset, round_first)
    entry = torch.arange(kv.shape[1], device=kv.device)
    positions = lengths.long()[:, None] + entry
    k = _rotated(k, cos, sin, positions[:, None], rotary_dim, interleaved)
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
    """What follows `reject_sample` in a round, in place; see `pydflash.fused.round_commit`."""
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
