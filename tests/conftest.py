"""Shared by all tests: the --full option, quiet threads, and the list of backends to run over."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # spinning OpenMP threads collapse on shared cores
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch

from pydflash import _backends

_backends.require()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="also run the tests marked slow")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--full"):
        return
    skip = pytest.mark.skip(reason="slow: run with --full")
    for item in items:
        if "slow" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(params=["cpu", "cuda"])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Each device whose native backend is usable; the others skip with the backend's own reason."""
    backend = _backends.load(request.param)
    if not backend.usable:
        pytest.skip(f"{request.param}: {backend.reason}")
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("cuda: torch sees no CUDA device")
    return torch.device(request.param)


TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}


def assert_matches(got: torch.Tensor, want: torch.Tensor, tolerance: float | None = None) -> None:
    """`got` equals the float64 `want` up to rounding of got's dtype, relative to want's norm; NaN never passes."""
    tolerance = TOLERANCES[got.dtype] if tolerance is None else tolerance
    assert got.shape == want.shape, f"shape {tuple(got.shape)}, expected {tuple(want.shape)}"
    difference = (got.double().cpu() - want.double().cpu()).norm()
    assert difference <= tolerance * want.double().norm().cpu() + 1e-30, f"error {difference:.3e}"
