"""What is emitted is distributed as the filtered target, whatever proposes: chi-square tests of 200k tokens each.

All seeds are fixed. FAMILY tests share a level of 1e-4 (Bonferroni): a p-value below ALPHA = 1e-4 / FAMILY fails, so
with other seeds a right sampler fails about once in 10,000 runs of the file. With 200k draws over a law whose tokens
have at least 0.15 each, moving 0.01 from one token to another is found with a probability above 0.999
(`test_power`). Laws p are written out here or computed in float64, apart from the code under test.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from pydflash import ops
from pydflash.ops import backends

DRAWS = 200_000
FAMILY = 96
ALPHA = 1e-4 / FAMILY
P = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
Q = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)

Draft = tuple[Tensor, Any, Tensor | None]  # tokens [B, S], q, parents
Propose = Callable[[Tensor, Tensor, Tensor, torch.device], Draft]  # (anchors, seeds, starts, the ops' device)


def on(device: torch.device, op: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """What an op gives on a device, as CPU tensors."""
    if backends.name_for(device.type) == "sycl":
        pytest.skip("so many rows take minutes where a CPU plays the GPU")

    def moved(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(moved(v) for v in value)
        return value.to(device) if isinstance(value, Tensor) else value

    results = op(*map(moved, arguments), **{name: moved(value) for name, value in options.items()})
    return tuple(None if t is None else t.cpu() for t in results)


def p_value(tokens: Tensor, law: Tensor) -> float:
    """Chi-square of drawn ids against a law; 0 if an id of no probability was drawn."""
    counts = torch.bincount(tokens.flatten(), minlength=law.numel()).double()
    if counts[law == 0].sum() > 0:
        return 0.0
    counts, law = counts[law > 0], law[law > 0].double()
    law = law / law.sum()
    return float(stats.chisquare(counts.numpy(), (law * counts.sum()).numpy()).pvalue)


def draw(law: Tensor, count: int, seed: int) -> Tensor:
    """Ids from one law [V] by torch's own generator."""
    return pick(law.expand(count, -1), torch.Generator().manual_seed(seed))


def pick(laws: Tensor, generator: torch.Generator) -> Tensor:
    """One id from each of [count, V] laws, which need not sum to 1."""
    cumulative = laws.double().cumsum(-1)
    u = torch.rand(len(laws), 1, generator=generator, dtype=torch.float64)
    return (cumulative <= u * cumulative[:, -1:]).sum(-1)


def first_token(
    device: torch.device, logits: Tensor, drafts: Tensor, q: Any = None, **options: Any
) -> tuple[Tensor, Tensor]:
    """The first emitted token of DRAWS blocks of one draft, and which drafts were accepted."""
    rows = logits[None, None].expand(DRAWS, 2, len(logits))
    tokens = torch.stack([torch.zeros_like(drafts), drafts], 1)
    if isinstance(q, tuple):
        q = tuple(t[None, None].expand(DRAWS, 1, -1) for t in q)
    elif q is not None:
        q = q.float()[None, None].expand(DRAWS, 1, -1)
    seeds = torch.arange(DRAWS) + 10**9
    _, accepted, bonus = on(device, ops.reject_sample, rows, tokens, None, q, seeds=seeds, **options)
    return torch.where(accepted > 0, drafts, bonus), accepted > 0


