"""A drafter on a CPU, in few calls and with packed weights."""

from __future__ import annotations

import torch
from torch import Tensor

from ..decoder.fingerprints import Fingerprint
from ..decoder.formats import WeightFormat, choose, forget_shared
from ..decoder.linear import Projection
from ..decoder.stores import KVCache
from .decoder import DrafterDecoder, decoder_of
from .module import Drafter


class PackedDrafter(Drafter):
    """The parameters of another drafter, as they are when a request begins; without gradients, for inference alone."""

    _format: WeightFormat
    _packed_from: Fingerprint
    _layers: DrafterDecoder
    _context: tuple[Projection, Tensor]

    @classmethod
    def of(cls, drafter: Drafter, quantize: str | None = None) -> PackedDrafter | None:
        """quantize: A name of `formats.quantized()`, or None for weights as they are.

        Returns: None where weights are not packed, or a linear layer is not a plain one.
        """
        format = choose(list(drafter.parameters()), quantize, drafter.device)
        if (
            isinstance(format, str)
            or decoder_of(drafter.config, drafter.stack, drafter.norm.weight, drafter.fc) is None
        ):
            return None
        packed = cls.__new__(cls)
        packed.__dict__.update(drafter.__dict__)
        packed._format = format
        packed._pack()
        return packed

    def _pack(self) -> None:
        source = Fingerprint(self.parameters())
        with torch.no_grad():
            decoder = decoder_of(self.config, self.stack, self.norm.weight, self.fc)
            if decoder is None:
                raise ValueError(
                    "Drafter: its linear layers must stay plain ones while a Speculator holds it, got others"
                )
            decoder.pack(self._format)
            projection, norms = super()._context_projection()
            self._packed_from, self._layers = source, decoder
            self._context = projection.pack(self._format), norms

    def refresh(self) -> None:
        forget_shared()
        super().refresh()
        self._pack()

    def _renew(self) -> None:
        if self._packed_from.changed(list(self.parameters())):
            super()._renew()
            self._pack()

    def new_cache(self, batch: int, capacity: int) -> KVCache:
        self._renew()
        return super().new_cache(batch, capacity)

    def derived(self) -> tuple[object, object]:
        self._renew()
        return self._layers, self._context

    def decoder(self) -> DrafterDecoder | None:
        return None if torch.is_grad_enabled() else self._layers

    def _context_projection(self) -> tuple[Projection, Tensor]:
        return self._context
