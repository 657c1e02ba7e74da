"""A drafter on a CPU, in few calls and with packed weights."""

from __future__ import annotations

import torch
from torch import Tensor

from .decoder import Projection
from .drafter import Drafter
from .drafter_decoder import DrafterDecoder, decoder_of
from .packed import Packed


class PackedDrafter(Drafter):
    """The parameters of another drafter, as they were when this was made; without gradients, for inference alone."""

    _layers: DrafterDecoder
    _context: tuple[Projection, Tensor]

    @classmethod
    def of(cls, drafter: Drafter, kind: type[Packed]) -> PackedDrafter | None:
        """None where a linear layer is not a plain one."""
        with torch.no_grad():
            decoder = decoder_of(drafter.config, drafter.stack, drafter.norm.weight, drafter.fc)
            if decoder is None:
                return None
            decoder.pack(kind)
            projection, norms = drafter._context_projection()
            packed = cls.__new__(cls)
            packed.__dict__.update(drafter.__dict__)
            packed._layers, packed._context = decoder, (projection.pack(kind), norms)
        return packed

    def decoder(self) -> DrafterDecoder | None:
        return None if torch.is_grad_enabled() else self._layers

    def _context_projection(self) -> tuple[Projection, Tensor]:
        return self._context
