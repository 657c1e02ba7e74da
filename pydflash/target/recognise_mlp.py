"""The recogniser of gated MLPs."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from ..decoder.records import GatedMLP
from .modules import Facts, is_plain, linears_of, parts_of, projection_of, unknown

GATE_UP = ("gate_proj", "up_proj", "gate_up_proj")
_GATED = ({"gate_proj", "up_proj", "down_proj"}, {"gate_up_proj", "down_proj"})


def gated_mlp_of(module: Any, i: int, facts: Facts) -> GatedMLP | None:
    parts = parts_of(module)
    if set(parts) not in _GATED:
        return None
    activation, gate_up = activation_of(module), linears_of(module, GATE_UP)
    width = gate_up[0].out_features // (3 - len(gate_up)) if is_plain(gate_up[0]) else 0
    both = projection_of(gate_up, [width, width], gated=activation == "silu")
    return GatedMLP(both, projection_of([parts["down_proj"]]), activation)


def activation_of(module: Any) -> str:
    """The activation of a gate, by trying. Raises: UnknownForm."""
    activation = getattr(module, "act_fn", None) or getattr(module, "activation_fn", None)
    probe = torch.linspace(-3, 3, 7)
    known = {"silu": F.silu(probe), "gelu_tanh": F.gelu(probe, approximate="tanh")}
    names = [] if activation is None else [name for name, y in known.items() if torch.allclose(activation(probe), y)]
    if not names:
        unknown("a gated SiLU or GELU(tanh)", activation)
    return names[0]
