"""Shared by the tests of the fused ops."""

from __future__ import annotations

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NARROW = (torch.bfloat16, torch.float16)
EPS = 1e-6


def normal(*shape: int, seed: int = 0) -> Tensor:
    """Values that all three dtypes hold exactly, in float64."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16().double()


def agreement(got: Tensor, want: Tensor) -> float:
    return (got.cpu() == want).double().mean().item()


def tables(positions: int, rotary_dim: int) -> tuple[Tensor, Tensor]:
    frequencies = 100.0 ** -(torch.arange(0, rotary_dim, 2) / max(rotary_dim, 1))
    angles = torch.arange(positions)[:, None] * frequencies + 0.5
    return angles.cos(), angles.sin()
