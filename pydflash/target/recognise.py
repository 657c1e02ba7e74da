"""Recognisers: which record a module of a transformers model is, by structure and by numbers.

One for each kind of mixer and of MLP, listed in MIXERS and MLPS by the name that the module has in its layer. It gives
the record, or None where the module has other parts, or raises UnknownForm where it has these but does otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

from ..decoder.linear import Projection
from ..decoder.records import MLP, Attention, GatedMLP, Layer, Mixer, Residual
from .modules import Facts, UnknownForm, is_plain, linears_of, norm_of, parts_of, projection_of, unknown
from .recognise_delta import APART, gated_delta_of

_Found = TypeVar("_Found", Mixer, MLP)

QKV = ("q_proj", "k_proj", "v_proj", "qkv_proj")
INPUTS = (*QKV, *APART)  # what a mixer reads its input with, side by side
GATE_UP = ("gate_proj", "up_proj", "gate_up_proj")
_NORMS = ("input_layernorm", "post_attention_layernorm")
_ATTENTION = ({"q_proj", "k_proj", "v_proj", "o_proj"}, {"qkv_proj", "o_proj"})
_GATED = ({"gate_proj", "up_proj", "down_proj"}, {"gate_up_proj", "down_proj"})


class LayerModules(NamedTuple):
    """Where the parts of a recognised layer are in the model."""

    layer: Any
    mixer_norm: Any
    mixer: Any
    mlp_norm: Any
    mlp: Any


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
    qkv = projection_of(linears_of(module, QKV), [heads * dim, kv_heads * dim, kv_heads * dim])
    gate = None
    if len(qkv.weights[0]) == 2 * heads * dim:
        qkv, gate = _without_gate(qkv, heads, dim)
    return Attention(
        qkv,
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
        gate=gate,
    )


def _without_gate(qkv: Projection, heads: int, dim: int) -> tuple[Projection, Projection]:
    """The projection of queries, keys and values, and that of the gate, of one whose heads have both side by side."""

    def half(x: Tensor, j: int) -> Tensor:
        return x.unflatten(0, (heads, 2, dim))[:, j].flatten(0, 1)

    weight, bias = qkv.weights[0], qkv.biases[0]
    q, gate = ((half(weight, j), None if bias is None else half(bias, j)) for j in (0, 1))
    return (
        Projection((q[0], *qkv.weights[1:]), (q[1], *qkv.biases[1:])),
        Projection((gate[0],), (gate[1],)),
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


MIXERS: dict[str, tuple[_Recogniser[Mixer], ...]] = {"self_attn": (attention_of,), "linear_attn": (gated_delta_of,)}
MLPS: dict[str, tuple[_Recogniser[MLP], ...]] = {"mlp": (gated_mlp_of,)}
