"""Every op in plain torch: the definition, the oracle of the tests, and a backend for any device.

The functions have the names and arguments of `pydflash.ops`. They compute in float32, or in float64 where the
inputs are float64. p is the target's distribution and q the drafter's, everywhere.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

TARGET, ACCEPT, RESIDUAL, DRAFT = range(4)  # what a random number is for; part of its key
_WORD = 0xFFFFFFFF


def uniform(seeds: Tensor, positions: Tensor, purpose: int, slots: Tensor | int = 0) -> Tensor:
    """Uniforms in [0, 1), strictly below 1, from the counter-based Philox4x32-10 generator.

    Args:
        seeds: [...] int64, the key.
        positions: [...] integer, the absolute position the number belongs to.
        purpose: TARGET, ACCEPT, RESIDUAL or DRAFT.
        slots: the block slot of a DRAFT draw, else 0.

    Returns: [...] float32 with 24 random bits.

    Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011.
    """
    words = (seeds.long(), positions.long(), torch.as_tensor(slots, device=seeds.device).long())
    key, position, slot = torch.broadcast_tensors(*words)
    counter = [position & _WORD, torch.zeros_like(key), slot & _WORD, torch.full_like(key, purpose)]
    return (philox([key & _WORD, (key >> 32) & _WORD], counter) >> 8).float() * 2.0**-24


def philox(key: list[Tensor], counter: list[Tensor]) -> Tensor:
    """The first output word of Philox4x32-10; all words are int64 tensors in [0, 2^32)."""
    for _ in range(10):
        # The low 64 bits of the product are right in wrapping int64 arithmetic, the sign bit is masked away.
        product0, product1 = counter[0] * 0xD2511F53, counter[2] * 0xCD9E8D57
        counter = [
            ((product1 >> 32) & _WORD) ^ counter[1] ^ key[0],
            product1 & _WORD,
            ((product0 >> 32) & _WORD) ^ counter[3] ^ key[1],
            product0 & _WORD,
        ]
        key = [(key[0] + 0x9E3779B9) & _WORD, (key[1] + 0xBB67AE85) & _WORD]
    return counter[0]


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def block_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k_block: Tensor,
    v_block: Tensor,
    lengths: Tensor,
    visibility: Tensor,
    depths: Tensor,
    window: int = 0,
    scale: float | None = None,
) -> Tensor:
    """Attention of a block over cached context and itself; see `pydflash.ops.block_attention`."""
    batch, heads, slots, dim = q.shape
    kv_heads, capacity = k_cache.shape[1:3]
    scale = dim**-0.5 if scale is None else scale
    lengths, depths = lengths.long(), depths.long().expand(batch, slots)
    rows = torch.arange(capacity, device=q.device)
    # Row r of a ring holds the newest position below lengths that is r modulo the capacity.
    newest = lengths[:, None] - 1
    held = newest - (newest - rows) % max(capacity, 1)
    query = lengths[:, None] + depths
    seen_context = (held >= 0)[:, None].expand(batch, slots, capacity)
    bits = torch.arange(slots, device=q.device)
    seen_block = ((visibility.expand(batch, slots)[..., None] >> bits) & 1).bool()
    if window > 0:
        seen_context = seen_context & (query[..., None] - held[:, None] < window)
        seen_block = seen_block & ((depths[:, :, None] - depths[:, None]).abs() < window)
    seen = torch.cat([seen_context, seen_block], -1)[:, None, None]

    grouped = _wide(q).view(batch, kv_heads, heads // kv_heads, slots, dim)
    keys = _wide(torch.cat([k_cache, k_block], 2))[:, :, None]
    values = _wide(torch.cat([v_cache, v_block], 2))[:, :, None]
    # Rows nobody may see can hold anything, NaN included: they must not reach the products.
    used = seen.any(-2).unsqueeze(-1)
    keys, values = keys.masked_fill(~used, 0), values.masked_fill(~used, 0)
    scores = (grouped @ keys.transpose(-1, -2) * scale).masked_fill(~seen, -torch.inf)
    weights = torch.softmax(scores, -1).nan_to_num(0.0)
    out = weights @ values
    return out.reshape(batch, heads, slots, dim).to(q.dtype)


def cache_append(
    k_cache: Tensor, v_cache: Tensor, k_block: Tensor, v_block: Tensor, index: Tensor, lengths: Tensor
) -> None:
    """Append gathered block rows to every layer's cache, in place; see `pydflash.ops.cache_append`."""
    capacity = k_cache.shape[3]
    valid = (index >= 0).long().cumprod(-1).bool()
    counts = valid.sum(-1, keepdim=True)
    entry = torch.arange(index.shape[1], device=index.device)
    valid &= entry >= counts - capacity
    batch, entry = valid.nonzero(as_tuple=True)
    source = index[batch, entry].long()
    row = (lengths[batch].long() + entry) % max(capacity, 1)
    for cache, block in ((k_cache, k_block), (v_cache, v_block)):
        cache[:, batch, :, row] = block[:, batch, :, source]


