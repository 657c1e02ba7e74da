"""The counter-based random numbers: published answers, range, independence, and their use by the kernels."""

from __future__ import annotations

import pytest
import torch
from scipy import stats
from torch import Tensor

from pydflash import ops
from pydflash.ops import reference
from pydflash.ops.reference import ACCEPT, DRAFT, RESIDUAL, TARGET, uniform

SEEDS = torch.tensor([0, 1, -1, 7, 2**31, 2**32, 2**32 + 7, 2**62 + 5, -(2**63), 1234567890123456789])


@pytest.mark.parametrize(
    ("counter", "key", "word"),
    [
        ([0, 0, 0, 0], [0, 0], 0x6627E8D5),
        ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, 0x408F276D),
        ([0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344], [0xA4093822, 0x299F31D0], 0xD16CFE09),
    ],
)
def test_published_answers_of_philox4x32_10(counter: list[int], key: list[int], word: int) -> None:
    got = reference.philox([torch.tensor(x) for x in key], [torch.tensor(x) for x in counter])
    assert got.item() == word


def test_uniform_uses_the_upper_24_bits_and_stays_below_one() -> None:
    zero = torch.tensor(0)
    assert uniform(zero, zero, TARGET).item() == (0x6627E8D5 >> 8) / 2**24
    assert (torch.tensor(0xFFFFFFFF >> 8).float() * 2.0**-24).item() < 1
    u = uniform(torch.arange(1 << 20), torch.tensor(3), ACCEPT)
    assert u.dtype == torch.float32
    assert 0 <= u.min().item() < 1e-5
    assert 1 - 1e-5 < u.max().item() < 1


def test_every_part_of_the_key_gives_another_stream() -> None:
    base = uniform(torch.tensor(5), torch.arange(64), TARGET)
    others = [
        uniform(torch.tensor(6), torch.arange(64), TARGET),
        uniform(torch.tensor(5 + 2**32), torch.arange(64), TARGET),
        uniform(torch.tensor(5), torch.arange(64) + 2**20, TARGET),
        *(uniform(torch.tensor(5), torch.arange(64), purpose) for purpose in (ACCEPT, RESIDUAL, DRAFT)),
        uniform(torch.tensor(5), torch.arange(64), TARGET, 1),
    ]
    for other in others:
        assert not (base == other).any()


def test_streams_are_uniform_and_uncorrelated() -> None:
    """Over 200k draws a chi-square of 256 cells for each stream and the correlation of each pair, alpha 1e-4 in all."""
    count = 200_000
    seeds = torch.arange(count) * 977
    zero = torch.tensor(0)
    streams = [uniform(seeds, zero, purpose) for purpose in (TARGET, ACCEPT, RESIDUAL)]
    streams += [uniform(seeds, zero, DRAFT, slot) for slot in (1, 2, 15)]
    streams += [uniform(torch.tensor(42), torch.arange(count) + first, TARGET) for first in (0, 1, 2)]
    pairs = len(streams) * (len(streams) - 1) // 2
    alpha = 1e-4 / (len(streams) + pairs)
    for stream in streams:
        cells = torch.bincount((stream * 256).long(), minlength=256)
        assert stats.chisquare(cells.numpy()).pvalue > alpha
    correlation = torch.corrcoef(torch.stack(streams).double())
    limit = stats.norm.isf(alpha / 2) / count**0.5
    assert (correlation - torch.eye(len(streams))).abs().max().item() < limit


def test_reject_sample_draws_with_the_target_number_of_the_next_position(device: torch.device) -> None:
    batch, vocab = len(SEEDS), 4096  # a flat row turns the number into the id: floor(u * vocab)
    logits = torch.zeros(1, 1, vocab, device=device).expand(batch, 1, vocab)
    starts = torch.arange(batch) * 1000003
    _, _, bonus = ops.reject_sample(logits, _zeros(batch, 1, device), temperature=1.0, seeds=SEEDS.to(device),
                                    starts=starts.to(device))  # fmt: skip
    assert torch.equal(bonus.cpu(), (uniform(SEEDS, starts + 1, TARGET) * vocab).long())


