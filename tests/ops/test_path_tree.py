"""path_tree and path_viterbi against every node and path of small lattices, written out or enumerated in float64."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lattice_cases import (
    KINDS,
    NAMES,
    Arguments,
    assert_log_probs,
    best_nodes,
    every_path,
    lattice_case,
    log_probability,
    on,
    taken_nodes,
    tree,
    viterbi,
)
from matching import assert_matches
from sampling_cases import DTYPES, FIXTURES, LEVELS, instruction_level
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from pydflash import ops
from pydflash.ops import reference


def test_hand_made_tree_over_edges(device: torch.device) -> None:
    behind = [[[0.6, 0.4], [0.5, 0.5]], [[0.9, 0.1], [0.3, 0.7]]]  # row 1 of the first slot belongs to nothing
    case = on(
        {
            "anchors": torch.tensor([3]),
            "candidates": torch.tensor([[[10, 11], [20, 21]]]),
            "scores": torch.tensor([behind]).log() + torch.tensor([[[[5.0], [0.0]], [[-3.0], [8.0]]]]),
            "log_normalizers": None,
        },
        device,
    )
    got = tree(case, 6)
    assert got["tokens"].tolist() == [[3, 10, 20, 11, 21, 20, 21]]
    assert got["parents"].tolist() == [[-1, 0, 1, 0, 3, 3, 1]]
    assert got["depths"].tolist() == [[0, 1, 2, 1, 2, 2, 2]]
    assert got["visibility"].tolist() == [[0b1, 0b11, 0b111, 0b1001, 0b11001, 0b101001, 0b1000011]]
    assert_matches(got["log_probs"].exp(), torch.tensor([[1.0, 0.6, 0.54, 0.4, 0.28, 0.12, 0.06]]))
    assert [t.dtype for t in got.values()] == [torch.int64, torch.int32, torch.int32, torch.int64, torch.float32]
    tokens, log_probs = viterbi(case)
    assert tokens.tolist() == [[10, 20]]
    assert_matches(log_probs.exp(), torch.tensor([0.54]))


def test_hand_made_tree_over_independent_slots(device: torch.device) -> None:
    case = {
        "anchors": torch.tensor([3]),
        "candidates": torch.tensor([[[10, 11], [20, 21]]]),
        "scores": torch.tensor([[[0.48, 0.32], [0.42, 0.18]]]).log() + 2.0,
        "log_normalizers": None,
    }
    got = tree(on(case, device), 6)  # 0.6 and 0.4, then 0.7 and 0.3
    assert got["tokens"].tolist() == [[3, 10, 20, 11, 20, 21, 21]]
    assert got["parents"].tolist() == [[-1, 0, 1, 0, 3, 1, 3]]
    assert_matches(got["log_probs"].exp(), torch.tensor([[1.0, 0.6, 0.42, 0.4, 0.28, 0.18, 0.12]]))
    # With a fifth and two fifths of the mass elsewhere the second slot falls behind.
    case["log_normalizers"] = torch.tensor([[2.0, 2.0]])
    got = tree(on(case, device), 6)
    assert got["tokens"].tolist() == [[3, 10, 11, 20, 20, 21, 21]]
    assert_matches(got["log_probs"].exp(), torch.tensor([[1.0, 0.48, 0.32, 0.2016, 0.1344, 0.0864, 0.0576]]))
    assert_matches(viterbi(on(case, device))[1].exp(), torch.tensor([0.2016]))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", KINDS)
def test_takes_the_best_nodes_of_the_lattice(device: torch.device, level: str, kind: str) -> None:
    shapes = [(1, 1), (1, 5), (2, 3), (3, 4), (4, 2), (5, 1), (2, 17)]
    with instruction_level(level, device):
        for (slots, top_k), values in itertools.product(shapes, ("normal", "ties", "equal", "broken")):
            if values == "ties" and kind != "normalized" and slots > 1:
                continue  # equal sums of different edges need not tie in float32
            case = lattice_case(2, slots, top_k, kind, values, seed=slots)
            count = min(63, sum(top_k**depth for depth in range(1, slots + 1)))
            for num_nodes in {1, (count + 1) // 2, count}:
                got = tree(on(case, device), num_nodes)
                for b in range(2):
                    paths = taken_nodes(case, got, b)
                    assert paths == best_nodes(case, b, num_nodes, values != "normal"), (values, slots, top_k)
                    assert_log_probs(case, got, b, paths)


@pytest.mark.parametrize("kind", KINDS)
def test_viterbi_is_the_best_full_path(device: torch.device, kind: str) -> None:
    shapes = [(1, 1), (1, 6), (2, 5), (3, 4), (6, 2), (7, 1)]
    for (slots, top_k), values in itertools.product(shapes, ("normal", "ties", "equal", "broken")):
        case = lattice_case(3, slots, top_k, kind, values, seed=top_k)
        tokens, log_probs = viterbi(on(case, device))
        for b in range(3):
            candidates = case["candidates"][b].tolist()
            best, want = max(
                (
                    (round(log_probability(case, b, path), 5), [-candidates[i][c] for i, c in enumerate(path)])
                    for path in every_path(case, slots)
                ),
            )
            assert log_probs[b].item() == pytest.approx(best, abs=2e-5)
            if best > -math.inf:
                assert tokens[b].tolist() == [-token for token in want]


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
)
def test_kernel_equals_reference(device: torch.device, num_nodes: int, slots: int, top_k: int, **shape: Any) -> None:
    case = lattice_case(slots=slots, top_k=top_k, **shape)
    num_nodes = min(num_nodes, sum(top_k**depth for depth in range(1, slots + 1)))
    got, want = tree(on(case, device), num_nodes), tree(case, num_nodes, reference)
    for name in NAMES:
        assert torch.equal(got[name], want[name]), name
    for b in range(len(case["anchors"])):
        taken_nodes(case, got, b)
    for path, expected in zip(viterbi(on(case, device)), viterbi(case, reference), strict=True):
        assert torch.equal(path, expected)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("slots", "top_k"), [(7, 31), (7, 33), (7, 36), (15, 40), (3, 300), (1, 1024)])
def test_many_candidates_a_slot(device: torch.device, kind: str, slots: int, top_k: int) -> None:
    case = lattice_case(2, slots, top_k, kind, "ties", seed=6)
    num_nodes = min(63, 5 * slots)
    got, want = tree(on(case, device), num_nodes), tree(case, num_nodes, reference)
    for name in NAMES:
        assert torch.equal(got[name], want[name]), name
    for path, expected in zip(viterbi(on(case, device)), viterbi(case, reference), strict=True):
        assert torch.equal(path, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_better_is_left_behind(device: torch.device, kind: str) -> None:
    case = lattice_case(2, 7, 16, kind)
    got = tree(on(case, device), 63)
    assert (got["visibility"] < 0).sum() == 2  # slot 63 is the sign bit
    for b in range(2):
        taken = taken_nodes(case, got, b)
        least = got["log_probs"][b].min().item()
        assert got["log_probs"][b].diff().max() <= 0
        for node in [(), *taken]:
            for child in [(*node, c) for c in range(16)] if len(node) < 7 else []:
                assert child in taken or log_probability(case, b, child) <= least + 1e-5


def test_independent_slots_are_the_joint_law_of_the_vocabulary(device: torch.device) -> None:
    """DDTree: the N most likely prefixes under the product of the slots' full softmaxes."""
    generator = torch.Generator().manual_seed(3)
    logits = 2 * torch.randn(2, 3, 60, generator=generator)
    anchors, zero = torch.tensor([1, 2]), torch.zeros(2, dtype=torch.int64)
    _, candidates, _, scores = ops.path_select(logits, None, None, None, anchors, None, 0, zero, 6)
    case = {"anchors": anchors, "candidates": candidates, "scores": scores, "log_normalizers": logits.logsumexp(-1)}
    got = tree(on(case, device), 40)
    law = logits.double().log_softmax(-1)
    for b in range(2):
        nodes = {
            ids: sum(law[b, slot, token].item() for slot, token in enumerate(ids))
            for depth in (1, 2, 3)
            for ids in itertools.product(*candidates[b, :depth].tolist())
        }
        best = sorted(nodes, key=nodes.__getitem__, reverse=True)[:40]
        ids = candidates[b].tolist()
        taken = [tuple(ids[i][c] for i, c in enumerate(path)) for path in taken_nodes(case, got, b)]
        assert taken == best
        assert_matches(got["log_probs"][b, 1:], torch.tensor([nodes[node] for node in best]))


