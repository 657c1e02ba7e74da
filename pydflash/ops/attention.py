"""Attention of a block over a cache and itself."""

from __future__ import annotations

import torch
from torch import Tensor

from . import reference
from .native import capsule, int32, int64, module_for, rows, scratch_of
from .registry import register


def _attention_out(q: Tensor) -> Tensor:
    _, heads, slots, dim = q.shape
    # [B, S, Hq, D] in memory: the output projection reads it as [B, S, Hq * D] without a copy.
    return q.new_empty_strided(q.shape, (slots * heads * dim, dim, heads * dim, 1))


@register(
    "block_attention(Tensor q, Tensor k_cache, Tensor v_cache, Tensor k_block, Tensor v_block, Tensor lengths,"
    " Tensor visibility, Tensor depths, int? window=0, float? scale=None) -> Tensor",
    fake=lambda q, *_: _attention_out(q),
    reference=reference.block_attention,
)
def block_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k_block: Tensor,
    v_block: Tensor,
    lengths: Tensor,
    visibility: Tensor,
    depths: Tensor,
    window: int | None = 0,
    scale: float | None = None,
) -> Tensor:
    """Attention of a block's slots over the cached context and over the block itself.

    Slot i stands at position `lengths[b] + depths[i]`. It sees the context positions below `lengths[b]` and the
    block slots whose bit is set in `visibility[i]`, both only at a distance below `window` (0 = no window). All
    ones is a drafter's bidirectional block, a lower triangle a causal verification, ancestor bits a tree.
    Context position s lives in cache row `s % L`, so the cache of a windowed layer may be a ring.

    Args:
        q: [B, Hq, S, D], S in 1..64, D a multiple of 8 up to 256; float32, bfloat16 or float16.
        k_cache, v_cache: [B, Hkv, L, D], Hkv dividing Hq (grouped-query attention). Any strides but the last.
        k_block, v_block: [B, Hkv, S, D].
        lengths: [B], committed positions.
        visibility: [B or 1, S] int64 bit masks.
        depths: [B or 1, S], position of each slot relative to `lengths`.
        scale: factor on q·k, default D ** -0.5.

    Returns: [B, Hq, S, D], a transposed view of [B, S, Hq, D]. A slot that sees nothing gives zeros. On a CPU a row has
        the same bits whichever of its last keys lie in the block (depths 0 to 63), and whatever the other slots are.

    Raises: ValueError on shapes, dtypes or devices that do not fit.
    """
    window = 0 if window is None else window
    if scale is None:
        scale = max(q.shape[-1], 1) ** -0.5 if q.dim() else 1.0  # kernels refuse the others
    module, stream, device = module_for(
        "block_attention", q, k_cache, v_cache, k_block, v_block, lengths, visibility, depths
    )
    out = _attention_out(q) if q.dim() == 4 else torch.empty_like(q)
    floats = [capsule(rows(x)) for x in (q, k_cache, v_cache, k_block, v_block)]
    ints = (
        capsule(int32(lengths, "block_attention: lengths")),
        capsule(int64(visibility, "block_attention: visibility")),
        capsule(int32(depths, "block_attention: depths")),
    )
    module.block_attention(*floats, *ints, window, scale, capsule(out), stream, device, scratch_of(q))
    return out
