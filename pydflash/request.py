"""One request on its way through the loop, and what the user gets of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

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
        starts: [1] position of the anchor, on the device.
        features: [1, C, F * H] of tokens that are committed but not yet in the drafter's context.
    """

    ids: list[int]
    params: SamplingParams
    seeds: Tensor
    processors: Sequence[LogitsProcessor]
    output: Output
    stats: Stats
    starts: Tensor
    target_cache: Any = None
    context: Any = None
    features: Tensor | None = None

    def process(self, logits: Tensor, block: Tensor) -> Tensor:
        """Apply the logits processors to [1, S, V] row by row, each with the tokens before its position."""
        if not self.processors:
            return logits
        known = torch.tensor([self.ids[:-1]], device=logits.device, dtype=torch.long)
        rows = []
        for slot in range(block.shape[1]):
            scores = logits[:, slot].float()
            before = torch.cat([known, block[:, : slot + 1]], 1)
            for processor in self.processors:
                scores = processor(before, scores)
                if not isinstance(scores, Tensor) or scores.shape != logits[:, slot].shape:
                    got = list(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
                    raise ValueError(f"logits_processor: must return scores [1, V], got {got}")
                scores = scores.float()
            rows.append(scores)
        return torch.stack(rows, 1)


class Stream:
    """Iterator over the chunks of one request. Abandoning it costs nothing and disturbs nobody.

    Attributes:
        output: The `Generation` so far; complete once the iterator is exhausted.
    """

    def __init__(
        self,
        request: Request,
        prefill: Callable[[Request], list[int]],
        round_: Callable[[Request], tuple[list[int], list[int]]],
    ) -> None:
        self._request = request
        self._chunks = _chunks(request, prefill, round_)

    def __iter__(self) -> Iterator[Chunk]:
        return self

    def __next__(self) -> Chunk:
        return next(self._chunks)

    @property
    def output(self) -> Generation:
        output = self._request.output
        return Generation(list(output.token_ids), output.text, output.finish_reason or "length", self._request.stats)


def _chunks(
    request: Request,
    prefill: Callable[[Request], list[int]],
    round_: Callable[[Request], tuple[list[int], list[int]]],
) -> Iterator[Chunk]:
    output, stats = request.output, request.stats
    if output.finish_reason is not None:
        return
    begin = time.perf_counter()
    with torch.inference_mode():
        tokens = prefill(request)
    taken, text = output.extend(tokens)
    request.ids += taken
    stats.prefill_seconds = time.perf_counter() - begin
    yield Chunk(taken, text)
    while output.finish_reason is None:
        begin = time.perf_counter()
        with torch.inference_mode():
            block, tokens = round_(request)
        taken, text = output.extend(tokens)
        request.ids += taken
        # What a stop condition cuts away was neither drafted nor accepted, as far as statistics go.
        stats.num_drafted.append((len(block) if len(taken) == len(tokens) else len(taken)) - 1)
        stats.num_accepted.append(len(taken) - 1)
        if stats.proposals is not None:
            stats.proposals.append(block)
        stats.decode_seconds += time.perf_counter() - begin
        yield Chunk(taken, text)
