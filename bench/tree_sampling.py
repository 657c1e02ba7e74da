"""Trees at a temperature: the rule without q on best-first trees, against a sampled walk as the trunk of the tree.

    python bench/tree_sampling.py smollm2 --drafter models/smollm2-135m-instruct-dflash2 --prompts gsm8k.jsonl \
        --json bench/results/tree_sampling.json

Three ways to spend N drafts on a lattice, all exact:
  walk    7 drafts sampled from q, accepted with probability min(1, p / q), as without a tree;
  tree    the N best nodes; the target draws, and a node that says the same is descended to;
  trunk   the sampled walk, and the best nodes beside it up to N. At a node of the walk its child is accepted with
          probability min(1, p / q); else the token comes from the residual max(p - q, 0), and where another child says
          it, the round goes on from there as in a tree.
The rounds are drawn over texts that the target sampled plainly. Given the text, the walk's child is kept with
probability min(1, q / p) of the text's token; else the rejected child follows max(q - p, 0), whatever the text says.
"""

from __future__ import annotations

import argparse
import heapq
import json
import math
import os
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import numpy as np
import torch
from acceptance import Text, answers, load_drafter, load_target, without_loops
from machine import machine
from trees import kept_drafts, rounds_over

from pydflash import Drafter, Target
from pydflash.target.loading import load_tokenizer
from pydflash.training.evaluate import bootstrap, paired, sampled_rounds
from pydflash.training.features import FeatureSource, pad_records
from pydflash.training.objective import block_hidden

SIZES = (15, 31, 63)


class Lattice:
    """What one text's rounds are drawn from, as arrays: candidates [A, S-1, K], edge log-probabilities
    [A, S-1, K, K], the target's probabilities of candidates after the text [A, S-1, K], and of the text [A, S-1].
    """

    @torch.no_grad()
    def __init__(self, drafter: Drafter, target: Target, record: Text, temperature: float) -> None:
        ids, prompt_length = record
        batch = FeatureSource(target, distil=True).batch([0], pad_records([record], multiple=1))
        anchors = torch.arange(prompt_length, len(ids) - 1)
        size, config, selector = drafter.config.block_size, drafter.config, drafter.candidate_selector
        hidden = block_hidden(drafter, target.embed_weight, batch, anchors[None], "dense")[0, :, 1:]
        assert selector is not None
        assert batch.logits is not None
        books = selector.predecessor_codebook, selector.successor_codebook
        parts = drafter.logits(hidden, target.head), selector.hidden_projection(hidden), *books, batch.ids[0, anchors]
        _, candidates, _, scores = drafter.ops.path_select(
            *parts, None, 0, anchors, config.selector_top_k, config.vocab_size
        )
        at = (anchors[:, None] + torch.arange(1, size)).clamp_max(len(ids) - 1)
        law = torch.softmax(batch.logits[0].float() / temperature, -1)[at - 1]
        self.text = batch.ids[0, at].numpy()
        self.p_text = law.gather(-1, batch.ids[0, at][..., None]).squeeze(-1).numpy()
        self.p = law.gather(-1, candidates).numpy()
        self.candidates = candidates.numpy()
        self.edges = torch.log_softmax(scores.float() / temperature, -1).numpy()
        self.order = np.argsort(-self.edges, axis=-1, kind="stable")


