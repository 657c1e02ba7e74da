"""The drafter as a module: training forward and gradients, copies, changes of weights, precision."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from draft_cases import HEAD, TABLE, draft, randn, same, with_context
from pairs import MASK, build_drafter
from torch import Tensor, nn
from torch.nn import functional as F

from pydflash import Drafter


@pytest.fixture(autouse=True)
def no_gradients() -> Any:
    with torch.no_grad():
        yield


# --- training ---------------------------------------------------------------------------------------------------


@torch.enable_grad()
@pytest.mark.parametrize("changes", [{}, {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6}])
@pytest.mark.parametrize("version", [1, 2])
def test_the_training_forward_is_the_inference_forward(version: int, changes: dict[str, Any]) -> None:
    """One anchor, plain attention with gradients: the same hidden states, and a gradient for every parameter."""
    drafter = build_drafter(version, attention_bias=True, **changes).train()
    config, length, size = drafter.config, 12, 4
    features = randn(1, length, drafter.fc.in_features, seed=3)
    drafter.reserve(length + size)
    k_context, v_context = drafter.context_keys(drafter.fuse(features), torch.arange(length)[None])
    slots, positions = torch.arange(size), length + torch.arange(size)

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        near = config.window(layer) or 1000
        seen_context = positions[:, None] - torch.arange(length) < near
        seen_block = (slots <= slots[:, None]) | (not config.causal[layer])
        mask = torch.cat([seen_context, seen_block & ((slots[:, None] - slots).abs() < near)], -1)
        keys, values = torch.cat([k_context[layer], k], 2), torch.cat([v_context[layer], v], 2)
        return F.scaled_dot_product_attention(q, keys, values, mask, enable_gqa=True)

    block = torch.tensor([[5, MASK, MASK, MASK]])
    hidden = drafter(drafter.embed(block, TABLE), positions[None], attend)
    with torch.no_grad():
        want = drafter.eval().hidden(torch.tensor([5]), with_context(drafter, length), TABLE, size)
    torch.testing.assert_close(hidden, want, rtol=0, atol=1e-5)
    scores = drafter.logits(hidden[:, 1:], HEAD)
    if (selector := drafter.candidate_selector) is not None:
        before = selector.predecessor_codebook[torch.tensor([[5, 6, 7]])]
        scores = scores + (before * selector.hidden_projection(hidden[:, 1:])) @ selector.successor_codebook.T
    F.cross_entropy(scores[0], torch.tensor([6, 7, 8])).backward()
    HEAD.zero_grad()
    without = [name for name, p in drafter.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0]
    # A bias on all keys of a head moves every score alike but for its rotation; it has a gradient too.
    assert without == []
    assert drafter.fc.weight.grad.isfinite().all()


@torch.enable_grad()
def test_gradients_and_inference_mode_may_alternate() -> None:
    """What one kind of forward leaves behind serves the other, in evaluation mode too."""
    drafter = build_drafter(2)
    with torch.inference_mode():
        want = draft(drafter).tokens.tolist()
    assert draft(drafter).tokens.tolist() == want
    drafter.context_keys(drafter.fuse(randn(1, 3, drafter.fc.in_features)), torch.arange(3)[None])[0].sum().backward()
    assert drafter.stack[1].qkv_proj.weight.grad.abs().sum() > 0
    with torch.inference_mode():
        made_here = build_drafter(2)
        assert draft(made_here).tokens.tolist() == want
        made_here.stack[0].qkv_proj.weight.mul_(-1)
        changed = draft(made_here)
    with torch.no_grad():
        drafter.stack[0].qkv_proj.weight.mul_(-1)
        assert same(draft(drafter), changed)


# --- copies, changes --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [1, 2])
def test_copies_draft_the_same(version: int, tmp_path: Any) -> None:
    drafter = build_drafter(version, attention_bias=True)
    want = draft(drafter, temperature=1.0)
    fresh = Drafter(drafter.config).eval()
    assert not same(draft(fresh, temperature=1.0), want)
    fresh.load_state_dict(drafter.state_dict())
    drafter.save_pretrained(tmp_path)
    for other in (
        fresh,
        copy.deepcopy(drafter),
        pickle.loads(pickle.dumps(drafter)),
        Drafter.from_pretrained(tmp_path),
    ):
        assert same(draft(other, temperature=1.0), want)
        other.stack[0].qkv_proj.weight.mul_(-1)
        assert not same(draft(other, temperature=1.0), want)
    assert same(draft(drafter, temperature=1.0), want)


def test_every_change_of_the_weights_is_noticed() -> None:
    """The stacked context projection is kept between rounds; it must follow every way of changing a weight."""
    other = build_drafter(1, seed=9).state_dict()

    def in_place(d: Drafter) -> None:
        d.stack[1].qkv_proj.weight.mul_(1.5)

    def loaded(d: Drafter) -> None:
        d.load_state_dict(other)

    def assigned(d: Drafter) -> None:
        d.load_state_dict({name: tensor.clone() for name, tensor in other.items()}, assign=True)

    def replaced(d: Drafter) -> None:
        d.stack[0].qkv_proj.weight = nn.Parameter(d.stack[0].qkv_proj.weight * 2)

    def data(d: Drafter) -> None:
        d.stack[0].qkv_proj.weight.data = d.stack[0].qkv_proj.weight * 2

    def cast(d: Drafter) -> None:
        d.bfloat16().float()

    def optimised(d: Drafter) -> None:
        for p in d.parameters():
            p.grad = torch.ones_like(p)
        torch.optim.SGD(d.parameters(), 0.05).step()

    for change in (in_place, loaded, assigned, replaced, data, cast, optimised):
        drafter = build_drafter(1)
        before = with_context(drafter).k
        change(drafter)
        fresh = Drafter(drafter.config).eval()
        fresh.load_state_dict(drafter.state_dict())
        got, want = with_context(drafter).k, with_context(fresh).k
        assert torch.equal(got, want), change.__name__
        assert not torch.equal(got, before), change.__name__


def test_a_quantised_or_wrapped_projection_is_refused_by_name() -> None:
    class Packed(nn.Module):
        weight = torch.zeros(8, 8, dtype=torch.uint8)

    class Adapted(nn.Linear):
        pass

    class TwoTensors(Tensor):
        def __tensor_flatten__(self) -> Any:
            raise NotImplementedError

    plain = build_drafter(1).stack[1].qkv_proj
    wrapped = nn.Linear(1, 1)
    wrapped.weight = nn.Parameter(plain.weight.as_subclass(TwoTensors))
    for linear in (Packed(), Adapted(plain.in_features, plain.out_features), wrapped):
        drafter = build_drafter(1)
        drafter.stack[1].qkv_proj = linear
        with pytest.raises(ValueError, match=r"layers\.1\.qkv_proj must be a plain nn\.Linear, unquantised, got"):
            with_context(drafter)


def test_half_precision_moves_with_the_module() -> None:
    drafter = build_drafter(2).bfloat16()
    assert drafter.dtype == drafter.new_cache(1, 4).k.dtype == torch.bfloat16
    half = draft(drafter)
    assert half.scores.dtype == torch.float32
    wide = draft(build_drafter(2))
    shared = set(half.candidates.flatten().tolist()) & set(wide.candidates.flatten().tolist())
    assert len(shared) >= 8  # of 12: rounding moves few candidates
