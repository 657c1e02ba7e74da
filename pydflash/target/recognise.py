"""Recognisers: which record a module of a transformers model is, by structure and by numbers.

One for each kind of mixer and of MLP, listed in MIXERS and MLPS by the name that the module has in its layer. It gives
the record, or None where the module has other parts, or raises UnknownForm where it has these but does otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from torch import Tensor

from ..decoder.linear import Projection
from ..decoder.records import MLP, Attention, Layer, Mixer, Residual
from .modules import Facts, UnknownForm, is_plain, linears_of, norm_of, parts_of, projection_of, rms_norm_of, unknown
from .recognise_delta import APART, gated_delta_of
from .recognise_experts import experts_of
from .recognise_mlp import gated_mlp_of

_Found = TypeVar("_Found", Mixer, MLP)

QKV = ("q_proj", "k_proj", "v_proj", "qkv_proj")
INPUTS = (*QKV, *APART)  # what a mixer reads its input with, side by side
_ATTENTION = ({"q_proj", "k_proj", "v_proj", "o_proj"}, {"qkv_proj", "o_proj"})


class LayerModules(NamedTuple):
    """Where the parts of a recognised layer are in the model."""

    layer: Any
    mixer: Any
    mlp: Any


class LayerWiring(NamedTuple):
    """Names of a layer's parts by what they do: x + scale * after(part(before(x))) for the mixer, then for the MLP.

    table: Which of the rotary tables its mixer is given. rotation: "given", as the table says; "neighbours", in pairs
    of neighbours though the table comes as two equal halves; or "none".
    parallel: Whether the MLP reads what the mixer reads.
    """

    mixer: str
    mixer_before: str | None
    mixer_after: str | None
    mlp: str
    mlp_before: str | None
    mlp_after: str | None
    scale: float = 1.0
    table: int = 0
    rotation: str = "given"
    parallel: bool = False


_Recogniser = Callable[[Any, int, Facts], "_Found | None"]


def layer_of(layer: Any, i: int, wiring: LayerWiring, facts: Facts) -> tuple[Layer, LayerModules]:
    """The record of decoder layer i, and its modules. Raises: UnknownForm."""

    def around(before: str | None, after: str | None) -> Residual:
        first, last = (None if name is None else norm_of(getattr(layer, name), facts) for name in (before, after))
        return Residual(first, last, wiring.scale)

    modules = LayerModules(layer, getattr(layer, wiring.mixer), getattr(layer, wiring.mlp))
    record = Layer(
        _one_of(MIXERS[wiring.mixer], modules.mixer, i, facts),
        _one_of(MLPS[wiring.mlp], modules.mlp, i, facts),
        around(wiring.mixer_before, wiring.mixer_after),
        around(wiring.mlp_before, wiring.mlp_after),
        wiring.parallel,
    )
    return record, modules


def _one_of(recognisers: tuple[_Recogniser[_Found], ...], module: Any, i: int, facts: Facts) -> _Found:
    for recognise in recognisers:
        if (found := recognise(module, i, facts)) is not None:
            return found
    raise UnknownForm(f"attention and MLP of the usual projections, got {', '.join(sorted(parts_of(module)))}")


def attention_of(module: Any, i: int, facts: Facts) -> Attention | None:
    dim, rotary = int(getattr(module, "head_dim", None) or facts.head_dim), facts.tables[facts.table_of[i]]
    parts = parts_of(module)
    norms = {name: parts.pop(name) for name in ("q_norm", "k_norm") if name in parts}
    if set(parts) not in _ATTENTION or len(norms) == 1:
        return None
    if dim % 8 or dim > 256:
        unknown("a head size that is a multiple of 8 up to 256", dim)
    heads, kv_heads = _heads_of(parts, dim)
    shapes = [tuple(getattr(norm.weight, "shape", ())) for norm in norms.values()]
    if norms and shapes not in ([(dim,)] * 2, [(heads * dim,), (kv_heads * dim,)]):
        unknown("norms of q and k per head or over all heads", shapes)
    q_norm, k_norm = (rms_norm_of(norms[name], facts) if norms else None for name in ("q_norm", "k_norm"))
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
        0 if facts.rotations[i] == "none" else rotary.dim,
        rotary.interleaved or facts.rotations[i] == "neighbours",
        float(getattr(module, "scaling", None) or dim**-0.5),
        q_norm,
        k_norm,
        facts.windows.get(i, 0),
        table=facts.table_of[i],
        gate=gate,
    )


def _heads_of(parts: dict[str, Any], dim: int) -> tuple[int, int]:
    """Heads of queries, and of keys and values, by the sizes of the projections."""
    if not all(is_plain(linear) for linear in parts.values()):
        return 0, 0  # which is refused by what makes a projection of them
    rows = parts["o_proj"].in_features
    values = parts["v_proj"].out_features if "v_proj" in parts else (parts["qkv_proj"].out_features - rows) // 2
    return rows // dim, values // dim


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


MIXERS: dict[str, tuple[_Recogniser[Mixer], ...]] = {"self_attn": (attention_of,), "linear_attn": (gated_delta_of,)}
MLPS: dict[str, tuple[_Recogniser[MLP], ...]] = {"mlp": (gated_mlp_of, experts_of)}
