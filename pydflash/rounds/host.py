"""The host's loop: over any target and drafter, a sequence at a time, and the host sees every round before the next."""

from __future__ import annotations

import time

import torch

from ..request import Request, RoundResult
from . import round as steps
from .paths import Block
from .round import HostRow, Parts
from .timing import host_seconds


class HostLoop:
    """Opens batches whose rows run one after the other, each in blocks of the size that suits it."""

    most_rows = 1

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        if parts.paths.auto and parts.drafter is not None:
            seconds = host_seconds(parts.target, parts.drafter, parts.paths, parts.block_size)
            parts.paths.settle(seconds, by_round=True)

    def open(self, rows: int, positions: int, *, draws: bool = False, processors: bool = False) -> HostBatch:
        """See `pydflash.request.Loop`. Nothing is allocated before a row is admitted to."""
        return HostBatch(self.parts, rows, positions)


class HostBatch:
    """Rows with a cache each; see `pydflash.request.Batch`."""

    def __init__(self, parts: Parts, rows: int, positions: int) -> None:
        self.parts, self.positions = parts, positions
        self._rows: list[tuple[Request, HostRow] | None] = [None] * rows

    def admit(self, row: int, request: Request) -> list[int]:
        """Run the prompt through the target and take the first token from its last row."""
        if self._rows[row] is not None:
            raise ValueError(f"admit: row must be a free one, got {row}, which holds a request")
        if request.positions > self.positions:
            raise ValueError(f"admit: request must take at most {self.positions} positions, got {request.positions}")
        parts, target, ids = self.parts, self.parts.target, request.ids
        begin = time.perf_counter()
        with parts.turns, torch.inference_mode():
            starts = torch.full((1,), len(ids) - 1, dtype=torch.int32, device=target.device)
            cache = target.new_cache(1, request.positions + parts.paths.rows)
            prompt = torch.tensor([ids], device=target.device)
            output = target.prefill(prompt, cache)
            block = Block(prompt[:, -1:], None)
            logits = request.process(output.logits, block.tokens, None)
            bonus = steps.accept(parts, block, logits, request.sampling, starts).bonus
            state = HostRow(
                target=target,
                anchors=bonus,
                starts=starts + 1,
                cache=cache,
                context=None,
                sampling=request.sampling,
                draws=parts.draft_sampling and not request.params.greedy,
            )
            if parts.block_size > 1 and parts.drafter is not None:
                state.context = parts.drafter.new_cache(1, request.positions + parts.block_size)
                state.features = output.features
            token = int(bonus)
        self._rows[row] = request, state
        request.stats.prefill_seconds = time.perf_counter() - begin
        return [token]

    def step(self) -> dict[int, RoundResult]:
        """A round of each row that holds a request."""
        with self.parts.turns, torch.inference_mode():
            return {row: self._round(*held) for row, held in enumerate(self._rows) if held is not None}

    def retire(self, row: int) -> None:
        """Free a row and its caches."""
        self._rows[row] = None

    def close(self) -> None:
        """Free all rows."""
        self._rows = [None] * len(self._rows)

    def _round(self, request: Request, state: HostRow) -> RoundResult:
        parts = self.parts
        block = steps.draft(parts, state, self._useful_slots(request))
        output = steps.verify(parts, state, block)
        logits = request.process(output.logits, block.tokens, block.parents)
        accepted = steps.accept(parts, block, logits, state.sampling, state.starts)
        state.commit(block, output, accepted)
        tokens = block.tokens[0].tolist()
        if block.tree is None:
            return RoundResult(tokens, None, len(tokens) - 1, state.tokens)
        return RoundResult(tokens, block.tree.parents[0].tolist(), int(block.tree.depths.max()), state.tokens)

    def _useful_slots(self, request: Request) -> int:
        """A full block, but no position at or beyond the target's context limit."""
        longest = self.parts.target.max_length
        if longest is None:
            return self.parts.block_size
        return max(1, min(self.parts.block_size, longest - len(request.ids)))
