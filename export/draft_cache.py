"""Context keys and values of the ONNX Runtime drafter, bound to its session, and features that wait to go in."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pydflash.checkpoints.config import DrafterConfig

from .metadata import POSITIONS

BUCKET = 128  # rows by which a buffer grows: what attention costs follows its size
_ON_CUDA = ("CUDAExecutionProvider", "TensorrtExecutionProvider")

Array = NDArray[Any]


def grown(buffer: Array, positions: int, held: int) -> Array:
    """A buffer for at least that many positions, with the first `held` rows of `buffer` [B, Hkv, rows, D]."""
    larger = np.zeros((*buffer.shape[:2], -(-positions // BUCKET) * BUCKET, buffer.shape[3]), buffer.dtype)
    larger[:, :, :held] = buffer[:, :, :held]
    return larger


class DraftCache:
    """The cache of `OnnxDrafter.new_cache`.

    Attributes:
        batch: Sequences.
        capacity: Positions a sequence may reach.
        length: Committed positions, the same number in each sequence: those in the cache and those that wait.
        held: Those in the cache.
    """

    def __init__(
        self, session: Any, config: DrafterConfig, batch: int, capacity: int, *, dtype: Any, inplace: bool
    ) -> None:
        integers = isinstance(batch, int | np.integer) and isinstance(capacity, int | np.integer)
        if not integers or batch < 1 or not 1 <= capacity <= POSITIONS - config.block_size:
            limit = POSITIONS - config.block_size
            raise ValueError(f"new_cache: batch must be >= 1 and capacity 1 to {limit}, got {batch!r} and {capacity!r}")
        self.batch, self.capacity, self.held = batch, capacity, 0
        self.dtype, self.inplace = dtype, inplace
        self._session = session
        self._width = len(config.target_layer_ids) * config.target_hidden_size
        self._names = [f"{layer}.{name}" for layer in range(config.num_layers) for name in "kv"]
        self._shape = (batch, config.num_kv_heads, 0, config.head_dim)
        self._waiting: list[Array] = []
        self._device = "cuda" if session.get_providers()[0] in _ON_CUDA else "cpu"
        self._values = [self._value(np.zeros(self._shape, dtype)) for _ in self._names]

    def runs(self, session: Any) -> bool:
        """Whether this is a cache of that session's graph."""
        return self._session is session

    @property
    def waiting(self) -> int:
        """Rows that wait for the next run."""
        return sum(part.shape[1] for part in self._waiting)

    @property
    def length(self) -> int:
        return self.held + self.waiting

    @property
    def rows(self) -> int:
        """Rows of the buffers."""
        return int(self._values[0].shape()[2])

    def append(self, features: Array) -> None:
        """Keep features [B, C, F * H] for the next run; ValueError where the cache would be overfull."""
        if (needed := self.length + features.shape[1]) > self.capacity:
            raise ValueError(f"DraftCache: capacity must be at least {needed} positions, got {self.capacity}")
        if features.shape[1]:
            self._waiting = [*self._waiting, features]

    def first(self, rows: int) -> Array:
        """The first `rows` waiting features [B, rows, F * H]."""
        parts = self._waiting or [np.zeros((self.batch, 0, self._width), self.dtype)]
        whole = parts[0] if len(parts) == 1 else np.concatenate(parts, 1)
        self._waiting = [whole] if whole.shape[1] else []
        return np.ascontiguousarray(whole[:, :rows])

    def run(self, inputs: dict[str, Array], names: list[str], rows: int, slots: int) -> list[Array]:
        """Run the session over this cache, which grows by the first `rows` that wait; the outputs `names`."""
        binding = self._session.io_binding()
        for name, array in inputs.items():
            binding.bind_cpu_input(name, array)
        for name in names:
            binding.bind_output(name)
        if self.inplace:
            self._reserve(self.held + rows + slots)
            for name, value in zip(self._names, self._values, strict=True):
                binding.bind_ortvalue_input(f"past.{name}", value)
                binding.bind_ortvalue_output(f"present.{name}", value)
        else:
            for name, value in zip(self._names, self._values, strict=True):
                binding.bind_ortvalue_input(f"past.{name}", value)
                binding.bind_output(f"present.{name}", self._device)
        self._session.run_with_iobinding(binding)
        found = binding.get_outputs()
        if not self.inplace:
            self._values = found[len(names) :]
        self.held += rows
        self._waiting = [part[:, rows:] for part in self._waiting if rows < part.shape[1]]
        return [value.numpy() for value in found[: len(names)]]

    def __deepcopy__(self, memo: dict[int, Any]) -> DraftCache:
        made = copy.copy(self)  # its session stays the same; features that wait are never written to
        made._values = [self._value(np.array(value.numpy())) for value in self._values]
        return made

    def _reserve(self, positions: int) -> None:
        """Buffers for that many positions."""
        if positions > self.rows:
            self._values = [self._value(grown(value.numpy(), positions, self.held)) for value in self._values]

    def _value(self, array: Array) -> Any:
        import onnxruntime

        return onnxruntime.OrtValue.ortvalue_from_numpy(array, self._device, 0)
