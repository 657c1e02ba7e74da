"""Temperature above 0: what a seed promises, and that the text follows the target's law whatever is drafted.

The law is tested by Pearson's chi-square with fixed seeds at alpha 1e-4. The counted events are the three-token runs
of one long text of a Markov chain over 5 tokens: 25 histories of two tokens, so 100 degrees of freedom. A text that
follows the target but for one token in three, which is uniform, is found with probability above 0.99 (computed below).
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from fakes import FakeTarget, markov, scripted
from pairs import MASK, VOCAB, Scripted, build_drafter, config_dict
from scipy import stats as scipy_stats
from tiny_models import TINY
from torch import Tensor

from pydflash import Drafter, DrafterConfig, Speculator, Target, ops
from pydflash.protocols import Proposal

TAPS = (0, 2)
PROMPT = [3, 1, 4, 1, 5]
ALPHA = 1e-4
FEW, LONG = 5, 8000


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@functools.cache
def target() -> Target:
    return Target(TINY["qwen3"](num_hidden_layers=3), TAPS)


def drafter_of(version: int, **changes: Any) -> Drafter:
    return build_drafter(version, **{"num_target_layers": 3} | changes)


# --- seeds ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("drafter", [None, 1, 2])
def test_a_seed_repeats_the_text_and_another_does_not(drafter: int | None) -> None:
    spec = Speculator(target(), None if drafter is None else drafter_of(drafter))
    first = spec.generate(PROMPT, 16, temperature=1.0, seed=7)
    spec.generate([9, 9], 5, temperature=1.3)
    spec.generate([8, 7], 5)
    again = spec.generate(PROMPT, 16, temperature=1.0, seed=7)
    assert again.token_ids == first.token_ids
    assert again.stats.num_accepted == first.stats.num_accepted
    other = Speculator(target(), None if drafter is None else drafter_of(drafter))
    assert other.generate(PROMPT, 16, temperature=1.0, seed=7).token_ids == first.token_ids
    assert spec.generate(PROMPT, 16, temperature=1.0, seed=8).token_ids != first.token_ids


def test_no_seed_draws_fresh_ones_from_torchs_generator() -> None:
    spec = Speculator(FakeTarget(markov(randn(VOCAB, VOCAB))), None)
    torch.manual_seed(5)
    first = [spec.generate(PROMPT, 16, temperature=1.0).token_ids for _ in range(2)]
    torch.manual_seed(5)
    second = [spec.generate(PROMPT, 16, temperature=1.0).token_ids for _ in range(2)]
    assert first == second
    assert first[0] != first[1]
    state = torch.random.get_rng_state()
    spec.generate(PROMPT, 4, temperature=1.0, seed=3)
    spec.generate(PROMPT, 4)
    assert spec.generate(PROMPT, 4, seed=2**64 - 1).token_ids == spec.generate(PROMPT, 4, seed=-1).token_ids
    spec.generate(PROMPT, 4, temperature=1.0, seed=3)
    # Seeded requests leave the global stream alone.
    torch.random.set_rng_state(state)
    assert torch.equal(torch.random.get_rng_state(), state)


def test_seeds_of_a_batch() -> None:
    spec = Speculator(FakeTarget(markov(randn(VOCAB, VOCAB))), None)
    same = spec.generate([PROMPT, PROMPT], 12, temperature=1.0, seed=4)
    assert same[0].token_ids == same[1].token_ids
    own = spec.generate([PROMPT, PROMPT], 12, temperature=1.0, seed=[4, 5])
    assert own[0].token_ids == same[0].token_ids != own[1].token_ids
    fresh = spec.generate([PROMPT, PROMPT], 12, temperature=1.0)
    assert fresh[0].token_ids != fresh[1].token_ids


FILTERS: list[dict[str, Any]] = [{}, {"top_k": 7}, {"top_p": 0.8}, {"min_p": 0.05}, {"top_k": 20, "top_p": 0.9}]


@pytest.mark.parametrize("options", FILTERS, ids=str)
def test_text_of_a_seed_does_not_depend_on_the_drafter(options: dict[str, Any]) -> None:
    """Drafts without a law of their own: plain decoding and every drafter give one text."""
    for temperature, seed in ((0.7, 11), (1.5, 12)):
        options = options | {"temperature": temperature, "seed": seed}
        plain = Speculator(target(), None).generate(PROMPT, 20, **options).token_ids
        text = PROMPT + plain
        drafters = [drafter_of(1), drafter_of(2), Scripted(text, 4), Scripted(text, 6, wrong=True)]
        accepted = []
        for drafter in drafters:
            out = Speculator(target(), drafter, draft_sampling=False).generate(PROMPT, 20, **options)
            assert out.token_ids == plain
            accepted.append(max(out.stats.num_accepted))
        assert accepted[2:] == [3, 0]


def test_default_draft_sampling_follows_the_version() -> None:
    assert Speculator(target(), drafter_of(1)).draft_sampling is False
    assert Speculator(target(), drafter_of(2)).draft_sampling is True
    assert Speculator(target(), drafter_of(2), draft_sampling=False).draft_sampling is False


@pytest.mark.parametrize(
    ("temperature", "sampling", "asked"), [(0.0, True, None), (0.9, True, 0.9), (0.9, False, None)]
)
def test_drafts_are_sampled_where_asked_and_at_the_targets_temperature(
    temperature: float, sampling: bool, asked: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = drafter_of(2)
    propose, seen = drafter.propose, []

    def spy(*args: Any, **options: Any) -> Proposal:
        asked_at = options["temperature"]
        seen.append((None if asked_at is None else round(float(asked_at), 6), int(options["seeds"])))
        return propose(*args, **options)

    monkeypatch.setattr(drafter, "propose", spy)
    Speculator(target(), drafter, draft_sampling=sampling).generate(PROMPT, 6, temperature=temperature, seed=21)
    assert set(seen) == {(asked, 21)}


# --- the law ----------------------------------------------------------------------------------------------------


class TableDrafter:
    """Drafts independently per slot from a table row of the anchor, and says so (or does not)."""

    def __init__(self, table: Tensor, block_size: int = 4, top_k: int = 3, says: str = "q") -> None:
        self.config = DrafterConfig.from_dict(config_dict(2, block_size=block_size))
        self.table, self.top_k, self.says = table, top_k, says

    def new_cache(self, batch: int, capacity: int) -> dict[str, int]:
        return {"length": 0}

    def append_context(self, features: Tensor, cache: dict[str, int], counts: Tensor | None = None) -> None:
        cache["length"] += features.shape[1]

    def propose(self, anchors: Tensor, cache: dict[str, int], **options: Any) -> Proposal:
        logits = self.table[anchors][:, None].expand(-1, options["block_size"] - 1, -1)
        heat, starts = options["temperature"], torch.tensor([cache["length"]])
        if self.says == "nothing":  # sampled all the same
            heat = 1.0
        out = ops.path_select(logits, None, None, None, anchors, heat, options["seeds"], starts, self.top_k)
        proposal = Proposal(*out)
        if self.says == "nothing":
            return proposal._replace(probs=None)
        if self.says == "uniform" and proposal.probs is not None:
            return proposal._replace(probs=torch.full_like(proposal.probs, 1 / self.top_k))
        return proposal


def runs_p_value(tokens: list[int], law: Tensor) -> float:
    """Chi-square of the third token of every run against `law` [5, 5], given the two before it."""
    text = torch.tensor(tokens)
    observed = torch.bincount((text[:-2] * FEW + text[1:-1]) * FEW + text[2:], minlength=FEW**3).view(FEW, FEW, FEW)
    expected = observed.sum(-1, keepdim=True) * law[None].double()
    possible = expected > 0
    assert not observed[~possible].any()
    assert float(expected[possible].min()) >= 2
    statistic = float(((observed - expected)[possible] ** 2 / expected[possible]).sum())
    freedom = int(possible.sum()) - int((observed.sum(-1) > 0).sum())
    return float(scipy_stats.chi2.sf(statistic, freedom))


P_TABLE = randn(FEW, FEW, seed=2) * 0.6
Q_TABLES = {"good": P_TABLE + randn(FEW, FEW, seed=3) * 0.3, "bad": randn(FEW, FEW, seed=4) * 1.5}


def long_text(drafter: Any, count: int, **options: Any) -> tuple[list[int], float]:
    fake = FakeTarget(markov(P_TABLE), () if drafter is None else TAPS, vocab_size=FEW)
    out = Speculator(fake, drafter).generate([0], count, seed=1, **options)
    return out.token_ids, out.stats.acceptance_length


def law_at(temperature: float, top_k: int = 0, top_p: float = 1.0) -> Tensor:
    """The filtered law by definition, in float64."""
    p = torch.softmax(P_TABLE.double() / temperature, -1)
    for row in p:
        order = row.argsort(descending=True)
        ranked = row[order].clone()
        if top_k:
            ranked[top_k:] = 0
            ranked /= ranked.sum()
        ranked[(ranked.cumsum(0) - ranked) >= top_p] = 0
        row[order] = ranked / ranked.sum()
    return p


CASES: dict[str, dict[str, Any]] = {
    "plain": {"temperature": 1.0},
    "T 0.7": {"temperature": 0.7},
    "top-k": {"temperature": 1.4, "top_k": 3},
    "top-p": {"temperature": 1.0, "top_p": 0.8},
}


@pytest.mark.grid(3)
@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
@pytest.mark.parametrize("quality", ["none", "good", "bad"])
def test_sampled_drafts_keep_the_law(quality: str, options: dict[str, Any]) -> None:
    drafter = None if quality == "none" else TableDrafter(Q_TABLES[quality])
    tokens, length = long_text(drafter, LONG if options == CASES["plain"] else LONG // 2, **options)
    assert runs_p_value(tokens, law_at(**options)) > ALPHA
    if quality == "good":
        assert length > 1.8


def test_drafts_sampled_without_a_law_keep_the_law() -> None:
    tokens, length = long_text(TableDrafter(Q_TABLES["good"], says="nothing"), LONG, temperature=1.0)
    assert runs_p_value(tokens, law_at(1.0)) > ALPHA
    assert length > 1.2


def test_the_chi_square_finds_a_drafter_that_lies() -> None:
    """Tokens drawn from softmax but reported as uniform: the text no longer follows the target, and that shows."""
    tokens, _ = long_text(TableDrafter(Q_TABLES["good"], says="uniform"), LONG, temperature=1.0)
    assert runs_p_value(tokens, law_at(1.0)) < ALPHA


def test_power_of_the_chi_square() -> None:
    law = law_at(1.0)
    mixed = (2 * law + 1 / FEW) / 3
    share = torch.linalg.matrix_power(law, 64)[0]  # of each token in a long text
    distance = LONG * float((share[:, None] * (mixed - law) ** 2 / law).sum())
    freedom = FEW * FEW * (FEW - 1)
    assert scipy_stats.ncx2.sf(scipy_stats.chi2.isf(ALPHA, freedom), freedom, distance) > 0.99
    assert runs_p_value(long_text(None, LONG, temperature=1.0)[0], mixed) < ALPHA


def test_short_texts_of_many_seeds_keep_the_law() -> None:
    """All 125 texts of 3 tokens over 1500 seeds: the first token, a round, and what crosses the two."""
    fake = FakeTarget(markov(P_TABLE), TAPS, vocab_size=FEW)
    spec = Speculator(fake, TableDrafter(Q_TABLES["good"]))
    observed = torch.zeros(FEW, FEW, FEW, dtype=torch.float64)
    for seed in range(1500):
        a, b, c = spec.generate([2], 3, temperature=0.7, seed=seed * 7919).token_ids
        observed[a, b, c] += 1
    law = law_at(0.7)
    expected = (1500 * law[2, :, None, None] * law[:, :, None] * law[None]).flatten()
    keep = expected >= 5  # the others are counted together
    got, want = (torch.cat([x.flatten()[keep], x.flatten()[~keep].sum()[None]]) for x in (observed, expected))
    assert scipy_stats.chi2.sf(float(((got - want) ** 2 / want).sum()), len(want) - 1) > ALPHA


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("sampling", [False, True])
def test_no_token_is_dropped_around_a_rejection(version: int, sampling: bool) -> None:
    """At temperature 1 a target that is certain of its text: it comes out whole, whichever slot is wrong."""
    text = [*PROMPT, MASK, *range(10, 70)]
    fake = FakeTarget(scripted(text), TAPS)
    out = Speculator(fake, drafter_of(version, num_target_layers=6), draft_sampling=sampling).generate(
        PROMPT, 40, temperature=1.0, seed=0
    )
    assert out.token_ids == text[5:45]
    for slot in range(1, 4):
        drafts = list(text)
        for at in range(6 + slot - 1, len(text), slot):  # every round breaks at this slot
            drafts[at] = 2
        out = Speculator(fake, Scripted(drafts, 4)).generate(PROMPT, 40, temperature=1.0, seed=0)
        assert out.token_ids == text[5:45]
        assert set(out.stats.num_accepted[:-1]) == {slot - 1}


def test_acceptance_of_best_and_of_sampled_drafts() -> None:
    """Target and drafter with the law softmax([2, 1.5, 1, .5]): shares of first drafts accepted, by the arithmetic.

    The best token is accepted with its own probability .455; a sampled draft with its law always; a sampled draft
    without one where two independent draws agree, .322. So drafts with no law of their own are the best ones.
    """
    row = torch.tensor([2.0, 1.5, 1.0, 0.5])
    p = torch.softmax(row, 0)
    shares = {}
    for name, sampling, says in (("best", False, "q"), ("sampled", True, "q"), ("no law", False, "nothing")):
        drafter = TableDrafter(row.repeat(4, 1), block_size=2, top_k=4, says=says)
        fake = FakeTarget(markov(row.repeat(4, 1)), TAPS, vocab_size=4)
        out = Speculator(fake, drafter, draft_sampling=sampling).generate([0], 4000, temperature=1.0, seed=9)
        shares[name] = out.stats.slot_acceptance[0]
    rounds = 2700  # at least; three standard errors are 0.03
    assert shares["sampled"] == 1.0
    assert abs(shares["best"] - float(p.max())) < 3 * 0.5 / rounds**0.5
    assert abs(shares["no law"] - float((p * p).sum())) < 3 * 0.5 / rounds**0.5
