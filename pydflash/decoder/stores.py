"""What layers keep of committed positions, in memory that is allocated once, with lengths on the device.

A forward reads the stores and writes the open block beside them; `commit` keeps some of its slots. Layers of one kind
share one store, so that a commit is one launch for all of them.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from .. import ops


class Store(Protocol):
    """The layers of one kind. index: [B, N] int32 slots of the open block in order, -1 behind the last."""

    @property
    def nbytes(self) -> int: ...

    @property
    def is_open(self) -> bool:
        """Whether there is a block to commit."""

    def part(self, i: int) -> Any:
        """What the mixer of the i-th of these layers reads and writes: committed, and of the open block."""

    def prompt(self, i: int, start: int, size: int) -> Any:
        """As `part`, for `size` positions of one sequence from `start` on, which are written where they stay."""

    def open(self, slots: int) -> None:
        """Make room for a block, in place of the one that is open."""

    def commit(self, index: Tensor, lengths: Tensor) -> None:
        """Put slots of the open block behind `lengths` [B] committed positions, and close it."""

    def discard(self) -> None:
        """Forget the open block."""

    def settle(self) -> None:
        """Finish commits that wait for the next block."""

    def begin(self) -> None:
        """Forget what is committed: sequences begin anew."""

    def row(self, b: int) -> Store:
        """Sequence b alone, over the same memory."""


class StoreShape(Protocol):
    """What kind of store a mixer needs: layers whose shapes are equal share one."""

    def new(self, layers: int, batch: int, rows: int, dtype: torch.dtype, device: torch.device) -> Store: ...


class KVPart(NamedTuple):
    """One layer's keys and values: k, v [B, Hkv, rows, D] committed; block_k, block_v [B, Hkv, S, D] of the block."""

    k: Tensor
    v: Tensor
    block_k: Tensor
    block_v: Tensor


class KVStore:
    """Keys and values of attention layers. Position s lives in row `s % rows`.

    Attributes:
        k, v: [layers, B, Hkv, rows, D].
        block: Keys and values [layers, B, Hkv, S, D] of the open block, or None.
    """

    def __init__(self, k: Tensor, v: Tensor) -> None:
        self.k, self.v = k, v
        self.block: tuple[Tensor, Tensor] | None = None

    @property
    def nbytes(self) -> int:
        return self.k.nbytes + self.v.nbytes

    @property
    def is_open(self) -> bool:
        return self.block is not None

    def part(self, i: int) -> KVPart:
        if self.block is None:
            return KVPart(self.k[i], self.v[i], self.k[i, :, :, :0], self.v[i, :, :, :0])
        return KVPart(self.k[i], self.v[i], self.block[0][i], self.block[1][i])

    def prompt(self, i: int, start: int, size: int) -> KVPart:
        k, v = self.k[i, :, :, : start + size], self.v[i, :, :, : start + size]
        return KVPart(k, v, k[:, :, start:], v[:, :, start:])

    def open(self, slots: int) -> None:
        layers, batch, heads, _, dim = self.k.shape
        shape = (layers, batch, heads, slots, dim)
        self.block = self.k.new_empty(shape), self.v.new_empty(shape)

    def commit(self, index: Tensor, lengths: Tensor, kernels: ModuleType = ops) -> None:
        """kernels: The module whose `cache_append` runs."""
        if self.block is None:
            raise ValueError("commit: the store must hold an open block, got none")
        kernels.cache_append(self.k, self.v, *self.block, index, lengths)
        self.block = None

    def discard(self) -> None:
        self.block = None

    def settle(self) -> None:
        pass  # nothing waits

    def begin(self) -> None:
        pass  # nothing is read behind the lengths

    def row(self, b: int) -> KVStore:
        return KVStore(self.k[:, b : b + 1], self.v[:, b : b + 1])


@dataclass(frozen=True, slots=True)
class KVShape:
    """Keys and values of one position of a layer."""

    num_kv_heads: int
    head_dim: int

    def new(self, layers: int, batch: int, rows: int, dtype: torch.dtype, device: torch.device) -> KVStore:
        shape = (layers, batch, self.num_kv_heads, rows, self.head_dim)
        k = torch.zeros(shape, dtype=dtype, device=device)
        return KVStore(k, torch.zeros_like(k))


