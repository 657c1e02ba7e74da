"""One request on its way through the loop, and what the user gets of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

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


class Stream:
    """Iterator over the chunks of one request. Abandoning it costs nothing and disturbs nobody.

    Attributes:
        output: The `Generation` so far; complete once the iterator is exhausted.
    """

    def __init__(
        self,
        request: Request,
        prefill: Callable[[Request], list[int]],
        round_: Callable[[Request], Round],
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
    round_: Callable[[Request], Round],
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
            found = round_(request)
        taken, text = output.extend(found.tokens)
        request.ids += taken
        # What a stop condition cuts away was neither drafted nor accepted, as far as statistics go.
        stats.num_drafted.append(found.deepest if len(taken) == len(found.tokens) else len(taken) - 1)
        stats.num_accepted.append(len(taken) - 1)
        stats.num_verified.append(len(found.block) - 1)
        if stats.proposals is not None:
            stats.proposals.append(found.block if found.parents is None else (found.block, found.parents))
        stats.decode_seconds += time.perf_counter() - begin
        yield Chunk(taken, text)
