"""Tiny drafters for the tiny targets of `tiny_models`, and the official package as an oracle beside them."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from tiny_models import TINY
from torch import Tensor, nn
from torch.nn import functional as F

from pydflash import Drafter, DrafterConfig, Speculator, Target

VOCAB, HIDDEN, TARGET_LAYERS, MASK = 97, 64, 6, 96
_TOP = ("is_causal", "is_neox_style", "draft_vocab_size")
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}
SLIDING = {"layer_types": ["sliding_attention", "sliding_attention"], "sliding_window": 9}
CONFIGS: dict[str, tuple[int, dict[str, Any]]] = {
    "v1": (1, {}),
    "v1-odd-block": (1, {"block_size": 7, "target_layer_ids": [0, 1, 3]}),
    "v1-one-slot-drafts": (1, {"block_size": 2}),
    "v1-causal": (1, {"is_causal": True, "target_layer_ids": [0, 1, 2, 3, 4]}),
    "v1-sliding": (1, SLIDING),
    "v1-mixed": (1, SLIDING | {"layer_types": ["sliding_attention", "full_attention"], "block_size": 5}),
    "v1-scales": (1, {"input_embedding_scale": 3.0, "output_multiplier": 0.25, "final_logit_softcapping": 5.0}),
    "v1-bias-yarn": (1, {"attention_bias": True, "rope_parameters": YARN}),
    "v2": (2, {}),
    "v2-sliding-bidirectional": (2, SLIDING | {"is_causal": False, "block_size": 8}),
    "v2-causal": (2, {"is_causal": True, "block_size": 5}),
    "v2-taps-3": (2, {"conv_kernel_size": 3, "conv_group_size": 8, "block_size": 6, "target_layer_ids": [0, 1, 2]}),
    "v2-scales": (2, {"output_multiplier": 0.5, "final_logit_softcapping": 4.0, "selector_top_k": 16}),
}


def config_dict(version: int, **changes: Any) -> dict[str, Any]:
    """A Z-Lab config of a 2-layer drafter; keys of `dflash_config` may be among the changes."""
    raw: dict[str, Any] = {
        "architectures": ["DFlashDraftModel" if version == 1 else "DFlash2DraftModel"],
        "model_type": "qwen3",
        "hidden_size": HIDDEN,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "vocab_size": VOCAB,
        "max_position_embeddings": 512,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "layer_types": ["full_attention", "full_attention"],
        "sliding_window": None,
        "num_target_layers": TARGET_LAYERS,
    }
    nested: dict[str, Any] = {"block_size": 4, "mask_token_id": MASK, "target_layer_ids": [0, 2]}
    if version == 2:
        nested |= {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 8, "selector_top_k": 4}
    for name, value in changes.items():
        (raw if name in raw or name in _TOP else nested)[name] = value
    raw["use_sliding_window"] = raw["sliding_window"] is not None  # else transformers drops the window
    return raw | {"dflash_config": nested}


def build_drafter(version: int, seed: int = 0, **changes: Any) -> Drafter:
    """A drafter with random weights in every tensor, convolutions and selector included."""
    drafter = Drafter(DrafterConfig.from_dict(config_dict(version, **changes)))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in name:
                parameter.copy_(1 + 0.2 * noise)
            elif "base_kernel" in name:
                parameter.copy_(parameter + 0.3 * noise)
            else:
                parameter.copy_(noise * (0.5 if "codebook" in name else 0.15))
    return drafter.eval()


def official_drafter(drafter: Drafter, **changes: Any) -> nn.Module:
    """The same drafter as a module of the official package; skips where that is not installed."""
    official = pytest.importorskip("dflash.model", reason="the official dflash package is not installed")
    from transformers import Qwen3Config

    raw = config_dict(drafter.config.version, **changes)
    if not hasattr(Qwen3Config(), "rope_parameters"):
        raw |= {"rope_theta": raw["rope_parameters"]["rope_theta"], "rope_scaling": None}
        if raw["rope_parameters"]["rope_type"] != "default":
            pytest.skip("this transformers spells scaled RoPE differently")
    config = Qwen3Config(**raw)
    kind = official.DFlashDraftModel if drafter.config.version == 1 else official.DFlash2DraftModel
    model = kind(config)
    state = drafter.canonical()
    for name in ("predecessor_codebook", "successor_codebook"):
        if (tensor := state.pop(f"candidate_selector.{name}", None)) is not None:
            state[f"candidate_selector.{name}.weight"] = tensor
    model.load_state_dict(state)
    return model.eval()


class Scripted:
    """A drafter that knows, or gets wrong, what comes next: drafts from a list, by the anchor's position."""

    def __init__(self, text: list[int], block_size: int, vocab_size: int = VOCAB, wrong: bool = False) -> None:
        self.config = copy.copy(DrafterConfig.from_dict(config_dict(1, block_size=block_size)))
        self.text, self.vocab_size, self.wrong = text, vocab_size, wrong

    def new_cache(self, batch: int, capacity: int) -> dict[str, int]:
        return {"length": 0}

    def append_context(self, features: Tensor, cache: dict[str, int], counts: Tensor | None = None) -> None:
        cache["length"] += features.shape[1]

    def propose(self, anchors: Tensor, cache: dict[str, int], **options: Any) -> Any:
        from pydflash.protocols import Proposal

        at, size = cache["length"], options["block_size"]
        known = (self.text + [0] * size)[at + 1 : at + size]
        tokens = torch.tensor([[(t + 1) % self.vocab_size if self.wrong else t for t in known]])
        return Proposal(tokens, tokens[..., None], None, torch.zeros(1, size - 1, 1))


