"""What a round takes with a tree of each size, measured on the pair itself: what `num_nodes="auto"` chooses by."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..ops import backends
from ..protocols import BlockTarget, DrafterLike, RowDrafter, RowTarget
from ..tree import Tree, tree_of
from .paths import Paths

_TRIALS = 3
_REPLAYS = 8
_CONTEXT = 64  # committed positions while it is measured


def host_seconds(target: BlockTarget, drafter: DrafterLike, paths: Paths, block_size: int) -> dict[int, float]:
    """Seconds of a round by the number of nodes, one call after the other: draft, verify and commit."""
    sizes = paths.sizes()
    with torch.inference_mode():
        draft = statistics.median([_draft_seconds(target, drafter, block_size) for _ in range(_TRIALS + 1)][1:])
        ids = torch.full((1, _CONTEXT), 1, device=target.device)
        room = target.max_length or 256
        cache = target.new_cache(1, 256)
        target.prefill(ids[:, : max(1, min(_CONTEXT, room - paths.slots - 1))], cache)
        times: dict[int, list[float]] = {size: [] for size in sizes}
        for trial in range(_TRIALS + 1):
            for size in sizes:
                seconds = _verify_seconds(target, cache, _tree(target, size, paths.slots), ids)
                if trial:
                    times[size].append(seconds)
    return {size: statistics.median(seconds) + draft for size, seconds in times.items()}


def device_seconds(target: RowTarget, drafter: RowDrafter, paths: Paths, block_size: int) -> dict[int, float]:
    """The same of rounds in fixed shapes, replayed as graphs where there are graphs."""
    with torch.inference_mode():
        context = drafter.new_cache(1, 256)
        features, counts = _features(target, block_size), torch.zeros(1, dtype=torch.int32, device=target.device)
        anchors = torch.ones(1, dtype=torch.int64, device=target.device)

        def draft() -> None:
            drafter.append_context(features, context, counts)
            _propose(target, drafter, anchors, context, block_size)

        spent = _replay_seconds(target, draft)
        return {
            size: spent + row_verify_seconds(target, _tree(target, size, paths.slots), size + 1)
            for size in paths.sizes()
        }


def row_verify_seconds(target: RowTarget, tree: Tree | None, slots: int) -> float:
    """What the target takes for a block of `slots` slots behind 64 positions."""
    with torch.inference_mode():
        cache = target.new_cache(1, 256)
        cache.lengths += _CONTEXT
        tokens = torch.ones(1, slots, dtype=torch.int64, device=target.device)
        return _replay_seconds(target, lambda: target.verify(tokens, cache, tree))


def bushy(nodes: int, depth: int) -> list[int]:
    """Parents of a tree of `nodes` drafts: a chain down to `depth`, the others below the anchor."""
    chain = min(nodes, depth)
    return [-1, *range(chain), *[0] * (nodes - chain)]


def _tree(target: BlockTarget, nodes: int, depth: int) -> Tree:
    return tree_of(bushy(nodes, depth), target.device)


def _features(target: BlockTarget, rows: int) -> Tensor:
    width = len(target.layer_ids) * target.hidden_size
    return torch.zeros(1, rows, width, dtype=target.dtype, device=target.device)


def _propose(target: BlockTarget, drafter: DrafterLike, anchors: Tensor, context: Any, block_size: int) -> Tensor:
    tables = {"embed": target.embed_weight, "head": target.head}
    return drafter.propose(anchors, context, **tables, block_size=block_size).tokens


def _draft_seconds(target: BlockTarget, drafter: DrafterLike, block_size: int) -> float:
    context = drafter.new_cache(1, _CONTEXT + block_size)
    features, anchors = _features(target, 4), torch.ones(1, dtype=torch.long, device=target.device)
    begin = time.perf_counter()
    drafter.append_context(features, context)
    int(_propose(target, drafter, anchors, context, block_size).sum())
    return time.perf_counter() - begin


def _verify_seconds(target: BlockTarget, cache: Any, tree: Tree, ids: Tensor) -> float:
    slots = tree.parents.shape[1]
    begin = time.perf_counter()
    target.verify(ids[:, :slots], cache, tree)
    index = torch.full((1, slots), -1, dtype=torch.int32, device=target.device)
    index[0, 0] = 0
    length = cache.length
    target.commit(cache, index, index.new_zeros(1))
    _synchronize(target)
    seconds = time.perf_counter() - begin
    cache.advance(length - cache.length)
    return seconds


def _replay_seconds(target: BlockTarget, run: Callable[[], Any]) -> float:
    run()
    if target.device.type == "cuda":
        torch.cuda.synchronize(target.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(target.device), torch.cuda.graph(graph, capture_error_mode="thread_local"):
            run()
        run = graph.replay
        run()
    _synchronize(target)
    begin = time.perf_counter()
    for _ in range(_REPLAYS):
        run()
    _synchronize(target)
    return (time.perf_counter() - begin) / _REPLAYS


def _synchronize(target: BlockTarget) -> None:
    if (accelerator := backends.accelerator(target.device)) is not None:
        accelerator.synchronize(target.device)
