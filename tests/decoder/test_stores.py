"""The drafter's context: its cache, features in any pieces, rings, ragged batches, memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pairs import HIDDEN, VOCAB, build_drafter
from torch import Tensor, nn

from pydflash import Drafter, ops
from pydflash.decoder.stores import KVCache
from pydflash.ops import reference

WINDOW = 6
SLIDING: dict[str, Any] = {"layer_types": ["sliding_attention"] * 2, "sliding_window": WINDOW}
MIXED: dict[str, Any] = SLIDING | {"layer_types": ["sliding_attention", "full_attention"]}
BIDIRECTIONAL = SLIDING | {"is_causal": False}


@pytest.fixture(autouse=True)
def no_gradients() -> Any:
    with torch.no_grad():
        yield


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


TABLE = randn(VOCAB, HIDDEN, seed=1) * 0.4


def hidden(drafter: Drafter, cache: KVCache, anchors: list[int]) -> Tensor:
    return drafter.hidden(torch.tensor(anchors), cache, TABLE, drafter.config.block_size)


# --- pieces -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("changes", [{}, SLIDING, MIXED, BIDIRECTIONAL], ids=["full", "ring", "mixed", "both ways"])
@pytest.mark.parametrize("version", [1, 2])
def test_context_in_pieces_is_context_at_once(version: int, changes: dict[str, Any]) -> None:
    """5 windows of context in pieces of 1, 7, W, 2W and the rest, with a look after each piece."""
    drafter = build_drafter(version, **changes)
    total = 5 * WINDOW
    features = randn(1, total, drafter.fc.in_features)
    pieces = [1, 7, WINDOW, 2 * WINDOW, total - 8 - 3 * WINDOW]
    cache, at = drafter.new_cache(1, total), 0
    for size in pieces:
        drafter.append_context(features[:, at : at + size], cache)
        at += size
        assert cache.lengths.tolist() == [at]
        whole = drafter.new_cache(1, total)
        drafter.append_context(features[:, :at], whole)
        # torch's products of other row counts sum in another order, by the processor: up to 1.1e-5 was seen
        torch.testing.assert_close(hidden(drafter, cache, [5]), hidden(drafter, whole, [5]), rtol=0, atol=3e-5)
    assert cache.rows == (WINDOW - 1 if changes in (SLIDING, BIDIRECTIONAL) else total)


@pytest.mark.parametrize("changes", [SLIDING, BIDIRECTIONAL], ids=["causal", "both ways"])
def test_a_ring_sees_what_a_whole_cache_sees(changes: dict[str, Any]) -> None:
    """Against a cache that keeps every position, at every length up to three windows."""
    drafter = build_drafter(2, **changes)
    features = randn(1, 3 * WINDOW, drafter.fc.in_features)
    ring = drafter.new_cache(1, 3 * WINDOW)
    full = KVCache(2, 1, 2, 16, 3 * WINDOW, dtype=torch.float32, device=torch.device("cpu"))
    for at in range(3 * WINDOW):
        torch.testing.assert_close(hidden(drafter, ring, [5]), hidden(drafter, full, [5]), rtol=0, atol=1e-5)
        for cache in (ring, full):
            drafter.append_context(features[:, at : at + 1], cache)
    # What left the window is gone: other old features change nothing, the last W - 1 do.
    for first, matters in ((0, False), (2 * WINDOW + 1, True)):
        changed = features.clone()
        changed[:, first] += 1
        other = drafter.new_cache(1, 3 * WINDOW)
        drafter.append_context(changed, other)
        assert torch.allclose(hidden(drafter, other, [5]), hidden(drafter, ring, [5]), rtol=0, atol=1e-5) is not matters


def test_features_stand_at_their_positions() -> None:
    """The same features one position later are another context: RoPE is absolute in the cache."""
    drafter = build_drafter(1)
    features = randn(1, 4, drafter.fc.in_features)
    caches = []
    for skip in (0, 1):
        cache = drafter.new_cache(1, 16)
        drafter.append_context(randn(1, skip, drafter.fc.in_features, seed=7), cache)
        drafter.append_context(features, cache)
        caches.append(cache)
    early, late = caches[0].k[:, 0, :, :4], caches[1].k[:, 0, :, 1:5]
    assert torch.allclose(caches[0].v[:, 0, :, :4], caches[1].v[:, 0, :, 1:5], atol=1e-6)
    assert not torch.allclose(early, late, atol=1e-2)
    # A rotation: every pair of channels keeps its length.
    length = [torch.stack(k.chunk(2, -1)).norm(dim=0) for k in (early, late)]
    torch.testing.assert_close(length[0], length[1], rtol=1e-5, atol=1e-6)


# --- ragged batches ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("changes", [{}, SLIDING, MIXED], ids=["full", "ring", "mixed"])
@pytest.mark.parametrize("version", [1, 2])
def test_a_ragged_batch_is_each_row_alone(version: int, changes: dict[str, Any]) -> None:
    """Three sequences that grow by different counts; each drafts as it does alone, greedily and sampled."""
    drafter = build_drafter(version, **changes)
    head = nn.Linear(HIDDEN, VOCAB, bias=False)
    head.weight.copy_(randn(VOCAB, HIDDEN, seed=2))
    rounds = [[3, 9, 1], [0, 4, 2], [12, 1, 5]]
    batch = drafter.new_cache(3, 40)
    alone = [drafter.new_cache(1, 40) for _ in range(3)]
    anchors, seeds = torch.tensor([5, 6, 7]), torch.tensor([1, 2, 3])
    for step, counts in enumerate(rounds):
        features = randn(3, max(counts), drafter.fc.in_features, seed=step)
        width = (torch.int32, torch.int64)[step % 2]
        drafter.append_context(features, batch, torch.tensor(counts, dtype=width))
        for i, count in enumerate(counts):
            drafter.append_context(features[i : i + 1, :count], alone[i])
        assert batch.lengths.tolist() == [int(c.lengths) for c in alone]
        for temperature in (None, torch.tensor([0.7, 0.0, 1.5])):
            many = drafter.propose(anchors, batch, embed=TABLE, head=head, temperature=temperature, seeds=seeds)
            for i in range(3):
                one = drafter.propose(
                    anchors[i : i + 1],
                    alone[i],
                    embed=TABLE,
                    head=head,
                    temperature=None if temperature is None else temperature[i : i + 1],
                    seeds=seeds[i : i + 1],
                )
                assert many.tokens[i].tolist() == one.tokens[0].tolist()
                assert many.candidates[i].tolist() == one.candidates[0].tolist()
                torch.testing.assert_close(many.scores[i], one.scores[0], rtol=1e-5, atol=1e-4)
                if temperature is not None:
                    torch.testing.assert_close(many.probs[i], one.probs[0], rtol=1e-4, atol=1e-5)


def test_rows_behind_the_counts_are_not_read() -> None:
    drafter = build_drafter(1)
    features = randn(2, 5, drafter.fc.in_features)
    outs = []
    for filler in (0.0, 1e6):
        features[0, 2:] = filler
        cache = drafter.new_cache(2, 16)
        drafter.append_context(features, cache, torch.tensor([2, 5]))
        assert cache.lengths.tolist() == [2, 5]
        outs.append(hidden(drafter, cache, [5, 6]))
    assert torch.equal(outs[0], outs[1])


@pytest.mark.parametrize("changes", [{}, SLIDING], ids=["full", "ring"])
def test_native_and_reference_context_agree(changes: dict[str, Any]) -> None:
    drafter = build_drafter(2, **changes)
    outs = []
    for backend in ("native", "reference"):
        drafter.backend = backend
        assert drafter.ops is (ops if backend == "native" else reference)
        cache = drafter.new_cache(2, 32)
        for seed, counts in enumerate(([3, 7], [9, 0], [1, 2])):
            drafter.append_context(randn(2, 9, drafter.fc.in_features, seed=seed), cache, torch.tensor(counts))
        outs.append(hidden(drafter, cache, [5, 6]))
    torch.testing.assert_close(outs[0], outs[1], rtol=0, atol=5e-5)


# --- sizes ------------------------------------------------------------------------------------------------------


def test_a_windowed_drafter_needs_memory_for_its_window_only() -> None:
    drafter = build_drafter(1, **SLIDING)
    sizes = {capacity: drafter.new_cache(1, capacity).nbytes for capacity in (2 * WINDOW, 8 * WINDOW, 1000 * WINDOW)}
    assert set(sizes.values()) == {2 * 2 * 2 * (WINDOW - 1) * 16 * 4}  # k and v, layers, heads, rows, dim, bytes
    assert build_drafter(1).new_cache(1, 48).nbytes == 2 * 2 * 2 * 48 * 16 * 4
    assert build_drafter(1, **MIXED).new_cache(1, 48).rows == 48
    assert drafter.new_cache(1, 3).rows == 3  # never more rows than positions
    assert build_drafter(1, **(SLIDING | {"sliding_window": 1})).new_cache(1, 8).rows == 1


def test_a_block_leaves_nothing_behind() -> None:
    drafter = build_drafter(2)
    cache = drafter.new_cache(1, 20)
    drafter.append_context(randn(1, 7, drafter.fc.in_features), cache)
    before = [cache.k.clone(), cache.v.clone(), cache.lengths.clone()]
    address = cache.k.data_ptr()
    hidden(drafter, cache, [5])
    assert all(torch.equal(a, b) for a, b in zip(before, (cache.k, cache.v, cache.lengths), strict=True))
    drafter.append_context(randn(1, 3, drafter.fc.in_features), cache)
    assert torch.equal(cache.k[:, :, :, :7], before[0][:, :, :, :7])
    assert cache.k.data_ptr() == address


def test_room_is_checked() -> None:
    drafter = build_drafter(1)
    cache = drafter.new_cache(2, 8)
    features = randn(2, 6, drafter.fc.in_features)
    drafter.append_context(features, cache)
    state = [cache.k.clone(), cache.lengths.clone()]
    with pytest.raises(ValueError, match="KVCache: capacity must be at least 9 positions, got 8"):
        drafter.append_context(features[:, :3], cache)
    with pytest.raises(ValueError, match="KVCache: capacity must be at least 10 positions, got 8"):
        drafter.append_context(features, cache, torch.tensor([1, 4]))
    for counts in ([7, 1], [-1, 0]):
        with pytest.raises(ValueError, match=r"KVCache: counts must be 0 to 6 \(the rows\), got"):
            drafter.append_context(features, cache, torch.tensor(counts))
    assert torch.equal(cache.k, state[0])
    assert torch.equal(cache.lengths, state[1])
    drafter.append_context(features[:, :2], cache)
    assert cache.lengths.tolist() == [8, 8]
    windowed = build_drafter(1, **SLIDING)
    with pytest.raises(ValueError, match="KVCache: capacity must be at least 12 positions, got 10"):
        windowed.append_context(randn(1, 12, 128), windowed.new_cache(1, 10))
    for batch, capacity in ((0, 4), (1, 0)):
        with pytest.raises(
            ValueError, match=r"new_cache: (batch|capacity) must be an integer of 1 to 2147483647, got 0"
        ):
            drafter.new_cache(batch, capacity)
