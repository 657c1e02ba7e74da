"""What the graphs of drafter and target share: norms, products, heads, MLP, rotation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from .linear import Linears, Table
from .opset import Array, GraphBuilder


@dataclass(frozen=True)
class Weights:
    """Where the numbers come from.

    load: A tensor under its name, in float32.
    names: The tensors there are.
    embed, head: The tables; `embed` None where rows come from outside.
    frequencies, rope_factor: Inverse frequencies [head_dim / 2] in float64 and the factor on cos and sin.
    """

    load: Callable[[str], Array]
    names: frozenset[str]
    embed: Table | None
    head: Table
    frequencies: Array
    rope_factor: float


class LayerGraph:
    """Adds the parts of pre-norm decoder layers to a graph; `name` is a layer's prefix in the checkpoint.

    sizes: Anything with hidden_size, intermediate_size, num_heads, num_kv_heads, head_dim, rms_norm_eps and
        rope_interleaved.
    """

    def __init__(self, g: GraphBuilder, sizes: Any, weights: Weights, linears: Linears) -> None:
        self.g, self.sizes, self.weights, self.linears = g, sizes, weights, linears
        self.dtype = linears.dtype

    def range(self, count: Any) -> Any:
        """0, 1, ... below `count` [1]."""
        return self.g.Range(self.g.constant(np.int64(0)), self.g.Squeeze(count, [0]), self.g.constant(np.int64(1)))

    def norm(self, x: Any, name: str, size: int) -> Any:
        weight = self.g.weight(name, self.dtype, (size,), partial(self.weights.load, name))
        return self.g.RMSNormalization(x, weight, axis=-1, epsilon=self.sizes.rms_norm_eps)

    def linear(self, x: Any, name: str, parts: list[str], outputs: int, inputs: int, exact: bool = False) -> Any:
        """A product with the rows of several weights, and their biases where there are some."""
        load = self.weights.load
        y = self.linears.linear(x, name, outputs, inputs, lambda: np.concatenate([load(p) for p in parts]), exact)
        biases = [part.removesuffix("weight") + "bias" for part in parts]
        if not set(biases) <= self.weights.names:
            return y
        bias = self.g.weight(f"{name}.bias", self.dtype, (outputs,), lambda: np.concatenate([load(b) for b in biases]))
        return self.g.Add(y, bias)

    def rotate(self, x: Any, tables: tuple[Any, Any]) -> Any:
        return self.g.RotaryEmbedding(x, *tables, interleaved=int(self.sizes.rope_interleaved))

    def heads(self, u: Any, name: str, tables: tuple[Any, Any]) -> tuple[Any, Any, Any]:
        """q, k and v [B, h, S, D] of rows [B, S, H]; q and k with their norms, where there are some, and rotated."""
        g, sizes = self.g, self.sizes
        heads, kv_heads, dim = sizes.num_heads, sizes.num_kv_heads, sizes.head_dim
        widths = [heads * dim, kv_heads * dim, kv_heads * dim]
        parts = [f"{name}.self_attn.{p}_proj.weight" for p in "qkv"]
        qkv = self.linear(u, f"{name}.qkv_proj", parts, sum(widths), sizes.hidden_size)
        found = []
        for t, part, count in zip(
            g.Split(qkv, widths, axis=-1, outputs=3), "qkv", (heads, kv_heads, kv_heads), strict=True
        ):
            t = g.Reshape(t, [0, 0, count, dim])
            if (norm := f"{name}.self_attn.{part}_norm.weight") in self.weights.names:
                t = self.norm(t, norm, dim)
            t = g.Transpose(t, perm=[0, 2, 1, 3])
            found.append(t if part == "v" else self.rotate(t, tables))
        return found[0], found[1], found[2]

    def attention_output(self, attended: Any, name: str) -> Any:
        """Rows [B, S, H] of attention's output [B, h, S, D]."""
        width = self.sizes.num_heads * self.sizes.head_dim
        y = self.g.Reshape(self.g.Transpose(attended, perm=[0, 2, 1, 3]), [0, 0, width])
        return self.linear(y, f"{name}.o_proj", [f"{name}.self_attn.o_proj.weight"], self.sizes.hidden_size, width)

    def mlp(self, u: Any, name: str) -> Any:
        g, hidden, inner = self.g, self.sizes.hidden_size, self.sizes.intermediate_size
        parts = [f"{name}.mlp.{p}_proj.weight" for p in ("gate", "up")]
        both = self.linear(u, f"{name}.gate_up_proj", parts, 2 * inner, hidden)
        gate, up = g.Split(both, axis=-1, num_outputs=2, outputs=2)
        y = g.Mul(g.Mul(gate, g.Sigmoid(gate)), up)
        return self.linear(y, f"{name}.down_proj", [f"{name}.mlp.down_proj.weight"], hidden, inner)
