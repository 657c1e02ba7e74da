"""A block as a tree of slots: who follows whom, at which depth, and who sees whom."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor


class Tree(NamedTuple):
    """The shape of a block. A parent comes before its children; slot 0 is the anchor.

    Attributes:
        parents: [B, S] int32 slot of the parent, -1 for slot 0.
        depths: [B, S] int32, 0 for the anchor; a slot's position is the anchor's plus its depth.
        visibility: [B, S] int64, bit j of slot i set where i sees j: itself and its ancestors.
    """

    parents: Tensor
    depths: Tensor
    visibility: Tensor


def tree_of(parents: Sequence[int], device: torch.device | str | None = None) -> Tree:
    """The `Tree` [1, S] of a list of parents; its first entry, the anchor's, is not looked at.

    Raises: ValueError for a parent that does not come before its child, or more than 64 slots.
    """
    if len(parents) > 64:
        raise ValueError(f"tree_of: parents must be at most 64 slots, got {len(parents)}")
    depths, visibility = [0], [1]
    for slot, parent in enumerate(parents[1:], 1):
        if not 0 <= parent < slot:
            raise ValueError(f"tree_of: the parent of slot {slot} must be one of the slots before it, got {parent}")
        depths.append(depths[parent] + 1)
        visibility.append(visibility[parent] | 1 << slot)
    signed = [bits - (1 << 64) if bits >> 63 else bits for bits in visibility]
    return Tree(
        torch.tensor([[-1, *parents[1:]]], dtype=torch.int32, device=device),
        torch.tensor([depths], dtype=torch.int32, device=device),
        torch.tensor([signed], dtype=torch.int64, device=device),
    )


def accepted_slots(index: Tensor, num_accepted: Tensor, is_tree: bool) -> list[int]:
    """The accepted slots, anchor first, of `reject_sample`'s index [1, S] and num_accepted [1].

    Raises: ValueError where they are no path from the anchor on, or no chain where the block is one.
    """
    *slots, accepted = torch.cat([index[0], num_accepted]).tolist()
    kept, rest = slots[: accepted + 1], slots[accepted + 1 :]
    rising = kept[:1] == [0] and all(a < b for a, b in pairwise(kept)) and set(rest) <= {-1}
    if not rising or len(kept) != accepted + 1 or not (is_tree or kept[-1] == accepted):
        expected = "a path" if is_tree else "the chain"
        raise ValueError(
            f"commit: index must be {expected} of num_accepted + 1 rising slots from 0 on, padded with -1, "
            f"got {slots} with num_accepted {accepted}"
        )
    return [int(slot) for slot in kept]
