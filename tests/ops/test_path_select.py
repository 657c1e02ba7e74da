"""path_select against its definition in float64, and the cases where candidate selectors are known to go wrong."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from matching import assert_matches
from sampling_cases import DTYPES, FIXTURES, LEVELS, far_rows, instruction_level
from select_cases import FLOATS, Arguments, on, select_case
from torch import Tensor

from pydflash import ops
from pydflash.ops import reference


def select(case: Arguments) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """path_select of a case that has temperatures."""
    tokens, candidates, probs, scores = ops.path_select(**case)
    assert probs is not None
    return tokens, candidates, probs, scores


def assert_same(case: Arguments, device: torch.device) -> None:
    tokens, candidates, probs, scores = ops.path_select(**on(case, device))
    want = reference.path_select(**on(case, torch.device("cpu"), double=True))
    assert torch.equal(candidates.cpu(), want[1])
    finite = want[3].isfinite()
    assert torch.equal(scores.cpu().isfinite(), finite)
    assert torch.equal(scores.cpu().isnan(), want[3].isnan())  # a NaN logit is -inf here too
    assert_matches(scores.cpu()[finite], want[3][finite])
    assert torch.equal(tokens.cpu(), want[0])
    assert (probs is None) == (want[2] is None)
    if probs is not None and want[2] is not None:
        assert_matches(probs, want[2], 2e-5)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rank", [0, 1, 64, 256])
def test_equals_the_definition(device: torch.device, level: str, dtype: torch.dtype, rank: int) -> None:
    values = itertools.cycle(("normal", "ties", "broken"))
    heats: Any = itertools.cycle(((0.0, 0.4, 1.0, 1.7), None))
    with instruction_level(level, device):
        for seed, (vocab, top_k) in enumerate([(1, 1), (5, 5), (64, 16), (97, 4), (130, 17), (2000, 16), (3001, 100)]):
            for slots in (1, 2, 7):
                kind = next(values)
                assert_same(select_case(3, slots, vocab, top_k, rank, dtype, next(heats), kind, seed), device)


@settings(max_examples=60, deadline=None, suppress_health_check=FIXTURES)
@given(
    batch=st.integers(1, 4),
    slots=st.integers(1, 6),
    vocab_and_top_k=st.integers(1, 300).flatmap(lambda v: st.tuples(st.just(v), st.integers(1, v))),
    rank=st.integers(0, 40),
    dtype=st.sampled_from(DTYPES),
    values=st.sampled_from(("normal", "ties", "broken")),
    seed=st.integers(0, 10**6),
)
def test_equals_the_definition_for_drawn_cases(
    device: torch.device, vocab_and_top_k: tuple[int, int], **shape: Any
) -> None:
    vocab, top_k = vocab_and_top_k
    assert_same(select_case(vocab=vocab, top_k=top_k, **shape), device)


@pytest.mark.parametrize(("vocab", "top_k"), [(70000, 1024), (151936, 16), (151936, 1000), (1024, 1024), (5000, 1024)])
def test_large_vocabularies_and_many_candidates(device: torch.device, vocab: int, top_k: int) -> None:
    for values in ("normal", "ties"):
        case = select_case(1, 2, vocab, top_k, values=values)
        _, candidates, *_ = ops.path_select(**on(case, device))
        order = case["logits"].sort(dim=-1, descending=True, stable=True).indices
        assert torch.equal(candidates.cpu(), order[..., :top_k])
    for ordered in (torch.arange(vocab).float(), -torch.arange(vocab).float(), torch.zeros(vocab)):
        case["logits"] = ordered.expand(1, 2, vocab)
        _, candidates, *_ = ops.path_select(**on(case, device))
        assert torch.equal(candidates[0, 0].cpu(), ordered.sort(descending=True, stable=True).indices[:top_k])


def lattice_case(first: float, second: float, edges: dict[tuple[int, int], float], device: torch.device) -> Arguments:
    """Two slots with candidates 10, 11 and 20, 21; `edges` adds to the score of (token before, token)."""
    logits = torch.full((1, 2, 32), -50.0)
    logits[0, 0, 10], logits[0, 0, 11] = first, second
    logits[0, 1, 20], logits[0, 1, 21] = 2.0, 1.9
    predecessor, successor = torch.zeros(32, 8), torch.zeros(32, 8)
    for rank, ((before, token), score) in enumerate(edges.items()):
        predecessor[before, rank], successor[token, rank] = 1.0, score
    return on(
        {
            "logits": logits,
            "hidden": torch.ones(1, 2, 8),
            "predecessor": predecessor,
            "successor": successor,
            "anchors": torch.tensor([3]),
            "temperature": None,
            "seeds": 0,
            "starts": torch.tensor([0]),
            "top_k": 2,
        },
        device,
    )


def test_edges_overrule_the_slots_own_logits(device: torch.device) -> None:
    case = lattice_case(2.0, 1.0, {(3, 11): 2.0, (11, 21): 1.0}, device)
    tokens, candidates, probs, scores = ops.path_select(**case)
    assert candidates.tolist() == [[[10, 11], [20, 21]]]
    assert tokens.tolist() == [[11, 21]]
    assert probs is None
    want = [[[[2.0, 3.0], [2.0, 3.0]], [[2.0, 1.9], [2.0, 2.9]]]]
    assert_matches(scores, torch.tensor(want))


def test_walk_is_greedy_from_left_to_right_not_the_best_path(device: torch.device) -> None:
    tokens, *_ = ops.path_select(**lattice_case(2.0, 1.5, {(11, 21): 5.0}, device))
    assert tokens.tolist() == [[10, 20]]  # the path 11, 21 would score 8.4 instead of 4


def test_last_rank_and_last_candidate_decide(device: torch.device) -> None:
    case = on(select_case(1, 2, 200, 16, 256, temperature=None), device)
    case["logits"][0, :, :16] = 20 + torch.arange(16.0, 0.0, -1.0, device=device)  # candidate c is token c
    for name in ("predecessor", "successor"):
        case[name].zero_()
    case["hidden"].fill_(1.0)
    case["predecessor"][:, 255] = 1.0
    case["successor"][15, 255] = 16.0
    assert ops.path_select(**case)[0].tolist() == [[15, 15]]


def test_padded_columns_are_never_candidates(device: torch.device) -> None:
    case = select_case(2, 3, 97, 97, 8)
    padding = torch.full((2, 3, 31), 1e4)
    padded = {**case, "logits": torch.cat([case["logits"], padding], -1)}
    got, want = select(on(padded, device)), select(on(case, device))
    assert got[1].max().item() == 96
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)


def test_ties_go_to_the_lower_id(device: torch.device) -> None:
    logits = torch.tensor([[[0.0, 1.0, -0.0, 1.0, 0.0, 1.0]]], device=device)
    tokens, candidates, probs, _ = ops.path_select(
        logits, None, None, None, torch.tensor([0], device=device), 0.0, 0, torch.tensor([0], device=device), 5
    )
    assert candidates.tolist() == [[[1, 3, 5, 0, 2]]]
    assert tokens.tolist() == [[1]]
    assert probs is not None
    assert probs.tolist() == [[[1.0, 0.0, 0.0, 0.0, 0.0]]]


def test_rows_without_a_finite_score_take_the_first_candidate(device: torch.device) -> None:
    case = on(select_case(1, 2, 20, 4, 8, temperature=(1.0,)), device)
    case["hidden"][:] = torch.nan
    tokens, candidates, probs, _ = select(case)
    assert torch.equal(tokens, candidates[..., 0])
    assert probs.tolist() == [[[1.0, 0.0, 0.0, 0.0]] * 2]
    case["logits"][:] = torch.nan
    assert ops.path_select(**case)[1].tolist() == [[[0, 1, 2, 3]] * 2]


def test_nan_and_infinite_scores_among_finite_ones(device: torch.device) -> None:
    case = on(select_case(1, 1, 20, 4, 8, temperature=(1.0,)), device)
    _, candidates, before, _ = select(case)
    case["successor"][candidates[0, 0, 2]] = torch.nan
    law = before[0, 0].double().cpu()
    law[2] = 0
    assert_matches(select(case)[2][0, 0], law / law.sum(), 1e-5)
    case |= {"hidden": None, "predecessor": None, "successor": None}
    case["logits"][..., 3] = case["logits"][..., 7] = torch.inf
    assert select(case)[2].tolist() == [[[0.5, 0.5, 0.0, 0.0]]]


def test_probs_are_the_law_of_every_slot_given_the_walk(device: torch.device) -> None:
    case = select_case(6, 4, 60, 5, 16, temperature=(0.5, 2.0))
    tokens, candidates, probs, scores = (t.cpu() for t in select(on(case, device)))
    for row in range(6):
        index = 0
        for slot in range(4):
            law = (scores[row, slot, index].double() / case["temperature"][row]).softmax(-1)
            assert_matches(probs[row, slot], law, 1e-5)
            index = int((candidates[row, slot] == tokens[row, slot]).nonzero())


def test_a_row_of_a_batch_equals_the_row_alone_on_any_number_of_threads(device: torch.device) -> None:
    case = on(select_case(5, 4, 20000, 16, 32), device)
    whole = select(case)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        for a, b in zip(select(case), whole, strict=True):
            assert torch.equal(a, b)
    finally:
        torch.set_num_threads(threads)
    per_row = ("logits", "hidden", "anchors", "temperature", "seeds", "starts")
    for row in range(5):
        alone = select({name: v[row : row + 1] if name in per_row else v for name, v in case.items()})
        for a, b in zip(alone, whole, strict=True):
            assert torch.equal(a[0], b[row])


def test_strided_logits_mixed_dtypes_and_no_slots(device: torch.device) -> None:
    case = on(select_case(2, 3, 50, 7, 16), device)
    want = select(case)
    wide = torch.full((2, 6, 60), 1e4, device=device)
    wide[:, ::2, 3:53] = case["logits"]
    for a, b in zip(select({**case, "logits": wide[:, ::2, 3:53]}), want, strict=True):
        assert torch.equal(a, b)
    half = {name: case[name].bfloat16() for name in FLOATS[1:]}
    assert_same({**select_case(2, 3, 50, 7, 16), **{name: t.cpu() for name, t in half.items()}}, device)
    empty = select({**case, "logits": case["logits"][:, :0], "hidden": case["hidden"][:, :0]})
    assert [tuple(t.shape) for t in empty] == [(2, 0), (2, 0, 7), (2, 0, 7), (2, 0, 7, 7)]


def test_offsets_beyond_32_bits(device: torch.device) -> None:
    logits = far_rows(device, 100)
    logits[0, 0, 17] = logits[0, 1, 71] = 9.0
    anchors = torch.tensor([0], device=device)
    assert ops.path_select(logits, None, None, None, anchors, None, 0, anchors, 1)[0].tolist() == [[17, 71]]


def test_opcheck(device: torch.device) -> None:
    for rank, heat in ((0, None), (8, (0.0, 1.0))):
        case = on(select_case(2, 3, 20, 4, rank, temperature=heat), device)
        torch.library.opcheck(torch.ops.pydflash.path_select.default, tuple(case.values()))


GOOD = select_case(2, 3, 20, 4, 8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logits": GOOD["logits"].double()}, "logits must be float32, bfloat16 or float16, got float64"),
        ({"logits": GOOD["logits"][0]}, r"logits must be of shape \[B, S-1, V\], got \[3, 20\]"),
        ({"vocab_size": 21}, "vocab_size must be 1 to V = 20, got 21"),
        ({"top_k": 0}, "top_k must be >= 1, got 0"),
        ({"top_k": 21}, r"top_k must be 1 to min\(vocab_size, 1024\) = 20, got 21"),
        ({"vocab_size": 3}, r"top_k must be 1 to min\(vocab_size, 1024\) = 3, got 4"),
        ({"hidden": None}, "hidden, predecessor and successor go together, got 2 of 3"),
        ({"hidden": GOOD["hidden"][:, :2]}, r"hidden must be of shape \[B, S-1, r\] = \[2, 3, \?\], got \[2, 2, 8\]"),
        (
            {"predecessor": GOOD["predecessor"][:, :7]},
            r"predecessor must be of shape \[V, r\] = \[\?, 8\], got \[20, 7\]",
        ),
        ({"successor": GOOD["successor"][:19]}, r"successor must be of shape \[V, r\] = \[20, 8\], got \[19, 8\]"),
        ({"successor": GOOD["successor"].half()}, "successor must be float32, as hidden, got float16"),
        (
            {"predecessor": GOOD["predecessor"][:9], "successor": GOOD["successor"][:9]},
            "the codebooks must have at least vocab_size = 20 rows, got 9",
        ),
        ({"anchors": torch.tensor([0, 20])}, "anchors must be ids of the codebooks, 0 to 19, got 20"),
        ({"anchors": torch.tensor([-1, 0])}, "anchors must be ids of the codebooks, 0 to 19, got -1"),
        ({"anchors": torch.tensor([0])}, r"anchors must be of shape \[B\] = \[2\], got \[1\]"),
        ({"temperature": torch.ones(3)}, r"temperature must be of shape \[B\] = \[2\], got \[3\]"),
        ({"seeds": torch.ones(3, dtype=torch.int64)}, r"seeds must be of shape \[B\] = \[2\], got \[3\]"),
        ({"starts": torch.ones(3, dtype=torch.int64)}, r"starts must be of shape \[B\] = \[2\], got \[3\]"),
    ],
)
def test_arguments_that_do_not_fit_are_named(change: Arguments, message: str) -> None:
    with pytest.raises(ValueError, match=f"path_select: {message}"):
        ops.path_select(**{**GOOD, **change})
