"""Log-probabilities of emitted tokens under the target, and its most probable tokens beside them."""

from __future__ import annotations

from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from ..stats import TokenLogprob


class Listed(NamedTuple):
    """What the target thought at N emitted positions of B sequences.

    Attributes:
        logprobs: [B, N] float32 of the emitted tokens.
        top_ids: [B, N, K] int64, the most probable tokens, ties by lower id.
        top_logprobs: [B, N, K] float32.
    """

    logprobs: Tensor
    top_ids: Tensor
    top_logprobs: Tensor

    def joined(self) -> Tensor:
        """All of it as one [B, N, 1 + 2 K] float32: ids below 2**24 are exact."""
        return torch.cat([self.logprobs[:, :, None], self.top_ids.float(), self.top_logprobs], 2)


def list_logprobs(ops: ModuleType, logits: Tensor, index: Tensor, tokens: Tensor, count: int) -> Listed:
    """Of a verified block, at its accepted slots; entries behind them mean nothing.

    Args:
        logits: [B, S, V] as the model gave them.
        index: [B, S] accepted slots, the anchor first, -1 padded: slot `index[b, n]` is followed by `tokens[b, n]`.
        tokens: [B, S] emitted tokens.
        count: K, at least 1.
    """
    batch = logits.shape[0]
    zeros = torch.zeros(batch, dtype=torch.int64, device=logits.device)
    # The drafter's top-k of every slot is the fastest there is, and its order on ties is ours.
    _, ids, _, scores = ops.path_select(logits, None, None, None, zeros, None, 0, zeros.to(torch.int32), count)
    totals = torch.logsumexp(logits.float(), -1)
    at = index.clamp(min=0).long()
    wide = at[:, :, None].expand(-1, -1, count)
    rows = torch.arange(batch, device=logits.device)[:, None]
    emitted = logits[rows, at, tokens.clamp(min=0)].float()
    total = totals.gather(1, at)
    return Listed(emitted - total, ids.gather(1, wide), scores.gather(1, wide) - total[:, :, None])


def named(tokens: list[int], rows: list[list[float]], count: int) -> list[TokenLogprob]:
    """`Listed.joined` of one sequence, as lists, for its new tokens; `count` of the most probable are kept."""
    found = []
    for token, (logprob, *top) in zip(tokens, rows, strict=False):
        ids, logprobs = top[: len(top) // 2], top[len(top) // 2 :]
        found.append(TokenLogprob(token, logprob, [(int(i), x) for i, x in zip(ids, logprobs, strict=True)][:count]))
    return found
