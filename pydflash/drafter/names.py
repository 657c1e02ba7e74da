"""The names of a drafter's tensors: ours, and the unfused ones of the Z-Lab layout."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from ..checkpoints.config import DrafterConfig
from .layers import DrafterLayer

FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
_PARENT = {"qkv_proj": "self_attn", "o_proj": "self_attn", "q_norm": "self_attn", "k_norm": "self_attn"}
_PARENT |= {"gate_up_proj": "mlp", "down_proj": "mlp"}
_OWN = ("embed_tokens.weight", "lm_head.weight")


class CanonicalNames(nn.Module):
    """Loading and giving tensors under the names of the Z-Lab layout, for a module with a drafter's parts."""

    config: DrafterConfig
    layers: nn.ModuleList
    embed_tokens: nn.Embedding | None
    lm_head: nn.Linear | None

    @property
    def stack(self) -> list[DrafterLayer]:
        """The decoder layers, typed."""
        return [cast("DrafterLayer", layer) for layer in self.layers]

    def load_canonical(self, tensors: dict[str, Tensor]) -> None:
        """Take over tensors under the names of the Z-Lab layout; they are not copied where they need no fusing."""
        config, state = self.config, dict(tensors)
        own = {name: state.pop(name) for name in _OWN if name in state}
        if (table := own.get("embed_tokens.weight")) is not None:
            self.embed_tokens = nn.Embedding(table.shape[0], table.shape[1], device="meta")
        if (head := own.get("lm_head.weight")) is not None:
            self.lm_head = nn.Linear(config.hidden_size, head.shape[0], bias=False, device="meta")
        for name in ("d2t", "mask_embedding"):
            self.register_buffer(name, state.pop(name, None))
        fused = {ours: _gather(theirs, state) for ours, theirs in _names(self)}
        extra = dict(own)
        extra |= {name: buffer for name, buffer in self.named_buffers(recurse=False) if buffer is not None}
        self.load_state_dict(fused | extra, strict=True, assign=True)

    def canonical(self) -> dict[str, Tensor]:
        """All tensors under the names of the Z-Lab layout; the inverse of `load_canonical`."""
        config, state = self.config, self.state_dict()
        sizes = {
            "qkv_proj": [n * config.head_dim for n in self.stack[0].sizes],
            "gate_up_proj": [config.intermediate_size] * 2,
        }
        out = {}
        for ours, theirs in _names(self):
            tensor = state.pop(ours)
            if len(theirs) == 1:
                out[theirs[0]] = tensor
            else:
                parts = tensor.split(sizes[ours.rsplit(".", 2)[-2]])
                out |= {name: part.contiguous() for name, part in zip(theirs, parts, strict=True)}
        return out | state


def _names(drafter: nn.Module) -> list[tuple[str, tuple[str, ...]]]:
    """Our parameter names, each with the Z-Lab names of what is fused into it."""
    pairs: list[tuple[str, tuple[str, ...]]] = []
    for ours, _ in drafter.named_parameters():
        parts = ours.split(".")
        if parts[0] in ("embed_tokens", "lm_head"):
            continue
        if parts[0] != "layers":
            pairs.append((ours, (ours,)))
            continue
        module = parts[2]
        where = [*parts[:2], _PARENT[module]] if module in _PARENT else parts[:2]
        pairs.append((ours, tuple(".".join([*where, name, *parts[3:]]) for name in FUSED.get(module, (module,)))))
    return pairs


def _gather(names: tuple[str, ...], state: dict[str, Tensor]) -> Tensor:
    parts = [state[name] for name in names]
    return parts[0] if len(parts) == 1 else torch.cat(parts)
