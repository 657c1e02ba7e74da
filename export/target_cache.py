"""The cache of a target on ONNX Runtime: buffers that the graph writes into, and how much of them is committed."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
BUCKET = 128  # rows by which a buffer grows: what attention costs follows its size


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
        from onnxruntime import OrtValue

        rows = -(-positions // BUCKET) * BUCKET
        if rows <= self._arrays[0].shape[2]:
            return
        grown = []
        for array in self._arrays:
            buffer = np.zeros((*array.shape[:2], rows, array.shape[3]), np.float32)
            buffer[:, :, : self.length] = array[:, :, : self.length]
            grown.append(buffer)
        self._arrays = grown
        self.values = [OrtValue.ortvalue_from_numpy(array) for array in grown]  # they share the arrays' memory

    def commit(self, slots: list[int]) -> None:
        """Keep these slots of the open block, in order, and forget the others."""
        if slots != [*range(len(slots))]:
            index = self.length + np.array(slots)
            for array in self._arrays:
                array[:, :, self.length : self.length + len(slots)] = array[:, :, index]
        self.length, self.open = self.length + len(slots), 0
