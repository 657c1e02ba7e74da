"""Times block_attention on a GPU against torch's attentions, and flash-attn and flashinfer where they are installed.

    python bench/gpu_ops_attention.py [--slots 1 8 16 32 64] [--contexts 512 4096 8192 32768] [--batches 1 4 8 32]
        [--mask causal full] [--no-flex] [--repeats 7] [--out FILE]

Shapes of Qwen3-8B: 32 query heads and 8 KV heads of 128, bfloat16. "causal" is a verification: slot i sees the context
and the slots up to i; "full" a drafter's bidirectional block. Every side is a CUDA graph over copies of keys and values
that are together far larger than the L2 cache. "copy" is the share of the bandwidth of a large copy, measured in the
same run, that keys and values reach, each counted once.

Peers get their best case: keys and values of exactly the context and the block, joined in one tensor, and no mask where
all is seen. Ours reads a cache that could hold more, finds the length in the device's memory, and its time includes
what one captured launch for every length costs. The peer shown is the fastest that takes the shape:
  flash, efficient, cudnn   backends of scaled_dot_product_attention, with enable_gqa and, as "folded", with the query
                            heads of a group folded into the rows as our kernel does it
  flex                      FlexAttention, compiled for the shape
  flash-attn, flashinfer    their kernels for a joined cache
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from gpu_time import copy_bandwidth, graph_ms
from machine import machine
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention as sdpa

from pydflash import ops

HEADS, KV_HEADS, DIM, DTYPE = 32, 8, 128, torch.bfloat16
ROTATION = 256 << 20  # bytes of keys and values that one graph goes through, at least
HEADROOM = 128  # rows of the cache beyond the context
BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}
Call = Callable[[Tensor, Tensor, Tensor], object]  # query, joined keys and values


def random(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=DTYPE, device="cuda")


class Shape:
    """One shape's inputs, a set of them for every copy."""

    def __init__(self, batch: int, slots: int, context: int, causal: bool) -> None:
        self.batch, self.slots, self.context, self.causal = batch, slots, context, causal
        self.bytes = 2 * batch * KV_HEADS * (context + slots) * DIM * DTYPE.itemsize
        self.copies = max(2, min(40, -(-ROTATION // self.bytes)))
        self.queries = [random(batch, slots, HEADS, DIM).transpose(1, 2) for _ in range(self.copies)]

    def microseconds(self, calls: list[Callable[[], object]], repeats: int) -> float:
        calls = calls * max(1, 40 // len(calls))
        return graph_ms(lambda: [call() for call in calls], repeats) * 1e3 / len(calls)

    def ours(self) -> list[Callable[[], object]]:
        lengths = torch.full((self.batch,), self.context, dtype=torch.int32, device="cuda")
        depths = torch.arange(self.slots, dtype=torch.int32, device="cuda")[None]
        bits = (2 << torch.arange(self.slots)) - 1 if self.causal else torch.full((self.slots,), -1)
        visibility = bits[None].cuda()
        rows = self.context + HEADROOM
        calls = []
        for q in self.queries:
            caches = [random(self.batch, KV_HEADS, rows, DIM) for _ in range(2)]
            blocks = [random(self.batch, self.slots, KV_HEADS, DIM).transpose(1, 2) for _ in range(2)]
            arguments = (q, *caches, *blocks, lengths, visibility, depths)
            calls.append(lambda arguments=arguments: ops.block_attention(*arguments))
        return calls

    def peers(self, flex: bool) -> dict[str, Call]:
        rows, total = KV_HEADS, self.context + self.slots
        mask = None
        if self.causal and self.slots > 1:
            hidden = torch.ones(self.slots, total, dtype=torch.bool, device="cuda").triu(self.context + 1)
            mask = torch.zeros(self.slots, total, dtype=DTYPE, device="cuda").masked_fill_(hidden, -torch.inf)
        folded_mask = None if mask is None else mask.repeat(HEADS // KV_HEADS, 1)

        def gqa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return sdpa(q, k, v, attn_mask=mask, enable_gqa=True)

        def folded(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return sdpa(q.reshape(self.batch, rows, -1, DIM), k, v, attn_mask=folded_mask)

        calls = {}
        for (name, backend), (way, call) in itertools.product(BACKENDS.items(), {"": gqa, " folded": folded}.items()):
            calls[name + way] = with_backend(backend, call)
        if flex:
            calls["flex"] = self.flex()
        if importlib.util.find_spec("flash_attn"):
            calls["flash-attn"] = self.flash_attn
        if importlib.util.find_spec("flashinfer") and self.batch == 1:
            calls["flashinfer"] = self.flashinfer
        return calls

    def flex(self) -> Call:
        torch._dynamo.reset()
        compiled = torch.compile(flex_attention, dynamic=False)
        mask, context = None, self.context
        if self.causal:
            total = context + self.slots
            mask = create_block_mask(lambda b, h, i, j: j <= context + i, None, None, self.slots, total, device="cuda")
        return lambda q, k, v: compiled(q, k, v, block_mask=mask, enable_gqa=True)

    def flash_attn(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        from flash_attn import flash_attn_with_kvcache

        return flash_attn_with_kvcache(*(x.transpose(1, 2) for x in (q, k, v)), causal=self.causal)

    def flashinfer(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        from flashinfer import single_prefill_with_kv_cache

        return single_prefill_with_kv_cache(
            q[0].transpose(0, 1), k[0], v[0], causal=self.causal, kv_layout="HND", backend="auto"
        )


def with_backend(backend: SDPBackend, call: Call) -> Call:
    def run(q: Tensor, k: Tensor, v: Tensor) -> object:
        with sdpa_kernel(backend):
            return call(q, k, v)

    return run


def measure(shape: Shape, flex: bool, repeats: int) -> dict[str, float]:
    """Microseconds of ours and of every peer that takes the shape."""
    times = {"pydflash": shape.microseconds(shape.ours(), repeats)}
    torch.cuda.empty_cache()
    joined = [
        (q, *(random(shape.batch, KV_HEADS, shape.context + shape.slots, DIM) for _ in range(2))) for q in shape.queries
    ]
    for name, call in shape.peers(flex).items():
        try:
            call(*joined[0])
        except RuntimeError:  # no such kernel for these shapes
            continue
        times[name] = shape.microseconds([lambda call=call, x=x: call(*x) for x in joined], repeats)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--slots", type=int, nargs="+", default=[1, 8, 16, 32, 64])
    parser.add_argument("--contexts", type=int, nargs="+", default=[512, 4096, 8192, 32768])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 8, 32])
    parser.add_argument("--mask", nargs="+", choices=["causal", "full"], default=["causal"])
    parser.add_argument("--no-flex", action="store_true", help="FlexAttention compiles for seconds a shape")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--out", type=Path, help="also write the results to this JSON file")
    args = parser.parse_args()
    torch.manual_seed(0)
    bandwidth = copy_bandwidth()
    setup: dict[str, Any] = machine() | {"gpu_copy_gb_s": round(bandwidth, 1), "repeats": args.repeats}
    print(f"{setup['gpu']}, copy {bandwidth:.0f} GB/s, {DTYPE}, microseconds (medians)\n")
    print(f"batch slots context {'mask':6} {'pydflash':>9} {'copy':>5} {'peer':>9} {'':17} {'ratio':>6}")
    results = []
    for mask, batch, slots, context in itertools.product(args.mask, args.batches, args.slots, args.contexts):
        shape = Shape(batch, slots, context, mask == "causal")
        times = measure(shape, not args.no_flex, args.repeats)
        peer = min((name for name in times if name != "pydflash"), key=times.__getitem__)
        ours, floor = times["pydflash"], shape.bytes / bandwidth / 1e3
        print(
            f"{batch:5} {slots:5} {context:7} {mask:6} {ours:9.2f} {floor / ours:5.0%} {times[peer]:9.2f} {peer:17}"
            f" {times[peer] / ours:6.2f}",
            flush=True,
        )
        case = {"batch": batch, "slots": slots, "context": context, "mask": mask}
        results.append(case | {"floor_us": floor, "us": times})
        if args.out:  # after each, since FlexAttention takes minutes for all of them
            args.out.write_text(json.dumps({"setup": setup, "results": results}, indent=2) + "\n")
        del shape
        torch.cuda.empty_cache()


if __name__ == "__main__":
    with torch.inference_mode():
        main()
