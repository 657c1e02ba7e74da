"""One request on its way through the loop, and what the user gets of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor

from .sampling import SamplingParams, SamplingTensors
from .stats import Stats, TokenLogprob
from .text import Output

LogitsProcessor = Callable[[Tensor, Tensor], Tensor]


@dataclass(slots=True, repr=False)
class Generation:
    """The result for one prompt.

    Attributes:
        token_ids: New tokens only, a stop token included.
        text: Their text without special tokens; empty without a tokenizer.
        finish_reason: "stop", "length", or None while a stream is open.
        stats: Counts and times.
        logprobs: A `TokenLogprob` for each new token, where they were asked for.
    """

    token_ids: list[int]
    text: str
    finish_reason: str | None
    stats: Stats
    logprobs: list[TokenLogprob] | None = None

    def __repr__(self) -> str:
        text = self.text if len(self.text) <= 60 else f"{self.text[:57]}..."
        return f"Generation({len(self.token_ids)} tokens, {self.finish_reason}, {text!r}; {self.stats.summary()})"


@dataclass(slots=True)
class Chunk:
    """What one round added: new token ids, and the text that became certain with them."""

    token_ids: list[int]
    text: str


@dataclass(slots=True)
class Request:
    """One sequence: its text so far, how the target is sampled, and where it ends.

    Attributes:
        ids: Prompt and emitted tokens; the last one is the anchor.
        params, sampling: The sampling parameters, and the same with the seed as tensors [1] on the target's device.
        logit_bias: {token id: number} that is added to logits.
        logprobs: How many of the most probable tokens to list at each new one, None for no log-probabilities.
        listed: The log-probabilities of the new tokens, where they are asked for.
    """

    ids: list[int]
    params: SamplingParams
    sampling: SamplingTensors
    processors: Sequence[LogitsProcessor]
    output: Output
    stats: Stats
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    logprobs: int | None = None
    listed: list[TokenLogprob] = field(default_factory=list)

    @property
    def penalised(self) -> bool:
        """Whether its logits lose or gain something for what the text holds."""
        return self.params.penalised or bool(self.logit_bias)

    @property
    def positions(self) -> int:
        """The most that prompt and new tokens may take."""
        return len(self.ids) + self.output.limit - len(self.output.token_ids)

    @property
    def finished(self) -> bool:
        return self.output.finish_reason is not None

    def begin(self, tokens: Sequence[int]) -> Chunk:
        """Take in the tokens that the prompt brought."""
        taken, text = self.output.extend(tokens)
        self.ids += taken
        return Chunk(taken, text)

    def take(self, result: RoundResult) -> Chunk:
        """Take in what a round brought, up to where the request ends.

        Raises: ValueError where it goes on to a position at which no token can come.
        """
        taken, text = self.output.extend(result.tokens[: result.first_without_law])
        self.ids += taken
        if result.logprobs is not None:
            self.listed += result.logprobs[: len(taken)]
        stats = self.stats
        # What a stop condition cuts away was neither drafted nor accepted, as far as statistics go.
        stats.num_drafted.append(result.deepest if len(taken) == len(result.tokens) else len(taken) - 1)
        stats.num_accepted.append(len(taken) - 1)
        stats.num_verified.append(len(result.block) - 1)
        if stats.proposals is not None:
            stats.proposals.append(result.block if result.parents is None else (result.block, result.parents))
        if result.first_without_law is not None and not self.finished:
            raise self.without_law(len(self.ids))
        return Chunk(taken, text)

    def without_law(self, position: int) -> ValueError:
        """The error of a position, the prompt's first being 0, whose logits leave no token."""
        changed = " with penalties and biases" if self.penalised else ""
        return ValueError(
            f"generate: the target's logits{changed} must leave a token that can come next, got -inf or NaN alone at "
            f"position {position}"
        )

    def scores(self, logits: Tensor, new: Sequence[int]) -> Tensor:
        """Logits [1, V] behind the text and `new` tokens, changed by the processors, which are called once.

        Raises: ValueError where they leave no token, or return something else.
        """
        known = torch.tensor([[*self.ids, *new]], device=logits.device, dtype=torch.long)
        scores = logits.to(torch.float32, copy=True)  # processors may write in place
        for processor in self.processors:
            given = scores
            try:
                scores = processor(known, scores)
            except ValueError:
                if bool((given > -torch.inf).any()):
                    raise
                break  # one before it left no token, which some refuse in words of their own
            if not isinstance(scores, Tensor) or scores.shape != logits.shape:
                got = list(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
                raise ValueError(f"logits_processor: must return scores [1, V], got {got}")
            scores = scores.float()
        if not bool((scores > -torch.inf).any()):
            if not bool((logits > -torch.inf).any()):
                raise self.without_law(known.shape[1])
            raise ValueError(
                "logits_processor: must leave a token that can come next, got scores of -inf or NaN alone at position "
                f"{known.shape[1]}"
            )
        return scores


class RoundResult(NamedTuple):
    """What one round verified and brought for one sequence.

    Attributes:
        block: Verified tokens, the anchor first.
        parents: Slot that each follows, where the block is a tree.
        deepest: Drafts on its longest path.
        tokens: New tokens, 1 to `deepest` + 1.
        logprobs: Of these, where the request asks for them.
        first_without_law: Index of the first of them whose logits were -inf or NaN alone; None where all were sound.
    """

    block: list[int]
    parents: list[int] | None
    deepest: int
    tokens: list[int]
    logprobs: list[TokenLogprob] | None = None
    first_without_law: int | None = None


class Batch(Protocol):
    """Rows that run together. Each is free, or holds a request from `admit` to `retire`; rows do not affect each other.

    Whoever runs it gives tokens to the requests (`Request.begin` and `take`) and retires those that are finished.
    """

    def admit(self, row: int, request: Request) -> list[int]:
        """Run a prompt into a free row, while the other rows are between two rounds; returns its first tokens.

        Raises: ValueError where the row is not free, or the request is not what the batch was opened for.
        """

    def step(self) -> dict[int, RoundResult]:
        """One round of the rows that hold a request; where rounds run ahead, a new row may first come a step later."""

    def retire(self, row: int) -> None:
        """Free a row; it may be admitted to again."""

    def close(self) -> None:
        """End the batch, finished or not. No other call may follow."""


class Loop(Protocol):
    """Decides when rounds run: the host's loop sees every round before the next, the device's loop runs ahead of it.

    most_rows: Rows of the largest batch that pays. parts: The `pydflash.rounds.round.Parts` of its rounds.
    """

    most_rows: int
    parts: Any

    def open(
        self,
        rows: int,
        positions: int,
        *,
        draws: bool = False,
        processors: bool = False,
        penalties: bool = False,
        logprobs: int = 0,
    ) -> Batch:
        """A batch of `rows` free rows of up to `positions` positions each, prompt and new tokens together.

        draws: Whether requests of temperature > 0 may come; processors, penalties: whether ones with logits processors
        or with penalties and biases may; logprobs: the most tokens that one may list at each new one, 0 for none.
        """


class Stream:
    """Iterator over the chunks of one request. Abandoning it costs nothing and disturbs nobody.

    Attributes:
        output: The `Generation` so far; complete once the iterator is exhausted.
    """

    def __init__(self, request: Request, loop: Loop) -> None:
        self._request = request
        self._chunks = _chunks(request, loop)
        self._abandoned = False

    def __iter__(self) -> Iterator[Chunk]:
        return self

    def __next__(self) -> Chunk:
        return next(self._chunks)

    async def __aiter__(self) -> AsyncIterator[Chunk]:
        """The same chunks; a round runs in a thread while other tasks go on."""
        ended = object()

        def advance() -> object:
            try:
                return next(self._chunks, ended)
            finally:
                if self._abandoned:
                    self.close()

        try:
            while (chunk := await asyncio.to_thread(advance)) is not ended:
                yield cast("Chunk", chunk)
        finally:
            self._abandoned = True
            self.close()

    def close(self) -> None:
        """End it here: what its loop holds is given back, as when it is no longer referred to."""
        with suppress(ValueError):  # a round that runs still, whose thread closes when it comes back
            self._chunks.close()

    @property
    def output(self) -> Generation:
        return generation(self._request)


def generation(request: Request) -> Generation:
    """What a request has brought so far."""
    output = request.output
    logprobs = None if request.logprobs is None else list(request.listed)
    return Generation(list(output.token_ids), output.text, output.finish_reason, request.stats, logprobs)


def _chunks(request: Request, loop: Loop) -> Generator[Chunk, None, None]:
    rounds = run(loop, [request])
    try:
        for chunks in rounds:
            yield chunks[0]
    finally:
        rounds.close()  # gives back what the loop holds at once, however the outer generator ends


def run(loop: Loop, requests: Sequence[Request]) -> Generator[list[Chunk], None, None]:
    """Run a batch to its end: the chunk of each request, round by round, empty for those that are finished."""
    waiting = [request for request in requests if not request.finished]
    if not waiting:
        return
    batch = loop.open(
        len(waiting),
        max(request.positions for request in waiting),
        draws=any(not request.params.greedy for request in waiting),
        processors=any(request.processors for request in waiting),
        penalties=any(request.penalised for request in waiting),
        logprobs=max((max(1, n) for request in waiting if (n := request.logprobs) is not None), default=0),
    )
    try:
        chunks = {}
        for row, request in enumerate(waiting):
            chunks[id(request)] = request.begin(batch.admit(row, request))
            if request.finished:
                batch.retire(row)
        yield [chunks.get(id(request), Chunk([], "")) for request in requests]
        while not all(request.finished for request in waiting):
            begin = time.perf_counter()
            chunks = {}
            for row, result in batch.step().items():
                request = waiting[row]
                chunks[id(request)] = request.take(result)
                request.stats.decode_seconds += time.perf_counter() - begin
                if request.finished:
                    batch.retire(row)
            yield [chunks.get(id(request), Chunk([], "")) for request in requests]
    finally:
        batch.close()
