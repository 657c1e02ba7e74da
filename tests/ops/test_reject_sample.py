"""reject_sample against its definition in float64, and the cases where samplers are known to go wrong."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling_cases import DTYPES, FIXTURES, LEVELS, RejectCase, far_rows, instruction_level, reject_case
from torch import Tensor
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from pydflash import ops
from pydflash.ops import reference

PROPOSALS = ("none", "tree", "dense", "sparse")


def assert_same(case: RejectCase, device: torch.device) -> None:
    """Tokens equal the float64 definition's: no uniform of these seeds lies within rounding of a CDF edge."""
    got, want = case.run(ops.reject_sample, device), case.run(reference.reject_sample, torch.device("cpu"), True)
    for name, a, b in zip(("index", "num_accepted", "bonus"), got, want, strict=True):
        assert torch.equal(a, b), f"{name}: {a.tolist()}, expected {b.tolist()}"


def decide(device: torch.device, logits: Any, tokens: Any, **options: Any) -> tuple[list, list, list]:
    """One call with plain lists."""
    logits, tokens = torch.tensor(logits, dtype=torch.float32, device=device), torch.tensor(tokens, device=device)
    index, accepted, bonus = ops.reject_sample(logits, tokens, **options)
    return index.tolist(), accepted.tolist(), bonus.tolist()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("proposal", PROPOSALS)
def test_equals_the_definition(device: torch.device, level: str, dtype: torch.dtype, proposal: str) -> None:
    values = itertools.cycle(("normal", "ties", "equal", "broken"))
    with instruction_level(level, device):
        for seed, (vocab, slots) in enumerate(itertools.product((2, 3, 64, 65, 127, 1000), (1, 2, 5))):
            assert_same(reject_case(8, slots, vocab, proposal, dtype, next(values), seed), device)


@settings(max_examples=80, deadline=None, suppress_health_check=FIXTURES)
@given(
    batch=st.integers(1, 5),
    slots=st.integers(1, 9),
    vocab=st.integers(1, 200),
    proposal=st.sampled_from(PROPOSALS),
    values=st.sampled_from(("normal", "ties", "equal", "broken")),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 10**6),
)
def test_equals_the_definition_for_drawn_cases(device: torch.device, **shape: Any) -> None:
    assert_same(reject_case(**shape), device)


@pytest.mark.parametrize("vocab", [1, 2, 31, 32, 33, 1023, 1025, 65537, 248320])
@pytest.mark.parametrize("sparse", [False, True])
def test_residual_reaches_every_tile_of_the_vocabulary(device: torch.device, vocab: int, sparse: bool) -> None:
    """p = q everywhere but at the last id, where p has what q lacks; and rising weights, mean id within 6 sigma."""
    logits = torch.full((1, 2, vocab), -torch.inf)
    logits[..., 0] = logits[..., -1] = 0.0
    draft: Any = torch.zeros(1, 1, vocab)
    draft[..., 0] = 1.0
    if sparse:
        draft = (torch.zeros(1, 1, 1, dtype=torch.int64).to(device), torch.ones(1, 1, 1, device=device))
    else:
        draft = draft.to(device)
    tokens, seen = torch.zeros(1, 2, dtype=torch.int64, device=device), set()
    for seed in range(16):
        _, accepted, bonus = ops.reject_sample(logits.to(device), tokens, None, draft, 1.0, seeds=seed)
        assert bonus.item() in (0, vocab - 1)
        if not accepted.item():
            seen.add(bonus.item())
    assert seen == ({vocab - 1} if vocab > 1 else set())

    count = 256
    rising = torch.arange(1, vocab + 1).double()
    rows = rising.log().float()[None, None].to(device).expand(count, 2, vocab)
    ones = torch.zeros(count, 2, dtype=torch.int64, device=device)  # q is certain of id 0, so nearly all is residual
    draft = tuple(t.expand(count, -1, -1) for t in draft) if sparse else draft.expand(count, -1, -1)
    _, accepted, bonus = ops.reject_sample(rows, ones, None, draft, 1.0, seeds=torch.arange(count, device=device))
    rising[0] = 0
    if vocab > 1:
        ids, law = torch.arange(vocab).double(), rising / rising.sum()
        mean = (ids * law).sum()
        error = ((ids - mean) ** 2 * law).sum().sqrt() / (accepted == 0).sum().clamp_min(1) ** 0.5
        assert abs(bonus[accepted == 0].double().mean().item() - mean) <= 6 * error.cpu() + 1e-9


