"""context_append and round_commit: values by hand, random cases against the definition, and what they leave alone."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fused_cases import DTYPES, EPS, NARROW, agreement, normal, tables
from matching import assert_matches
from torch import Tensor

from pydflash import ops
from pydflash.ops import reference

# --- context_append -------------------------------------------------------------------------------------------


class Context:
    """Arguments of context_append in float64; the caches hold values that must stay where nothing is written."""

    def __init__(self, rows: int, capacity: int, dim: int = 64, rotary: int = 64, *, layers: int = 3, heads: int = 2):
        self.batch, self.shape = 2, (layers, 2, heads, capacity, dim)
        self.kv = normal(self.batch, rows, layers * 2 * heads * dim)
        self.weights: Tensor | None = normal(layers, dim, seed=1)
        self.tables = tables(64, rotary)
        self.lengths, self.counts = torch.tensor([5, 0]).int(), torch.tensor([rows, rows - 1]).int()
        self.caches = [normal(*self.shape, seed=n) for n in (2, 3)]
        self.rotary, self.interleaved = rotary, False

    def want(self, *rounding: Any) -> list[Tensor]:
        caches: list[Any] = [cache.clone() for cache in self.caches]
        last: tuple[Any, ...] = (self.lengths, self.counts, self.rotary, self.interleaved, *rounding)
        reference.context_append(self.kv, self.weights, EPS, *self.tables, *caches, *last)
        return caches

    def got(
        self,
        dtype: torch.dtype,
        device: torch.device,
        *rounding: Any,
        kv: Tensor | None = None,
        caches: list[Any] | None = None,
    ) -> list[Tensor]:
        caches = [cache.to(device, dtype, copy=True) for cache in self.caches] if caches is None else caches
        kv = self.kv.to(device, dtype) if kv is None else kv
        weights = None if self.weights is None else self.weights.to(device, dtype)
        numbers: list[Any] = [t.to(device) for t in (self.lengths, self.counts)]
        cos, sin = (t.to(device) for t in self.tables)
        last: tuple[Any, ...] = (self.rotary, self.interleaved, *rounding)
        ops.context_append(kv, weights, EPS, cos, sin, *caches, *numbers, *last)
        assert torch.equal(numbers[0].cpu(), self.lengths), "lengths are not changed"
        return caches

    def written(self) -> Tensor:
        """[B, L] which rows of the cache must change."""
        rows, capacity = self.kv.shape[1], self.shape[3]
        changed = torch.zeros(self.batch, capacity, dtype=torch.bool)
        for b in range(self.batch):
            for n in range(min(int(self.counts[b]), rows)):
                changed[b, (int(self.lengths[b]) + n) % capacity] = True
        return changed

    def check(self, dtype: torch.dtype, device: torch.device, *rounding: Any) -> None:
        got, want = self.got(dtype, device, *rounding), self.want(*rounding)
        changed = self.written()[None, :, None, :, None].expand(self.shape)
        for a, b, before in zip(got, want, self.caches, strict=True):
            assert_matches(a, b)
            assert torch.equal(a.cpu()[~changed].double(), before[~changed]), "written where nothing belongs"
        assert torch.equal(got[1].cpu().double(), want[1]), "values are copied"


@pytest.mark.parametrize("dtype", DTYPES)
def test_context_by_hand(dtype: torch.dtype, device: torch.device) -> None:
    """Keys (1, 2, ...) of mean square 4 at position 1, a quarter turn, into row 1 of two."""
    kv = torch.tensor([2.0, 2, 2, 2, -2, -2, 2, 2, 1, 2, 3, 4, 5, 6, 7, 8]).reshape(1, 1, 16).to(device, dtype)
    cos, sin = torch.tensor([[1.0] * 4, [0] * 4], device=device), torch.tensor([[0.0] * 4, [1] * 4], device=device)
    k, v = (torch.zeros(1, 1, 1, 2, 8, dtype=dtype, device=device) for _ in range(2))
    weights = torch.tensor([[1.0, 2, 3, 4, 5, 6, 7, 8]]).to(device, dtype)
    lengths = torch.tensor([1], dtype=torch.int32, device=device)
    ops.context_append(kv, weights, 0.0, cos, sin, k, v, lengths, lengths, 8)
    assert k.squeeze().tolist() == [[0] * 8, [5.0, 6, -7, -8, 1, 2, 3, 4]]
    assert v.squeeze().tolist() == [[0] * 8, list(range(1, 9))]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("dim", "rotary", "interleaved"),
    [(128, 128, False), (80, 80, False), (256, 64, True), (40, 20, False), (8, 0, False)],
)
@pytest.mark.parametrize("normed", [False, True])
def test_context(
    normed: bool, dim: int, rotary: int, interleaved: bool, dtype: torch.dtype, device: torch.device
) -> None:
    case = Context(6, 20, dim, rotary)
    case.interleaved, case.weights = interleaved, case.weights if normed else None
    case.check(dtype, device, 0.5, False)


@pytest.mark.parametrize(
    ("lengths", "counts"),
    [
        ([0, 3], [6, 6]),
        ([5, 7], [0, 1]),
        ([4, 9], [6, 0]),
        ([0, 100], [0, 0]),
        ([40, 1], [9, 8]),
        ([2**31 - 9, 6], [9, 9]),
    ],
)
@pytest.mark.parametrize("capacity", [1, 4, 7, 8, 30])
def test_context_in_a_ring(capacity: int, lengths: list[int], counts: list[int], device: torch.device) -> None:
    """Rows wrap around; of more than the capacity the last stay; positions behind the tables take their last row."""
    case = Context(9, capacity, 16, 16)
    case.lengths, case.counts = torch.tensor(lengths).int(), torch.tensor(counts).int()
    case.check(torch.float32, device)


@pytest.mark.parametrize("dtype", NARROW)
def test_context_rounds_after_the_norm_and_after_the_rotation(dtype: torch.dtype, device: torch.device) -> None:
    case, wide = Context(9, 9, 128, 128), Context(9, 9, 128, 128)
    case.counts = wide.counts = torch.tensor([9, 9]).int()
    wide.kv = (1.1 * case.kv).to(dtype).double()
    assert case.weights is not None
    case.kv, case.weights, case.caches = wide.kv.to(dtype), case.weights.to(dtype), [x.to(dtype) for x in case.caches]
    for first in (True, False):
        got = case.got(dtype, device, 0.25, first)[0]
        assert agreement(got, case.want(0.25, first)[0]) > 0.99
        assert agreement(got, case.want(0.25, not first)[0]) < 0.9
    assert agreement(got, wide.want(0.25, False)[0].to(dtype)) < 0.9


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("skip", [0, 3, 8])
def test_context_of_strided_rows_and_caches(skip: int, dtype: torch.dtype, device: torch.device) -> None:
    case = Context(5, 12, 24, 24)
    layers, batch, heads, capacity, dim = case.shape
    width = case.kv.shape[2]
    wide = torch.randn(5, batch, width + 16).to(device, dtype)
    wide[..., skip : skip + width] = case.kv.transpose(0, 1).to(device, dtype)
    # Both caches in one [B, L, Ly, 2, Hkv, D + 8] tensor.
    both = torch.full((batch, capacity, layers, 2, heads, dim + 8), 7.0, dtype=dtype, device=device)
    views = [both[:, :, :, i, :, skip : skip + dim].permute(2, 0, 3, 1, 4) for i in range(2)]
    for view, cache in zip(views, case.caches, strict=True):
        view.copy_(cache)
    case.got(dtype, device, kv=wide[..., skip : skip + width].transpose(0, 1), caches=views)
    assert all(torch.equal(a, b) for a, b in zip(views, case.got(dtype, device), strict=True))
    for view in views:
        view.fill_(7)
    assert (both == 7).all(), "nothing else may be written"


def test_context_of_many_rows(device: torch.device) -> None:
    """So many that a group of lanes takes several heads in turn."""
    Context(2500, 2600, 128, 128, layers=5).check(torch.bfloat16, device)


def test_context_opcheck(device: torch.device) -> None:
    case = Context(3, 8, 16, 16)
    kv, weights, *caches = (t.to(device, torch.float32) for t in (case.kv, case.weights, *case.caches) if t is not None)
    numbers: list[Any] = [t.to(device) for t in (case.lengths, case.counts)]
    cos, sin = (t.to(device) for t in case.tables)
    arguments = (kv, weights, EPS, cos, sin, *caches, *numbers, 16, False, 0.0, True)
    torch.library.opcheck(torch.ops.pydflash.context_append.default, arguments)


# --- round_commit ---------------------------------------------------------------------------------------------


class Round:
    """Arguments of round_commit after a verification that accepted `accepted` drafts of each sequence."""

    def __init__(self, accepted: list[int], active: list[int], slots: int, features: int | None, seed: int = 0) -> None:
        batch, generator = len(accepted), torch.Generator().manual_seed(seed)
        self.tokens = torch.randint(0, 1 << 40, (batch, slots), generator=generator)
        self.index = torch.full((batch, slots), -1, dtype=torch.int32)
        for b, n in enumerate(accepted):
            path = torch.randperm(slots - 1, generator=generator)[:n].sort().values + 1
            self.index[b, 0], self.index[b, 1 : n + 1] = 0, path.int()
        self.num_accepted, self.active = torch.tensor(accepted).int(), torch.tensor(active).int()
        self.bonus = torch.randint(0, 1 << 40, (batch,), generator=generator)
        self.features = None if features is None else torch.randn(batch, slots, features, generator=generator)
        self.kept = None if features is None else torch.full((batch, slots, features), 7.0)
        self.state = [torch.arange(batch) + 50, *(torch.arange(batch).int() + n for n in (100, 200, 300))]
        self.record = torch.full((batch, slots + 1), 99)

    def run(
        self, op: Callable[..., None], device: torch.device, dtype: torch.dtype, features: Tensor | None = None
    ) -> list[Tensor]:
        """features_out, anchors, lengths, starts, counts, record afterwards."""
        ints = [t.to(device) for t in (self.tokens, self.index, self.num_accepted, self.bonus, self.active)]
        if features is None and self.features is not None:
            features = self.features.to(device, dtype)
        kept = None if self.kept is None else self.kept.to(device, dtype, copy=True)
        state = [t.to(device, copy=True) for t in (*self.state, self.record)]
        op(*ints, features, kept, *state)
        return [t.cpu() for t in ([] if kept is None else [kept]) + state]

    def check(self, device: torch.device, dtype: torch.dtype = torch.float32, features: Tensor | None = None) -> None:
        got = self.run(ops.round_commit, device, dtype, features)
        want = self.run(reference.round_commit, torch.device("cpu"), dtype)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_commit_by_hand(device: torch.device) -> None:
    case = Round([2, 0, 1], [1, 1, 0], 4, 2)
    case.tokens = torch.tensor([[10, 11, 12, 13], [20, 21, 22, 23], [30, 31, 32, 33]])
    case.index = torch.tensor([[0, 1, 3, -1], [0, -1, -1, -1], [0, 2, -1, -1]], dtype=torch.int32)
    case.bonus = torch.tensor([5, 6, 8])
    case.features = torch.arange(24.0).reshape(3, 4, 2)
    features, anchors, lengths, starts, counts, record = case.run(ops.round_commit, device, torch.float32)
    assert features[0].tolist() == [[0, 1], [2, 3], [6, 7], [7, 7]]
    assert features[1].tolist() == [[8, 9], [7, 7], [7, 7], [7, 7]]
    assert (features[2] == 7).all()
    assert anchors.tolist() == [5, 6, 52]
    assert lengths.tolist() == [103, 102, 102]
    assert starts.tolist() == [203, 202, 202]
    assert counts.tolist() == [3, 1, 0]
    assert record.tolist() == [[11, 13, 5, -1, 3], [6, -1, -1, -1, 1], [-1, -1, -1, -1, 0]]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("features", [None, 1, 7, 8, 24, 4100, 20480])
def test_commit(features: int | None, dtype: torch.dtype, device: torch.device) -> None:
    Round([3, 0, 7, 7, 2], [1, 1, 1, 0, 1], 8, features).check(device, dtype)


def test_random_commits(device: torch.device) -> None:
    rng = random.Random(0)
    for seed in range(30):
        batch, slots = rng.randint(1, 4), rng.choice([1, 2, 5, 16, 64])
        accepted = [rng.randint(0, slots - 1) for _ in range(batch)]
        active = [rng.randint(0, 1) for _ in range(batch)]
        Round(accepted, active, slots, rng.choice([None, 3, 16]), seed).check(device)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("skip", [0, 3, 8])
def test_commit_of_strided_features(skip: int, dtype: torch.dtype, device: torch.device) -> None:
    case = Round([3, 5], [1, 1], 6, 40)
    assert case.features is not None
    wide = torch.zeros(6, 2, 56, dtype=dtype, device=device)
    wide[..., skip : skip + 40] = case.features.transpose(0, 1)
    case.check(device, dtype, wide[..., skip : skip + 40].transpose(0, 1))


def test_commit_opcheck(device: torch.device) -> None:
    case = Round([1, 0], [1, 0], 4, 8)
    ints = (case.tokens, case.index, case.num_accepted, case.bonus, case.active)
    arguments = [t.to(device) for t in (*ints, case.features, case.kept, *case.state, case.record) if t is not None]
    torch.library.opcheck(torch.ops.pydflash.round_commit.default, tuple(arguments))
