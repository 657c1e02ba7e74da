"""The slots of a block as a forward sees them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

Table = tuple[Tensor, Tensor]  # cos and sin [positions, rotary_dim / 2] float32


@dataclass(frozen=True, slots=True, eq=False)
class BlockView:
    """Where a block's slots stand behind the committed positions, and which slots each of them sees.

    Attributes:
        visibility: [B or 1, S] int64, bit j of slot i: i sees slot j.
        depths: [B or 1, S] int32, added to the sequence's length.
        causal: The visibility of causal layers, where it is another one.
    """

    visibility: Tensor
    depths: Tensor
    causal: Tensor | None = None


class Forward(NamedTuple):
    """What the records of one forward share. lengths: [B] int32; tables: one or more, a record knows which is its."""

    batch: int
    slots: int
    lengths: Tensor
    view: BlockView
    tables: tuple[Table, ...]


def block_masks(size: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """depths, and the visibility of a bidirectional and of a causal block of `size` slots, [1, size] each."""
    depths = torch.arange(size, dtype=torch.int32, device=device)[None]
    bidirectional = torch.full((1, size), (1 << size) - 1 if size < 64 else -1, device=device)
    return depths, bidirectional, bidirectional if size == 1 else (2 << depths.long()) - 1