def test_power() -> None:
    law = torch.full((6,), 0.8 / 5).double()
    law[0] = 0.2
    shift = torch.tensor([0.01, -0.01, 0, 0, 0, 0]).double()
    noncentrality = float(DRAWS * (shift**2 / law).sum())
    assert stats.ncx2.sf(stats.chi2.isf(ALPHA, 5), 5, noncentrality) > 0.999


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", ["dense", "sparse", "argmax", "other"])
def test_first_token_for_every_kind_of_proposal(device: torch.device, kind: str, dtype: torch.dtype) -> None:
    logits = P.log().to(dtype)
    law = logits.double().softmax(-1)  # of the rounded logits: bfloat16 moves p by up to 0.004
    if kind == "argmax":
        emitted, accepted = first_token(device, logits, torch.zeros(DRAWS, dtype=torch.int64), temperature=1.0)
        rate = law[0]
    elif kind == "other":
        emitted, accepted = first_token(device, logits, draw(Q, DRAWS, 1), temperature=1.0)
        rate = (law * Q).sum()
    else:
        q = Q if kind == "dense" else (torch.tensor([2, 0, -1, 1]), Q[[2, 0, 0, 1]].float())
        emitted, accepted = first_token(device, logits, draw(Q, DRAWS, 1), q, temperature=1.0)
        rate = torch.minimum(law, Q).sum()  # 0.7 for float32
    assert p_value(emitted, law) > ALPHA
    assert stats.binomtest(int(accepted.sum()), DRAWS, float(rate)).pvalue > ALPHA


def first(count: int, temperature: float) -> Tensor:
    """softmax(LOGITS / temperature) without what comes after the first `count` in order."""
    law = (LOGITS.double() / temperature).softmax(-1)
    law[LOGITS.sort(descending=True, stable=True).indices[count:]] = 0
    return law


LOGITS = torch.tensor([1.0, 0.2, -0.5, 1.4, 0.2, -2.0, 0.9, 0.2])
# In order at T = 1: ids 3, 0, 6 hold .30 .20 .18, the ties 1, 4, 7 .09 each, then 2 .04 and 5 .01.
FILTERS: list[tuple[dict[str, Any], Tensor]] = [
    ({"temperature": 0.3}, first(8, 0.3)),
    ({"temperature": 1.7}, first(8, 1.7)),
    ({"temperature": 1.0, "top_k": 5}, first(5, 1.0)),  # cuts between the ties
    ({"temperature": 1.0, "top_p": 0.75}, first(4, 1.0)),
    ({"temperature": 1.0, "top_k": 5, "top_p": 0.85}, first(4, 1.0)),  # of the five, not of all, where 5 would stay
    ({"temperature": 1.0, "min_p": 0.4}, first(3, 1.0)),
    ({"temperature": 1.7, "top_k": 6, "top_p": 0.8, "min_p": 0.45}, first(5, 1.7)),
]


@pytest.mark.parametrize(("options", "law"), FILTERS, ids=[str(options) for options, _ in FILTERS])
@pytest.mark.parametrize("kind", ["dense", "sparse", "none"])
def test_first_token_under_filters(device: torch.device, options: dict[str, Any], law: Tensor, kind: str) -> None:
    soft = (LOGITS.flip(0).double() / 2).softmax(-1)
    ids = torch.tensor([6, 3, 7, 0])
    q: Any = {"dense": soft, "sparse": (ids, torch.tensor([0.1, 0.2, 0.3, 0.4])), "none": None}[kind]
    dense = torch.zeros(8).double().index_add(0, *(ids, q[1].double())) if kind == "sparse" else soft
    emitted, _ = first_token(device, LOGITS, draw(dense, DRAWS, 2), q, **options)
    assert p_value(emitted, law) > ALPHA


def mutant(name: str, drafts: Tensor) -> Tensor:
    """Samplers that are wrong in ways seen in the wild, for the law P and proposals from Q."""
    generator = np.random.default_rng(4)
    u, redraw = torch.tensor(generator.random(DRAWS)), draw(P, DRAWS, 5)
    residual = draw((P - Q).clamp_min(0), DRAWS, 6)
    ratio = (P / Q)[drafts]
    return {
        "accepts with p alone and draws again from p": torch.where(u < P[drafts], drafts, redraw),
        "accepts with p alone, draws from the residual": torch.where(u < P[drafts], drafts, residual),
        "draws again from p": torch.where(u < ratio, drafts, redraw),
        "right": torch.where(u < ratio, drafts, residual),
    }[name]


