"""Requests one sequence at a time, over any target: the host sees every round before the next begins."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from .. import ops
from ..drafter.module import Proposal
from ..ops import reference
from ..request import Request, Round
from ..target.generic import TargetOutput
from .paths import Block, Paths


@dataclass(slots=True)
class _State:
    """What is cached of a sequence, and what the drafter still has to be told.

    starts: [1] position of the anchor, on the device. features: [1, C, F * H] of tokens that are committed but not yet
    in the drafter's context.
    """

    starts: Tensor
    cache: Any
    context: Any = None
    features: Tensor | None = None


class HostLoop:
    """Propose, verify, accept and commit with a target and anything that has a drafter's three methods."""

    most_rows = 1

    def __init__(
        self,
        target: Any,
        drafter: Any,
        backend: str,
        paths: Paths,
        block_size: int,
        draft_sampling: bool,
    ) -> None:
        self.target, self.drafter, self.backend, self.paths = target, drafter, backend, paths
        self.block_size, self.draft_sampling = block_size, draft_sampling
        if paths.auto and drafter is not None:
            paths.measure(target, self._draft_seconds())

    @property
    def ops(self) -> ModuleType:
        """The module whose functions run: the compiled ops, or their definitions in plain torch."""
        return reference if self.backend == "reference" else ops

    def begin(self, requests: Sequence[Request]) -> list[list[int]]:
        """Run each prompt through the target and take the first token from its last row."""
        return [self._prefill(request) for request in requests]

    def step(self, requests: Sequence[Request]) -> list[Round]:
        """A round of every request that is not finished, and an empty one for the others."""
        done = Round([], None, 0, [])
        return [self._round(request) if request.output.finish_reason is None else done for request in requests]

    def retire(self, requests: Sequence[Request], row: int) -> None:
        """One request of a batch is finished."""
        requests[row].state = None

    def end(self, requests: Sequence[Request]) -> None:
        """A batch is finished or abandoned."""
        for request in requests:
            request.state = None

    def _prefill(self, request: Request) -> list[int]:
        target, length = self.target, len(request.ids)
        begin = time.perf_counter()
        capacity = length + request.output.limit + self.paths.rows
        starts = torch.full((1,), length - 1, dtype=torch.int32, device=target.device)
        request.state = state = _State(starts, target.new_cache(1, capacity))
        prompt = torch.tensor([request.ids], device=target.device)
        out = target.prefill(prompt, state.cache)
        _, _, bonus = self._accept(request, out, Block(prompt[:, -1:], None))
        state.starts += 1
        if self.block_size > 1 and self.drafter is not None:
            state.context = self.drafter.new_cache(1, length + request.output.limit + self.block_size)
            state.features = out.features
        token = int(bonus)
        request.stats.prefill_seconds = time.perf_counter() - begin
        return [token]

    def _round(self, request: Request) -> Round:
        """Propose, verify, accept, commit."""
        target, state = self.target, request.state
        anchors = torch.tensor([request.ids[-1]], device=target.device)
        block = Block(anchors[:, None], None)
        slots = self._useful_slots(request)
        if state.context is not None and slots > 1:
            proposal = self._propose(request, anchors)
            block = self.paths.block(self.ops, anchors, proposal, slots - 1, request.params.temperature or 1.0)
        out = target.verify(block.tokens, state.cache, block.tree)
        index, num_accepted, bonus = self._accept(request, out, block)
        target.commit(state.cache, index, num_accepted)
        kept = index[0, : int(num_accepted) + 1].long()
        if out.features is not None:
            state.features = out.features[:, kept] if block.tree is not None else out.features[:, : len(kept)]
        state.starts += len(kept)
        tokens = [*block.tokens[0, kept[1:]].tolist(), int(bonus)]
        if block.tree is None:
            return Round(block.tokens[0].tolist(), None, block.tokens.shape[1] - 1, tokens)
        deepest = int(block.tree.depths.max())
        return Round(block.tokens[0].tolist(), block.tree.parents[0].tolist(), deepest, tokens)

    def _useful_slots(self, request: Request) -> int:
        """A full block, but no position at or beyond the target's context limit."""
        longest = self.target.max_length
        if longest is None:
            return self.block_size
        return max(1, min(self.block_size, longest - len(request.ids)))

    def _propose(self, request: Request, anchors: Tensor) -> Proposal:
        state = request.state
        if state.features is None:
            raise RuntimeError("Speculator: a round needs the features of the tokens committed before it")
        self.drafter.append_context(state.features, state.context)
        sampled = self.draft_sampling and not request.params.greedy
        return self.drafter.propose(
            anchors,
            state.context,
            embed=self.target.embed_weight,
            head=self.target.head,
            block_size=self.block_size,
            temperature=request.params.temperature if sampled else None,
            seeds=request.seeds,
            **({"normalizers": request.params.temperature or 1.0} if self.paths.path != "walk" else {}),
        )

    def _accept(self, request: Request, out: TargetOutput, block: Block) -> tuple[Tensor, Tensor, Tensor]:
        parents = None if block.tree is None else block.tree.parents
        return request.accept(self.ops, out.logits, block.tokens, parents, block.q, request.state.starts)

    def _draft_seconds(self) -> float:
        """What a proposal takes; the median of three after one to warm up."""
        times = []
        for _ in range(4):
            cache = self.drafter.new_cache(1, 64 + self.block_size)
            config, target = self.drafter.config, self.target
            width = len(config.target_layer_ids) * target.hidden_size
            features = torch.zeros(1, 4, width, dtype=target.dtype, device=target.device)
            begin = time.perf_counter()
            with torch.inference_mode():
                self.drafter.append_context(features, cache)
                anchors = torch.ones(1, dtype=torch.long, device=target.device)
                tables = {"embed": target.embed_weight, "head": target.head}
                int(self.drafter.propose(anchors, cache, **tables, block_size=self.block_size).tokens.sum())
            times.append(time.perf_counter() - begin)
        return statistics.median(times[1:])
