"""Acceptance of a drafter on given texts of the target, without running the loop.

Where the text does not depend on the drafter (greedy, or the rule without q), its rounds follow from the text: propose
at every position in one forward, then walk from anchor to anchor. This is exact, and takes seconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from ..drafter import DEFAULT_CANDIDATES, Drafter
from ..target import Target
from .features import FeatureSource
from .objective import Batch, block_hidden


@torch.no_grad()
def replay(
    drafter: Drafter,
    target: Target,
    texts: Iterable[tuple[Tensor, int]],
    *,
    selector: bool = True,
    anchors_at_once: int = 256,
) -> list[list[int]]:
    """Accepted drafts of every round that the loop would make over each text (ids [n], prompt_length).

    The first token after the prompt belongs to the prefill, as in the loop; what the end of the text cuts counts
    nowhere. `selector=False` takes the best token of every slot instead of the path.
    """
    source = FeatureSource(target)
    out = []
    for ids, prompt_length in texts:
        batch = source.batch([0], [(ids, prompt_length)], multiple=1)
        accepted: list[int] = []
        positions = torch.arange(prompt_length, len(ids) - 1, device=batch.ids.device)
        kept = [
            _matches(drafter, target, batch, part[None], selector)
            for part in positions.split(anchors_at_once)
            if len(part)
        ]
        matches = torch.cat(kept).tolist() if kept else []
        at = 0
        while at < len(matches):
            accepted.append(min(matches[at], len(matches) - at - 1))
            at += accepted[-1] + 1
        out.append(accepted)
    return out


def _matches(drafter: Drafter, target: Target, batch: Batch, anchors: Tensor, selector: bool) -> Tensor:
    """How many drafts after each of `anchors` [1, A] the text confirms: [A]."""
    size = drafter.config.block_size
    hidden = block_hidden(drafter, target.embed_weight, batch, anchors, "dense")[0, :, 1:]
    part = drafter.candidate_selector if selector else None
    first = batch.ids[0, anchors[0]]
    tokens, *_ = drafter.ops.path_select(
        drafter.logits(hidden, target.head),
        None if part is None else part.hidden_projection(hidden),
        None if part is None else part.predecessor_codebook,
        None if part is None else part.successor_codebook,
        first,
        None,
        0,
        anchors[0],
        drafter.config.selector_top_k if part is not None else min(DEFAULT_CANDIDATES, drafter.config.vocab_size),
        drafter.config.vocab_size,
    )
    padded = torch.nn.functional.pad(batch.ids[0], (0, size), value=-1)
    text = padded[anchors[0][:, None] + torch.arange(1, size, device=anchors.device)]
    return (tokens == text).long().cumprod(-1).sum(-1)


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
