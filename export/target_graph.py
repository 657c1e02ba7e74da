"""The graph of a target: a decoder with its cache in place, logits of chosen rows, features of tapped layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from pydflash.checkpoints.keys import MOST_LAYERS
from pydflash.checkpoints.rope import canonical_rope
from pydflash.checkpoints.values import MOST
from pydflash.messages import shown

from .layer_graph import LayerGraph, Weights
from .linear import Linears
from .opset import GraphBuilder
from .rope_graph import rotary_rows

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
OPSET = 24


@dataclass(frozen=True, kw_only=True)
class TargetSizes:
    """What of a target's config its graph is made of; layers are alike, with full attention."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope: dict[str, Any]
    rope_interleaved: bool = False

    @classmethod
    def from_config(cls, raw: Mapping[str, Any]) -> TargetSizes:
        """Read a config.json; ValueError, naming the key, for anything that the graph does not compute."""
        kind = raw.get("model_type")
        if kind not in FAMILIES:
            raise ValueError(f"export: the target's model_type must be one of {', '.join(FAMILIES)}, got {kind!r}")

        def number(name: str, default: int | None = None) -> int:
            value = raw.get(name) or default
            if type(value) is not int or not 1 <= value <= (MOST_LAYERS if name == "num_hidden_layers" else MOST):
                raise ValueError(f"export: the target's {name} must be a positive integer, got {shown(value)}")
            return value

        heads, hidden, layers = (number(n) for n in ("num_attention_heads", "hidden_size", "num_hidden_layers"))
        window = raw.get("sliding_window") if raw.get("use_sliding_window", kind == "mistral") else None
        types = set(raw.get("layer_types") or ["full_attention"])
        for name, got, wanted in (
            ("hidden_act", raw.get("hidden_act", "silu"), "silu"),
            ("sliding_window", window, None),
            ("layer_types", types, {"full_attention"}),
        ):
            if got != wanted:
                raise ValueError(f"export: the target's {name} must be {wanted!r}, got {got!r}")
        limit = number("max_position_embeddings")
        rope = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
        rope.setdefault("rope_theta", raw.get("rope_theta", 10000.0))
        return cls(
            hidden_size=hidden,
            intermediate_size=number("intermediate_size"),
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=number("num_key_value_heads", heads),
            head_dim=number("head_dim", hidden // heads),
            vocab_size=number("vocab_size"),
            max_position_embeddings=limit,
            rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
            rope=canonical_rope(rope, limit),
        )

    def expected(self, stored: frozenset[str]) -> set[str]:
        """Names of the tensors that the graph reads, biases and head norms as far as they are stored."""
        names = {"norm.weight"}
        for i in range(self.num_layers):
            layer = f"layers.{i}."
            names |= {f"{layer}{n}.weight" for n in ("input_layernorm", "post_attention_layernorm")}
            names |= {f"{layer}self_attn.{n}_proj.weight" for n in "qkvo"}
            names |= {f"{layer}mlp.{n}_proj.weight" for n in ("gate", "up", "down")}
            optional = {f"{layer}self_attn.{n}_norm.weight" for n in "qk"}
            optional |= {name.removesuffix("weight") + "bias" for name in names if "_proj." in name}
            names |= optional & stored
        return names

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def build_target_graph(
    sizes: TargetSizes,
    weights: Weights,
    layer_ids: tuple[int, ...],
    quantize: str | None,
    version: str,
    metadata: dict[str, str],
) -> ir.Model:
    """The model of one forward over a block, its weights to be made when it is written.

    Inputs: `input_ids` and `depths` [B, S], `past_len` [B], `rows` [N], int64; `visible` [B, S, S] bool: which slots
    of the block a slot sees, itself among them; `past.{i}.k` and `.v` [B, Hkv, MAX, D] float32.
    A slot's position is past_len + depth. Outputs: `logits` [B, N, V] of the slots `rows`; `features` [B, S, F * H];
    `present.{i}.k` and `.v`, the buffers that came in, the block's keys and values behind `past_len`.
    """
    g = GraphBuilder(OPSET)
    step = _Forward(g, sizes, weights, Linears(g, np.float32, quantize, rows_apart=True))
    step.build(layer_ids)
    return g.model("target", version, metadata)


class _Forward(LayerGraph):
    def build(self, layer_ids: tuple[int, ...]) -> None:
        g, sizes, hidden = self.g, self.sizes, self.sizes.hidden_size
        table = self.weights.embed
        assert table is not None
        ids = g.input("input_ids", np.int64, ["B", "S"])
        depths = g.input("depths", np.int64, ["B", "S"])
        past = g.input("past_len", np.int64, ["B"])
        rows = g.input("rows", np.int64, ["N"])
        visible = g.input("visible", np.bool_, ["B", "S", "S"])
        shape: list[int | str] = ["B", sizes.num_kv_heads, "MAX", sizes.head_dim]
        caches = [
            [g.input(f"past.{layer}.{name}", self.dtype, shape) for name in "kv"] for layer in range(sizes.num_layers)
        ]
        positions = g.Add(g.Unsqueeze(past, [1]), depths)
        tables = rotary_rows(g, positions, self.weights.frequencies, self.weights.rope_factor, self.dtype)
        mask = self._mask(past, visible, caches[0][0])
        x = self.linears.embedding(ids, table, hidden, table.name == self.weights.head.name)
        taken = {}
        for i, cache in enumerate(caches):
            name = f"layers.{i}"
            u = self.norm(x, f"{name}.input_layernorm.weight", hidden)
            q, *block = self.heads(u, name, tables)
            present = [g.TensorScatter(held, new, past, axis=2) for held, new in zip(cache, block, strict=True)]
            for part, value in zip("kv", present, strict=True):
                g.output(f"present.{i}.{part}", value, self.dtype, shape)
            x = g.Add(x, self.attention_output(g.Attention(q, *present, mask), name))
            x = g.Add(x, self.mlp(self.norm(x, f"{name}.post_attention_layernorm.weight", hidden), name))
            taken[i] = x
        width = hidden * len(layer_ids)
        if layer_ids:
            features = g.Concat(*(taken[i] for i in layer_ids), axis=-1)
            g.output("features", features, self.dtype, ["B", "S", width])
        last = self.norm(g.Gather(x, rows, axis=1), "norm.weight", hidden)
        logits = self.linears.head(g.Reshape(last, [-1, hidden]), self.weights.head, hidden)
        grid = g.Concat(g.Shape(last, start=0, end=2), [self.weights.head.rows], axis=0)
        g.output("logits", g.Reshape(logits, grid), self.dtype, ["B", "N", self.weights.head.rows])

    def _mask(self, past: Any, visible: Any, keys: Any) -> Any:
        """Which rows of the buffers [B, 1, S, MAX] a slot sees: what is committed, and its part of the block."""
        g = self.g
        zero = g.constant(np.int64(0))
        slots = g.size(visible, 2)
        at = g.Sub(g.Unsqueeze(self.range(g.size(keys, 2)), [0]), g.Unsqueeze(past, [1]))  # [B, MAX], 0 at the anchor
        inside = g.And(g.GreaterOrEqual(at, zero), g.Less(at, slots))
        index = g.Where(inside, at, zero)
        index = g.Expand(g.Unsqueeze(index, [1]), g.Concat([1], slots, [1], axis=0))
        block = g.And(g.GatherElements(visible, index, axis=2), g.Unsqueeze(inside, [1]))
        return g.Unsqueeze(g.Or(block, g.Unsqueeze(g.Less(at, zero), [1])), [1])
