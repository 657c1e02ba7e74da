"""Candidates, lattices, trees and paths, in plain torch."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from .numbers import DRAFT, inverse_cdf, row_of, uniform, weights_of, widened


def _top_k(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest of the last dimension in order, ties in favour of the lower id; NaN counts as -inf."""
    values, ids = (
        widened(logits).nan_to_num(-torch.inf, torch.inf, -torch.inf).sort(dim=-1, descending=True, stable=True)
    )
    return values[..., :k], ids[..., :k]


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
    """Candidates, lattice and walk; see `pydflash.ops.path_select`."""
    batch, slots = logits.shape[:2]
    device, num_candidates = logits.device, top_k
    unary, candidates = _top_k(logits[..., :vocab_size], num_candidates)
    if hidden is None or predecessor is None or successor is None:
        scores = unary
        lattice = unary[:, :, None].expand(-1, -1, num_candidates, -1)
    else:
        before = torch.cat([anchors[:, None, None].expand(batch, 1, num_candidates), candidates[:, :-1]], 1)
        left = widened(predecessor)[before] * widened(hidden)[:, :, None]
        scores = lattice = unary[:, :, None] + left @ widened(successor)[candidates].transpose(-1, -2)

    temperatures = None if temperature is None else row_of(temperature, batch, torch.float32, device)
    seeds, starts = row_of(seeds, batch, torch.int64, device), row_of(starts, batch, torch.int64, device)
    rows = torch.arange(batch, device=device)
    index = torch.zeros(batch, dtype=torch.long, device=device)
    tokens, probs = [], []
    for slot in range(slots):
        row = lattice[rows, slot, index].nan_to_num(-torch.inf, torch.inf, -torch.inf)
        index = row.argmax(-1)
        if temperatures is not None:
            weights = weights_of(row, temperatures.clamp_min(torch.finfo(torch.float32).tiny))
            drawn = inverse_cdf(weights, uniform(seeds, starts, DRAFT, slot + 1))
            index = torch.where(temperatures > 0, drawn, index)
            soft = weights / weights.sum(-1, keepdim=True)
            probs.append(torch.where((temperatures > 0)[:, None], soft, F.one_hot(index, num_candidates).to(soft)))
        tokens.append(candidates[rows, slot, index])
    walked = torch.stack(tokens, 1) if tokens else candidates.new_zeros(batch, 0)
    stacked = None
    if temperatures is not None:
        stacked = torch.stack(probs, 1) if probs else unary.new_zeros(batch, 0, num_candidates)
    return walked, candidates, stacked, scores


def _edges(scores: Tensor, log_normalizers: Tensor | None) -> Tensor:
    """Log-probabilities of a lattice's edges, [B, S-1, K, K], or [B, S-1, 1, K] for independent slots."""
    x = widened(scores).nan_to_num(-torch.inf, torch.inf, -torch.inf)
    x = x if x.dim() == 4 else x[:, :, None]
    shift = x.amax(-1, keepdim=True) if log_normalizers is None else log_normalizers[..., None, None].to(x)
    distance = torch.where(x == shift, 0.0, x - shift)
    if log_normalizers is None:
        total = distance.double().exp().masked_fill(x == -torch.inf, 0).sum(-1, keepdim=True)
        distance = distance - total.log().to(x)
    return distance.masked_fill((x == -torch.inf) | distance.isnan(), -torch.inf)


