"""What `OnnxDrafter` takes and refuses; sequences of unequal lengths; features that are not numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from exported import Exported, export
from pairs import VOCAB, build_drafter

pytest.importorskip("onnx_ir", reason="onnx_ir is not installed")
pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")

from pydflash.export import OnnxDrafter

ANCHORS = np.array([4, 9])


@pytest.fixture(params=[(1, "portable"), (2, "inplace")], ids=["v1", "v2"], scope="module")
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Exported:
    version, profile = request.param
    return export(tmp_path_factory.mktemp("pair"), build_drafter(version), profile=profile)


def features_of(found: Exported, rows: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal((2, rows, found.drafter.fc.in_features), np.float32)


# --- batches -----------------------------------------------------------------------------------------------------


def test_unequal_counts_are_refused_and_change_nothing(found: Exported) -> None:
    onnx = OnnxDrafter(found.folder)
    cache, features = onnx.new_cache(2, 12), features_of(found, 5)
    message = r"counts must be one number from 0 to 5 for all sequences \(such of unequal .* got \[5, 2\]"
    with pytest.raises(ValueError, match=message):
        onnx.append_context(features, cache, np.array([5, 2]))
    assert (cache.length, cache.waiting) == (0, 0)


@torch.inference_mode()
def test_a_cache_each_gives_what_torch_gives_for_a_batch_of_unequal_lengths(found: Exported) -> None:
    onnx, drafter = OnnxDrafter(found.folder), found.drafter
    theirs, mine = drafter.new_cache(2, 30), [onnx.new_cache(1, 30) for _ in range(2)]
    for turn, counts in enumerate(([5, 2], [0, 4], [3, 3])):
        features = features_of(found, 5, turn)
        drafter.append_context(torch.from_numpy(features), theirs, torch.tensor(counts))
        options: dict[str, Any] = {"temperature": 0.8, "seeds": turn} if turn else {}
        tables = {"embed": found.table, "head": found.head}
        want = drafter.propose(torch.from_numpy(ANCHORS), theirs, **tables, **options)
        for row, cache in enumerate(mine):
            onnx.append_context(features[row : row + 1], cache, np.array([counts[row]]))
            got = onnx.propose(ANCHORS[row : row + 1], cache, **options)
            assert got.tokens[0].tolist() == want.tokens[row].tolist()
            np.testing.assert_allclose(got.scores[0], want.scores[row], rtol=1e-4, atol=1e-5)
    assert [cache.length for cache in mine] == theirs.lengths.tolist() == [8, 9]


# --- features that are not numbers --------------------------------------------------------------------------------


@torch.inference_mode()
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_rows_of_nan_are_drawn_as_torch_draws_them(found: Exported, value: float) -> None:
    """The text is the target's only if the tokens come from the q that is told."""
    onnx, drafter = OnnxDrafter(found.folder), found.drafter
    features = features_of(found, 3)
    features[0, 1, 3] = value
    caches = onnx.new_cache(2, 12), drafter.new_cache(2, 12)
    onnx.append_context(features, caches[0])
    drafter.append_context(torch.from_numpy(features), caches[1])
    options: dict[str, Any] = {"temperature": 0.9, "seeds": 3}
    got = onnx.propose(ANCHORS, caches[0], **options)
    tables = {"embed": found.table, "head": found.head}
    want = drafter.propose(torch.from_numpy(ANCHORS), caches[1], **tables, **options)
    assert want.probs is not None
    assert got.tokens.tolist() == want.tokens.tolist()
    np.testing.assert_allclose(got.probs, want.probs, rtol=1e-4, atol=1e-6)
    np.testing.assert_array_equal(got.probs[0].argmax(-1), 0)
    np.testing.assert_allclose(got.probs.sum(-1), 1, rtol=1e-5)


# --- what is refused ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_size": 5}, r"block_size must be 1 to 4 \(as trained\), got 5"),
        ({"block_size": 0}, "block_size must be 1 to 4 .*got 0"),
        ({"block_size": 2.0}, r"block_size must be 1 to 4 .*got 2\.0"),
        ({"block_size": "3"}, "block_size must be 1 to 4 .*got '3'"),
        ({"temperature": np.ones(3)}, r"temperature must be numbers, one or \[2\], got array"),
        ({"temperature": "hot"}, r"temperature must be numbers, one or \[2\], got 'hot'"),
        ({"temperature": 1.0, "seeds": [1, 2, 3]}, r"seeds must be integers, one or \[2\], got \[1, 2, 3\]"),
        ({"temperature": 1.0, "seeds": 1.5}, r"seeds must be integers, .*got 1\.5"),
    ],
)
def test_options_that_do_not_fit_are_refused(found: Exported, options: dict[str, Any], message: str) -> None:
    onnx = OnnxDrafter(found.folder)
    cache = onnx.new_cache(2, 12)
    onnx.append_context(features_of(found, 3), cache)
    with pytest.raises(ValueError, match=f"propose: {message}"):
        onnx.propose(ANCHORS, cache, **options)
    assert (cache.length, cache.waiting) == (3, 3)


