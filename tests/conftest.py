"""Shared by all tests: the --full option, quiet threads, and the list of backends to run over."""

from __future__ import annotations

import collections
import os
from collections.abc import Iterator

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # spinning OpenMP threads collapse on shared cores
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch
from devices import DEVICES, unusable

from pydflash.ops import backends

try:
    from hypothesis import settings
    from hypothesis.internal.conjecture import providers
except ImportError:
    pass  # where the kernels alone are tested
else:
    # The same cases in every run; --hypothesis-profile=default draws others. Constants of the modules that happen to
    # be loaded differ from worker to worker, so none are drawn.
    settings.register_profile("same", derandomize=True, deadline=None, database=None)
    settings.load_profile("same")
    if hasattr(providers, "_get_local_constants"):
        providers._get_local_constants = lambda: providers._local_constants

backends.require()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="also run the tests marked slow")


def pytest_report_header(config: pytest.Config) -> list[str]:
    missing = [f"{kind}: op tests skipped: {reason}" for kind in DEVICES if (reason := unusable(kind))]
    slow = [] if config.getoption("--full") else ["slow tests left out: run with --full"]
    return [*missing, *slow]


@pytest.hookimpl(tryfirst=True)  # before -m looks at the marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """A test of `grid(step)` keeps every step-th of its cases on each device; the others count as slow."""
    seen: collections.Counter[tuple[str, object]] = collections.Counter()
    for item in items:
        if grid := item.get_closest_marker("grid"):
            name = item.nodeid.partition("[")[0], item.callspec.params.get("device")  # type: ignore[attr-defined]
            if seen[name] % grid.args[0]:
                item.add_marker("slow")
            seen[name] += 1
    if not config.getoption("--full"):
        slow = [item for item in items if "slow" in item.keywords]
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if "slow" not in item.keywords]


@pytest.fixture(params=[kind for kind in DEVICES if kind == "cpu" or not unusable(kind)])
def device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """Each device whose native backend is usable; the header says why one is not. SYCL kernels run on the CPU."""
    if reason := unusable(request.param):
        pytest.skip(f"{request.param}: {reason}")
    if request.param != "sycl":
        yield torch.device(request.param)
        return
    with backends.running("sycl"):
        yield torch.device("cpu")
