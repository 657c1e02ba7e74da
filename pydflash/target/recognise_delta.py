"""The recogniser of Gated DeltaNet."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..decoder.delta import GatedDelta
from ..decoder.linear import Projection
from .modules import Facts, is_plain, parts_of, projection_of, unknown

_COMMON = {"conv1d", "norm", "out_proj"}
APART = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
_BY_HEADS = _COMMON | {"in_proj_qkvz", "in_proj_ba"}  # rows of each key head side by side
_SIZES = ("num_k_heads", "num_v_heads", "head_k_dim", "head_v_dim")


def gated_delta_of(module: Any, i: int, facts: Facts) -> GatedDelta | None:
    parts = parts_of(module)
    sizes = [getattr(module, name, None) for name in _SIZES]
    if set(parts) not in (_COMMON | set(APART), _BY_HEADS) or not all(isinstance(size, int) for size in sizes):
        return None
    key_heads, value_heads, key_dim, value_dim = (int(size or 0) for size in sizes)
    channels, conv = 2 * key_heads * key_dim + value_heads * value_dim, parts["conv1d"]
    if tuple(conv.weight.shape[:2]) != (channels, 1) or value_heads % key_heads:
        unknown(f"a convolution of {channels} channels, each alone", tuple(conv.weight.shape))
    if conv.weight.shape[2] not in range(2, 9):
        unknown("a convolution of 2 to 8 taps", conv.weight.shape[2])
    if {key_dim % 16, value_dim % 16} != {0} or max(key_dim, value_dim) > 256:
        unknown("heads of a recurrent layer whose sizes are multiples of 16 up to 256", (key_dim, value_dim))
    norm = parts["norm"]
    eps = getattr(norm, "variance_epsilon", None) or getattr(norm, "eps", None)
    if eps is None or tuple(getattr(norm.weight, "shape", ())) != (value_dim,):
        unknown("a gated norm per head with a weight and an epsilon", type(norm).__name__)
    if APART[0] in parts:
        inputs = projection_of([parts[name] for name in APART])
    else:
        inputs = _by_heads(parts, key_heads, value_heads, key_dim, value_dim)
    rows = sum(len(weight) for weight in inputs.weights)
    if rows != channels + value_heads * value_dim + 2 * value_heads:
        unknown("projections of the heads' sizes", [tuple(weight.shape) for weight in inputs.weights])
    return GatedDelta(
        inputs,
        projection_of([parts["out_proj"]]),
        conv.weight.detach()[:, 0].flip(1).t().contiguous(),
        None if conv.bias is None else conv.bias.detach(),
        module.A_log.detach().float(),
        module.dt_bias.detach().float(),
        norm.weight.detach(),
        float(eps),
        key_heads,
        value_heads,
        key_dim,
        value_dim,
    )


def _by_heads(parts: dict[str, Any], key_heads: int, value_heads: int, key_dim: int, value_dim: int) -> Projection:
    """Projections whose rows go by key heads, as copies in the order of the others."""
    group = value_heads // key_heads
    mixed, gates = parts["in_proj_qkvz"], parts["in_proj_ba"]
    for linear in (mixed, gates):
        if not is_plain(linear) or linear.bias is not None:
            unknown("plain linear layers without a bias", type(linear).__name__)
    qkvz = _sorted(mixed.weight, key_heads, [key_dim, key_dim, group * value_dim, group * value_dim])
    ba = _sorted(gates.weight, key_heads, [group, group])
    return Projection((qkvz, ba), (None, None))


def _sorted(weight: Tensor, key_heads: int, sizes: list[int]) -> Tensor:
    parts = weight.detach().unflatten(0, (key_heads, sum(sizes))).split(sizes, 1)
    return torch.cat([part.flatten(0, 1) for part in parts])
