"""cache_append: gathered rows, padding, rings, and that nothing else in the cache is touched."""

from __future__ import annotations

import random

import pytest
import torch
from cpu_levels import over_levels
from torch import Tensor

from pydflash import ops
from pydflash.ops import reference

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def caches(
    layers: int, batch: int, heads: int, capacity: int, slots: int, dim: int, dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    """k_cache, v_cache, k_block and v_block with distinct values everywhere."""
    generator = torch.Generator().manual_seed(0)
    rows = (capacity, capacity, slots, slots)
    return [torch.randn(layers, batch, heads, n, dim, generator=generator).to(dtype) for n in rows]


def appended(arguments: list[Tensor], index: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """What the caches must hold afterwards, one row at a time."""
    k_cache, v_cache, k_block, v_block = (x.clone() for x in arguments)
    capacity = k_cache.shape[3]
    for b, row in enumerate(index.tolist()):
        for n, source in enumerate(row):
            if source < 0:
                break
            to = (int(lengths[b]) + n) % capacity
            k_cache[:, b, :, to], v_cache[:, b, :, to] = k_block[:, b, :, source], v_block[:, b, :, source]
    return k_cache, v_cache


def check(arguments: list[Tensor], index: list[list[int]], lengths: list[int], device: torch.device) -> None:
    rows, starts = torch.tensor(index, dtype=torch.int32), torch.tensor(lengths, dtype=torch.int32)
    want = appended(arguments, rows, starts)
    defined = [x.clone() for x in arguments]
    reference.cache_append(*defined, rows, starts)
    assert all(torch.equal(a, b) for a, b in zip(defined[:2], want, strict=True)), "reference"
    for level in over_levels(device):
        got = [x.to(device, copy=True) for x in arguments]
        ops.cache_append(*got, rows.to(device), starts.to(device))
        assert all(torch.equal(a.cpu(), b) for a, b in zip(got[:2], want, strict=True)), level
        assert all(torch.equal(a.cpu(), b) for a, b in zip(got[2:], arguments[2:], strict=True)), level


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("index", "lengths"),
    [
        ([[0, 1, 2, 3]], [0]),
        ([[0, 1, -1, -1]], [5]),
        ([[-1, -1, -1, -1]], [5]),
        ([[0, 2, 3, -1], [0, -1, -1, -1]], [3, 7]),
        ([[3, 1, 1, 0], [2, 3, 0, 1]], [0, 2]),
        ([[0, -1, 2, 3], [1, 2, -1, 3]], [4, 1]),  # nothing counts after the first -1
    ],
)
def test_gather_and_padding(
    index: list[list[int]], lengths: list[int], dtype: torch.dtype, device: torch.device
) -> None:
    check(caches(3, len(index), 2, 12, 4, 16, dtype), index, lengths, device)


def test_more_entries_than_a_warp_has_lanes(device: torch.device) -> None:
    index = [list(range(70)), list(range(69, -1, -1))]
    index[0][8] = index[0][40] = index[0][64] = index[1][69] = -1
    check(caches(2, 2, 2, 100, 70, 16), index, [3, 90], device)


@pytest.mark.parametrize("dim", [8, 33, 64, 80, 128, 301])
def test_head_dims(dim: int, device: torch.device) -> None:
    check(caches(2, 2, 3, 20, 8, dim), [[0, 1, 2, 5, 6], [4, -1, -1, -1, -1]], [9, 12], device)


@pytest.mark.parametrize("lengths", [[6, 7], [8, 15], [100, 3], [7, 2**30]])
def test_ring_wraps(lengths: list[int], device: torch.device) -> None:
    check(caches(2, 2, 2, 8, 6, 16), [[0, 1, 2, 3, 4, 5], [5, 4, 2, -1, -1, -1]], lengths, device)


@pytest.mark.parametrize("capacity", [1, 2, 5, 7])
def test_more_rows_than_capacity_keeps_the_last(capacity: int, device: torch.device) -> None:
    check(caches(2, 2, 2, capacity, 8, 16), [list(range(8)), [7, 6, 5, 4, 3, -1, -1, -1]], [0, 11], device)


def test_random_cases(device: torch.device) -> None:
    rng = random.Random(0)
    for _ in range(30):
        batch, slots, capacity = rng.randint(1, 3), rng.randint(1, 9), rng.randint(1, 20)
        entries = rng.randint(1, slots + 2)
        index = [[rng.randint(-1, slots - 1) for _ in range(entries)] for _ in range(batch)]
        lengths = [rng.randint(0, 3 * capacity) for _ in range(batch)]
        check(caches(rng.randint(1, 3), batch, rng.randint(1, 3), capacity, slots, 8), index, lengths, device)


@pytest.mark.parametrize("dtype", DTYPES)
def test_strided_caches_and_blocks(dtype: torch.dtype, device: torch.device) -> None:
    layers, batch, heads, capacity, slots, dim = 3, 2, 2, 10, 4, 16
    generator = torch.Generator().manual_seed(2)
    # Both caches in one [Ly, B, L, 2, H, D] tensor, both blocks in one fused projection.
    cache = torch.randn(layers, batch, capacity, 2, heads, dim, generator=generator).to(device, dtype)
    fused = torch.randn(layers, batch, slots, 2 * heads * dim + 3, generator=generator).to(device, dtype)
    block = fused[..., 3:].unflatten(-1, (2, heads, dim))
    index = torch.tensor([[0, 2, 3], [1, -1, -1]], device=device)
    lengths = torch.tensor([8, 4], device=device)
    views = [x[..., i, :, :].transpose(2, 3) for x in (cache, block) for i in range(2)]
    want = appended([x.cpu() for x in views], index.cpu(), lengths.cpu())
    for level in over_levels(device):
        changed = cache.clone()
        k_cache, v_cache = (changed[..., i, :, :].transpose(2, 3) for i in range(2))
        ops.cache_append(k_cache, v_cache, views[2], views[3], index, lengths)
        assert torch.equal(k_cache.cpu(), want[0]), level
        assert torch.equal(v_cache.cpu(), want[1]), level
        k_cache.copy_(views[0]), v_cache.copy_(views[1])
        turned = [x.mT.contiguous().mT for x in views[2:]]
        ops.cache_append(k_cache, v_cache, *turned, index, lengths)
        assert torch.equal(k_cache.cpu(), want[0]), level


def test_many_layers_in_parallel(device: torch.device) -> None:
    check(caches(30, 2, 3, 40, 16, 64), [list(range(16)), list(range(16))], [20, 3], device)


def test_lengths_are_not_changed_and_empty_inputs_are_fine(device: torch.device) -> None:
    arguments = [x.to(device) for x in caches(1, 1, 1, 4, 2, 8)]
    before, lengths = arguments[0].clone(), torch.tensor([3], device=device)
    ops.cache_append(*arguments, torch.zeros(1, 0, dtype=torch.int32, device=device), lengths)
    assert torch.equal(arguments[0], before)
    assert lengths.tolist() == [3]


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (
            "k_cache",
            torch.zeros(2, 2, 2, 9, 16).double(),
            "k_cache must be float32, bfloat16 or float16, got float64",
        ),
        ("v_cache", torch.zeros(2, 2, 2, 9, 16).half(), "v_cache must be float32, as k_cache, got float16"),
        ("k_block", torch.zeros(2, 2, 2, 4, 16).half(), "k_block must be float32, as k_cache, got float16"),
        (
            "v_cache",
            torch.zeros(2, 2, 2, 8, 16),
            r"v_cache must be of shape \[Ly, B, Hkv, L, D\] = \[2, 2, 2, 9, 16\], got \[2, 2, 2, 8, 16\]",
        ),
        (
            "k_block",
            torch.zeros(2, 2, 3, 4, 16),
            r"k_block must be of shape \[Ly, B, Hkv, S, D\] = \[2, 2, 2, \?, 16\], got \[2, 2, 3, 4, 16\]",
        ),
        ("index", torch.zeros(3, 4, dtype=torch.int32), r"index must be of shape \[B, N\] = \[2, \?\], got \[3, 4\]"),
        ("lengths", torch.zeros(1, dtype=torch.int32), r"lengths must be of shape \[B\] = \[2\], got \[1\]"),
        (
            "k_cache",
            torch.zeros(2, 2, 2, 16, 9).mT,
            r"k_cache must be contiguous in its last dimension, got stride 9",
        ),
    ],
)
def test_wrong_arguments_are_named(name: str, value: Tensor, message: str, device: torch.device) -> None:
    names = ("k_cache", "v_cache", "k_block", "v_block")
    arguments = dict(zip(names, caches(2, 2, 2, 9, 4, 16), strict=True))
    arguments |= {"index": torch.zeros(2, 4, dtype=torch.int32), "lengths": torch.zeros(2, dtype=torch.int32)}
    arguments[name] = value
    with pytest.raises(ValueError, match=f"^cache_append: {message}$"):
        ops.cache_append(**{key: x.to(device) for key, x in arguments.items()})


def test_a_cache_without_rows_is_refused(device: torch.device) -> None:
    arguments = [x.to(device) for x in caches(1, 1, 1, 0, 2, 8)]
    ints = torch.tensor([[0]], device=device), torch.tensor([0], device=device)
    with pytest.raises(ValueError, match=r"^cache_append: the capacity L of k_cache must be >= 1, got 0$"):
        ops.cache_append(*arguments, *ints)


def test_opcheck(device: torch.device) -> None:
    arguments = [x.to(device) for x in caches(2, 2, 2, 9, 4, 16)]
    ints = torch.tensor([[0, 1, -1], [2, 3, 0]], device=device), torch.tensor([3, 8], device=device)
    torch.library.opcheck(torch.ops.pydflash.cache_append.default, (*arguments, *ints))