@pytest.mark.parametrize(
    ("name", "law"),
    [
        ("accepts with p alone and draws again from p", [0.445, 0.357, 0.198]),
        ("accepts with p alone, draws from the residual", [0.79, 0.15, 0.06]),
        ("draws again from p", [0.35, 0.39, 0.26]),
        ("right", P.tolist()),
    ],
)
def test_mutants_are_told_from_the_right_law(name: str, law: list[float]) -> None:
    emitted = mutant(name, draw(Q, DRAWS, 3))
    assert (p_value(emitted, P) > ALPHA) == (name == "right")
    assert p_value(emitted, torch.tensor(law)) > ALPHA


def test_a_draft_from_another_law_than_the_reported_q_is_found_out(device: torch.device) -> None:
    emitted, _ = first_token(device, P.log().float(), torch.ones(DRAWS, dtype=torch.int64), Q, temperature=1.0)
    assert p_value(emitted, P) < ALPHA
    assert p_value(emitted, torch.tensor([0.4, 0.6, 0.0])) > ALPHA


# A target and drafters on 3 tokens whose law depends on the token before.
TARGET = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.6, 0.3], [0.4, 0.2, 0.4]], dtype=torch.float64)
DRAFTER = torch.tensor([[0.2, 0.5, 0.3], [0.3, 0.3, 0.4], [0.1, 0.8, 0.1]], dtype=torch.float64)
LENGTH, BLOCK, TEXTS = 4, 3, DRAWS // 4


def emit(propose: Propose, temperature: Tensor, device: torch.device, length: int = LENGTH, **options: Any) -> Tensor:
    """A text of `length` tokens for each temperature, by whole rounds from token 0 on."""
    count = len(temperature)
    text = torch.full((count, length + 8), -1)
    text[:, 0] = 0
    rows, seeds, starts = torch.arange(count), torch.arange(count) * 7919, torch.zeros(count, dtype=torch.int64)
    while bool((starts < length).any()):
        anchors = text[rows, starts]
        tokens, q, parents = propose(anchors, seeds, starts, device)
        logits = TARGET.log().float()[tokens]
        index, accepted, bonus = on(
            device,
            ops.reject_sample,
            *(logits, tokens, parents, q, temperature),
            seeds=seeds,
            starts=starts.int(),
            **options,
        )
        path = tokens.gather(1, index.clamp_min(0).long())
        for depth in range(1, tokens.shape[1]):
            kept = (depth <= accepted) & (starts < length)
            text[rows[kept], starts[kept] + depth] = path[kept, depth]
        live = starts < length
        text[rows[live], (starts + accepted + 1)[live]] = bonus[live]
        starts = torch.where(live, starts + accepted + 1, starts)
    return text[:, 1 : length + 1]


class Chain:
    """Sampled drafts, with the q they were drawn from: dense, or sparse in another order."""

    def __init__(self, sparse: bool) -> None:
        self.sparse, self.generator = sparse, torch.Generator().manual_seed(11)

    def __call__(self, anchors: Tensor, seeds: Tensor, starts: Tensor, device: torch.device) -> Draft:
        tokens, laws = [anchors], []
        for _ in range(BLOCK - 1):
            laws.append(DRAFTER[tokens[-1]].float())
            tokens.append(pick(laws[-1], self.generator))
        probs = torch.stack(laws, 1)
        if not self.sparse:
            return torch.stack(tokens, 1), probs, None
        order = torch.tensor([2, 0, 1])
        return torch.stack(tokens, 1), (order.expand(probs.shape), probs[..., order]), None


def plain(anchors: Tensor, seeds: Tensor, starts: Tensor, device: torch.device) -> Draft:
    return anchors[:, None], None, None


def argmax_chain(anchors: Tensor, seeds: Tensor, starts: Tensor, device: torch.device) -> Draft:
    best = DRAFTER.argmax(-1)
    return torch.stack([anchors, best[anchors], best[best[anchors]]], 1), None, None


