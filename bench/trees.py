"""Acceptance length of walk, Viterbi path and trees of one drafter, by replay of the target's own text.

    python bench/trees.py smollm2 --drafter models/smollm2-135m-instruct-dflash2 --prompts gsm8k.jsonl mbpp.jsonl \
        --json bench/results/trees.json --png bench/results/trees.png

All rows come from the same forward passes of the drafter. "tree N" takes the N best nodes of the drafter's lattice,
"slots N" those of the same drafter's independent slots, as DDTree does; "sampled" is the walk with drafts sampled at a
temperature, in expectation; "oracle" keeps drafts as long as the next token is among a slot's candidates: no choice
among them can do better. Trees, one-hot walks and paths emit the text of plain decoding, so replay is exact for them.
Answers that loop are left out. Differences are over requests, with 95 % bootstrap intervals.
"""

from __future__ import annotations

import argparse
import json
import math
import os
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from acceptance import Text, answers, load_drafter, load_target, without_loops
from machine import machine
from rich.console import Console
from rich.table import Table
from torch import Tensor

from pydflash import Drafter, Target
from pydflash.target.loading import load_tokenizer
from pydflash.training.evaluate import bootstrap, paired, sampled_rounds
from pydflash.training.features import FeatureSource, pad_records
from pydflash.training.objective import block_hidden

SIZES = (7, 15, 31, 63)


def tree_depths(tokens: Tensor, parents: Tensor, depths: Tensor, text: Tensor) -> Tensor:
    """How deep the text goes in each tree [A, N + 1], for every number of nodes: [A, N + 1]; text: [A, S - 1]."""
    rows = torch.arange(len(tokens), device=tokens.device)
    right = torch.ones_like(tokens, dtype=torch.bool)
    reached = torch.zeros_like(tokens)
    for slot in range(1, tokens.shape[1]):
        depth = depths[:, slot].long()
        right[:, slot] = right[rows, parents[:, slot].long()] & (tokens[:, slot] == text[rows, depth - 1])
        reached[:, slot] = torch.maximum(reached[:, slot - 1], torch.where(right[:, slot], depth, 0))
    return reached


@torch.no_grad()
def kept_drafts(drafter: Drafter, target: Target, record: Text) -> dict[str, list[int]]:
    """Drafts that each method would keep behind every position of a text."""
    ids, prompt_length = record
    batch = FeatureSource(target).batch([0], pad_records([record], multiple=1))
    anchors = torch.arange(prompt_length, len(ids) - 1, device=batch.ids.device)
    size, config, ops = drafter.config.block_size, drafter.config, drafter.ops
    hidden = block_hidden(drafter, target.embed_weight, batch, anchors[None], "dense")[0, :, 1:]
    logits = drafter.logits(hidden, target.head)
    first = batch.ids[0, anchors]
    padded = torch.nn.functional.pad(batch.ids[0], (0, size), value=-1)
    text = padded[anchors[:, None] + torch.arange(1, size, device=anchors.device)]
    count = config.num_candidates
    plain = ops.path_select(logits, None, None, None, first, None, 0, anchors, count, config.vocab_size)
    selector, edges = drafter.candidate_selector, plain
    if selector is not None:
        books = selector.predecessor_codebook, selector.successor_codebook
        projected = selector.hidden_projection(hidden)
        edges = ops.path_select(logits, projected, *books, first, None, 0, anchors, count, config.vocab_size)

    def chain(tokens: Tensor) -> list[int]:
        return list((tokens == text).long().cumprod(-1).sum(-1).tolist())

    normalizers = logits.float().logsumexp(-1)
    found = {"walk": chain(edges[0]), "argmax": chain(plain[0])}
    found["viterbi"] = chain(ops.path_viterbi(edges[1], edges[3], None if selector else normalizers)[0])
    for name, (_, candidates, _, scores) in {"tree": edges, "slots": plain}.items():
        own = None if scores.dim() == 4 else normalizers
        tokens, parents, depths, *_ = ops.path_tree(first, candidates, scores, SIZES[-1], own)
        reached = tree_depths(tokens, parents, depths, text)
        found |= {f"{name} {n}": reached[:, n].tolist() for n in SIZES}
    among = (edges[1] == text[..., None]).any(-1)
    found["oracle"] = list(among.long().cumprod(-1).sum(-1).tolist())
    return found


def rounds_over(kept: list[int]) -> int:
    at = rounds = 0
    while at < len(kept):
        at += min(kept[at], len(kept) - at - 1) + 1
        rounds += 1
    return rounds


def measure(drafter: Drafter, target: Target, texts: dict[str, list[Text]], temperature: float) -> list[dict[str, Any]]:
    rows = []
    for prompts, records in texts.items():
        lengths: dict[str, list[float]] = {}
        for record in records:
            tokens = len(record[0]) - record[1] - 1
            if tokens < 1:
                continue
            rounds: dict[str, float] = {
                n: rounds_over(kept) for n, kept in kept_drafts(drafter, target, record).items()
            }
            if temperature:
                (rounds["sampled"],) = sampled_rounds(drafter, target, [record], temperature)
            for name, count in rounds.items():
                lengths.setdefault(name, []).append(tokens / count)
        for name, values in lengths.items():
            row = {"temperature": temperature, "prompts": prompts, "method": name, "requests": len(values)}
            mean = sum(values) / len(values) if values else math.nan
            rows.append(row | {"acceptance_length": mean, "interval": bootstrap(values), "per_request": values})
        done = {row["method"]: round(row["acceptance_length"], 3) for row in rows if row["prompts"] == prompts}
        print(f"T = {temperature:g}  {prompts}: {done}", flush=True)
    return rows


