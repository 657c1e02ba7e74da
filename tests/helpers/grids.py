"""What a default run leaves to `--full`: single values of a parametrisation (the marker `grid` thins whole ones)."""

from __future__ import annotations

from typing import Any

import pytest


def slow(value: Any) -> Any:
    """A value for `parametrize` that runs with `--full` only."""
    return pytest.param(value, marks=pytest.mark.slow)
