"""One round for a batch of sequences as a program of fixed shape, captured into a CUDA graph where there is one.

Draft, select, verify, accept and commit without a decision on the host: lengths, anchors and sampling parameters lie
on the device, and the host reads what a round brought after it has launched the next one.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import ops
from ..drafter.module import Drafter
from ..ops import backends
from ..sampling import SamplingParams
from ..target.fused import FastTarget
from ..target.generic import TargetOutput
from .paths import Block, Paths

_AHEAD = 2  # rounds that may be under way


class Row(NamedTuple):
    """What one round did for one sequence: its new tokens, the block, and the parents of a tree's slots."""

    tokens: list[int]
    block: list[int]
    parents: list[int] | None


class DeviceRound:
    """The buffers and the program of `batch` sequences.

    Attributes:
        capacity: Positions that a sequence may reach.
        sampled: Whether drafts are drawn from the drafter's law; rows of temperature 0 stay greedy.
        how: "graph", "eager", or why it is not a graph.
    """

    def __init__(
        self,
        target: FastTarget,
        drafter: Drafter | None,
        paths: Paths,
        batch: int,
        capacity: int,
        *,
        block_size: int,
        sampled: bool = False,
        pieces: bool = False,
    ) -> None:
        """pieces: stop between verifying and accepting, for logits that are changed on the host."""
        self.target, self.drafter, self.paths = target, drafter, paths
        self.batch, self.capacity, self.sampled, self.pieces = batch, capacity, sampled, pieces
        self.block_size = block_size if drafter is not None else 1
        self.device = device = target.device
        self._accelerator = accelerator = backends.accelerator(device)
        self.launched = self.collected = 0
        self.ended: Any = None  # an event behind the last use, where the device has streams
        with torch.inference_mode(), self._on_device():
            self.cache = target.new_cache(batch, capacity)
            self.context = None if drafter is None else drafter.new_cache(batch, capacity)
            slots = paths.rows if drafter is not None else 1
            ints: dict[str, Any] = {"dtype": torch.int32, "device": device}
            self.anchors = torch.zeros(batch, dtype=torch.int64, device=device)
            self.starts, self.counts, self.active = (torch.zeros(batch, **ints) for _ in range(3))
            self.record = torch.full((batch, slots + 1), -1, dtype=torch.int64, device=device)
            self.features: Tensor | None = None
            if drafter is not None:
                width = len(target.target.layer_ids) * target.target.hidden_size
                self.features = torch.zeros(batch, slots, width, dtype=target.dtype, device=device)
            self.temperature, self.heat, self.top_p, self.min_p = (torch.zeros(batch, device=device) for _ in range(4))
            self.heat.fill_(1.0)
            self.top_k = torch.zeros(batch, **ints)
            self.seeds = torch.zeros(batch, dtype=torch.int64, device=device)
            blocks = 2 if paths.path == "tree" else 1  # tokens, and parents where they form a tree
            self._packed = self.record.new_zeros(batch, slots + 1 + blocks * slots)
            pinned = accelerator is not None
            self._host = [torch.empty_like(self._packed, device="cpu", pin_memory=pinned) for _ in range(_AHEAD)]
            self._events = [None if accelerator is None else accelerator.Event() for _ in range(_AHEAD)]
            # A captured graph reads these; they must not go when others take their place.
            self._held = (target.tables(capacity + 64), drafter and drafter.tables())
            self._derived: tuple[object, ...] = () if drafter is None else drafter.derived()
            self.how = self._capture()

    # --- the program ----------------------------------------------------------------------------------------

    def _draft(self) -> Block:
        if self.drafter is None or self.context is None or self.features is None:
            return Block(self.anchors[:, None].clone(), None)
        drafter, target, paths = self.drafter, self.target.target, self.paths
        drafter.append_context(self.features[:, : self.block_size], self.context, self.counts)
        proposal = drafter.propose(
            self.anchors,
            self.context,
            embed=target.embed_weight,
            head=self.target.head,
            block_size=self.block_size,
            temperature=self.temperature if self.sampled else None,
            seeds=self.seeds,
            normalizers=self.heat if paths.path != "walk" else None,
        )
        return paths.block(ops, self.anchors, proposal, self.block_size - 1, self.heat)

    def _verify(self) -> tuple[Block, TargetOutput]:
        block = self._draft()
        return block, self.target.verify(block.tokens, self.cache, block.tree)

    def _accept(self, block: Block, output: TargetOutput, logits: Tensor) -> None:
        parents = None if block.tree is None else block.tree.parents
        index, num_accepted, bonus = ops.reject_sample(
            logits,
            block.tokens,
            parents,
            block.q,
            self.temperature,
            self.top_k,
            self.top_p,
            self.min_p,
            self.seeds,
            self.starts,
        )
        self.target.append(self.cache, index)
        ops.round_commit(
            block.tokens,
            index,
            num_accepted,
            bonus,
            self.active,
            None if self.features is None else output.features,
            self.features,
            self.anchors,
            self.cache.lengths,
            self.starts,
            self.counts,
            self.record,
        )
        shape = [] if parents is None else [parents.long()]
        self._packed.copy_(torch.cat([self.record, block.tokens, *shape], 1))

    def _first_piece(self) -> None:
        block, output = self._verify()
        self._between = (block, output)
        if self.pieces:
            self._logits = output.logits.float()

    def _second_piece(self) -> None:
        block, output = self._between
        self._accept(block, output, self._logits if self.pieces else output.logits)

    def _whole(self) -> None:
        self._first_piece()
        self._second_piece()

    # --- running it -----------------------------------------------------------------------------------------

    def _on_device(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._accelerator is None else self._accelerator.device(self.device)

    def _capture(self) -> str:
        """Capture with no row active, which changes nothing that is ever read."""
        parts = [self._first_piece, self._second_piece] if self.pieces else [self._whole]
        self._parts: list[Callable[[], Any]] = list(parts)
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
        self._parts = [graph.replay for graph in graphs]
        return "graph"

    @property
    def current(self) -> bool:
        """Whether the program still reads the drafter's weights as they are."""
        now: tuple[object, ...] = () if self.drafter is None else self.drafter.derived()
        return all(map(operator.is_, self._derived, now))

    @property
    def under_way(self) -> int:
        """Rounds that are launched and not collected."""
        return self.launched - self.collected

    def launch(self, process: Callable[[Tensor, Block], Tensor] | None = None) -> None:
        """Start a round. process: changes the logits [B, S, V] of a block; only where the round is in pieces."""
        with torch.inference_mode(), self._on_device():
            for i, part in enumerate(self._parts):
                if i and process is not None:
                    self._logits.copy_(process(self._logits, self._between[0]))
                part()
            at = self.launched % _AHEAD
            self._host[at].copy_(self._packed, non_blocking=True)
            if (event := self._events[at]) is not None:
                event.record()
        self.launched += 1

    def collect(self) -> list[Row]:
        """Wait for the oldest round under way; a row per sequence, without new tokens where it was not active."""
        at = self.collected % _AHEAD
        if (event := self._events[at]) is not None:
            event.synchronize()
        self.collected += 1
        slots = self.record.shape[1] - 1
        rows = []
        for numbers in self._host[at].tolist():
            block, parents = numbers[slots + 1 : 2 * slots + 1], numbers[2 * slots + 1 :]
            rows.append(Row(numbers[: numbers[slots]], block, parents or None))
        return rows

    # --- sequences ------------------------------------------------------------------------------------------

    def admit(self, row: int, params: SamplingParams, seed: int) -> None:
        """Make a row ready for a new sequence, which is not active before `activate`."""
        heat = params.temperature or 1.0
        for buffer, value in (
            (self.cache.lengths, 0),
            (self.counts, 0),
            (self.active, 0),
            (self.temperature, params.temperature),
            (self.heat, heat),
            (self.top_k, params.top_k),
            (self.top_p, params.top_p),
            (self.min_p, params.min_p),
            (self.seeds, seed),
        ):
            buffer[row] = value
        if self.context is not None:
            self.context.lengths[row] = 0

    def activate(self, row: int, anchor: Tensor) -> None:
        """Begin rounds for a row whose prompt is committed; anchor: [1] its first new token."""
        self.anchors[row : row + 1] = anchor
        self.starts[row] = self.cache.lengths[row]
        self.active[row] = 1

    def retire(self, row: int) -> None:
        """Leave a row out of the rounds to come."""
        with torch.inference_mode(), self._on_device():
            self.active[row] = 0

    def abandon(self) -> None:
        """Forget the rounds under way."""
        self.collected = self.launched


def verify_seconds(target: FastTarget, tree: Any, size: int, repeats: int = 8) -> float:
    """What the target takes for a block of `size` slots, replayed as a graph where there are graphs."""
    device, accelerator = target.device, backends.accelerator(target.device)
    with torch.inference_mode():
        cache = target.new_cache(1, 256)
        cache.lengths += 64
        tokens = torch.ones(1, size, dtype=torch.int64, device=device)
        run: Callable[[], Any] = lambda: target.verify(tokens, cache, tree)  # noqa: E731
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.device(device), torch.cuda.graph(graph, capture_error_mode="thread_local"):
                run()
            run = graph.replay
            run()
        if accelerator is not None:
            accelerator.synchronize(device)
        begin = time.perf_counter()
        for _ in range(repeats):
            run()
        if accelerator is not None:
            accelerator.synchronize(device)
    return (time.perf_counter() - begin) / repeats
