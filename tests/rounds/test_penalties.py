"""Penalties and biases over a block: each slot as if its own path were the text."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pydflash import ops
from pydflash.rounds.penalties import Penalties
from pydflash.sampling import SamplingParams

VOCAB = 11
PARAMS = SamplingParams(repetition_penalty=1.7, presence_penalty=0.4, frequency_penalty=-0.3)
BIAS = {3: 2.0, 4: float("-inf")}


def plain(logits: Tensor, prompt: list[int], text: list[int]) -> Tensor:
    """The definition, token by token, for one row [V]."""
    out = logits.double().clone()
    for token in range(VOCAB):
        if token in prompt or token in text:
            out[token] = out[token] * 1.7 if out[token] < 0 else out[token] / 1.7
        if token in text:
            out[token] -= 0.4 - 0.3 * text.count(token)
        out[token] += BIAS.get(token, 0.0)
    return out


CHAIN = [-1, 0, 1, 2, 3, 4]
TREE = [-1, 0, 0, 1, 1, 4]


@pytest.mark.parametrize("parents", [CHAIN, TREE], ids=["chain", "tree"])
def test_every_slot_counts_its_own_path(parents: list[int]) -> None:
    torch.manual_seed(0)
    block = torch.tensor([[5, 7, 7, 2, 7, 2], [1, 0, 3, 3, -1, 0]])
    prompts, texts = ([1, 7], [2, 2, 9]), ([5], [8, 1])
    penalties = Penalties(2, VOCAB, torch.device("cpu"))
    for row in range(2):
        penalties.admit(row, prompts[row], PARAMS, BIAS)
        penalties.count(torch.tensor([[*texts[row]] if row == r else [-1] * len(texts[row]) for r in range(2)]))
    masks: list[int] = []
    for i, parent in enumerate(parents):
        masks.append(1 << i | (masks[parent] if parent >= 0 else 0))
    logits = torch.randn(2, 6, VOCAB) * 3
    got = penalties.apply(ops, logits, block, torch.tensor([masks]))
    for row in range(2):
        for i in range(6):
            path = [int(block[row, j]) for j in range(1, 6) if masks[i] >> j & 1 and block[row, j] >= 0]
            want = plain(logits[row, i], prompts[row], [*texts[row], *path])
            torch.testing.assert_close(got[row, i].double(), want, rtol=1e-6, atol=1e-6)


def test_a_rows_numbers_do_not_depend_on_the_drafts_behind_it() -> None:
    """Bit for bit: the slot after a draft, and plain decoding after the same token was counted."""
    torch.manual_seed(1)
    logits = torch.randn(1, 3, VOCAB).bfloat16()
    drafted, plainly = (Penalties(1, VOCAB, torch.device("cpu")) for _ in range(2))
    for penalties in (drafted, plainly):
        penalties.admit(0, [4, 5], PARAMS, {2: 0.7})
        penalties.count(torch.tensor([[6]]))
    got = drafted.apply(ops, logits, torch.tensor([[6, 6, 9]]), torch.tensor([[1, 3, 7]]))
    assert torch.equal(got[:, 0], plainly.apply(ops, logits[:, :1], torch.tensor([[6]]), torch.tensor([[1]]))[:, 0])
    plainly.count(torch.tensor([[6]]))
    assert torch.equal(got[:, 1], plainly.apply(ops, logits[:, 1:2], torch.tensor([[6]]), torch.tensor([[1]]))[:, 0])
    plainly.count(torch.tensor([[9]]))
    assert torch.equal(got[:, 2], plainly.apply(ops, logits[:, 2:], torch.tensor([[9]]), torch.tensor([[1]]))[:, 0])


def test_a_row_that_is_admitted_again_starts_afresh() -> None:
    penalties = Penalties(1, VOCAB, torch.device("cpu"))
    penalties.admit(0, [4], PARAMS, BIAS)
    penalties.count(torch.tensor([[1, 2]]))
    penalties.admit(0, [], SamplingParams(), {})
    logits = torch.randn(1, 1, VOCAB)
    assert torch.equal(penalties.apply(ops, logits, torch.tensor([[1]]), torch.tensor([[1]])), logits)
