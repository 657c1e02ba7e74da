"""Rounds of fixed shape for a batch of sequences, captured into a CUDA graph where there is one.

Nothing in them is decided on the host: lengths, anchors and sampling parameters lie on the device, and the host reads
what a round brought after it has launched the next one.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from ..ops import backends
from ..protocols import RowDrafter, RowTarget, TargetOutput
from ..sampling import SamplingTensors
from . import round as steps
from .paths import Block
from .penalties import Penalties
from .round import DeviceRows, Parts

_AHEAD = 2  # rounds that may be under way


class Record(NamedTuple):
    """What one round did for one row: its new tokens, none where it was not active; the block; a tree's parents;
    `Listed.joined` of the new tokens where it is asked for; and what is `lawful` of the block's slots.
    """

    tokens: list[int]
    block: list[int]
    parents: list[int] | None
    listed: list[list[float]]
    lawful: list[int]

    @property
    def followed(self) -> list[int]:
        """The slots that the new tokens follow."""
        slots = list(range(len(self.tokens)))
        if self.parents is not None:
            for i, token in enumerate(self.tokens[:-1]):
                children = (child for child, parent in enumerate(self.parents) if parent == slots[i])
                slots[i + 1] = next(child for child in children if self.block[child] == token)
        return slots


class DeviceRounds:
    """The buffers of `batch` rows, and the program that runs a round of them.

    Attributes:
        rows: The sequences, on the device.
        capacity: Positions that a sequence may reach.
        draws: Whether drafts are drawn from the drafter's law; rows of temperature 0 stay greedy.
        pieces: Whether a round stops between verifying and accepting, for logits that are changed on the host.
        program: What runs a round, one call after the other: two where it is in pieces.
        how: "graph", "eager", or why it is not a graph.
    """

    def __init__(
        self,
        parts: Parts,
        batch: int,
        capacity: int,
        *,
        draws: bool = False,
        pieces: bool = False,
        penalties: bool = False,
        logprobs: int = 0,
    ) -> None:
        """parts: of a `RowTarget`, and a `RowDrafter` or none."""
        self.parts, self.batch, self.capacity, self.draws, self.pieces = parts, batch, capacity, draws, pieces
        self.penalties, self.logprobs = penalties, logprobs
        self.target, self.drafter = cast("RowTarget", parts.target), cast("RowDrafter | None", parts.drafter)
        self.device = device = self.target.device
        self._accelerator = accelerator = backends.accelerator(device)
        self.launched = self.collected = 0
        self.ended: Any = None  # an event behind the last use, where the device has streams
        with torch.inference_mode(), self.on_device():
            self._derived = derived_of(self.target, self.drafter)  # before anything is taken from them
            self.rows = self._new_rows()
            slots = self.rows.record.shape[1] - 1
            blocks = 2 if parts.paths.path == "tree" else 1  # tokens, and parents where they form a tree
            self._report = self.rows.record.new_zeros(batch, slots + 1 + (blocks + 1) * slots)
            pinned = accelerator is not None
            self._reports = [self._report]
            if logprobs:
                self._reports.append(torch.zeros(batch, slots, 1 + 2 * logprobs, device=device))
            self._host = [
                [torch.empty_like(x, device="cpu", pin_memory=pinned) for x in self._reports] for _ in range(_AHEAD)
            ]
            self._events = [None if accelerator is None else accelerator.Event() for _ in range(_AHEAD)]
            # A captured graph reads these; they must not go when others take their place.
            self._held = (self.target.tables(capacity + 64), self.drafter and self.drafter.tables())
            self.how = self._capture()

    def _new_rows(self) -> DeviceRows:
        batch, target, drafter, device = self.batch, self.target, self.drafter, self.device
        slots = self.parts.paths.rows if drafter is not None else 1
        features = None
        if drafter is not None:
            width = len(target.layer_ids) * target.hidden_size
            features = torch.zeros(batch, slots, width, dtype=target.dtype, device=device)
        starts, counts, active = (torch.zeros(batch, dtype=torch.int32, device=device) for _ in range(3))
        return DeviceRows(
            target=target,
            anchors=torch.zeros(batch, dtype=torch.int64, device=device),
            starts=starts,
            cache=target.new_cache(batch, self.capacity),
            context=None if drafter is None else drafter.new_cache(batch, self.capacity),
            sampling=SamplingTensors.greedy(batch, device),
            draws=self.draws,
            features=features,
            counts=counts,
            active=active,
            record=torch.full((batch, slots + 1), -1, dtype=torch.int64, device=device),
            penalties=Penalties(batch, target.vocab_size, device) if self.penalties else None,
            logprobs=self.logprobs,
        )

    # --- the program ----------------------------------------------------------------------------------------

    def _first_piece(self) -> None:
        block = steps.draft(self.parts, self.rows, self.parts.block_size)
        output = steps.verify(self.parts, self.rows, block)
        self._between: tuple[Block, TargetOutput] = (block, output)
        self._logits = steps.penalised(self.parts, self.rows, block, output.logits)
        if self.pieces:
            # They change in place, while log-probabilities are of what the model gave.
            self._logits = self._logits.to(torch.float32, copy=self._logits is output.logits)

    def _second_piece(self) -> None:
        (block, output), rows = self._between, self.rows
        accepted = steps.accept(self.parts, block, self._logits, rows.sampling, rows.starts)
        rows.commit(block, output, accepted)
        rows.note(self.parts.ops, output, accepted, rows.record[:, :-1])
        if rows.listed is not None:
            self._reports[1].copy_(rows.listed)
        shape = [] if block.parents is None else [block.parents.long()]
        told = torch.cat([rows.record, block.tokens, *shape], 1)
        self._report[:, : told.shape[1]].copy_(told)
        steps.lawful(self._logits, out=self._report[:, told.shape[1] :])

    def _whole(self) -> None:
        self._first_piece()
        self._second_piece()

    # --- running it -----------------------------------------------------------------------------------------

    def on_device(self) -> AbstractContextManager[Any]:
        """The device as the current one."""
        return nullcontext() if self._accelerator is None else self._accelerator.device(self.device)

    def _capture(self) -> str:
        """Capture with no row active, which changes nothing that is ever read."""
        parts = [self._first_piece, self._second_piece] if self.pieces else [self._whole]
        self.program: list[Callable[[], Any]] = list(parts)
        if self.device.type != "cuda":
            return "eager"
        stream = torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            for part in parts * 2:
                part()
        stream.synchronize()
        graphs: list[torch.cuda.CUDAGraph] = []
        try:
            for part in parts:
                graph = torch.cuda.CUDAGraph()
                pool = graphs[0].pool() if graphs else None
                # Only this thread's calls are part of it, and what other threads do meanwhile is no error.
                with torch.cuda.graph(graph, stream=stream, pool=pool, capture_error_mode="thread_local"):
                    part()
                graphs.append(graph)
        except RuntimeError as error:
            torch.cuda.synchronize(self.device)
            return f"eager (no graph: {str(error).splitlines()[0]})"
        torch.cuda.current_stream(self.device).wait_stream(stream)
        self.program = [graph.replay for graph in graphs]
        return "graph"

    def reads(self, derived: tuple[object, ...]) -> bool:
        """Whether the program reads what `derived_of` gives now."""
        return len(derived) == len(self._derived) and all(map(operator.is_, self._derived, derived))

    @property
    def under_way(self) -> int:
        """Rounds that are launched and not collected."""
        return self.launched - self.collected

    def launch(self, process: Callable[[Tensor, Block], Tensor] | None = None) -> None:
        """Start a round. process: changes the logits [B, S, V] of a block; only where the round is in pieces."""
        with torch.inference_mode(), self.on_device():
            for i, part in enumerate(self.program):
                if i and process is not None:
                    self._logits.copy_(process(self._logits, self._between[0]))
                part()
            at = self.launched % _AHEAD
            for host, report in zip(self._host[at], self._reports, strict=True):
                host.copy_(report, non_blocking=True)
            if (event := self._events[at]) is not None:
                event.record()
        self.launched += 1

    def collect(self) -> list[Record]:
        """Wait for the oldest round under way; a record per row."""
        at = self.collected % _AHEAD
        if (event := self._events[at]) is not None:
            event.synchronize()
        self.collected += 1
        slots = self.rows.record.shape[1] - 1
        rows = []
        numbers_of, *listed_of = (x.tolist() for x in self._host[at])
        for i, numbers in enumerate(numbers_of):
            row = listed_of[0][i] if listed_of else []
            block, parents, lawful = (
                numbers[slots + 1 : 2 * slots + 1],
                numbers[2 * slots + 1 : -slots],
                numbers[-slots:],
            )
            rows.append(Record(numbers[: numbers[slots]], block, parents or None, row, lawful))
        return rows

    # --- sequences ------------------------------------------------------------------------------------------

    def clear(self, row: int, sampling: SamplingTensors) -> None:
        """Make a row ready for a new sequence, which is not active before `activate`."""
        self._empty(row)
        self.rows.sampling.put(row, sampling)

    def _empty(self, row: int) -> None:
        rows = self.rows
        contexts = [] if rows.context is None else [rows.context.lengths]
        for numbers in (rows.cache.lengths, rows.counts, rows.active, *contexts):
            numbers[row] = 0

    def activate(self, row: int, anchor: Tensor) -> None:
        """Begin rounds for a row whose prompt is committed; anchor: [1] its first new token."""
        rows = self.rows
        rows.anchors[row : row + 1] = anchor
        rows.starts[row] = rows.cache.lengths[row]
        rows.active[row] = 1
        if rows.penalties is not None:
            rows.penalties.row(row).count(anchor[:, None])

    def retire(self, row: int) -> None:
        """Leave a row out of the rounds to come, in which it attends to nothing."""
        with torch.inference_mode(), self.on_device():
            self._empty(row)

    def abandon(self) -> None:
        """Forget the rounds under way."""
        self.collected = self.launched


def derived_of(target: RowTarget, drafter: RowDrafter | None) -> tuple[object, ...]:
    """What a pair keeps that is computed from weights; on a device it waits for samples of them."""
    return (*target.derived(), *(() if drafter is None else drafter.derived()))
