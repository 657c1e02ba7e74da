"""Linear layers that read the same input as one."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from .. import ops
from .adjacent import joined
from .formats import PackedLinear, WeightFormat


@dataclass(frozen=True, slots=True, eq=False)
class Projection:
    """One to three weights [N_i, K] that read the same input, with a bias or None each.

    Weights that follow each other in memory are one product; see `pydflash.decoder.adjacent`.
    """

    weights: tuple[Tensor, ...]
    biases: tuple[Tensor | None, ...]
    gated: bool = False  # silu(first) * second
    packed: PackedLinear | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """x [M, K] to [M, sum of N_i], or to [M, N_0] where gated."""
        if self.packed is not None:
            out = self.packed(x)
            return ops.swiglu(out) if self.gated else out
        if ops.takes_skinny(x, self.weights):
            return ops.skinny_linear(x, self.weights, self.biases, self.gated)
        if (one := self._joined()) is not None:
            out = F.linear(x, *one)
            return ops.swiglu(out) if self.gated else out
        parts = [F.linear(x, weight, bias) for weight, bias in zip(self.weights, self.biases, strict=True)]
        return F.silu(parts[0]) * parts[1] if self.gated else torch.cat(parts, -1)

    def pack(self, format: WeightFormat) -> Projection:
        """The same with a packed copy of its weights, as one."""
        return replace(self, packed=format.pack(self.weights, self.biases))

    def _joined(self) -> tuple[Tensor, Tensor | None] | None:
        """The weights as one [sum of N_i, K], and the biases, where they lie in memory that way."""
        weight = joined(self.weights)
        if weight is None or all(bias is None for bias in self.biases):
            return None if weight is None else (weight, None)
        held = [bias for bias in self.biases if bias is not None]
        bias = joined(held) if len(held) == len(self.weights) else None
        return None if bias is None else (weight, bias)
