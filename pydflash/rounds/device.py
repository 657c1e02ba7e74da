"""The device's loop: batches of rows in rounds of fixed shape, and the buffers that batches take turns with."""

from __future__ import annotations

import threading
import time
from typing import Any, cast

import torch
from torch import Tensor

from ..ops import backends
from ..progress import LONG_PROMPT, step
from ..protocols import RowDrafter, RowTarget
from ..request import Request, RoundResult
from . import round as steps
from .device_round import DeviceRounds, Record, derived_of
from .logprobs import list_logprobs, named
from .paths import Block
from .processors import process
from .round import Parts
from .timing import device_seconds

_KEPT = 2  # sets of buffers that wait for the next batch
_LOCK = threading.Lock()  # around looking for one


def bucket(positions: int) -> int:
    """A capacity of at least `positions`: requests of like length share buffers, and a graph need not be made anew.

    Powers of two from 512 on; above 4,096, where a row's memory counts, at most a quarter too much.
    """
    power = 1 << max(9, (positions - 1).bit_length())
    step = power if positions <= 4096 else power // 8
    return -(-positions // step) * step


class DeviceLoop:
    """Opens batches on a `RowTarget` and a `RowDrafter` or none; several may be open, each with its own buffers."""

    most_rows = 32

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self.free: list[DeviceRounds] = []
        accelerator = backends.accelerator(parts.target.device)
        # On a CPU a launched round is a finished one: running ahead would only waste the last.
        self.ahead = 1 if accelerator is None else 2
        if parts.paths.auto and parts.drafter is not None:
            pair = cast("RowTarget", parts.target), cast("RowDrafter", parts.drafter)
            parts.paths.settle(device_seconds(*pair, parts.paths, parts.block_size), by_round=False)

    def __getstate__(self) -> dict[str, object]:
        """A copy has buffers of its own: captured graphs cannot be copied."""
        return self.__dict__ | {"free": []}

    def refresh(self) -> None:
        """Forget buffers whose programs read copies of weights."""
        with _LOCK:
            self.free.clear()

    def open(
        self,
        rows: int,
        positions: int,
        *,
        draws: bool = False,
        processors: bool = False,
        penalties: bool = False,
        logprobs: int = 0,
    ) -> DeviceBatch:
        """See `pydflash.request.Loop`; `draws` is about drafts too, so all rows share the program that it needs."""
        # A round may begin at the last position, and one more that nobody reads may be under way behind it.
        needed = positions + 2 * self.parts.block_size + 1
        kind = (self.parts.draft_sampling and draws, processors, penalties, logprobs)
        return DeviceBatch(self, self._take(rows, needed, kind), positions, draws)

    def give_back(self, rounds: DeviceRounds) -> None:
        """Take the buffers of a batch that is closed for the next one."""
        rounds.abandon()
        if (accelerator := backends.accelerator(rounds.device)) is not None:
            rounds.ended = accelerator.current_stream(rounds.device).record_event()
        with _LOCK:
            self.free.append(rounds)
            del self.free[:-_KEPT]

    def _take(self, batch: int, needed: int, kind: tuple[bool, bool, bool, int]) -> DeviceRounds:
        draws, pieces, penalties, logprobs = kind
        capacity = bucket(needed)
        with self.parts.turns:  # what has changed is computed anew, while nobody runs it
            now = derived_of(cast("RowTarget", self.parts.target), cast("RowDrafter | None", self.parts.drafter))
        with _LOCK:
            self.free = [rounds for rounds in self.free if rounds.reads(now)]
            for rounds in self.free:
                its = (rounds.draws, rounds.pieces, rounds.penalties, rounds.logprobs)
                if rounds.batch == batch and its == kind and needed <= rounds.capacity <= 2 * capacity:
                    self.free.remove(rounds)
                    accelerator = backends.accelerator(rounds.device)
                    if rounds.ended is not None and accelerator is not None:
                        accelerator.current_stream(rounds.device).wait_event(rounds.ended)
                    return rounds
        with self.parts.turns:
            return DeviceRounds(
                self.parts, batch, capacity, draws=draws, pieces=pieces, penalties=penalties, logprobs=logprobs
            )


class DeviceBatch:
    """Rows that share buffers and a program; see `pydflash.request.Batch`."""

    def __init__(self, loop: DeviceLoop, rounds: DeviceRounds, positions: int, draws: bool) -> None:
        self.rounds, self.positions, self.draws = rounds, positions, draws
        self._loop = loop
        self._requests: list[Request | None] = [None] * rounds.batch
        self._first = [0] * rounds.batch  # number of the first round that a row's request takes part in

    def admit(self, row: int, request: Request) -> list[int]:
        """Run a prompt into a row, behind the rounds under way."""
        rounds = self.rounds
        self._check(row, request)
        pieces = ", in pieces (processors)" if rounds.pieces else ""
        request.stats.backends["round"] = rounds.how + pieces
        begin = time.perf_counter()
        long = step("prompt", len(request.ids), LONG_PROMPT)
        with rounds.parts.turns, torch.inference_mode(), rounds.on_device(), long:
            token = self._prefill(row, request)
        self._requests[row], self._first[row] = request, rounds.launched
        request.stats.prefill_seconds = time.perf_counter() - begin
        return [token]

    def _check(self, row: int, request: Request) -> None:
        if self._requests[row] is not None:
            raise ValueError(f"admit: row must be a free one, got {row}, which holds a request")
        if request.positions > self.positions:
            raise ValueError(f"admit: request must take at most {self.positions} positions, got {request.positions}")
        if request.processors and not self.rounds.pieces:
            raise ValueError("admit: request must have no logits processors where the batch was opened without")
        if request.penalised and not self.rounds.penalties:
            raise ValueError("admit: request must have no penalties and biases where the batch was opened without")
        if (request.logprobs or 0) > self.rounds.logprobs or (request.logprobs == 0 and not self.rounds.logprobs):
            raise ValueError(f"admit: request must list at most {self.rounds.logprobs} tokens, got {request.logprobs}")
        if not request.params.greedy and not self.draws:
            raise ValueError("admit: request must be greedy where the batch was opened without draws")

    def _prefill(self, row: int, request: Request) -> int:
        rounds, parts = self.rounds, self.rounds.parts
        rounds.clear(row, request.sampling)
        ids = torch.tensor([request.ids], device=rounds.device)
        logits: Tensor | None = None
        for chunk in rounds.target.prefill_chunks(ids, rounds.rows.cache, row):
            logits = chunk.logits
            if rounds.drafter is not None and chunk.features is not None:
                rounds.drafter.append_context(chunk.features, rounds.rows.context.row(row))
        assert logits is not None
        block = Block(ids[:, -1:], None)
        starts = torch.full((1,), ids.shape[1] - 1, dtype=torch.int32, device=rounds.device)
        changed = logits
        if (penalties := rounds.rows.penalties) is not None:
            penalties.admit(row, request.ids, request.params, request.logit_bias)
            changed = penalties.row(row).apply(parts.ops, logits, block.tokens, torch.ones_like(block.tokens))
        changed = process(parts, request, block, changed, starts)
        accepted = steps.accept(parts, block, changed, request.sampling, starts)
        token = int(accepted.bonus)
        if token == 0 and not bool(steps.lawful(changed)[0, -1]):
            raise request.without_law(len(request.ids))
        rounds.activate(row, accepted.bonus)
        if request.logprobs is not None:
            its = list_logprobs(parts.ops, logits, accepted.slots, accepted.bonus[:, None], max(1, request.logprobs))
            request.listed += named([token], its.joined()[0].tolist(), request.logprobs)
        return token

    def step(self) -> dict[int, RoundResult]:
        """Launch rounds, and wait for the oldest of those under way."""
        rounds = self.rounds
        with rounds.parts.turns:
            if rounds.pieces:
                rounds.launch(self._process)
            else:
                while rounds.under_way < self._loop.ahead:
                    rounds.launch()
        number = rounds.collected
        return {
            row: _result(record, request)
            for row, (record, request) in enumerate(zip(rounds.collect(), self._requests, strict=True))
            if request is not None and self._first[row] <= number
        }

    def _process(self, logits: Tensor, block: Block) -> Tensor:
        rows = []
        for row, request in enumerate(self._requests):
            its = slice(row, row + 1)
            if request is None:
                rows.append(logits[its])
            else:
                starts = self.rounds.rows.starts[its]
                rows.append(process(self.rounds.parts, request, block.row(row), logits[its], starts))
        return torch.cat(rows)

    def retire(self, row: int) -> None:
        """Free a row. What rounds under way bring for it is not looked at."""
        self.rounds.retire(row)
        request, self._requests[row] = self._requests[row], None
        accelerator: Any = backends.accelerator(self.rounds.device)
        if request is not None and accelerator is not None:
            request.stats.peak_bytes = accelerator.max_memory_allocated(self.rounds.device)

    def close(self) -> None:
        """The buffers go to the next batch."""
        for row in range(self.rounds.batch):
            self.rounds.retire(row)
        self._requests = [None] * self.rounds.batch
        self._loop.give_back(self.rounds)


def _result(record: Record, request: Request) -> RoundResult:
    wanted = request.logprobs
    listed = None if wanted is None else named(record.tokens, record.listed, wanted)
    without_law = steps.first_without_law(record.tokens, lambda: (record.followed, record.lawful))
    if record.parents is None:
        return RoundResult(record.block, None, len(record.block) - 1, record.tokens, listed, without_law)
    depths = [0]
    for parent in record.parents[1:]:
        depths.append(depths[parent] + 1)
    return RoundResult(record.block, record.parents, max(depths), record.tokens, listed, without_law)
