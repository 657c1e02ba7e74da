"""New drafters: sized for a target, warm-started from a DFlash one, or conditioned at the input as an ablation."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from ..checkpoints.config import DrafterConfig
from ..checkpoints.files import read_json, write_file
from ..decoder.stores import KVCache
from ..drafter.module import Drafter
from ..target.generic import Target

ABLATION_CONFIG, ABLATION_WEIGHTS = "input_conditioned.json", "input_conditioned.safetensors"


def drafter_config(
    target: Target,
    mask_token_id: int,
    *,
    version: int = 2,
    num_layers: int = 5,
    block_size: int = 8,
    intermediate_size: int | None = None,
    target_layer_ids: Sequence[int] | None = None,
    selector_rank: int = 64,
    selector_top_k: int = 16,
    conv_kernel_size: int = 2,
    conv_group_size: int = 16,
    window: int | None = None,
) -> DrafterConfig:
    """A drafter config that fits `target`: its width, heads, vocabulary and RoPE base, and evenly spread taps.

    Args:
        mask_token_id: A token id that the target never meets in text.
        intermediate_size: Default the target's.
        target_layer_ids: Default as many evenly spread layers as the drafter has.
        window: Sliding window of every layer, bidirectional inside the block; None attends to the whole context.

    Raises: ValueError where the numbers do not go together.
    """
    text = target.model.config.get_text_config(decoder=True)
    heads = text.num_attention_heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
    if target_layer_ids is None:
        target_layer_ids = spread_layers(target.num_layers, num_layers)
    rope = getattr(text, "rope_parameters", None) or {}
    theta = rope.get("rope_theta") or getattr(text, "rope_theta", None) or 10000.0
    second = version == 2
    return DrafterConfig(
        version=version,
        hidden_size=target.hidden_size,
        intermediate_size=intermediate_size or text.intermediate_size,
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=getattr(text, "num_key_value_heads", None) or heads,
        head_dim=head_dim,
        vocab_size=target.vocab_size,
        max_position_embeddings=target.max_length or 4096,
        rope={"rope_type": "default", "rope_theta": float(theta)},
        layer_types=("sliding_attention" if window else "full_attention",) * num_layers,
        sliding_window=window,
        causal=(False,) * num_layers,
        target_layer_ids=tuple(target_layer_ids),
        num_target_layers=target.num_layers,
        mask_token_id=mask_token_id,
        block_size=block_size,
        conv_kernel_size=conv_kernel_size if second else 0,
        conv_group_size=conv_group_size if second else 0,
        selector_rank=selector_rank if second else 0,
        selector_top_k=min(selector_top_k, target.vocab_size) if second else 0,
    )


def spread_layers(num_target_layers: int, count: int) -> tuple[int, ...]:
    """`count` layers from 1 to the fourth last, evenly: the rule of the published drafters."""
    if num_target_layers < count + 3:
        raise ValueError(
            f"training: --target-layer-ids must name the layers to tap: {count} evenly spread ones need a target of "
            f"{count + 3} layers or more, got {num_target_layers}"
        )
    if count == 1:
        return (num_target_layers // 2,)
    return tuple(round(1 + i * (num_target_layers - 4) / (count - 1)) for i in range(count))


def initialise(drafter: Drafter, seed: int = 0, std: float = 0.02) -> Drafter:
    """Draw the projections from N(0, std); norms stay 1, convolutions the identity, successors zero."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            projection = name.endswith("weight") and parameter.dim() == 2 and "kernel_projection" not in name
            if projection or name.endswith("predecessor_codebook"):
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)
    return drafter


_SAME_FORWARD = (
    "target_layer_ids",
    "mask_token_id",
    "rope",
    "layer_types",
    "sliding_window",
    "causal",
    "input_embedding_scale",
    "output_multiplier",
    "final_logit_softcapping",
)


