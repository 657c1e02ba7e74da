"""apply_penalties against its definition token by token, chains and trees, bits of drafts against counts, refusals."""

from __future__ import annotations

import re

import pytest
import torch
from cpu_levels import over_levels
from torch import Tensor

from pydflash import ops
from pydflash.ops import reference

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def inputs(batch: int, slots: int, vocab_size: int, tree: bool) -> list[Tensor]:
    """Of float64: a quarter of the tokens known, drafts that repeat each other, and places without a draft."""
    generator = torch.Generator().manual_seed(slots + vocab_size)

    def integers(high: int, *shape: int) -> Tensor:
        return torch.randint(0, high, shape, generator=generator)

    def floats(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).bfloat16().double()

    logits = 4 * floats(batch, slots, vocab_size)
    tokens = integers(vocab_size, batch, slots)
    tokens[:, slots // 2 :: 3] = tokens[:, :1].clone()
    tokens[:, 3::5] = -1
    rows = batch if tree else 1
    visibility = torch.zeros(rows, slots, dtype=torch.int64)
    for b in range(rows):
        for i in range(slots):
            parent = (int(integers(i, 1)) if tree else i - 1) if i else -1
            visibility[b, i] = (1 << i if i < 63 else -(2**63)) | (int(visibility[b, parent]) if i else 0)
    in_prompt = (integers(4, batch, vocab_size) == 0).int()
    counts = (integers(9, batch, vocab_size) - 5).clamp(min=0).int()
    bias = floats(batch, vocab_size)
    bias[:, ::7] = -torch.inf
    laws = [floats(batch).abs() + 0.5, floats(batch), floats(batch)]
    return [logits, tokens, visibility, in_prompt, counts, bias, *laws]


def by_definition(
    logits: Tensor, tokens: Tensor, visibility: Tensor, in_prompt: Tensor, counts: Tensor, bias: Tensor, *laws: Tensor
) -> Tensor:
    out = logits.clone()
    for b, i, v in ((b, i, v) for b in range(len(out)) for i in range(out.shape[1]) for v in range(out.shape[2])):
        sees = int(visibility[b % len(visibility), i])
        times = int(counts[b, v]) + sum(int(tokens[b, j]) == v for j in range(1, out.shape[1]) if sees >> j & 1)
        repetition, presence, frequency = (float(x[b]) for x in laws)
        x = float(logits[b, i, v])
        if times or in_prompt[b, v]:
            x = x * repetition if x < 0 else x / repetition
        out[b, i, v] = x - (presence if times else 0.0) - frequency * times + float(bias[b, v])
    return out


@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
def test_the_reference_is_the_definition(tree: bool) -> None:
    for batch, slots, vocab_size in ((1, 1, 5), (2, 6, 11), (3, 17, 9), (1, 64, 6)):
        values = inputs(batch, slots, vocab_size, tree)
        torch.testing.assert_close(reference.apply_penalties(*values), by_definition(*values), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
@pytest.mark.parametrize("vocab_size", [1, 33, 1000, 2052, 4096])
def test_values(vocab_size: int, tree: bool, dtype: torch.dtype, device: torch.device) -> None:
    for batch, slots in ((1, 1), (2, 5), (3, 16), (1, 64)):
        logits, *others = inputs(batch, slots, vocab_size, tree)
        want = reference.apply_penalties(logits, *others)
        moved = [x.to(device, torch.float32 if x.is_floating_point() else x.dtype) for x in others]
        for _ in over_levels(device):
            got = ops.apply_penalties(logits.to(device, dtype), *moved)
            torch.testing.assert_close(got.cpu().double(), want, rtol=2e-6, atol=1e-5)
        wide = torch.full((batch, slots, vocab_size + 3), torch.nan, dtype=dtype, device=device)
        wide[..., 3:] = logits.to(device)
        assert torch.equal(ops.apply_penalties(wide[..., 3:], *moved), got)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab_size", [37, 4096])
def test_a_draft_and_a_counted_token_give_the_same_bits(
    vocab_size: int, dtype: torch.dtype, device: torch.device
) -> None:
    """Else a text with drafts would part from the plain one where two logits are nearly equal."""
    logits, tokens, visibility, in_prompt, counts, bias, *laws = inputs(1, 16, vocab_size, tree=False)
    first, tables = logits.to(device, dtype), [x.to(device).float() for x in (bias, *laws)]
    blocks = [x.to(device) for x in (tokens, visibility, in_prompt)]
    for _ in over_levels(device):
        drafted = ops.apply_penalties(first, *blocks, counts.to(device), *tables)
        counted = counts.clone()
        for i in range(16):
            if i and tokens[0, i] >= 0:
                counted[0, tokens[0, i]] += 1
            one = torch.ones(1, 1, dtype=torch.int64, device=device)
            alone = ops.apply_penalties(first[:, i : i + 1], one, one, blocks[2], counted.to(device), *tables)
            assert torch.equal(alone[:, 0], drafted[:, i])


def test_tokens_outside_the_vocabulary_are_no_drafts(device: torch.device) -> None:
    logits, tokens, *others = (x.to(device) for x in inputs(1, 4, 9, tree=False))
    others = [x.float() if x.is_floating_point() else x for x in others]
    tokens[:, 1:] = torch.tensor([9, 2**40, -(2**40)], device=device)
    none = torch.full_like(tokens, -1)
    assert torch.equal(
        ops.apply_penalties(logits.float(), tokens, *others), ops.apply_penalties(logits.float(), none, *others)
    )


def test_refusals(device: torch.device) -> None:
    names = ("logits", "tokens", "visibility", "in_prompt", "counts", "bias", "repetition", "presence", "frequency")
    good = [x.to(device) for x in inputs(2, 4, 9, tree=True)]
    good = [x.float() if x.is_floating_point() else x for x in good]
    for name, change, message in (
        ("logits", lambda x: x.double(), "must be float32, bfloat16 or float16, got float64"),
        ("logits", lambda x: x[0], "must be of shape [B, S, V] = [?, ?, ?], got [4, 9]"),
        ("tokens", lambda x: x[:, 1:], "must be of shape [B, S] = [2, 4], got [2, 3]"),
        ("visibility", lambda x: x.repeat(2, 1)[:3], "must be of shape [B or 1, S] with B = 2, got B = 3"),
        ("in_prompt", lambda x: x[:, 1:], "must be of shape [B, V] = [2, 9], got [2, 8]"),
        ("counts", lambda x: x.float(), "must be int32 or int64, got torch.float32"),
        ("bias", lambda x: x[:1], "must be of shape [B, V] = [2, 9], got [1, 9]"),
        ("repetition", lambda x: x[:1], "must be of shape [B] = [2], got [1]"),
        ("presence", lambda x: x[:1], "must be of shape [B] = [2], got [1]"),
        ("frequency", lambda x: x[:1], "must be of shape [B] = [2], got [1]"),
    ):
        place = names.index(name)
        bad = [change(x) if i == place else x for i, x in enumerate(good)]
        with pytest.raises(ValueError, match="^" + re.escape(f"apply_penalties: {name} {message}") + "$"):
            ops.apply_penalties(*bad)
    long = [x.float() if x.is_floating_point() else x for x in inputs(1, 64, 5, tree=False)]
    long = [torch.cat([x, x[:, :1]], 1).to(device) if i < 3 else x.to(device) for i, x in enumerate(long)]
    with pytest.raises(ValueError, match=r"^apply_penalties: logits must be of at most 64 slots, got 65$"):
        ops.apply_penalties(*long)
    empty = ops.apply_penalties(good[0][:0], good[1][:0], good[2][:0], *(x[:0] for x in good[3:]))
    assert empty.shape == (0, 4, 9)


def test_opcheck(device: torch.device) -> None:
    values = [x.to(device, torch.float32 if x.is_floating_point() else x.dtype) for x in inputs(2, 4, 9, tree=True)]
    torch.library.opcheck(torch.ops.pydflash.apply_penalties.default, tuple(values))
