"""Linear layers in plain torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from .numbers import widened


def skinny_linear(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None] | None = None,
    gated: bool = False,
) -> Tensor:
    """Up to three linear layers side by side, or gated; see `pydflash.ops.skinny_linear`."""
    held = [None] * len(weights) if biases is None else biases
    parts = []
    for weight, bias in zip(weights, held, strict=True):
        part = widened(x) @ widened(weight).t()
        parts.append((part if bias is None else part + widened(bias)).to(x.dtype))
    return F.silu(parts[0]) * parts[1] if gated else torch.cat(parts, -1)


def packed_linear(
    x: Tensor, weight: Tensor, scales: Tensor | None, bias: Tensor | None, out_features: int, format: str
) -> Tensor:
    """A linear layer from a weight in panels; see `pydflash.ops.packed_linear`."""
    panels, steps, halves, words, outputs, inputs = weight.shape
    rows = weight.permute(0, 2, 4, 1, 3, 5).reshape(panels * halves * outputs, steps * words * inputs)
    plain, wide = widened(rows[:out_features, : x.shape[1]]), widened(x)
    if scales is None or format != "int8":
        y = wide @ plain.to(wide.dtype).t()
    else:
        largest = wide.abs().amax(1, keepdim=True).clamp_min(1e-30)
        whole = (wide * 127 / largest).round()
        y = (whole.double() @ plain.double().t()).to(wide.dtype) * (largest / 127) * scales
    return (y if bias is None else y + widened(bias)).to(x.dtype)