@pytest.mark.parametrize("token", [0, 63, 64, 65535, 65536, 65537, 151935])
def test_ids_beyond_16_bits_come_back_exactly(device: torch.device, token: int) -> None:
    logits = torch.full((1, 1, 151936), -30.0)
    logits[..., token] = 30.0
    anchor = torch.zeros(1, 1, dtype=torch.int64, device=device)
    for options in ({}, {"top_k": 50}, {"top_p": 0.9}, {"min_p": 0.1}, {"top_k": 5000, "top_p": 0.9}):
        for temperature in (0.0, 1.0):
            *_, bonus = ops.reject_sample(logits.to(device), anchor, temperature=temperature, seeds=3, **options)
            assert bonus.item() == token


@pytest.mark.parametrize(
    "options",
    [
        {"top_k": 50},
        {"top_k": 50, "top_p": 0.9},
        {"top_p": 0.95},
        {"top_k": 1, "min_p": 0.1},
        {"min_p": 0.05},
        {"top_k": 1500},
        {"top_k": 1500, "top_p": 0.8, "min_p": 0.002},
        {"top_p": 1e-6},
        {},
    ],
    ids=str,
)
@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.6])
def test_filters_are_those_of_transformers(device: torch.device, temperature: float, options: Any) -> None:
    """No ties: the draw is the inverse CDF of what transformers' warpers leave, in float64."""
    batch, vocab = 256, 5000
    row = 2 * torch.randn(1, vocab, generator=torch.Generator().manual_seed(5)).sort(-1).values
    row = row[:, torch.randperm(vocab, generator=torch.Generator().manual_seed(6))]
    assert row.unique().numel() == vocab
    nothing: Any = None  # the warpers do not read the ids
    scores = TemperatureLogitsWarper(temperature)(nothing, row.double())
    for name, warper in (("top_k", TopKLogitsWarper), ("top_p", TopPLogitsWarper), ("min_p", MinPLogitsWarper)):
        if name in options:
            scores = warper(options[name])(nothing, scores)
    cumulative = scores.softmax(-1).cumsum(-1)[0]
    seeds = torch.arange(batch)
    u = reference.uniform(seeds, torch.tensor(1), reference.TARGET).double()
    want = (cumulative[None] <= u[:, None] * cumulative[-1]).sum(-1)
    *_, bonus = ops.reject_sample(
        row.to(device)[None].expand(batch, 1, vocab),
        torch.zeros(batch, 1, dtype=torch.int64, device=device),
        temperature=temperature,
        seeds=seeds.to(device),
        **options,
    )
    assert torch.equal(bonus.cpu(), want)


def support(logits: Tensor, **options: Any) -> list[int]:
    """The ids that 4096 draws from one row hit."""
    batch = 4096
    rows = logits[None, None].expand(batch, 1, len(logits))
    anchors = torch.zeros(batch, 1, dtype=torch.int64, device=logits.device)
    seeds = torch.arange(batch, device=logits.device)
    *_, bonus = ops.reject_sample(rows, anchors, temperature=options.pop("temperature", 1.0), seeds=seeds, **options)
    return sorted(set(bonus.tolist()))


def test_exactly_k_survive_ties_and_the_lower_id_wins(device: torch.device) -> None:
    row = torch.tensor([0.4, 0.3, 0.3, 0.0], device=device).log()
    assert support(row, top_k=2) == [0, 1]
    assert support(row.flip(0), top_k=2) == [1, 3]
    halves = torch.tensor([1.0, 1.0, 0.5, 0.5, 0.5, 0.5], device=device).log()
    assert support(halves, top_p=0.5) == [0, 1]  # the mass before the third is 0.5, not below
    equal = torch.zeros(128, device=device)
    assert support(equal, top_k=7) == list(range(7))
    assert support(equal, top_p=0.125) == list(range(16))
    assert support(equal, top_k=20, top_p=0.5) == list(range(10))
    assert support(equal, min_p=1.0) == list(range(128))
    large = torch.zeros(3000, device=device)
    assert max(support(large, top_k=1100)) <= 1099
    assert max(support(large, top_k=2000, top_p=0.5)) <= 999


def test_filters_switched_off_keep_the_whole_vocabulary(device: torch.device) -> None:
    assert support(torch.zeros(64, device=device), top_k=0, top_p=1.0, min_p=0.0) == list(range(64))
    assert support(torch.zeros(64, device=device), top_k=64) == list(range(64))
    assert support(torch.zeros(64, device=device), top_k=200, top_p=1.0) == list(range(64))


