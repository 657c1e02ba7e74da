"""Times the sampling and path ops against the same work in plain torch and in transformers' warpers.

    python bench/sampling.py [--threads 1] [--vocab 152064] [--dtype float32] [--repeats 31] [--json FILE]

Each side of a row of the table runs in turn, so that a change of the machine's speed meets all of them; the table
shows medians, the JSON the 10th percentile too. GB/s counts the logits read once, beside the bandwidth of copying
a tensor of the same size (bytes read plus bytes written). `path_tree` and `path_viterbi` stand beside their
definition in `pydflash.ops.reference`, on lattices with edges ("DFlash 2") and with independent slots ("DFlash 1").
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from machine import machine
from torch import Tensor
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from pydflash import ops
from pydflash.ops import reference

Sides = dict[str, Callable[[], object]]
FILTERS: dict[str, dict[str, Any]] = {
    "top-k 50, top-p 0.9": {"temperature": 0.8, "top_k": 50, "top_p": 0.9},
    "top-p 0.95": {"temperature": 0.8, "top_p": 0.95},
    "min-p 0.05": {"temperature": 0.8, "min_p": 0.05},
    "temperature 0.8": {"temperature": 0.8},
    "greedy": {"temperature": 0.0},
}


def logits_like(shape: tuple[int, ...], kind: str, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Normal logits ("flat": thousands of likely tokens), or with a power law on top ("peaked": a handful)."""
    x = torch.randn(shape, generator=generator)
    if kind == "peaked":
        rank = torch.rand(shape, generator=generator).mul_(shape[-1]).add_(1.0)
        x += 20.0 - 2.0 * rank.log()
    return x.to(dtype)


def accepted_block(logits: Tensor, options: dict[str, Any]) -> Tensor:
    """Drafts that the q-less rule accepts to the last slot, so that every row is visited."""
    slots = logits.shape[1]
    tokens = torch.full((1, slots), -1)
    tokens[0, 0] = 0
    for slot in range(1, slots):
        _, accepted, bonus = ops.reject_sample(logits, tokens, **options)
        assert accepted.item() == slot - 1
        tokens[0, slot] = bonus
    return tokens


def torch_compact(rows: Tensor, options: dict[str, Any]) -> Tensor:
    """The least torch needs: topk (or a full sort where top-p has no top-k), softmax, multinomial."""
    if options["temperature"] == 0:
        return rows.argmax(-1)
    scaled = rows.float() / options["temperature"]
    if options.get("top_k"):
        values, ids = scaled.topk(options["top_k"], -1)
    elif options.get("top_p"):
        values, ids = scaled.sort(-1, descending=True)
    else:
        values, ids = scaled, None
    probs = values.softmax(-1)
    if options.get("top_p"):
        probs = probs.masked_fill(probs.cumsum(-1) - probs >= options["top_p"], 0)
    if options.get("min_p"):
        probs = probs.masked_fill(probs < options["min_p"] * probs.amax(-1, keepdim=True), 0)
    drawn = torch.multinomial(probs, 1)
    return drawn if ids is None else ids.gather(-1, drawn)


def transformers_warpers(rows: Tensor, options: dict[str, Any]) -> Tensor:
    """transformers' own warpers over the whole vocabulary, softmax and multinomial."""
    nothing: Any = None  # the warpers do not read the ids
    scores = TemperatureLogitsWarper(options["temperature"])(nothing, rows.float())
    for name, warper in (("top_k", TopKLogitsWarper), ("top_p", TopPLogitsWarper), ("min_p", MinPLogitsWarper)):
        if options.get(name):
            scores = warper(options[name])(nothing, scores)
    return torch.multinomial(scores.softmax(-1), 1)


def torch_lattice(logits: Tensor, hidden: Tensor, predecessor: Tensor, successor: Tensor) -> Tensor:
    """topk and the lattice of edge scores; no walk."""
    values, ids = logits.topk(16, -1)
    before = torch.cat([torch.zeros(1, 1, 16, dtype=torch.int64), ids[:, :-1]], 1)
    return values[:, :, None] + (predecessor[before] * hidden[:, :, None]) @ successor[ids].transpose(-1, -2)