def tree(anchors: Tensor, seeds: Tensor, starts: Tensor, device: torch.device) -> Draft:
    """Two children of the anchor, and one of each of them."""
    top = DRAFTER.topk(2, -1).indices
    children = top[anchors]
    tokens = torch.cat([anchors[:, None], children, top[children[:, 0], 1:], top[children[:, 1], :1]], 1)
    return tokens, None, torch.tensor([0, 0, 0, 1, 2]).expand(tokens.shape).int()


class Walk:
    """Drafts of path_select with a selector, K = 2 of 3 tokens at temperature 0.6, and the q it reports."""

    def __init__(self, reported: float) -> None:
        self.reported = reported  # the temperature q is computed with; 0.6 is the truth
        generator = torch.Generator().manual_seed(12)
        self.predecessor, self.successor, hidden = (torch.randn(n, 4, generator=generator) for n in (3, 3, 2))
        self.hidden = hidden

    def __call__(self, anchors: Tensor, seeds: Tensor, starts: Tensor, device: torch.device) -> Draft:
        count = len(anchors)
        logits = DRAFTER.log().float()[anchors][:, None].expand(count, BLOCK - 1, 3)
        hidden = self.hidden.expand(count, -1, -1)
        selector = (hidden, self.predecessor, self.successor)
        drafts, candidates, probs, scores = on(
            device, ops.path_select, logits, *selector, anchors, 0.6, seeds, starts, 2
        )
        assert probs is not None
        if self.reported != 0.6:
            first = torch.zeros(count, dtype=torch.int64)
            second = (candidates[:, 0] == drafts[:, :1]).long().argmax(-1)
            index = torch.stack([first, second], 1)[..., None, None].expand(-1, -1, 1, 2)
            probs = (scores.gather(2, index)[:, :, 0] / self.reported).softmax(-1)
        return torch.cat([anchors[:, None], drafts], 1), (candidates, probs), None


class TrunkOfWalk:
    """A walk of path_select at temperature 0.7 through 3 slots, its first `length` drafts the trunk of path_tree."""

    def __init__(self, length: int, nodes: int, top_k: int, reported: float = 0.7) -> None:
        self.length, self.nodes, self.top_k, self.reported = length, nodes, top_k, reported
        generator = torch.Generator().manual_seed(13)
        self.predecessor, self.successor, self.hidden = (torch.randn(n, 4, generator=generator) for n in (3, 3, 3))

    def __call__(self, anchors: Tensor, seeds: Tensor, starts: Tensor, device: torch.device) -> Draft:
        count = len(anchors)
        logits = DRAFTER.log().float()[anchors][:, None].expand(count, 3, 3)
        hidden = self.hidden.expand(count, -1, -1)
        selector = (hidden, self.predecessor, self.successor)
        drafts, candidates, probs, scores = on(
            device, ops.path_select, logits, *selector, anchors, 0.7, seeds, starts, self.top_k
        )
        assert probs is not None
        trunk, ids, q = (t[:, : self.length] for t in (drafts, candidates, probs))
        tokens, parents, *_ = on(device, ops.path_tree, anchors, candidates, scores, self.nodes, trunk=trunk)
        q = q ** (0.7 / self.reported)
        return tokens, (ids, q / q.sum(-1, keepdim=True)), parents


class TrunkByHand:
    """Two drafts with a dense q, and branches that no draft repeats beside and behind them.

    0 - 1 - 2 - 6     slots; 1 and 2 are the trunk
      |   + 4
      |   + 5
      + 3 - 7
    """

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(14)

    def __call__(self, anchors: Tensor, seeds: Tensor, starts: Tensor, device: torch.device) -> Draft:
        laws = [DRAFTER[anchors]]
        first = pick(laws[0], self.generator)
        laws.append(DRAFTER[first])
        second = pick(laws[1], self.generator)
        branch, best = (first + 1) % 3, DRAFTER.argmax(-1)
        tokens = [anchors, first, second, branch, (second + 1) % 3, (second + 2) % 3, best[second], best[branch]]
        parents = torch.tensor([0, 0, 1, 0, 1, 1, 2, 3]).expand(len(anchors), 8)
        return torch.stack(tokens, 1), torch.stack(laws, 1).float(), parents


