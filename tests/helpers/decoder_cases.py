"""Drafters of every kind of layer, fused and as a module, with caches filled raggedly."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from pairs import HIDDEN, build_drafter
from torch import Tensor

from pydflash import Drafter
from pydflash.decoder.stores import KVCache
from pydflash.drafter.decoder import decoder_of

WINDOWS: dict[str, Any] = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 6}
KINDS: dict[str, tuple[int, dict[str, Any]]] = {
    "dflash": (1, {}),
    "dflash 2": (2, {}),
    "causal": (1, {"is_causal": True}),
    "bias": (2, {"attention_bias": True}),
    "all windows": (2, WINDOWS | {"is_causal": False}),
    "causal windows": (1, WINDOWS | {"is_causal": True}),
    "one window": (1, WINDOWS | {"layer_types": ["full_attention", "sliding_attention"]}),
    "three taps": (2, {"conv_kernel_size": 3, "conv_group_size": 8}),
    "other heads": (2, {"head_dim": 24, "num_attention_heads": 6, "num_key_value_heads": 2}),
    "yarn": (1, {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}}),
}


def both(version: int, device: torch.device, dtype: torch.dtype = torch.float32, **changes: Any) -> list[Drafter]:
    """One drafter that runs its layers fused and one that runs them as a module, over the same weights."""
    interleaved = changes.pop("rope_interleaved", False)
    drafter = build_drafter(version, block_size=8, **changes)
    if interleaved:
        drafter.config = copy.copy(drafter.config)
        object.__setattr__(drafter.config, "rope_interleaved", True)
        drafter._rotary.interleaved = True
    drafter = drafter.to(device, dtype)
    if changes.get("attention_bias"):
        with torch.no_grad():
            for layer in drafter.stack:
                layer.o_proj.bias.normal_(generator=torch.Generator(device).manual_seed(1))
    fused, module = copy.copy(drafter), copy.copy(drafter)
    module.backend = "reference"
    assert module.decoder() is None
    if device.type == "cpu":  # where the fused ops are no gain, and drafters leave them aside
        made = decoder_of(drafter.config, drafter.stack, drafter.norm.weight, drafter.fc)
        object.__setattr__(fused, "decoder", lambda: made)
    return [fused, module]


def features_of(drafter: Drafter, batch: int, rows: int, seed: int) -> Tensor:
    made = torch.randn(batch, rows, 2 * HIDDEN, generator=torch.Generator().manual_seed(seed))
    return made.to(drafter.device, drafter.dtype)


def stored(cache: KVCache) -> list[Tensor]:
    """Keys and values of each row's positions that are still held."""
    kept = []
    for b, length in enumerate(cache.lengths.tolist()):
        rows = [s % cache.rows for s in range(max(0, length - cache.rows), length)]
        kept += [cache.k[:, b, :, rows], cache.v[:, b, :, rows]]
    return kept


def appended(drafter: Drafter, counts: Sequence[Sequence[int] | None], rows: int = 5) -> KVCache:
    """A cache of three rows after `rows` features each time, of which so many count."""
    cache = drafter.new_cache(3, 64)
    with torch.inference_mode():
        for seed, valid in enumerate(counts):
            given = None if valid is None else torch.tensor(valid, device=drafter.device)
            drafter.append_context(features_of(drafter, 3, rows, seed), cache, given)
    return cache


RAGGED = ([5, 3, 0], [1, 0, 5], None, [0, 0, 0], [4, 5, 2])
