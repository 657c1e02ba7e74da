"""Tiny targets of each family, built once, and the greedy texts that their own `generate` gives."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import tiny_models
import torch
import transformers
from tiny_models import TINY, VOCAB

from pydflash.target.generic import Target

NEW_TOKENS = 40
# transformers 4 keeps these families' state in caches of their own, which cannot be continued over several tokens.
RECURRENT = ("qwen3_next", "qwen3_5", "qwen3_5_nested", "qwen3_5_moe", "lfm2", "mamba2", "bamba", "falcon_h1")
EXACT_RECURRENT = hasattr(transformers.cache_utils, "LinearAttentionCacheLayerMixin")


@functools.cache
def model_of(name: str, attention: str | None = None) -> Any:
    try:
        return TINY[name](attention=attention)
    except tiny_models.MissingFamily as missing:
        pytest.skip(str(missing))


@functools.cache
def target_of(name: str, attention: str | None = None, layer_ids: tuple[int, ...] = (2, 0)) -> Target:
    model = model_of(name, attention)
    if name in RECURRENT and not EXACT_RECURRENT:
        with pytest.raises(ValueError, match=f"Target: {type(model).__name__} must ") as refusal:
            Target(model, layer_ids)
        pytest.skip(str(refusal.value))
    return Target(model, layer_ids)


def prompt_of(length: int) -> torch.Tensor:
    return torch.randint(0, VOCAB, (1, length), generator=torch.Generator().manual_seed(length))


@functools.cache
def greedy(name: str, attention: str | None, length: int, count: int = NEW_TOKENS) -> list[int]:
    """The model's own text."""
    ids = prompt_of(length)
    out = model_of(name, attention).generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False
    )
    assert out.shape[1] == length + count
    return out[0, length:].tolist()


def chain(kept: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    index = torch.tensor([[*range(kept), *[-1] * (size - kept)]], dtype=torch.int32)
    return index, torch.tensor([kept - 1], dtype=torch.int32)
