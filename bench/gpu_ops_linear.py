"""Times skinny_linear against cuBLAS (torch's F.linear) on a GPU, alone and in a decoder's order.

    python bench/gpu_ops_linear.py [--rows 1 8 16] [--models NAME ...] [--repeats 7] [--out FILE]

Both sides are replayed in CUDA graphs over copies of the weights that are together far larger than the L2 cache.
cuBLAS gets its best case: the weights that read one input are joined into one, and a gated pair is only multiplied,
without the gate. Our side takes them apart, as a model holds them, and gates. "copy" is the share of the bandwidth of
a large copy, measured in the same run, that the bytes of the weights reach.

The chain is a whole model: qkv, o, gate and up, down of every layer, each with its own weights, with an RMSNorm
where a decoder has attention and its norms, then the head; for cuBLAS with the gate's kernel.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from gpu_time import copy_bandwidth, graph_ms
from machine import machine
from torch import Tensor
from torch.nn import functional as F

from pydflash import ops

DTYPE = torch.bfloat16
ROTATION = 2 << 30  # bytes of weights that one graph goes through
Layer = list[list[Tensor]]  # qkv, o, gate and up, down


@dataclass(frozen=True)
class Model:
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    layers: int
    vocab: int

    def linears(self) -> dict[str, tuple[int, list[int], bool]]:
        """in_features, out_features and whether it is gated."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {
            "qkv": (self.hidden, [q, kv, kv], False),
            "o": (q, [self.hidden], False),
            "gate_up": (self.hidden, [self.intermediate] * 2, True),
            "down": (self.intermediate, [self.hidden], False),
        }


MODELS = {
    "SmolLM2-135M": Model(576, 9, 3, 64, 1536, 30, 49152),
    "Qwen3-8B": Model(4096, 32, 8, 128, 12288, 36, 151936),
    "Qwen3-32B": Model(5120, 64, 8, 128, 25600, 64, 151936),
}
EXTRA = {
    "Qwen3-8B": {"fc": (5 * 4096, [4096], False), "conv": (4096, [512], False), "head": (4096, [151936], False)},
    "Qwen3-32B": {"head": (5120, [151936], False)},
    "SmolLM2-135M": {"head": (576, [49152], False)},
}


def weight(out_features: int, in_features: int) -> Tensor:
    return torch.randn(out_features, in_features, dtype=DTYPE, device="cuda").mul_(in_features**-0.5)


def size(weights: list[Tensor]) -> int:
    return sum(w.nbytes for w in weights)


def single(
    in_features: int, out_features: list[int], gated: bool, rows: list[int], repeats: int
) -> list[dict[str, Any]]:
    one = 2 * in_features * sum(out_features)
    copies = max(2, ROTATION // one)
    sets = [[weight(n, in_features) for n in out_features] for _ in range(copies)]
    joined = [torch.cat(weights) for weights in sets]
    results = []
    for count in rows:
        x = torch.randn(count, in_features, dtype=DTYPE, device="cuda")
        ours = graph_ms(lambda x=x: [ops.skinny_linear(x, w, None, gated) for w in sets], repeats)
        cublas = graph_ms(lambda x=x: [F.linear(x, w) for w in joined], repeats)
        results.append(
            {"rows": count, "bytes": one, "ours_us": ours / copies * 1e3, "cublas_us": cublas / copies * 1e3}
        )
    return results


def chain(layers: list[Layer], head: Tensor, rows: int, cublas: bool) -> Callable[[], Tensor]:
    hidden = head.shape[1]
    x = torch.randn(rows, hidden, dtype=DTYPE, device="cuda")
    norm = torch.ones(hidden, dtype=DTYPE, device="cuda")

    def linear(x: Tensor, weights: list[Tensor], gated: bool = False) -> Tensor:
        if not cublas:
            return ops.skinny_linear(x, weights, None, gated)
        if not gated:
            return F.linear(x, weights[0])
        return ops.swiglu(F.linear(x, weights[0]))

    def run() -> Tensor:
        y = x
        for qkv, o, gate_up, down in layers:
            q = linear(y, qkv)[:, : o[0].shape[1]]
            a, _ = ops.add_rms_norm(q, None, torch.ones_like(q[0]) if q.shape[1] != hidden else norm, 1e-6)
            y, _ = ops.add_rms_norm(linear(a, o), None, norm, 1e-6)
            y = linear(linear(y, gate_up, True), down)
        return linear(y, [head])

    return run


def chains(model: Model, rows: list[int], repeats: int) -> list[dict[str, Any]]:
    layers = [
        [[weight(n, in_features) for n in out_features] for in_features, out_features, _ in model.linears().values()]
        for _ in range(model.layers)
    ]
    head = weight(model.vocab, model.hidden)
    total = sum(size(weights) for layer in layers for weights in layer) + head.nbytes
    times = [graph_ms(chain(layers, head, count, False), repeats) for count in rows]
    for layer in layers:
        layer[:] = [[torch.cat(weights)] for weights in layer]
    return [
        {
            "rows": count,
            "bytes": total,
            "ours_us": ours * 1e3,
            "cublas_us": graph_ms(chain(layers, head, count, True), repeats) * 1e3,
        }
        for count, ours in zip(rows, times, strict=True)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 16])
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--out", type=Path, help="also write the results to this JSON file")
    args = parser.parse_args()
    torch.manual_seed(0)
    bandwidth = copy_bandwidth()
    setup = machine() | {"gpu_copy_gb_s": round(bandwidth, 1), "repeats": args.repeats}
    print(f"{setup['gpu']}, copy {bandwidth:.0f} GB/s, {DTYPE}, microseconds (medians)\n")
    print(f"{'linear':28} {'rows':>4} {'ours':>9} {'copy':>5} {'cuBLAS':>9} {'copy':>5} {'ratio':>6}")
    results = []
    for name in args.models:
        model = MODELS[name]
        cases = model.linears() | EXTRA[name]
        jobs = [(part, lambda case=case: single(*case, args.rows, args.repeats)) for part, case in cases.items()]
        jobs.append(("chain", lambda model=model: chains(model, args.rows, args.repeats)))
        for part, job in jobs:
            for result in job():
                floor = result["bytes"] / bandwidth / 1e3
                ours, cublas = result["ours_us"], result["cublas_us"]
                print(
                    f"{name + ' ' + part:28} {result['rows']:4} {ours:9.1f} {floor / ours:5.0%}"
                    f" {cublas:9.1f} {floor / cublas:5.0%} {cublas / ours:6.2f}",
                    flush=True,
                )
                results.append({"model": name, "linear": part, "floor_us": floor} | result)
            torch.cuda.empty_cache()
    if args.out:
        args.out.write_text(json.dumps({"setup": setup, "results": results}, indent=2) + "\n")


if __name__ == "__main__":
    with torch.inference_mode():
        main()
