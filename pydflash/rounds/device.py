"""Requests over rounds of fixed shape: batches, streams, and the buffers they take turns with."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import ops
from ..drafter.module import Drafter
from ..ops import backends
from ..request import Request, Round
from ..target.fused import FastTarget
from ..tree import tree_of
from .device_round import DeviceRound, Row, verify_seconds
from .paths import Block, Paths, bushy

_KEPT = 2  # sets of buffers that wait for the next request
_LOCK = threading.Lock()  # around looking for one


def bucket(positions: int) -> int:
    """A capacity of at least `positions`: requests of like length share buffers, and a graph need not be made anew.

    Powers of two from 512 on; above 4,096, where a row's memory counts, at most a quarter too much.
    """
    power = 1 << max(9, (positions - 1).bit_length())
    step = power if positions <= 4096 else power // 8
    return -(-positions // step) * step


class DeviceLoop:
    """Runs requests on a `FastTarget`; several may run at once, each batch with its own buffers."""

    most_rows = 32

    def __init__(
        self, target: FastTarget, drafter: Drafter | None, paths: Paths, block_size: int, draft_sampling: bool
    ) -> None:
        self.target, self.drafter, self.paths = target, drafter, paths
        self.block_size, self.draft_sampling = block_size, draft_sampling
        self._free: list[DeviceRound] = []
        # On a CPU a launched round is a finished one: running ahead would only waste the last.
        self._ahead = 1 if self._accelerator is None else 2
        if paths.auto and drafter is not None:
            sizes = paths.sizes()
            trees = {size: tree_of(bushy(size, paths.slots), target.device) for size in sizes}
            times = {size: verify_seconds(target, tree, size + 1) for size, tree in trees.items()}
            paths.settle(times)

    def __getstate__(self) -> dict[str, object]:
        """A copy has buffers of its own: captured graphs cannot be copied."""
        return self.__dict__ | {"_free": []}

    def begin(self, requests: Sequence[Request]) -> list[list[int]]:
        """Run the prompts of a batch; returns the first tokens of each."""
        needed = max(len(r.ids) + r.output.limit for r in requests) + 2 * self.block_size + 1
        sampled = self.draft_sampling and any(not r.params.greedy for r in requests)
        pieces = any(r.processors for r in requests)
        rounds = self._take(len(requests), needed, sampled, pieces)
        found = []
        for row, request in enumerate(requests):
            request.state = rounds
            request.stats.backends["round"] = rounds.how if not pieces else f"{rounds.how}, in pieces (processors)"
            begin = time.perf_counter()
            found.append(self._prefill(rounds, row, request))
            request.stats.prefill_seconds = time.perf_counter() - begin
        return found

    def _prefill(self, rounds: DeviceRound, row: int, request: Request) -> list[int]:
        ids = torch.tensor([request.ids], device=self.target.device)
        rounds.admit(row, request.params, int(request.seeds))
        logits: Tensor | None = None
        for chunk in self.target.prefill_chunks(ids, rounds.cache, row):
            logits = chunk.logits
            if self.drafter is not None and rounds.context is not None and chunk.features is not None:
                self.drafter.append_context(chunk.features, rounds.context.row(row))
        assert logits is not None
        _, _, bonus = request.accept(ops, logits, ids[:, -1:], None, None, len(request.ids) - 1)
        rounds.activate(row, bonus)
        return [int(bonus)]

    def step(self, requests: Sequence[Request]) -> list[Round]:
        """The next round of a batch that `begin` began; finished requests get rounds without tokens."""
        rounds: DeviceRound = requests[0].state
        if rounds.pieces:
            rounds.launch(lambda logits, block: self._process(requests, logits, block))
        else:
            while rounds.under_way < self._ahead:
                rounds.launch()
        return [_round(row) for row in rounds.collect()]

    def _process(self, requests: Sequence[Request], logits: Tensor, block: Block) -> Tensor:
        parents = None if block.tree is None else block.tree.parents
        rows = [
            request.process(logits[i : i + 1], block.tokens[i : i + 1], None if parents is None else parents[i : i + 1])
            if request.output.finish_reason is None
            else logits[i : i + 1]
            for i, request in enumerate(requests)
        ]
        return torch.cat(rows)

    @property
    def _accelerator(self) -> Any:
        return backends.accelerator(self.target.device)

    def retire(self, requests: Sequence[Request], row: int) -> None:
        """One request of a batch is finished."""
        requests[0].state.retire(row)
        if self._accelerator is not None:
            requests[row].stats.peak_bytes = self._accelerator.max_memory_allocated(self.target.device)

    def end(self, requests: Sequence[Request]) -> None:
        """A batch is finished or abandoned: its buffers go to the next one."""
        rounds = requests[0].state
        if not isinstance(rounds, DeviceRound):
            return
        for row, request in enumerate(requests):
            request.state = None
            rounds.retire(row)
        rounds.abandon()
        if self._accelerator is not None:
            rounds.ended = self._accelerator.current_stream(self.target.device).record_event()
        with _LOCK:
            self._free.append(rounds)
            del self._free[:-_KEPT]

    def _take(self, batch: int, needed: int, sampled: bool, pieces: bool) -> DeviceRound:
        capacity = bucket(needed)
        with _LOCK:
            self._free = [rounds for rounds in self._free if rounds.current]
            for rounds in self._free:
                same = (rounds.batch, rounds.sampled, rounds.pieces) == (batch, sampled, pieces)
                if same and needed <= rounds.capacity <= 2 * capacity:
                    self._free.remove(rounds)
                    if rounds.ended is not None and self._accelerator is not None:
                        self._accelerator.current_stream(self.target.device).wait_event(rounds.ended)
                    return rounds
        return DeviceRound(
            self.target,
            self.drafter,
            self.paths,
            batch,
            capacity,
            block_size=self.block_size,
            sampled=sampled,
            pieces=pieces,
        )


def _round(row: Row) -> Round:
    if row.parents is None:
        return Round(row.block, None, len(row.block) - 1, row.tokens)
    depths = [0]
    for parent in row.parents[1:]:
        depths.append(depths[parent] + 1)
    return Round(row.block, row.parents, max(depths), row.tokens)
