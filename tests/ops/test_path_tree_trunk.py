"""path_tree with a trunk: by hand, against every node of small lattices, and against its definition."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lattice_cases import (
    KINDS,
    NAMES,
    Arguments,
    Path,
    assert_log_probs,
    best_nodes,
    lattice_case,
    on,
    taken_nodes,
    tree,
)
from matching import assert_matches
from sampling_cases import DTYPES, FIXTURES, LEVELS, instruction_level
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from pydflash import ops
from pydflash.ops import reference

INF = torch.inf


def with_trunk(case: Arguments, length: int, seed: int = 0, stray: float = 0.0) -> Arguments:
    """The case with a random trunk; a share `stray` of its tokens are no candidates."""
    generator = torch.Generator().manual_seed(seed)
    candidates = case["candidates"][:, :length]
    choice = torch.randint(candidates.shape[2], (*candidates.shape[:2], 1), generator=generator)
    trunk = candidates.gather(2, choice).squeeze(-1)
    absent = torch.tensor([-1, 10**6, 2**62])[torch.randint(3, trunk.shape, generator=generator)]
    return {**case, "trunk": torch.where(torch.rand(trunk.shape, generator=generator) < stray, absent, trunk)}


def trunk_paths(case: Arguments, b: int) -> list[Path]:
    """The nodes of a trunk of candidates."""
    rows = zip(case["candidates"][b].tolist(), case["trunk"][b].tolist(), strict=False)
    index = [ids.index(token) for ids, token in rows]
    return [tuple(index[: i + 1]) for i in range(len(index))]


def hand_made(trunk: list[int], device: torch.device, second: float = 0.4) -> Arguments:
    """10 (0.6), with 20 (0.9) and 21 (0.1) behind it, and 11 (0.4), with 20 (0.3) and 21 (0.7)."""
    behind = [[[0.6, second], [0.5, 0.5]], [[0.9, 0.1], [0.3, 0.7]]]
    case = {
        "anchors": torch.tensor([3]),
        "candidates": torch.tensor([[[10, 11], [20, 21]]]),
        "scores": torch.tensor([behind]).log(),
        "log_normalizers": None,
        "trunk": torch.tensor([trunk]),
    }
    return on(case, device)


def test_hand_made_trunk(device: torch.device) -> None:
    got = tree(hand_made([11, 20], device), 5)
    assert got["tokens"].tolist() == [[3, 11, 20, 10, 20, 21]]
    assert got["parents"].tolist() == [[-1, 0, 1, 0, 3, 1]]
    assert got["depths"].tolist() == [[0, 1, 2, 1, 2, 2]]
    assert got["visibility"].tolist() == [[0b1, 0b11, 0b111, 0b1001, 0b11001, 0b100011]]
    assert_matches(got["log_probs"].exp(), torch.tensor([[1.0, 0.4, 0.12, 0.6, 0.54, 0.28]]))
    got = tree(hand_made([11, 20], device), 2)  # nothing beside it
    assert got["tokens"].tolist() == [[3, 11, 20]]
    assert got["parents"].tolist() == [[-1, 0, 1]]


def test_ties_go_to_the_earlier_slot_so_to_the_trunk(device: torch.device) -> None:
    case = on(lattice_case(1, 2, 2, "slots", "equal"), device)
    case["candidates"] = torch.tensor([[[9, 4], [8, 7]]], device=device)
    got = tree({**case, "trunk": torch.tensor([[9]], device=device)}, 6)
    assert got["tokens"][0, 1:].tolist() == [9, 4, 7, 8, 7, 8]
    assert got["parents"][0, 1:].tolist() == [0, 0, 1, 1, 2, 2]


def test_trunk_tokens_that_are_no_candidates(device: torch.device) -> None:
    for stray in (-1, 99, 2**62):
        got = tree(hand_made([10, stray], device), 5)
        assert got["tokens"].tolist() == [[3, 10, stray, 20, 11, 21]]
        assert got["parents"].tolist() == [[-1, 0, 1, 1, 0, 4]]
        assert_matches(got["log_probs"].exp(), torch.tensor([[1.0, 0.6, 0.0, 0.54, 0.4, 0.28]]))
        got = tree(hand_made([stray, 20], device), 5)  # a candidate behind it has no probability either
        assert got["tokens"].tolist() == [[3, stray, 20, 10, 20, 11]]
        assert got["log_probs"][0, :3].tolist() == [0.0, -INF, -INF]
    # What follows it comes last: here with 11, of probability 0, behind all others, and behind 11 at its depth.
    got = tree(hand_made([99], device, second=0.0), 6)
    assert got["tokens"].tolist() == [[3, 99, 10, 20, 21, 11, 20]]
    assert got["parents"].tolist() == [[-1, 0, 0, 2, 2, 0, 1]]
    assert got["log_probs"][0].tolist()[-2:] == [-INF, -INF]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_best_nodes_beside_the_trunk(device: torch.device, level: str, kind: str) -> None:
    shapes = [(1, 5), (2, 3), (3, 4), (4, 2), (5, 1)]
    with instruction_level(level, device):
        for (slots, top_k), values in itertools.product(shapes, ("normal", "ties", "equal", "broken")):
            if values == "ties" and kind != "normalized" and slots > 1:
                continue  # equal sums of different edges need not tie in float32
            plain = lattice_case(2, slots, top_k, kind, values, seed=slots)
            count = min(63, sum(top_k**depth for depth in range(1, slots + 1)))
            for length in {1, slots}:
                case = with_trunk(plain, length, seed=length)
                for num_nodes in {length, (count + length) // 2, count}:
                    got = tree(on(case, device), num_nodes)
                    for b in range(2):
                        trunk, paths = trunk_paths(case, b), taken_nodes(case, got, b)
                        assert paths[:length] == trunk
                        assert paths == best_nodes(case, b, num_nodes, values != "normal", trunk)
                        assert_log_probs(case, got, b, paths)


@pytest.mark.parametrize("kind", KINDS)
def test_a_stray_token_is_a_candidate_of_no_probability(device: torch.device, kind: str) -> None:
    """One more candidate of -inf in every slot changes no other edge, and the trunk may then name it."""
    case = with_trunk(lattice_case(4, 4, 5, kind), 4, stray=0.4)
    stray = ~(case["candidates"] == case["trunk"][..., None]).any(-1)
    assert stray.any(1).all()
    more = torch.where(stray, case["trunk"], -5)[..., None]
    wider = {**case, "candidates": torch.cat([case["candidates"], more], -1)}
    fill = (0, 1, 0, 1) if kind == "edges" else (0, 1)
    wider["scores"] = torch.nn.functional.pad(case["scores"], fill, value=-INF)
    got, want = tree(on(case, device), 20), tree(on(wider, device), 20)
    assert got["log_probs"][:, 5:].isfinite().all()
    for name in NAMES:
        assert torch.equal(got[name], want[name]), name


@settings(max_examples=150, deadline=None, suppress_health_check=FIXTURES)
@given(
    batch=st.integers(1, 3),
    slots=st.integers(1, 15),
    top_k=st.integers(1, 20),
    kind=st.sampled_from(KINDS),
    values=st.sampled_from(("normal", "ties", "equal", "broken", "infinite")),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 10**6),
    num_nodes=st.integers(1, 63),
    length=st.integers(0, 15),
    stray=st.sampled_from((0.0, 0.0, 0.3, 1.0)),
)
def test_kernel_equals_reference(
    device: torch.device, num_nodes: int, slots: int, top_k: int, seed: int, length: int, stray: float, **shape: Any
) -> None:
    num_nodes = min(num_nodes, sum(top_k**depth for depth in range(1, slots + 1)))
    plain = lattice_case(slots=slots, top_k=top_k, seed=seed, **shape)
    case = with_trunk(plain, min(length, slots, num_nodes), seed, stray)
    got, want = tree(on(case, device), num_nodes), tree(case, num_nodes, reference)
    for name in NAMES:
        assert torch.equal(got[name], want[name]), name
    for b in range(len(case["anchors"])):
        nodes = list(zip(got["parents"][b].tolist(), got["tokens"][b].tolist(), strict=True))
        assert len(set(nodes)) == len(nodes)


@pytest.mark.parametrize("kind", KINDS)
def test_a_trunk_of_the_best_tree_only_comes_first(device: torch.device, kind: str) -> None:
    case = on(lattice_case(3, 7, 16, kind, seed=5), device)
    plain = tree(case, 63)
    assert (plain["depths"] >= 2).any(1).all()
    pick = (plain["depths"] == 2).long().argmax(1)
    rows = torch.arange(3)
    first = plain["tokens"][rows, plain["parents"][rows, pick].long()]
    trunk = torch.stack([first, plain["tokens"][rows, pick]], 1)
    got = tree({**case, "trunk": trunk.to(device)}, 63)
    assert (got["visibility"] < 0).sum() == 3  # slot 63 is the sign bit
    for b in range(3):
        assert got["tokens"][b, 1:3].tolist() == trunk[b].tolist()
        assert set(taken_nodes(case, got, b)) == set(taken_nodes(case, plain, b))
        assert got["log_probs"][b, 3:].diff().max() <= 0


@pytest.mark.parametrize("kind", KINDS)
def test_no_trunk_and_an_empty_one_change_nothing(device: torch.device, kind: str) -> None:
    case = on(lattice_case(2, 4, 6, kind), device)
    want = tree(case, 30)
    for trunk in (None, torch.zeros(2, 0, dtype=torch.int64, device=device)):
        for module in (ops, reference):
            got = tree({**case, "trunk": trunk}, 30, module)
            assert all(torch.equal(got[name], want[name]) for name in NAMES)


def test_a_row_of_a_batch_equals_the_row_alone_and_either_integer_width(device: torch.device) -> None:
    case = on(with_trunk(lattice_case(40, 7, 16, "edges"), 6, stray=0.1), device)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        whole = tree(case, 63)
    finally:
        torch.set_num_threads(threads)
    for b in range(40):
        row = {name: None if t is None else t[b : b + 1] for name, t in case.items()}
        for name, output in tree(row, 63).items():
            assert torch.equal(output[0], whole[name][b])
    small = {**case, "trunk": case["trunk"].clamp_max(10**6)}
    narrow = {**small, "trunk": small["trunk"].int().repeat_interleave(2, -1)[:, ::2]}
    assert all(torch.equal(t, tree(small, 63)[name]) for name, t in tree(narrow, 63).items())
    nothing = {name: None if t is None else t[:0] for name, t in case.items()}
    for module in (ops, reference):
        assert tree(nothing, 9, module)["tokens"].shape == (0, 10)


def test_opcheck_and_fake_shapes(device: torch.device) -> None:
    anchors, *lattice, normalizers, trunk = on(with_trunk(lattice_case(2, 3, 4, "edges"), 3), device).values()
    torch.library.opcheck(torch.ops.pydflash.path_tree.default, (anchors, *lattice, 7, normalizers, trunk))
    inputs = (anchors, *lattice, 9, None, trunk)
    want = ops.path_tree(*inputs)
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(t) if isinstance(t, Tensor) else t for t in inputs]
        for fake, real in zip(ops.path_tree(*fakes), want, strict=True):
            assert (fake.shape, fake.dtype) == (real.shape, real.dtype)


@pytest.mark.parametrize(
    ("num_nodes", "trunk", "message"),
    [
        (9, torch.zeros(2, 4, dtype=torch.int64), r"of shape \[B, W\] with W <= min\(num_nodes, S-1\) = 3, got W = 4"),
        (2, torch.zeros(2, 3, dtype=torch.int64), r"of shape \[B, W\] with W <= min\(num_nodes, S-1\) = 2, got W = 3"),
        (9, torch.zeros(3, 2, dtype=torch.int64), r"of shape \[B, W\] = \[2, \?\], got \[3, 2\]"),
        (9, torch.zeros(2, dtype=torch.int64), r"of shape \[B, W\] = \[2, \?\], got \[2\]"),
        (9, torch.zeros(2, 2), r"int32 or int64, got torch.float32"),
    ],
)
def test_trunks_that_do_not_fit_are_refused(num_nodes: int, trunk: Tensor, message: str) -> None:
    case = {**lattice_case(2, 3, 4, "edges"), "trunk": trunk}
    with pytest.raises(ValueError, match=f"path_tree: trunk must be {message}"):
        tree(case, num_nodes)
    if "W = " in message:
        with pytest.raises(ValueError, match=f"path_tree: trunk must be {message}"):
            tree(case, num_nodes, reference)
