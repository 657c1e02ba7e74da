"""Tiny models on any device, with drafters that learned their text or know it by heart; how runs are compared."""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from typing import Any

import torch
from pairs import VOCAB, build_drafter, fitted, fitted_prompts
from tiny_models import TINY

from pydflash import Drafter, Generation, Speculator, Stats
from pydflash.protocols import Proposal

LAYERS = 6
NOBODY: list[int] = []  # no stop tokens


@functools.cache
def pair(version: int | str, kind: str) -> tuple[Any, Any]:
    """A tiny model and a drafter that learned its text; "knowing" is one that has it by heart."""
    if kind != "cpu":
        model, drafter = pair(version, "cpu")
        return copy.deepcopy(model).to(kind), copy.deepcopy(drafter).to(kind)
    if version == "knowing":
        return TINY["qwen3"](num_hidden_layers=LAYERS), Knowing(build_drafter(1, block_size=4).config).eval()
    return fitted(int(version), steps=120)


class Knowing(Drafter):
    """Drafts from `texts` [rows, positions], wrong at every seventh place, so that rounds keep 0 to all drafts."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.register_buffer("texts", torch.zeros(8, 512, dtype=torch.long))

    def propose(self, anchors: torch.Tensor, cache: Any, *, block_size: int, **options: Any) -> Proposal:  # type: ignore[override]
        texts = self.texts[: len(anchors)]
        at = cache.lengths.long()[:, None] + torch.arange(1, block_size, device=texts.device)
        found = texts.gather(1, at.clamp(max=texts.shape[1] - 1))
        found = torch.where(at % 7 == 0, (found + 1) % VOCAB, found)
        return Proposal(found, found[..., None], None, torch.zeros_like(found[..., None], dtype=torch.float32))


@functools.cache
def text_after(prompt: tuple[int, ...]) -> list[int]:
    """60 tokens by plain decoding on the CPU."""
    return Speculator(pair("knowing", "cpu")[0], None).generate(list(prompt), 60, stop_token_ids=NOBODY).token_ids


def know(drafter: Knowing, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """Teach a drafter what follows each prompt of a batch; returns that."""
    texts = [text_after(tuple(prompt)) for prompt in prompts]
    for row, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
        drafter.texts[row].zero_()
        drafter.texts[row, : len(prompt) + 60] = torch.tensor([*prompt, *text])
    return texts


def prompts_of(count: int) -> list[list[int]]:
    """Ragged ones, on and off the texts that drafters were fitted to."""
    rows = [row[: 1 + (4 + 3 * i) % 5].tolist() for i, row in enumerate(fitted_prompts())]
    return [*rows, [7] * 23, list(range(40))][:count]


def counts(stats: Stats, proposals: bool = True) -> tuple[Any, ...]:
    found = stats.num_accepted, stats.num_drafted, stats.num_verified, stats.prompt_tokens
    return (*found, stats.proposals) if proposals else found


def assert_same(got: Generation, want: Generation, proposals: bool = True) -> None:
    assert (got.token_ids, got.text, got.finish_reason) == (want.token_ids, want.text, want.finish_reason)
    assert counts(got.stats, proposals) == counts(want.stats, proposals)


def moved(model: Any, device: torch.device) -> Any:
    return model if device.type == "cpu" else copy.deepcopy(model).to(device)
