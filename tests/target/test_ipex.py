"""`optimize="ipex"`: what is called, what is refused, and, where the package is installed, that the text stays."""

from __future__ import annotations

import importlib.util
import sys
import time
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest
import torch
from device_pairs import NOBODY, pair, prompts_of
from torch import nn

from pydflash import Speculator


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_copy_of_the_target_is_optimised(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, Any]] = []

    def optimize(model: nn.Module, **options: Any) -> nn.Module:
        seen.append(options)
        assert not model.training
        with torch.no_grad():
            model.get_output_embeddings().weight.zero_()  # type: ignore[attr-defined]
        return model

    module: Any = ModuleType("intel_extension_for_pytorch")
    module.optimize, module.__spec__ = optimize, ModuleSpec(module.__name__, None)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    model, _ = pair(2, "cpu")
    model = type(model)(model.config).to(dtype)
    spec = Speculator(model, None, optimize="ipex")
    assert seen == [{"inplace": True} | ({} if dtype == torch.float32 else {"dtype": dtype})]
    assert spec.target.model is not model
    assert model.lm_head.weight.any()
    assert spec.generate([1, 2, 3], 4, stop_token_ids=NOBODY).token_ids == [0] * 4  # as all logits are equal


def test_the_package_must_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "intel_extension_for_pytorch", None)
    with pytest.raises(RuntimeError, match=r"optimize='ipex' needs intel-extension-for-pytorch \(pip install"):
        Speculator(pair(2, "cpu")[0], None, optimize="ipex")


@pytest.mark.skipif(
    importlib.util.find_spec("intel_extension_for_pytorch") is None,
    reason="intel-extension-for-pytorch is not installed",
)
@pytest.mark.parametrize("options", [{}, {"path": "tree", "num_nodes": 7}], ids=["walk", "tree"])
def test_the_text_is_the_same(options: dict[str, Any]) -> None:
    model, drafter = pair(2, "cpu")
    outs = []
    for optimize in (None, "ipex"):
        spec = Speculator(model, drafter, optimize=optimize, **options)
        begin = time.perf_counter()
        outs.append(spec.generate(prompts_of(3), 16, temperature=0.0, stop_token_ids=NOBODY))
        print(f"optimize={optimize}: {time.perf_counter() - begin:.2f} s")
    assert [out.token_ids for out in outs[0]] == [out.token_ids for out in outs[1]]
    assert sum(sum(out.stats.num_accepted) for out in outs[1]) > 0
