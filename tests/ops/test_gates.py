"""apply_gate and soft_cap against torch in float64, to the last bit whatever stands beside a value, refusals."""

from __future__ import annotations

import re

import pytest
import torch
from cpu_levels import over_levels
from fused_cases import DTYPES

from pydflash import ops
from pydflash.ops import reference, registry

NEAR = {torch.float32: (2e-6, 1e-6), torch.bfloat16: (1.6e-2, 1e-3), torch.float16: (2e-3, 1e-4)}


@pytest.fixture
def gates(device: torch.device) -> torch.device:
    """A device whose backend has these ops."""
    if not registry.has("apply_gate", device):
        pytest.skip(f"{device.type} has no kernels of these ops")
    return device


# Small and large ones, both signs, and what no function bends: zero and infinity.
VALUES = torch.cat([torch.logspace(-30, 2, 400), torch.tensor([0.0, torch.inf])]).double()
VALUES = torch.cat([VALUES, -VALUES])


@pytest.mark.parametrize("activation", ["gelu_tanh", "sigmoid"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gates(dtype: torch.dtype, activation: str, gates: torch.device) -> None:
    gate = VALUES.clamp(-60000, 60000).to(dtype)
    x = torch.linspace(-3, 3, len(gate), dtype=torch.float64).to(dtype)
    want = reference.apply_gate(x.double(), gate.double(), activation)
    for _ in over_levels(gates):
        got = ops.apply_gate(x[None].to(gates), gate[None].to(gates), activation)[0].cpu()
        torch.testing.assert_close(got.double(), want, rtol=NEAR[dtype][0], atol=NEAR[dtype][1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_caps(dtype: torch.dtype, gates: torch.device) -> None:
    x = VALUES.to(dtype)
    for cap in (0.5, 30.0):
        want = cap * torch.tanh(x.double() / cap)
        for _ in over_levels(gates):
            got = ops.soft_cap(x[None].to(gates), cap)[0].cpu().double()
            torch.testing.assert_close(got, want, rtol=NEAR[dtype][0], atol=cap * NEAR[dtype][1])
            assert bool((got.abs() <= cap).all())


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_is_the_same_beside_any_others(dtype: torch.dtype, gates: torch.device) -> None:
    generator = torch.Generator().manual_seed(0)
    x, gate = (torch.randn(9, 77, generator=generator).to(gates, dtype) for _ in range(2))
    for _ in over_levels(gates):
        for run in (
            lambda rows: ops.apply_gate(x[rows], gate[rows], "gelu_tanh"),
            lambda rows: ops.apply_gate(x[rows], gate[rows], "sigmoid"),
            lambda rows: ops.soft_cap(x[rows], 3.0),
        ):
            whole = run(slice(0, 9))
            for i in range(9):
                assert torch.equal(run(slice(i, i + 1))[0], whole[i])


def test_strided_rows() -> None:
    wide = torch.randn(4, 40)
    gate, x = wide.chunk(2, -1)
    assert torch.equal(ops.apply_gate(x, gate, "sigmoid"), ops.apply_gate(x.contiguous(), gate.contiguous(), "sigmoid"))
    assert torch.equal(ops.soft_cap(x, 2.0), ops.soft_cap(x.contiguous(), 2.0))


def test_refusals() -> None:
    x = torch.zeros(2, 3)
    for call, message in (
        (lambda: ops.apply_gate(x, x, "relu"), "apply_gate: activation must be one of gelu_tanh, sigmoid, got 'relu'"),
        (lambda: ops.apply_gate(x, torch.zeros(2, 4), "sigmoid"), "apply_gate: gate must be of shape [M, N] = [2, 3]"),
        (lambda: ops.apply_gate(x, x.half(), "sigmoid"), "apply_gate: gate must be float32, as x, got float16"),
        (lambda: ops.soft_cap(x, 0.0), "soft_cap: cap must be above 0, got 0"),
        (lambda: ops.soft_cap(torch.zeros(3), 1.0), "soft_cap: x must be of shape [M, N]"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            call()


def test_opcheck() -> None:
    x = torch.randn(3, 7)
    torch.library.opcheck(torch.ops.pydflash.apply_gate.default, (x, x.clone(), "sigmoid"))
    torch.library.opcheck(torch.ops.pydflash.soft_cap.default, (x, 2.0))
