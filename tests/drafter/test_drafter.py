"""The drafter's proposals: its input, heads and candidates, the two versions as one, block sizes, seeds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from draft_cases import HEAD, TABLE, draft, randn, same, with_context
from fakes import FakeTarget, scripted
from pairs import HIDDEN, MASK, VOCAB, build_drafter, config_dict
from tiny_models import TINY
from torch import Tensor, nn
from torch.nn import functional as F

from pydflash import Drafter, DrafterConfig, Speculator


@pytest.fixture(autouse=True)
def no_gradients() -> Any:
    with torch.no_grad():
        yield


# --- input ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [1, 2])
def test_the_block_is_the_anchor_and_masks(version: int, monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = build_drafter(version)
    embed, rows = drafter.embed, []
    monkeypatch.setattr(drafter, "embed", lambda ids, table: rows.append(ids.tolist()) or embed(ids, table))
    proposal = draft(drafter, anchor=7)
    assert rows == [[[7, MASK, MASK, MASK]]]
    assert proposal.tokens.shape == (1, 3)


@pytest.mark.parametrize("version", [1, 2])
def test_drafts_change_with_the_anchor_and_with_the_context(version: int) -> None:
    drafter = build_drafter(version)
    cache = with_context(drafter)
    one, other = (drafter.hidden(torch.tensor([anchor]), cache, TABLE, 4) for anchor in (7, 8))
    assert (one - other).abs().amax(-1).min() > 1e-3  # in every slot
    assert draft(drafter, 7).tokens.tolist() != draft(drafter, 8).tokens.tolist()
    elsewhere = drafter.hidden(torch.tensor([7]), with_context(drafter, seed=4), TABLE, 4)
    assert (one - elsewhere).abs().amax(-1).min() > 1e-3


def test_embeddings_are_scaled_once() -> None:
    """The raw row times the drafter's own scale, also where the target's module scales what it looks up."""

    class Scaled(nn.Embedding):
        def forward(self, ids: Tensor) -> Tensor:
            return super().forward(ids) * 8.0

    module = Scaled(VOCAB, HIDDEN)
    ids = torch.tensor([[3, MASK]])
    for scale in (1.0, 3.0):
        drafter = build_drafter(1, input_embedding_scale=scale)
        for table in (module, module.weight):
            assert torch.equal(drafter.embed(ids, table), module.weight[ids] * scale)


def test_mask_embedding_replaces_the_masks_row() -> None:
    drafter = build_drafter(1, input_embedding_scale=2.0)
    drafter.mask_embedding = randn(HIDDEN, seed=8)
    rows = drafter.embed(torch.tensor([[3, MASK]]), TABLE)
    assert torch.equal(rows, torch.stack([TABLE[3], drafter.mask_embedding])[None] * 2)


def test_own_tables_come_before_the_targets() -> None:
    drafter = build_drafter(1)
    tensors = drafter.canonical()
    tensors["embed_tokens.weight"] = randn(VOCAB, HIDDEN, seed=6)
    tensors["lm_head.weight"] = randn(VOCAB, HIDDEN, seed=7)
    own = Drafter(drafter.config)
    own.load_canonical(tensors)
    head = nn.Linear(HIDDEN, VOCAB, bias=False)
    head.weight.copy_(tensors["lm_head.weight"])
    want = draft(drafter, embed=tensors["embed_tokens.weight"], head=head)
    assert same(draft(own.eval()), want)
    assert same(draft(own, embed=None, head=None), want)
    assert not same(draft(drafter), want)
    for missing, message in (({"embed": None}, "embed: the target's embedding table"), ({"head": None}, "logits: the")):
        with pytest.raises(ValueError, match=message):
            draft(drafter, **missing)


# --- heads ------------------------------------------------------------------------------------------------------


def test_multiplier_and_soft_cap() -> None:
    """Cap 30 on [100, 0, -100]: 30 tanh(10/3) = 29.923739; the multiplier comes first."""
    head = nn.Linear(HIDDEN, 3, bias=False)
    head.weight.zero_()
    head.weight[:, 0] = torch.tensor([100.0, 0.0, -100.0])
    hidden = F.one_hot(torch.tensor([[0]]), HIDDEN).float()
    capped = build_drafter(1, final_logit_softcapping=30.0)
    expected = torch.tensor([[[29.923739, 0.0, -29.923739]]])
    torch.testing.assert_close(capped.logits(hidden, head), expected, rtol=0, atol=2e-6)
    both = build_drafter(1, final_logit_softcapping=30.0, output_multiplier=0.25)
    assert abs(float(both.logits(hidden, head)[0, 0, 0]) - 20.467854) < 1e-5  # 30 tanh(25 / 30)
    assert torch.equal(
        build_drafter(1, output_multiplier=0.25).logits(hidden, head)[0, 0], torch.tensor([25.0, 0, -25])
    )


def test_a_soft_cap_keeps_the_order_and_changes_the_law() -> None:
    plain, capped = build_drafter(1), build_drafter(1, final_logit_softcapping=2.0)
    one, two = draft(plain, temperature=1.0), draft(capped, temperature=1.0)
    assert torch.equal(one.candidates, two.candidates)
    assert torch.equal(draft(plain).tokens, draft(capped).tokens)
    assert one.probs is not None
    assert two.probs is not None
    assert (one.probs - two.probs).abs().max() > 0.05


@pytest.mark.parametrize("name", ["llama", "llama_tied", "gemma3_nested"])
def test_the_head_is_the_targets_own(name: str) -> None:
    """Untied, tied and nested heads: draft logits are the output embeddings of the hidden states."""
    from pydflash import Target

    try:
        model = TINY[name](**({} if name == "gemma3_nested" else {"num_hidden_layers": 3}))
        target = Target(model, (0, 2))
    except ValueError as refused:
        pytest.skip(str(refused))
    drafter = build_drafter(1, num_target_layers=target.num_layers)
    hidden = randn(1, 3, HIDDEN)
    assert torch.equal(drafter.logits(hidden, target.head), model.get_output_embeddings()(hidden))
    assert target.embed_weight.data_ptr() == model.get_input_embeddings().weight.data_ptr()


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, None])
def test_a_quantised_head_is_called_as_a_module(dtype: torch.dtype | None) -> None:
    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            if dtype is not None:
                self.weight = nn.Parameter(torch.zeros(3, 2).to(dtype), requires_grad=False)

        def forward(self, hidden: Tensor) -> Tensor:
            assert hidden.dtype == torch.float32
            return hidden @ HEAD.weight.T

    for version in (1, 2):
        drafter = build_drafter(version)
        assert same(draft(drafter, head=Packed()), draft(drafter))


@pytest.mark.parametrize("temperature", [None, 5.0])
@pytest.mark.parametrize("version", [1, 2])
def test_padded_head_rows_are_never_drafted(version: int, temperature: float | None) -> None:
    """97 real rows and 31 padded ones with the largest logits."""
    drafter = build_drafter(version)
    padded = nn.Linear(HIDDEN, 128, bias=True)
    padded.weight.zero_()
    padded.weight[:VOCAB].copy_(HEAD.weight)
    padded.bias.zero_()
    padded.bias[VOCAB:] = 1000.0
    got = draft(drafter, head=padded, temperature=temperature)
    assert int(got.candidates.max()) < VOCAB
    assert same(got, draft(drafter, temperature=temperature))


@pytest.mark.parametrize("top_k", [1, 4, VOCAB])
def test_number_of_candidates(top_k: int) -> None:
    proposal = draft(build_drafter(2, selector_top_k=top_k), temperature=1.0)
    assert proposal.candidates.shape == proposal.probs.shape == (1, 3, top_k)
    assert proposal.scores.shape == (1, 3, top_k, top_k)
    assert all(len(set(row)) == top_k for row in proposal.candidates[0].tolist())
    with pytest.raises(ValueError, match="selector_top_k"):
        build_drafter(2, selector_top_k=VOCAB + 1)


def test_a_reduced_vocabulary_drafts_target_ids() -> None:
    """d2t is an offset: draft id i stands for target id i + d2t[i]."""
    base = build_drafter(1)
    raw = config_dict(1) | {"draft_vocab_size": 40}
    odd = torch.arange(40) * 2 + 1
    tensors = base.canonical() | {"lm_head.weight": HEAD.weight[odd].clone(), "d2t": odd - torch.arange(40)}
    drafter = Drafter(DrafterConfig.from_dict(raw))
    drafter.load_canonical(tensors)
    proposal = draft(drafter.eval(), head=None, temperature=1.0)
    assert set(proposal.candidates.flatten().tolist()) <= set(odd.tolist())
    hidden = base.hidden(torch.tensor([5]), with_context(base), TABLE, 4)[:, 1:]
    assert torch.equal(draft(drafter, head=None).tokens, odd[F.linear(hidden, HEAD.weight[odd]).argmax(-1)])
    assert all(t in c for t, c in zip(proposal.tokens[0].tolist(), proposal.candidates[0].tolist(), strict=True))
    # In the loop: exact greedy text, and at T > 0 the reported law belongs to the mapped ids.
    text = [3, *range(10, 60)]
    spec = Speculator(FakeTarget(scripted(text), (0, 2)), drafter, draft_sampling=True)
    assert spec.generate([3], 30).token_ids == text[1:31]
    assert spec.generate([3], 30, temperature=1.0, seed=0).token_ids == text[1:31]


# --- versions and layers ----------------------------------------------------------------------------------------


def test_identity_convolutions_and_zero_successors_make_version_2_version_1() -> None:
    one = build_drafter(1)
    two = Drafter(DrafterConfig.from_dict(config_dict(2, selector_top_k=16))).eval()
    missing, unexpected = two.load_state_dict(one.state_dict(), strict=False)
    assert not unexpected
    assert all("conv" in name or "selector" in name for name in missing)
    cache = with_context(one)
    two.reserve(cache.capacity)
    hidden = one.hidden(torch.tensor([5]), cache, TABLE, 4)
    assert torch.equal(two.hidden(torch.tensor([5]), cache, TABLE, 4), hidden)
    for temperature in (None, 0.8):
        first, second = (draft(d, temperature=temperature, seeds=4) for d in (one, two))
        assert torch.equal(first.tokens, second.tokens)
        assert torch.equal(first.candidates, second.candidates)
        assert torch.equal(first.scores[:, :, None].expand(-1, -1, 16, -1), second.scores)
        assert temperature is None or torch.equal(first.probs, second.probs)
    # Each of the two matters once it is not neutral.
    two.stack[0].mlp_conv.base_kernel[0, 1] = 0.1
    assert not torch.allclose(two.hidden(torch.tensor([5]), cache, TABLE, 4), hidden)


@pytest.mark.parametrize("version", [1, 2])
def test_causal_layers_ignore_later_masks(version: int) -> None:
    causal, both_ways = (build_drafter(version, block_size=6, is_causal=flag) for flag in (True, False))
    anchor = torch.tensor([5])
    for drafter, equal in ((causal, True), (both_ways, False)):
        cache = with_context(drafter)
        whole = drafter.hidden(anchor, cache, TABLE, 6)
        for size in range(1, 6):
            part = drafter.hidden(anchor, cache, TABLE, size)
            assert torch.allclose(part, whole[:, :size], rtol=0, atol=1e-5) is equal
    mixed = build_drafter(version, layer_types=["sliding_attention", "full_attention"], sliding_window=9)
    assert mixed.config.causal == (True, False)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("version", [1, 2])
def test_smaller_blocks_than_trained(version: int, size: int) -> None:
    drafter = build_drafter(version)
    for temperature in (None, 1.0):
        proposal = draft(drafter, block_size=size, temperature=temperature)
        candidates = 4 if version == 2 else 16
        assert proposal.tokens.shape == (1, size - 1)
        assert proposal.candidates.shape == (1, size - 1, candidates)
        assert (proposal.probs is None) == (temperature is None)
        assert proposal.probs is None or proposal.probs.dtype == torch.float32


@pytest.mark.parametrize("version", [1, 2])
def test_sampled_paths_follow_seed_and_temperature(version: int) -> None:
    drafter = build_drafter(version)
    cache = with_context(drafter)

    def path(temperature: float | None, seeds: Any) -> list[list[int]]:
        return draft(drafter, cache=cache, temperature=temperature, seeds=seeds).tokens.tolist()

    assert path(3.0, 1) == path(3.0, 1) == path(3.0, [1]) == path(3.0, torch.tensor([1]))
    assert len({str(path(3.0, seed)) for seed in range(20)}) > 5
    assert path(0.0, 1) == path(None, 1) == path(1e-6, 2)


def test_arguments_are_checked() -> None:
    drafter = build_drafter(1)
    with pytest.raises(ValueError, match="Drafter: backend must be 'native' or 'reference', got 'gpu'"):
        Drafter(drafter.config, backend="gpu")
    for size in (0, 5, -1):
        with pytest.raises(ValueError, match=rf"propose: block_size must be 1 to 4 \(as trained\), got {size}"):
            draft(drafter, block_size=size)
    with pytest.raises(ValueError, match=r"features must be \[B, C, 128\], B = 1 as the cache.s, got \[1, 3, 64\]"):
        drafter.append_context(randn(1, 3, 64), drafter.new_cache(1, 8))
