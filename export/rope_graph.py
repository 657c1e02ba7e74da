"""cos and sin of the positions in a graph, from two short tables instead of one row for each position."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from .metadata import POSITIONS
from .opset import Array, GraphBuilder

STEP = 1 << 10


def rotary_rows(g: GraphBuilder, positions: Any, frequencies: Array, factor: float, dtype: Any) -> tuple[Any, Any]:
    """cos and sin [B, N, head_dim / 2] of `positions` [B, N] below 2 ** 20, times `factor`.

    A position is a multiple of 1024 and a rest; the angles of both add up.
    """
    high, low = g.Div(positions, [STEP]), g.Mod(positions, [STEP])
    (cos_high, sin_high), (cos_low, sin_low) = (
        [g.Gather(_table(g, name, steps, count, frequencies, scale), row) for name in ("cos", "sin")]
        for row, steps, count, scale in ((high, STEP, POSITIONS // STEP, factor), (low, 1, STEP, 1.0))
    )
    cos = g.Sub(g.Mul(cos_high, cos_low), g.Mul(sin_high, sin_low))
    sin = g.Add(g.Mul(sin_high, cos_low), g.Mul(cos_high, sin_low))
    return (cos, sin) if dtype == np.float32 else (g.cast(cos, dtype), g.cast(sin, dtype))


def _table(g: GraphBuilder, name: str, steps: int, count: int, frequencies: Array, factor: float) -> Any:
    make = partial(_values, name, steps, count, frequencies, factor)
    return g.weight(f"rope.{name}.{steps}", np.float32, (count, len(frequencies)), make)


def _values(name: str, steps: int, count: int, frequencies: Array, factor: float) -> Array:
    angles = np.arange(count)[:, None] * steps * frequencies
    result: Array = getattr(np, name)(angles) * factor
    return result
