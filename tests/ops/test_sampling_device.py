"""path_select and reject_sample over large vocabularies, and what only holds on a device with memory of its own."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from sampling_cases import RejectCase, reject_case
from select_cases import on, select_case
from torch import Tensor

from pydflash import ops
from pydflash.ops import backends, reference


@pytest.mark.parametrize(
    "options",
    [
        {"top_p": 0.97},
        {"top_k": 6000},
        {"top_k": 6000, "top_p": 0.9, "min_p": 1e-4},
        {"top_k": 300, "top_p": 0.9},
        {"top_p": 0.6, "min_p": 0.01},
        {"min_p": 0.001},
    ],
    ids=str,
)
@pytest.mark.parametrize("values", ["normal", "ties", "equal"])
def test_laws_of_thousands_of_tokens(device: torch.device, values: str, options: Any) -> None:
    """The token drawn is where the uniform falls in the law's CDF, up to rounding."""
    case = reject_case(8, 1, 9000, "none", values=values, seed=10)
    seeds = torch.arange(8)
    anchors = torch.zeros(8, 1, dtype=torch.int64)
    *_, bonus = RejectCase(case.logits, anchors, {"temperature": 1.3, "seeds": seeds, **options}).run(
        ops.reject_sample, device
    )
    filters = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, **options}
    rows = [torch.full((8,), value) for value in (1.3, *filters.values())]
    weights = reference.filtered_weights(case.logits[:, 0].double(), *rows)
    cumulative = weights.cumsum(-1)
    u = reference.uniform(seeds, torch.tensor(1), reference.TARGET).double()
    target, slack = u * cumulative[:, -1], 1e-6 * cumulative[:, -1]
    here, weight = (t.gather(1, bonus[:, None])[:, 0] for t in (cumulative, weights))
    assert (weight > 0).all()
    assert (here > target - slack).all()
    assert (here - weight <= target + slack).all()


def tensors_of(case: RejectCase) -> list[Tensor]:
    options = [v for value in case.options.values() for v in (value if isinstance(value, tuple) else (value,))]
    return [case.logits, case.tokens, *options]


def test_a_captured_graph_reads_every_value_from_the_device(device: torch.device) -> None:
    if device.type != "cuda":
        pytest.skip("graphs are of a GPU")
    case, *others = (reject_case(6, 4, 5000, "sparse", seed=seed).on(device) for seed in (11, 12, 13))
    ops.reject_sample(case.logits, case.tokens, **case.options)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = ops.reject_sample(case.logits, case.tokens, **case.options)
    for other in others:
        want = ops.reject_sample(other.logits, other.tokens, **other.options)
        for old, new in zip(tensors_of(case), tensors_of(other), strict=True):
            old.copy_(new)
        graph.replay()
        for a, b in zip(out, want, strict=True):
            assert torch.equal(a, b)


def test_parents_that_lead_nowhere_reach_no_memory_on_a_device(device: torch.device) -> None:
    """There the values are not looked at before the launch: whatever comes out, the indices are slots."""
    if backends.name_for(device.type) == "cpu":
        pytest.skip("refused on a CPU")
    case = reject_case(8, 6, 300, "tree", seed=13).on(device)
    for parent in (-1, 5, 6, 2**31 - 1, -(2**31)):
        case.options["parents"][:, 2:] = parent
        index, accepted, bonus = ops.reject_sample(case.logits, case.tokens, **case.options)
        assert index.amin() >= -1
        assert index.amax() < 6
        assert accepted.amax() < 6
        assert ((bonus >= 0) & (bonus < 300)).all()


def test_anchors_outside_the_codebooks_reach_no_memory_on_a_device(device: torch.device) -> None:
    if backends.name_for(device.type) == "cpu":
        pytest.skip("refused on a CPU")
    case = on(select_case(3, 4, 100, 16, 8), device)
    for anchor in (-1, 100, 2**62, -(2**63)):
        case["anchors"][:] = anchor
        tokens, candidates, *_ = ops.path_select(**case)
        assert (tokens[..., None] == candidates).any(-1).all()


@pytest.mark.parametrize("rank", [0, 64])
@pytest.mark.parametrize("top_k", [16, 40])
def test_a_captured_path_select_reads_every_value_from_the_device(device: torch.device, rank: int, top_k: int) -> None:
    if device.type != "cuda":
        pytest.skip("graphs are of a GPU")
    case, *others = (on(select_case(3, 7, 3000, top_k, rank, seed=seed), device) for seed in (1, 2, 3))
    ops.path_select(**case)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = ops.path_select(**case)
    for other in others:
        want = ops.path_select(**other)
        for name, value in other.items():
            if isinstance(value, Tensor):
                case[name].copy_(value)
        graph.replay()
        for a, b in zip(out, want, strict=True):
            assert torch.equal(a, b)


def test_results_on_another_stream_and_again_are_the_same(device: torch.device) -> None:
    """No order of the device's threads shows in a result."""
    cases = [
        reject_case(16, 5, 9000, kind, values=values, seed=3)
        for kind, values in itertools.product(("tree", "sparse", "dense"), ("normal", "equal"))
    ]
    want = [case.run(ops.reject_sample, device) for case in cases]
    for _ in range(3):
        for case, expected in zip(cases, want, strict=True):
            if device.type == "cuda":
                stream = torch.cuda.Stream(device)
                stream.wait_stream(torch.cuda.current_stream(device))
                with torch.cuda.stream(stream):
                    got = case.run(ops.reject_sample, device)
            else:
                got = case.run(ops.reject_sample, device)
            for a, b in zip(got, expected, strict=True):
                assert torch.equal(a, b)
