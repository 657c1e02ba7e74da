"""Weights that change while a Speculator holds copies of them: the next text is that of the new weights."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from device_pairs import pair
from pairs import VOCAB, fitted_prompts
from tiny_models import TINY
from torch import Tensor, nn

from pydflash import Drafter, Speculator, Target
from pydflash.drafter.packed import PackedDrafter
from pydflash.target.fused import FusedTarget, in_place

OPTIONS: dict[str, Any] = {"max_new_tokens": 24, "temperature": 0.0, "stop_token_ids": []}


def noise(like: Tensor) -> Tensor:
    return 0.1 * torch.randn(like.shape, generator=torch.Generator().manual_seed(like.numel())).to(like)


def data_added(model: nn.Module) -> None:
    for p in model.parameters():
        if p.ndim == 2:
            p.data.add_(noise(p))


def data_of_one_layer(model: Any) -> None:
    """Of one weight alone, and not of one that a table of all weights begins with."""
    found = next(p for name, p in model.named_parameters() if name.endswith("layers.1.mlp.down_proj.weight"))
    found.data.mul_(-3)


def loaded(model: nn.Module) -> None:
    model.load_state_dict({name: value + noise(value) for name, value in model.state_dict().items()})


def merged(model: nn.Module) -> None:
    """As adapters are merged: `weight.data += B @ A`."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            weight = module.weight
            left, right = noise(weight[:, :2]), noise(weight[:2])
            weight.data += 20 * left @ right


