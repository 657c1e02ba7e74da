"""The fused ops: steps of a decoder and of a round that plain torch would take in several launches each.

Their definitions are the functions of the same names in `pydflash.ops.reference`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from . import _native_fused as native
from . import run

SKINNY_ROWS = 16  # at most, of skinny_linear
HALF = (torch.bfloat16, torch.float16)
_SMALL, _BALANCED = 8 << 20, 0.9  # bytes, and the share of a GPU's time that must be work


def _run(impl: Callable[..., Any], op: Callable[..., Any], *arguments: Any) -> Any:
    return run(impl, op, *arguments) if native.compiled(arguments[0]) else op(*arguments)


def add_rms_norm(
    x: Tensor,
    delta: Tensor | None,
    weight: Tensor,
    eps: float,
    weight_offset: float = 0.0,
    round_first: bool = True,
) -> tuple[Tensor, Tensor]:
    """RMSNorm of x + delta, and that sum.

    Args:
        x, delta: [M, H], delta None for a norm alone.
        weight: [H].
        weight_offset: Added to the weight, 1 for families that store it around zero.
        round_first: Whether the normalised value is rounded to the dtype before it meets the weight.

    Returns: (out [M, H], sum [M, H], x itself where delta is None).

    Raises: ValueError on shapes, dtypes or devices that do not fit.
    """
    op = torch.ops.pydflash.add_rms_norm
    out, total = _run(native.add_rms_norm, op, x, delta, weight, eps, weight_offset, round_first)
    return out, x if delta is None else total


def swiglu(x: Tensor) -> Tensor:
    """silu of the first half of each row times its second half, each factor rounded before it is used.

    Args:
        x: [M, 2 N].

    Returns: [M, N].

    Raises: ValueError on shapes, dtypes or devices that do not fit.
    """
    return _run(native.swiglu, torch.ops.pydflash.swiglu, x)


def skinny_linear(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None] | None = None,
    gated: bool = False,
) -> Tensor:
    """Few rows through up to three linear layers that read the same input, at the speed of the weights' bytes.

    A row's result does not depend on the other rows, nor on how many there are, to the last bit.

    Args:
        x: [M, K], M at most 16, K a multiple of 8; bfloat16 or float16.
        weights: 1 to 3 of [N_i, K], contiguous.
        biases: One [N_i] or None each.
        gated: With two weights of one size: silu(first) * second, each factor rounded before it is used.

    Returns: [M, sum of N_i], or [M, N_0] where gated. Sums in float32, rounded once.

    Raises: ValueError on shapes, dtypes or devices that do not fit; GPUs need compute capability 9.0.
    """
    biases = [None] * len(weights) if biases is None else list(biases)
    arguments = (x, list(weights), biases, gated)
    op = torch.ops.pydflash.skinny_linear
    return op(*arguments) if x.device.type == "cpu" else run(native.skinny_linear, op, *arguments)


def packed_linear(
    x: Tensor, weight: Tensor, scales: Tensor | None, bias: Tensor | None, out_features: int, format: str
) -> Tensor:
    """A linear layer on a CPU, at the speed of its weight's bytes; `pydflash.decoder.formats` makes the weight.

    A row's result does not depend on the other rows, nor on how many there are, to the last bit.

    Args:
        x: [M, K], M at most 65535; of the format's dtype, or with int8 float32, bfloat16 or float16.
        weight: [panels, steps, 2, 16, 16, inputs]: panels of 32 outputs, steps of 16 words of 4 bytes, in halves of 16
            outputs; 1, 2 or 4 inputs in a word of float32, bfloat16 or int8. Zero beyond N and K.
        scales: [N] float32 with int8: then each row of x is rounded to 8 bits by its largest magnitude, and the
            products of whole numbers are exact. Else None.
        bias: [N] or None.
        out_features: N.
        format: "float32", "bfloat16" or "int8"; see `pydflash.decoder.formats`.

    Returns: [M, N]. Sums in float32, rounded once.

    Raises: ValueError on shapes, dtypes or devices that do not fit.
    """
    op = torch.ops.pydflash.packed_linear
    return _run(native.packed_linear, op, x, weight, scales, bias, out_features, format)


def takes_skinny(x: Tensor, weights: Sequence[Tensor]) -> bool:
    """Whether `skinny_linear` takes x [M, K] and these weights, and faster than one product of them all."""
    rows, width = x.shape
    if not x.is_cuda or x.dtype not in HALF or not 0 < rows <= SKINNY_ROWS or width % 8 or x.stride(0) % 8:
        return False
    aligned = all(tensor.data_ptr() % 16 == 0 and tensor.is_contiguous() for tensor in weights)
    return aligned and x.data_ptr() % 16 == 0 and _balanced(tuple(map(len, weights)), width, x.device)


@cache
def _balanced(out_features: tuple[int, ...], in_features: int, device: torch.device) -> bool:
    """Small weights always are: there the number of launches decides."""
    balance = native.skinny_linear_balance(out_features, in_features, device)
    return balance > 0 and (2 * sum(out_features) * in_features < _SMALL or balance >= _BALANCED)


def head_norm_rope(
    qkv: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    lengths: Tensor,
    depths: Tensor,
    k_block: Tensor,
    v_block: Tensor,
    num_heads: int,
    rotary_dim: int,
    interleaved: bool = False,
    weight_offset: float = 0.0,
    round_first: bool = True,
) -> Tensor:
    """Split a projection into heads, normalise q and k per head, rotate them; k and v go to the block's buffers.

    Args:
        qkv: [B, S, (Hq + 2 Hkv) D].
        q_weight, k_weight: [D] of the norm per head, or None for none.
        cos, sin: [positions, rotary_dim / 2] float32; slot i takes row `lengths[b] + depths[i]`.
        lengths: [B] int32. depths: [B or 1, S] int32.
        k_block, v_block: [B, Hkv, S, D], written.
        rotary_dim: Channels that are rotated, the first ones: pairs (i, i + rotary_dim / 2), or (2i, 2i + 1) where
            `interleaved`.
        weight_offset, round_first: As in `add_rms_norm`.

    Returns: q [B, Hq, S, D].

    Raises: ValueError on shapes, dtypes or devices that do not fit.
    """
    return _run(
        native.head_norm_rope,
        torch.ops.pydflash.head_norm_rope,
        qkv,
        q_weight,
        k_weight,
        eps,
        cos,
        sin,
        lengths,
        depths,
        k_block,
        v_block,
        num_heads,
        rotary_dim,
        interleaved,
        weight_offset,
        round_first,
    )


def context_append(
    kv: Tensor,
    k_weights: Tensor | None,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    lengths: Tensor,
    counts: Tensor,
    rotary_dim: int,
    interleaved: bool = False,
    weight_offset: float = 0.0,
    round_first: bool = True,
) -> None:
    """Keys and values of context rows, all layers at once: norm, rotation, and into the cache.

    Args:
        kv: [B, C, layers * 2 * Hkv * D], of every layer its keys, then its values.
        k_weights: [layers, D], or None.
        cos, sin: [positions, rotary_dim / 2] float32.
        k_cache, v_cache: [layers, B, Hkv, L, D], changed in place; position s lies in row s % L.
        lengths: [B] int32, the position of row 0; not changed. counts: [B] int32, valid rows.
        rotary_dim, interleaved, weight_offset, round_first: As in `head_norm_rope`.

    Raises: ValueError on shapes, dtypes or devices that do not fit.
    """
    _run(
        native.context_append,
        torch.ops.pydflash.context_append,
        kv,
        k_weights,
        eps,
        cos,
        sin,
        k_cache,
        v_cache,
        lengths,
        counts,
        rotary_dim,
        interleaved,
        weight_offset,
        round_first,
    )


def round_commit(
    tokens: Tensor,
    index: Tensor,
    num_accepted: Tensor,
    bonus: Tensor,
    active: Tensor,
    features: Tensor | None,
    features_out: Tensor | None,
    anchors: Tensor,
    lengths: Tensor,
    starts: Tensor,
    counts: Tensor,
    record: Tensor,
) -> None:
    """What follows `reject_sample` in a round, in place. Rows that are not active record nothing and stay.

    Args:
        tokens: [B, S] the verified block. index, num_accepted, bonus: From `reject_sample`.
        active: [B] int32, 0 or 1.
        features: [B, S, F] of the block or None; the accepted slots' rows go to features_out [B, S, F] in order.
        anchors: [B] int64, becomes the bonus. lengths, starts: [B] int32, grow by num_accepted + 1.
        counts: [B] int32, becomes num_accepted + 1, or 0 where not active.
        record: [B, S + 1] int64, becomes the new tokens, filled up with -1, and in the last column their number.

    Raises: ValueError on shapes, dtypes or devices that do not fit.
    """
    state = (anchors, lengths, starts, counts, record)
    op = torch.ops.pydflash.round_commit
    _run(native.round_commit, op, tokens, index, num_accepted, bonus, active, features, features_out, *state)
