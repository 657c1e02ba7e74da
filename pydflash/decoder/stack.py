"""A stack of pre-norm decoder layers in few launches: what the drafter and most targets have in common.

It reads its keys and values from a cache of committed positions and puts the block's own into buffers beside it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .. import ops
from .adjacent import joined
from .formats import PACKED_DTYPES, Packed, pack
from .program import Program
from .stores import KVCache


@dataclass(frozen=True, slots=True)
class Projection:
    """One to three weights [N_i, K] that read the same input, with a bias or None each.

    Weights that follow each other in memory are one product; see `pydflash.decoder.adjacent`.
    """

    weights: tuple[Tensor, ...]
    biases: tuple[Tensor | None, ...]
    gated: bool = False  # silu(first) * second
    packed: Packed | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """x [M, K] to [M, sum of N_i], or to [M, N_0] where gated."""
        if self.packed is not None:
            out = self.packed(x)
            return ops.swiglu(out) if self.gated else out
        if ops.takes_skinny(x, self.weights):
            return ops.skinny_linear(x, self.weights, self.biases, self.gated)
        if (one := self._joined()) is not None:
            out = F.linear(x, *one)
            return ops.swiglu(out) if self.gated else out
        parts = [F.linear(x, weight, bias) for weight, bias in zip(self.weights, self.biases, strict=True)]
        return F.silu(parts[0]) * parts[1] if self.gated else torch.cat(parts, -1)

    def pack(self, kind: type[Packed]) -> Projection:
        """The same with a packed copy of its weights, as one."""
        return replace(self, packed=pack(kind, self.weights, self.biases))

    def _joined(self) -> tuple[Tensor, Tensor | None] | None:
        """The weights as one [sum of N_i, K], and the biases, where they lie in memory that way."""
        weight = joined(self.weights)
        if weight is None or all(bias is None for bias in self.biases):
            return None if weight is None else (weight, None)
        held = [bias for bias in self.biases if bias is not None]
        bias = joined(held) if len(held) == len(self.weights) else None
        return None if bias is None else (weight, bias)


@dataclass(frozen=True, slots=True)
class Convolution:
    """The two block convolutions around a sublayer: bases [T, H] before and after it, and what makes their deltas."""

    before: Tensor
    after: Tensor
    deltas: Projection


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer. window: 0 where it sees everything; causal: whether its slots see earlier slots only."""

    input_norm: Tensor
    qkv: Projection
    q_norm: Tensor | None
    k_norm: Tensor | None
    output: Projection
    post_norm: Tensor
    gate_up: Projection
    down: Projection
    window: int = 0
    causal: bool = False
    attention_conv: Convolution | None = None
    mlp_conv: Convolution | None = None

    def pack(self, kind: type[Packed]) -> LayerWeights:
        """The same with packed copies of its weights; those of the convolutions, which are small, as they are."""
        names = ("qkv", "output", "gate_up", "down")
        held: dict[str, Any] = {name: getattr(self, name).pack(kind) for name in names}
        exact = Packed if self.input_norm.dtype in PACKED_DTYPES else kind
        for name in ("attention_conv", "mlp_conv"):
            if (conv := getattr(self, name)) is not None:
                held[name] = replace(conv, deltas=conv.deltas.pack(exact))
        return replace(self, **held)


@dataclass(frozen=True, slots=True)
class Norm:
    """How a family computes RMSNorm; see `ops.add_rms_norm`."""

    eps: float
    weight_offset: float = 0.0
    round_first: bool = True

    def __call__(self, x: Tensor, delta: Tensor | None, weight: Tensor) -> tuple[Tensor, Tensor]:
        """(norm of x + delta, x + delta), [M, H] each."""
        return ops.add_rms_norm(x, delta, weight, self.eps, self.weight_offset, self.round_first)


@dataclass(frozen=True, slots=True)
class Block:
    """Where a forward's slots stand, and what they see. visibility, depths: [B or 1, S] int64 and int32.

    causal: visibility of causal layers, where they differ. k, v: [layers, B, Hkv, S, D], written by the forward.
    """

    visibility: Tensor
    depths: Tensor
    k: Tensor
    v: Tensor
    causal: Tensor | None = None


