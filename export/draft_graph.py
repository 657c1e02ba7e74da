"""The graph of one drafter step: context keys and values, the block's layers, candidates and the greedy path."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import onnx_ir as ir

from pydflash.checkpoints.config import DrafterConfig

from .choose_graph import choose
from .layer_graph import LayerGraph, Weights
from .linear import Linears
from .opset import Array, GraphBuilder
from .rope_graph import rotary_rows

PROFILES = {"portable": 23, "inplace": 24}  # and the opset of each


@dataclass(frozen=True, kw_only=True)
class GraphOptions:
    """What of a drafter is written, and how.

    profile: "portable" returns a cache that has grown by the context rows; "inplace" writes into a cache of fixed
        size, which ONNX Runtime alone can.
    dtype: np.float32, or np.float16 for the providers of GPUs.
    quantize: None, "8bit", "4bit" or "int8".
    embed: False for a graph that takes embedding rows instead of ids.
    debug_outputs: Also return each layer's output and the final hidden states.
    """

    profile: str = "portable"
    dtype: Any = np.float32
    quantize: str | None = None
    embed: bool = True
    debug_outputs: bool = False


def build_draft_graph(
    config: DrafterConfig, weights: Weights, options: GraphOptions, version: str, metadata: dict[str, str]
) -> ir.Model:
    """The model of one step, its weights to be made when it is written.

    Inputs: `input_ids` [B, S] int64, the anchor and mask tokens (or `inputs_embeds` [B, S, H], the scaled rows, and
    `anchors` [B]); `target_hidden` [B, C, F * H]; `pos_ctx` [B, C] and `pos_block` [B, S] (portable) or `past_len` [B]
    (inplace), int64; DFlash: `temperature` [B] float32, 0 without `log_normalizers`; `past.{i}.k` and `.v`,
    [B, Hkv, P, D].
    Outputs: `draft_ids` [B, S-1], `cand_ids` [B, S-1, K] int64; `cand_scores` [B, S-1, K] float32; DFlash 2:
    `edge_scores` [B, S-1, K, K] (previous candidate, candidate); DFlash: `log_normalizers` [B, S-1], logsumexp of the
    logits / temperature; `present.{i}.k` and `.v`: [B, Hkv, P + C, D], or the buffers that came in.
    """
    if options.profile not in PROFILES:
        raise ValueError(f"export: profile must be one of {', '.join(map(repr, PROFILES))}, got {options.profile!r}")
    builder = _Step(config, weights, options)
    builder.build()
    return builder.g.model("draft", version, metadata)


class _Step(LayerGraph):
    def __init__(self, config: DrafterConfig, weights: Weights, options: GraphOptions) -> None:
        g = GraphBuilder(PROFILES[options.profile])
        super().__init__(g, config, weights, Linears(g, options.dtype, options.quantize))
        self.config, self.options = config, options
        self.inplace = options.profile == "inplace"
        self._masks: dict[tuple[int, bool], Any] = {}

    def build(self) -> None:
        g, config = self.g, self.config
        hidden = config.hidden_size
        if self.options.embed:
            ids = g.input("input_ids", np.int64, ["B", "S"])
            anchors = g.Squeeze(g.Slice(ids, [0], [1], [1]), [1])
        else:
            rows = g.input("inputs_embeds", self.dtype, ["B", "S", hidden])
            anchors = g.input("anchors", np.int64, ["B"]) if config.version == 2 else None
        width = len(config.target_layer_ids) * config.target_hidden_size
        features = g.input("target_hidden", self.dtype, ["B", "C", width])
        self._positions(ids if self.options.embed else rows, features)
        temperature = g.input("temperature", np.float32, ["B"]) if config.version == 1 else None
        k_context, v_context = self._context(features)
        x = self._embed(ids) if self.options.embed else rows
        caches = [self._cache(layer) for layer in range(config.num_layers)]
        for layer in range(config.num_layers):
            x = self._layer(layer, x, caches[layer], k_context[layer], v_context[layer])
            if self.options.debug_outputs:
                g.output(f"layer.{layer}", x, self.dtype, ["B", "S", hidden])
        x = self.norm(x, "norm.weight", hidden)
        if self.options.debug_outputs:
            g.output("hidden", x, self.dtype, ["B", "S", hidden])
        choose(g, self.linears, config, self.weights, x, anchors, temperature)

    # --- inputs -----------------------------------------------------------------------------------------------

    def _positions(self, block: Any, features: Any) -> None:
        """Positions of context rows, block rows and keys, and the rotary tables' rows for them."""
        g = self.g
        slots, rows = g.size(block, 1), g.size(features, 1)
        if self.inplace:
            self.past_len = g.input("past_len", np.int64, ["B"])
            self.valid = g.Add(self.past_len, g.Add(rows, slots))
            past = g.Unsqueeze(self.past_len, [1])
            every = g.Add(past, self.range(g.Add(rows, slots)))
            context, self.block_positions = g.Slice(every, [0], rows, [1]), g.Slice(every, rows, [2**62], [1])
        else:
            context = g.input("pos_ctx", np.int64, ["B", "C"])
            self.block_positions = g.input("pos_block", np.int64, ["B", "S"])
        self.rows, self.slots = rows, slots
        every = g.Concat(context, self.block_positions, axis=1)
        cos, sin = rotary_rows(g, every, self.weights.frequencies, self.weights.rope_factor, self.dtype)
        self.context_rotary = (g.Slice(cos, [0], rows, [1]), g.Slice(sin, [0], rows, [1]))
        self.block_rotary = (g.Slice(cos, rows, [2**62], [1]), g.Slice(sin, rows, [2**62], [1]))

    def _cache(self, layer: int) -> tuple[Any, Any]:
        config = self.config
        shape: list[int | str] = ["B", config.num_kv_heads, "MAX" if self.inplace else "P", config.head_dim]
        k, v = (self.g.input(f"past.{layer}.{name}", self.dtype, shape) for name in "kv")
        return k, v

    def _embed(self, ids: Any) -> Any:
        g, config = self.g, self.config
        table = self.weights.embed
        assert table is not None
        x = self.linears.embedding(ids, table, config.hidden_size, table.name == self.weights.head.name)
        if "mask_embedding" in self.weights.names:
            row = g.weight(
                "mask_embedding", self.dtype, (config.hidden_size,), partial(self.weights.load, "mask_embedding")
            )
            x = g.Where(g.Unsqueeze(g.Equal(ids, g.constant(np.int64(config.mask_token_id))), [-1]), row, x)
        scale = config.input_embedding_scale
        return x if scale == 1 else g.Mul(x, g.constant(scale, self.dtype))

    # --- the layers -------------------------------------------------------------------------------------------

    def _context(self, features: Any) -> tuple[list[Any], list[Any]]:
        """Keys and values [B, Hkv, C, D] of every layer."""
        g, config = self.g, self.config
        layers, heads, dim, hidden = config.num_layers, config.num_kv_heads, config.head_dim, config.hidden_size
        width = len(config.target_layer_ids) * config.target_hidden_size
        fused = self.norm(
            self.linear(features, "fc", ["fc.weight"], hidden, width, exact=True), "hidden_norm.weight", hidden
        )
        parts = [f"layers.{i}.self_attn.{name}_proj.weight" for name in "kv" for i in range(layers)]
        both = self.linear(
            fused, "context_kv", parts, 2 * layers * heads * dim, hidden, exact=self.options.quantize == "int8"
        )
        both = g.Reshape(both, [0, 0, 2 * layers * heads, dim])
        k, v = g.Split(both, axis=2, num_outputs=2, outputs=2)
        norms = g.weight("context_k_norm", self.dtype, (layers * heads, dim), self._context_norms)
        ones = g.constant(np.ones(dim), self.dtype)
        k = g.Mul(g.RMSNormalization(k, ones, axis=-1, epsilon=config.rms_norm_eps), norms)
        k = self.rotate(g.Transpose(k, perm=[0, 2, 1, 3]), self.context_rotary)
        v = g.Transpose(v, perm=[0, 2, 1, 3])
        if layers == 1:
            return [k], [v]
        split = {"axis": 1, "num_outputs": layers, "outputs": layers}
        return g.Split(k, **split), g.Split(v, **split)

    def _context_norms(self) -> Array:
        config = self.config
        each = [self.weights.load(f"layers.{i}.self_attn.k_norm.weight") for i in range(config.num_layers)]
        return np.repeat(np.stack(each), config.num_kv_heads, 0)

    def _layer(self, i: int, x: Any, cache: tuple[Any, Any], k_context: Any, v_context: Any) -> Any:
        g, hidden, name = self.g, self.config.hidden_size, f"layers.{i}"
        u = self.norm(x, f"{name}.input_layernorm.weight", hidden)
        u, deltas = self._before(u, f"{name}.attention_conv")
        q, k, v = self.heads(u, name, self.block_rotary)
        y = self._attend(i, q, (k_context, v_context), (k, v), cache)
        y = self.attention_output(y, name)
        x = g.Add(x, self._after(y, f"{name}.attention_conv", deltas))
        u = self.norm(x, f"{name}.post_attention_layernorm.weight", hidden)
        u, deltas = self._before(u, f"{name}.mlp_conv")
        y = self.mlp(u, name)
        return g.Add(x, self._after(y, f"{name}.mlp_conv", deltas))

    def _attend(
        self, layer: int, q: Any, context: tuple[Any, Any], block: tuple[Any, Any], cache: tuple[Any, Any]
    ) -> Any:
        g, config = self.g, self.config
        shape: list[int | str] = ["B", config.num_kv_heads, "MAX" if self.inplace else "P + C", config.head_dim]
        keys = []
        for name, past, new, own in zip("kv", cache, context, block, strict=True):
            if self.inplace:
                present = g.TensorScatter(past, g.Concat(new, own, axis=2), self.past_len, axis=2)
                keys.append(present)
            else:
                present = g.Concat(past, new, axis=2)
                keys.append(g.Concat(present, own, axis=2))
            g.output(f"present.{layer}.{name}", present, self.dtype, shape)
        mask = self._mask(config.window(layer), config.causal[layer], keys[0])
        if self.inplace:
            return g.Attention(q, *keys, mask, None, None, self.valid)
        return g.Attention(q, *keys, *([mask] if mask is not None else []))

    def _mask(self, window: int, causal: bool, keys: Any) -> Any:
        """Which keys [B, 1, S, keys] a slot sees; None where it sees all."""
        if not window and not causal:
            return None
        if (window, causal) in self._masks:
            return self._masks[window, causal]
        g = self.g
        mine = g.Unsqueeze(self.block_positions, [1, 3])
        if self.inplace:
            at = self.range(g.size(keys, 2))
        else:  # a cache may have lost its oldest rows
            held = g.Sub(g.size(keys, 2), self.slots)
            first = g.Sub(g.Slice(self.block_positions, [0], [1], [1]), held)
            at = g.Unsqueeze(g.Concat(g.Add(first, self.range(held)), self.block_positions, axis=1), [1, 2])
        ahead = g.Sub(mine, at)
        seen = None
        if window:
            seen = g.Less(ahead, g.constant(np.int64(window)))
            if not causal:
                seen = g.And(seen, g.Greater(ahead, g.constant(np.int64(-window))))
        if causal:
            past = g.GreaterOrEqual(ahead, g.constant(np.int64(0)))
            seen = past if seen is None else g.And(seen, past)
        self._masks[window, causal] = seen
        return seen

    # --- the convolutions of DFlash 2 ---------------------------------------------------------------------------

    def _before(self, u: Any, name: str) -> tuple[Any, Any]:
        """The convolution before a sublayer, and the delta of the one after it."""
        g, config = self.g, self.config
        if config.version == 1:
            return u, None
        taps, groups = config.conv_kernel_size, config.hidden_size // config.conv_group_size
        count = 2 * taps * groups
        weight = [f"{name}.kernel_projection.weight"]
        deltas = self.linear(u, f"{name}.kernel_projection", weight, count, config.hidden_size, exact=True)
        deltas = g.Split(g.Reshape(deltas, [0, 0, 2 * taps, groups, 1]), axis=2, num_outputs=2 * taps, outputs=2 * taps)
        return self._convolve(u, name, 0, deltas[:taps]), deltas[taps:]

    def _after(self, y: Any, name: str, deltas: Any) -> Any:
        return y if deltas is None else self._convolve(y, name, 1, deltas)

    def _convolve(self, x: Any, name: str, side: int, deltas: list[Any]) -> Any:
        """x [B, S, H]: each slot's sum over itself and the slots before it, weighted by base and delta."""
        g, config = self.g, self.config
        group, hidden = config.conv_group_size, config.hidden_size
        groups = hidden // group
        total = None
        for tap, delta in enumerate(deltas):
            base = g.weight(
                f"{name}.base_kernel.{side}.{tap}",
                self.dtype,
                (groups, group),
                partial(self._base, name, side, tap),
            )
            row = x
            if tap:
                padded = g.Pad(x, [0, tap, 0, 0, 0, 0])
                row = g.Slice(padded, [0], self.slots, [1])
            part = g.Mul(g.Add(g.Squeeze(delta, [2]), base), g.Reshape(row, [0, 0, groups, group]))
            total = part if total is None else g.Add(total, part)
        return g.Reshape(total, [0, 0, hidden])

    def _base(self, name: str, side: int, tap: int) -> Array:
        group = self.config.conv_group_size
        return self.weights.load(f"{name}.base_kernel")[side, tap].reshape(-1, group)
