"""Rotary position embedding of the drafter: frequencies of a `rope_parameters` dict, tables, rotation."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor


def frequencies(rope: dict[str, Any], head_dim: int, max_position: int) -> tuple[Tensor, float]:
    """Inverse frequencies [head_dim / 2] in float64 and the factor on cos and sin.

    Args:
        rope: A `rope_parameters` dict: rope_type "default", "linear", "yarn" or "llama3", with its parameters.
        max_position: `max_position_embeddings`, yarn's original length where the dict gives none.

    Raises: ValueError on another rope_type.

    Source: YaRN from Peng et al., "YaRN: efficient context window extension of large language models", 2023.
    """
    kind = rope.get("rope_type", "default")
    theta = float(rope["rope_theta"])
    base = theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float64, device="cpu") / head_dim)
    if kind == "default":
        return base, 1.0
    factor = float(rope.get("factor", 1.0))
    if kind == "linear":
        return base / factor, 1.0
    original = float(rope.get("original_max_position_embeddings") or max_position)
    if kind == "llama3":
        low, high = float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
        turns = original * base / (2 * math.pi)
        smooth = ((turns - low) / (high - low)).clamp(0, 1)
        return base * (smooth + (1 - smooth) / factor), 1.0
    if kind == "yarn":
        return _yarn(rope, base, theta, head_dim, factor, original)
    raise ValueError(f"rope: rope_type must be default, linear, yarn or llama3, got {kind!r}")


def _yarn(
    rope: dict[str, Any], base: Tensor, theta: float, head_dim: int, factor: float, original: float
) -> tuple[Tensor, float]:
    def magnitude(scale: float = 1.0) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    attention = rope.get("attention_factor")
    if attention is None:
        over, under = rope.get("mscale"), rope.get("mscale_all_dim")
        attention = magnitude(float(over)) / magnitude(float(under)) if over and under else magnitude()

    def dimension(turns: float) -> float:
        return head_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = dimension(float(rope.get("beta_fast") or 32))
    high = dimension(float(rope.get("beta_slow") or 1))
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float64, device="cpu") - low) / (high - low)).clamp(0, 1)
    return base * (1 - ramp) + base / factor * ramp, float(attention)


class RotaryTable:
    """cos and sin for positions 0..n-1, computed in float64 and kept in float32, grown by doubling on demand."""

    def __init__(self, rope: dict[str, Any], head_dim: int, max_position: int, *, interleaved: bool) -> None:
        self._frequencies, self._factor = frequencies(rope, head_dim, max_position)
        self.interleaved = interleaved
        self._tables: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def reserve(self, length: int, device: torch.device) -> None:
        """Make the table of `device` cover the positions below `length`."""
        held = self._tables.get(device)
        if held is not None and held[0].shape[0] >= length:
            return
        size = max(256, 1 << (length - 1).bit_length())
        # Built on the CPU: not every device computes in float64.
        angles = torch.arange(size, dtype=torch.float64, device="cpu")[:, None] * self._frequencies
        cos, sin = (angles.cos() * self._factor).float(), (angles.sin() * self._factor).float()
        self._tables[device] = (cos.to(device), sin.to(device))

    def tables(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """cos and sin [positions, D / 2] float32 of the positions reserved so far."""
        return self._tables[device]

    def lookup(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin [..., D / 2] float32 of integer `positions` [...], which must be reserved."""
        cos, sin = self._tables[positions.device]
        return cos[positions], sin[positions]

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate x [..., D] by cos and sin [..., D / 2] (broadcast), in float32, back in x's dtype.

        Channels i and i + D / 2 form a pair; with `interleaved`, channels 2i and 2i + 1 do.
        """
        wide = x if x.dtype == torch.float64 else x.float()
        if self.interleaved:
            a, b = wide[..., 0::2], wide[..., 1::2]
            return torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2).to(x.dtype)
        a, b = wide.chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)
