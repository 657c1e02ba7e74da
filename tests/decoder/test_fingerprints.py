"""Whether a weight has changed: what is noticed, what is not, and what a check keeps alive."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pydflash.decoder.fingerprints import Fingerprint, _spread

SHAPES = ((576, 576), (40, 3), (1, 1), (7,), (), (2, 3, 5), (0, 4), (1536, 576), (33, 1), (3, 1000))


def weights(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype) for shape in SHAPES]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int8])
def test_an_edit_of_any_of_them_is_noticed(dtype: torch.dtype, device: torch.device) -> None:
    held = [tensor.to(device) for tensor in weights(dtype)]
    found = Fingerprint(held)
    assert not found.changed(held)
    for tensor in held:
        if tensor.numel():
            before = tensor.clone()
            tensor.data.add_(1)  # which no version counts
            assert found.changed(held)
            assert not found.moved(held)
            tensor.data.copy_(before)
            assert not found.changed(held)
    assert found.changed(held[:-1])
    assert found.changed([*held, torch.zeros(1)])


@pytest.mark.parametrize("inference", [False, True])
def test_what_counts_as_a_change(inference: bool) -> None:
    changes: tuple[Any, ...] = (
        lambda held: held[0].mul_(2),
        lambda held: held.__setitem__(0, held[0].clone()),
        lambda held: held.__setitem__(0, held[0].t()),
        lambda held: held.__setitem__(0, held[0].view(torch.int32)),
        lambda held: held.__setitem__(1, held[1][:39]),
    )
    for change in changes:
        with torch.inference_mode(inference):
            held = weights()
            found = Fingerprint(held)
            assert not found.changed(held)
            change(held)
            assert found.changed(held)


def test_a_version_shows_even_one_element() -> None:
    held = weights()
    found = Fingerprint(held)
    held[0][0, 0] = 5
    assert found.moved(held)


def test_nan_is_equal_to_itself_and_zero_has_a_sign() -> None:
    held = [torch.full((4, 4), torch.nan), torch.zeros(4)]
    found = Fingerprint(held)
    assert not found.changed(held)
    held[1].data.neg_()
    assert found.changed(held)


def test_another_tensor_cannot_take_the_place_of_one_that_went() -> None:
    parameter = nn.Parameter(torch.zeros(64, 64))
    found, place = Fingerprint([parameter]), parameter.data_ptr()
    for _ in range(20):
        parameter.data = torch.zeros(64, 64)
        assert parameter.data_ptr() != place
        assert found.changed([parameter])


@pytest.mark.parametrize("shape", [(576, 576), (1536, 576), (576, 1536), (49152, 576), (9, 40), (960, 577)])
def test_samples_are_spread_over_rows_and_columns(shape: tuple[int, int]) -> None:
    places = _spread(torch.arange(shape[0] * shape[1]).view(shape))
    assert 14 <= len(places) <= 16
    rows, columns = places // shape[1], places % shape[1]
    assert len(rows.unique()) >= min(9, len(places))
    assert len(columns.unique()) >= 8
    assert rows.max() >= 0.7 * shape[0]


def test_samples_of_parts_of_a_tensor_are_its_own() -> None:
    whole = torch.zeros(40, 50)
    part = whole[:, 5:25]
    found = Fingerprint([part])
    whole[:, :5].data.add_(1)
    whole[:, 25:].data.add_(1)
    assert not found.changed([part])
    part.data.add_(1)
    assert found.changed([part])


def test_copies_know_nothing() -> None:
    held = weights()
    found = Fingerprint(held)
    for other in (copy.deepcopy(found), pickle.loads(pickle.dumps(found))):
        assert other.changed(held)
