"""Blocks of Gated DeltaNet layers at random, for tests of its ops and stores."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

CPU = torch.device("cpu")


def chain(slots: int) -> Tensor:
    """Its visibility [1, S]."""
    return torch.tensor([[(2 << i) - 1 if i < 63 else -1 for i in range(slots)]], dtype=torch.int64)


def tree(slots: int, batch: int, generator: torch.Generator) -> tuple[Tensor, list[list[int]]]:
    """The visibility [B, S] of trees of any shape, and the parents of each, -1 for the anchor's."""
    seen, parents = torch.zeros(batch, slots, dtype=torch.int64), []
    for b in range(batch):
        its = [-1, *(int(torch.randint(0, i, (), generator=generator)) for i in range(1, slots))][:slots]
        for i, parent in enumerate(its):
            seen[b, i] = (1 << i if i < 63 else -(2**63)) | (int(seen[b, parent]) if i else 0)
        parents.append(its)
    return seen, parents


def path_to(parents: list[int], slot: int) -> list[int]:
    path = [slot]
    while parents[path[0]] >= 0:
        path.insert(0, parents[path[0]])
    return path


@dataclass
class Delta:
    """Sizes, and tensors of them with a seed of their own."""

    batch: int = 2
    key_heads: int = 2
    value_heads: int = 4
    key_dim: int = 16
    value_dim: int = 32
    dtype: torch.dtype = torch.float32
    device: torch.device = CPU
    seed: int = 0
    room: int = 8
    generator: torch.Generator = field(init=False)

    def __post_init__(self) -> None:
        self.generator = torch.Generator().manual_seed(self.seed)
        self.wide = torch.float64 if self.dtype is torch.float64 else torch.float32

    @property
    def channels(self) -> int:
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    def floats(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Values that every dtype has exactly."""
        values = torch.randn(shape, generator=self.generator, dtype=torch.float64)
        return values.bfloat16().to(self.device, dtype or self.dtype)

    def heads(self) -> tuple[Tensor, Tensor]:
        """a_log and dt_bias."""
        return self.floats(self.value_heads, dtype=self.wide).abs(), self.floats(self.value_heads, dtype=self.wide)

    def slots(self, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """x, a and b of so many slots."""
        x = self.floats(self.batch, count, self.channels)
        return x, *(self.floats(self.batch, count, self.value_heads) for _ in range(2))

    def state(self) -> Tensor:
        return self.floats(self.batch, self.value_heads, self.key_dim, self.value_dim, dtype=self.wide)

    def buffers(self, entries: int) -> tuple[Tensor, Tensor, Tensor]:
        """Room for k, u and g, filled with what must not be read."""
        shapes = ((self.key_heads, self.key_dim), (self.value_heads, self.value_dim), (self.value_heads,))
        k, u, g = (
            torch.full((self.batch, entries, *shape), torch.nan, dtype=self.wide, device=self.device)
            for shape in shapes
        )
        return k, u, g

    def nothing(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Kept entries of which none counts."""
        count = torch.zeros(self.batch, dtype=torch.int32, device=self.device)
        return *self.buffers(self.room), count
