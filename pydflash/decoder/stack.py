"""A stack of decoder layers: what the drafter and most targets have in common, in few launches.

It reads what its layers keep of committed positions, and writes the block into the open stores beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .block import BlockView, Forward, Table
from .formats import WeightFormat
from .program import Program
from .records import Layer, LayerNorm, Mixer, Norm
from .stores import Cache, KVShape


@dataclass(slots=True)
class Decoder:
    """Layers, and the norm behind the last.

    Attributes:
        program: The same layers as one call, once they are packed and where all of them have a compiled form.
        uncompiled: Why packed layers run record by record, or "".
    """

    layers: Sequence[Layer]
    final_norm: Norm | LayerNorm
    program: Program | None = None
    uncompiled: str = ""

    def pack(self, format: WeightFormat) -> None:
        """Compute with packed copies of the large weights, as they are now."""
        self.layers = [layer.pack(format) for layer in self.layers]
        found = Program.of(self.layers, self.final_norm)
        self.program, self.uncompiled = (None, found) if isinstance(found, str) else (found, "")

    @property
    def keeps_states(self) -> bool:
        """Whether a layer keeps more of a sequence than keys and values."""
        return not all(isinstance(layer.mixer.store, KVShape) for layer in self.layers)

    def new_cache(self, batch: int, capacity: int, *, dtype: torch.dtype, device: torch.device) -> Cache:
        """The stores of its layers for `batch` sequences of up to `capacity` positions."""
        return Cache([layer.mixer.store for layer in self.layers], batch, capacity, dtype=dtype, device=device)

    def __call__(
        self, x: Tensor, cache: Cache, tables: Sequence[Table], view: BlockView, taps: Collection[int] = ()
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """Final-normed hidden states [B, S, H] of x [B, S, H], and the residual stream after each tapped layer.

        cache: With an open block of S slots. tables: The rotary tables that the layers' mixers name.
        """
        if self.program is not None:
            return self.program(x.contiguous(), cache, tables, view, taps)
        forward = Forward(x.shape[0], x.shape[1], cache.lengths, view, tuple(tables))
        return self._run(x, taps, lambda i, mixer, u: mixer(u, cache.part(i), forward))

    def prefill(
        self, x: Tensor, cache: Cache, start: int, tables: Sequence[Table], taps: Collection[int] = ()
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """As a call, for x [1, P, H] at the positions from `start` on of the one row of a cache, which its length is.

        Any P; the length is the caller's to move.
        """
        size = x.shape[1]
        depths = torch.arange(size, dtype=torch.int32, device=x.device)[None]
        forward = Forward(1, size, cache.lengths, BlockView(depths[:, :0], depths), tuple(tables))
        return self._run(x, taps, lambda i, mixer, u: mixer.prefill(u, cache.prompt(i, start, size), forward))

    def _run(
        self, x: Tensor, taps: Collection[int], mix: Callable[[int, Mixer, Tensor], Tensor]
    ) -> tuple[Tensor, dict[int, Tensor]]:
        batch, slots, width = x.shape
        taken: dict[int, Tensor] = {}
        x, y = x.flatten(0, 1), None
        for i, layer in enumerate(self.layers):
            u, x, deltas = layer.around_mixer.enter(x, y, slots)
            if i - 1 in taps:
                taken[i - 1] = x.view(batch, slots, width)
            y = layer.around_mixer.leave(mix(i, layer.mixer, u), deltas)
            if layer.parallel:
                x = x + y
            else:
                u, x, deltas = layer.around_mlp.enter(x, y, slots)
            y = layer.around_mlp.leave(layer.mlp(u), deltas)
        u, x = self.final_norm(x, y)
        if len(self.layers) - 1 in taps:
            taken[len(self.layers) - 1] = x.view(batch, slots, width)
        return u.view(batch, slots, width), taken
