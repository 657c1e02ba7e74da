"""The host's loop: over any target and drafter, a sequence at a time, and the host sees every round before the next."""

from __future__ import annotations

import time

import torch

from ..progress import LONG_PROMPT, step
from ..request import Request, RoundResult
from ..stats import TokenLogprob
from . import round as steps
from .logprobs import named
from .paths import Block
from .penalties import Penalties
from .processors import process
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

    def open(self, rows: int, positions: int, **_: object) -> HostBatch:
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
        with parts.turns, torch.inference_mode(), step("prompt", len(ids), LONG_PROMPT):
            starts = torch.full((1,), len(ids) - 1, dtype=torch.int32, device=target.device)
            cache = target.new_cache(1, request.positions + parts.paths.rows)
            prompt = torch.tensor([ids], device=target.device)
            output = target.prefill(prompt, cache)
            block = Block(prompt[:, -1:], None)
            state = HostRow(
                target=target,
                anchors=prompt[0, -1:],
                starts=starts + 1,
                cache=cache,
                context=None,
                sampling=request.sampling,
                draws=parts.draft_sampling and not request.params.greedy,
                logprobs=0 if request.logprobs is None else max(1, request.logprobs),
            )
            if request.penalised:
                state.penalties = Penalties(1, output.logits.shape[-1], target.device)
                state.penalties.admit(0, ids, request.params, request.logit_bias)
            logits = process(parts, request, block, steps.penalised(parts, state, block, output.logits), starts)
            accepted = steps.accept(parts, block, logits, request.sampling, starts)
            state.anchors = accepted.bonus
            state.note(parts.ops, output, accepted, accepted.bonus[:, None])
            if parts.block_size > 1 and parts.drafter is not None:
                state.context = parts.drafter.new_cache(1, request.positions + parts.block_size)
                state.features = output.features
            token = int(accepted.bonus)
            if token == 0 and not bool(steps.lawful(logits)[0, -1]):
                raise request.without_law(len(ids))
        request.listed += _listed(request, state, [token]) or []
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
        logits = process(parts, request, block, steps.penalised(parts, state, block, output.logits), state.starts)
        accepted = steps.accept(parts, block, logits, state.sampling, state.starts)
        state.commit(block, output, accepted)
        tokens, slots = block.tokens[0].tolist(), block.tokens.shape[1]
        if state.penalties is not None or state.logprobs:
            new = torch.tensor([state.tokens + [-1] * (slots - len(state.tokens))], device=block.tokens.device)
            state.note(parts.ops, output, accepted, new)
        listed = _listed(request, state, state.tokens)
        followed = accepted.slots[0, : len(state.tokens)]
        without_law = steps.first_without_law(
            state.tokens, lambda: (followed.tolist(), steps.lawful(logits)[0].tolist())
        )
        deepest = len(tokens) - 1 if block.tree is None else int(block.tree.depths.max())
        parents = None if block.tree is None else block.tree.parents[0].tolist()
        return RoundResult(tokens, parents, deepest, state.tokens, listed, without_law)

    def _useful_slots(self, request: Request) -> int:
        """A full block, but no position at or beyond the target's context limit."""
        longest = self.parts.target.max_length
        if longest is None:
            return self.parts.block_size
        return max(1, min(self.parts.block_size, longest - len(request.ids)))


def _listed(request: Request, state: HostRow, tokens: list[int]) -> list[TokenLogprob] | None:
    if request.logprobs is None or state.listed is None:
        return None
    return named(tokens, state.listed[0].tolist(), request.logprobs)
