"""reject_sample on trees whose first slots are a trunk with q: by hand, and against its definition in float64."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling_cases import DTYPES, FIXTURES, LEVELS, RejectCase, instruction_level, reject_case
from torch import Tensor

from pydflash import ops
from pydflash.ops import backends, reference
from pydflash.ops.reference import ACCEPT, RESIDUAL, TARGET


def trunk_case(slots: int, length: int, vocab: int, proposal: str, seed: int, **shape: Any) -> RejectCase:
    """A random tree: slots 1..length a chain with q, the others behind any slot and often likely there."""
    case = reject_case(slots=slots, vocab=vocab, proposal=proposal, seed=seed, **shape)
    generator = torch.Generator().manual_seed(seed + 1)
    batch = len(case.tokens)
    parents = (torch.rand(batch, slots, generator=generator) * torch.arange(slots)).long()
    parents[:, 1 : length + 1] = torch.arange(length)
    rows = case.logits.float().nan_to_num(-1e9, 1e9, -1e9).gather(1, parents[..., None].expand(-1, -1, vocab))
    likely = rows.topk(min(vocab, 3), -1).indices
    rank = torch.randint(likely.shape[-1], (batch, slots, 1), generator=generator)
    branches = likely.gather(-1, rank).squeeze(-1)
    branches = branches.masked_fill(torch.rand(batch, slots, generator=generator) < 0.1, -1)
    tokens = torch.where(torch.arange(slots) <= length, case.tokens, branches)
    q = case.options["draft_probs"]
    q = tuple(t[:, :length] for t in q) if isinstance(q, tuple) else q[:, :length]
    return RejectCase(case.logits, tokens, {**case.options, "draft_probs": q, "parents": parents.int()})


def assert_same(case: RejectCase, device: torch.device) -> None:
    got, want = case.run(ops.reject_sample, device), case.run(reference.reject_sample, torch.device("cpu"), True)
    for name, a, b in zip(("index", "num_accepted", "bonus"), got, want, strict=True):
        assert torch.equal(a, b), f"{name}: {a.tolist()}, expected {b.tolist()}"


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("proposal", ["dense", "sparse"])
def test_equals_the_definition(device: torch.device, level: str, dtype: torch.dtype, proposal: str) -> None:
    values = itertools.cycle(("normal", "ties", "equal", "broken"))
    with instruction_level(level, device):
        for seed, (vocab, (slots, length)) in enumerate(
            itertools.product((2, 3, 64, 127, 1000), ((2, 1), (6, 2), (12, 4), (9, 0)))
        ):
            case = trunk_case(slots, length, vocab, proposal, seed, batch=8, dtype=dtype, values=next(values))
            assert_same(case, device)


@settings(max_examples=120, deadline=None, suppress_health_check=FIXTURES)
@given(
    batch=st.integers(1, 5),
    slots=st.integers(1, 16),
    length=st.integers(0, 7),
    vocab=st.integers(1, 60),
    proposal=st.sampled_from(("dense", "sparse")),
    values=st.sampled_from(("normal", "ties", "equal", "broken")),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 10**6),
)
def test_equals_the_definition_for_drawn_cases(device: torch.device, slots: int, length: int, **shape: Any) -> None:
    assert_same(trunk_case(slots, min(length, slots - 1), **shape), device)


COUNT = 512
P = torch.tensor([0.4, 0.3, 0.2, 0.1])
Q = torch.tensor([0.1, 0.2, 0.4, 0.3])
SEEDS = torch.arange(COUNT)


def uniforms(purpose: int, depth: int) -> Tensor:
    """The uniforms of the token that follows `depth` accepted drafts."""
    return reference.uniform(SEEDS, torch.tensor(depth + 1), purpose)


def drawn(law: Tensor, u: Tensor) -> Tensor:
    return (law.cumsum(-1)[None] <= u[:, None] * law.sum()).sum(-1)


def verify(tokens: list[int], parents: list[int], q: Any, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """COUNT blocks of the same drafts and of the law P in every row."""
    size = len(tokens)
    logits = P.log().to(device).expand(COUNT, size, 4)
    block = torch.tensor(tokens, device=device).expand(COUNT, size)
    links = torch.tensor(parents, device=device).expand(COUNT, size)
    index, accepted, bonus = ops.reject_sample(logits, block, links, q, 1.0, seeds=SEEDS.to(device))
    return index.cpu(), accepted.cpu(), bonus.cpu()


def rows_of_q(length: int, device: torch.device) -> Tensor:
    return Q.to(device).expand(COUNT, length, 4)


def test_the_uniforms_of_every_step(device: torch.device) -> None:
    #   0 ─ 1 (2) ─ 2 (3)      slot (token); 1 and 2 are the trunk
    #   │   └────── 4 (0)
    #   └── 3 (0) ─ 5 (1)
    index, accepted, bonus = verify([9, 2, 3, 0, 0, 1], [0, 0, 1, 0, 1, 3], rows_of_q(2, device), device)
    residual = (P - Q).clamp_min(0)
    first, second = uniforms(ACCEPT, 0) * 0.4 < 0.2, uniforms(ACCEPT, 1) * 0.3 < 0.1
    paths: set[tuple[int, ...]] = set()
    for i in range(COUNT):
        path, token = [0], int(drawn(residual, uniforms(RESIDUAL, 0))[i])
        if first[i]:
            path.append(1)
            token = int(drawn(residual, uniforms(RESIDUAL, 1))[i])
            if second[i]:
                path.append(2)
                token = int(drawn(P, uniforms(TARGET, 2))[i])  # behind the trunk
            elif token == 0:
                path.append(4)
                token = int(drawn(P, uniforms(TARGET, 2))[i])
        elif token == 0:
            path.append(3)
            token = int(drawn(P, uniforms(TARGET, 1))[i])  # off the trunk
            if token == 1:
                path.append(5)
                token = int(drawn(P, uniforms(TARGET, 2))[i])
        assert index[i].tolist() == path + [-1] * (6 - len(path))
        assert (accepted[i], bonus[i]) == (len(path) - 1, token)
        paths.add(tuple(path))
    assert paths == {(0,), (0, 1), (0, 1, 2), (0, 1, 4), (0, 3), (0, 3, 5)}


def test_branches_beside_the_trunk_are_more_to_accept(device: torch.device) -> None:
    """Of 512 blocks the trunk keeps about 1/2 at slot 1 (p/q of token 2); half of the rest draw token 0 and 1."""
    chain = verify([9, 2], [0, 0], rows_of_q(1, device), device)
    tree = verify([9, 2, 0, 1], [0, 0, 0, 0], rows_of_q(1, device), device)
    plain = verify([9, 2, 0, 1], [0, 0, 0, 0], None, device)
    assert chain[1].sum() == (uniforms(ACCEPT, 0) * 0.4 < 0.2).sum()
    assert tree[1].tolist() == [1] * COUNT  # the residual holds tokens 0 and 1 only, and both are drafts
    assert abs(plain[1].sum().item() - 0.9 * COUNT) < 5 * (COUNT * 0.09) ** 0.5
    assert torch.equal(tree[0][:, 1] == 1, chain[0][:, 1] == 1)
    # What is refused in a chain is the branch's token in the tree.
    refused = chain[1] == 0
    assert torch.equal(tree[0][refused, 1].long() - 2, chain[2][refused])


def test_a_branch_that_repeats_the_refused_draft_changes_nothing(device: torch.device) -> None:
    chain = verify([9, 2], [0, 0], rows_of_q(1, device), device)
    tree = verify([9, 2, 2, 0], [0, 0, 1, 1], rows_of_q(1, device), device)
    refused = chain[1] == 0
    assert torch.equal(tree[2][refused], chain[2][refused])
    # Where q says nothing the draft is refused and the draw is from p: the draft's own slot stays refused.
    broken = torch.full((COUNT, 1, 4), torch.nan, device=device)
    index, accepted, bonus = verify([9, 2], [0, 0], broken, device)
    assert accepted.sum() == 0
    assert set(bonus.tolist()) == {0, 1, 2, 3}
    index, accepted, _ = verify([9, 2, 2], [0, 0, 0], broken, device)
    assert torch.equal(accepted == 1, drawn(P, uniforms(RESIDUAL, 0)) == 2)
    assert torch.equal(index[:, 1] == 2, accepted == 1)


def test_a_trunk_that_ends_early_goes_on_without_q(device: torch.device) -> None:
    tokens, parents, q = [9, 2, -1, 0, 1], [0, 0, 1, 1, 2], rows_of_q(3, device)
    if backends.name_for(device.type) == "cpu":  # what a device holds is not looked at before the launch
        with pytest.raises(ValueError, match=r"reject_sample: parents\[0, 3\] must be 2"):
            verify(tokens, parents, q, device)
    index, accepted, bonus = verify(tokens, parents, q[:, :2], device)
    kept = uniforms(ACCEPT, 0) * 0.4 < 0.2
    follows = drawn(P, uniforms(TARGET, 1))  # no draft in slot 2, so the target draws
    assert torch.equal(accepted[kept].long(), 1 + (follows[kept] == 0).long())
    assert torch.equal(bonus[kept & (follows > 0)], follows[kept & (follows > 0)])
    assert set(index[kept, 2].tolist()) == {-1, 3}


@pytest.mark.parametrize("proposal", ["dense", "sparse"])
def test_a_tree_that_is_a_chain_equals_the_chain(device: torch.device, proposal: str) -> None:
    """With all q, with q of the first drafts only, and with none: parents change nothing."""
    case = reject_case(32, 6, 50, proposal, seed=7)
    q = case.options.pop("draft_probs")
    for length in (5, 3, 0):
        part = tuple(t[:, :length] for t in q) if isinstance(q, tuple) else q[:, :length]
        chain = RejectCase(case.logits, case.tokens, {**case.options, "draft_probs": part})
        links = (torch.arange(6) - 1).clamp_min(0).expand(32, 6)
        tree = RejectCase(case.logits, case.tokens, {**chain.options, "parents": links})
        found = chain.run(ops.reject_sample, device)
        for a, b in zip(found, tree.run(ops.reject_sample, device), strict=True):
            assert torch.equal(a, b)
        assert_same(chain, device)
        if length == 0:
            for a, b in zip(found, case.run(ops.reject_sample, device), strict=True):
                assert torch.equal(a, b)


def test_greedy_rows_do_not_look_at_q(device: torch.device) -> None:
    case = trunk_case(12, 4, 40, "sparse", 3, batch=16)
    case.options["temperature"] = torch.zeros(16)
    without = RejectCase(case.logits, case.tokens, {**case.options, "draft_probs": None})
    results = case.run(ops.reject_sample, device), without.run(ops.reject_sample, device)
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)
    assert results[0][1].sum() > 8


@pytest.mark.parametrize("proposal", ["dense", "sparse"])
def test_a_row_of_a_batch_equals_the_row_alone_and_strides_do_not_matter(device: torch.device, proposal: str) -> None:
    case = trunk_case(10, 3, 9000, proposal, 4, batch=8)
    whole = case.run(ops.reject_sample, device)
    for row in range(8):
        alone = case.row(row).run(ops.reject_sample, device)
        for a, b in zip(alone, whole, strict=True):
            assert torch.equal(a, b[row : row + 1])
    q = case.options["draft_probs"]
    other = tuple(t.repeat_interleave(2, 1)[:, ::2] for t in (q if isinstance(q, tuple) else (q,)))
    options = {**case.options, "draft_probs": other if isinstance(q, tuple) else other[0]}
    options["parents"] = options["parents"].long()
    for a, b in zip(RejectCase(case.logits, case.tokens, options).run(ops.reject_sample, device), whole, strict=True):
        assert torch.equal(a, b)


def test_opcheck(device: torch.device) -> None:
    for proposal in ("dense", "sparse"):
        case = trunk_case(7, 2, 11, proposal, 2, batch=2).on(device)
        options, draft = case.options, case.options["draft_probs"]
        ids, probs = draft if isinstance(draft, tuple) else (None, draft)
        rows = [options[name] for name in ("temperature", "top_k", "top_p", "min_p", "seeds", "starts")]
        args = (case.logits, case.tokens, options["parents"], ids, probs.contiguous(), *rows, 11)
        torch.library.opcheck(torch.ops.pydflash.reject_sample.default, args)


LOGITS, TOKENS = torch.zeros(2, 4, 5), torch.zeros(2, 4, dtype=torch.int64)
CHAIN = torch.tensor([[0, 0, 1, 1], [0, 0, 1, 0]])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"parents": torch.tensor([[0, 0, 1, 1], [0, 0, 0, 2]])},
            r"parents\[1, 2\] must be 1 \(draft_probs holds q of slots 1 to 2, a chain\), got 0",
        ),
        ({"draft_probs": torch.zeros(2, 3, 5)}, r"parents\[0, 3\] must be 2 \(draft_probs holds q of slots 1 to 3"),
        (
            {"draft_probs": torch.zeros(2, 4, 5)},
            r"draft_probs must be of shape \[B, W, V\] with W <= S-1 = 3, got W = 4",
        ),
        ({"draft_probs": torch.zeros(2, 2, 4)}, r"draft_probs must be of shape \[B, W, V\] with V >= vocab_size = 5"),
        (
            {"draft_probs": torch.zeros(1, 2, 5)},
            r"draft_probs must be of shape \[B, W, V\] = \[2, \?, \?\], got \[1, 2",
        ),
        ({"draft_probs": torch.zeros(2, 5)}, r"draft_probs must be of shape \[B, W, V\] = \[2, \?, \?\], got \[2, 5\]"),
        (
            {"draft_probs": (TOKENS[:, :3, None], torch.zeros(2, 2, 1))},
            r"draft_ids must be of shape \[B, W, K\] = \[2, 2, 1\], got \[2, 3, 1\]",
        ),
        (
            {"draft_probs": (TOKENS[:, :, None], torch.zeros(2, 4, 1))},
            r"draft_probs must be of shape \[B, W, K\] with W <= S-1 = 3, got W = 4",
        ),
    ],
)
def test_arguments_that_do_not_fit_are_named(change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"parents": CHAIN, "draft_probs": torch.zeros(2, 2, 5), **change}
    ops.reject_sample(LOGITS, TOKENS, CHAIN, torch.zeros(2, 2, 5), 1.0)
    with pytest.raises(ValueError, match=f"reject_sample: {message}"):
        ops.reject_sample(LOGITS, TOKENS, temperature=1.0, **arguments)


def test_the_definition_refuses_a_tree_where_it_needs_a_chain() -> None:
    with pytest.raises(ValueError, match="reject_sample: parents must be a chain in slots 1 to 3"):
        reference.reject_sample(LOGITS, TOKENS, CHAIN, torch.zeros(2, 3, 5), 1.0)
