"""One draft of a tiny drafter after a random context, and the comparison of two proposals."""

from __future__ import annotations

from typing import Any

import torch
from pairs import HIDDEN, VOCAB
from torch import Tensor, nn

from pydflash import Drafter
from pydflash.protocols import Proposal


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


TABLE = randn(VOCAB, HIDDEN, seed=1) * 0.4
HEAD = nn.Linear(HIDDEN, VOCAB, bias=False)
with torch.no_grad():
    HEAD.weight.copy_(randn(VOCAB, HIDDEN, seed=2))


def with_context(drafter: Drafter, length: int = 12, batch: int = 1, seed: int = 3) -> Any:
    cache = drafter.new_cache(batch, length + 20)
    features = randn(batch, length, drafter.fc.in_features, seed=seed).to(drafter.dtype)
    drafter.append_context(features, cache)
    return cache


def draft(drafter: Drafter, anchor: int = 5, cache: Any = None, **options: Any) -> Proposal:
    cache = with_context(drafter) if cache is None else cache
    return drafter.propose(torch.tensor([anchor]), cache, **({"embed": TABLE, "head": HEAD} | options))


def same(one: Proposal, two: Proposal) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, two, strict=True) if a is not None)
