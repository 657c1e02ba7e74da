"""The cache of a target on ONNX Runtime: buffers that the graph writes into, and how much of them is committed."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np

from .draft_cache import grown


class BufferCache:
    """Keys and values of one sequence.

    Attributes:
        length: Committed positions.
        open: Slots of a verified block behind them that wait for `commit`.
    """

    def __init__(self, layers: int, num_kv_heads: int, head_dim: int) -> None:
        self.length, self.open = 0, 0
        self._arrays = [np.zeros((1, num_kv_heads, 0, head_dim), np.float32) for _ in range(2 * layers)]
        self.names = [f"{layer}.{name}" for layer in range(layers) for name in "kv"]
        self.values: list[Any] = []

    def reserve(self, positions: int) -> None:
        """Buffers for that many positions."""
        if positions > self._arrays[0].shape[2]:
            self._hold([grown(array, positions, self.length) for array in self._arrays])

    def __deepcopy__(self, memo: dict[int, Any]) -> BufferCache:
        made = copy.copy(self)
        made._hold([array.copy() for array in self._arrays])
        return made

    def _hold(self, arrays: list[Any]) -> None:
        from onnxruntime import OrtValue

        self._arrays, self.values = arrays, [OrtValue.ortvalue_from_numpy(array) for array in arrays]  # one memory

    def advance(self, rows: int) -> None:
        """Commit the first `rows` slots of the open block; fewer than none go back."""
        self.length, self.open = self.length + rows, 0

    def commit(self, slots: list[int]) -> None:
        """Keep these slots of the open block, in order, and forget the others."""
        if slots != [*range(len(slots))]:
            index = self.length + np.array(slots)
            for array in self._arrays:
                array[:, :, self.length : self.length + len(slots)] = array[:, :, index]
        self.advance(len(slots))