def test_reject_sample_draws_the_residual_with_its_own_number(device: torch.device) -> None:
    batch, vocab = len(SEEDS), 4097
    logits = torch.zeros(1, 2, vocab, device=device)
    logits[..., 0] = -torch.inf  # q is certain of id 0, which p excludes: refused, and p is left whole
    logits = logits.expand(batch, 2, vocab)
    draft = (_zeros(batch, 1, device)[:, None], torch.ones(batch, 1, 1, device=device))
    starts = torch.arange(batch) * 77
    index, accepted, bonus = ops.reject_sample(
        logits, _zeros(batch, 2, device), None, draft, 1.0, seeds=SEEDS.to(device), starts=starts.to(device)
    )
    assert accepted.tolist() == [0] * batch
    assert index.tolist() == [[0, -1]] * batch
    assert torch.equal(bonus.cpu() - 1, (uniform(SEEDS, starts + 1, RESIDUAL) * (vocab - 1)).long())


def test_reject_sample_accepts_with_the_accept_number(device: torch.device) -> None:
    batch = len(SEEDS)
    u = uniform(SEEDS, torch.full((batch,), 6), ACCEPT)
    logits = torch.zeros(batch, 2, 2, device=device)  # p = (1/2, 1/2)
    for factor, accepted in ((0.999, 1), (1.001, 0)):
        q = torch.full((batch, 1, 2), 0.5)
        q[:, 0, 0] = factor * 0.5 / u  # u * q = factor * p: on either side of the limit
        _, count, _ = ops.reject_sample(
            logits, _zeros(batch, 2, device), None, q.to(device), 1.0, seeds=SEEDS.to(device), starts=5
        )
        assert count.tolist() == [accepted] * batch


def test_path_select_draws_slot_j_with_the_draft_number_of_start_and_j(device: torch.device) -> None:
    batch, slots, top_k = len(SEEDS), 5, 512
    logits = torch.zeros(1, slots, 1000, device=device).expand(batch, slots, 1000)
    starts = torch.arange(batch) * 1000003
    tokens, *_ = ops.path_select(
        logits, None, None, None, _zeros(batch, 1, device)[:, 0], 1.0, SEEDS.to(device), starts.to(device), top_k
    )
    u = uniform(SEEDS[:, None], starts[:, None], DRAFT, torch.arange(1, slots + 1))
    assert torch.equal(tokens.cpu(), (u * top_k).long())


@pytest.mark.parametrize("spacing", [1, 64])
def test_a_number_on_an_edge_takes_the_token_above_it(device: torch.device, spacing: int) -> None:
    """Cumulative weights are multiples of 1/64, and the seeds those whose number is one of them exactly.

    With `spacing` 64 the tokens are that far apart, so that every edge is also one between blocks of the vocabulary.
    """
    seeds = torch.arange(1 << 20)
    for purpose, start, slot in ((TARGET, 1, 0), (DRAFT, 0, 1)):
        u = uniform(seeds, torch.tensor(start), purpose, slot)
        exact = seeds[u * 64 == (u * 64).floor()]
        assert len(exact) > 0
        anchors, keys = _zeros(len(exact), 1, device), exact.to(device)
        logits = torch.full((len(exact), 1, 64 * spacing), -torch.inf, device=device)
        logits[..., ::spacing] = 0.0
        if purpose == TARGET:
            *_, got = ops.reject_sample(logits, anchors, temperature=1.0, seeds=keys)
        else:
            got = ops.path_select(logits, None, None, None, anchors[:, 0], 1.0, keys, anchors[:, 0], 64)[0][:, 0]
        assert torch.equal(got.cpu(), (u[exact] * 64).long() * spacing)


def _zeros(batch: int, slots: int, device: torch.device) -> Tensor:
    return torch.zeros(batch, slots, dtype=torch.int64, device=device)
