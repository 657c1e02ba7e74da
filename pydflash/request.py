"""One request on its way through the loop, and what the user gets of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from .sampling import SamplingParams
from .stats import Stats
from .text import Output

LogitsProcessor = Callable[[Tensor, Tensor], Tensor]


@dataclass(slots=True)
class Generation:
    """The result for one prompt.

    Attributes:
        token_ids: New tokens only, a stop token included.
        text: Their text without special tokens; empty without a tokenizer.
        finish_reason: "stop" or "length".
        stats: Counts and times.
    """

    token_ids: list[int]
    text: str
    finish_reason: str
    stats: Stats


@dataclass(slots=True)
class Chunk:
    """What one round added: new token ids, and the text that became certain with them."""

    token_ids: list[int]
    text: str


@dataclass(slots=True)
class Request:
    """One sequence: what is committed, what the drafter still has to be told, and how the target is sampled.

    Attributes:
        ids: Prompt and emitted tokens; the last one is the anchor.
        state: What the loop that runs it keeps for it.
    """

    ids: list[int]
    params: SamplingParams
    seeds: Tensor
    processors: Sequence[LogitsProcessor]
    output: Output
    stats: Stats
    state: Any = None

    def take(self, found: Round) -> Chunk:
        """Take in what a round brought, up to where the request ends."""
        taken, text = self.output.extend(found.tokens)
        self.ids += taken
        stats = self.stats
        # What a stop condition cuts away was neither drafted nor accepted, as far as statistics go.
        stats.num_drafted.append(found.deepest if len(taken) == len(found.tokens) else len(taken) - 1)
        stats.num_accepted.append(len(taken) - 1)
        stats.num_verified.append(len(found.block) - 1)
        if stats.proposals is not None:
            stats.proposals.append(found.block if found.parents is None else (found.block, found.parents))
        return Chunk(taken, text)

    def accept(
        self,
        ops: ModuleType,
        logits: Tensor,
        tokens: Tensor,
        parents: Tensor | None,
        q: tuple[Tensor, Tensor] | None,
        starts: Tensor | int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """`reject_sample` of a block [1, S], with this request's processors, parameters and seed."""
        params = self.params
        return ops.reject_sample(
            self.process(logits, tokens, parents),
            tokens,
            parents,
            q,
            params.temperature,
            params.top_k,
            params.top_p,
            params.min_p,
            self.seeds,
            starts,
        )

    def process(self, logits: Tensor, block: Tensor, parents: Tensor | None) -> Tensor:
        """Apply the logits processors to [1, S, V] row by row, each with the tokens before its position.

        parents: [1, S] of a tree, whose rows see their own path only; None for a chain.
        """
        if not self.processors:
            return logits
        known = torch.tensor([self.ids[:-1]], device=logits.device, dtype=torch.long)
        follows = range(-1, block.shape[1] - 1) if parents is None else parents[0].tolist()
        rows, texts = [], [known]  # texts[i + 1]: what slot i ends, itself included
        for slot, parent in enumerate(follows):
            scores = logits[:, slot].float()
            before = torch.cat([texts[parent + 1], block[:, slot : slot + 1]], 1)
            texts.append(before)
            for processor in self.processors:
                scores = processor(before, scores)
                if not isinstance(scores, Tensor) or scores.shape != logits[:, slot].shape:
                    got = list(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
                    raise ValueError(f"logits_processor: must return scores [1, V], got {got}")
                scores = scores.float()
            rows.append(scores)
        return torch.stack(rows, 1)


class Round(NamedTuple):
    """What one round verified and brought.

    Attributes:
        block: Verified tokens, the anchor first.
        parents: Slot that each follows, where the block is a tree.
        deepest: Drafts on its longest path.
        tokens: New tokens, 1 to `deepest` + 1.
    """

    block: list[int]
    parents: list[int] | None
    deepest: int
    tokens: list[int]


class Loop(Protocol):
    """Runs the requests of a batch, at most `most_rows`; the host's loop and the device's are two."""

    most_rows: int

    def begin(self, requests: Sequence[Request]) -> list[list[int]]: ...
    def step(self, requests: Sequence[Request]) -> list[Round]: ...
    def retire(self, requests: Sequence[Request], row: int) -> None: ...
    def end(self, requests: Sequence[Request]) -> None: ...


class Stream:
    """Iterator over the chunks of one request. Abandoning it costs nothing and disturbs nobody.

    Attributes:
        output: The `Generation` so far; complete once the iterator is exhausted.
    """

    def __init__(self, request: Request, loop: Loop) -> None:
        self._request = request
        self._chunks = _chunks(request, loop)

    def __iter__(self) -> Iterator[Chunk]:
        return self

    def __next__(self) -> Chunk:
        return next(self._chunks)

    @property
    def output(self) -> Generation:
        return generation(self._request)


def generation(request: Request) -> Generation:
    """What a request has brought so far."""
    output = request.output
    return Generation(list(output.token_ids), output.text, output.finish_reason or "length", request.stats)


def _chunks(request: Request, loop: Loop) -> Iterator[Chunk]:
    rounds = run(loop, [request])
    try:
        for chunks in rounds:
            yield chunks[0]
    finally:
        rounds.close()  # gives back what the loop holds at once, however the outer generator ends


def run(loop: Loop, requests: Sequence[Request]) -> Generator[list[Chunk], None, None]:
    """Run a batch to its end: the chunk of each request, round by round, empty for those that are finished."""
    waiting = [request for request in requests if request.output.finish_reason is None]
    if not waiting:
        return
    try:
        with torch.inference_mode():
            first = loop.begin(waiting)
        chunks = {}
        for row, (request, tokens) in enumerate(zip(waiting, first, strict=True)):
            taken, text = request.output.extend(tokens)
            request.ids += taken
            chunks[id(request)] = Chunk(taken, text)
            if request.output.finish_reason is not None:
                loop.retire(waiting, row)
        yield [chunks.get(id(request), Chunk([], "")) for request in requests]
        while any(request.output.finish_reason is None for request in waiting):
            begin = time.perf_counter()
            with torch.inference_mode():
                rounds = loop.step(waiting)
            chunks = {}
            for row, (request, found) in enumerate(zip(waiting, rounds, strict=True)):
                if request.output.finish_reason is not None:
                    continue
                chunks[id(request)] = request.take(found)
                request.stats.decode_seconds += time.perf_counter() - begin
                if request.output.finish_reason is not None:
                    loop.retire(waiting, row)
            yield [chunks.get(id(request), Chunk([], "")) for request in requests]
    finally:
        loop.end(waiting)
