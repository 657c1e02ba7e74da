"""Attention of a prompt, which is longer than a block: by torch's own operators."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ..ops import HALF


def prompt_attention(query: Tensor, key: Tensor, value: Tensor, scale: float, window: int) -> Tensor:
    """Causal attention of the last positions of one row over all of them: [1, S, heads, dim]."""
    size, end = query.shape[2], key.shape[2]
    windowed = 0 < window < end
    if query.is_cuda and query.dtype in HALF and (windowed or size < end):
        # Torch's attention takes neither a window nor more keys than queries without a mask; the operator below does.
        rows = [x.transpose(1, 2) for x in (query, key, value)]
        left, right = (window - 1, 0) if windowed else (None, None)
        return torch.ops.aten._flash_attention_forward(
            *rows, None, None, size, end, 0.0, True, False, scale=scale, window_size_left=left, window_size_right=right
        )[0]
    grouped = query.shape[1] != key.shape[1]
    mask = None
    if windowed or size < end:
        distance = torch.arange(end - size, end, device=query.device)[:, None] - torch.arange(end, device=query.device)
        mask = (distance >= 0) & (distance < (window or end))
    out = F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=grouped
    )
    return out.transpose(1, 2)