def path_tree(
    anchors: Tensor,
    candidates: Tensor,
    scores: Tensor,
    num_nodes: int,
    log_normalizers: Tensor | None = None,
    trunk: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The best-first tree of a lattice, beside a trunk if there is one; see `pydflash.ops.path_tree`."""
    slots, num_candidates = candidates.shape[1:]
    limit = min(63, sum(num_candidates**depth for depth in range(1, slots + 1)))
    if not 1 <= num_nodes <= limit:
        raise ValueError(
            f"path_tree: num_nodes must be 1 to {limit} (at most 63, and the nodes of a lattice of {slots} slots"
            f" with {num_candidates} candidates), got {num_nodes}"
        )
    trunk = candidates.new_zeros(len(anchors), 0) if trunk is None else trunk
    if trunk.shape[1] > min(num_nodes, slots):
        raise ValueError(
            f"path_tree: trunk must be of shape [B, W] with W <= min(num_nodes, S-1) = {min(num_nodes, slots)},"
            f" got W = {trunk.shape[1]}"
        )
    edges = _edges(scores, log_normalizers).cpu()
    rows = zip(anchors.tolist(), candidates.tolist(), edges, trunk.tolist(), strict=True)
    grown = [_grow(anchor, ids, edge, num_nodes, path) for anchor, ids, edge, path in rows]
    kinds = (torch.int64, torch.int32, torch.int32, torch.int64, edges.dtype)
    tokens, parents, depths, visibility, log_probs = (
        torch.tensor([tree[i] for tree in grown], dtype=kind, device=scores.device).view(-1, num_nodes + 1)
        for i, kind in enumerate(kinds)
    )
    return tokens, parents, depths, visibility, log_probs


def _grow(
    anchor: int, candidates: list[list[int]], edges: Tensor, num_nodes: int, trunk: list[int]
) -> tuple[Sequence[float], ...]:
    """Tokens, parents, depths, visibility and log-probabilities of one row's tree, as lists."""
    tokens, parents, depths, visibility, log_probs = [anchor], [-1], [0], [1], [0.0]
    frontier: list[tuple[float, int, int, int, int]] = []  # in the order of taking; the last is the candidate's index
    index = 0  # the anchor reads row 0 of the first slot
    for slot in range(num_nodes):
        depth = depths[slot]
        wanted = trunk[slot] if slot < len(trunk) else None
        node = None if wanted is None else (torch.inf, depth + 1, slot, wanted, 0)  # where it is no candidate
        if depth < len(candidates):
            row = edges[depth, index if edges.shape[1] > 1 else 0]
            values = (row + log_probs[slot]).nan_to_num(-torch.inf, torch.inf, -torch.inf).tolist()
            for c, (value, token) in enumerate(zip(values, candidates[depth], strict=True)):
                child = (-value, depth + 1, slot, token, c)
                if token == wanted:
                    node = child
                else:
                    heapq.heappush(frontier, child)
        value, depth, parent, token, index = node or heapq.heappop(frontier)
        tokens.append(token)
        parents.append(parent)
        depths.append(depth)
        bits = visibility[parent] | 1 << slot + 1
        visibility.append(bits - 2**64 if bits >= 2**63 else bits)
        log_probs.append(-value)
    return tokens, parents, depths, visibility, log_probs


def path_viterbi(candidates: Tensor, scores: Tensor, log_normalizers: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The best path through a lattice; see `pydflash.ops.path_viterbi`."""
    edges = _edges(scores, log_normalizers)
    batch, slots, rows, _ = edges.shape
    tail = edges.new_zeros(batch, rows)  # the best log-probability of what follows each candidate
    choices: list[Tensor] = []
    for slot in reversed(range(slots)):
        here = edges[:, slot]
        values = (here + tail[:, None] if scores.dim() == 4 else here).nan_to_num(-torch.inf, torch.inf, -torch.inf)
        order = candidates[:, slot].sort(dim=-1, stable=True).indices
        by_id = order[:, None].expand(-1, rows, -1)  # argmax takes the first of equals
        choice = by_id.gather(-1, values.gather(-1, by_id).argmax(-1, keepdim=True))
        best = values.gather(-1, choice).squeeze(-1)
        tail = best if scores.dim() == 4 else (tail + best).nan_to_num(-torch.inf, torch.inf, -torch.inf)
        choices.insert(0, choice.squeeze(-1))
    every = torch.arange(batch, device=scores.device)
    index = torch.zeros_like(every)
    tokens = candidates.new_zeros(batch, slots, dtype=torch.int64)
    for slot, choice in enumerate(choices):
        index = choice[every, index if rows > 1 else torch.zeros_like(index)]
        tokens[:, slot] = candidates[every, slot, index]
    return tokens, tail[:, 0]
