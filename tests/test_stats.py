"""Stats: what the counts mean, by hand and over real requests, cut ones included."""

from __future__ import annotations

import math

import pytest
import torch
from fakes import FakeTarget, scripted
from pairs import Scripted

from pydflash import Speculator, Stats

TAPS = (0, 2)
PROMPT = [3, 1, 4]
TEXT = [*PROMPT, *range(5, 95)]


def test_numbers_by_hand() -> None:
    stats = Stats(prompt_tokens=3, num_drafted=[3, 3, 3, 1], num_accepted=[3, 0, 2, 1], decode_seconds=2.0)
    assert stats.rounds == 4
    assert stats.new_tokens == 10
    assert stats.acceptance_length == 2.5
    assert stats.slot_acceptance == [3 / 4, 2 / 3, 1 / 3]
    assert stats.tokens_per_second == 5.0
    assert "11 tokens" in stats.summary()
    assert "acceptance length 2.50" in stats.summary()


def test_no_rounds() -> None:
    stats = Stats(prompt_tokens=3)
    assert (stats.rounds, stats.new_tokens, stats.slot_acceptance) == (0, 0, [])
    assert math.isnan(stats.acceptance_length)
    assert math.isnan(stats.tokens_per_second)
    assert stats.summary() == "3 prompt tokens, no rounds"


def test_plain_decoding_has_no_acceptance_to_tell() -> None:
    stats = Stats(3, num_drafted=[0, 0], num_accepted=[0, 0], decode_seconds=1.0)
    assert stats.acceptance_length == 1.0
    assert stats.slot_acceptance == []
    assert "acceptance" not in stats.summary()


def drafts_with_errors(seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    wrong = torch.rand(len(TEXT), generator=generator) < 0.3
    return [2 if bad else token for token, bad in zip(TEXT, wrong.tolist(), strict=True)]


@pytest.mark.parametrize("count", [1, 2, 5, 29, 60])
@pytest.mark.parametrize("block_size", [2, 4, 8])
def test_counts_of_a_request(block_size: int, count: int) -> None:
    for seed in range(4):
        spec = Speculator(FakeTarget(scripted(TEXT), TAPS), Scripted(drafts_with_errors(seed), block_size))
        out = spec.generate(PROMPT, count, return_proposals=True)
        stats = out.stats
        assert stats.prompt_tokens == 3
        assert sum(n + 1 for n in stats.num_accepted) + 1 == len(out.token_ids) == count
        assert stats.new_tokens == count - 1
        assert len(stats.num_drafted) == len(stats.proposals) == stats.rounds
        assert all(0 <= a <= d <= block_size - 1 for a, d in zip(stats.num_accepted, stats.num_drafted, strict=True))
        assert set(stats.num_drafted[:-1]) <= {block_size - 1}
        acceptance = stats.slot_acceptance
        assert acceptance == sorted(acceptance, reverse=True)
        assert stats.prefill_seconds > 0
        assert (stats.decode_seconds > 0) == (count > 1)
        # Every proposal starts at the anchor and is full, the last one too; accepted drafts are the text.
        at = 0
        for block, accepted in zip(stats.proposals, stats.num_accepted, strict=True):
            assert len(block) == block_size
            assert block[: accepted + 1] == out.token_ids[at : at + accepted + 1]
            at += accepted + 1


@pytest.mark.parametrize("at", range(1, 10))
def test_what_is_cut_counts_nowhere(at: int) -> None:
    """Perfect drafts, block 4, a stop token somewhere: the last round counts the tokens that came out."""
    spec = Speculator(FakeTarget(scripted(TEXT), TAPS), Scripted(TEXT, 4))
    for options in ({"stop_token_ids": [TEXT[3 + at]]}, {"max_new_tokens": at + 1}):
        stats = spec.generate(PROMPT, **options).stats
        full, rest = divmod(at, 4)
        assert stats.num_accepted == [3] * full + ([rest - 1] if rest else [])
        assert stats.num_drafted == [3] * full + ([rest - 1] if rest else [])
        assert set(stats.slot_acceptance) <= {1.0}


def test_proposals_only_where_asked_for() -> None:
    spec = Speculator(FakeTarget(scripted(TEXT), TAPS), Scripted(TEXT, 4))
    assert spec.generate(PROMPT, 6).stats.proposals is None
    assert spec.generate(PROMPT, 1, return_proposals=True).stats.proposals == []


def test_each_request_has_its_own_stats() -> None:
    spec = Speculator(FakeTarget(scripted(TEXT), TAPS), Scripted(TEXT, 4))
    many = spec.generate([PROMPT, PROMPT[:2]], 9)
    assert [out.stats.prompt_tokens for out in many] == [3, 2]
    assert many[0].stats.num_accepted is not many[1].stats.num_accepted
    many[0].stats.backends["ops"] = "changed"
    assert spec.generate(PROMPT, 2).stats.backends["ops"] != "changed"
