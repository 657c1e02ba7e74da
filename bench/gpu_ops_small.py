"""Times the small ops of a round on a GPU against the same work in torch, plain and compiled.

    python bench/gpu_ops_small.py [--copies 40] [--repeats 21] [--only NAME] [--no-compile] [--out FILE]

A round is one graph of hundreds of launches, so every side is captured into a CUDA graph of `copies` calls, and the
graphs are replayed in turn; the table shows medians per call in microseconds. The calls go round over four sets of
inputs: of one block these stay in the cache of the GPU, as in a round, where a neighbouring layer has just written
them. "torch" is the op's definition in plain torch with fixed shapes, "compiled" torch.compile of it. GB/s counts
every input and output once, beside the bandwidth of a large copy.

Shapes are those of Qwen3-8B and a drafter of five layers; "1 x 16" is a batch of one with 16 slots.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from gpu_time import copy_bandwidth, milliseconds
from machine import machine
from torch import Tensor

from pydflash import ops
from pydflash.ops import reference

HIDDEN, HEADS, KV_HEADS, DIM, LAYERS, DRAFTER_LAYERS = 4096, 32, 8, 128, 36, 5
CAPACITY, EPS = 4096, 1e-6
Call = Callable[[], object]


@dataclass(frozen=True)
class Sides:
    """One set of inputs: our call, the function in torch with its arguments, and the bytes that must move."""

    ours: Call
    torch: Callable[..., object]
    arguments: tuple[Any, ...]
    size: int


def floats(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.bfloat16, device="cuda")


def ints(*values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cuda")


def tables() -> tuple[Tensor, Tensor]:
    angles = torch.arange(2 * CAPACITY, device="cuda")[:, None] * 1e6 ** -(torch.arange(0, DIM, 2, device="cuda") / DIM)
    return angles.cos(), angles.sin()


def norm(rows: int) -> Sides:
    x, delta, weight = floats(rows, HIDDEN), floats(rows, HIDDEN), floats(HIDDEN)
    call = partial(ops.add_rms_norm, x, delta, weight, EPS)
    return Sides(call, reference.add_rms_norm, (x, delta, weight, EPS), 4 * x.nbytes + weight.nbytes)


def heads(batch: int, slots: int) -> Sides:
    qkv = floats(batch, slots, (HEADS + 2 * KV_HEADS) * DIM)
    lengths, depths = ints(*[512] * batch), ints(list(range(slots)))
    blocks = [floats(batch, KV_HEADS, slots, DIM) for _ in range(2)]
    arguments = (qkv, floats(DIM), floats(DIM), EPS, *tables(), lengths, depths, *blocks, HEADS, DIM)
    return Sides(partial(ops.head_norm_rope, *arguments), reference.head_norm_rope, arguments, 2 * qkv.nbytes)


def context(batch: int, rows: int) -> Sides:
    kv, weights = floats(batch, rows, DRAFTER_LAYERS * 2 * KV_HEADS * DIM), floats(DRAFTER_LAYERS, DIM)
    caches = [floats(DRAFTER_LAYERS, batch, KV_HEADS, CAPACITY, DIM) for _ in range(2)]
    lengths, counts = ints(*[512] * batch), ints(*[rows] * batch)
    call = partial(ops.context_append, kv, weights, EPS, *tables(), *caches, lengths, counts, DIM)
    return Sides(call, context_in_torch, (kv, weights, *tables(), *caches, lengths), 2 * kv.nbytes)


def context_in_torch(
    kv: Tensor, weights: Tensor, cos: Tensor, sin: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: Tensor
) -> None:
    """Every row is valid."""
    k, v = kv.unflatten(-1, (DRAFTER_LAYERS, 2, KV_HEADS, DIM)).permute(3, 2, 0, 4, 1, 5)
    wide = k.float()
    y = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS)).bfloat16()
    a, b = (y * weights[:, None, None, None]).float().chunk(2, -1)
    positions = lengths.long()[:, None] + torch.arange(kv.shape[1], device=kv.device)
    c, s = cos[positions][:, None], sin[positions][:, None]
    turned = torch.cat((a * c - b * s, b * c + a * s), -1).bfloat16()
    batches = torch.arange(kv.shape[0], device=kv.device)[:, None]
    for cache, new in ((k_cache, turned), (v_cache, v)):
        cache.transpose(2, 3)[:, batches, positions % CAPACITY] = new.transpose(2, 3)


def append(batch: int, slots: int, accepted: int) -> Sides:
    caches = [floats(LAYERS, batch, KV_HEADS, CAPACITY, DIM) for _ in range(2)]
    blocks = [floats(LAYERS, batch, KV_HEADS, slots, DIM) for _ in range(2)]
    rows = list(range(0, 2 * accepted, 2)) if 2 * accepted <= slots else list(range(accepted))
    index, lengths = ints(*[rows + [-1] * (slots - accepted)] * batch), ints(*[512] * batch)
    call = partial(ops.cache_append, *caches, *blocks, index, lengths)
    size = 4 * LAYERS * batch * KV_HEADS * accepted * DIM * 2
    return Sides(call, append_in_torch, (*caches, *blocks, index[:, :accepted].long(), lengths), size)


def append_in_torch(
    k_cache: Tensor, v_cache: Tensor, k_block: Tensor, v_block: Tensor, source: Tensor, lengths: Tensor
) -> None:
    """Torch is told the number of rows, the same in every sequence."""
    batches = torch.arange(source.shape[0], device=source.device)[:, None]
    to = lengths.long()[:, None] + torch.arange(source.shape[1], device=source.device)
    for cache, block in ((k_cache, k_block), (v_cache, v_block)):
        cache.transpose(2, 3)[:, batches, to] = block.transpose(2, 3)[:, batches, source]


def conv(batch: int, slots: int) -> Sides:
    x, base = floats(batch, slots, HIDDEN), floats(2, HIDDEN)
    delta = floats(batch, slots, 2, 2, HIDDEN // 16)[:, :, 0]
    size = 2 * x.nbytes + base.nbytes + delta.numel() * 2
    return Sides(partial(ops.block_conv, x, base, delta), reference.block_conv, (x, base, delta), size)


def commit(batch: int, slots: int, accepted: int) -> Sides:
    width = 5 * HIDDEN
    features = floats(batch, slots, width)
    tokens = torch.randint(0, 1000, (batch, slots), device="cuda")
    index = ints(*[list(range(accepted + 1)) + [-1] * (slots - accepted - 1)] * batch)
    bonus, active = torch.zeros(batch, dtype=torch.int64, device="cuda"), ints(*[1] * batch)
    record = torch.zeros(batch, slots + 1, dtype=torch.int64, device="cuda")
    state = (bonus.clone(), *(ints(*[0] * batch) for _ in range(3)), record)
    arguments = (tokens, index, ints(*[accepted] * batch), bonus, active, features, torch.zeros_like(features), *state)
    call = partial(ops.round_commit, *arguments)
    return Sides(call, reference.round_commit, arguments, 4 * batch * (accepted + 1) * width)


def cases() -> Iterator[tuple[str, str, Callable[[], Sides]]]:
    for rows in (1, 16, 64, 512, 8192):
        yield "add_rms_norm", f"{rows} x {HIDDEN}", partial(norm, rows)
    for batch, slots in ((1, 1), (1, 16), (1, 64), (32, 16)):
        yield "head_norm_rope", f"{batch} x {slots}", partial(heads, batch, slots)
    for batch, rows in ((1, 16), (32, 16), (1, 2048)):
        yield "context_append", f"{batch} x {rows}", partial(context, batch, rows)
    for batch, slots, accepted in ((1, 1, 1), (1, 16, 5), (1, 64, 6), (32, 16, 5)):
        name = f"{batch} x {slots}, {accepted} rows"
        yield "cache_append", name, partial(append, batch, slots, accepted)
    for batch, slots in ((1, 8), (1, 16), (32, 8)):
        yield "block_conv", f"{batch} x {slots}", partial(conv, batch, slots)
    for batch in (1, 32):
        yield "round_commit", f"{batch} x 16, 5 rows", partial(commit, batch, 16, 4)


def captured(calls: list[Call], copies: int) -> torch.cuda.CUDAGraph:
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(copies):
            calls[i % len(calls)]()
    return graph


def measure(build: Callable[[], Sides], copies: int, repeats: int, compiles: bool) -> tuple[int, dict[str, float]]:
    """The bytes of a call, and the median microseconds of every side."""
    sets = [build() for _ in range(4)]
    sides: dict[str, list[Call]] = {
        "pydflash": [side.ours for side in sets],
        "torch": [partial(side.torch, *side.arguments) for side in sets],
    }
    if compiles:
        torch.compiler.reset()
        compiled = torch.compile(sets[0].torch, dynamic=False)
        sides["compiled"] = [partial(compiled, *side.arguments) for side in sets]
    graphs = {name: captured(calls, copies) for name, calls in sides.items()}
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(repeats):
        for name, graph in graphs.items():
            times[name].append(milliseconds(graph.replay) * 1e3 / copies)
    return sets[0].size, {name: statistics.median(values[1:]) for name, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--copies", type=int, default=40)
    parser.add_argument("--repeats", type=int, default=21)
    parser.add_argument("--only", default="", help="run the cases whose name contains this")
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    parser.add_argument("--out", type=Path, help="also write the results to this file")
    args = parser.parse_args()
    torch.manual_seed(0)
    copy = copy_bandwidth()
    setup = machine() | {"gpu_copy_gb_s": round(copy), "copies": args.copies, "repeats": args.repeats}
    print(f"{setup['gpu']}, a large copy {copy:.0f} GB/s, bfloat16, microseconds per call (medians)\n")
    print(f"{'case':36} {'pydflash':>9} {'torch':>9} {'compiled':>9} {'ratio':>6} {'GB/s':>6} {'of copy':>7}")
    results = []
    for op, name, build in cases():
        if args.only not in f"{op} {name}":
            continue
        size, median = measure(build, args.copies, args.repeats, not args.no_compile)
        ours = median["pydflash"]
        peer = min(time for side, time in median.items() if side != "pydflash")
        rate = size / ours / 1e3
        print(
            f"{op + ' ' + name:36} {ours:9.2f} {median['torch']:9.2f} {median.get('compiled', float('nan')):9.2f}"
            f" {peer / ours:6.2f} {rate:6.0f} {rate / copy:7.0%}",
            flush=True,
        )
        results.append({"op": op, "case": name, "bytes": size, "median_us": median})
    if args.out:
        args.out.write_text(json.dumps({"setup": setup, "results": results}, indent=2) + "\n")


if __name__ == "__main__":
    with torch.inference_mode():  # as the loop runs them
        main()
