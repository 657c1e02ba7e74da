"""What a drafter's methods may be given."""

from __future__ import annotations

from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

from ..checkpoints.values import MOST
from ..messages import shown

_MOST_TEMPERATURE = 1e30


def check_room(batch: Any, capacity: Any) -> None:
    """Raise ValueError unless these are sizes of a cache."""
    for name, value, least in (("batch", batch, 1), ("capacity", capacity, 1)):
        if not _is_integer(value) or not least <= value <= MOST:
            raise ValueError(f"new_cache: {name} must be an integer of {least} to {MOST}, got {shown(value)}")


def check_features(features: Any, counts: Any, batch: int, width: int) -> None:
    """Raise ValueError unless features are [B, C, width] numbers, and counts None or [B] integers."""
    if not isinstance(features, Tensor) or not features.is_floating_point():
        got = str(features.dtype) if isinstance(features, Tensor) else shown(features)
        raise ValueError(f"append_context: features must be a tensor of floating point, got {got}")
    if features.dim() != 3 or features.shape[0] != batch or features.shape[2] != width:
        raise ValueError(
            f"append_context: features must be [B, C, {width}], B = {batch} as the cache's, got {list(features.shape)}"
        )
    if counts is None:
        return
    if not _are_integers(counts) or counts.shape != (batch,):
        got = f"{list(counts.shape)} {counts.dtype}" if isinstance(counts, Tensor) else shown(counts)
        raise ValueError(f"append_context: counts must be [{batch}] integers, got {got}")


def size_of_block(anchors: Any, block_size: Any, batch: int, most: int) -> int:
    """The size of a block; None is the largest.

    Raises: ValueError unless anchors are [B] integers and block_size is 1 to `most`, or None.
    """
    if not _are_integers(anchors) or anchors.shape != (batch,):
        got = f"{list(anchors.shape)} {anchors.dtype}" if isinstance(anchors, Tensor) else shown(anchors)
        raise ValueError(f"propose: anchors must be [{batch}] integers, B as the cache's, got {got}")
    if block_size is None:
        return most
    if not (_is_integer(block_size) and 1 <= block_size <= most):
        raise ValueError(f"propose: block_size must be 1 to {most} (as trained), got {shown(block_size)}")
    return int(block_size)


def temperature_of(value: Any) -> Tensor | float | None:
    """A temperature as the ops take it.

    Raises: ValueError unless it is None, a tensor, or a number that float32 has.
    """
    if value is None or isinstance(value, Tensor):
        return value
    number: Any = value
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 <= number <= _MOST_TEMPERATURE:
        raise ValueError(f"propose: temperature must be None, [B] or 0 to {_MOST_TEMPERATURE:g}, got {shown(value)}")
    return float(value)


def seeds_of(seeds: Any, device: torch.device) -> Tensor | int:
    """Seeds as the ops take them.

    Raises: ValueError unless they are a tensor, or one or several integers of 64 bits.
    """
    if isinstance(seeds, Tensor):
        return seeds
    several = isinstance(seeds, (list, tuple))
    for seed in seeds if several else [seeds]:
        if not _is_integer(seed) or not -(2**63) <= seed < 2**64:
            raise ValueError(f"propose: seeds must be integers of 64 bits, got {shown(seed)}")
    signed = [int(seed) - (2**64 if seed >= 2**63 else 0) for seed in (seeds if several else [seeds])]
    return torch.tensor(signed, device=device) if several else signed[0]


def _are_integers(value: Any) -> bool:
    """Whether it is a tensor of whole numbers, of 32 bits at least."""
    return isinstance(value, Tensor) and value.dtype in (torch.int32, torch.int64)


def _is_integer(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)
