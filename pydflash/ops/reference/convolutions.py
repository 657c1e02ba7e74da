"""Convolutions inside a block, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from .numbers import widened


def block_conv(x: Tensor, base: Tensor, delta: Tensor) -> Tensor:
    """Grouped dynamic depthwise causal convolution inside a block; see `pydflash.ops.block_conv`."""
    slots, channels = x.shape[1:]
    taps, groups = delta.shape[2:]
    weights = widened(base) + widened(delta).repeat_interleave(channels // groups, -1)
    shifted = [F.pad(widened(x), (0, 0, t, 0))[:, :slots] for t in range(taps)]
    return (weights * torch.stack(shifted, 2)).sum(2).to(x.dtype)
