"""Recognisers: which record a module of a transformers model is, by structure and by numbers.

One for each kind of mixer and of MLP, listed in MIXERS and MLPS by the name that the module has in its layer. It gives
the record, or None where the module has other parts, or raises UnknownForm where it has these but does otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..decoder.linear import Projection
from ..decoder.records import MLP, Attention, GatedMLP, Layer, Mixer, Norm, NormKind, Residual
from ..ops import reference

_Found = TypeVar("_Found", Mixer, MLP)

QKV = ("q_proj", "k_proj", "v_proj", "qkv_proj")
GATE_UP = ("gate_proj", "up_proj", "gate_up_proj")
_NORMS = ("input_layernorm", "post_attention_layernorm")
_ATTENTION = ({"q_proj", "k_proj", "v_proj", "o_proj"}, {"qkv_proj", "o_proj"})
_GATED = ({"gate_proj", "up_proj", "down_proj"}, {"gate_up_proj", "down_proj"})


class UnknownForm(ValueError):
    """The layers are not of a known form; the message says what is different."""


class LayerModules(NamedTuple):
    """Where the parts of a recognised layer are in the model."""

    layer: Any
    mixer_norm: Any
    mixer: Any
    mlp_norm: Any
    mlp: Any


@dataclass(slots=True)
class Facts:
    """What the recognisers are told of a model beside its modules.

    windows: The sliding window of each layer, as its attention is told; 0 where it sees everything.
    kinds: Of the norms tried so far.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    interleaved: bool
    windows: Mapping[int, int]
    kinds: dict[tuple[object, ...], NormKind] = field(default_factory=dict)


_Recogniser = Callable[[Any, int, Facts], "_Found | None"]


def names_of(layer: Any) -> tuple[str, str]:
    """What a layer's mixer and MLP are called. Raises: UnknownForm where it has other parts."""
    parts = set(parts_of(layer))
    mixers, mlps = parts & MIXERS.keys(), parts & MLPS.keys()
    if len(mixers) != 1 or len(mlps) != 1 or parts != {*mixers, *mlps, *_NORMS}:
        known = {*MIXERS, *MLPS, *_NORMS}
        unknown(f"layers of {', '.join(sorted(known))}", ", ".join(sorted(parts)))
    return mixers.pop(), mlps.pop()


def layer_of(layer: Any, i: int, facts: Facts) -> tuple[Layer, LayerModules]:
    """The record of decoder layer i, and its modules. Raises: UnknownForm."""
    mixer, mlp = names_of(layer)
    modules = LayerModules(layer, *(getattr(layer, name) for name in (_NORMS[0], mixer, _NORMS[1], mlp)))
    record = Layer(
        _one_of(MIXERS[mixer], modules.mixer, i, facts),
        _one_of(MLPS[mlp], modules.mlp, i, facts),
        Residual(norm_of(modules.mixer_norm, facts)),
        Residual(norm_of(modules.mlp_norm, facts)),
    )
    return record, modules


def _one_of(recognisers: tuple[_Recogniser[_Found], ...], module: Any, i: int, facts: Facts) -> _Found:
    for recognise in recognisers:
        if (found := recognise(module, i, facts)) is not None:
            return found
    raise UnknownForm(f"attention and MLP of the usual projections, got {', '.join(sorted(parts_of(module)))}")


def attention_of(module: Any, i: int, facts: Facts) -> Attention | None:
    heads, kv_heads, dim = facts.num_heads, facts.num_kv_heads, facts.head_dim
    parts = parts_of(module)
    norms = {name: parts.pop(name) for name in ("q_norm", "k_norm") if name in parts}
    if set(parts) not in _ATTENTION or len(norms) == 1:
        return None
    shapes = [tuple(getattr(norm.weight, "shape", ())) for norm in norms.values()]
    if any(shape != (dim,) for shape in shapes):
        unknown("norms of q and k per head", shapes)
    if getattr(module, "use_rope", True) in (False, 0):
        unknown("rotary positions in every layer", "a layer without")
    q_norm, k_norm = (norm_of(norms[name], facts) if norms else None for name in ("q_norm", "k_norm"))
    if q_norm is not None and k_norm is not None and q_norm.kind != k_norm.kind:
        unknown("norms of q and k of one kind", "two")
    return Attention(
        projection_of(linears_of(module, QKV), [heads * dim, kv_heads * dim, kv_heads * dim]),
        projection_of([parts["o_proj"]]),
        heads,
        kv_heads,
        dim,
        facts.rotary_dim,
        facts.interleaved,
        float(getattr(module, "scaling", None) or dim**-0.5),
        q_norm,
        k_norm,
        facts.windows.get(i, 0),
    )


def gated_mlp_of(module: Any, i: int, facts: Facts) -> GatedMLP | None:
    parts = parts_of(module)
    if set(parts) not in _GATED:
        return None
    activation = getattr(module, "act_fn", None) or getattr(module, "activation_fn", None)
    probe = torch.linspace(-3, 3, 7)
    if activation is None or not torch.allclose(activation(probe), F.silu(probe)):
        unknown("a gated SiLU", activation)
    gate_up = linears_of(module, GATE_UP)
    width = gate_up[0].out_features // (3 - len(gate_up)) if is_plain(gate_up[0]) else 0
    return GatedMLP(projection_of(gate_up, [width, width], gated=True), projection_of([parts["down_proj"]]))


MIXERS: dict[str, tuple[_Recogniser[Mixer], ...]] = {"self_attn": (attention_of,)}
MLPS: dict[str, tuple[_Recogniser[MLP], ...]] = {"mlp": (gated_mlp_of,)}


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


def norm_of(module: Any, facts: Facts) -> Norm:
    """A module as an RMSNorm; which kind is tried once for all of its class, epsilon and size."""
    weight = getattr(module, "weight", None)
    eps = next((e for name in ("variance_epsilon", "eps") if (e := getattr(module, name, None)) is not None), None)
    if not isinstance(weight, Tensor) or weight.dim() != 1 or eps is None:
        unknown("RMSNorm with a weight and an epsilon", type(module).__name__)
    key = (type(module), float(eps), len(weight))
    if key not in facts.kinds:
        facts.kinds[key] = _kind_of(module, weight, float(eps))
    return Norm(weight.detach(), facts.kinds[key])


def _kind_of(module: Any, weight: Tensor, eps: float) -> NormKind:
    """Which kind of RMSNorm a module computes, by trying."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, len(weight), generator=generator).to(weight.device, weight.dtype)
    with torch.no_grad():
        want = module(x).float()
        kinds = [NormKind(eps, offset, first) for offset in (0.0, 1.0) for first in (True, False)]
        errors = [
            (reference.add_rms_norm(x, None, weight, *kind)[0].float() - want).abs().max().item() for kind in kinds
        ]
    best = min(range(len(kinds)), key=errors.__getitem__)
    if not errors[best] <= 2e-2 * want.abs().max().item():
        unknown("RMSNorm", f"{type(module).__name__}, off by {errors[best]:.1e}")
    return kinds[best]
