"""Times the sampling and path ops on a GPU against sort-based sampling in torch, torch.topk and flashinfer.

    python bench/gpu_ops_sampling.py [--vocab 151936] [--slots 16] [--batches 1 8 32] [--dtypes bfloat16 float32]
        [--kinds peaked flat] [--only NAME] [--no-peers] [--repeats 9] [--out FILE]

Every side is a CUDA graph of calls on inputs that are together larger than the L2 cache; the table shows medians of the
replays, per call in microseconds. GB/s counts the logits read once, "copy" is their share of the bandwidth of a large
copy in the same run. Logits are normal with a power law on top ("peaked": a handful of likely tokens) or without
("flat": thousands).

reject_sample, "no q": the drafts are those the target draws, so that every slot is accepted. "q": 16 candidates a
slot as path_select reports them, most refused early. "dense q": over the whole vocabulary. The peer does less: it
draws one token from every row and compares nothing.
  torch        softmax, and where the filters need the order sort, cumsum and gather; then multinomial
  flashinfer   its sampling from filtered probabilities, where it is installed
  torch.topk   for path_select, without lattice and walk
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from gpu_ops_small import captured
from gpu_time import copy_bandwidth, milliseconds
from machine import machine
from torch import Tensor

from pydflash import ops

ROTATION = 128 << 20  # bytes of logits that one graph goes through, at least
FILTERS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.8},
    "top-k 20, top-p 0.95": {"temperature": 0.8, "top_k": 20, "top_p": 0.95},
    "top-p 0.9": {"temperature": 0.8, "top_p": 0.9},
    "min-p 0.05": {"temperature": 0.8, "min_p": 0.05},
}
Call = Callable[[], object]


@dataclass
class Case:
    """The calls of every side, one for each set of inputs, and the bytes of the logits of one."""

    name: str
    bytes: int
    sides: dict[str, list[Call]] = field(default_factory=dict)


def random_logits(shape: tuple[int, ...], kind: str, dtype: torch.dtype) -> Tensor:
    x = torch.randn(shape, device="cuda")
    if kind == "peaked":
        x += 20.0 - 2.0 * torch.rand(shape, device="cuda").mul_(shape[-1]).add_(1.0).log()
    return x.to(dtype)


def copies_of(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return max(2, -(-ROTATION // (torch.Size(shape).numel() * dtype.itemsize)))


def on_device(options: dict[str, Any], batch: int) -> dict[str, Tensor]:
    """The options as a graph needs them: a number from the host would be copied to the device in every call."""
    kinds = {"top_k": torch.int32, "seeds": torch.int64, "starts": torch.int32}
    values = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "seeds": 0, "starts": 0} | options
    return {
        name: torch.full((batch,), value, dtype=kinds.get(name, torch.float32), device="cuda")
        for name, value in values.items()
    }


def accepted_block(logits: Tensor, options: dict[str, Tensor]) -> Tensor:
    """Drafts that the rule without q accepts to the last slot."""
    batch, slots, _ = logits.shape
    tokens = torch.full((batch, slots), -1, device="cuda")
    tokens[:, 0] = 0
    for slot in range(1, slots):
        tokens[:, slot] = ops.reject_sample(logits, tokens, **options)[2]
    return tokens


def candidates_of(logits: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Drafts drawn from q, and q: the target's logits with noise, the 16 largest of each row."""
    noisy = logits[:, :-1].float() + torch.randn_like(logits[:, :-1], dtype=torch.float32)
    values, ids = noisy.topk(16, -1)
    probs = values.softmax(-1)
    picked = torch.multinomial(probs.flatten(0, 1), 1).view(*probs.shape[:2], 1)
    drafts = ids.gather(-1, picked).squeeze(-1)
    return torch.cat([drafts.new_zeros(len(drafts), 1), drafts], 1), (ids, probs)


