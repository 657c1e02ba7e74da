"""Gates and caps, element by element."""

from __future__ import annotations

from torch import Tensor

from . import reference
from .native import capsule, module_for, rows
from .registry import register

ACTIVATIONS = ("gelu_tanh", "sigmoid")


@register(
    "apply_gate(Tensor x, Tensor gate, str activation) -> Tensor",
    fake=lambda x, *_: x.new_empty(x.shape),
    reference=reference.apply_gate,
    backends=("cpu", "sycl"),
)
def apply_gate(x: Tensor, gate: Tensor, activation: str) -> Tensor:
    """x * activation(gate), the activation rounded before it is used; a value's bits depend on nothing beside it.

    Args:
        x, gate: [M, N].
        activation: "gelu_tanh" or "sigmoid".

    Returns: [M, N].

    Raises: ValueError on shapes, dtypes, devices or an activation that do not fit.
    """
    if activation not in ACTIVATIONS:
        raise ValueError(f"apply_gate: activation must be one of {', '.join(ACTIVATIONS)}, got {activation!r}")
    module, stream, device = module_for("apply_gate", x, gate)
    out = x.new_empty(x.shape)
    kind = ACTIVATIONS.index(activation)
    module.apply_gate(capsule(rows(x)), capsule(rows(gate)), kind, capsule(out), stream, device)
    return out


@register(
    "soft_cap(Tensor x, float cap) -> Tensor",
    fake=lambda x, cap: x.new_empty(x.shape),
    reference=reference.soft_cap,
    backends=("cpu", "sycl"),
)
def soft_cap(x: Tensor, cap: float) -> Tensor:
    """cap * tanh(x / cap), each step rounded; a value's bits depend on nothing beside it.

    Args:
        x: [M, N].
        cap: Above 0.

    Returns: [M, N].

    Raises: ValueError on shapes, dtypes, devices or a cap that do not fit.
    """
    module, stream, device = module_for("soft_cap", x)
    out = x.new_empty(x.shape)
    module.soft_cap(capsule(rows(x)), cap, capsule(out), stream, device)
    return out