def test_ties_go_to_the_shallower_then_the_earlier_parent_then_the_lower_id(device: torch.device) -> None:
    case = on(lattice_case(1, 2, 2, "slots", "equal"), device)
    case["candidates"] = torch.tensor([[[9, 4], [8, 7]]], device=device)
    got = tree(case, 6)
    assert got["tokens"][0, 1:].tolist() == [4, 9, 7, 8, 7, 8]
    assert got["parents"][0, 1:].tolist() == [0, 0, 1, 1, 2, 2]
    assert viterbi(case)[0].tolist() == [[4, 7]]
    case["scores"] = torch.tensor([[[-1.0, -2.0], [-1.0, -4.0]]], device=device)
    case["log_normalizers"] = torch.zeros(1, 2, device=device)
    got = tree(case, 4)
    assert got["tokens"][0, 1:].tolist() == [9, 4, 8, 8]  # -1, then -2 at depth 1 before -2 at depth 2
    assert got["log_probs"][0].tolist() == [0.0, -1.0, -2.0, -2.0, -3.0]


@pytest.mark.parametrize("kind", KINDS)
def test_candidates_without_probability_come_last(device: torch.device, kind: str) -> None:
    case = lattice_case(1, 3, 3, kind)
    case["scores"][..., 1], case["scores"][..., 2] = torch.nan, -torch.inf
    got = tree(on(case, device), 12)
    paths = taken_nodes(case, got, 0)
    assert paths[:3] == [(0,), (0, 0), (0, 0, 0)]
    assert got["log_probs"][0, 4:].tolist() == [-torch.inf] * 9
    # Ties among the rest: first both siblings at depth 1, lower id first; at depth 2 the children in slot order.
    order = sorted((1, 2), key=lambda c: case["candidates"][0, 0, c].item())
    assert paths[3:5] == [(order[0],), (order[1],)]
    assert [path[:-1] for path in paths[5:]] == [(0,)] * 2 + [(order[0],)] * 3 + [(order[1],)] * 2
    case["scores"].fill_(torch.nan)
    got = tree(on(case, device), 12)
    assert got["depths"][0].tolist() == [0, 1, 1, 1] + [2] * 9
    assert got["parents"][0].tolist() == [-1, 0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]
    assert got["log_probs"][0, 1:].tolist() == [-torch.inf] * 12
    tokens, log_probs = viterbi(on(case, device))
    assert log_probs.tolist() == [-torch.inf]
    assert torch.equal(tokens, case["candidates"].amin(-1))


