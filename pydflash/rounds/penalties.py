"""Logits that depend on the tokens before them: penalties and biases, for all slots of a block at once."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..sampling import SamplingParams


class Penalties:
    """What the logits of `rows` sequences lose for tokens that their texts hold already.

    In this order, as elsewhere: repetition (over prompt and text), presence and frequency (over the new text), bias.
    Everything has a fixed shape and stays on the device, so that a round with it can be captured. Only the tokens that
    a sequence holds are computed anew, so it costs about a pass over the logits.

    Attributes:
        counts: [B, V] int32, how often each token stands in the new text.
    """

    def __init__(self, rows: int, vocab_size: int, capacity: int, device: torch.device) -> None:
        """capacity: tokens that a sequence may have, prompt and new ones together."""
        self._prompt = torch.zeros(rows, vocab_size, dtype=torch.bool, device=device)
        self.counts = torch.zeros(rows, vocab_size, dtype=torch.int32, device=device)
        self._bias = torch.zeros(rows, vocab_size, device=device)
        self._held = torch.zeros(rows, capacity, dtype=torch.int64, device=device)  # tokens of prompt and text, then 0s
        self._lengths = torch.zeros(rows, 1, dtype=torch.int64, device=device)
        self._repetition = torch.ones(rows, 1, device=device)
        self._presence, self._frequency = (torch.zeros(rows, 1, device=device) for _ in range(2))

    def row(self, b: int) -> Penalties:
        """Sequence b alone, over the same memory."""
        one = copy.copy(self)
        for name, held in vars(self).items():
            setattr(one, name, held[b : b + 1])
        return one

    def admit(self, row: int, prompt: Sequence[int], params: SamplingParams, bias: Mapping[int, float]) -> None:
        """Begin a sequence in a row."""
        device = self.counts.device
        for buffer in (self.counts, self._prompt, self._bias, self._held):
            buffer[row] = 0
        tokens = torch.tensor(list(prompt), dtype=torch.int64, device=device)
        self._prompt[row, tokens] = True
        self._held[row, : len(tokens)] = tokens
        self._lengths[row] = len(tokens)
        if bias:
            ids = torch.tensor(list(bias), dtype=torch.int64, device=device)
            self._bias[row, ids] = torch.tensor(list(bias.values()), device=device)
        self._repetition[row] = params.repetition_penalty
        self._presence[row], self._frequency[row] = params.presence_penalty, params.frequency_penalty

    def count(self, tokens: Tensor) -> None:
        """Count new tokens [B, N] in; negative ones, behind the others, are none."""
        new, ids = tokens >= 0, tokens.clamp(min=0)
        self.counts.scatter_add_(1, ids, new.to(torch.int32))
        places = self._lengths + torch.arange(tokens.shape[1], device=tokens.device)
        places = places.clamp(max=self._held.shape[1] - 1)
        self._held.scatter_(1, places, torch.where(new, ids, self._held.gather(1, places)))
        self._lengths += new.sum(1, keepdim=True)

    def apply(self, logits: Tensor, tokens: Tensor, visibility: Tensor) -> Tensor:
        """Logits [B, S, V] of a block as float32, each slot's with the tokens of its own path counted in.

        tokens: [B, S], the anchor first, which `count` has seen already; negative ones are no drafts.
        visibility: [B or 1, S] int64, bit j of slot i: whether j is i itself or an ancestor.
        """
        slots, drafts = torch.arange(tokens.shape[1], device=tokens.device), tokens.clamp(min=0)
        on_path = ((visibility[:, :, None] >> slots) & 1).bool() & ((slots > 0) & (tokens >= 0))[:, None]
        ids = torch.cat([self._held, drafts], 1)  # [B, N], a token may come twice and gets the same numbers
        # [B, S, N]: how often the drafts of a slot's path hold each of them.
        more = on_path.float() @ (drafts[:, :, None] == ids[:, None]).float()
        counts, in_prompt, bias = (x.gather(1, ids)[:, None] for x in (self.counts, self._prompt, self._bias))
        counts = counts + more.to(torch.int32)
        present, at = counts > 0, ids[:, None].expand(-1, tokens.shape[1], -1)
        raw = logits.gather(2, at).float()
        penalty = torch.where(in_prompt | present, self._repetition[:, None], 1.0)
        changed = torch.where(raw < 0, raw * penalty, raw / penalty)
        changed = changed - self._presence[:, None] * present - self._frequency[:, None] * counts + bias
        return (logits + self._bias[:, None]).scatter_(2, at, changed)