def test_top_p_zero_and_extreme_temperatures(device: torch.device) -> None:
    row = torch.tensor([1.0, 3.0, 2.999, -50.0], device=device)
    assert support(row, top_p=0.0) == [1]
    assert support(row, temperature=1e-6) == [1]
    assert support(row, temperature=1e-44) == [1]
    assert support(row, temperature=1e30) == [0, 1, 2, 3]
    row[0] = -torch.inf
    assert support(row, temperature=3e38) == [1, 2, 3]


def test_nan_and_infinite_logits(device: torch.device) -> None:
    nan, inf = torch.nan, torch.inf
    assert support(torch.tensor([nan, 0.0, nan, 0.0, -inf], device=device)) == [1, 3]
    assert support(torch.tensor([0.0, inf, 5.0, inf], device=device)) == [1, 3]
    assert support(torch.tensor([nan, -inf, nan], device=device)) == [0]
    assert support(torch.full((100,), nan, device=device), top_p=0.5) == [0]
    assert support(torch.full((100,), -inf, device=device), top_k=3) == [0]
    assert support(torch.tensor([nan, 1.0, inf], device=device), temperature=0.0) == [2]
    assert support(torch.tensor([nan, -inf], device=device), temperature=0.0) == [0]
    assert support(torch.full((200,), nan, device=device), temperature=0.0) == [0]


def test_nan_and_negative_q_are_refused_and_count_as_zero(device: torch.device) -> None:
    logits = torch.tensor([0.0, 0.5, 0.5]).log()[None, None].expand(512, 2, 3).to(device)
    tokens = torch.zeros(512, 2, dtype=torch.int64, device=device)
    seeds = torch.arange(512, device=device)
    for share in (torch.nan, -1.0):
        q = torch.full((512, 1, 3), share, device=device)
        index, accepted, bonus = ops.reject_sample(logits, tokens, None, q, 1.0, seeds=seeds)
        assert accepted.sum().item() == 0
        assert (index[:, 1] == -1).all()
        assert sorted(set(bonus.tolist())) == [1, 2]


def test_a_draft_that_neither_law_has_is_refused(device: torch.device) -> None:
    """u * 0 < 0 is false; a draft outside a sparse q is accepted where p has it."""
    logits = torch.tensor([0.0, 1.0, 0.0]).log()[None, None].expand(4, 2, 3).to(device)
    q = (torch.full((4, 1, 1), 2, device=device), torch.ones(4, 1, 1, device=device))
    for draft, accepted in ((0, 0), (1, 1), (2, 0)):
        tokens = torch.full((4, 2), draft, device=device)
        got = ops.reject_sample(logits, tokens, None, q, 1.0, seeds=torch.arange(4, device=device))
        assert got[1].tolist() == [accepted] * 4
        assert got[2].tolist() == [1] * 4


def test_q_equal_to_p_accepts_every_draft(device: torch.device) -> None:
    case = reject_case(64, 6, 50, "none", seed=3)
    q = (case.logits.double() / 0.7).softmax(-1).float()[:, :-1].to(device)
    tokens = torch.randint(50, (64, 6), generator=torch.Generator().manual_seed(1)).to(device)
    seeds = torch.arange(64, device=device)
    _, accepted, _ = ops.reject_sample(case.logits.to(device), tokens, None, q, 0.7, seeds=seeds)
    assert accepted.tolist() == [5] * 64


def test_padded_drafts_are_never_accepted_nor_read(device: torch.device) -> None:
    """Rows with 3, 0 and 5 real drafts of 5, with and without q, greedy and sampled."""
    real = [3, 0, 5]
    logits = torch.zeros(3, 6, 7, device=device)
    logits[..., 2] = 60.0
    tokens = torch.full((3, 6), -1, device=device)
    ids = torch.full((3, 5, 2), -1, device=device)
    for b, count in enumerate(real):
        tokens[b, 1 : count + 1] = 2
        ids[b, :count, 0] = 2
    sparse = (ids, torch.tensor([1.0, torch.nan], device=device).expand(3, 5, 2))
    proposals: list[Any] = [None, sparse]
    for q, temperature in itertools.product(proposals, (0.0, 1.0)):
        index, accepted, bonus = ops.reject_sample(logits, tokens, None, q, temperature, seeds=9)
        assert accepted.tolist() == real
        assert bonus.tolist() == [2, 2, 2]
        assert index.tolist() == [[*range(n + 1), *[-1] * (5 - n)] for n in real]
    beyond = torch.full((3, 6), 2**40, device=device)
    for q in (*proposals, torch.full((3, 5, 7), 1 / 7, device=device)):
        assert ops.reject_sample(logits, beyond, None, q, 1.0)[1].tolist() == [0, 0, 0]


