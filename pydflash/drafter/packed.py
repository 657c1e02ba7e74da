"""A drafter on a CPU, in few calls and with packed weights."""

from __future__ import annotations

import torch
from torch import Tensor

from ..decoder.formats import Packed, mark_of
from ..decoder.stack import Projection
from ..decoder.stores import KVCache
from .decoder import DrafterDecoder, decoder_of
from .module import Drafter


class PackedDrafter(Drafter):
    """The parameters of another drafter, as they are when a request begins; without gradients, for inference alone."""

    _kind: type[Packed]
    _mark: tuple[object, ...]
    _layers: DrafterDecoder
    _context: tuple[Projection, Tensor]

    @classmethod
    def of(cls, drafter: Drafter, kind: type[Packed]) -> PackedDrafter | None:
        """None where a linear layer is not a plain one."""
        if decoder_of(drafter.config, drafter.stack, drafter.norm.weight, drafter.fc) is None:
            return None
        packed = cls.__new__(cls)
        packed.__dict__.update(drafter.__dict__)
        packed._kind, packed._mark = kind, ()
        packed._refresh()
        return packed

    def _refresh(self) -> None:
        """Pack anew what has changed. Parameters made in inference mode do not tell whether they have."""
        held = list(self.parameters())
        mark = tuple(map(mark_of, held))
        if mark == self._mark and not any(p.is_inference() for p in held):
            return
        with torch.no_grad():
            decoder = decoder_of(self.config, self.stack, self.norm.weight, self.fc)
            if decoder is None:
                raise ValueError(
                    "Drafter: its linear layers must stay plain ones while a Speculator holds it, got others"
                )
            decoder.pack(self._kind)
            projection, norms = super()._context_projection()
            self._mark, self._layers, self._context = mark, decoder, (projection.pack(self._kind), norms)

    def new_cache(self, batch: int, capacity: int) -> KVCache:
        self._refresh()
        return super().new_cache(batch, capacity)

    def derived(self) -> tuple[object, object]:
        self._refresh()
        return self._layers, self._context

    def decoder(self) -> DrafterDecoder | None:
        return None if torch.is_grad_enabled() else self._layers

    def _context_projection(self) -> tuple[Projection, Tensor]:
        return self._context