def warm_start(drafter: Drafter, first: Drafter) -> Drafter:
    """Give a fresh DFlash 2 drafter the weights of a DFlash one; it then proposes what that one does.

    Raises: ValueError where the two backbones differ, or the settings that their forwards depend on.
    """
    for name in _SAME_FORWARD:
        ours, theirs = getattr(drafter.config, name), getattr(first.config, name)
        if ours != theirs:
            raise ValueError(f"warm_start: {name} must be that of the drafter to start from, {theirs!r}, got {ours!r}")
    here, there = drafter.state_dict(), first.state_dict()
    own = {n for n in here if "_conv." in n or n.startswith("candidate_selector.")}
    different = [n for n in here.keys() - own | there.keys() if n not in here or n not in there]
    different += [n for n in here.keys() & there.keys() if here[n].shape != there[n].shape]
    if different:
        raise ValueError(f"warm_start: the backbones must be equal, got different {sorted(different)[:4]}")
    drafter.load_state_dict(there, strict=False)
    return drafter


class NewestFeature(KVCache):
    """The context of an input-conditioned drafter: the fused feature [B, H] of the last committed position."""

    def __init__(self, drafter: Drafter, batch: int, capacity: int) -> None:
        super().__init__(1, batch, 1, 1, 1, dtype=drafter.dtype, device=drafter.device)
        self.capacity = capacity
        self.newest = torch.zeros(batch, drafter.config.hidden_size, device=drafter.device, dtype=drafter.dtype)


class InputConditionedDrafter(Drafter):
    """An ablation: target features enter at the block's input only, and no context is attended to.

    The feature of the last committed position is added to every slot's embedding. The published method feeds features
    as keys and values to every layer instead; this variant is here to be compared with it. Its files have names of
    their own, so that no loader takes it for a DFlash drafter.
    """

    @classmethod
    def from_pretrained(
        cls,
        path_or_id: str | Path,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        revision: str | None = None,
        backend: str = "native",
        **hub: Any,
    ) -> InputConditionedDrafter:
        """Load what `save_pretrained` wrote into a folder; there are none on the hub."""
        folder = Path(path_or_id)
        drafter = cls(
            DrafterConfig.from_dict(read_json(folder / ABLATION_CONFIG, "InputConditionedDrafter")), backend=backend
        )
        drafter.load_state_dict(load_file(folder / ABLATION_WEIGHTS))
        return drafter.to(device=device, dtype=dtype).eval()

    def save_pretrained(self, directory: str | Path, *, layout: str = "zlab") -> None:
        """Write input_conditioned.json and input_conditioned.safetensors, each in one step."""
        folder = Path(directory)
        folder.mkdir(parents=True, exist_ok=True)
        state = {name: tensor.detach().cpu().contiguous() for name, tensor in self.state_dict().items()}
        write_file(folder / ABLATION_WEIGHTS, lambda path: save_file(state, path))
        config = json.dumps(self.config.to_dict(layout), indent=2) + "\n"
        write_file(folder / ABLATION_CONFIG, lambda path: path.write_text(config))

    def new_cache(self, batch: int, capacity: int) -> KVCache:
        self.reserve(capacity + self.config.block_size)
        return NewestFeature(self, batch, capacity)

    def append_context(self, features: Tensor, cache: KVCache, counts: Tensor | None = None) -> None:
        count = torch.full_like(cache.lengths, features.shape[1]) if counts is None else counts
        rows = torch.arange(len(features), device=features.device)
        cast("NewestFeature", cache).newest = self.fuse(features[rows, count.long() - 1])
        cache.lengths += count.to(torch.int32)

    def hidden(self, anchors: Tensor, cache: KVCache, table: Tensor | nn.Module | None, block_size: int) -> Tensor:
        ids = torch.full((len(anchors), block_size), self.config.mask_token_id, device=anchors.device)
        ids[:, 0] = anchors
        positions = cache.lengths[:, None] + torch.arange(block_size, device=anchors.device)
        embeddings = self.embed(ids, table) + cast("NewestFeature", cache).newest[:, None]
        return self(embeddings, positions, block_only(block_size))


def block_only(block_size: int) -> Callable[[int, Tensor, Tensor, Tensor], Tensor]:
    """Bidirectional attention of each block's rows [B, h, A * S, D] over that block alone."""

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.unflatten(2, (-1, block_size)).transpose(1, 2) for x in (q, k, v))
        out = nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        return out.transpose(1, 2).flatten(2, 3)

    return attend
