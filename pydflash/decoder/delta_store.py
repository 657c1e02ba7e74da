"""What Gated DeltaNet layers keep: a state and the last inputs of the convolution, whatever the length.

A commit waits: it puts the accepted slots aside, and the next block adds them to the states while it reads them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .. import ops


class DeltaPart(NamedTuple):
    """One layer's; see `ops.delta_rule` and `ops.short_conv`. Of a prompt only state and tail are there."""

    state: Tensor
    tail: Tensor
    kept: tuple[Tensor, Tensor, Tensor, Tensor] | None = None
    block: tuple[Tensor, Tensor, Tensor] | None = None
    block_x: Tensor | None = None


@dataclass(frozen=True, slots=True)
class DeltaShape:
    """The state of a layer, and its convolution of `taps` taps."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int

    @property
    def channels(self) -> int:
        """Of the convolution."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    def entries(self) -> tuple[tuple[int, ...], ...]:
        """Of k, u and g of one slot."""
        return (self.key_heads, self.key_dim), (self.value_heads, self.value_dim), (self.value_heads,)

    def new(self, layers: int, batch: int, rows: int, dtype: torch.dtype, device: torch.device) -> DeltaStore:
        state = torch.zeros(layers, batch, self.value_heads, self.key_dim, self.value_dim, device=device)
        tail = torch.zeros(layers, batch, self.taps - 1, self.channels, dtype=dtype, device=device)
        return DeltaStore(self, state, tail, torch.zeros(batch, dtype=torch.int32, device=device))


class DeltaStore:
    """States of Gated DeltaNet layers; see `Store`.

    Attributes:
        state: [layers, B, Hv, Dk, Dv] float32. tail: [layers, B, T - 1, C].
        kept: k, u and g of accepted slots that the states do not have yet, [layers, B, N, ...]; None before a block.
        kept_count: [B] int32, how many of the N.
        block: k, u, g and the convolution's inputs of the open block, [layers, B, S, ...], or None.
    """

    def __init__(self, shape: DeltaShape, state: Tensor, tail: Tensor, kept_count: Tensor) -> None:
        self.shape, self.state, self.tail, self.kept_count = shape, state, tail, kept_count
        self.kept: list[Tensor] | None = None
        self.block: list[Tensor] | None = None
        self._used = False  # whether a mixer has read the open block's part: what was kept is in its state then

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in (self.state, self.tail, self.kept_count, *(self.kept or ())))

    @property
    def is_open(self) -> bool:
        return self.block is not None

    def part(self, i: int) -> DeltaPart:
        if self.block is None or self.kept is None:
            raise ValueError("part: the store must hold an open block, got none")
        self._used = True
        kept_k, kept_u, kept_g = (x[i] for x in self.kept)
        k, u, g, x = (buffer[i] for buffer in self.block)
        return DeltaPart(self.state[i], self.tail[i], (kept_k, kept_u, kept_g, self.kept_count), (k, u, g), x)

    def prompt(self, i: int, start: int, size: int) -> DeltaPart:
        return DeltaPart(self.state[i], self.tail[i])

    def open(self, slots: int) -> None:
        self.discard()
        room = 0 if self.kept is None else self.kept[0].shape[2]
        if slots > room:  # what waits comes along
            grown = self._buffers(slots)
            for new, old in zip(grown, self.kept or (), strict=False):
                new[:, :, :room] = old
            self.kept = grown
        self.block = [*self._buffers(slots), self.tail.new_empty(*self.tail.shape[:2], slots, self.shape.channels)]

    def _buffers(self, entries: int) -> list[Tensor]:
        return [self.state.new_empty(*self.state.shape[:2], entries, *size) for size in self.shape.entries()]

    def commit(self, index: Tensor, lengths: Tensor) -> None:
        if self.block is None or self.kept is None:
            raise ValueError("commit: the store must hold an open block, got none")
        kept_k, kept_u, kept_g = self.kept
        block_k, block_u, block_g, block_x = self.block
        ops.delta_commit(block_k, block_u, block_g, block_x, index, kept_k, kept_u, kept_g, self.kept_count, self.tail)
        self.block, self._used = None, False

    def discard(self) -> None:
        if self._used:
            self.kept_count.zero_()
        self.block, self._used = None, False

    def settle(self) -> None:
        """Add what waits to the states, as a block without slots does."""
        if self.kept is None:
            return
        batch, heads = self.state.shape[1:3]
        x, gates = self.tail.new_empty(batch, 0, self.shape.channels), self.tail.new_empty(batch, 0, heads)
        numbers, nobody = self.state.new_zeros(heads), torch.zeros(1, 0, dtype=torch.int64, device=x.device)
        no_k, no_u, no_g = (buffer[0, :, :0] for buffer in self.kept)
        for i, state in enumerate(self.state):
            kept_k, kept_u, kept_g = (buffer[i] for buffer in self.kept)
            kept = (kept_k, kept_u, kept_g, self.kept_count)
            ops.delta_rule(x, gates, gates, numbers, numbers, state, *kept, nobody, no_k, no_u, no_g)
        self.kept_count.zero_()

    def begin(self) -> None:
        for x in (self.state, self.tail, self.kept_count):
            x.zero_()

    def row(self, b: int) -> DeltaStore:
        its = slice(b, b + 1)
        one = DeltaStore(self.shape, self.state[:, its], self.tail[:, its], self.kept_count[its])
        one.kept = None if self.kept is None else [buffer[:, its] for buffer in self.kept]
        return one
