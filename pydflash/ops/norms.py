"""Steps of a layer that plain torch would take in several launches each: norms, rotations, gates."""

from __future__ import annotations

from torch import Tensor

from . import reference
from .native import capsule, module_for, rows
from .registry import register


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
    out, total = _add_rms_norm(x, delta, weight, eps, weight_offset, round_first)
    return out, x if delta is None else total


def _norm_outputs(x: Tensor, delta: Tensor | None) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape if delta is not None else 0)


@register(
    "add_rms_norm(Tensor x, Tensor? delta, Tensor weight, float eps, float weight_offset, bool round_first)"
    " -> (Tensor, Tensor)",
    fake=lambda x, delta, *_: _norm_outputs(x, delta),
    reference=reference.add_rms_norm,
)
def _add_rms_norm(
    x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, weight_offset: float, round_first: bool
) -> tuple[Tensor, Tensor]:
    module, stream, device = module_for("add_rms_norm", x, delta, weight)
    out, sum_ = _norm_outputs(x, delta)
    module.add_rms_norm(
        capsule(rows(x)),
        None if delta is None else capsule(rows(delta)),
        capsule(weight),
        eps,
        weight_offset,
        round_first,
        capsule(out),
        None if delta is None else capsule(sum_),
        stream,
        device,
    )
    return out, sum_


def _half(x: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:-1], x.shape[-1] // 2)


@register("swiglu(Tensor x) -> Tensor", fake=_half, reference=reference.swiglu)
def swiglu(x: Tensor) -> Tensor:
    """silu of the first half of each row times its second half, each factor rounded before it is used.

    Args:
        x: [M, 2 N].

    Returns: [M, N].

    Raises: ValueError on shapes, dtypes or devices that do not fit.
    """
    module, stream, device = module_for("swiglu", x)
    out = _half(x)
    module.swiglu(capsule(rows(x)), capsule(out), stream, device)
    return out


def _heads_out(qkv: Tensor, k_block: Tensor, num_heads: int) -> Tensor:
    return qkv.new_empty(qkv.shape[0], num_heads, *k_block.shape[2:])


@register(
    "head_norm_rope(Tensor qkv, Tensor? q_weight, Tensor? k_weight, float eps, Tensor cos, Tensor sin,"
    " Tensor lengths, Tensor depths, Tensor(a!) k_block, Tensor(b!) v_block, int num_heads, int rotary_dim,"
    " bool interleaved=False, float weight_offset=0.0, bool round_first=True) -> Tensor",
    fake=lambda qkv, *rest, **_: _heads_out(qkv, rest[7], rest[9]),
    reference=reference.head_norm_rope,
)
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
    inputs = (qkv, q_weight, k_weight, cos, sin, lengths, depths, k_block, v_block)
    module, stream, device = module_for("head_norm_rope", *inputs)
    q = _heads_out(qkv, k_block, num_heads)
    module.head_norm_rope(
        capsule(rows(qkv)),
        capsule(q_weight),
        capsule(k_weight),
        eps,
        *[capsule(t) for t in (cos, sin, lengths, depths, q, k_block, v_block)],
        rotary_dim,
        interleaved,
        weight_offset,
        round_first,
        stream,
        device,
    )
    return q
