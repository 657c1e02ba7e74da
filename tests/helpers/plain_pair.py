"""A target and a drafter of a few lines of plain torch, that know nothing of the package but its protocols."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from pydflash.protocols import Proposal, TargetOutput

VOCAB, HIDDEN = 23, 16


class PlainCache:
    """Rows of embeddings [B, capacity + 64, H]; of a row those below its length are committed."""

    def __init__(self, batch: int, capacity: int) -> None:
        self.capacity, self.keys = capacity, torch.zeros(batch, capacity + 64, HIDDEN)
        self.lengths, self.block = torch.zeros(batch, dtype=torch.int32), torch.zeros(0)

    @property
    def length(self) -> int:
        return int(self.lengths[0])

    def advance(self, count: int) -> None:
        self.lengths += count

    def row(self, b: int) -> PlainCache:
        one = PlainCache(1, self.capacity)
        one.keys, one.lengths = self.keys[b : b + 1], self.lengths[b : b + 1]
        return one


class PlainTarget:
    """The next token follows from the last one, the place, and the mean of all before: so every row and slot counts."""

    layer_ids, hidden_size, num_layers, vocab_size, max_length, generation_config = (0,), HIDDEN, 1, VOCAB, None, None
    device, dtype = torch.device("cpu"), torch.float32

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.embed_weight = torch.randn(VOCAB, HIDDEN, generator=generator)
        self.head = nn.Linear(HIDDEN, VOCAB, bias=False)
        self.head.weight.data = torch.randn(VOCAB, HIDDEN, generator=generator)

    def new_cache(self, batch: int, capacity: int) -> PlainCache:
        return PlainCache(batch, capacity)

    def verify(self, tokens: Tensor, cache: PlainCache, tree: Any = None) -> TargetOutput:
        batch, size = tokens.shape
        slots = torch.arange(size)
        visible = (slots <= slots[:, None]).expand(batch, -1, -1)
        if tree is not None:
            visible = (tree.visibility[..., None] >> slots & 1).bool().expand(batch, -1, -1)
        cache.block = x = self.embed_weight[tokens]
        past = (torch.arange(cache.keys.shape[1]) < cache.lengths[:, None]).float()
        count = cache.lengths[:, None, None] + visible.sum(-1, keepdim=True)
        mean = ((past[:, None] @ cache.keys) + visible.float() @ x) / count
        hidden = x + mean + 0.1 * torch.cos(count.float())
        return TargetOutput(self.head(hidden), hidden)

    def append(self, cache: PlainCache, index: Tensor) -> None:
        for b, slots in enumerate(index.tolist()):
            for i, slot in enumerate(s for s in slots if s >= 0):
                cache.keys[b, int(cache.lengths[b]) + i] = cache.block[b, slot]

    def commit(self, cache: PlainCache, index: Tensor, num_accepted: Tensor) -> None:
        self.append(cache, index)
        cache.lengths += num_accepted + 1

    def prefill(self, ids: Tensor, cache: PlainCache) -> TargetOutput:
        out = self.verify(ids, cache)
        self.commit(cache, torch.arange(ids.shape[1])[None], torch.tensor([ids.shape[1] - 1]))
        return TargetOutput(out.logits[:, -1:], out.features)

    def prefill_chunks(self, ids: Tensor, cache: PlainCache, row: int) -> Any:
        yield self.prefill(ids, cache.row(row))

    def tables(self, positions: int) -> None: ...
    def derived(self) -> tuple[object, ...]:
        return ()

    def check_trees(self) -> None: ...
    def close(self) -> None: ...


class PlainDrafter:
    """Goes from token to token by the target's head alone, from the anchor and the mean of the features so far."""

    def __init__(self, block_size: int = 5, candidates: int = 4) -> None:
        self.config = SimpleNamespace(block_size=block_size, target_layer_ids=[0], num_candidates=candidates, version=1)

    def new_cache(self, batch: int, capacity: int) -> PlainCache:
        return PlainCache(batch, capacity)

    def append_context(self, features: Tensor, cache: PlainCache, counts: Tensor | None = None) -> None:
        for b in range(len(features)):
            count = features.shape[1] if counts is None else int(counts[b])
            cache.keys[b, int(cache.lengths[b]) :][:count] = features[b, :count]
        cache.lengths += features.shape[1] if counts is None else counts

    def propose(
        self,
        anchors: Tensor,
        cache: PlainCache,
        *,
        embed: Any = None,
        head: Any = None,
        block_size: int | None = None,
        temperature: Any = None,
        seeds: Any = 0,
        node_temperature: Any = None,
    ) -> Proposal:
        past = (torch.arange(cache.keys.shape[1]) < cache.lengths[:, None]).float()
        mean = ((past[:, None] @ cache.keys) / cache.lengths[:, None, None].clamp(min=1))[:, 0]
        tokens, rows = anchors, []
        for _ in range((block_size or self.config.block_size) - 1):
            rows.append(head(embed[tokens] + mean / 2))
            tokens = rows[-1].argmax(-1)
        logits = torch.stack(rows, 1)
        scores, candidates = logits.topk(self.config.num_candidates)
        norms = None if node_temperature is None else (logits / node_temperature[:, None, None]).logsumexp(-1)
        return Proposal(candidates[..., 0], candidates, None, scores, norms)

    def tables(self) -> None: ...
    def derived(self) -> tuple[object, ...]:
        return ()
