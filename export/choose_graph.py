"""The end of the graph: logits, candidates, the lattice of DFlash 2 and its greedy path."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from pydflash.checkpoints.config import DrafterConfig

from .layer_graph import Weights
from .linear import Linears
from .opset import GraphBuilder


def choose(
    g: GraphBuilder,
    linears: Linears,
    config: DrafterConfig,
    weights: Weights,
    hidden: Any,
    anchors: Any,
    temperature: Any,
) -> None:
    """Outputs of the drafting slots of `hidden` [B, S, H].

    anchors: [B], for the lattice of DFlash 2. temperature: [B] float32, the temperature of DFlash's `log_normalizers`.
    """
    k, size = config.num_candidates, config.hidden_size
    hidden = g.Slice(hidden, [1], [2**62], [1])
    grid = g.Concat(g.Shape(hidden, start=0, end=2), [k], axis=0)
    logits = linears.head(g.Reshape(hidden, [-1, size]), weights.head, size)
    if weights.head.rows > config.draft_vocab_size:
        logits = g.Slice(logits, [0], [config.draft_vocab_size], [1])
    if linears.dtype != np.float32:
        logits = g.cast(logits, np.float32)
    unary, ids = g.TopK(logits, [k], axis=-1, outputs=2)
    # Multiplier and soft cap keep the order, so the candidates alone need them.
    unary, ids = (g.Reshape(t, grid, allowzero=1) for t in (_scaled(g, config, unary), ids))
    if "d2t" in weights.names:
        offsets = g.weight("d2t", np.int64, (config.draft_vocab_size,), lambda: weights.load("d2t"))
        ids = g.Add(ids, g.Gather(offsets, ids))
    if config.version == 2:
        tokens = _lattice(g, linears, config, weights, hidden, anchors, unary, ids)
    else:
        tokens = g.Squeeze(g.Slice(ids, [0], [1], [2]), [2])
        g.output("log_normalizers", _normalizers(g, config, logits, hidden, temperature), np.float32, ["B", "S - 1"])
    g.output("draft_ids", tokens, np.int64, ["B", "S - 1"])
    g.output("cand_ids", ids, np.int64, ["B", "S - 1", k])
    g.output("cand_scores", unary, np.float32, ["B", "S - 1", k])


def _normalizers(g: GraphBuilder, config: DrafterConfig, logits: Any, hidden: Any, temperature: Any) -> Any:
    """logsumexp of each slot's logits / temperature, 0 where no row has one: it takes a tenth of a step."""
    grid = g.Shape(hidden, start=0, end=2)

    def asked() -> Any:
        rows = g.Reshape(_scaled(g, config, logits), g.Concat(grid, [config.draft_vocab_size], axis=0), allowzero=1)
        return g.ReduceLogSumExp(g.Div(rows, g.Unsqueeze(temperature, [1, 2])), [2], keepdims=0)

    wanted = g.Greater(g.ReduceMax(temperature, keepdims=0), g.constant(np.float32(0)))
    return g.either(wanted, asked, lambda: g.Expand(g.constant(np.float32(0)), grid))


def _scaled(g: GraphBuilder, config: DrafterConfig, logits: Any) -> Any:
    if config.output_multiplier != 1:
        logits = g.Mul(logits, g.constant(np.float32(config.output_multiplier)))
    if config.final_logit_softcapping:
        cap = g.constant(np.float32(config.final_logit_softcapping))
        logits = g.Mul(g.Tanh(g.Div(logits, cap)), cap)
    return logits


def _lattice(
    g: GraphBuilder, linears: Linears, config: DrafterConfig, weights: Weights, hidden: Any, anchors: Any, unary: Any,
    ids: Any,
) -> Any:  # fmt: skip
    """Write `edge_scores`, and give the tokens [B, S-1] of the greedy path."""
    k, rank, size = config.num_candidates, config.selector_rank, config.hidden_size
    name = "candidate_selector.hidden_projection.weight"
    projected = linears.linear(hidden, name, rank, size, lambda: weights.load(name), exact=True)
    first = g.Expand(g.Unsqueeze(anchors, [1, 2]), [1, 1, k])
    before = g.Slice(g.Concat(first, ids, axis=1), [0], g.size(ids, 1), [1])
    left, right = (
        linears.half_rows(
            which,
            f"candidate_selector.{side}_codebook",
            config.vocab_size,
            rank,
            partial(weights.load, f"candidate_selector.{side}_codebook"),
        )
        for side, which in (("predecessor", before), ("successor", ids))
    )
    left = g.Mul(left, g.Unsqueeze(projected, [2]))
    edges = g.MatMul(left, g.Transpose(right, perm=[0, 1, 3, 2]))
    if linears.dtype != np.float32:
        edges = g.cast(edges, np.float32)
    edges = g.Add(edges, g.Unsqueeze(unary, [2]))
    g.output("edge_scores", edges, np.float32, ["B", "S - 1", k, k])
    # Slot j maps each candidate before it to its best successor; the path is the composition of the maps 1..j, made
    # by doubling: no loop, whatever S is.
    path = g.ArgMax(edges, axis=3, keepdims=0)
    slots, shape = g.size(ids, 1), g.Shape(ids)
    distance = 1
    while distance < config.block_size - 1:
        same = g.constant(np.tile(np.arange(k, dtype=np.int64), (1, distance, 1)))
        same = g.Expand(same, g.Concat(g.Slice(shape, [0], [1]), [1, 1], axis=0))
        earlier = g.Slice(g.Concat(same, path, axis=1), [0], slots, [1])
        path = g.GatherElements(path, earlier, axis=2)
        distance *= 2
    index = g.Slice(path, [0], [1], [2])  # the anchor reads row 0, all rows of the first slot being alike
    return g.Squeeze(g.GatherElements(ids, index, axis=2), [2])