def fitted_prompts() -> Tensor:
    """The prompts [6, 5] that `fit` learns to continue."""
    return torch.randint(0, VOCAB - 1, (6, 5), generator=torch.Generator().manual_seed(0))


def fit(drafter: Drafter, model: nn.Module, steps: int = 120) -> Drafter:
    """Teach the drafter the target's greedy text for a few seconds, so that rounds accept drafts at every depth."""
    config, size = drafter.config, drafter.config.block_size
    torch.manual_seed(0)
    prompts = fitted_prompts()
    texts = [Speculator(model, None).generate(p, 60, temperature=0.0).token_ids for p in prompts]
    ids = torch.cat([prompts, torch.tensor(texts)], 1)
    target = Target(model, config.target_layer_ids)
    with torch.no_grad():
        features = torch.cat([target.prefill(row[None], target.new_cache(1, 65)).features for row in ids])
    drafter.reserve(ids.shape[1] + size)
    optimizer = torch.optim.AdamW(drafter.train().parameters(), 4e-3)
    slots = torch.arange(size)

    def loss_of(row: Tensor, anchors: Tensor) -> Tensor:
        length, positions = ids.shape[1], anchors[:, None] + slots
        k_context, v_context = drafter.context_keys(drafter.fuse(features[row]), torch.arange(length)[None])

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            near = config.window(layer) or length + size
            seen_context = torch.arange(length) < anchors[:, None, None]
            seen_context = seen_context & (positions[..., None] - torch.arange(length) < near)
            seen_block = (slots <= slots[:, None]) | (not config.causal[layer])
            seen_block = (seen_block & ((slots - slots[:, None]).abs() < near)).expand(len(anchors), -1, -1)
            keys = torch.cat([k_context[layer].expand(len(anchors), -1, -1, -1), k], 2)
            values = torch.cat([v_context[layer].expand(len(anchors), -1, -1, -1), v], 2)
            mask = torch.cat([seen_context, seen_block], -1)[:, None]
            return F.scaled_dot_product_attention(q, keys, values, mask, enable_gqa=True)

        block = torch.full(positions.shape, config.mask_token_id)
        block[:, 0] = ids[row, anchors]
        hidden = drafter(drafter.embed(block, target.embed_weight), positions, attend)[:, 1:]
        scores = drafter.logits(hidden, target.head)
        if (selector := drafter.candidate_selector) is not None:
            before = selector.predecessor_codebook[ids[row, positions[:, :-1]]]
            scores = scores + (before * selector.hidden_projection(hidden)) @ selector.successor_codebook.T
        return F.cross_entropy(scores.flatten(0, 1), ids[row, positions[:, 1:]].flatten())

    for _ in range(steps):
        loss = loss_of(torch.randint(0, len(ids), (1,)), torch.randint(4, ids.shape[1] - size, (24,)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return drafter.eval()


@functools.cache
def fitted(version: int, block_size: int = 4, steps: int = 60) -> tuple[Any, Drafter]:
    """A tiny model and a drafter that learned its text; shared by all tests, so copy them before a change."""
    model = TINY["qwen3"](num_hidden_layers=TARGET_LAYERS)
    return model, fit(build_drafter(version, block_size=block_size), model, steps)


def unbounded(drafter: Drafter, batch: int, capacity: int) -> Any:
    from pydflash.decoder.stores import KVCache

    drafter.reserve(capacity)
    config = drafter.config
    return KVCache(
        config.num_layers, batch, config.num_kv_heads, config.head_dim, capacity,
        dtype=drafter.dtype, device=drafter.device,
    )  # fmt: skip