def test_only_the_first_vocab_size_columns_count(device: torch.device) -> None:
    case = reject_case(6, 4, 97, "sparse", seed=4)
    padded = torch.cat([case.logits, torch.full((6, 4, 31), 1e4)], -1)
    wide = RejectCase(padded, case.tokens, {**case.options, "vocab_size": 97})
    for a, b in zip(wide.run(ops.reject_sample, device), case.run(ops.reject_sample, device), strict=True):
        assert torch.equal(a, b)


def test_greedy_rows_take_the_lowest_maximum_whatever_else_is_set(device: torch.device) -> None:
    row = [[1.0, 1.0, 0.0]]
    assert decide(device, [row], [[0]])[2] == [0]
    heat, nucleus = torch.tensor([[0.0, 1.0], [0.9, 1.0]], device=device)
    index, accepted, bonus = decide(device, [row, row], [[0], [0]], temperature=heat, top_p=nucleus, seeds=1)
    assert bonus[0] == 0
    assert accepted == [0, 0]
    assert index == [[0], [0]]


def test_tree_descends_to_the_child_that_carries_the_token(device: torch.device) -> None:
    #     0 ─ 1 (7) ─ 3 (5)      slot (token); siblings 1, 2 and 3, 4
    #     └── 2 (8)   4 (6) ─ 5 (9)
    parents, tokens = torch.tensor([[0, 0, 0, 1, 1, 4]]), torch.tensor([[0, 7, 8, 5, 6, 9]])
    logits = torch.zeros(1, 6, 10)
    for slot, best in ((0, 7), (1, 6), (4, 9), (5, 3)):
        logits[0, slot, best] = 9.0
    parents, tokens, logits = parents.to(device), tokens.to(device), logits.to(device)
    index, accepted, bonus = ops.reject_sample(logits, tokens, parents)
    assert index.tolist() == [[0, 1, 4, 5, -1, -1]]
    assert (accepted.item(), bonus.item()) == (3, 3)
    logits[0, 1] = torch.eye(10, device=device)[8] * 9  # slot 2 carries 8, but under another parent
    index, accepted, bonus = ops.reject_sample(logits, tokens, parents)
    assert index.tolist() == [[0, 1, -1, -1, -1, -1]]
    assert (accepted.item(), bonus.item()) == (1, 8)


@pytest.mark.parametrize("proposal", PROPOSALS)
def test_a_row_of_a_batch_equals_the_row_alone_on_any_number_of_threads(device: torch.device, proposal: str) -> None:
    case = reject_case(8, 4, 20000, proposal, seed=8)
    whole = case.run(ops.reject_sample, device)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        for a, b in zip(case.run(ops.reject_sample, device), whole, strict=True):
            assert torch.equal(a, b)
    finally:
        torch.set_num_threads(threads)
    for row in range(8):
        alone = case.row(row).run(ops.reject_sample, device)
        for a, b in zip(alone, whole, strict=True):
            assert torch.equal(a, b[row : row + 1])


def test_strided_inputs_and_either_integer_width(device: torch.device) -> None:
    case = reject_case(3, 4, 70, "dense", seed=9)
    want = case.run(ops.reject_sample, device)
    wide = torch.full((4, 3, 80), 1e4)
    logits = wide.new_full((3, 8, 80), 1e4)[:, ::2, 5:75]
    logits.copy_(case.logits)
    q = case.options["draft_probs"]
    draft = q.new_full((3, 3, 90), torch.nan)[..., 3:73]
    draft.copy_(q)
    options = {**case.options, "draft_probs": draft, "starts": case.options["starts"].long()}
    options["top_k"] = options["top_k"].long()
    got = RejectCase(logits, case.tokens.int(), options).run(ops.reject_sample, device)
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)


def test_offsets_beyond_32_bits(device: torch.device) -> None:
    logits = far_rows(device, 100)
    logits[0, 0, 17] = logits[0, 1, 71] = 9.0
    index, accepted, bonus = ops.reject_sample(logits, torch.tensor([[0, 17]], device=device))
    assert (index.tolist(), accepted.item(), bonus.item()) == ([[0, 1]], 1, 71)


