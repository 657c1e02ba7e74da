"""Inputs for the tests of path_select and reject_sample, and the instruction-set levels to run them at."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck
from torch import Tensor

from pydflash.ops import backends

LEVELS = ("base", "avx2", "avx512")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FIXTURES = [HealthCheck.function_scoped_fixture]  # a device does not change between examples


@contextlib.contextmanager
def instruction_level(name: str, device: torch.device) -> Iterator[None]:
    """Runs the CPU kernels at one level; other devices have only one. Skips where the machine lacks it."""
    module = backends.load("cpu").module
    if backends.name_for(device.type) != "cpu" or module is None:
        if name != LEVELS[0]:
            pytest.skip(f"{device.type} has no instruction-set levels")
        yield
        return
    before = module.description()
    try:
        module.select_level(name)
    except ValueError as error:
        pytest.skip(str(error))
    try:
        yield
    finally:
        module.select_level(before)


def filters(batch: int, vocab: int, generator: torch.Generator) -> dict[str, Tensor]:
    """A temperature, top-k, top-p and min-p for each row, each often switched off, some rows greedy."""

    def pick(*values: float) -> Tensor:
        return torch.tensor(values)[torch.randint(len(values), (batch,), generator=generator)]

    return {
        "temperature": pick(0.0, 0.3, 1.0, 1.0, 1.7),
        "top_k": pick(0, 0, 1, 2, 7, vocab // 2, vocab, vocab + 1).int(),
        "top_p": pick(1.0, 1.0, 0.95, 0.5, 0.1),
        "min_p": pick(0.0, 0.0, 0.05, 0.5),
    }


def far_rows(device: torch.device, vocab: int) -> Tensor:
    """bfloat16 zeros [1, 2, vocab] whose second row lies beyond 32 bits; on a CPU only pages that are touched exist."""
    stride = 2**31 + 8
    if device.type == "cuda" and torch.cuda.mem_get_info(device)[0] < 4 * stride:
        pytest.skip("too little memory on the device")
    base = torch.empty(stride + vocab, dtype=torch.bfloat16, device=device)
    return base.as_strided((1, 2, vocab), (0, stride, 1)).fill_(0)


@dataclass
class RejectCase:
    """Arguments of one reject_sample call."""

    logits: Tensor
    tokens: Tensor
    options: dict[str, Any]

    def row(self, row: int) -> RejectCase:
        """The arguments of one row alone."""
        one = slice(row, row + 1)
        options = {
            name: tuple(t[one] for t in value) if isinstance(value, tuple) else value[one]
            for name, value in self.options.items()
        }
        return RejectCase(self.logits[one], self.tokens[one], options)

    def on(self, device: torch.device) -> RejectCase:
        def moved(value: Any) -> Any:
            return tuple(moved(v) for v in value) if isinstance(value, tuple) else value.to(device)

        options = {name: moved(v) if isinstance(v, tuple | Tensor) else v for name, v in self.options.items()}
        return RejectCase(self.logits.to(device), self.tokens.to(device), options)

    def run(self, op: Any, device: torch.device, double: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        """The results of `op` (of ops or reference) on the CPU; in float64 if `double`."""
        case = self.on(device)
        index, accepted, bonus = op(case.logits.double() if double else case.logits, case.tokens, **case.options)
        return index.cpu(), accepted.cpu(), bonus.cpu()


def reject_case(
    batch: int,
    slots: int,
    vocab: int,
    proposal: str,
    dtype: torch.dtype = torch.float32,
    values: str = "normal",
    seed: int = 0,
) -> RejectCase:
    """Random rows and drafts that often agree with them.

    `proposal`: "none", "tree", "dense" or "sparse". `values`: "normal", "ties" (few distinct logits), "equal" (all the
    same) or "broken" (NaN and infinities among them).
    """
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(batch, slots, vocab, generator=generator)
    if values == "ties":
        logits = logits.round()
    elif values == "equal":
        logits = torch.zeros_like(logits)
    elif values == "broken":
        choice = torch.rand(logits.shape, generator=generator)
        logits = logits.masked_fill(choice < 0.2, torch.nan).masked_fill(choice > 0.7, -torch.inf)
        logits = logits.masked_fill((choice > 0.69) & (choice < 0.7), torch.inf)
    logits = logits.to(dtype)
    finite = logits.float().nan_to_num(-1e9, 1e9, -1e9)

    options: dict[str, Any] = filters(batch, vocab, generator)
    options["seeds"] = torch.randint(-(2**62), 2**62, (batch,), generator=generator)
    options["starts"] = torch.randint(0, 2**20, (batch,), generator=generator).int()
    source = torch.arange(slots) - 1  # the slot whose row predicts a draft
    if proposal == "tree":
        parents = (torch.rand(batch, slots, generator=generator) * torch.arange(slots)).long()
        options["parents"] = parents.int()
        best = finite.gather(1, parents[..., None].expand(-1, -1, vocab)).topk(min(vocab, 2), -1).indices
    else:
        best = finite[:, source.clamp_min(0)].topk(min(vocab, 2), -1).indices
    rank = torch.randint(best.shape[-1], (batch, slots, 1), generator=generator)
    tokens = best.gather(-1, rank).squeeze(-1)
    stray = torch.rand(batch, slots, generator=generator)
    tokens = tokens.masked_fill(stray < 0.1, -1).masked_fill(stray > 0.95, vocab)

    noisy = finite[:, :-1].clamp(-20, 20) + torch.randn(batch, slots - 1, vocab, generator=generator)
    if proposal == "dense":
        probs = noisy.softmax(-1)
        options["draft_probs"] = probs.masked_fill(torch.rand(probs.shape, generator=generator) < 0.02, torch.nan)
    elif proposal == "sparse":
        top = noisy.topk(min(vocab, 8), -1)
        ids = top.indices.masked_fill(torch.rand(top.indices.shape, generator=generator) < 0.05, -1)
        options["draft_probs"] = (ids, top.values.softmax(-1))
    return RejectCase(logits, tokens, options)
