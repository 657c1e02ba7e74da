"""Gates and caps in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def apply_gate(x: Tensor, gate: Tensor, activation: str) -> Tensor:
    """x times the activation of a gate; see `pydflash.ops.apply_gate`."""
    return x * (gate.sigmoid() if activation == "sigmoid" else F.gelu(gate, approximate="tanh"))


def soft_cap(x: Tensor, cap: float) -> Tensor:
    """Values brought below a cap; see `pydflash.ops.soft_cap`."""
    return torch.tanh(x / cap) * cap