@pytest.mark.parametrize("heat", [0.0, -1.0, float("nan"), np.array([1.0, 0.0])])
def test_normalizers_of_no_temperature_are_refused(tmp_path: Path, heat: Any) -> None:
    onnx = OnnxDrafter(export(tmp_path, build_drafter(1)).folder)
    with pytest.raises(ValueError, match="node_temperature must be above 0"):
        onnx.propose(ANCHORS, onnx.new_cache(2, 12), node_temperature=heat)


@pytest.mark.parametrize(
    ("anchors", "message"),
    [
        ([1, 2, 3], r"anchors must be \[2\], got \[3\]"),
        (None, r"anchors must be \[2\], got \[\]"),
        ([-1, 0], rf"anchors must be token ids below {VOCAB}, got \[-1, 0\]"),
        ([3.7, 1.0], "anchors must be token ids"),
        ([1, VOCAB], rf"anchors must be token ids below {VOCAB}, got \[1, {VOCAB}\]"),
        (["a", "b"], "anchors must be token ids"),
    ],
)
def test_anchors_that_are_no_ids_are_refused(found: Exported, anchors: Any, message: str) -> None:
    onnx = OnnxDrafter(found.folder)
    with pytest.raises(ValueError, match=f"propose: {message}"):
        onnx.propose(anchors, onnx.new_cache(2, 5))


def test_features_and_counts_that_do_not_fit_are_refused(found: Exported) -> None:
    onnx = OnnxDrafter(found.folder)
    cache, features, width = onnx.new_cache(2, 10), features_of(found, 9), found.drafter.fc.in_features
    for wrong, got in (
        (features[:, :, :-1], rf"float32 \[2, 9, {width - 1}\]"),
        (features[:1], r"float32 \[1, 9"),
        (features[0], r"float32 \[9"),
        (features.astype(str), r"<U\d+ \[2, 9"),
        (features.astype(complex), r"complex128 \[2, 9"),
        (None, r"object \[\]"),
    ):
        with pytest.raises(ValueError, match=rf"append_context: features must be numbers \[B, C, {width}\].*got {got}"):
            onnx.append_context(wrong, cache)
    for counts in ([1, 1, 1], [1.5, 1.5], [np.nan, 1], "2"):
        with pytest.raises(ValueError, match=r"append_context: counts must be integers, one or \[2\], got"):
            onnx.append_context(features, cache, counts)
    for count in (10, -1):
        with pytest.raises(ValueError, match="append_context: counts must be one number from 0 to 9"):
            onnx.append_context(features, cache, count)
    onnx.append_context(features, cache)
    with pytest.raises(ValueError, match="capacity must be at least 11 positions, got 10"):
        onnx.append_context(features[:, :2], cache)


def test_caches_and_threads_that_do_not_fit_are_refused(found: Exported) -> None:
    onnx = OnnxDrafter(found.folder)
    sizes: Any = ((0, 5), (1, 0), (1, 1 << 20), ("1", 5), (1.5, 5), (1, 2.5))
    for batch, capacity in sizes:
        with pytest.raises(ValueError, match="new_cache: batch must be >= 1 and capacity"):
            onnx.new_cache(batch, capacity)
    caches: Any = (found.drafter.new_cache(2, 5), None, OnnxDrafter(found.folder).new_cache(2, 5))
    for cache in caches:
        with pytest.raises(ValueError, match="append_context: cache must be one of this drafter's new_cache, got"):
            onnx.append_context(features_of(found, 3), cache)
        with pytest.raises(ValueError, match="propose: cache must be one of this drafter's new_cache, got"):
            onnx.propose(ANCHORS, cache)
    wrong: Any = ("2", -1, 1.5)
    for threads in wrong:
        with pytest.raises(ValueError, match="OnnxDrafter: threads must be an integer >= 0 or None, got"):
            OnnxDrafter(found.folder, threads=threads)
