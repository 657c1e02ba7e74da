"""Cases for block_attention: inputs poisoned where nobody may look, and the comparison with float64."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import torch
from cpu_levels import over_levels
from matching import TOLERANCES
from torch import Tensor

from pydflash import ops
from pydflash.ops import reference


@dataclass(frozen=True)
class Case:
    """The arguments of one call; floats in float64 until `cast`."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    k_block: Tensor
    v_block: Tensor
    lengths: Tensor
    visibility: Tensor
    depths: Tensor
    window: int = 0
    scale: float | None = None

    def arguments(self) -> tuple:
        return tuple(getattr(self, name) for name in self.__dataclass_fields__)

    def cast(self, dtype: torch.dtype, device: torch.device) -> Case:
        floats = ("q", "k_cache", "v_cache", "k_block", "v_block")
        moved = {name: getattr(self, name).to(device, dtype) for name in floats}
        ints = {name: getattr(self, name).to(device) for name in ("lengths", "visibility", "depths")}
        return replace(self, **moved, **ints)

    def seen(self) -> tuple[Tensor, Tensor]:
        """Which cache rows [B, L] and block rows [B, S] some slot sees, by plain counting."""
        capacity, slots = self.k_cache.shape[2], self.q.shape[2]
        cache = torch.zeros(len(self.lengths), capacity, dtype=torch.bool)
        block = torch.zeros(len(self.lengths), slots, dtype=torch.bool)
        for b, length in enumerate(self.lengths.tolist()):
            for context, others in self.keys_of(b):
                cache[b, [s % capacity for s in context]] = True
                block[b, others] = True
            assert length >= 0
        return cache, block

    def keys_of(self, b: int) -> list[tuple[list[int], list[int]]]:
        """Per slot of sequence b: the context positions and the block slots it sees."""
        length, capacity = int(self.lengths[b]), self.k_cache.shape[2]
        bits = self.visibility[b % len(self.visibility)].tolist()
        depths = self.depths[b % len(self.depths)].tolist()
        window = self.window or 10**9
        return [
            (
                [s for s in range(max(0, length - capacity), length) if length + depths[i] - s < window],
                [j for j in range(len(bits)) if bits[i] >> j & 1 and abs(depths[i] - depths[j]) < window],
            )
            for i in range(len(bits))
        ]


def chain(slots: int) -> Tensor:
    return torch.arange(slots, dtype=torch.int32)[None]


def bidirectional(slots: int) -> Tensor:
    return torch.full((1, slots), -1)


def bits_of(rows: list[list[int]]) -> Tensor:
    """[1, S] masks from the list of slots each slot sees; bit 63 is the sign."""
    masks = [sum(1 << j for j in row) for row in rows]
    return torch.tensor([[mask - (1 << 64) if mask >> 63 else mask for mask in masks]])


def causal(slots: int) -> Tensor:
    return bits_of([list(range(i + 1)) for i in range(slots)])


def tree(slots: int, rng: random.Random) -> tuple[Tensor, Tensor]:
    """Ancestor bits and depths of a random tree."""
    seen, depths = [[0]], [0]
    for i in range(1, slots):
        parent = rng.randrange(max(0, i - 4), i)
        seen.append([*seen[parent], i])
        depths.append(depths[parent] + 1)
    return bits_of(seen), torch.tensor([depths], dtype=torch.int32)


def make_case(
    slots: int,
    dim: int,
    group: int,
    lengths: list[int],
    visibility: Tensor,
    depths: Tensor | None = None,
    window: int = 0,
    capacity: int | None = None,
    kv_heads: int = 2,
    seed: int = 0,
) -> Case:
    """Random inputs that are exact in bfloat16 and poisoned where nobody looks."""
    generator = torch.Generator().manual_seed(seed)
    capacity = max(lengths) + 3 if capacity is None else capacity

    def values(heads: int, rows: int) -> Tensor:
        x = torch.randn(len(lengths), heads, rows, dim, generator=generator)
        return x.bfloat16().double()

    case = Case(
        values(kv_heads * group, slots),
        values(kv_heads, capacity),
        values(kv_heads, capacity),
        values(kv_heads, slots),
        values(kv_heads, slots),
        torch.tensor(lengths, dtype=torch.int32),
        visibility,
        chain(slots) if depths is None else depths,
        window,
    )
    cache, block = case.seen()
    for x in (case.k_cache, case.v_cache):
        x.masked_fill_(~cache[:, None, :, None], torch.nan)
    for x in (case.k_block, case.v_block):
        x.masked_fill_(~block[:, None, :, None], torch.nan)
    return case


def assert_rows(got: Tensor, want: Tensor, label: str, slack: float = 1.0) -> None:
    """Each row [D] within tolerance of the largest row's norm, so that one wrong slot cannot hide; zeros exact."""
    assert got.shape == want.shape
    want = want.to(got.device)
    error, norm = (got.double() - want).norm(dim=-1), want.norm(dim=-1)
    zero = norm == 0
    assert bool((got[zero] == 0).all()), f"{label}: a slot that sees nothing must give zeros"
    bound = 2 * slack * TOLERANCES[got.dtype] * torch.maximum(norm, norm.mean())
    bad = ~(error <= bound) & ~zero
    where = bad.nonzero()[:1].tolist()
    assert not bad.any(), f"{label}: {int(bad.sum())} rows off, first {where}, error {float(error[bad].max()):.2e}"


def check(case: Case, dtype: torch.dtype, device: torch.device, slack: float = 1.0) -> None:
    want = reference.block_attention(*case.cast(torch.float64, torch.device("cpu")).arguments())
    assert not want.isnan().any()
    cast = case.cast(dtype, device)
    for level in over_levels(device):
        assert_rows(ops.block_attention(*cast.arguments()), want, f"{level} {dtype}", slack)