def test_opcheck(device: torch.device) -> None:
    for proposal in ("tree", "sparse"):
        case = reject_case(2, 3, 11, proposal, seed=2).on(device)
        options = case.options
        draft = options.get("draft_probs")
        ids, probs = draft if isinstance(draft, tuple) else (None, draft)
        rows = [options[name] for name in ("temperature", "top_k", "top_p", "min_p", "seeds", "starts")]
        args = (case.logits, case.tokens, options.get("parents"), ids, probs, *rows, 11)
        torch.library.opcheck(torch.ops.pydflash.reject_sample.default, args)


LOGITS, TOKENS = torch.zeros(2, 3, 5), torch.zeros(2, 3, dtype=torch.int64)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"target_logits": LOGITS.double()}, "target_logits must be float32, bfloat16 or float16, got float64"),
        ({"target_logits": LOGITS[0]}, r"target_logits must be of shape \[B, S, V\] = \[\?, \?, \?\], got \[3, 5\]"),
        ({"tokens": TOKENS[:, :2]}, r"tokens must be of shape \[B, S\] = \[2, 3\], got \[2, 2\]"),
        ({"target_logits": LOGITS[:, :0], "tokens": TOKENS[:, :0]}, "target_logits must have at least one slot, got 0"),
        ({"vocab_size": 6}, "vocab_size must be 1 to V = 5, got 6"),
        ({"vocab_size": 0}, "vocab_size must be 1 to V = 5, got 0"),
        ({"parents": torch.tensor([[0, 0, 2], [0, 0, 1]])}, r"parents\[0, 2\] must be an earlier slot, 0 to 1, got 2"),
        (
            {"parents": torch.tensor([[0, 0, 1], [0, -1, 1]])},
            r"parents\[1, 1\] must be an earlier slot, 0 to 0, got -1",
        ),
        (
            {"draft_probs": torch.zeros(2, 3, 5)},
            r"draft_probs must be of shape .* with W <= S-1 = 2, got W = 3",
        ),
        ({"draft_probs": torch.zeros(3, 2, 5)}, r"draft_probs must be of shape \[B, W, V\] = \[2, \?, \?\], got"),
        ({"draft_probs": torch.zeros(2, 2, 4)}, r"draft_probs must be of shape .* V >= vocab_size = 5, got V = 4"),
        ({"draft_probs": (TOKENS[:, :2, None], torch.zeros(2, 2, 4))}, r"draft_ids must be of shape \[B, W, K\]"),
        ({"temperature": torch.ones(3)}, r"temperature must be of shape \[B\] = \[2\], got \[3\]"),
        ({"top_k": torch.ones(3, dtype=torch.int64)}, r"top_k must be of shape \[B\] = \[2\], got \[3\]"),
        ({"top_p": torch.ones(3)}, r"top_p must be of shape \[B\] = \[2\], got \[3\]"),
        ({"min_p": torch.ones(3)}, r"min_p must be of shape \[B\] = \[2\], got \[3\]"),
        ({"seeds": torch.ones(3, dtype=torch.int64)}, r"seeds must be of shape \[B\] = \[2\], got \[3\]"),
        ({"starts": torch.ones(1, dtype=torch.int64)}, r"starts must be of shape \[B\] = \[2\], got \[1\]"),
    ],
)
def test_arguments_that_do_not_fit_are_named(change: dict[str, Any], message: str) -> None:
    arguments = {"target_logits": LOGITS, "tokens": TOKENS, **change}
    with pytest.raises(ValueError, match=f"reject_sample: {message}"):
        ops.reject_sample(**arguments)


def test_draft_ids_without_probs_and_mixed_devices_are_refused() -> None:
    rows = [torch.zeros(2)] * 6
    with pytest.raises(ValueError, match="reject_sample: draft_probs must be given with draft_ids, got None"):
        torch.ops.pydflash.reject_sample(LOGITS, TOKENS, None, TOKENS[:, :2, None], None, *rows, 5)


def test_an_empty_batch_gives_empty_results(device: torch.device) -> None:
    index, accepted, bonus = ops.reject_sample(LOGITS[:0].to(device), TOKENS[:0].to(device))
    assert (index.shape, accepted.shape, bonus.shape) == ((0, 3), (0,), (0,))
