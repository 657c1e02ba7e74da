"""Times packed_linear against torch's linear layers on a CPU: a whole model's weights in turn, as decoding reads them.

    python bench/cpu_linear.py [--threads 2] [--repeats 15] [--json FILE]

"torch" is F.linear, "oneDNN" the same with weights packed by it beforehand; both bfloat16. Each side runs through every
layer of the model before the next side does, so that no weight is left in a cache that would not hold the model. The
times are medians of whole passes in milliseconds; GB/s counts the weights. "int8" reads half the bytes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from machine import machine
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn import functional as F

from pydflash.decoder import formats

# Layers, and each layer's [out_features, in_features]; of the larger model a few layers show the same.
MODELS = {
    "SmolLM2-135M": (30, ((960, 576), (576, 576), (3072, 576), (576, 1536))),
    "Qwen3-8B, 4 layers": (4, ((6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288))),
}
ROWS = (1, 8, 16, 32, 64)
Layer = Callable[[Tensor], Tensor]


def prepacked(weight: Tensor) -> Layer:
    held = torch.ops.mkldnn._reorder_linear_weight(weight, 8)
    return lambda x: torch.ops.mkldnn._linear_pointwise.default(x, held, None, "none", [], "")


def plain(weight: Tensor) -> Layer:
    return lambda x: F.linear(x, weight)


def sides_of(weights: list[Tensor]) -> dict[str, list[Layer]]:
    sides: dict[str, list[Layer]] = {"torch": [plain(w) for w in weights]}
    if torch.ops.mkldnn._is_mkldnn_bf16_supported():
        sides["oneDNN"] = [prepacked(w) for w in weights]
    names = {"packed": "bfloat16", "int8": "int8"}
    return sides | {side: [formats.of(name).linear(w, None) for w in weights] for side, name in names.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    found: list[dict[str, Any]] = []
    table = Table(
        "model", "rows", "torch ms", "oneDNN ms", "packed ms", "GB/s", "int8 ms", "GB/s", "times torch, oneDNN"
    )
    for name, (layers, shapes) in MODELS.items():
        weights = [torch.randn(shape).bfloat16() for _ in range(layers) for shape in shapes]
        sides, size = sides_of(weights), sum(w.nbytes for w in weights)
        for rows in ROWS:
            inputs = {w.shape[1]: torch.randn(rows, w.shape[1]).bfloat16() for w in weights}
            times: dict[str, list[float]] = {side: [] for side in sides}
            with torch.inference_mode():
                for _ in range(args.repeats + 1):
                    for side, calls in sides.items():
                        time.sleep(0.02)  # until the threads of the side before no longer spin
                        begin = time.perf_counter()
                        for weight, call in zip(weights, calls, strict=True):
                            call(inputs[weight.shape[1]])
                        times[side].append((time.perf_counter() - begin) * 1e3)
            row = {side: statistics.median(each[1:]) for side, each in times.items()}
            found.append({"model": name, "rows": rows, "weight_bytes": size, "ms": row})
            ours, eight = size / row["packed"] / 1e6, size / 2 / row["int8"] / 1e6
            ratios = ", ".join(f"{row[s] / row['packed']:.2f}" for s in ("torch", "oneDNN") if s in row)
            numbers = [f"{row[s]:.1f}" if s in row else "" for s in ("torch", "oneDNN", "packed")]
            table.add_row(name, str(rows), *numbers, f"{ours:.1f}", f"{row['int8']:.1f}", f"{eight:.1f}", ratios)
    Console(width=110).print(table)
    if args.json is not None:
        work = args.json.with_suffix(".tmp")
        work.write_text(json.dumps({"machine": machine(), "threads": args.threads, "rows": found}, indent=1) + "\n")
        work.replace(args.json)


if __name__ == "__main__":
    main()