def measure(sides: Sides, repeats: int) -> dict[str, list[float]]:
    """Milliseconds of every side, taken in turn; one warm-up each."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    for repeat in range(repeats + 1):
        for name, run in sides.items():
            begin = time.perf_counter()
            run()
            if repeat:
                times[name].append((time.perf_counter() - begin) * 1e3)
    return times


def reject_cases(args: argparse.Namespace, dtype: torch.dtype) -> dict[str, tuple[Sides, int]]:
    generator = torch.Generator().manual_seed(0)
    cases: dict[str, tuple[Sides, int]] = {}
    for kind in ("peaked", "flat"):
        logits = logits_like((1, args.slots, args.vocab), kind, dtype, generator)
        copy = torch.empty_like(logits)
        for name, options in FILTERS.items():
            tokens = accepted_block(logits, options)
            sides: Sides = {
                "pydflash": partial(ops.reject_sample, logits, tokens, **options),
                "torch": partial(torch_compact, logits[0], options),
                "copy": partial(copy.copy_, logits),
            }
            if options["temperature"]:
                sides["transformers"] = partial(transformers_warpers, logits[0], options)
            cases[f"reject_sample {kind}, {name}"] = sides, logits.nbytes
    return cases


def select_cases(args: argparse.Namespace, dtype: torch.dtype) -> dict[str, tuple[Sides, int]]:
    generator = torch.Generator().manual_seed(1)
    cases: dict[str, tuple[Sides, int]] = {}
    for vocab, slots, rank in ((49152, 7, 64), (args.vocab, args.slots - 1, 256)):
        logits = logits_like((1, slots, vocab), "peaked", dtype, generator)
        hidden = torch.randn(1, slots, rank, generator=generator).to(dtype)
        predecessor, successor = (torch.randn(vocab, rank, generator=generator).to(dtype) for _ in range(2))
        selector = (logits, hidden, predecessor, successor)
        copy = torch.empty_like(logits)
        sides: Sides = {
            "pydflash": partial(ops.path_select, *selector, torch.zeros(1, dtype=torch.int64), 1.0, 0, torch.zeros(1)),
            "torch": partial(torch_lattice, *selector),
            "copy": partial(copy.copy_, logits),
        }
        cases[f"path_select V {vocab}, {slots} slots, K 16, rank {rank}"] = sides, logits.nbytes
    return cases


def tree_cases() -> dict[str, tuple[Sides, int]]:
    generator = torch.Generator().manual_seed(2)
    cases: dict[str, tuple[Sides, int]] = {}
    anchors, top_k = torch.zeros(1, dtype=torch.int64), 16
    for block_size, square in ((8, True), (16, True), (8, False), (16, False)):
        shape = (1, block_size - 1, *([top_k] if square else []), top_k)
        scores = 2 * torch.randn(shape, generator=generator)
        candidates = torch.rand(1, block_size - 1, 1000, generator=generator).topk(top_k).indices
        normalizers = None if square else scores.logsumexp(-1) + 0.1
        copy, lattice = torch.empty_like(scores), (candidates, scores)
        title = f"S {block_size}, K {top_k}, DFlash {2 if square else 1}"
        for num_nodes in (15, 31, 63):
            sides: Sides = {
                "pydflash": partial(ops.path_tree, anchors, *lattice, num_nodes, normalizers),
                "torch": partial(reference.path_tree, anchors, *lattice, num_nodes, normalizers),
                "copy": partial(copy.copy_, scores),
            }
            cases[f"path_tree {num_nodes} nodes, {title}"] = sides, scores.nbytes
        for num_nodes in (31, 63) if square and block_size == 8 else ():
            trunk = candidates[..., 3]
            sides = {
                "pydflash": partial(ops.path_tree, anchors, *lattice, num_nodes, normalizers, trunk),
                "torch": partial(reference.path_tree, anchors, *lattice, num_nodes, normalizers, trunk),
                "copy": partial(copy.copy_, scores),
            }
            cases[f"path_tree {num_nodes} nodes, trunk, {title}"] = sides, scores.nbytes
        sides = {
            "pydflash": partial(ops.path_viterbi, *lattice, normalizers),
            "torch": partial(reference.path_viterbi, *lattice, normalizers),
            "copy": partial(copy.copy_, scores),
        }
        cases[f"path_viterbi {title}"] = sides, scores.nbytes
    return cases


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--vocab", type=int, default=152064)
    parser.add_argument("--slots", type=int, default=16, help="block size, anchor included")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="float32")
    parser.add_argument("--repeats", type=int, default=31)
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    dtype = getattr(torch, args.dtype)
    setup = {**machine(), "dtype": args.dtype, "vocab": args.vocab, "slots": args.slots, "repeats": args.repeats}
    print(", ".join(f"{name} {value}" for name, value in setup.items()), end="\n\n")
    print(f"{'median ms':48}{'pydflash':>9}{'torch':>9}{'hf':>9}{'x torch':>9}{'x hf':>7}{'GB/s':>7}{'copy':>7}")
    results = []
    cases = reject_cases(args, dtype) | select_cases(args, dtype) | tree_cases()
    for name, (sides, size) in cases.items():
        times = measure(sides, args.repeats)
        median = {side: statistics.median(values) for side, values in times.items()}
        low = {side: statistics.quantiles(values, n=10)[0] for side, values in times.items()}
        own, peer, warpers = median["pydflash"], median["torch"], median.get("transformers", math.nan)
        speed, copy = size / own / 1e6, 2 * size / median["copy"] / 1e6
        print(
            f"{name:48}{own:9.3f}{peer:9.2f}{warpers:9.2f}{peer / own:9.1f}{warpers / own:7.1f}{speed:7.1f}{copy:7.1f}"
        )
        results.append({"case": name, "bytes": size, "median_ms": median, "p10_ms": low})
    if args.json:
        args.json.write_text(json.dumps({"machine": setup, "results": results}, indent=2) + "\n")


if __name__ == "__main__":
    with torch.inference_mode():  # as the loop runs them
        main()
