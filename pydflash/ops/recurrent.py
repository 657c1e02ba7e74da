"""Gated DeltaNet layers: the recurrence over a block or a prompt, its convolution and its norm.

With q and k of length 1 per head, q scaled by Dk^-0.5, g = -exp(a_log) * softplus(a + dt_bias) and beta = sigmoid(b),
a slot goes from its parent's state S [Dk, Dv] to its own:

    S = exp(g) S_parent;  u = beta (v - S^T k);  S_slot = S + k u^T;  out = S_slot^T q

Over a block the state stays as it was; the block leaves k, u and g. `delta_commit` keeps those of the accepted slots,
and the next `delta_rule` adds them to the state while it reads it.
Source: Yang et al., "Gated Delta Networks: Improving Mamba2 with Delta Rule", 2024.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from . import reference
from .native import capsule, int32, int64, module_for, rows, scratch_of
from .registry import register

MOST_SLOTS = 64  # of a block


def _out(x: Tensor, state: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:2], state.shape[1], state.shape[3])


@register(
    "delta_rule(Tensor x, Tensor a, Tensor b, Tensor a_log, Tensor dt_bias, Tensor(a!) state, Tensor kept_k,"
    " Tensor kept_u, Tensor kept_g, Tensor kept_count, Tensor visibility, Tensor(b!) block_k, Tensor(c!) block_u,"
    " Tensor(d!) block_g, bool in_order=True) -> Tensor",
    fake=lambda x, a, b, a_log, dt_bias, state, *_, **__: _out(x, state),
    reference=reference.delta_rule,
    backends=("cpu", "sycl"),
)
def delta_rule(
    x: Tensor,
    a: Tensor,
    b: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    kept_k: Tensor,
    kept_u: Tensor,
    kept_g: Tensor,
    kept_count: Tensor,
    visibility: Tensor,
    block_k: Tensor,
    block_u: Tensor,
    block_g: Tensor,
    in_order: bool = True,
) -> Tensor:
    """The recurrence over a block that is a chain or a tree, after the last block's accepted slots went into the state.

    The state is read and written once. A block of no slots only adds what is kept.

    Args:
        x: [B, S, 2 Hk Dk + Hv Dv], the convolution's output: q, k and v of every slot, S at most 64.
        a, b: [B, S, Hv].
        a_log, dt_bias: [Hv] float32.
        state: [B, Hv, Dk, Dv] float32, changed in place; Hv a multiple of Hk, Dk and Dv multiples of 16 up to 256.
        kept_k: [B, N, Hk, Dk] float32. kept_u: [B, N, Hv, Dv] float32. kept_g: [B, N, Hv] float32.
        kept_count: [B] int32, how many of the N entries count; `delta_commit` writes all four.
        visibility: [B or 1, S], bit j of slot i: j is i or an ancestor of it; ancestors come first.
        block_k, block_u, block_g: As the kept ones, of S slots; written.
        in_order: Slot by slot, so that a slot's bits do not depend on where its block began or what else is in it.
            Else all slots at once, by one triangular system, where a backend has that; today's go in order always.

    Returns: [B, S, Hv, Dv].

    Raises: ValueError on shapes, dtypes or devices that do not fit.
    """
    inputs = (x, a, b, a_log, dt_bias, state, kept_k, kept_u, kept_g, kept_count, visibility, block_k, block_u, block_g)
    module, stream, device = module_for("delta_rule", *inputs)
    out = _out(x, state)
    kept_count, visibility = int32(kept_count, "delta_rule: kept_count"), int64(visibility, "delta_rule: visibility")
    x, a, b = rows(x), rows(a), rows(b)
    order = (x, a, b, a_log, dt_bias, state, kept_k, kept_u, kept_g, kept_count, visibility, block_k, block_u, block_g)
    module.delta_rule(*[capsule(t) for t in (*order, out)], in_order, scratch_of(x), stream, device)
    return out


@register(
    "delta_prompt(Tensor x, Tensor a, Tensor b, Tensor a_log, Tensor dt_bias, Tensor(a!) state, int key_heads)"
    " -> Tensor",
    fake=lambda x, a, b, a_log, dt_bias, state, key_heads: _out(x, state),
    reference=reference.delta_prompt,
    backends=("cpu", "sycl"),
)
def delta_prompt(
    x: Tensor, a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor, state: Tensor, key_heads: int
) -> Tensor:
    """The recurrence over a chain of any length, which the state follows in place.

    Args:
        x: [B, P, 2 Hk Dk + Hv Dv]. a, b: [B, P, Hv]. a_log, dt_bias, state: As in `delta_rule`.
        key_heads: Hk.

    Returns: [B, P, Hv, Dv].

    Raises: ValueError on shapes, dtypes or devices that do not fit.
    """
    module, stream, device = module_for("delta_prompt", x, a, b, a_log, dt_bias, state)
    out = _out(x, state)
    order = (rows(x), rows(a), rows(b), a_log, dt_bias, state, out)
    module.delta_prompt(*[capsule(t) for t in order], key_heads, scratch_of(x), stream, device)
    return out


@register(
    "delta_commit(Tensor block_k, Tensor block_u, Tensor block_g, Tensor block_x, Tensor index, Tensor(a!) kept_k,"
    " Tensor(b!) kept_u, Tensor(c!) kept_g, Tensor(d!) kept_count, Tensor(e!) tail) -> ()",
    fake=lambda *_: None,
    reference=reference.delta_commit,
    backends=("cpu", "sycl"),
)
def delta_commit(
    block_k: Tensor,
    block_u: Tensor,
    block_g: Tensor,
    block_x: Tensor,
    index: Tensor,
    kept_k: Tensor,
    kept_u: Tensor,
    kept_g: Tensor,
    kept_count: Tensor,
    tail: Tensor,
) -> None:
    """Keep the accepted slots of a block, all layers in one launch: for the next `delta_rule`, and in the tails.

    Args:
        block_k: [layers, B, S, Hk, Dk] float32, as block_u and block_g from `delta_rule`.
        block_x: [layers, B, S, C], what went into `short_conv`.
        index: [B, N] slots in order, -1 behind the last.
        kept_k, kept_u, kept_g: [layers, B, at least N, ...], kept_count: [B] int32; written.
        tail: [layers, B, T - 1, C], moved on by the accepted slots in place.

    Raises: ValueError on shapes, dtypes or devices that do not fit.
    """
    arguments = (block_k, block_u, block_g, block_x, index, kept_k, kept_u, kept_g, kept_count, tail)
    module, stream, device = module_for("delta_commit", *arguments)
    order: list[Any] = [*arguments]
    order[4] = int32(index, "delta_commit: index")
    module.delta_commit(*[capsule(t) for t in order], stream, device)


@register(
    "short_conv(Tensor x, Tensor weight, Tensor? bias, Tensor tail, Tensor? visibility=None, Tensor(a!)? block_x=None)"
    " -> Tensor",
    fake=lambda x, *_, **__: x.new_empty(x.shape),
    reference=reference.short_conv,
    backends=("cpu", "sycl"),
)
def short_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    tail: Tensor,
    visibility: Tensor | None = None,
    block_x: Tensor | None = None,
) -> Tensor:
    """A causal convolution of each channel along the path of each slot, then SiLU.

    Tap 0 meets the slot itself, tap 1 its parent, and so on; before the first slot of a path stand the committed
    inputs. The sum is rounded before SiLU.

    Args:
        x: [B, S, C]. weight: [T, C], T in 2..8. bias: [C] or None.
        tail: [B, T - 1, C], the last committed inputs, the newest last.
        visibility: [B or 1, S], as in `delta_rule`, S at most 64. None: a chain, of any length.
        block_x: [B, S, C], becomes x, for `delta_commit`.

    Returns: [B, S, C].

    Raises: ValueError on shapes, dtypes or devices that do not fit.
    """
    module, stream, device = module_for("short_conv", x, weight, bias, tail, visibility, block_x)
    out = x.new_empty(x.shape)
    seen = None if visibility is None else int64(visibility, "short_conv: visibility")
    order = (rows(x), weight, bias, rows(tail), seen, block_x, out)
    module.short_conv(*[capsule(t) for t in order], stream, device)
    return out


@register(
    "gated_rms_norm(Tensor x, Tensor gate, Tensor weight, float eps) -> Tensor",
    fake=lambda x, *_: x.new_empty(x.shape),
    reference=reference.gated_rms_norm,
    backends=("cpu", "sycl"),
)
def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last dimension, times silu(gate). The normalised value and its product are each rounded.

    Args:
        x: [M, H, D]. gate: [M, H * D], which may be a view of wider rows. weight: [D].

    Returns: [M, H, D].

    Raises: ValueError on shapes, dtypes or devices that do not fit.
    """
    module, stream, device = module_for("gated_rms_norm", x, gate, weight)
    out = x.new_empty(x.shape)
    module.gated_rms_norm(
        capsule(x.contiguous()), capsule(rows(gate)), capsule(weight), eps, capsule(out), stream, device
    )
    return out
