"""Acceptance and the next token, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from .numbers import ACCEPT, RESIDUAL, TARGET, inverse_cdf, row_of, uniform, weights_of, widened


def filtered_weights(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """The target's law of each row [B, V], unnormalised, after temperature, top-k, top-p and min-p in this order.

    Exactly k tokens survive top-k and ties go to the lower id. Top-p keeps a token while the mass before it is
    below top_p. Temperatures must be > 0; top_k = 0, top_p = 1 and min_p = 0 switch a filter off.
    """
    weights = weights_of(logits, temperature)
    vocab_size = weights.shape[-1]
    x = widened(logits).nan_to_num(-torch.inf, torch.inf, -torch.inf)
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
    temperatures = row_of(temperature, batch, torch.float32, device)
    kept = row_of(top_k, batch, torch.int64, device)
    nucleus, floor = (row_of(value, batch, torch.float32, device) for value in (top_p, min_p))
    seeds, starts = row_of(seeds, batch, torch.int64, device), row_of(starts, batch, torch.int64, device)
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
            if not bool(temperatures[b] > 0):
                token = int(widened(row).nan_to_num(-torch.inf, torch.inf, -torch.inf).argmax())
                following = _child(tokens[b], links, slot, slot + 1, token)
            else:
                weights = filtered_weights(row, temperatures[one], kept[one], nucleus[one], floor[one])
                if draft_probs is None or slot >= num_drafts or draft < 0:
                    token = int(inverse_cdf(weights, uniform(seeds[one], position, TARGET)))
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
                        token = int(inverse_cdf(residual, uniform(seeds[one], position, RESIDUAL)))
                        following = _child(tokens[b], links, slot, slot + 2, token)  # beside the refused draft
            if following is None:
                break
            slot, count = following, count + 1
            index[b, count] = slot
        accepted[b], bonus[b] = count, token
    return index, accepted, bonus


def apply_penalties(
    logits: Tensor,
    tokens: Tensor,
    visibility: Tensor,
    in_prompt: Tensor,
    counts: Tensor,
    bias: Tensor,
    repetition: Tensor,
    presence: Tensor,
    frequency: Tensor,
) -> Tensor:
    """What each slot's text takes off its logits; see `pydflash.ops.apply_penalties`."""
    slots, x = torch.arange(tokens.shape[1], device=tokens.device), widened(logits)
    real = (tokens >= 0) & (tokens < logits.shape[-1]) & (slots > 0)
    on_path = ((visibility[:, :, None] >> slots) & 1) * real[:, None]  # [B, S, S]
    ids = tokens.clamp(0, logits.shape[-1] - 1)[:, None].expand_as(on_path)
    held = counts[:, None].long().repeat(1, len(slots), 1).scatter_add(2, ids, on_path)
    present = held > 0
    factor = torch.where((in_prompt != 0)[:, None] | present, repetition[:, None, None].to(x), 1.0)
    x = torch.where(x < 0, x * factor, x / factor)
    x = x - presence[:, None, None].to(x) * present - frequency[:, None, None].to(x) * held + bias[:, None].to(x)
    return x.float() if logits.dtype != torch.float64 else x


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
