"""Comparison with values in float64."""

from __future__ import annotations

import torch

TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}


def assert_matches(got: torch.Tensor, want: torch.Tensor, tolerance: float | None = None) -> None:
    """`got` equals the float64 `want` up to rounding of got's dtype, relative to want's norm; NaN never passes."""
    tolerance = TOLERANCES[got.dtype] if tolerance is None else tolerance
    assert got.shape == want.shape, f"shape {tuple(got.shape)}, expected {tuple(want.shape)}"
    difference = (got.double().cpu() - want.double().cpu()).norm()
    assert difference <= tolerance * want.double().norm().cpu() + 1e-30, f"error {difference:.3e}"
