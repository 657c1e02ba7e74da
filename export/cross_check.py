"""The same step through torch.onnx, an independent way to a graph, and the difference between the two."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pydflash.drafter.module import Drafter

from .draft_graph import GraphOptions, build_draft_graph
from .layer_graph import Weights

_SHAPES = ((1, 5, 20), (4, 0, 0), (4, 1, 33), (2, 17, 0))  # slots, context rows, past rows; slots up to the block's


class _Step(nn.Module):
    """What the graph computes up to the hidden states, out of the torch drafter's own parts, with caches that grow."""

    def __init__(self, drafter: Drafter) -> None:
        super().__init__()
        self.drafter = drafter

    def forward(
        self, rows: Tensor, features: Tensor, context: Tensor, block: Tensor, keys: Tensor, values: Tensor
    ) -> Any:
        drafter = self.drafter
        config = drafter.config
        k, v = drafter.context_keys(drafter.fuse(features), context)
        keys, values = torch.cat([keys, k], 3), torch.cat([values, v], 3)
        held = keys.shape[3]
        at = torch.cat([block[:, :1] - held + torch.arange(held), block], 1)
        ahead = block[:, :, None] - at[:, None]

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            near = config.window(layer)
            seen = ahead >= (0 if config.causal[layer] else -(2**31))
            if near:
                seen = seen & (ahead.abs() < near)
            every = torch.cat([keys[layer], k], 2), torch.cat([values[layer], v], 2)
            return F.scaled_dot_product_attention(q, *every, seen[:, None], enable_gqa=True)

        return drafter(rows, block, attend)


def cross_check_difference(drafter: Drafter, weights: Weights, version: str, work: Path) -> float:
    """Largest difference of final hidden states between torch.onnx's graph and ours in float32, over some shapes,
    relative to the largest value.

    work: An empty folder for both models.

    Raises: ImportError without onnxscript.
    """
    import onnx_ir
    import onnxruntime

    config = drafter.config
    ours = build_draft_graph(config, weights, GraphOptions(embed=False, debug_outputs=True), version, {})
    onnx_ir.save(ours, work / "ours.onnx", external_data="ours.onnx.data")
    _export(drafter, work / "theirs.onnx")
    sessions = [
        onnxruntime.InferenceSession(str(work / f"{name}.onnx"), providers=["CPUExecutionProvider"])
        for name in ("ours", "theirs")
    ]
    worst = 0.0
    for slots, rows, past in _SHAPES:
        arrays = [x.numpy() for x in _inputs(drafter, min(slots, config.block_size), rows, past)]
        keys, values = arrays[4:]
        feed = dict(zip(("inputs_embeds", "target_hidden", "pos_ctx", "pos_block"), arrays[:4], strict=True))
        for layer in range(config.num_layers):
            feed |= {f"past.{layer}.k": keys[layer], f"past.{layer}.v": values[layer]}
        more = {"anchors": np.zeros(1, np.int64), "temperature": np.zeros(1, np.float32)}
        feed |= {i.name: more[i.name] for i in sessions[0].get_inputs() if i.name in more}
        (got,) = sessions[0].run(["hidden"], feed)
        names = [i.name for i in sessions[1].get_inputs()]
        (want,) = sessions[1].run(None, dict(zip(names, arrays, strict=True)))
        worst = max(worst, float(np.abs(got - want).max() / np.abs(want).max()))
    return worst


@contextmanager
def _quiet() -> Iterator[None]:
    """torch.onnx logs what is not installed."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _inputs(drafter: Drafter, slots: int, rows: int, past: int) -> tuple[Tensor, ...]:
    config = drafter.config
    generator = torch.Generator().manual_seed(slots + 100 * rows + past)
    cache = (config.num_layers, 1, config.num_kv_heads, past, config.head_dim)
    shapes = ((1, slots, config.hidden_size), (1, rows, drafter.fc.in_features), cache, cache)
    embedded, features, keys, values = (torch.randn(shape, generator=generator) for shape in shapes)
    positions = torch.arange(past, past + rows + slots)[None]
    return embedded, features, positions[:, :rows], positions[:, rows:], keys, values


def _export(drafter: Drafter, path: Path) -> None:
    dims = {name: torch.export.Dim(name, min=least) for name, least in (("S", 1), ("C", 0), ("P", 0))}
    axes = ({1: dims["S"]}, {1: dims["C"]}, {1: dims["C"]}, {1: dims["S"]}, {3: dims["P"]}, {3: dims["P"]})
    drafter.reserve(64 + drafter.config.block_size)
    example = _inputs(drafter, drafter.config.block_size, 5, 20)  # sizes 0 and 1 would become constants
    drafter.requires_grad_(False)
    # With gradients on, the drafter keeps no derived weights, whose bookkeeping cannot be traced.
    with warnings.catch_warnings(), torch.enable_grad(), _quiet():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            _Step(drafter).eval(), example, path, dynamo=True, opset_version=23, dynamic_shapes=axes, verbose=False
        )
