"""On a CPU the bits of a row of block_attention do not depend on how its keys are split between cache and block.

A row is asked three times: alone, with all keys before it in the cache; as a slot of a chain; and as a node of a tree
whose other branches stand between its ancestors. What nobody may see is NaN.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from attention_cases import Case, bits_of, chain, make_case
from cpu_levels import over_levels
from torch import Tensor

from pydflash import ops

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CONTEXTS = (0, 1, 31, 63, 64, 255, 256, 319, 320, 321, 512, 700, 1500)
SHAPES = ((1, 64), (3, 64), (4, 128), (3, 80), (4, 64), (1, 128), (1, 80))  # group, head_dim
SLOTS = (64, 8, 33, 16)

Paths = list[list[int]]  # per slot: its ancestors, then itself


def chain_paths(slots: int) -> Paths:
    return [list(range(i + 1)) for i in range(slots)]


def tree_paths(slots: int, rng: random.Random) -> Paths:
    paths = [[0]]
    for i in range(1, slots):
        paths.append([*paths[rng.randrange(max(0, i - 4), i)], i])
    return paths


def tree_case(paths: Paths, context: int, group: int, dim: int, window: int = 0, capacity: int | None = None) -> Case:
    depths = torch.tensor([[len(path) - 1 for path in paths]], dtype=torch.int32)
    return make_case(len(paths), dim, group, [context], bits_of(paths), depths, window, capacity, kv_heads=1)


def alone(case: Case, paths: Paths, capacity: int | None = None) -> Case:
    """One sequence per slot of `case`: its ancestors at the end of the cache, its own key the whole block."""
    lengths = [int(case.lengths[0]) + len(path) - 1 for path in paths]
    capacity = max(lengths) + 1 if capacity is None else capacity
    held = min(int(case.lengths[0]), case.k_cache.shape[2])

    def grown(cache: Tensor, block: Tensor) -> Tensor:
        start = int(case.lengths[0])
        out = torch.full((len(paths), cache.shape[1], capacity, cache.shape[3]), torch.nan, dtype=cache.dtype)
        for s in range(max(start - held, start - capacity), start):
            out[:, :, s % capacity] = cache[:, :, s % cache.shape[2]]
        for b, path in enumerate(paths):
            for depth, node in enumerate(path[:-1]):
                out[b, :, (start + depth) % capacity] = block[0, :, node]
        return out

    def slots(x: Tensor) -> Tensor:
        return x[0].transpose(0, 1)[:, :, None]

    return replace(
        case,
        q=slots(case.q),
        k_cache=grown(case.k_cache, case.k_block),
        v_cache=grown(case.v_cache, case.v_block),
        k_block=slots(case.k_block),
        v_block=slots(case.v_block),
        lengths=torch.tensor(lengths, dtype=torch.int32),
        visibility=bits_of([[0]]),
        depths=chain(1),
    )


def assert_same_bits(case: Case, paths: Paths, dtype: torch.dtype, capacity: int | None = None) -> None:
    """`capacity` is that of the lone rows' caches, by default all that fits."""
    case = case.cast(dtype, CPU)
    lone = alone(case, paths, capacity)
    for level in over_levels(CPU):
        got, want = (ops.block_attention(*x.arguments()) for x in (case, lone))
        assert not want.isnan().any()
        wrong = (got[0].transpose(0, 1) != want[:, :, 0]).any(-1).any(-1)
        assert not wrong.any(), f"{level}: slots {wrong.nonzero().flatten().tolist()} differ"


@pytest.mark.grid(4)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [0, 40, 300])
@pytest.mark.parametrize("context", CONTEXTS)
def test_chain_and_tree_equal_rows_alone(context: int, window: int, dtype: torch.dtype) -> None:
    rng = random.Random(context)
    at = CONTEXTS.index(context) + window // 40
    for n, paths in enumerate((chain_paths(SLOTS[at % 4]), tree_paths(SLOTS[(at + 1) % 4], rng))):
        case = tree_case(paths, context, *SHAPES[(at + 3 * n) % len(SHAPES)], window)
        assert_same_bits(case, paths, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("group", "dim"), SHAPES)
def test_every_shape_where_tiles_end(group: int, dim: int, dtype: torch.dtype) -> None:
    """64 slots from 290 and 520 on: their settled context ends on both sides of a tile's and of a chunk's end."""
    for context, paths in ((290, chain_paths(64)), (520, chain_paths(64)), (310, tree_paths(64, random.Random(1)))):
        case = tree_case(paths, context, group, dim)
        assert_same_bits(case, paths, dtype)


@pytest.mark.grid(5)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("extra", [0, 5, 77])
@pytest.mark.parametrize("window", [40, 300])
@pytest.mark.parametrize("context", [30, 320, 700, 1500])
def test_rings_of_any_size(context: int, window: int, extra: int, dtype: torch.dtype) -> None:
    """Wherever a ring wraps, also another ring than the lone row's."""
    rng = random.Random(context + window + extra)
    for paths in (chain_paths(64), tree_paths(16, rng)):
        case = tree_case(paths, context, 3, 64, window, window - 1 + extra)
        assert_same_bits(case, paths, dtype, window - 1 + extra)
        assert_same_bits(case, paths, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_caches_of_unequal_size(dtype: torch.dtype) -> None:
    paths = chain_paths(8)
    case = tree_case(paths, 600, 3, 64, capacity=608)
    assert_same_bits(case, paths, dtype, 607)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [0, 300])
def test_batch_of_unequal_lengths(window: int, dtype: torch.dtype) -> None:
    """Sequences of a batch, each with its own tree, equal those alone."""
    lengths = [700, 0, 319, 63, 1500, 64]
    trees = [tree_paths(16, random.Random(n)) for n in range(len(lengths))]
    visibility = torch.cat([bits_of(paths) for paths in trees])
    depths = torch.tensor([[len(path) - 1 for path in paths] for paths in trees], dtype=torch.int32)
    case = make_case(16, 64, 3, lengths, visibility, depths, window).cast(dtype, CPU)
    tensors = [name for name, x in vars(case).items() if isinstance(x, Tensor)]
    for level in over_levels(CPU):
        out = ops.block_attention(*case.arguments())
        for b in range(len(lengths)):
            one = replace(case, **{name: getattr(case, name)[b : b + 1] for name in tensors})
            assert torch.equal(ops.block_attention(*one.arguments()), out[b : b + 1]), (level, b)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_loud_key_of_another_branch_changes_nothing(dtype: torch.dtype) -> None:
    """A sibling's score far above all others: no maximum, weight or rounding of another row may know of it."""
    paths = [[0], [0, 1], [0, 2], [0, 2, 3], [0, 1, 4], [0, 2, 3, 5]]
    for context in (0, 50, 400):
        case = tree_case(paths, context, 3, 64)
        case.k_block[:, :, 1] = 8 * case.q[:, :1, 5]
        assert_same_bits(case, paths, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_far_positions(dtype: torch.dtype) -> None:
    """Where chunks have grown: 40 chunks and more."""
    paths = tree_paths(8, random.Random(2))
    case = tree_case(paths, 25000, 1, 16)
    assert_same_bits(case, paths, dtype)
