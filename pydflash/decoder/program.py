"""A decoder with packed weights as one call of compiled code: on a CPU a call from Python costs as much as a kernel."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..ops import backends
from ..ops.native import capsule
from .formats import Packed
from .stores import KVCache

if TYPE_CHECKING:
    from .stack import Block, Convolution, Decoder, Norm, Projection


class Program:
    """A decoder's layers, held by compiled code; the weights must not move while it lives."""

    def __init__(self, decoder: Decoder, module: Any) -> None:
        """Raises: ValueError where sizes or dtypes do not fit."""
        self._held: list[Any] = [decoder.final_norm]  # what the compiled side has the addresses of
        layers = [
            (
                self._capsule(layer.input_norm),
                self._capsule(layer.q_norm),
                self._capsule(layer.k_norm),
                self._capsule(layer.post_norm),
                *(self._linear(p) for p in (layer.qkv, layer.output, layer.gate_up, layer.down)),
                layer.window,
                layer.causal,
                self._convolution(layer.attention_conv),
                self._convolution(layer.mlp_conv),
            )
            for layer in decoder.layers
        ]
        self._native = module.Decoder(
            capsule(decoder.final_norm),
            (decoder.num_heads, decoder.num_kv_heads, decoder.head_dim, decoder.rotary_dim),
            decoder.interleaved,
            decoder.scale,
            _norm(decoder.norm),
            _norm(decoder.head_norm),
            layers,
        )

    @staticmethod
    def of(decoder: Decoder) -> Program | None:
        """None where a layer is not packed, or where there is no compiled code."""
        linears = [p for x in decoder.layers for p in (x.qkv, x.output, x.gate_up, x.down)]
        linears += [c.deltas for x in decoder.layers for c in (x.attention_conv, x.mlp_conv) if c is not None]
        module = backends.load("cpu").module
        packed = all(p.packed is not None for p in linears)
        return Program(decoder, module) if packed and module is not None else None

    def __deepcopy__(self, memo: object) -> Program:
        return self  # never changes

    def __reduce__(self) -> tuple[Any, ...]:
        return _absent, ()  # addresses cannot be pickled; the next request packs anew

    def __call__(
        self, x: Tensor, cache: KVCache, tables: tuple[Tensor, Tensor], block: Block, taps: Collection[int]
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """As `Decoder`, of a contiguous x."""
        layers = list(taps)
        out, taken = torch.empty_like(x), x.new_empty(len(layers), *x.shape)
        self._native.forward(
            capsule(x),
            capsule(out),
            *(capsule(t) for t in (cache.k, cache.v, cache.lengths, *tables, block.depths, block.visibility)),
            capsule(block.causal),
            capsule(block.k),
            capsule(block.v),
            layers,
            capsule(taken),
        )
        return out, dict(zip(layers, taken, strict=True))

    def _capsule(self, tensor: Tensor | None) -> object:
        self._held.append(tensor)
        return capsule(tensor)

    def _linear(self, projection: Projection) -> tuple[Any, ...]:
        packed: Packed | None = projection.packed
        if packed is None:
            raise ValueError("Program: layers must be packed, got one that is not")
        self._held.append(packed)
        return packed.parts()

    def _convolution(self, conv: Convolution | None) -> tuple[Any, ...] | None:
        if conv is None:
            return None
        return self._capsule(conv.before), self._capsule(conv.after), self._linear(conv.deltas)


def _absent() -> None:
    return None


def _norm(norm: Norm) -> tuple[float, float, bool]:
    return norm.eps, norm.weight_offset, norm.round_first