def test_a_row_of_a_batch_equals_the_row_alone_on_any_number_of_threads(device: torch.device) -> None:
    case = on(lattice_case(40, 7, 16, "edges"), device)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        whole, paths = tree(case, 63), viterbi(case)
    finally:
        torch.set_num_threads(threads)
    for b in range(40):
        row = {name: None if t is None else t[b : b + 1] for name, t in case.items()}
        for name, output in tree(row, 63).items():
            assert torch.equal(output[0], whole[name][b])
        for alone, together in zip(viterbi(row), paths, strict=True):
            assert torch.equal(alone[0], together[b])


def test_integer_widths_strides_and_narrow_scores(device: torch.device) -> None:
    for kind in KINDS:
        case = on(lattice_case(2, 4, 5, kind), device)
        want, path = tree(case, 20), viterbi(case)
        other = {name: None if t is None else t.repeat_interleave(2, -1)[..., ::2] for name, t in case.items()}
        other |= {"anchors": case["anchors"].int(), "candidates": case["candidates"].int()}
        assert all(torch.equal(t, want[name]) for name, t in tree(other, 20).items())
        assert all(torch.equal(a, b) for a, b in zip(viterbi(other), path, strict=True))
        for dtype in (torch.bfloat16, torch.float16):
            half = {**case, "scores": case["scores"].to(dtype)}
            wide = {**case, "scores": half["scores"].float()}
            assert all(torch.equal(t, tree(wide, 20)[name]) for name, t in tree(half, 20).items())
            assert all(torch.equal(a, b) for a, b in zip(viterbi(half), viterbi(wide), strict=True))


def test_no_rows_and_no_slots(device: torch.device) -> None:
    case = on(lattice_case(2, 3, 4, "edges"), device)
    nothing = {name: None if t is None else t[:0] for name, t in case.items()}
    for module in (ops, reference):
        assert [tuple(t.shape) for t in tree(nothing, 5, module).values()] == [(0, 6)] * 5
        assert [tuple(t.shape) for t in viterbi(nothing, module)] == [(0, 3), (0,)]
        flat = {**case, "candidates": case["candidates"][:, :0], "scores": case["scores"][:, :0]}
        tokens, log_probs = viterbi(flat, module)
        assert tuple(tokens.shape) == (2, 0)
        assert log_probs.tolist() == [0.0, 0.0]


