"""Who sees whom when many blocks of one sequence are trained in one forward.

Queries are the rows of all blocks, [A * S]; keys are the P context positions followed by the same rows. A block sees
the context before its anchor and itself, nothing of the other blocks: exactly what it sees at inference.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

MaskRule = Callable[[Any, Any, Any, Any], Tensor]


def mask_rule(anchors: Tensor, length: int, block_size: int, window: int, causal: bool) -> MaskRule:
    """The rule `(batch, head, query, key) -> visible`, in the form FlexAttention takes.

    Args:
        anchors: [B, A] position of each block's anchor; -1 marks a block that is not there (it sees only itself).
        length: context positions P.
        window: 0 is none; else only positions at a distance below it are seen, in both directions.
        causal: a slot sees no later slot of its block.
    """

    def rule(batch: Any, head: Any, query: Any, key: Any) -> Tensor:
        block, slot = query // block_size, query % block_size
        anchor = anchors[batch, block]
        other, other_slot = (key - length) // block_size, (key - length) % block_size
        context = (key < length) & (key < anchor)
        own = (key >= length) & (other == block)
        if causal:
            own = own & (other_slot <= slot)
        if window > 0:
            context = context & (anchor + slot - key < window)
            own = own & (slot - other_slot < window) & (other_slot - slot < window)
        return context | own

    return rule


def dense_mask(rule: MaskRule, anchors: Tensor, length: int, block_size: int) -> Tensor:
    """The rule as a boolean mask [B, 1, A * S, P + A * S]."""
    batch, blocks = anchors.shape
    rows = blocks * block_size
    b = torch.arange(batch, device=anchors.device)[:, None, None]
    query = torch.arange(rows, device=anchors.device)[None, :, None]
    key = torch.arange(length + rows, device=anchors.device)[None, None]
    return rule(b, 0, query, key)[:, None]


def flex_mask(rule: MaskRule, anchors: Tensor, length: int, block_size: int) -> Any:
    """The rule as a FlexAttention `BlockMask`, whose empty tiles are never computed."""
    from torch.nn.attention.flex_attention import create_block_mask

    batch, blocks = anchors.shape
    rows = blocks * block_size
    return create_block_mask(rule, batch, None, rows, length + rows, device=str(anchors.device))