def torch_sampling(rows: Tensor, options: dict[str, Any]) -> Tensor:
    """One token of every row."""
    if not options["temperature"]:
        return rows.argmax(-1)
    probs = (rows.float() / options["temperature"]).softmax(-1)
    if options.get("min_p"):
        probs = probs.masked_fill(probs < options["min_p"] * probs.amax(-1, keepdim=True), 0)
    if not (options.get("top_k") or options.get("top_p")):
        return torch.multinomial(probs, 1)
    probs, ids = probs.sort(-1, descending=True)
    if options.get("top_k"):
        probs[:, options["top_k"] :] = 0
        probs /= probs.sum(-1, keepdim=True)
    probs = probs.masked_fill(probs.cumsum(-1) - probs >= options["top_p"], 0)
    return ids.gather(-1, torch.multinomial(probs, 1))


def flashinfer_sampling(rows: Tensor, options: dict[str, Any]) -> Tensor:
    from flashinfer import sampling

    probs = torch.softmax(rows.float() / options["temperature"], -1)
    if options.get("top_k"):
        return sampling.top_k_top_p_sampling_from_probs(probs, options["top_k"], options["top_p"])
    if options.get("top_p"):
        return sampling.top_p_sampling_from_probs(probs, options["top_p"])
    if options.get("min_p"):
        return sampling.min_p_sampling_from_probs(probs, options["min_p"])
    return sampling.sampling_from_probs(probs)


def reject_cases(args: argparse.Namespace, batch: int, dtype: torch.dtype) -> Iterator[Case]:
    shape = (batch, args.slots, args.vocab)
    for kind in args.kinds:
        sets = [random_logits(shape, kind, dtype) for _ in range(copies_of(shape, dtype))]
        for (name, options), proposal in itertools.product(FILTERS.items(), ("no q", "q", "dense q")):
            title = f"reject_sample {batch} x {args.slots} {dtype_name(dtype)} {kind}, {name}, {proposal}"
            if args.only not in title or (proposal != "no q" and not options["temperature"]):
                continue
            if proposal == "dense q" and (batch > 8 or name != "temperature"):
                continue
            case = Case(title, sets[0].nbytes)
            ours: list[Call] = []
            tensors = on_device(options, batch)
            for logits in sets:
                if proposal == "no q":
                    ours.append(partial(ops.reject_sample, logits, accepted_block(logits, tensors), **tensors))
                    continue
                tokens, q = candidates_of(logits)
                dense = torch.zeros_like(logits[:, :-1], dtype=torch.float32).scatter(-1, *q)
                draft = dense if proposal == "dense q" else q
                ours.append(partial(ops.reject_sample, logits, tokens, None, draft, **tensors))
            case.sides["pydflash"] = ours
            if args.peers and proposal == "no q":
                rows = [logits.flatten(0, 1) for logits in sets]
                case.sides["torch"] = [partial(torch_sampling, x, options) for x in rows]
                if importlib.util.find_spec("flashinfer") and options["temperature"]:
                    case.sides["flashinfer"] = [partial(flashinfer_sampling, x, options) for x in rows]
            yield case


def select_cases(args: argparse.Namespace, batch: int, dtype: torch.dtype) -> Iterator[Case]:
    slots, vocab = args.slots - 1, args.vocab
    shape = (batch, slots, vocab)
    anchors, starts = (torch.zeros(batch, dtype=kind, device="cuda") for kind in (torch.int64, torch.int32))
    ones = torch.ones(batch, device="cuda")
    for kind, (rank, top_k, heat) in itertools.product(
        args.kinds, ((0, 16, None), (256, 16, None), (256, 16, 1.0), (0, 1024, None))
    ):
        walk = "greedy" if heat is None else f"T {heat}"
        title = f"path_select {batch} x {slots} {dtype_name(dtype)} {kind}, K {top_k}, rank {rank}, {walk}"
        if args.only not in title:
            continue
        case = Case(title, torch.Size(shape).numel() * dtype.itemsize)
        sets = [random_logits(shape, kind, dtype) for _ in range(copies_of(shape, dtype))]
        selector: list[Tensor | None] = [None] * 3
        if rank:
            selector = [torch.randn(n, rank, device="cuda").to(dtype) for n in (batch * slots, vocab, vocab)]
            selector[0] = selector[0].view(batch, slots, rank) if selector[0] is not None else None
        case.sides["pydflash"] = [
            partial(ops.path_select, x, *selector, anchors, heat and heat * ones, anchors, starts, top_k, vocab)
            for x in sets
        ]
        if args.peers:
            case.sides["torch"] = [partial(x.topk, top_k, -1) for x in sets]
        yield case


