"""What goes into the caches, and what a round leaves behind; all of it in place."""

from __future__ import annotations

from torch import Tensor

from . import reference
from .native import capsule, int32, module_for, rows
from .registry import register


@register(
    "cache_append(Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor k_block, Tensor v_block, Tensor index,"
    " Tensor lengths) -> ()",
    fake=lambda *_: None,
    reference=reference.cache_append,
)
def cache_append(
    k_cache: Tensor, v_cache: Tensor, k_block: Tensor, v_block: Tensor, index: Tensor, lengths: Tensor
) -> None:
    """Append block rows, gathered by `index`, to the end of every sequence's cache, all layers in one launch.

    Row `index[b, n]` of the block goes to cache row `(lengths[b] + n) % L`, for the entries of `index[b]` before
    its first -1. `lengths` itself is not changed. Of more than L rows only the last L are written.

    Args:
        k_cache, v_cache: [Ly, B, Hkv, L, D], changed in place.
        k_block, v_block: [Ly, B, Hkv, S, D].
        index: [B, N] block rows in 0..S-1, padded with -1.
        lengths: [B].

    Raises: ValueError on shapes, dtypes or devices that do not fit.
    """
    module, stream, device = module_for("cache_append", k_cache, v_cache, k_block, v_block, index, lengths)
    index, lengths = int32(index, "cache_append: index"), int32(lengths, "cache_append: lengths")
    k_block, v_block = rows(k_block), rows(v_block)
    capsules = [capsule(x) for x in (k_cache, v_cache, k_block, v_block, index, lengths)]
    module.cache_append(*capsules, stream, device)


@register(
    "context_append(Tensor kv, Tensor? k_weights, float eps, Tensor cos, Tensor sin, Tensor(a!) k_cache,"
    " Tensor(b!) v_cache, Tensor lengths, Tensor counts, int rotary_dim, bool interleaved=False,"
    " float weight_offset=0.0, bool round_first=True) -> ()",
    fake=lambda *_, **__: None,
    reference=reference.context_append,
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
    module, stream, device = module_for("context_append", kv, k_weights, cos, sin, k_cache, v_cache, lengths, counts)
    module.context_append(
        capsule(rows(kv)),
        capsule(k_weights),
        eps,
        *[capsule(t) for t in (cos, sin, k_cache, v_cache, lengths, counts)],
        rotary_dim,
        interleaved,
        weight_offset,
        round_first,
        stream,
        device,
    )


@register(
    "round_commit(Tensor tokens, Tensor index, Tensor num_accepted, Tensor bonus, Tensor active, Tensor? features,"
    " Tensor(a!)? features_out, Tensor(b!) anchors, Tensor(c!) lengths, Tensor(d!) starts, Tensor(e!) counts,"
    " Tensor(f!) record) -> ()",
    fake=lambda *_: None,
    reference=reference.round_commit,
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
    arguments = (tokens, index, num_accepted, bonus, active, features, features_out)
    state = (anchors, lengths, starts, counts, record)
    module, stream, device = module_for("round_commit", *arguments, *state)
    module.round_commit(*[capsule(t) for t in (*arguments, *state)], stream, device)