@pytest.mark.parametrize(("slots", "top_k", "limit"), [(1, 4, 4), (2, 3, 12), (3, 1, 3), (7, 16, 63), (0, 5, 0)])
def test_a_lattice_with_too_few_nodes_is_refused(slots: int, top_k: int, limit: int) -> None:
    case = lattice_case(1, slots, top_k, "edges")
    for module, num_nodes in itertools.product((ops, reference), (limit + 1, 0, -3)):
        if limit:
            assert tree(case, limit, module)["tokens"].shape == (1, limit + 1)
        with pytest.raises(ValueError, match=rf"path_tree: num_nodes must be 1 to \d+.*got {num_nodes}"):
            tree(case, num_nodes, module)
    if limit < 63:
        with pytest.raises(ValueError, match=f"must be 1 to {limit} .* of {slots} slots with {top_k} candidates"):
            tree(case, limit + 1)


def test_opcheck(device: torch.device) -> None:
    for kind in ("edges", "normalized"):
        anchors, *lattice, normalizers = on(lattice_case(2, 3, 4, kind), device).values()
        torch.library.opcheck(torch.ops.pydflash.path_tree.default, (anchors, *lattice, 7, normalizers, None))
        torch.library.opcheck(torch.ops.pydflash.path_viterbi.default, (*lattice, normalizers))


def both(anchors: Tensor, candidates: Tensor, scores: Tensor) -> tuple[Tensor, ...]:
    return (*ops.path_tree(anchors, candidates, scores, 9), *ops.path_viterbi(candidates, scores))


def test_traces_as_one_graph_and_with_fake_shapes(device: torch.device) -> None:
    inputs = list(on(lattice_case(2, 3, 4, "edges"), device).values())[:3]
    compiled: Callable[..., tuple[Tensor, ...]] = torch.compile(both, backend="eager", fullgraph=True)
    want = both(*inputs)
    for a, b in zip(compiled(*inputs), want, strict=True):
        assert torch.equal(a, b)
    with FakeTensorMode() as mode:
        for fake, b in zip(both(*[mode.from_tensor(t) for t in inputs]), want, strict=True):
            assert (fake.shape, fake.dtype, fake.stride()) == (b.shape, b.dtype, b.stride())


GOOD = lattice_case(2, 3, 4, "edges")
SLOTS = lattice_case(2, 3, 4, "normalized")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scores": GOOD["scores"].double()}, "scores must be float32, bfloat16 or float16, got torch.float64"),
        ({"scores": GOOD["scores"].long()}, "scores must be float32, bfloat16 or float16, got torch.int64"),
        ({"scores": GOOD["scores"][..., :3]}, r"scores must be of shape \[B, S-1, K, K\] = \[2, 3, 4, 4\]"),
        (
            {"scores": SLOTS["scores"][:, :2]},
            r"scores must be of shape \[B, S-1, K\] or .* = \[2, 3, 4\], got \[2, 2, 4",
        ),
        ({"scores": GOOD["scores"][0, 0]}, r"scores must be of shape \[B, S-1, K\] or"),
        ({"candidates": GOOD["candidates"][0]}, r"candidates must be of shape \[B, S-1, K\]"),
        ({"candidates": GOOD["candidates"].float()}, "candidates must be int32 or int64, got torch.float32"),
        ({"candidates": GOOD["candidates"][..., :0]}, "candidates must be 1 to 1024 a slot, got 0"),
        ({"log_normalizers": SLOTS["log_normalizers"]}, "log_normalizers must be None where scores are"),
        (
            {**SLOTS, "log_normalizers": torch.zeros(2, 4)},
            r"log_normalizers must be of shape \[B, S-1\] = \[2, 3\], got",
        ),
    ],
)
def test_arguments_that_do_not_fit_are_named(change: Arguments, message: str) -> None:
    with pytest.raises(ValueError, match=f"path_tree: {message}"):
        tree({**GOOD, **change}, 5)
    with pytest.raises(ValueError, match=f"path_viterbi: {message}"):
        viterbi({**GOOD, **change})


@pytest.mark.parametrize(
    ("anchors", "message"),
    [
        (torch.zeros(3, dtype=torch.int64), r"of shape \[B\] = \[2\], got \[3\]"),
        (torch.zeros(2, 1, dtype=torch.int64), r"of shape \[B\], got \[2, 1\]"),
        (torch.zeros(2), "int32 or int64, got torch.float32"),
    ],
)
def test_anchors_that_do_not_fit_are_named(anchors: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=f"path_tree: anchors must be {message}"):
        tree({**GOOD, "anchors": anchors}, 5)
