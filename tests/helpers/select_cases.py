"""Arguments for path_select."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

Arguments = dict[str, Any]
FLOATS = ("logits", "hidden", "predecessor", "successor")


def select_case(
    batch: int,
    slots: int,
    vocab: int,
    top_k: int,
    rank: int = 0,
    dtype: torch.dtype = torch.float32,
    temperature: tuple[float, ...] | None = (0.0, 0.4, 1.0),
    values: str = "normal",
    seed: int = 0,
) -> Arguments:
    """Random arguments; rank 0 has no selector. `values` is "normal", "ties" or "broken" (NaN and infinities)."""
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(batch, slots, vocab, generator=generator)
    if values == "ties":
        logits = logits.round()
    elif values == "broken":
        choice = torch.rand(logits.shape, generator=generator)
        logits = logits.masked_fill(choice < 0.2, torch.nan).masked_fill(choice > 0.8, -torch.inf)
    heat = None
    if temperature is not None:
        heat = torch.tensor(temperature)[torch.randint(len(temperature), (batch,), generator=generator)]
    case: Arguments = {
        "logits": logits.to(dtype),
        "hidden": None,
        "predecessor": None,
        "successor": None,
        "anchors": torch.randint(vocab, (batch,), generator=generator),
        "temperature": heat,
        "seeds": torch.randint(-(2**62), 2**62, (batch,), generator=generator),
        "starts": torch.randint(0, 2**20, (batch,), generator=generator).int(),
        "top_k": top_k,
        "vocab_size": vocab,
    }
    if rank:
        case["hidden"] = torch.randn(batch, slots, rank, generator=generator).to(dtype)
        case["predecessor"] = (torch.randn(vocab, rank, generator=generator) / rank**0.5).to(dtype)
        case["successor"] = torch.randn(vocab, rank, generator=generator).to(dtype)
    return case


def on(case: Arguments, device: torch.device, double: bool = False) -> Arguments:
    moved = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in case.items()}
    if double:
        moved |= {name: moved[name].double() for name in FLOATS if moved[name] is not None}
    return moved