def block_conv(x: Tensor, base: Tensor, delta: Tensor) -> Tensor:
    """Grouped dynamic depthwise causal convolution inside a block; see `pydflash.ops.block_conv`."""
    slots, channels = x.shape[1:]
    taps, groups = delta.shape[2:]
    weights = _wide(base) + _wide(delta).repeat_interleave(channels // groups, -1)
    shifted = [F.pad(_wide(x), (0, 0, t, 0))[:, :slots] for t in range(taps)]
    return (weights * torch.stack(shifted, 2)).sum(2).to(x.dtype)


def _top_k(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest of the last dimension in order, ties in favour of the lower id; NaN counts as -inf."""
    values, ids = _wide(logits).nan_to_num(-torch.inf, torch.inf, -torch.inf).sort(dim=-1, descending=True, stable=True)
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
    device = logits.device
    unary, candidates = _top_k(logits[..., :vocab_size], top_k)
    if hidden is None or predecessor is None or successor is None:
        scores = unary
        lattice = unary[:, :, None].expand(-1, -1, top_k, -1)
    else:
        before = torch.cat([anchors[:, None, None].expand(batch, 1, top_k), candidates[:, :-1]], 1)
        left = _wide(predecessor)[before] * _wide(hidden)[:, :, None]
        scores = lattice = unary[:, :, None] + left @ _wide(successor)[candidates].transpose(-1, -2)

    heat = None if temperature is None else _row(temperature, batch, torch.float32, device)
    seeds, starts = _row(seeds, batch, torch.int64, device), _row(starts, batch, torch.int64, device)
    rows = torch.arange(batch, device=device)
    index = torch.zeros(batch, dtype=torch.long, device=device)
    tokens, probs = [], []
    for slot in range(slots):
        row = lattice[rows, slot, index].nan_to_num(-torch.inf, torch.inf, -torch.inf)
        index = row.argmax(-1)
        if heat is not None:
            weights = _weights(row, heat.clamp_min(torch.finfo(torch.float32).tiny))
            drawn = _inverse_cdf(weights, uniform(seeds, starts, DRAFT, slot + 1))
            index = torch.where(heat > 0, drawn, index)
            soft = weights / weights.sum(-1, keepdim=True)
            probs.append(torch.where((heat > 0)[:, None], soft, F.one_hot(index, top_k).to(soft)))
        tokens.append(candidates[rows, slot, index])
    walked = torch.stack(tokens, 1) if tokens else candidates.new_zeros(batch, 0)
    stacked = None
    if heat is not None:
        stacked = torch.stack(probs, 1) if probs else unary.new_zeros(batch, 0, top_k)
    return walked, candidates, stacked, scores


def _edges(scores: Tensor, log_normalizers: Tensor | None) -> Tensor:
    """Log-probabilities of a lattice's edges, [B, S-1, K, K], or [B, S-1, 1, K] for independent slots."""
    x = _wide(scores).nan_to_num(-torch.inf, torch.inf, -torch.inf)
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
    slots, top_k = candidates.shape[1:]
    limit = min(63, sum(top_k**depth for depth in range(1, slots + 1)))
    if not 1 <= num_nodes <= limit:
        raise ValueError(
            f"path_tree: num_nodes must be 1 to {limit} (at most 63, and the nodes of a lattice of {slots} slots"
            f" with {top_k} candidates), got {num_nodes}"
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


def _row(value: Tensor | float, batch: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.as_tensor(value, device=device).to(dtype).expand(batch)


def _weights(logits: Tensor, temperature: Tensor) -> Tensor:
    """exp((x - max) / T) of each row [B, V], T being [B]; a row that is all NaN or -inf is certain of id 0."""
    x = _wide(logits).nan_to_num(-torch.inf, torch.inf, -torch.inf)
    top = x.amax(-1, keepdim=True)
    weights = torch.where(x == top, 1.0, torch.exp((x - top) / temperature[:, None].to(x)))
    others = torch.arange(x.shape[-1], device=x.device) > 0
    return weights.masked_fill((top == -torch.inf) & others, 0.0)


def _inverse_cdf(weights: Tensor, u: Tensor) -> Tensor:
    """The first id whose cumulative weight exceeds u * total; the last of positive weight at the rounding edge."""
    cumulative = weights.cumsum(-1)
    threshold = u.to(weights) * cumulative[:, -1]
    last = weights.shape[-1] - 1 - (weights > 0).flip(-1).long().argmax(-1)
    return torch.minimum((cumulative <= threshold[:, None]).sum(-1), last)


def filtered_weights(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """The target's law of each row [B, V], unnormalised, after temperature, top-k, top-p and min-p in this order.

    Exactly k tokens survive top-k and ties go to the lower id. Top-p keeps a token while the mass before it is
    below top_p. Temperatures must be > 0; top_k = 0, top_p = 1 and min_p = 0 switch a filter off.
    """
    weights = _weights(logits, temperature)
    vocab_size = weights.shape[-1]
    x = _wide(logits).nan_to_num(-torch.inf, torch.inf, -torch.inf)
    order = x.sort(dim=-1, descending=True, stable=True).indices
    ranked = weights.gather(-1, order)
    rank = torch.arange(vocab_size, device=x.device)
    limit = torch.where(top_k > 0, top_k, vocab_size)[:, None]
    ranked = ranked.masked_fill(rank >= limit, 0)
    before = (ranked.cumsum(-1) - ranked) / ranked.sum(-1, keepdim=True)
    dropped = (before >= top_p[:, None]) & (top_p < 1)[:, None] & (rank > 0)
    ranked = ranked.masked_fill(dropped, 0)
    ranked = ranked.masked_fill(ranked < min_p[:, None].clamp_max(1.0), 0)
    return torch.zeros_like(weights).scatter(-1, order, ranked)


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
    """Acceptance and the next token; see `pydflash.ops.reject_sample`."""
    batch, slots = tokens.shape
    device = target_logits.device
    target_logits = target_logits[..., :vocab_size]
    heat = _row(temperature, batch, torch.float32, device)
    kept = _row(top_k, batch, torch.int64, device)
    nucleus, floor = (_row(value, batch, torch.float32, device) for value in (top_p, min_p))
    seeds, starts = _row(seeds, batch, torch.int64, device), _row(starts, batch, torch.int64, device)
    index = torch.full((batch, slots), -1, dtype=torch.int32, device=device)
    accepted = torch.zeros(batch, dtype=torch.int32, device=device)
    bonus = torch.zeros(batch, dtype=torch.int64, device=device)
    q_rows = draft_probs if draft_probs is None or isinstance(draft_probs, Tensor) else draft_probs[1]
    num_drafts = 0 if q_rows is None else q_rows.shape[1]
    if parents is not None and bool((parents[:, 1 : num_drafts + 1] != torch.arange(num_drafts, device=device)).any()):
        raise ValueError(
            f"reject_sample: parents must be a chain in slots 1 to {num_drafts}, whose q draft_probs holds"
        )
    for b in range(batch):
        one, links = slice(b, b + 1), None if parents is None else parents[b]
        slot, count = 0, 0
        index[b, 0] = 0
        while True:
            row, position = target_logits[one, slot], starts[one] + count + 1
            draft = int(tokens[b, slot + 1]) if slot + 1 < slots else -1
            token, following = -1, None
            if not bool(heat[b] > 0):
                token = int(_wide(row).nan_to_num(-torch.inf, torch.inf, -torch.inf).argmax())
                following = _child(tokens[b], links, slot, slot + 1, token)
            else:
                weights = filtered_weights(row, heat[one], kept[one], nucleus[one], floor[one])
                if draft_probs is None or slot >= num_drafts or draft < 0:
                    token = int(_inverse_cdf(weights, uniform(seeds[one], position, TARGET)))
                    following = _child(tokens[b], links, slot, slot + 1, token)
                else:
                    p = weights / weights.sum()
                    q = _draft_row(draft_probs, b, slot, p).clamp_min(0)
                    u = uniform(seeds[one], position, ACCEPT).to(p)
                    if draft < p.shape[-1] and bool(u * q[0, draft] < p[0, draft]):  # never where q is NaN
                        following = slot + 1
                    else:
                        residual = (p - q.nan_to_num(0.0)).clamp_min(0)
                        residual = residual if bool(residual.sum() > 0) else p
                        token = int(_inverse_cdf(residual, uniform(seeds[one], position, RESIDUAL)))
                        following = _child(tokens[b], links, slot, slot + 2, token)  # beside the refused draft
            if following is None:
                break
            slot, count = following, count + 1
            index[b, count] = slot
        accepted[b], bonus[b] = count, token
    return index, accepted, bonus


def _draft_row(draft_probs: tuple[Tensor, Tensor] | Tensor, b: int, slot: int, like: Tensor) -> Tensor:
    if isinstance(draft_probs, Tensor):
        return draft_probs[b : b + 1, slot, : like.shape[-1]].to(like)
    ids, probs = draft_probs[0][b, slot], draft_probs[1][b, slot].to(like)
    real = (ids >= 0) & (ids < like.shape[-1])
    return torch.zeros_like(like).index_add(1, ids[real], probs[real][None])


def _child(tokens: Tensor, parents: Tensor | None, current: int, first: int, token: int) -> int | None:
    for slot in range(first, len(tokens) if parents is not None else min(current + 2, len(tokens))):
        if int(tokens[slot]) == token and (parents is None or int(parents[slot]) == current):
            return slot
    return None
