"""A block's visibility in the form in which transformers' models take it: a 4-D mask per kind of attention layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_KINDS = ("full_attention", "sliding_attention", "chunked_attention")


class TreeMasks:
    """Builds the `attention_mask` of a forward over committed positions and a tree of slots.

    Raises: ValueError with what was found, where a layer's kind of attention is not known.
    """

    def __init__(self, config: Any, dtype: torch.dtype) -> None:
        self._dtype = dtype
        # These count slots of the block where a tree needs positions; a short trial would not see it.
        scaled = getattr(config, "attn_temperature_tuning", False) and not all(getattr(config, "no_rope_layers", [1]))
        for name in ("window_size", "attention_types", "attention_layers"):
            scaled = scaled or getattr(config, name, None) is not None
        if scaled:
            raise ValueError("attention that depends on the place in the block (attn_temperature_tuning or local bias)")
        types = tuple(getattr(config, "layer_types", None) or ())
        window = getattr(config, "sliding_window", None)
        if not types:
            types = ("sliding_attention" if window else "full_attention",)
        if unknown := [kind for kind in types if kind not in _KINDS]:
            raise ValueError(f"layers of {unknown[0]!r}, known are {', '.join(_KINDS)}")
        sizes = {"full_attention": 0, "sliding_attention": window, "chunked_attention": None}
        if "chunked_attention" in types:
            sizes["chunked_attention"] = getattr(config, "attention_chunk_size", None)
        if missing := [kind for kind in types if sizes[kind] is None]:
            raise ValueError(f"{missing[0]} layers of unknown size")
        self._sizes = {kind: int(sizes[kind] or 0) for kind in dict.fromkeys(types)}

    def build(self, lengths: Tensor, depths: Tensor, visibility: Tensor, columns: int) -> Tensor | dict[str, Tensor]:
        """Additive masks [B, 1, S, columns] for a block behind each row's committed positions.

        Position p of a row lies in column p, its block in the S columns from `lengths` [B] int64 on, and nothing that
        counts behind it. depths, visibility: [B or 1, S], as in `Tree`. Windows and chunks count positions, so siblings
        are at the same distance from everything before them. A model whose layers are all alike takes one mask, others
        a dict by kind.
        """
        rows, slots = len(lengths), depths.shape[1]
        places = torch.arange(slots, device=lengths.device)
        at, queries = lengths[:, None] + places, lengths[:, None] + depths
        block = (visibility[:, :, None] >> places & 1).bool().expand(rows, -1, -1)
        order = torch.arange(columns, device=lengths.device).expand(rows, -1)
        seen = (order < lengths[:, None])[:, None].repeat(1, slots, 1)
        seen.scatter_(2, at[:, None].expand(-1, slots, -1), block)
        positions = order.scatter(1, at, queries)[:, None]
        queries = queries[:, :, None]
        masks = {}
        for kind, size in self._sizes.items():
            visible = seen
            if kind == "sliding_attention":
                visible = seen & (queries - positions < size)
            elif kind == "chunked_attention":
                visible = seen & (queries // size == positions // size)
            lowest = torch.finfo(self._dtype).min
            mask = torch.zeros(visible.shape, dtype=self._dtype, device=lengths.device)
            masks[kind] = mask.masked_fill_(~visible, lowest)[:, None]
        return masks if len(masks) > 1 else next(iter(masks.values()))