def best_first(lattice: Lattice, a: int, count: int, without: set[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """The `count` best nodes, as candidate indices from the anchor on, that are not in `without`."""
    depth_limit = lattice.edges.shape[1]
    heap: list[tuple[float, int, tuple[int, ...], int]] = []

    def push(parent: tuple[int, ...], base: float, rank: int) -> None:
        if len(parent) < depth_limit and rank < lattice.order.shape[-1]:
            row = parent[-1] if parent else 0
            child = int(lattice.order[a, len(parent), row, rank])
            total = base + float(lattice.edges[a, len(parent), row, child])
            heapq.heappush(heap, (-total, len(parent), (*parent, child), rank))

    found: list[tuple[int, ...]] = []
    bases: dict[tuple[int, ...], float] = {(): 0.0}
    push((), 0.0, 0)
    while heap and len(found) < count:
        negative, _, node, rank = heapq.heappop(heap)
        bases[node] = -negative
        push(node, -negative, 0)
        push(node[:-1], bases[node[:-1]], rank + 1)
        if node not in without:
            found.append(node)
    return found


def trunk_round(lattice: Lattice, a: int, draw: np.random.Generator) -> dict[int, int]:
    """Drafts kept in one round from anchor a, for each number of nodes."""
    slots, trunk, kept, failed = lattice.edges.shape[1], [], 0, False
    for d in range(slots):
        row = trunk[-1] if trunk else 0
        q = np.exp(lattice.edges[a, d, row].astype(np.float64))
        if not failed:
            hit = np.flatnonzero(lattice.candidates[a, d] == lattice.text[a, d])
            chance = q[hit[0]] / lattice.p_text[a, d] if len(hit) else 0.0
            if draw.random() < chance:
                trunk.append(int(hit[0]))
                kept += 1
                continue
            failed = True
            q = np.maximum(q - lattice.p[a, d], 0)
        trunk.append(int(draw.choice(len(q), p=q / q.sum())) if q.sum() > 0 else 0)
    walk = {tuple(trunk[: d + 1]) for d in range(slots)}
    extra = best_first(lattice, a, max(SIZES) - slots, walk)
    out = {}
    for size in SIZES:
        nodes, deep, node = set(extra[: size - slots]), kept, tuple(trunk[:kept])
        while deep < slots:
            hit = np.flatnonzero(lattice.candidates[a, deep] == lattice.text[a, deep])
            node = (*node, int(hit[0])) if len(hit) else node
            if not len(hit) or node not in nodes:
                break
            deep += 1
        out[size] = deep
    return out


def trunk_rounds(lattice: Lattice, draw: np.random.Generator) -> dict[int, int]:
    """Rounds over the text for each number of nodes; the rounds of one size are drawn on their own."""
    out = {}
    for size in SIZES:
        at = rounds = 0
        while at < len(lattice.text):
            kept = trunk_round(lattice, at, draw)[size]
            at += min(kept, len(lattice.text) - at - 1) + 1
            rounds += 1
        out[size] = rounds
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("target", help="folder or hub id, or smollm2")
    parser.add_argument("--drafter", required=True)
    parser.add_argument("--prompts", nargs="+", type=Path, required=True)
    parser.add_argument("--num-prompts", type=int, default=10)
    parser.add_argument("--max-new-tokens", type=int, default=192)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--texts", type=Path, help="texts kept by bench/trees.py, to take instead of new ones")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    folder, plain = load_target(args.target, args.dtype)
    drafter = load_drafter(args.drafter, plain)
    target = Target(plain.model, drafter.config.target_layer_ids)
    if args.texts:
        texts = torch.load(args.texts / f"texts-{args.temperature:g}.pt", weights_only=False)
    else:
        settings = args.num_prompts, args.max_new_tokens, args.temperature
        texts = answers(plain, load_tokenizer(folder), args.prompts, *settings)
    draw = np.random.default_rng(0)
    lengths: dict[str, dict[str, list[float]]] = {}
    for prompts, records in texts.items():
        for record in (r for r in without_loops(records[: args.num_prompts]) if len(r[0]) - r[1] > 2):
            tokens = len(record[0]) - record[1] - 1
            found = {"walk": sampled_rounds(drafter, target, [record], args.temperature)[0]}
            trees = kept_drafts(drafter, target, record)
            found |= {f"tree {n}": float(rounds_over(trees[f"tree {n}"])) for n in SIZES}
            rounds = trunk_rounds(Lattice(drafter, target, record, args.temperature), draw)
            found |= {f"trunk {n}": float(count) for n, count in rounds.items()}
            for name, count in found.items():
                lengths.setdefault(prompts, {}).setdefault(name, []).append(tokens / count)
        print(prompts, {n: round(sum(v) / len(v), 3) for n, v in lengths[prompts].items()}, flush=True)
    names = list(next(iter(lengths.values())))
    report: list[dict[str, Any]] = []
    for name in names:
        mean = sum(sum(found[name]) / len(found[name]) for found in lengths.values()) / len(lengths)
        values = [x for found in lengths.values() for x in found[name]]
        report.append(
            {"method": name, "acceptance_length": mean, "requests": len(values), "interval": bootstrap(values)}
        )
        size = name.rpartition(" ")[2]
        if name.startswith("trunk"):
            other = [x for found in lengths.values() for x in found[f"tree {size}"]]
            p = paired(values, other)
            report[-1] |= {"minus_tree": p.difference, "minus_tree_interval": p.interval}
        print({k: np.round(v, 3) if k != "method" else v for k, v in report[-1].items()})
    if args.json:
        settings = {k: str(v) for k, v in vars(args).items() if k not in ("json", "texts")}
        settings |= {"prompts": [p.name for p in args.prompts], "drafter": Path(args.drafter).name}
        found = {"machine": machine(), "settings": settings, "rows": report, "sets": lengths}
        args.json.write_text(json.dumps(found) + "\n")
    assert all(math.isfinite(row["acceptance_length"]) for row in report)


if __name__ == "__main__":
    main()
