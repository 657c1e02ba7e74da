"""Recognises decoder layers of the common pre-norm form in a transformers model, by structure and by numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..decoder.adjacent import lay_together
from ..decoder.formats import Packed
from ..decoder.stack import Decoder, LayerWeights, Norm, Projection
from ..ops import backends, reference_fused

if TYPE_CHECKING:
    from ..protocols import ModelTarget

_LAYER = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_ATTENTION = ({"q_proj", "k_proj", "v_proj", "o_proj"}, {"qkv_proj", "o_proj"})
_QKV = ("q_proj", "k_proj", "v_proj", "qkv_proj")
_GATE_UP = ("gate_proj", "up_proj", "gate_up_proj")
_MLP = ({"gate_proj", "up_proj", "down_proj"}, {"gate_up_proj", "down_proj"})


class UnknownForm(ValueError):
    """The layers are not of the common form; the message says what is different."""


class Head:
    """A target's head in few calls, called as its module is: hidden states [..., H] to logits [..., V]."""

    def __init__(self, projection: Projection) -> None:
        self.weight, self._projection = projection.weights[0], projection

    def __call__(self, hidden: Tensor) -> Tensor:
        return self._projection(hidden.flatten(0, -2)).unflatten(0, hidden.shape[:-1])


class Recognised:
    """A target's decoder with its embedding, its head and its rotary tables, sharing the model's own weights."""

    def __init__(self, target: ModelTarget, windows: dict[int, int]) -> None:
        """windows: the sliding window of each layer, as its attention is told; 0 where it sees everything."""
        config = target.facts.text_config
        self.target = target
        self.embed: nn.Module = target.model.get_input_embeddings()
        body = _body(target)
        self._rotary: Any = getattr(body, "rotary_emb", None)
        final = next((m for name in ("norm", "final_layernorm") if (m := getattr(body, name, None)) is not None), None)
        if not isinstance(self._rotary, nn.Module) or final is None:
            _unknown("a final norm and a rotary_emb beside the layers", [name for name, _ in body.named_children()])
        first: Any = target.layers[0]
        attention, heads = first.self_attn if hasattr(first, "self_attn") else None, config.num_attention_heads
        dim = getattr(attention, "head_dim", None) or getattr(config, "head_dim", None) or config.hidden_size // heads
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        self._windows, self._sizes = windows, (heads, kv_heads, dim)
        self._mark = _mark_of(target.model)
        layers = self._layers()
        norm = _norm_of(first.input_layernorm)
        q_norm = getattr(attention, "q_norm", None)
        self.final: nn.Module = final
        self._tables = self.tables_at(torch.arange(64, device=target.device)[None])
        self.decoder = Decoder(
            layers,
            heads,
            kv_heads,
            dim,
            2 * self._tables[0].shape[1],
            self._interleaved,
            float(getattr(attention, "scaling", None) or dim**-0.5),
            norm,
            norm if q_norm is None else _norm_of(q_norm),
            final.weight.detach(),
        )
        if _norm_of(final) != norm:
            _unknown("one kind of norm", "another one at the end")
        head = target.head
        self.head = _projection([head]) if _is_plain(head) and head.weight.dtype == target.dtype else None

    def _layers(self) -> list[LayerWeights]:
        return [_layer(layer, self._windows.get(i, 0), self._sizes) for i, layer in enumerate(self.target.layers)]

    def renewed(self) -> Recognised:
        """Itself, or another one where modules or tensors of the model have been exchanged since.

        Raises: UnknownForm where its layers are no longer of the common form.
        """
        return self if self._mark == _mark_of(self.target.model) else Recognised(self.target, self._windows)

    def join_weights(self) -> None:
        """Move the weights that read the same input to one place each, so that they are one product."""
        for layer in cast("list[Any]", self.target.layers):
            lay_together(_linears(layer.self_attn, _QKV))
            lay_together(_linears(layer.mlp, _GATE_UP))
        if (accelerator := backends.accelerator(self.target.device)) is not None:
            accelerator.empty_cache()  # the places that the weights left
        self.decoder.layers = self._layers()

    def pack(self, kind: type[Packed]) -> None:
        """Compute with packed copies of the weights, as they are now."""
        with torch.no_grad():
            self.decoder.pack(kind)
            if self.head is not None:
                self.head = self.head.pack(kind)

    @property
    def nbytes(self) -> int:
        """Bytes of the weights that `pack` copies."""
        projections = [p for x in self.decoder.layers for p in (x.qkv, x.output, x.gate_up, x.down)]
        held = [w for p in (*projections, *filter(None, [self.head])) for w in p.weights]
        return sum(weight.nbytes for weight in held)

    def tables(self, positions: int) -> tuple[Tensor, Tensor]:
        """cos and sin [at least `positions`, rotary_dim / 2] float32, as the model's own module gives them."""
        if len(self._tables[0]) < positions:
            size = 1 << (positions - 1).bit_length()
            self._tables = self.tables_at(torch.arange(size, device=self.target.device)[None])
        return self._tables

    def tables_at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """The rows of `tables` for positions [1, P]."""
        like = torch.zeros(1, dtype=self.target.dtype, device=self.target.device)
        with torch.no_grad():
            found = self._rotary(like, positions)
        if not isinstance(found, tuple) or len(found) != 2 or found[0].dim() != 3:
            _unknown("a rotary_emb that gives cos and sin", type(found).__name__)
        cos, sin = (x[0].float() for x in found)
        half = cos.shape[-1] // 2
        self._interleaved = torch.equal(cos[:, 0::2], cos[:, 1::2])
        if self._interleaved:
            return cos[:, 0::2].contiguous(), sin[:, 0::2].contiguous()
        if not torch.equal(cos[:, :half], cos[:, half:]):
            _unknown("rotary tables whose halves or neighbours are equal", "others")
        return cos[:, :half].contiguous(), sin[:, :half].contiguous()


