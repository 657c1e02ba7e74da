"""Deep copies of what runs on ONNX Runtime: they share the session and nothing that changes."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from exported import export
from pairs import build_drafter
from tiny_models import TINY

pytest.importorskip("onnx_ir", reason="onnx_ir is not installed")
pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")

from pydflash import Speculator
from pydflash.export import OnnxDrafter, OnnxTarget, export_drafter, export_target


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target and a drafter in ONNX, in one folder."""
    work = tmp_path_factory.mktemp("pair")
    TINY["llama"]().save_pretrained(work / "target")
    build_drafter(2, num_target_layers=4).save_pretrained(work / "drafter")
    export_drafter(work / "drafter", work / "target", work / "onnx")
    export_target(work / "target", (0, 2), work / "onnx")
    return work


@pytest.mark.parametrize("path", ["walk", "tree"])
@pytest.mark.parametrize("exported", [True, False])
def test_a_copied_speculator_generates_the_same_and_closes_alone(work: Path, path: str, exported: bool) -> None:
    target = OnnxTarget(work / "onnx") if exported else TINY["llama"]()
    spec = Speculator(target, OnnxDrafter(work / "onnx"), path=path)
    options: dict[str, Any] = {"max_new_tokens": 12, "temperature": 0.7, "seed": 3}
    stream = spec.stream([5, 6, 7], **options)
    next(iter(stream))
    other = copy.deepcopy(spec)
    assert other.drafter is not spec.drafter
    assert other.drafter.session is spec.drafter.session
    assert other.drafter.config == spec.drafter.config
    assert other.loop.parts.drafter is other.drafter
    assert other.target is not spec.target
    assert other.loop.parts.target is not spec.loop.parts.target
    want = other.generate([5, 6, 7], **options).token_ids
    for _ in stream:  # of the original, half way through while the copy ran
        pass
    assert stream.output.token_ids == want
    other.drafter.metadata["embed"] = None
    assert spec.drafter.metadata["embed"] is True
    if exported:
        assert other.target.session is spec.target.session
        other.close()
        assert spec.generate([5, 6, 7], **options).token_ids == want


@pytest.mark.parametrize("profile", ["portable", "inplace"])
def test_a_copied_draft_cache_goes_its_own_way(tmp_path: Path, profile: str) -> None:
    found = export(tmp_path, build_drafter(2), profile=profile)
    onnx, rng = OnnxDrafter(found.folder), np.random.default_rng(0)
    first, mine, theirs = (rng.standard_normal((1, 5, found.drafter.fc.in_features), np.float32) for _ in range(3))
    anchor = np.array([3])

    def after(*parts: Any) -> Any:
        cache = onnx.new_cache(1, 40)
        for part in parts:
            onnx.append_context(part, cache)
            scores = onnx.propose(anchor, cache).scores
        return scores

    cache = onnx.new_cache(1, 40)
    onnx.append_context(first, cache)
    onnx.propose(anchor, cache)
    onnx.append_context(mine, cache)  # waits in both
    other = copy.deepcopy(cache)
    onnx.append_context(theirs, other)
    got = onnx.propose(anchor, other).scores
    assert (cache.length, cache.held, other.length, other.held) == (10, 5, 15, 15)
    np.testing.assert_array_equal(onnx.propose(anchor, cache).scores, after(first, mine))
    np.testing.assert_allclose(got, after(first, mine, theirs), rtol=1e-4, atol=1e-5)


def test_a_copied_target_cache_goes_its_own_way(work: Path) -> None:
    target = OnnxTarget(work / "onnx")
    cache = copy.deepcopy(target.new_cache(1, 40))  # an empty one
    target.prefill(torch.tensor([[5, 6, 7]]), cache)
    other = copy.deepcopy(cache)
    want = target.prefill(torch.tensor([[8, 9]]), cache).logits
    target.prefill(torch.tensor([[1, 2, 3]]), other)
    cache.length = 3
    assert torch.equal(target.prefill(torch.tensor([[8, 9]]), cache).logits, want)
    assert other.length == 6
