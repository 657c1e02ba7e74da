"""A transformers model whose decoder layers are recognised, as a decoder of records that shares its weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from ..decoder.adjacent import lay_together
from ..decoder.fingerprints import Fingerprint
from ..decoder.formats import WeightFormat
from ..decoder.linear import Projection
from ..decoder.stack import Decoder
from ..ops import backends
from .modules import Facts, UnknownForm, is_plain, linears_of, norm_of, projection_of, unknown
from .recognise import GATE_UP, INPUTS, layer_of, names_of

if TYPE_CHECKING:
    from ..protocols import ModelTarget


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
        self.target, self._windows = target, windows
        self.embed: nn.Module = target.model.get_input_embeddings()
        body = _body(target)
        self._rotary: Any = getattr(body, "rotary_emb", None)
        final = next((m for name in ("norm", "final_layernorm") if (m := getattr(body, name, None)) is not None), None)
        if not isinstance(self._rotary, nn.Module) or final is None:
            unknown("a final norm and a rotary_emb beside the layers", [name for name, _ in body.named_children()])
        self.final: nn.Module = final
        self._source, self._classes = Fingerprint(self._tensors()), self._module_classes()
        for layer in target.layers:
            names_of(layer)
        first: Any = target.layers[0]
        attention, heads = first.self_attn if hasattr(first, "self_attn") else None, config.num_attention_heads
        dim = getattr(attention, "head_dim", None) or getattr(config, "head_dim", None) or config.hidden_size // heads
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        self._table, interleaved = self._rows(torch.arange(64, device=target.device)[None])
        self._facts = Facts(heads, kv_heads, dim, 2 * self._table[0].shape[1], interleaved, windows)
        found = [layer_of(layer, i, self._facts) for i, layer in enumerate(target.layers)]
        self.modules = [modules for _, modules in found]
        self.decoder = Decoder([record for record, _ in found], norm_of(final, self._facts))
        head = target.head
        self.head = projection_of([head]) if is_plain(head) and head.weight.dtype == target.dtype else None

    def _tensors(self) -> list[Tensor]:
        """All of which something here is a copy or a view."""
        return [*self.target.model.parameters(), *self._rotary.buffers()]

    def _module_classes(self) -> tuple[type, ...]:
        return tuple(map(type, self.target.model.modules()))

    def changed(self) -> bool:
        """Whether modules, weights or the tensors behind the rotary tables have changed since."""
        return self._classes != self._module_classes() or self._source.changed(self._tensors())

    def join_weights(self) -> None:
        """Move the weights that read the same input to one place each, so that they are one product."""
        for layer in self.modules:
            for module, names in ((layer.mixer, INPUTS), (layer.mlp, GATE_UP)):
                if linears := linears_of(module, names):
                    lay_together(linears)
        if (accelerator := backends.accelerator(self.target.device)) is not None:
            accelerator.empty_cache()  # the places that the weights left
        self._source = Fingerprint(self._tensors())
        self.decoder.layers = [layer_of(layer, i, self._facts)[0] for i, layer in enumerate(self.target.layers)]

    def pack(self, format: WeightFormat) -> None:
        """Compute with packed copies of the weights, as they are now."""
        with torch.no_grad():
            self.decoder.pack(format)
            if self.head is not None:
                self.head = self.head.pack(format)

    def weights(self) -> list[Tensor]:
        """Those that `pack` copies."""
        held = [weight for layer in self.decoder.layers for weight in layer.weights()]
        return held if self.head is None else [*held, *self.head.weights]

    def tables(self, positions: int) -> tuple[tuple[Tensor, Tensor]]:
        """cos and sin [at least `positions`, rotary_dim / 2] float32, as the model's own module gives them."""
        if len(self._table[0]) < positions:
            size = 1 << (positions - 1).bit_length()
            self._table = self._rows(torch.arange(size, device=self.target.device)[None])[0]
        return (self._table,)

    def tables_at(self, positions: Tensor) -> tuple[tuple[Tensor, Tensor]]:
        """The rows of `tables` for positions [1, P]."""
        return (self._rows(positions)[0],)

    def _rows(self, positions: Tensor) -> tuple[tuple[Tensor, Tensor], bool]:
        """A rotary table's rows, and whether neighbouring channels are a pair."""
        like = torch.zeros(1, dtype=self.target.dtype, device=self.target.device)
        with torch.no_grad():
            found = self._rotary(like, positions)
        if not isinstance(found, tuple) or len(found) != 2 or found[0].dim() != 3:
            unknown("a rotary_emb that gives cos and sin", type(found).__name__)
        cos, sin = (x[0].float() for x in found)
        half = cos.shape[-1] // 2
        if torch.equal(cos[:, 0::2], cos[:, 1::2]):
            return (cos[:, 0::2].contiguous(), sin[:, 0::2].contiguous()), True
        if not torch.equal(cos[:, :half], cos[:, half:]):
            unknown("rotary tables whose halves or neighbours are equal", "others")
        return (cos[:, :half].contiguous(), sin[:, :half].contiguous()), False


def _body(target: ModelTarget) -> nn.Module:
    """The module that holds the list of layers."""
    for module in target.model.modules():
        if any(child is target.layers for child in module.children()):
            return cast("nn.Module", module)
    raise UnknownForm("layers inside the model")
