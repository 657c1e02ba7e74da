"""Logits that depend on the tokens before them: penalties and biases, for all slots of a block at once."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from types import ModuleType

import torch
from torch import Tensor

from ..sampling import SamplingParams


class Penalties:
    """What logits lose for tokens that the text before them holds, of `rows` sequences; see `ops.apply_penalties`.

    Everything has a fixed shape and stays on the device, so that a round with it can be captured.

    Attributes:
        counts: [B, V] int32, how often each token stands in the new text.
    """

    def __init__(self, rows: int, vocab_size: int, device: torch.device) -> None:
        self.counts = torch.zeros(rows, vocab_size, dtype=torch.int32, device=device)
        self._in_prompt = torch.zeros_like(self.counts)
        self._bias = torch.zeros(rows, vocab_size, device=device)
        self._repetition = torch.ones(rows, device=device)
        self._presence, self._frequency = (torch.zeros(rows, device=device) for _ in range(2))

    def row(self, b: int) -> Penalties:
        """Sequence b alone, over the same memory."""
        one = copy.copy(self)
        for name, held in vars(self).items():
            setattr(one, name, held[b : b + 1])
        return one

    def admit(self, row: int, prompt: Sequence[int], params: SamplingParams, bias: Mapping[int, float]) -> None:
        """Begin a sequence in a row."""
        device = self.counts.device
        for buffer in (self.counts, self._in_prompt, self._bias):
            buffer[row] = 0
        self._in_prompt[row, torch.tensor(list(prompt), dtype=torch.int64, device=device)] = 1
        if bias:
            ids = torch.tensor(list(bias), dtype=torch.int64, device=device)
            self._bias[row, ids] = torch.tensor(list(bias.values()), device=device)
        self._repetition[row] = params.repetition_penalty
        self._presence[row], self._frequency[row] = params.presence_penalty, params.frequency_penalty

    def count(self, tokens: Tensor) -> None:
        """Count new tokens [B, N] in; negative ones are none."""
        self.counts.scatter_add_(1, tokens.clamp(min=0), (tokens >= 0).to(torch.int32))

    def apply(self, ops: ModuleType, logits: Tensor, tokens: Tensor, visibility: Tensor) -> Tensor:
        """Logits [B, S, V] of a block as float32, each slot's with the tokens of its own path counted in.

        tokens: [B, S], the anchor first, which `count` has seen already; negative ones are no drafts.
        visibility: [B or 1, S] int64, bit j of slot i: whether j is i itself or an ancestor.
        """
        tables = (self._in_prompt, self.counts, self._bias)
        return ops.apply_penalties(
            logits, tokens, visibility, *tables, self._repetition, self._presence, self._frequency
        )
