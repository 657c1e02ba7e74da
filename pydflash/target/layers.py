"""A transformers model whose decoder layers are recognised, as a decoder of records that shares its weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..decoder.adjacent import lay_together
from ..decoder.block import Table
from ..decoder.fingerprints import Fingerprint
from ..decoder.formats import WeightFormat
from ..decoder.linear import Projection
from ..decoder.records import Layer
from ..decoder.stack import Decoder
from ..ops import backends
from .modules import Facts, Rotary, is_plain, linears_of, norm_of, projection_of, unknown
from .recognise import INPUTS, LayerModules, layer_of
from .recognise_mlp import GATE_UP
from .tracing import Wiring, body_of, names_of

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

    def __init__(self, target: ModelTarget, windows: dict[int, int], wiring: Wiring) -> None:
        """windows: the sliding window of each layer, as its attention is told; 0 where it sees everything."""
        config = target.facts.text_config
        self.target, self.wiring = target, wiring
        self._embed: nn.Module = target.model.get_input_embeddings()
        body = dict(body_of(target).named_modules())
        if missing := [n for n in (wiring.final, *(call.name for call in wiring.tables)) if n not in body]:
            unknown("modules beside the layers that it had before", f"none called {missing[0]}")
        self._rotary: list[Any] = [body[call.name] for call in wiring.tables]
        self._source, self._classes = Fingerprint(self._tensors()), self._module_classes()
        positions = torch.arange(64, device=target.device)[None]
        found_tables = [self._rows(i, positions) for i in range(len(wiring.tables))]
        self._tables = [table for table, _ in found_tables]
        rotary = [Rotary(2 * table[0].shape[1], interleaved) for table, interleaved in found_tables]
        dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        layers = wiring.layers
        tables, rotations = [layer.table for layer in layers], [layer.rotation for layer in layers]
        self._facts = Facts(dim, rotary, tables, rotations, windows)
        found = self._records()
        self.modules = [modules for _, modules in found]
        self.decoder = Decoder([record for record, _ in found], norm_of(body[wiring.final], self._facts))
        head = target.head
        self.head = projection_of([head]) if is_plain(head) and head.weight.dtype == target.dtype else None

    def _records(self) -> list[tuple[Layer, LayerModules]]:
        layers, wiring = self.target.layers, self.wiring.layers
        if len(layers) != len(wiring) or any(
            names_of(layer)[:2] != (its.mixer, its.mlp) for layer, its in zip(layers, wiring, strict=True)
        ):
            unknown("the layers that it had before", "others")
        return [layer_of(layer, i, wiring[i], self._facts) for i, layer in enumerate(layers)]

    def embed(self, tokens: Tensor) -> Tensor:
        """What goes into the first layer [B, S, H]."""
        x: Tensor = self._embed(tokens)
        return x if self.wiring.embed_scale == 1 else x * self.wiring.embed_scale

    def _tensors(self) -> list[Tensor]:
        """All of which something here is a copy or a view."""
        return [*self.target.model.parameters(), *(x for module in self._rotary for x in module.buffers())]

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
        self.decoder.layers = [record for record, _ in self._records()]

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

    def tables(self, positions: int) -> tuple[Table, ...]:
        """cos and sin [at least `positions`, rotary_dim / 2] float32 of each table, as the model's own modules do."""
        if self._tables and len(self._tables[0][0]) < positions:
            size = 1 << (positions - 1).bit_length()
            self._tables = list(self.tables_at(torch.arange(size, device=self.target.device)[None]))
        return tuple(self._tables)

    def tables_at(self, positions: Tensor) -> tuple[Table, ...]:
        """The rows of `tables` for positions [1, P]."""
        return tuple(self._rows(i, positions)[0] for i in range(len(self._rotary)))

    def _rows(self, i: int, positions: Tensor) -> tuple[Table, bool]:
        """Rows of the i-th rotary table, and whether neighbouring channels are a pair."""
        like = torch.zeros(1, dtype=self.target.dtype, device=self.target.device)
        call = self.wiring.tables[i]
        with torch.no_grad():
            found = self._rotary[i](like, positions, *call.extra, **dict(call.named))
        if not isinstance(found, tuple) or len(found) != 2 or found[0].dim() != 3:
            unknown("a rotary_emb that gives cos and sin", type(found).__name__)
        cos, sin = (x[0].float() for x in found)
        half = cos.shape[-1] // 2
        if torch.equal(cos[:, 0::2], cos[:, 1::2]):
            return (cos[:, 0::2].contiguous(), sin[:, 0::2].contiguous()), True
        if not torch.equal(cos[:, :half], cos[:, half:]):
            unknown("rotary tables whose halves or neighbours are equal", "others")
        return (cos[:, :half].contiguous(), sin[:, :half].contiguous()), False
