"""Acceptance of a drafter on given texts of the target, without running the loop.

Where the text does not depend on the drafter (greedy, or the rule without q), its rounds follow from the text: propose
at every position in one forward, then walk from anchor to anchor. This is exact, and takes seconds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..drafter.module import Drafter
from ..target.generic import Target
from .features import FeatureSource, pad_records
from .objective import Batch, block_hidden


@torch.no_grad()
def replay(
    drafter: Drafter,
    target: Target,
    texts: Sequence[tuple[Tensor, int]],
    *,
    selector: bool = True,
    texts_at_once: int = 4,
    anchors_at_once: int = 256,
) -> list[list[int]]:
    """Accepted drafts of every round that the loop would make over each text (ids [n], prompt_length).

    The first token after the prompt belongs to the prefill, as in the loop; what the end of the text cuts counts
    nowhere. `selector=False` takes the best token of every slot instead of the path. `texts_at_once` and
    `anchors_at_once` (of each text) bound the memory.
    """
    source = FeatureSource(target)
    out = []
    for first in range(0, len(texts), texts_at_once):
        part = texts[first : first + texts_at_once]
        batch = source.batch(range(len(part)), pad_records(part, multiple=1))
        counts = [max(len(ids) - 1 - prompt_length, 0) for ids, prompt_length in part]
        columns = torch.arange(max(counts))
        starts = torch.tensor([prompt_length for _, prompt_length in part])[:, None]
        anchors = torch.where(columns < torch.tensor(counts)[:, None], starts + columns, -1).to(batch.ids.device)
        kept = [
            _matches(drafter, target, batch, piece, selector)
            for piece in anchors.split(anchors_at_once, 1)
            if len(columns)
        ]
        matches = torch.cat(kept, 1).tolist() if kept else [[] for _ in part]
        out += [_walk(row[:count]) for row, count in zip(matches, counts, strict=True)]
    return out


def _walk(matches: Sequence[int]) -> list[int]:
    """The rounds over a text in which the anchor at place i has `matches[i]` confirmed drafts."""
    accepted: list[int] = []
    at = 0
    while at < len(matches):
        accepted.append(min(matches[at], len(matches) - at - 1))
        at += accepted[-1] + 1
    return accepted


def _matches(drafter: Drafter, target: Target, batch: Batch, anchors: Tensor, selector: bool) -> Tensor:
    """How many drafts after each of `anchors` [B, A] the text confirms: [B, A]."""
    size = drafter.config.block_size
    hidden = block_hidden(drafter, target.embed_weight, batch, anchors, "dense")[:, :, 1:].flatten(0, 1)
    part = drafter.candidate_selector if selector else None
    at = anchors.clamp_min(0)
    tokens, *_ = drafter.ops.path_select(
        drafter.logits(hidden, target.head),
        None if part is None else part.hidden_projection(hidden),
        None if part is None else part.predecessor_codebook,
        None if part is None else part.successor_codebook,
        batch.ids.gather(1, at).flatten(),
        None,
        0,
        at.flatten(),
        drafter.config.num_candidates,
        drafter.config.draft_vocab_size,
    )
    if drafter.d2t is not None:
        tokens = tokens + drafter.d2t[tokens]
    padded = torch.nn.functional.pad(batch.ids, (0, size), value=-1)
    after = (at[..., None] + torch.arange(1, size, device=at.device)).flatten(1)
    text = padded.gather(1, after).view(*at.shape, size - 1)
    return (tokens.view_as(text) == text).long().cumprod(-1).sum(-1)


@torch.no_grad()
def sampled_rounds(
    drafter: Drafter,
    target: Target,
    texts: Sequence[tuple[Tensor, int]],
    temperature: float = 1.0,
    draft_temperature: float | None = None,
    *,
    texts_at_once: int = 4,
) -> list[float]:
    """Expected rounds of the loop over each text (ids [n], prompt_length) where drafts are sampled, by the rule with q.

    Given the text, a draft is kept with probability min(1, q / p) of the text's token, each after the text's own
    predecessor: drafting and keeping a token has probability min(p, q), and the text says it with probability p. So
    this is exact in law for texts that the target sampled at `temperature` without filters.

    Args:
        draft_temperature: Of the drafter's walk; None takes `temperature`.
    """
    if temperature <= 0:
        raise ValueError(f"sampled_rounds: temperature must be above 0, got {temperature}")
    source, size = FeatureSource(target, distil=True), drafter.config.block_size
    out = []
    for first in range(0, len(texts), texts_at_once):
        part = texts[first : first + texts_at_once]
        batch = source.batch(range(len(part)), pad_records(part, multiple=1))
        counts = [max(len(ids) - 1 - prompt_length, 0) for ids, prompt_length in part]
        if not max(counts):
            out += [0.0] * len(part)
            continue
        columns = torch.arange(max(counts))
        starts = torch.tensor([prompt_length for _, prompt_length in part])[:, None]
        anchors = torch.where(columns < torch.tensor(counts)[:, None], starts + columns, -1).to(batch.ids.device)
        at = (anchors.clamp_min(0)[..., None] + torch.arange(size, device=anchors.device)).clamp_max(
            batch.ids.shape[1] - 1
        )
        tokens = batch.ids.gather(1, at.flatten(1)).view_as(at)
        assert batch.logits is not None
        rows = batch.logits[:, :-1].float() / temperature
        p = rows.gather(-1, batch.ids[:, 1:, None]).squeeze(-1) - rows.logsumexp(-1)
        p = p.gather(1, (at[..., 1:] - 1).flatten(1)).view_as(at[..., 1:]).exp()
        q = _draft_probs(drafter, target, batch, anchors, tokens, draft_temperature or temperature)
        kept = (q / p).clamp_max(1).cumprod(-1).tolist()
        out += [_expected(row[:count]) for row, count in zip(kept, counts, strict=True)]
    return out


def _draft_probs(
    drafter: Drafter, target: Target, batch: Batch, anchors: Tensor, tokens: Tensor, temperature: float
) -> Tensor:
    """The walk's probability of each of `tokens` [B, A, S] after the one before it: [B, A, S - 1]."""
    hidden = block_hidden(drafter, target.embed_weight, batch, anchors, "dense")[:, :, 1:]
    logits = drafter.logits(hidden, target.head).float()
    selector = drafter.candidate_selector
    scores, candidates = logits.topk(drafter.config.num_candidates, -1)
    if selector is not None:
        left = selector.predecessor_codebook[tokens[..., :-1]] * selector.hidden_projection(hidden)
        scores = scores + (selector.successor_codebook[candidates] @ left[..., None]).squeeze(-1).float()
    if drafter.d2t is not None:
        candidates = candidates + drafter.d2t[candidates]
    law = torch.softmax(scores / temperature, -1)
    return (law * (candidates == tokens[..., 1:, None])).sum(-1)