def _body(target: ModelTarget) -> nn.Module:
    """The module that holds the list of layers."""
    for module in target.model.modules():
        if any(child is target.layers for child in module.children()):
            return module
    raise UnknownForm("layers inside the model")


def _mark_of(model: nn.Module) -> tuple[object, ...]:
    """Another one once a module or the memory of a parameter is another."""
    held = ((type(module), *filter(None, map(_place, module._parameters.values()))) for module in model.modules())
    return tuple(held)


def _place(parameter: Tensor | None) -> tuple[object, ...] | None:
    """Where a parameter lies; one that is several tensors, as quantised ones are, has no memory of its own."""
    if parameter is None:
        return None
    several = hasattr(parameter, "__tensor_flatten__")
    return id(parameter) if several else parameter.data_ptr(), parameter.dtype


def _unknown(expected: str, got: object) -> NoReturn:
    raise UnknownForm(f"{expected}, got {got}")


def _parts(module: nn.Module) -> dict[str, nn.Module]:
    """Children that have parameters."""
    return {name: child for name, child in module.named_children() if any(True for _ in child.parameters())}


def _linears(module: nn.Module, names: tuple[str, ...]) -> list[Any]:
    parts = _parts(module)
    return [parts[name] for name in names if name in parts]


def _is_plain(linear: object) -> bool:
    return type(linear) is nn.Linear and not hasattr(linear.weight, "__tensor_flatten__")


def _projection(linears: list[Any], sizes: list[int] | None = None, gated: bool = False) -> Projection:
    """Linear layers side by side; one that is several already is cut into rows of `sizes`, which are views."""
    for linear in linears:
        if not _is_plain(linear):
            _unknown("plain linear layers", type(linear).__name__)
    weights = [linear.weight.detach() for linear in linears]
    biases = [None if linear.bias is None else linear.bias.detach() for linear in linears]
    if sizes is not None and len(weights) < len(sizes):
        weights = list(weights[0].split(sizes))
        biases = [None] * len(sizes) if biases[0] is None else list(biases[0].split(sizes))
    return Projection(tuple(weights), tuple(biases), gated)


def _layer(layer: Any, window: int, sizes: tuple[int, int, int]) -> LayerWeights:
    heads, kv_heads, dim = sizes
    if (parts := set(_parts(layer))) != _LAYER:
        _unknown(f"layers of {', '.join(sorted(_LAYER))}", ", ".join(sorted(parts)))
    attention, mlp = _parts(layer.self_attn), _parts(layer.mlp)
    norms = {name: attention.pop(name) for name in ("q_norm", "k_norm") if name in attention}
    if set(attention) not in _ATTENTION or set(mlp) not in _MLP or len(norms) == 1:
        _unknown("attention and MLP of the usual projections", ", ".join(sorted({*attention, *mlp, *norms})))
    shapes = [tuple(getattr(norm.weight, "shape", ())) for norm in norms.values()]
    if any(shape != (dim,) for shape in shapes):
        _unknown("norms of q and k per head", shapes)
    activation = getattr(layer.mlp, "act_fn", None) or getattr(layer.mlp, "activation_fn", None)
    probe = torch.linspace(-3, 3, 7)
    if activation is None or not torch.allclose(activation(probe), F.silu(probe)):
        _unknown("a gated SiLU", activation)
    if getattr(layer.self_attn, "use_rope", True) in (False, 0):
        _unknown("rotary positions in every layer", "a layer without")
    qkv, gate_up = _linears(layer.self_attn, _QKV), _linears(layer.mlp, _GATE_UP)
    width = gate_up[0].out_features // (3 - len(gate_up)) if _is_plain(gate_up[0]) else 0
    return LayerWeights(
        layer.input_layernorm.weight.detach(),
        _projection(qkv, [heads * dim, kv_heads * dim, kv_heads * dim]),
        layer.self_attn.q_norm.weight.detach() if norms else None,
        layer.self_attn.k_norm.weight.detach() if norms else None,
        _projection([attention["o_proj"]]),
        layer.post_attention_layernorm.weight.detach(),
        _projection(gate_up, [width, width], gated=True),
        _projection([mlp["down_proj"]]),
        window,
    )


def _norm_of(module: Any) -> Norm:
    """Which kind of RMSNorm a module computes, by trying."""
    weight = getattr(module, "weight", None)
    eps = next((e for name in ("variance_epsilon", "eps") if (e := getattr(module, name, None)) is not None), None)
    if not isinstance(weight, Tensor) or weight.dim() != 1 or eps is None:
        _unknown("RMSNorm with a weight and an epsilon", type(module).__name__)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, len(weight), generator=generator).to(weight.device, weight.dtype)
    with torch.no_grad():
        want = module(x).float()
        kinds = [Norm(float(eps), offset, first) for offset in (0.0, 1.0) for first in (True, False)]
        errors = [
            (reference_fused.add_rms_norm(x, None, weight, *_options(kind))[0].float() - want).abs().max().item()
            for kind in kinds
        ]
    best = min(range(len(kinds)), key=errors.__getitem__)
    if not errors[best] <= 2e-2 * want.abs().max().item():
        _unknown("RMSNorm", f"{type(module).__name__}, off by {errors[best]:.1e}")
    return kinds[best]


def _options(kind: Norm) -> tuple[float, float, bool]:
    return kind.eps, kind.weight_offset, kind.round_first
