"""The torch-free example of docs/onnx.md, run as it stands there, with a target that gives numpy arrays."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from exported import export
from numpy.typing import NDArray
from pairs import VOCAB, build_drafter
from scipy import stats
from tiny_models import TINY

from pydflash import Speculator

pytest.importorskip("onnx_ir", reason="onnx_ir is not installed")
pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")

from pydflash.export import export_drafter, export_target

PAGE = Path(__file__).resolve().parents[2] / "docs" / "onnx.md"
ALPHA = 1e-4


def example() -> dict[str, Any]:
    """What the page's Python block defines."""
    (block,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert len(block.splitlines()) <= 75
    assert "torch" not in block
    names: dict[str, Any] = {}
    exec(compile(block, str(PAGE), "exec"), names)
    return names


class Host:
    """A target without torch in its interface: a Markov chain whose features are random but fixed for each token."""

    def __init__(self, width: int, sharp: float) -> None:
        rng = np.random.default_rng(0)
        self.logits = rng.standard_normal((VOCAB, VOCAB)) * sharp
        self.features = rng.standard_normal((VOCAB, width)).astype(np.float32)
        self.ids: list[int] = []

    def forward(self, ids: list[int]) -> tuple[NDArray[Any], NDArray[Any]]:
        self.ids += ids
        return self.logits[ids], self.features[ids]

    def crop(self, length: int) -> None:
        del self.ids[length:]


@pytest.mark.parametrize("version", [1, 2])
def test_greedy_text_is_the_targets(tmp_path: Path, version: int) -> None:
    found = export(tmp_path, build_drafter(version))
    host = Host(found.drafter.fc.in_features, 2.0)
    got = example()["generate"](host.forward, host.crop, found.folder, [3, 1, 4], 40)
    want, token = [], 4
    for _ in range(40):
        token = int(host.logits[token].argmax())
        want.append(token)
    assert got == want
    assert host.ids[:40] == [3, 1, 4, *want][:40]  # the target's cache holds committed tokens
    host = Host(found.drafter.fc.in_features, 2.0)
    assert (
        example()["generate"](host.forward, host.crop, found.folder, [3, 1, 4], 40, stop=[want[6]])
        == want[: want.index(want[6]) + 1]
    )


def test_an_exported_target_is_driven_as_the_page_says(tmp_path: Path) -> None:
    model = TINY["llama"]()
    model.save_pretrained(tmp_path / "target")
    drafter = build_drafter(2, num_target_layers=4)
    drafter.save_pretrained(tmp_path / "drafter")
    export_drafter(tmp_path / "drafter", tmp_path / "target", tmp_path)
    export_target(tmp_path / "target", drafter.config.target_layer_ids, tmp_path)
    found = r"```text\n(from pydflash.export import OnnxTarget\n.*?)```"
    (block,) = re.findall(found, PAGE.read_text(encoding="utf-8"), re.DOTALL)
    names: dict[str, Any] = {"np": np, "folder": tmp_path}
    exec(block, names)
    got = example()["generate"](names["forward"], names["crop"], tmp_path, [3, 1, 4, 1, 5], 24)
    assert got == Speculator(model, None).generate([3, 1, 4, 1, 5], 24, temperature=0.0).token_ids


def test_sampled_text_follows_the_targets_law(tmp_path: Path) -> None:
    """Pairs of neighbours in one long text, by chi-square at 1e-4; the target has 4 likely tokens."""
    found = export(tmp_path, build_drafter(2))
    host = Host(found.drafter.fc.in_features, 1.0)
    host.logits[:, 4:] = -40
    names = example()
    torch.manual_seed(0)
    text = names["generate"](host.forward, host.crop, found.folder, [0], 1500, temperature=0.8, seed=1)
    counts = np.zeros((4, 4))
    np.add.at(counts, (text[:-1], text[1:]), 1)
    laws = np.stack([names["law"](host.logits[i], 0.8)[:4] for i in range(4)])
    expected = counts.sum(1, keepdims=True) * laws
    statistic = float(((counts - expected) ** 2 / expected).sum())
    assert stats.chi2.sf(statistic, 12) > ALPHA
    wrong = np.full((4, 4), 0.25) * counts.sum(1, keepdims=True)
    assert stats.chi2.sf(float(((counts - wrong) ** 2 / wrong).sum()), 12) < ALPHA
