"""The native ops: what they compute, with shapes and meanings.

Integer inputs may be int32 or int64. Scalars are accepted where a per-row tensor [B] is meant. The definition of
every op is the function of the same name in `pydflash.ops.reference`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from . import _native


def run(impl: Callable[..., Any], op: Callable[..., Any], *arguments: Any) -> Any:
    """In inference mode calls skip the dispatcher, which takes as long as a small kernel; tracing goes through it."""
    traced = torch.compiler.is_compiling() or torch.jit.is_tracing()
    eager = not traced and torch.is_inference_mode_enabled() and type(arguments[0]) is Tensor
    return impl(*arguments) if eager else op(*arguments)


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
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    window = 0 if window is None else window
    return run(
        _native.block_attention,
        torch.ops.pydflash.block_attention,
        q,
        k_cache,
        v_cache,
        k_block,
        v_block,
        lengths,
        visibility,
        depths,
        window,
        scale,
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
    run(_native.cache_append, torch.ops.pydflash.cache_append, k_cache, v_cache, k_block, v_block, index, lengths)


def block_conv(x: Tensor, base: Tensor, delta: Tensor) -> Tensor:
    """Grouped dynamic depthwise causal convolution inside a block (DFlash 2).

    y[b,i,c] = sum over t of (base[t,c] + delta[b,i,t,c // (C / G)]) * x[b,i-t,c], with x before slot 0 zero:
    nothing crosses the block's start. Sums in float32, rounded once.

    Args:
        x: [B, S, C].
        base: [T, C], T in 1..8.
        delta: [B, S, T, G], G dividing C.

    Returns: [B, S, C].

    Raises: ValueError on shapes, dtypes or devices that do not fit.
    """
    return run(_native.block_conv, torch.ops.pydflash.block_conv, x, base, delta)


def path_select(
    logits: Tensor,
    hidden: Tensor | None,
    predecessor: Tensor | None,
    successor: Tensor | None,
    anchors: Tensor,
    temperature: Tensor | float | None,
    seeds: Tensor | int,
    starts: Tensor,
    top_k: int = 16,
    vocab_size: int | None = None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """Top-k candidates of every slot, the lattice of edge scores, and the walk through it.

    The edge from token a to candidate c of slot j scores `logits[j,c] + sum_r predecessor[a,r] * hidden[j,r] *
    successor[c,r]`. The walk goes from left to right: the best edge, or at temperature > 0 a draw from
    softmax(score / temperature). Without a selector (DFlash 1) an edge scores the candidate's logit alone.

    Args:
        logits: [B, S-1, V], the drafting slots.
        hidden: [B, S-1, r], or None without a selector.
        predecessor, successor: [>= vocab_size, r] codebooks, or None.
        anchors: [B] token ids.
        temperature: [B], a number, or None where every row is greedy. Rows <= 0 are greedy.
        seeds: [B] or a number; the draw of slot j is keyed by (seed, start, j).
        starts: [B] position of the anchor.
        top_k: candidates K per slot, at most 1024 and vocab_size.
        vocab_size: only the first `vocab_size` columns of the logits are real; default V.

    Returns:
        tokens [B, S-1]; candidates [B, S-1, K] sorted by logit, ties by lower id; probs [B, S-1, K] float32, the
        law each token was drawn from (one-hot in greedy rows), or None where `temperature` is None; scores
        [B, S-1, K, K] float32 (previous candidate, candidate), or [B, S-1, K] without a selector.

    Raises: ValueError on shapes, dtypes or devices that do not fit, or anchors outside the codebooks.
    """
    batch, device = logits.shape[0], logits.device
    selector = [t for t in (hidden, predecessor, successor) if t is not None]
    if len(selector) not in (0, 3):
        raise ValueError(f"path_select: hidden, predecessor and successor go together, got {len(selector)} of 3")
    heat = None if temperature is None else _per_row(temperature, batch, torch.float32, device)
    tokens, candidates, probs, scores = run(
        _native.path_select,
        torch.ops.pydflash.path_select,
        logits,
        hidden,
        predecessor,
        successor,
        anchors,
        heat,
        _per_row(seeds, batch, torch.int64, device),
        _per_row(starts, batch, torch.int32, device),
        top_k,
        logits.shape[-1] if vocab_size is None else vocab_size,
    )
    return tokens, candidates, None if heat is None else probs, scores


def _per_row(value: Tensor | Sequence[float] | float, batch: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[B] of a number or of one number a row; numbers are filled in on the device, which a graph can capture."""
    if isinstance(value, Tensor):
        return value.expand(batch) if value.dim() == 0 else value
    values = list(value) if isinstance(value, Sequence) else [value]
    if dtype == torch.int64:  # the upper half of the unsigned numbers, as a seed may be
        values = [v - 2**64 if v >= 2**63 else v for v in values]
    if len(values) == 1:
        return torch.full((batch,), values[0], dtype=dtype, device=device)
    return torch.tensor(values, dtype=dtype, device=device)


def path_tree(
    anchors: Tensor,
    candidates: Tensor,
    scores: Tensor,
    num_nodes: int,
    log_normalizers: Tensor | None = None,
    trunk: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The most likely nodes of the lattice of `path_select`, as a tree to verify in one forward.

    A node is a candidate behind a path of candidates from the anchor. Its log-probability is its parent's plus its
    edge's, in float32. Nodes are taken best first, always the best child of the nodes taken so far; ties go to the
    shallower node, then to the earlier parent slot, then to the lower token id. With scores [B, S-1, K, K] an edge's
    log-probability is the log-softmax over the K candidates behind the same previous candidate. With independent
    slots, [B, S-1, K], it is `score - log_normalizer` of the slot, or the log-softmax over the slot's K candidates.
    Sums of exponentials are taken in float64 and rounded once. NaN scores count as -inf; such nodes come last.

    A `trunk` is a path that the tree holds whatever its probability, such as the walk of `path_select` at T > 0: its
    tokens are slots 1..W in order, and the N - W best other nodes follow, children of trunk nodes among them. A trunk
    token that is no candidate of its slot has log-probability -inf, and so has everything behind it.

    Args:
        anchors: [B] token ids.
        candidates: [B, S-1, K] token ids, distinct within a slot, K in 1..1024.
        scores: [B, S-1, K, K] (previous candidate, candidate), of which the first slot reads previous candidate 0, or
            [B, S-1, K]; float32, bfloat16 or float16.
        num_nodes: N, at most 63 and the number of nodes of the lattice, K + K**2 + ... + K**(S-1).
        log_normalizers: [B, S-1] logsumexp of each slot over the whole vocabulary; only with scores [B, S-1, K].
        trunk: [B, W] token ids, W at most S-1 and N; None or W = 0 for the best-first tree.

    Returns: (all [B, N+1], slot 0 the anchor, then the trunk, then the other nodes in the order of taking)
        tokens int64; parents int32, the slot each continues, -1 for the anchor; depths int32; visibility int64, bit i
        set where slot i is the slot itself or an ancestor; log_probs float32, 0 for the anchor.

    Raises: ValueError on shapes, dtypes or devices that do not fit, a lattice of fewer than N nodes, or a trunk of more
        than S-1 or N tokens.

    Source: DDTree (Ringel and Romano, arXiv 2604.12989) for the tree over independent slots.
    """
    return run(
        _native.path_tree,
        torch.ops.pydflash.path_tree,
        anchors,
        candidates,
        scores,
        num_nodes,
        log_normalizers,
        trunk,
    )


def path_viterbi(candidates: Tensor, scores: Tensor, log_normalizers: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The most likely path through all slots of the lattice of `path_select`.

    Edges have the log-probabilities of `path_tree`; a path's is their sum in float32, from the last slot to the
    first. Ties go to the lower token id, slot by slot from the first. With independent slots it is the best
    candidate of every slot.

    Args:
        candidates, scores, log_normalizers: as in `path_tree`.

    Returns: tokens [B, S-1] int64; log_probs [B] float32.

    Raises: ValueError on shapes, dtypes or devices that do not fit.
    """
    return run(_native.path_viterbi, torch.ops.pydflash.path_viterbi, candidates, scores, log_normalizers)


def reject_sample(
    target_logits: Tensor,
    tokens: Tensor,
    parents: Tensor | None = None,
    draft_probs: tuple[Tensor, Tensor] | Tensor | None = None,
    temperature: Tensor | float = 0.0,
    top_k: Tensor | int = 0,
    top_p: Tensor | float = 1.0,
    min_p: Tensor | float = 0.0,
    seeds: Tensor | int = 0,
    starts: Tensor | int = 0,
    vocab_size: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """How far the target agrees with a block of drafts, and the token that comes after.

    Row i of `target_logits` is the target's law p of the token after slot i, filtered in this order: temperature,
    top-k (exactly k survive ties, lower id first), top-p, min-p. Three rules, chosen by row and by `draft_probs`:

    - temperature <= 0: descend from the anchor while a child carries the row's argmax.
    - with q (`draft_probs`) of the first W drafts, which must be a chain: accept its drafts while u * q < p; at the
      first refusal draw from the residual max(p - q, 0), and descend if another child of the slot carries the token.
      From there on, and after the last draft of the chain, the rule without q goes on.
    - without q: draw from the row of the current slot by inverse CDF, with the uniform that plain decoding uses at
      that position, and descend while a child carries the drawn token. So the text does not depend on the drafts.

    Every emitted token is distributed as p given its prefix, whatever the drafts.

    Args:
        target_logits: [B, S, V] float32, bfloat16 or float16.
        tokens: [B, S]: slot 0 the anchor, then drafts; a negative id means no draft there.
        parents: [B, S] slot each slot continues, an earlier one; None for a chain.
        draft_probs: None; (ids [B, W, K], probs [B, W, K]), q zero elsewhere; or dense [B, W, V]. q of the drafts in
            slots 1..W, W at most S-1; with `parents` those slots' are 0..W-1.
        temperature, top_k, top_p, min_p: [B] or numbers; 0 switches top_k and min_p off, 1 switches top_p off.
        seeds: [B] or a number, the key of every draw.
        starts: [B] position of the anchor.
        vocab_size: only the first `vocab_size` columns are real; default V.

    Returns:
        index [B, S] int32: the accepted slots, the anchor first, padded with -1; num_accepted [B] int32, drafts
        only; bonus [B] int64, the token that follows them.

    Raises: ValueError on shapes, dtypes or devices that do not fit, parents that are not earlier slots, or slots 1..W
        that are not a chain.

    Source: Leviathan et al., "Fast inference from transformers via speculative decoding", 2023, for the rule with q.
    """
    batch, device = target_logits.shape[0], target_logits.device
    ids, probs = draft_probs if isinstance(draft_probs, tuple | list) else (None, draft_probs)
    return run(
        _native.reject_sample,
        torch.ops.pydflash.reject_sample,
        target_logits,
        tokens,
        parents,
        ids,
        probs,
        _per_row(temperature, batch, torch.float32, device),
        _per_row(top_k, batch, torch.int32, device),
        _per_row(top_p, batch, torch.float32, device),
        _per_row(min_p, batch, torch.float32, device),
        _per_row(seeds, batch, torch.int64, device),
        _per_row(starts, batch, torch.int32, device),
        target_logits.shape[-1] if vocab_size is None else vocab_size,
    )


from .fused import (  # noqa: E402, F401
    HALF,
    SKINNY_ROWS,
    add_rms_norm,
    context_append,
    head_norm_rope,
    packed_linear,
    round_commit,
    skinny_linear,
    swiglu,
    takes_skinny,
)