def warped(temperature: float, top_k: int = 3, top_p: float = 1.0) -> Tensor:
    """The rows of TARGET as they are left by the filters, in float64."""
    law = (TARGET.log() / temperature).softmax(-1)
    ranked, order = law.sort(dim=-1, descending=True, stable=True)
    ranked[:, top_k:] = 0
    ranked = ranked / ranked.sum(-1, keepdim=True)
    ranked[ranked.cumsum(-1) - ranked >= top_p] = 0
    return torch.zeros_like(law).scatter(-1, order, ranked / ranked.sum(-1, keepdim=True))


def joint_law(rows: Tensor = TARGET) -> Tensor:
    """The probability of every text of LENGTH tokens after token 0, as one number in base 3."""
    law = torch.ones(1).double()
    texts = torch.zeros(1, 1, dtype=torch.int64)
    for _ in range(LENGTH):
        law = (law[:, None] * rows[texts[:, -1]]).flatten()
        texts = torch.cat([texts.repeat_interleave(3, 0), torch.arange(3).repeat(len(texts))[:, None]], 1)
    return law


def as_numbers(text: Tensor) -> Tensor:
    return (text * 3 ** torch.arange(text.shape[1] - 1, -1, -1)).sum(-1)


PROPOSALS: dict[str, Callable[[], Propose]] = {
    "none": lambda: plain,
    "dense q": lambda: Chain(sparse=False),
    "sparse q": lambda: Chain(sparse=True),
    "argmax": lambda: argmax_chain,
    "tree": lambda: tree,
    "path_select": lambda: Walk(0.6),
    "trunk": lambda: TrunkOfWalk(3, 8, 3),
    "trunk by hand": TrunkByHand,
}


@pytest.mark.parametrize("name", PROPOSALS)
def test_joint_law_of_whole_texts(device: torch.device, name: str) -> None:
    """Four tokens, 81 texts, over as many rounds as it takes; every third row is greedy and stays exact."""
    sampled = torch.arange(TEXTS * 3 // 2) % 3 > 0
    text = emit(PROPOSALS[name](), sampled.float(), device)
    assert (text[~sampled] == torch.tensor([0, 0, 0, 0])).all()
    assert p_value(as_numbers(text[sampled]), joint_law()) > ALPHA


def test_q_of_another_temperature_than_the_walk_is_found_out(device: torch.device) -> None:
    text = emit(Walk(reported=1.0), torch.ones(TEXTS), device)
    assert p_value(as_numbers(text), joint_law()) < ALPHA


def test_without_q_the_text_of_a_seed_does_not_depend_on_the_drafts(device: torch.device) -> None:
    texts = [emit(propose, torch.ones(2000), device, 24) for propose in (plain, argmax_chain, tree)]
    assert torch.equal(texts[0], texts[1])
    assert torch.equal(texts[0], texts[2])


WARPED: list[tuple[str, Callable[[], Propose], float, dict[str, Any]]] = [
    ("walk", lambda: TrunkOfWalk(3, 9, 3), 0.7, {}),
    # Of the two: one token of .6 before .3, but two of .5 before .3.
    ("walk", lambda: TrunkOfWalk(3, 9, 3), 1.0, {"top_k": 2, "top_p": 0.65}),
    ("walk over 2 of 3 tokens", lambda: TrunkOfWalk(3, 7, 2), 0.7, {"top_p": 0.6}),
    ("start of the walk", lambda: TrunkOfWalk(1, 7, 3), 0.7, {"top_k": 2}),
    ("by hand", TrunkByHand, 0.7, {}),
    ("by hand", TrunkByHand, 1.0, {"top_k": 2}),
]


@pytest.mark.parametrize(
    ("propose", "temperature", "filters"), [case[1:] for case in WARPED], ids=[f"{n}-{t}-{f}" for n, _, t, f in WARPED]
)
def test_joint_law_of_whole_texts_from_trees_with_a_trunk(
    device: torch.device, propose: Callable[[], Propose], temperature: float, filters: dict[str, Any]
) -> None:
    text = emit(propose(), torch.full((TEXTS,), temperature), device, **filters)
    assert p_value(as_numbers(text), joint_law(warped(temperature, **filters))) > ALPHA


def test_q_of_another_temperature_than_the_trunk_is_found_out(device: torch.device) -> None:
    text = emit(TrunkOfWalk(3, 8, 3, reported=1.0), torch.ones(TEXTS), device)
    assert p_value(as_numbers(text), joint_law()) < ALPHA


P4 = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64)
Q4 = torch.tensor([0.1, 0.2, 0.4, 0.3], dtype=torch.float64)
BESIDE = torch.tensor([1, 0, 0, 1])  # the branch beside each draft


