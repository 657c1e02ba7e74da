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
    Everything has a fixed shape and stays on the device, so that a round with it can be captured.

    Attributes:
        counts: [B, V] int32, how often each token stands in the new text.
    """

    def __init__(self, rows: int, vocab_size: int, device: torch.device) -> None:
        self._prompt = torch.zeros(rows, vocab_size, dtype=torch.bool, device=device)
        self.counts = torch.zeros(rows, vocab_size, dtype=torch.int32, device=device)
        self._bias = torch.zeros(rows, vocab_size, device=device)
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
        self.counts[row] = 0
        self._prompt[row] = False
        self._bias[row] = 0
        device = self.counts.device
        self._prompt[row, torch.tensor(list(prompt), dtype=torch.int64, device=device)] = True
        if bias:
            ids = torch.tensor(list(bias), dtype=torch.int64, device=device)
            self._bias[row, ids] = torch.tensor(list(bias.values()), device=device)
        self._repetition[row] = params.repetition_penalty
        self._presence[row], self._frequency[row] = params.presence_penalty, params.frequency_penalty

    def count(self, tokens: Tensor) -> None:
        """Count new tokens [B, N] in; negative ones are none."""
        self.counts.scatter_add_(1, tokens.clamp(min=0), (tokens >= 0).to(torch.int32))

    def apply(self, logits: Tensor, tokens: Tensor, visibility: Tensor) -> Tensor:
        """Logits [B, S, V] of a block as float32, each slot's with the tokens of its own path counted in.

        tokens: [B, S], the anchor first, which `count` has seen already; negative ones are no drafts.
        visibility: [B or 1, S] int64, bit j of slot i: whether j is i itself or an ancestor.
        """
        out = self._changed(logits.float(), self.counts[:, None], self._prompt[:, None], self._bias[:, None])
        # Where a slot's path has drafts, their logits are computed anew: every pair (slot, token of any slot).
        slots = torch.arange(tokens.shape[1], device=tokens.device)
        on_path = ((visibility[:, :, None] >> slots) & 1).bool() & (slots > 0) & (tokens >= 0)[:, None]
        ids = tokens.clamp(min=0)
        same = ids[:, :, None] == ids[:, None]  # [B, token's slot, other slot]
        more = on_path.float() @ same.float()  # [B, slot, token's slot]: how often its path holds the token
        at = ids[:, None].expand(-1, tokens.shape[1], -1).contiguous()
        held = [x.gather(1, ids)[:, None] for x in (self.counts, self._prompt, self._bias)]
        counts = held[0] + more.to(torch.int32)
        return out.scatter_(2, at, self._changed(logits.gather(2, at).float(), counts, held[1], held[2]))

    def _changed(self, logits: Tensor, counts: Tensor, in_prompt: Tensor, bias: Tensor) -> Tensor:
        present = counts > 0
        penalty = torch.where(in_prompt | present, self._repetition[:, None], 1.0)
        out = torch.where(logits < 0, logits * penalty, logits / penalty)
        return out - self._presence[:, None] * present - self._frequency[:, None] * counts + bias
