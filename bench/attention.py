"""Times block_attention, block_conv and cache_append against the same work in torch.

    python bench/attention.py [--threads 1] [--repeats 21] [--contexts 256 2048 8192] [--level NAME] [--json FILE]

Torch gets its best case: keys and values already cut to what is visible and joined in one tensor, and the fastest
of scaled_dot_product_attention with expanded heads ("expanded"), with enable_gqa ("gqa") and with the query heads of
a group folded into the rows as our kernel does it ("folded"). "full" is a drafter's bidirectional block, "causal" a
verification (a float mask for torch).

The sides run in turn, each timed call after an untimed one of the same side, so that all find their data equally
near. The table shows medians and the ratio of the medians, then the ratio of the 10th percentiles, which a busy
machine disturbs less. GB/s counts keys and values once, beside the bandwidth of a large copy (read plus written).
Our calls include the way through torch.ops; the line "fixed costs" is that way with one key of one head.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from machine import machine
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.functional import scaled_dot_product_attention as sdpa

from pydflash import ops
from pydflash.ops import backends

Sides = dict[str, Callable[[], object]]
MODELS = {"SmolLM2-135M": (9, 3, 64, 30), "Qwen3-8B": (32, 8, 128, 36)}  # query heads, KV heads, head_dim, layers


def measure(sides: Sides, repeats: int) -> dict[str, list[float]]:
    """Microseconds of every side, taken in turn."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(repeats):
        for name, run in sides.items():
            run()
            begin = time.perf_counter()
            run()
            times[name].append((time.perf_counter() - begin) * 1e6)
    return times


def attention_sides(
    heads: int, kv_heads: int, dim: int, slots: int, context: int, dtype: torch.dtype, causal: bool
) -> Sides:
    group = heads // kv_heads
    q = torch.randn(1, heads, slots, dim).to(dtype)
    k, v = (torch.randn(1, kv_heads, context + slots, dim).to(dtype) for _ in range(2))
    k_cache, v_cache = (x[:, :, :context].contiguous() for x in (k, v))
    k_block, v_block = (x[:, :, context:].contiguous() for x in (k, v))
    lengths, depths = torch.tensor([context], dtype=torch.int32), torch.arange(slots, dtype=torch.int32)[None]
    visibility = torch.full((1, slots), -1)
    mask, folded_mask = None, None
    if causal:
        visibility = ((2 << torch.arange(slots)) - 1)[None]
        hidden = torch.ones(slots, context + slots, dtype=torch.bool).triu(context + 1)
        mask = torch.zeros(slots, context + slots, dtype=dtype).masked_fill_(hidden, -torch.inf)
        folded_mask = mask.repeat(group, 1)
    expanded_k, expanded_v = (x.repeat_interleave(group, 1) for x in (k, v))
    folded = q.view(1, kv_heads, group * slots, dim)
    return {
        "pydflash": lambda: ops.block_attention(q, k_cache, v_cache, k_block, v_block, lengths, visibility, depths),
        "expanded": lambda: sdpa(q, expanded_k, expanded_v, attn_mask=mask),
        "gqa": lambda: sdpa(q, k, v, attn_mask=mask, enable_gqa=True),
        "folded": lambda: sdpa(folded, k, v, attn_mask=folded_mask),
    }


def fixed_costs_sides() -> Sides:
    x, one = torch.randn(1, 1, 1, 8), torch.ones(1, 1, dtype=torch.int64)
    lengths, depths = torch.tensor([1], dtype=torch.int32), torch.zeros(1, 1, dtype=torch.int32)
    return {
        "pydflash": lambda: ops.block_attention(x, x, x, x, x, lengths, one, depths),
        "sdpa": lambda: sdpa(x, x, x),
    }