def _expected(kept: Sequence[Sequence[float]]) -> float:
    """Expected rounds from the first anchor on; `kept[i][k]` is the chance that round i keeps more than k drafts."""
    rounds = [0.0] * (len(kept) + 1)
    for i in range(len(kept) - 1, -1, -1):
        room = len(kept) - i - 1
        chances = [1.0, *kept[i][:room], 0.0]
        after = (rounds[min(i + 1 + k, len(kept))] for k in range(len(chances) - 1))
        rounds[i] = 1 + sum((a - b) * r for a, b, r in zip(chances, chances[1:], after, strict=False))
    return rounds[0]


def acceptance_length(accepted: Sequence[int]) -> float:
    """Tokens per round of one text; nan without a round."""
    return sum(accepted) / len(accepted) + 1 if accepted else float("nan")


def bootstrap(values: Sequence[float], resamples: int = 2000, level: float = 0.95) -> tuple[float, float]:
    """Percentile interval of the mean over prompts; a fixed seed. For a paired comparison pass differences."""
    x = torch.tensor(list(values), dtype=torch.float64)
    if len(x) == 0:
        return float("nan"), float("nan")
    generator = torch.Generator().manual_seed(0)
    means = x[torch.randint(0, len(x), (resamples, len(x)), generator=generator)].mean(-1)
    tail = (1 - level) / 2
    low, high = torch.quantile(means, torch.tensor([tail, 1 - tail], dtype=torch.float64)).tolist()
    return low, high


class Paired(NamedTuple):
    """A paired comparison: mean of a - b, its 95 % interval over prompts, and how many prompts had both."""

    difference: float
    interval: tuple[float, float]
    pairs: int


def paired(a: Sequence[float | None], b: Sequence[float | None]) -> Paired:
    """Mean difference a - b of per-request values over the prompts where both have one, with a bootstrap interval.

    Args:
        a, b: One value per prompt, in the same order of prompts; None or nan where a prompt has none (it loops, or
            made no round).

    Returns: difference and interval (percentiles, 95 %, fixed seed) are nan without a pair.

    Raises: ValueError where the two do not cover the same number of prompts.
    """
    if len(a) != len(b):
        raise ValueError(f"paired: a and b must have one value per prompt, got {len(a)} and {len(b)}")
    both = [x - y for x, y in zip(a, b, strict=True) if x is not None and y is not None]
    differences = [x for x in both if not math.isnan(x)]
    mean = sum(differences) / len(differences) if differences else float("nan")
    return Paired(mean, bootstrap(differences), len(differences))
