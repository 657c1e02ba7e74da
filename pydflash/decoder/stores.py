"""Preallocated keys and values of committed positions, all layers in one tensor, with lengths on the device."""

from __future__ import annotations

import copy
from types import ModuleType

import torch
from torch import Tensor


class KVCache:
    """Keys and values of committed positions only: a forward reads it beside its block and never writes it.

    Position s lives in row `s % rows`. A cache whose rows are fewer than its capacity is a ring that holds the
    newest `rows` positions, for models in which no slot looks back further.

    Attributes:
        k, v: [layers, B, Hkv, rows, D].
        lengths: [B] int32 on the device, the committed positions of each sequence.
        capacity: positions a sequence may reach.
    """

    def __init__(
        self,
        layers: int,
        batch: int,
        num_kv_heads: int,
        head_dim: int,
        capacity: int,
        *,
        ring: int | None = None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        if batch < 1 or capacity < 1:
            raise ValueError(f"KVCache: batch and capacity must be >= 1, got {batch} and {capacity}")
        rows = capacity if ring is None else max(1, min(capacity, ring))
        shape = (layers, batch, num_kv_heads, rows, head_dim)
        self.k = torch.zeros(shape, dtype=dtype, device=device)
        self.v = torch.zeros(shape, dtype=dtype, device=device)
        self.lengths = torch.zeros(batch, dtype=torch.int32, device=device)
        self.capacity = capacity

    def row(self, b: int) -> KVCache:
        """Sequence b alone, as a cache of batch 1 over the same memory."""
        one = copy.copy(self)
        one.k, one.v, one.lengths = self.k[:, b : b + 1], self.v[:, b : b + 1], self.lengths[b : b + 1]
        return one

    @property
    def rows(self) -> int:
        return self.k.shape[3]

    @property
    def nbytes(self) -> int:
        return self.k.nbytes + self.v.nbytes

    def append(self, ops: ModuleType, k: Tensor, v: Tensor, index: Tensor, counts: Tensor, skipped: int = 0) -> None:
        """Append the rows `index` [B, N] (-1 padded, `counts` [B] valid) of k and v [layers, B, Hkv, S, D].

        `skipped` positions before them count as committed but are not stored (no slot can see them any more).

        Raises: ValueError if a sequence would grow beyond `capacity`, or by more rows than there are.
        """
        if self.lengths.device.type == "cpu" and (int(counts.min()) < 0 or int(counts.max()) > index.shape[1]):
            raise ValueError(f"KVCache: counts must be 0 to {index.shape[1]} (the rows), got {counts.tolist()}")
        self.check_room(counts + skipped)
        if skipped:
            self.lengths += skipped
        ops.cache_append(self.k, self.v, k, v, index, self.lengths)
        self.lengths += counts

    def check_room(self, counts: Tensor | int) -> None:
        """Raise ValueError where a sequence would grow beyond `capacity`; on a device its lengths cannot be read."""
        if self.lengths.device.type == "cpu" and (needed := int((self.lengths + counts).max())) > self.capacity:
            raise ValueError(f"KVCache: capacity must be at least {needed} positions, got {self.capacity}")
