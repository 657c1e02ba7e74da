"""block_conv: values worked out by hand, every tap count and dtype against float64, causality and strides."""

from __future__ import annotations

import pytest
import torch
from cpu_levels import over_levels
from matching import assert_matches
from torch import Tensor

from pydflash import ops
from pydflash.ops import reference

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def inputs(
    slots: int, taps: int, channels: int, group: int, batch: int = 2, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = ((batch, slots, channels), (taps, channels), (batch, slots, taps, channels // group))
    x, base, delta = (torch.randn(shape, generator=generator).bfloat16().double() for shape in shapes)
    return x, base, delta


def check(x: Tensor, base: Tensor, delta: Tensor, dtype: torch.dtype, device: torch.device) -> None:
    want = reference.block_conv(x, base, delta)
    moved = [t.to(device, dtype) for t in (x, base, delta)]
    for _ in over_levels(device):
        assert_matches(ops.block_conv(*moved), want)


@pytest.mark.parametrize("dtype", DTYPES)
def test_values_by_hand(dtype: torch.dtype, device: torch.device) -> None:
    """Rows 1..12 with groups of two channels, taps [1, 10]: y = x + 10 times the row before."""
    x = torch.arange(1.0, 13.0).reshape(1, 3, 4).to(device, dtype)
    base = torch.tensor([1.0, 10.0])[:, None].expand(2, 4).to(device, dtype)
    delta = torch.zeros(1, 3, 2, 2, dtype=dtype, device=device)
    want = torch.tensor([[1.0, 2, 3, 4], [15, 26, 37, 48], [59, 70, 81, 92]])
    for level in over_levels(device):
        assert torch.equal(ops.block_conv(x, base, delta)[0].cpu().float(), want), level
        changed = delta.clone()
        changed[0, 1, 1, 1] = -10  # slot 1, the tap on slot 0, the second group
        want_changed = want.clone()
        want_changed[1] = torch.tensor([15.0, 26, 7, 8])
        assert torch.equal(ops.block_conv(x, base, changed)[0].cpu().float(), want_changed), level


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("taps", range(1, 9))
@pytest.mark.parametrize("slots", [1, 2, 7, 16])
def test_taps_and_slots(slots: int, taps: int, dtype: torch.dtype, device: torch.device) -> None:
    check(*inputs(slots, taps, 96, 16), dtype, device)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("channels", "group"),
    [(576, 16), (1024, 64), (2560, 16), (5120, 16), (24, 8), (40, 8), (12, 4), (6, 2), (9, 3), (7, 7), (5, 1)],
)
def test_channels_and_groups(channels: int, group: int, dtype: torch.dtype, device: torch.device) -> None:
    check(*inputs(8, 2, channels, group), dtype, device)


@pytest.mark.parametrize("dtype", DTYPES)
def test_identity_returns_x_exactly(dtype: torch.dtype, device: torch.device) -> None:
    x, base, delta = (t.to(device, dtype) for t in inputs(16, 3, 64, 16))
    base.zero_()[0] = 1
    for level in over_levels(device):
        assert torch.equal(ops.block_conv(x, base, torch.zeros_like(delta)), x), level


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_slot_leaves_earlier_slots_and_other_sequences_alone(dtype: torch.dtype, device: torch.device) -> None:
    x, base, delta = (t.to(device, dtype) for t in inputs(7, 3, 64, 16))
    for level in over_levels(device):
        before = ops.block_conv(x, base, delta)
        for slot in range(7):
            changed = x.clone()
            changed[0, slot] = torch.nan
            after = ops.block_conv(changed, base, delta)
            reached = slice(slot, min(slot + 3, 7))
            assert after[0, reached].isnan().all(), f"{level} slot {slot}"
            untouched = torch.ones(2, 7, dtype=torch.bool)
            untouched[0, reached] = False
            assert torch.equal(after[untouched], before[untouched]), f"{level} slot {slot}"


@pytest.mark.parametrize("dtype", DTYPES)
def test_strided_inputs_equal_contiguous_ones(dtype: torch.dtype, device: torch.device) -> None:
    batch, slots, taps, channels, groups = 3, 8, 2, 96, 6
    generator = torch.Generator().manual_seed(1)
    wide = torch.randn(slots, batch, channels + 3 + taps * groups, generator=generator).to(device, dtype)
    x = wide[..., 3 : channels + 3].transpose(0, 1)
    delta = wide[..., channels + 3 :].unflatten(-1, (taps, groups)).transpose(0, 1)
    base = torch.randn(channels, taps, generator=generator).to(device, dtype).t()
    for level in over_levels(device):
        want = ops.block_conv(x.contiguous(), base.contiguous(), delta.contiguous())
        assert torch.equal(ops.block_conv(x, base, delta), want), level
        turned = ops.block_conv(x.mT.contiguous().mT, base, delta.mT.contiguous().mT)
        assert torch.equal(turned, want), level


def test_large_batches_run_in_parallel_with_the_same_result(device: torch.device) -> None:
    x, base, delta = (t.to(device, torch.float32) for t in inputs(16, 2, 2560, 16, batch=48))
    whole = ops.block_conv(x, base, delta)
    rows = [ops.block_conv(x[b : b + 1], base, delta[b : b + 1]) for b in range(48)]
    assert torch.equal(whole, torch.cat(rows))


@pytest.mark.parametrize("shape", [(0, 4, 32), (2, 0, 32)])
def test_empty(shape: tuple[int, int, int], device: torch.device) -> None:
    x = torch.zeros(shape, device=device)
    delta = torch.zeros(shape[0], shape[1], 2, 2, device=device)
    assert ops.block_conv(x, torch.zeros(2, 32, device=device), delta).shape == shape


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(2, 4, 32).double()}, "x must be float32, bfloat16 or float16, got float64"),
        ({"base": torch.zeros(2, 32).half()}, "base must be float32, as x, got float16"),
        ({"delta": torch.zeros(2, 4, 2, 2).bfloat16()}, "delta must be float32, as x, got bfloat16"),
        ({"x": torch.zeros(4, 32)}, r"x must be of shape \[B, S, C\] = \[\?, \?, \?\], got \[4, 32\]"),
        ({"base": torch.zeros(2, 16)}, r"base must be of shape \[T, C\] = \[\?, 32\], got \[2, 16\]"),
        (
            {"delta": torch.zeros(2, 4, 3, 2)},
            r"delta must be of shape \[B, S, T, G\] = \[2, 4, 2, \?\], got \[2, 4, 3, 2\]",
        ),
        ({"delta": torch.zeros(2, 4, 2, 3)}, "groups G of delta must divide C = 32, got 3"),
        (
            {"base": torch.zeros(9, 32), "delta": torch.zeros(2, 4, 9, 2)},
            "taps T of base must be 1 to 8, got 9",
        ),
    ],
)
def test_wrong_arguments_are_named(change: dict[str, Tensor], message: str, device: torch.device) -> None:
    right = {"x": torch.zeros(2, 4, 32), "base": torch.zeros(2, 32), "delta": torch.zeros(2, 4, 2, 2)}
    with pytest.raises(ValueError, match=f"^block_conv: {message}$"):
        ops.block_conv(**{name: x.to(device) for name, x in (right | change).items()})


def test_opcheck(device: torch.device) -> None:
    arguments = tuple(t.to(device, torch.float32) for t in inputs(4, 2, 32, 16))
    torch.library.opcheck(torch.ops.pydflash.block_conv.default, arguments)