def conv_sides(slots: int, channels: int, dtype: torch.dtype) -> Sides:
    x, base = torch.randn(1, slots, channels).to(dtype), torch.randn(2, channels).to(dtype)
    delta = torch.randn(1, slots, 2, channels // 16).to(dtype)

    def in_torch() -> Tensor:
        weights = (base[:, None] + delta[0].transpose(0, 1).repeat_interleave(16, -1))[None]
        return weights[:, 0] * x + weights[:, 1] * pad(x, (0, 0, 1, 0))[:, :slots]

    return {"pydflash": lambda: ops.block_conv(x, base, delta), "torch": in_torch}


def append_sides(layers: int, kv_heads: int, dim: int, slots: int, dtype: torch.dtype, gathered: bool) -> Sides:
    caches = [torch.zeros(layers, 1, kv_heads, 1024, dim, dtype=dtype) for _ in range(2)]
    blocks = [torch.randn(layers, 1, kv_heads, slots, dim).to(dtype) for _ in range(2)]
    count, start = slots // 2, 500
    rows = torch.arange(count) * 2 if gathered else torch.arange(count)
    index = torch.cat([rows, torch.full((slots - count,), -1)])[None].to(torch.int32)
    lengths = torch.tensor([start], dtype=torch.int32)

    def in_torch() -> None:  # torch is told the count and the start as numbers
        for cache, block in zip(caches, blocks, strict=True):
            source = block.index_select(3, rows) if gathered else block[:, :, :, :count]
            cache[:, :, :, start : start + count].copy_(source)

    return {"pydflash": lambda: ops.cache_append(*caches, *blocks, index, lengths), "torch": in_torch}


@dataclass(frozen=True)
class Case:
    """One line of the table: `size` is the bytes that must move, `build` makes the sides."""

    name: str
    dtype: str
    size: int
    build: Callable[[], Sides]


def model_cases(model: str, name: str, contexts: list[int]) -> Iterator[Case]:
    heads, kv_heads, dim, layers = MODELS[model]
    dtype: torch.dtype = getattr(torch, name)
    for slots, context, causal in itertools.product((8, 16), contexts, (False, True)):
        yield Case(
            f"attention {model} S {slots:2} ctx {context} {'causal' if causal else 'full'}",
            name,
            2 * kv_heads * (context + slots) * dim * dtype.itemsize,
            partial(attention_sides, heads, kv_heads, dim, slots, context, dtype, causal),
        )
    channels = heads * dim
    size = 16 * channels * 2 + 2 * channels + 2 * channels
    yield Case(f"block_conv S 16 C {channels}", name, size * dtype.itemsize, partial(conv_sides, 16, channels, dtype))
    for gathered in (False, True):
        yield Case(
            f"cache_append {model} 8 rows {'tree' if gathered else 'chain'}",
            name,
            4 * layers * kv_heads * 8 * dim * dtype.itemsize,
            partial(append_sides, layers, kv_heads, dim, 16, dtype, gathered),
        )


def cases(contexts: list[int]) -> Iterator[Case]:
    for model, name in itertools.product(MODELS, ("float32", "bfloat16")):
        yield from model_cases(model, name, contexts)
    yield Case("attention, fixed costs", "float32", 64, fixed_costs_sides)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=21)
    parser.add_argument("--contexts", type=int, nargs="+", default=[256, 2048, 8192])
    parser.add_argument("--only", default="", help="run the cases whose name contains this")
    parser.add_argument("--level", help="instruction-set level, default the machine's widest")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    module = backends.load("cpu").module
    if module is None:
        raise SystemExit(f"the cpu backend is not usable: {backends.load('cpu').reason}")
    if args.level:
        module.select_level(args.level)
    setup: dict[str, Any] = machine() | {"repeats": args.repeats}
    print(f"{setup['cpu']}, level {module.description()}, {args.threads} thread(s), microseconds (medians)\n")
    print(
        f"{'case':46} {'dtype':8} {'pydflash':>9} {'torch':>9} {'variant':8} {'ratio':>6} {'p10':>6}"
        f" {'GB/s':>6} {'of copy':>7}"
    )
    results = []
    for case in cases(args.contexts):
        if args.only not in f"{case.name} {case.dtype}":
            continue
        times = measure(case.build(), args.repeats)
        median = {side: statistics.median(values) for side, values in times.items()}
        low = {side: statistics.quantiles(values, n=10)[0] for side, values in times.items()}
        peer = min((side for side in median if side != "pydflash"), key=median.__getitem__)
        rate = case.size / median["pydflash"] / 1e3
        lowest_peer = min(value for side, value in low.items() if side != "pydflash")
        print(
            f"{case.name:46} {case.dtype:8} {median['pydflash']:9.0f} {median[peer]:9.0f} {peer:8}"
            f" {median[peer] / median['pydflash']:6.2f} {lowest_peer / low['pydflash']:6.2f}"
            f" {rate:6.1f} {rate / setup['copy_gb_s']:7.0%}",
            flush=True,
        )
        results.append({"case": case.name, "dtype": case.dtype, "bytes": case.size, "median_us": median, "p10_us": low})
    if args.json:
        args.json.write_text(json.dumps({"setup": setup, "results": results}, indent=2) + "\n")


if __name__ == "__main__":
    with torch.inference_mode():  # as the loop runs them
        main()
