"""SamplingParams and seeds: ranges, defaults of a generation config, one 64-bit seed per request."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from pydflash import SamplingParams
from pydflash.sampling import row_seeds


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"temperature": -1e-3}, "temperature must be a number from 0 to inf, got -0.001"),
        ({"temperature": float("nan")}, "temperature must be a number from 0 to inf, got nan"),
        ({"temperature": float("inf")}, "temperature must be finite, at most 1e+30, got inf"),
        ({"temperature": "1"}, "temperature must be a number from 0 to inf, got '1'"),
        ({"temperature": True}, "temperature must be a number from 0 to inf, got True"),
        ({"top_p": 0.0}, "top_p must be above 0, got 0"),
        ({"top_p": -0.5}, "top_p must be a number from 0 to 1, got -0.5"),
        ({"top_p": 1.0001}, "top_p must be a number from 0 to 1, got 1.0001"),
        ({"top_p": float("nan")}, "top_p must be a number from 0 to 1, got nan"),
        ({"min_p": 1.1}, "min_p must be a number from 0 to 1, got 1.1"),
        ({"min_p": -0.1}, "min_p must be a number from 0 to 1, got -0.1"),
        ({"top_k": -1}, "top_k must be an integer >= 0, got -1"),
        ({"top_k": 3.0}, "top_k must be an integer >= 0, got 3.0"),
        ({"top_k": True}, "top_k must be an integer >= 0, got True"),
    ],
    ids=str,
)
def test_values_out_of_range(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        SamplingParams(**values)
    assert str(caught.value) == f"sampling: {message}"
    with pytest.raises(ValueError) as resolved:
        SamplingParams.resolve({}, **values)
    assert str(resolved.value) == str(caught.value)


def test_the_limits_themselves_are_fine() -> None:
    params = SamplingParams(temperature=0, top_k=0, top_p=1, min_p=1)
    assert params.greedy
    assert not SamplingParams(temperature=1e-9).greedy
    assert SamplingParams(top_p=1e-9).top_p == 1e-9
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.top_k = 3


CONFIG = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.1}


@pytest.mark.parametrize(
    ("defaults", "given", "expected"),
    [
        ({}, {}, SamplingParams()),
        (CONFIG, {}, SamplingParams(0.6, 20, 0.95, 0.1)),
        ({"do_sample": True}, {}, SamplingParams(1.0)),
        ({"do_sample": True, "temperature": 0.0}, {}, SamplingParams(0.0)),
        (CONFIG | {"do_sample": False}, {}, SamplingParams(0.0, 20, 0.95, 0.1)),
        ({k: v for k, v in CONFIG.items() if k != "do_sample"}, {}, SamplingParams(0.0, 20, 0.95, 0.1)),
        (CONFIG | {"do_sample": False}, {"temperature": 0.8}, SamplingParams(0.8, 20, 0.95, 0.1)),
        (CONFIG, {"temperature": 0.0}, SamplingParams(0.0, 20, 0.95, 0.1)),
        (CONFIG, {"top_k": 0, "top_p": 1.0, "min_p": 0.0}, SamplingParams(0.6)),
        ({"do_sample": True, "top_k": None, "top_p": None, "min_p": None}, {}, SamplingParams(1.0)),
        ({}, {"temperature": 1.5, "top_k": 3, "top_p": 0.5, "min_p": 0.2}, SamplingParams(1.5, 3, 0.5, 0.2)),
    ],
)
def test_resolve(defaults: dict[str, Any], given: dict[str, Any], expected: SamplingParams) -> None:
    assert SamplingParams.resolve(defaults, **given) == expected


def test_one_number_serves_all_and_a_list_each() -> None:
    assert row_seeds(7, 3) == [7, 7, 7]
    assert row_seeds([7, 8], 2) == [7, 8]
    assert row_seeds((7,), 1) == [7]
    assert row_seeds(0, 1) == [0]
    # The same 64 bits, as torch stores them.
    assert row_seeds(2**64 - 1, 1) == row_seeds(-1, 1) == [-1]
    assert row_seeds(2**63, 1) == row_seeds(-(2**63), 1) == [-(2**63)]
    assert row_seeds(2**63 - 1, 1) == [2**63 - 1]


@pytest.mark.parametrize(
    ("seed", "batch", "message"),
    [
        ([1], 2, "seed must be a number or 2 numbers (one per prompt), got [1]"),
        ([], 1, "seed must be a number or 1 numbers (one per prompt), got []"),
        (1.5, 1, "seed must be a number or 1 numbers (one per prompt), got 1.5"),
        ([1.5], 1, "seed must be an integer of 64 bits, got 1.5"),
        (2**64, 1, f"seed must be an integer of 64 bits, got {2**64}"),
        ([-(2**63) - 1], 1, f"seed must be an integer of 64 bits, got {-(2**63) - 1}"),
    ],
)
def test_seeds_that_are_refused(seed: Any, batch: int, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        row_seeds(seed, batch)
    assert str(caught.value) == f"sampling: {message}"


def test_fresh_seeds_come_from_torchs_generator() -> None:
    torch.manual_seed(3)
    first = row_seeds(None, 4)
    assert len(set(first)) == 4
    assert all(0 <= seed < 2**63 for seed in first)
    assert row_seeds(None, 4) != first
    torch.manual_seed(3)
    assert row_seeds(None, 4) == first