class Cache:
    """All stores of a batch of sequences, and what they have in common.

    Attributes:
        stores: One of each kind.
        lengths: [B] int32 on the device, the committed positions of each sequence.
        capacity: Positions that a sequence may reach.
    """

    def __init__(
        self,
        shapes: Sequence[StoreShape],
        batch: int,
        capacity: int,
        *,
        rows: int | None = None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """shapes: Of each layer's store, in order. rows: Positions that a store keeps, where fewer than capacity."""
        if not (isinstance(batch, int) and isinstance(capacity, int) and batch >= 1 and capacity >= 1):
            raise ValueError(
                f"{type(self).__name__}: batch and capacity must be integers >= 1, got {batch!r} and {capacity!r}"
            )
        kinds = list(dict.fromkeys(shapes))
        counts = [sum(shape == kind for shape in shapes) for kind in kinds]
        room = capacity if rows is None else max(1, min(capacity, rows))
        self.stores: list[Any] = [
            kind.new(count, batch, room, dtype, device) for kind, count in zip(kinds, counts, strict=True)
        ]
        self._places = [(kinds.index(shape), list(shapes[:i]).count(shape)) for i, shape in enumerate(shapes)]
        self.lengths = torch.zeros(batch, dtype=torch.int32, device=device)
        self.capacity = capacity

    def part(self, layer: int) -> Any:
        """What a layer's mixer reads and writes."""
        store, i = self._places[layer]
        return self.stores[store].part(i)

    def prompt(self, layer: int, start: int, size: int) -> Any:
        """What a layer's mixer reads and writes of `size` positions of a prompt from `start` on; of one row."""
        store, i = self._places[layer]
        return self.stores[store].prompt(i, start, size)

    @property
    def is_open(self) -> bool:
        """Whether there is a block to commit."""
        return all(store.is_open for store in self.stores)

    def open(self, slots: int) -> None:
        """Make room for a block of so many slots in every store."""
        for store in self.stores:
            store.open(slots)

    def commit(self, index: Tensor) -> None:
        """Keep the slots `index` [B, N] int32 (-1 padded) of the open block, behind the lengths, and close it.

        The lengths are the caller's to move: not every row of a batch moves with each block.
        """
        for store in self.stores:
            store.commit(index, self.lengths)

    def discard(self) -> None:
        """Forget the open block."""
        for store in self.stores:
            store.discard()

    def settle(self) -> None:
        """Finish commits that wait for the next block."""
        for store in self.stores:
            store.settle()

    def begin(self) -> None:
        """Forget what is committed, for sequences that begin anew."""
        for store in self.stores:
            store.begin()

    def row(self, b: int) -> Cache:
        """Sequence b alone, as a cache of batch 1 over the same memory."""
        one = copy.copy(self)
        one.stores, one.lengths = [store.row(b) for store in self.stores], self.lengths[b : b + 1]
        return one

    @property
    def nbytes(self) -> int:
        return sum(store.nbytes for store in self.stores)

    @property
    def length(self) -> int:
        """Committed positions of a cache of one row."""
        return int(self.lengths[0])

    def advance(self, count: int) -> None:
        """Count committed positions in, or, below 0, forget the last ones."""
        self.lengths += count

    def check_room(self, counts: Tensor | int) -> None:
        """Raise ValueError where a sequence would grow beyond `capacity`; on a device its lengths cannot be read."""
        if self.lengths.device.type == "cpu" and (needed := int((self.lengths + counts).max())) > self.capacity:
            name = type(self).__name__
            raise ValueError(f"{name}: capacity must be at least {needed} positions, got {self.capacity}")


class KVCache(Cache):
    """A cache of attention layers with equal heads.

    A cache whose rows are fewer than its capacity is a ring that holds the newest `rows` positions, for models in which
    no slot looks back further.
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
        shapes = [KVShape(num_kv_heads, head_dim)] * layers
        super().__init__(shapes, batch, capacity, rows=ring, dtype=dtype, device=device)

    def row(self, b: int) -> KVCache:
        one = super().row(b)
        assert isinstance(one, KVCache)
        return one

    @property
    def keys_values(self) -> KVStore:
        """The store of all layers."""
        store: KVStore = self.stores[0]
        return store

    @property
    def k(self) -> Tensor:
        """[layers, B, Hkv, rows, D]."""
        return self.keys_values.k

    @property
    def v(self) -> Tensor:
        return self.keys_values.v

    @property
    def rows(self) -> int:
        return self.k.shape[3]

    def append(
        self, kernels: ModuleType, k: Tensor, v: Tensor, index: Tensor, counts: Tensor, skipped: int = 0
    ) -> None:
        """Append the rows `index` [B, N] (-1 padded, `counts` [B] valid) of k and v [layers, B, Hkv, S, D].

        `skipped` positions before them count as committed but are not stored (no slot can see them any more).

        Raises: ValueError if a sequence would grow beyond `capacity`, or by more rows than there are.
        """
        if self.lengths.device.type == "cpu" and (int(counts.min()) < 0 or int(counts.max()) > index.shape[1]):
            raise ValueError(f"KVCache: counts must be 0 to {index.shape[1]} (the rows), got {counts.tolist()}")
        self.check_room(counts + skipped)
        if skipped:
            self.lengths += skipped
        self.keys_values.block = k, v
        self.keys_values.commit(index, self.lengths, kernels)
        self.lengths += counts