def block_masks(size: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """depths, and the visibility of a bidirectional and of a causal block of `size` slots, [1, size] each."""
    depths = torch.arange(size, dtype=torch.int32, device=device)[None]
    bidirectional = torch.full((1, size), (1 << size) - 1 if size < 64 else -1, device=device)
    return depths, bidirectional, bidirectional if size == 1 else (2 << depths.long()) - 1


@dataclass(slots=True)
class Decoder:
    """Layers with their shapes.

    Attributes:
        rotary_dim: Rotated channels of each head.
        final_norm: [H].
        program: The same layers as one call, once they are packed.
    """

    layers: Sequence[LayerWeights]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    interleaved: bool
    scale: float
    norm: Norm
    head_norm: Norm
    final_norm: Tensor
    program: Program | None = None

    def pack(self, kind: type[Packed]) -> None:
        """Compute with packed copies of the large weights, as they are now."""
        self.layers = [layer.pack(kind) for layer in self.layers]
        self.program = Program.of(self)

    def __call__(
        self, x: Tensor, cache: KVCache, tables: tuple[Tensor, Tensor], block: Block, taps: Collection[int] = ()
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """Final-normed hidden states [B, S, H] of x [B, S, H], and the residual stream after each tapped layer.

        tables: cos and sin [positions, rotary_dim / 2] float32.
        """
        if self.program is not None:
            return self.program(x.contiguous(), cache, tables, block, taps)
        batch, slots, width = x.shape
        lengths = cache.lengths
        taken: dict[int, Tensor] = {}
        u, residual = self.norm(x.flatten(0, 1), None, self.layers[0].input_norm)
        for i, layer in enumerate(self.layers):
            u, after = _convolve(u, layer.attention_conv, slots)
            qkv = layer.qkv(u).unflatten(0, (batch, slots))
            q = self.heads(layer, qkv, tables, lengths, block.depths, block.k[i], block.v[i])
            seen = block.causal if layer.causal and block.causal is not None else block.visibility
            attended = ops.block_attention(
                q,
                cache.k[i],
                cache.v[i],
                block.k[i],
                block.v[i],
                lengths,
                seen,
                block.depths,
                layer.window,
                self.scale,
            )
            y = layer.output(attended.transpose(1, 2).reshape(batch * slots, -1))
            y = _finish(y, layer.attention_conv, after, slots)
            u, residual = self.norm(residual, y, layer.post_norm)
            u, after = _convolve(u, layer.mlp_conv, slots)
            y = layer.down(layer.gate_up(u))
            y = _finish(y, layer.mlp_conv, after, slots)
            last = i + 1 == len(self.layers)
            u, residual = self.norm(residual, y, self.final_norm if last else self.layers[i + 1].input_norm)
            if i in taps:
                taken[i] = residual.view(batch, slots, width)
        return u.view(batch, slots, width), taken

    def heads(
        self,
        layer: LayerWeights,
        qkv: Tensor,
        tables: tuple[Tensor, Tensor],
        lengths: Tensor,
        depths: Tensor,
        k: Tensor,
        v: Tensor,
    ) -> Tensor:
        """Queries [B, Hq, S, D] of a layer's projection [B, S, ...], normalised and rotated; k and v are written."""
        norm = self.head_norm
        return ops.head_norm_rope(
            qkv,
            layer.q_norm,
            layer.k_norm,
            norm.eps,
            *tables,
            lengths,
            depths,
            k,
            v,
            self.num_heads,
            self.rotary_dim,
            self.interleaved,
            norm.weight_offset,
            norm.round_first,
        )


def _convolve(u: Tensor, conv: Convolution | None, slots: int) -> tuple[Tensor, Tensor | None]:
    """The convolution before a sublayer, and the deltas of the one after it."""
    if conv is None:
        return u, None
    taps = conv.before.shape[0]
    deltas = conv.deltas(u).view(-1, slots, 2, taps, conv.deltas.weights[0].shape[0] // (2 * taps))
    return ops.block_conv(u.unflatten(0, (-1, slots)), conv.before, deltas[:, :, 0]).flatten(0, 1), deltas[:, :, 1]


def _finish(y: Tensor, conv: Convolution | None, deltas: Tensor | None, slots: int) -> Tensor:
    if conv is None or deltas is None:
        return y
    return ops.block_conv(y.unflatten(0, (-1, slots)), conv.after, deltas).flatten(0, 1)