def replaced(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.weight = nn.Parameter(module.weight + noise(module.weight))


def other_norms(model: nn.Module) -> None:
    """Which are read where they lie, but whose copies are part of others."""
    for name, p in model.named_parameters():
        if "norm" in name:
            p.data.mul_(1 + 10 * noise(p))


CHANGES = (data_added, data_of_one_layer, loaded, merged, replaced, other_norms)


@pytest.mark.parametrize("quantize", [None, "int8"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_targets(change: Any, quantize: str | None) -> None:
    """Plain and with drafts; a Speculator that is made anew beside the old one takes no old copy either."""
    model, drafter = (copy.deepcopy(module) for module in pair(1, "cpu"))
    ids = fitted_prompts()[0]
    held = [Speculator(model, None, quantize=quantize), Speculator(model, drafter, quantize=quantize)]
    before = [spec.generate(ids, **OPTIONS).token_ids for spec in held]
    assert before[0] == before[1]
    change(model)
    want = Speculator(copy.deepcopy(model), None, quantize=quantize).generate(ids, **OPTIONS).token_ids
    assert want != before[0]
    fresh = Speculator(model, None, quantize=quantize)
    out = fresh.generate(ids, **OPTIONS)
    assert out.token_ids == want
    assert out.stats.backends["target"].startswith("fused layers"), "its trial passes"
    for spec in held:
        assert spec.generate(ids, **OPTIONS).token_ids == want
    if quantize is None:
        own = model.generate(ids[None], max_new_tokens=24, do_sample=False, eos_token_id=None)
        assert own[0, len(ids) :].tolist() == want


def proposed(drafter: Drafter) -> Tensor:
    """Scores of a block over some context; of a new cache, as a request begins."""
    width, hidden = drafter.fc.in_features, drafter.config.hidden_size
    generator = torch.Generator().manual_seed(3)
    features, table = (torch.randn(rows, width, generator=generator) for rows, width in ((5, width), (VOCAB, hidden)))
    head = nn.Linear(hidden, VOCAB, bias=False)
    head.weight.data = torch.randn(VOCAB, hidden, generator=generator)
    with torch.inference_mode():
        cache = drafter.new_cache(1, 32)
        drafter.append_context(features[None], cache)
        found = drafter.propose(torch.tensor([3]), cache, embed=table, head=head).scores
    return found.clone()


def kv_rows(drafter: Drafter) -> None:
    """Only what the stacked projection of keys and values is made of."""
    for layer in drafter.stack:
        layer.qkv_proj.weight.data.mul_(-1)


def key_norms(drafter: Drafter) -> None:
    for layer in drafter.stack:
        layer.k_norm.weight.data.mul_(3)


@pytest.mark.parametrize("quantize", ["plain", None, "int8"])
@pytest.mark.parametrize("change", [data_added, loaded, merged, replaced, other_norms, kv_rows, key_norms])
def test_a_drafters(change: Any, quantize: str | None) -> None:
    """The module itself, which keeps stacked projections, and with packed weights."""
    drafter = copy.deepcopy(pair(2, "cpu")[1])
    held = drafter if quantize == "plain" else PackedDrafter.of(drafter, quantize)
    assert held is not None
    before = proposed(held)
    assert torch.equal(proposed(held), before)
    change(drafter)
    other = copy.deepcopy(drafter)
    anew = other if quantize == "plain" else PackedDrafter.of(other, quantize)
    assert anew is not None
    want = proposed(anew)
    assert (want - before).norm() > 1e-3 * before.norm()
    beside = drafter if quantize == "plain" else PackedDrafter.of(drafter, quantize)
    assert beside is not None
    assert torch.equal(proposed(beside), want), "made while the old one lives"
    assert torch.equal(proposed(held), want)


def poke(weight: Tensor) -> None:
    """One element that is none of the samples, in a way that no version counts."""
    weight.data.view(-1)[1] += 1000


def test_refresh_takes_in_what_no_sample_shows() -> None:
    model = copy.deepcopy(TINY["llama"]())
    target = Target(model, (0,))
    fast, ids = FusedTarget(target), torch.arange(1, 9)[None]

    def logits() -> Tensor:
        cache = fast.new_cache(1, 32)
        fast.prefill(ids, cache)
        return fast.verify(ids[:, :4], cache).logits.clone()

    kept = fast.recognised
    poke(model.model.layers[1].mlp.down_proj.weight)
    old = logits()
    assert fast.recognised is kept, "it was one of the samples"
    fast.refresh()
    assert fast.recognised is not kept
    want = Target(copy.deepcopy(model), (0,))
    anew = FusedTarget(want)
    cache = anew.new_cache(1, 32)
    anew.prefill(ids, cache)
    assert torch.equal(logits(), anew.verify(ids[:, :4], cache).logits)
    assert not torch.equal(logits(), old)


@pytest.mark.parametrize("packed", [False, True])
def test_refresh_of_a_drafter(packed: bool) -> None:
    drafter = copy.deepcopy(pair(2, "cpu")[1])
    held = PackedDrafter.of(drafter) if packed else drafter
    assert held is not None
    before = proposed(held)
    heads, kv_heads, _ = drafter.stack[0].sizes
    first = heads * drafter.config.head_dim
    poke(drafter.stack[0].qkv_proj.weight[first : first + 8])
    poke(drafter.stack[0].qkv_proj.weight[first + kv_heads * drafter.config.head_dim :])
    held.refresh()
    after = proposed(held)
    assert (after - before).norm() > 1e-3 * before.norm()
    beside = copy.deepcopy(drafter)
    anew = PackedDrafter.of(beside) if packed else beside
    assert anew is not None
    assert torch.equal(after, proposed(anew))


def test_a_captured_round_is_told() -> None:
    """`derived` gives the same objects until weights change, in whatever way the layers run."""
    for family, fused in (("llama", True), ("gemma3", True), ("starcoder2", False)):
        model = copy.deepcopy(TINY[family]())
        fast = in_place(Target(model, (0,)))
        assert isinstance(fast, FusedTarget) is fused
        first = fast.derived()
        assert all(a is b for a, b in zip(fast.derived(), first, strict=True))
        replaced(model)
        assert not any(a is b for a, b in zip(fast.derived(), first, strict=True))
        second = fast.derived()
        fast.refresh()
        assert not any(a is b for a, b in zip(fast.derived(), second, strict=True))
