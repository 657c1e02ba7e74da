"""Times on a GPU, shared by the scripts gpu_*.py."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch


def milliseconds(call: Callable[[], Any]) -> float:
    """Between two events around one call."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def replay_ms(replay: Callable[[], Any], repeats: int = 20) -> float:
    """Median of some calls, after three more."""
    torch.cuda.synchronize()
    for _ in range(3):
        replay()
    return statistics.median(milliseconds(replay) for _ in range(repeats))


def graph_ms(run: Callable[[], Any], repeats: int = 20) -> float:
    """Median milliseconds of a captured graph of `run`."""
    stream = torch.cuda.Stream()
    with torch.inference_mode(), torch.cuda.stream(stream):
        run()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            run()
    return replay_ms(graph.replay, repeats)


def copy_bandwidth() -> float:
    """GB/s of a 4 GiB copy on the GPU, bytes read and written both counted."""
    source = torch.empty(1 << 31, dtype=torch.bfloat16, device="cuda").normal_()
    target = torch.empty_like(source)
    return 2 * source.nbytes / replay_ms(lambda: target.copy_(source)) / 1e6