def means(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Acceptance length of each method, mean of the sets."""
    found: dict[str, list[float]] = {}
    for row in rows:
        found.setdefault(row["method"], []).append(row["acceptance_length"])
    return {name: sum(values) / len(values) for name, values in found.items()}


def comparisons(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Every method against the walk, and each lattice tree against the tree of independent slots."""
    values: dict[str, list[float]] = {}
    for row in rows:
        values.setdefault(row["method"], []).extend(row["per_request"])
    pairs = [(name, "walk") for name in values if name != "walk"] + [(f"tree {n}", f"slots {n}") for n in SIZES]
    out = []
    for a, b in pairs:
        p = paired(values[a], values[b])
        out.append({"a": a, "b": b, "difference": p.difference, "interval": p.interval, "pairs": p.pairs})
    return out


def show(temperature: float, rows: list[dict[str, Any]], pairs: list[dict[str, Any]]) -> None:
    sets = list(dict.fromkeys(row["prompts"] for row in rows))
    cells = {(row["method"], row["prompts"]): row["acceptance_length"] for row in rows}
    against = {p["a"]: p for p in pairs if p["b"] == "walk"}
    mean = means(rows)
    table = Table(f"T = {temperature:g}", *sets, "mean", "- walk (requests)", "of the oracle's gain")
    for name, value in mean.items():
        share = (value - mean["walk"]) / (mean["oracle"] - mean["walk"])
        gain = (
            ""
            if name not in against
            else f"{against[name]['difference']:+.2f} " + "{:+.2f} {:+.2f}".format(*against[name]["interval"])
        )
        table.add_row(name, *(f"{cells[name, s]:.2f}" for s in sets), f"{value:.2f}", gain, f"{share:.2f}")
    Console(width=120).print(table)


def plot(report: list[dict[str, Any]], path: Path) -> None:
    """Acceptance length against nodes, a panel for each temperature."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    temperatures = sorted({row["temperature"] for row in report})
    figure, panels = plt.subplots(1, len(temperatures), figsize=(6 * len(temperatures), 4.5), squeeze=False)
    for panel, temperature in zip(panels[0], temperatures, strict=True):
        rows = [row for row in report if row["temperature"] == temperature]
        for prompts in dict.fromkeys(row["prompts"] for row in rows):
            found = {row["method"]: row for row in rows if row["prompts"] == prompts}
            heights = [found["walk"]["acceptance_length"], *(found[f"tree {n}"]["acceptance_length"] for n in SIZES)]
            panel.plot([0, *SIZES], heights, marker="o", alpha=0.5, label=prompts)
        mean = means(rows)
        panel.plot([0, *SIZES], [mean["walk"], *(mean[f"tree {n}"] for n in SIZES)], "k-o", lw=2, label="mean")
        panel.plot(SIZES, [mean[f"slots {n}"] for n in SIZES], "k--s", lw=1, label="mean, independent slots")
        panel.axhline(mean["oracle"], color="gray", ls=":", label="mean, oracle over the candidates")
        if "sampled" in mean:
            panel.axhline(mean["sampled"], color="tab:red", ls=":", label="mean, sampled walk")
        panel.set(title=f"T = {temperature:g}", xlabel="nodes (0: the walk)", ylabel="tokens per round")
        panel.set_ylim(bottom=1)
        panel.grid(alpha=0.3)
        panel.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("target", help="folder or hub id, or smollm2")
    parser.add_argument("--drafter", required=True)
    parser.add_argument("--prompts", nargs="+", type=Path, required=True)
    parser.add_argument("--num-prompts", type=int, default=40)
    parser.add_argument("--max-new-tokens", type=int, default=192)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--texts", type=Path, help="keep the target's texts here, and take them from here")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--png", type=Path)
    args = parser.parse_args()
    folder, plain = load_target(args.target, args.dtype)
    drafter = load_drafter(args.drafter, plain)
    target = Target(plain.model, drafter.config.target_layer_ids)
    rows, pairs = [], []
    for temperature in args.temperatures:
        kept_at = args.texts and args.texts / f"texts-{temperature:g}.pt"
        if kept_at and kept_at.exists():
            texts = torch.load(kept_at, weights_only=False)
        else:
            tokenizer = load_tokenizer(folder)
            texts = answers(plain, tokenizer, args.prompts, args.num_prompts, args.max_new_tokens, temperature)
            if kept_at:
                args.texts.mkdir(parents=True, exist_ok=True)
                torch.save(texts, kept_at)
        texts = {name: without_loops(records) for name, records in texts.items()}
        part = measure(drafter, target, texts, temperature)
        compared = comparisons(part)
        show(temperature, part, compared)
        rows += part
        pairs += [{"temperature": temperature} | p for p in compared]
    if args.json:
        settings = {k: str(v) for k, v in vars(args).items() if k not in ("json", "png", "texts")}
        settings |= {"prompts": [p.name for p in args.prompts], "drafter": Path(args.drafter).name}
        report = {"machine": machine(), "settings": settings, "rows": rows, "comparisons": pairs}
        args.json.write_text(json.dumps(report) + "\n")
    if args.png:
        plot(rows, args.png)


if __name__ == "__main__":
    main()