def path_cases(args: argparse.Namespace, batch: int) -> Iterator[Case]:
    """path_tree and path_viterbi, of which a lattice is the input."""
    anchors, top_k = torch.zeros(batch, dtype=torch.int64, device="cuda"), 16
    for slots, square in itertools.product((7, 15), (True, False)):
        scores = 2 * torch.randn(batch, slots, *([top_k] if square else []), top_k, device="cuda")
        candidates = torch.rand(batch, slots, 1000, device="cuda").topk(top_k).indices
        lattice = (candidates, scores, None if square else scores.logsumexp(-1) + 0.1)
        shape = f"{batch} x {slots}, K {top_k}, {'edges' if square else 'slots'}"
        for nodes, trunk in ((15, None), (31, None), (63, None), (63, candidates[..., 3])):
            call = partial(ops.path_tree, anchors, *lattice[:2], nodes, lattice[2], trunk)
            title = f"path_tree {shape}, {nodes} nodes{'' if trunk is None else ', trunk'}"
            yield Case(title, scores.nbytes, {"pydflash": [call] * 8})
        yield Case(f"path_viterbi {shape}", scores.nbytes, {"pydflash": [partial(ops.path_viterbi, *lattice)] * 8})


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def microseconds(case: Case, repeats: int) -> dict[str, float]:
    """Median time of a call of every side, replayed in turn."""
    graphs = {name: captured(calls, len(calls)) for name, calls in case.sides.items()}
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(repeats + 1):
        for name, graph in graphs.items():
            times[name].append(milliseconds(graph.replay) * 1e3 / len(case.sides[name]))
    return {name: statistics.median(values[1:]) for name, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--vocab", type=int, default=151936)
    parser.add_argument("--slots", type=int, default=16, help="block size, anchor included")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--kinds", nargs="+", default=["peaked", "flat"], choices=["peaked", "flat"])
    parser.add_argument("--only", default="", help="run the cases whose name contains this")
    parser.add_argument("--no-peers", dest="peers", action="store_false")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--out", type=Path, help="also write the results to this file")
    args = parser.parse_args()
    torch.manual_seed(0)
    copy = copy_bandwidth()
    setup = machine() | {"gpu_copy_gb_s": round(copy), "vocab": args.vocab, "repeats": args.repeats}
    print(f"{setup.get('gpu')}, a large copy {copy:.0f} GB/s, microseconds per call (medians)\n")
    print(f"{'case':76} {'pydflash':>8} {'torch':>9} {'flashinf':>8} {'ratio':>7} {'GB/s':>6} {'copy':>5}")
    results = []
    for batch in args.batches:
        groups = [path_cases(args, batch)]
        for name in args.dtypes:
            dtype = getattr(torch, name)
            groups += [reject_cases(args, batch, dtype), select_cases(args, batch, dtype)]
        for case in itertools.chain(*groups):
            if args.only not in case.name:
                continue
            median = microseconds(case, args.repeats)
            ours = median["pydflash"]
            peer = min((time for side, time in median.items() if side != "pydflash"), default=float("nan"))
            rate = case.bytes / ours / 1e3
            columns = [median.get(side, float("nan")) for side in ("torch", "flashinfer")]
            print(
                f"{case.name:76} {ours:8.2f} {columns[0]:9.2f} {columns[1]:8.2f} {peer / ours:7.2f} {rate:6.0f}"
                f" {rate / copy:5.0%}",
                flush=True,
            )
            results.append({"case": case.name, "bytes": case.bytes, "median_us": median})
    if args.out:
        args.out.write_text(json.dumps({"setup": setup, "results": results}, indent=2) + "\n")


if __name__ == "__main__":
    with torch.inference_mode():  # as the loop runs them
        main()