def trunk_mutant(name: str, drafts: Tensor) -> tuple[Tensor, Tensor]:
    """First tokens, and whether they were drafts, by samplers of a draft and a branch that are wrong or wasteful."""
    u = torch.tensor(np.random.default_rng(7).random(DRAWS))
    drawn, residual, branches = draw(P4, DRAWS, 8), draw((P4 - Q4).clamp_min(0), DRAWS, 9), BESIDE[drafts]
    kept = u < (P4 / Q4)[drafts]
    if name == "trunk without q":
        return drawn, (drawn == drafts) | (drawn == branches)
    if name == "no branches beside the trunk":
        return torch.where(kept, drafts, residual), kept
    if name == "draws again from p":
        residual = drawn
    elif name == "descends with a draw from p":
        residual = torch.where(drawn == branches, drawn, residual)
    first = torch.where(kept, drafts, residual)
    return first, kept | (first == branches)


@pytest.mark.parametrize(
    ("name", "law", "rate"),
    [
        ("right", P4.tolist(), 0.8),
        ("draws again from p", [0.26, 0.32, 0.28, 0.14], 0.74),
        ("descends with a draw from p", [0.375, 0.325, 0.2, 0.1], 0.865),
        ("trunk without q", P4.tolist(), 0.57),
        ("no branches beside the trunk", P4.tolist(), 0.6),
    ],
)
def test_mutants_of_the_trunk_rule_are_told_by_law_or_acceptance(name: str, law: list[float], rate: float) -> None:
    first, kept = trunk_mutant(name, draw(Q4, DRAWS, 3))
    assert (p_value(first, P4) > ALPHA) == (law == P4.tolist())
    assert p_value(first, torch.tensor(law)) > ALPHA
    assert stats.binomtest(int(kept.sum()), DRAWS, rate).pvalue > ALPHA
    assert (stats.binomtest(int(kept.sum()), DRAWS, 0.8).pvalue > ALPHA) == (name == "right")


def test_law_and_acceptance_of_one_draft_and_one_branch(device: torch.device) -> None:
    """The draft is kept with probability sum of min(p, q) = 0.6, the branch in 0.2 of all rounds."""
    drafts = draw(Q4, DRAWS, 3)
    tokens = torch.stack([torch.zeros_like(drafts), drafts, BESIDE[drafts]], 1)
    rows, q = P4.log().float().expand(DRAWS, 3, 4), Q4.float().expand(DRAWS, 1, 4)
    parents = torch.zeros_like(tokens)
    seeds = torch.arange(DRAWS) + 10**9
    index, accepted, bonus = on(device, ops.reject_sample, rows, tokens, parents, q, 1.0, seeds=seeds)
    first = torch.where(accepted > 0, tokens.gather(1, index[:, 1:2].clamp_min(0).long())[:, 0], bonus)
    assert p_value(first, P4) > ALPHA
    for slot, rate in ((1, 0.6), (2, 0.2)):
        assert stats.binomtest(int((index[:, 1] == slot).sum()), DRAWS, rate).pvalue > ALPHA
        assert p_value(bonus[index[:, 1] == slot], P4) > ALPHA
