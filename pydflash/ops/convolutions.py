"""Convolutions inside a block."""

from __future__ import annotations

from torch import Tensor

from . import reference
from .native import capsule, module_for, rows
from .registry import register


@register(
    "block_conv(Tensor x, Tensor base, Tensor delta) -> Tensor",
    fake=lambda x, base, delta: x.new_empty(x.shape),
    reference=reference.block_conv,
)
def block_conv(x: Tensor, base: Tensor, delta: Tensor) -> Tensor:
    """Grouped dynamic depthwise causal convolution inside a block (DFlash 2).

    y[b,i,c] = sum over t of (base[t,c] + delta[b,i,t,c // (C / G)]) * x[b,i-t,c], with x before slot 0 zero:
    nothing crosses the block's start. Sums in float32, rounded once.

    Args:
        x: [B, S, C].
        base: [T, C], T in 1..8.
        delta: [B, S, T, G], G dividing C.

    Returns: [B, S, C].

    Raises: ValueError on shapes, dtypes or devices that do not fit.
    """
    module, stream, device = module_for("block_conv", x, base, delta)
    y = x.new_empty(x.shape)
    x, base, delta = rows(x), base.contiguous(), rows(delta)
    module.block_conv(*[capsule(t) for t in (x, base, delta, y)], stream, device)
    return y
