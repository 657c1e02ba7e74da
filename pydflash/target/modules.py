"""What recognisers read off a transformers model's modules: their parts, their weights as projections, their norms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn

from ..decoder.linear import Projection
from ..decoder.records import LayerNorm, Norm, NormKind
from ..ops import reference


class UnknownForm(ValueError):
    """The layers are not of a known form; the message says what is different."""


class Rotary(NamedTuple):
    """A rotary table's channels, and whether neighbours in it are a pair."""

    dim: int
    interleaved: bool


@dataclass(slots=True)
class Facts:
    """What the recognisers are told of a model beside its modules.

    head_dim: Where an attention module does not say it. tables: The rotary tables. table_of: Which each layer reads.
    rotations: How, as in `LayerWiring`.
    windows: The sliding window of each layer, as its attention is told; 0 where it sees everything.
    kinds: Of the norms tried so far.
    """

    head_dim: int
    tables: Sequence[Rotary]
    table_of: Sequence[int]
    rotations: Sequence[str]
    windows: Mapping[int, int]
    kinds: dict[tuple[object, ...], NormKind | None] = field(default_factory=dict)


def unknown(expected: str, got: object) -> NoReturn:
    raise UnknownForm(f"{expected}, got {got}")


def parts_of(module: nn.Module) -> dict[str, Any]:
    """Children that have parameters."""
    return {name: child for name, child in module.named_children() if any(True for _ in child.parameters())}


def linears_of(module: nn.Module, names: tuple[str, ...]) -> list[Any]:
    parts = parts_of(module)
    return [parts[name] for name in names if name in parts]


def is_plain(linear: object) -> bool:
    return type(linear) is nn.Linear and not hasattr(linear.weight, "__tensor_flatten__")


def projection_of(linears: list[Any], sizes: list[int] | None = None, gated: bool = False) -> Projection:
    """Linear layers side by side; one that is several already is cut into rows of `sizes`, which are views."""
    for linear in linears:
        if not is_plain(linear):
            unknown("plain linear layers", type(linear).__name__)
    weights = [linear.weight.detach() for linear in linears]
    biases = [None if linear.bias is None else linear.bias.detach() for linear in linears]
    if sizes is not None and len(weights) < len(sizes):
        weights = list(weights[0].split(sizes))
        biases = [None] * len(sizes) if biases[0] is None else list(biases[0].split(sizes))
    return Projection(tuple(weights), tuple(biases), gated)


def norm_of(module: Any, facts: Facts) -> Norm | LayerNorm:
    """A module as a norm; which kind is tried once for all of its class, epsilon and size."""
    weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
    eps = next((e for name in ("variance_epsilon", "eps") if (e := getattr(module, name, None)) is not None), None)
    if not isinstance(weight, Tensor) or weight.dim() != 1 or eps is None:
        unknown("RMSNorm with a weight and an epsilon", type(module).__name__)
    key = (type(module), float(eps), len(weight))
    if key not in facts.kinds:
        facts.kinds[key] = _kind_of(module, weight, bias, float(eps))
    kind = facts.kinds[key]
    if kind is None:
        return LayerNorm(weight.detach(), None if bias is None else bias.detach(), float(eps))
    return Norm(weight.detach(), kind)


def rms_norm_of(module: Any, facts: Facts) -> Norm:
    """As `norm_of`, where a LayerNorm has no place."""
    norm = norm_of(module, facts)
    if not isinstance(norm, Norm):
        unknown("RMSNorm", type(module).__name__)
    return norm


def _kind_of(module: Any, weight: Tensor, bias: Tensor | None, eps: float) -> NormKind | None:
    """Which kind of RMSNorm a module computes, by trying; None for LayerNorm."""
    generator = torch.Generator().manual_seed(0)
    x = (torch.randn(4, len(weight), generator=generator) + 0.5).to(weight.device, weight.dtype)
    with torch.no_grad():
        want = module(x).float()
        kinds = [NormKind(eps, offset, first) for offset in (0.0, 1.0) for first in (True, False)]
        found = [LayerNorm(weight, bias, eps)(x)[0]]
        found += [reference.add_rms_norm(x, None, weight, *kind)[0] for kind in kinds if bias is None]
        errors = [(out.float() - want).abs().max().item() for out in found]
    best = min(range(len(errors)), key=errors.__getitem__)
    if not errors[best] <= 2e-2 * want.abs().max().item():
        unknown("RMSNorm", f"{type(module).__name__}, off by {errors[best]:.1e}")
    return kinds[best - 1] if best else None
