"""Candidates of a block's slots, the lattice of their scores, and what is verified: a walk, a path, a tree."""

from __future__ import annotations

import torch
from torch import Tensor

from . import reference
from .native import capsule, float32, int32, int64, module_for, per_row, rows, scratch_of
from .registry import register


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
    tokens, candidates, probs, scores = _path_select(
        logits,
        hidden,
        predecessor,
        successor,
        anchors,
        None if temperature is None else per_row(temperature, batch, torch.float32, device),
        per_row(seeds, batch, torch.int64, device),
        per_row(starts, batch, torch.int32, device),
        top_k,
        logits.shape[-1] if vocab_size is None else vocab_size,
    )
    return tokens, candidates, None if temperature is None else probs, scores


def _path_outputs(
    logits: Tensor, hidden: Tensor | None, temperature: Tensor | None, num_candidates: int
) -> list[Tensor]:
    batch, slots = logits.shape[:2]
    square = () if hidden is None else (num_candidates,)
    return [
        logits.new_empty(batch, slots, dtype=torch.int64),
        logits.new_empty(batch, slots, num_candidates, dtype=torch.int64),
        logits.new_empty(batch, slots, 0 if temperature is None else num_candidates, dtype=torch.float32),
        logits.new_empty(batch, slots, *square, num_candidates, dtype=torch.float32),
    ]


@register(
    "path_select(Tensor logits, Tensor? hidden, Tensor? predecessor, Tensor? successor, Tensor anchors,"
    " Tensor? temperature, Tensor seeds, Tensor starts, int num_candidates, int vocab_size)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    fake=lambda logits, hidden, predecessor, successor, anchors, temperature, seeds, starts, num_candidates, _: tuple(
        _path_outputs(logits, hidden, temperature, num_candidates)
    ),
    reference=reference.path_select,
)
def _path_select(
    logits: Tensor,
    hidden: Tensor | None,
    predecessor: Tensor | None,
    successor: Tensor | None,
    anchors: Tensor,
    temperature: Tensor | None,
    seeds: Tensor,
    starts: Tensor,
    num_candidates: int,
    vocab_size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    selector = (hidden, predecessor, successor)
    module, stream, device = module_for("path_select", logits, *selector, anchors, temperature, seeds, starts)
    if logits.dim() != 3:
        raise ValueError(f"path_select: logits must be of shape [B, S-1, V], got {list(logits.shape)}")
    if num_candidates < 1:
        raise ValueError(f"path_select: top_k must be >= 1, got {num_candidates}")
    tokens, candidates, probs, scores = _path_outputs(logits, hidden, temperature, num_candidates)
    logits, anchors, seeds, starts = (
        rows(logits),
        int64(anchors, "path_select: anchors"),
        int64(seeds, "path_select: seeds"),
        int32(starts, "path_select: starts"),
    )
    dense = [None if t is None else t.contiguous() for t in selector]
    temperatures = None if temperature is None else float32(temperature)
    module.path_select(
        capsule(logits),
        *[capsule(t) for t in dense],
        *[capsule(t) for t in (anchors, temperatures, seeds, starts)],
        vocab_size,
        *[capsule(t) for t in (tokens, candidates, None if temperature is None else probs, scores)],
        stream,
        device,
        scratch_of(logits),
    )
    return tokens, candidates, probs, scores


def _lattice(op: str, candidates: Tensor, scores: Tensor, log_normalizers: Tensor | None) -> list[object]:
    """Capsules of a lattice; the kernels read its scores as float32."""
    if scores.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"{op}: scores must be float32, bfloat16 or float16, got {scores.dtype}")
    return [
        capsule(int64(candidates, f"{op}: candidates")),
        capsule(float32(scores)),
        capsule(None if log_normalizers is None else float32(log_normalizers)),
    ]


def _tree_outputs(anchors: Tensor, num_nodes: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    kinds = (torch.int64, torch.int32, torch.int32, torch.int64, torch.float32)
    tokens, parents, depths, visibility, log_probs = (
        anchors.new_empty(anchors.shape[0], num_nodes + 1, dtype=kind) for kind in kinds
    )
    return tokens, parents, depths, visibility, log_probs


@register(
    "path_tree(Tensor anchors, Tensor candidates, Tensor scores, int num_nodes, Tensor? log_normalizers=None,"
    " Tensor? trunk=None) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    fake=lambda anchors, candidates, scores, num_nodes, *_: _tree_outputs(anchors, num_nodes),
    reference=reference.path_tree,
)
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
    module, stream, device = module_for("path_tree", anchors, candidates, scores, log_normalizers, trunk)
    if anchors.dim() != 1:
        raise ValueError(f"path_tree: anchors must be of shape [B], got {list(anchors.shape)}")
    if not 1 <= num_nodes <= 63:
        raise ValueError(f"path_tree: num_nodes must be 1 to 63, got {num_nodes}")
    outputs = _tree_outputs(anchors, num_nodes)
    ids, edges, log_totals = _lattice("path_tree", candidates, scores, log_normalizers)
    module.path_tree(
        capsule(int64(anchors, "path_tree: anchors")),
        ids,
        edges,
        num_nodes,
        log_totals,
        capsule(None if trunk is None else int64(trunk, "path_tree: trunk")),
        *[capsule(t) for t in outputs],
        stream,
        device,
        scratch_of(candidates),
    )
    return outputs


def _viterbi_outputs(candidates: Tensor) -> tuple[Tensor, Tensor]:
    batch, slots = candidates.shape[:2]
    return (
        candidates.new_empty(batch, slots, dtype=torch.int64),
        candidates.new_empty(batch, dtype=torch.float32),
    )


@register(
    "path_viterbi(Tensor candidates, Tensor scores, Tensor? log_normalizers=None) -> (Tensor, Tensor)",
    fake=lambda candidates, *_: _viterbi_outputs(candidates),
    reference=reference.path_viterbi,
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
    module, stream, device = module_for("path_viterbi", candidates, scores, log_normalizers)
    if candidates.dim() != 3:
        raise ValueError(f"path_viterbi: candidates must be of shape [B, S-1, K], got {list(candidates.shape)}")
    outputs = _viterbi_outputs(candidates)
    lattice = _lattice("path_viterbi", candidates, scores, log_normalizers)
    module.path_viterbi(*lattice, *[capsule(t) for t in outputs], stream, device, scratch_of(candidates))
    return outputs
