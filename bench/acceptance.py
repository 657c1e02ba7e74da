"""Acceptance length of drafters over prompt sets, found by replay of the target's own text.

    python bench/acceptance.py smollm2 --drafter models/smollm2-135m-instruct-dflash2 --prompts gsm8k.jsonl mbpp.jsonl \
        --json bench/results/acceptance.json

The target answers each prompt plainly, all in one batch; `pydflash.training.evaluate` then finds the rounds that
speculative decoding makes over that text. "path" and "argmax" are exact where drafts carry no probabilities (greedy,
and at a temperature by the rule without q); "sampled" is the expectation for drafts sampled with q. Loops are counted
apart. Every drafter is compared with the first one, and its path with the best token of each slot, request by request:
mean difference and a 95 % bootstrap interval over the prompts.
"""

from __future__ import annotations

import argparse
import json
import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from machine import machine
from rich.console import Console
from rich.table import Table

from pydflash import Drafter, Target
from pydflash.bench.run import LOOP_TOKENS, first_turn, longest_loop
from pydflash.checkpoints.smollm2 import ensure_smollm2
from pydflash.target.loading import load_tokenizer
from pydflash.text import encode
from pydflash.training.build import ABLATION_CONFIG, InputConditionedDrafter
from pydflash.training.evaluate import bootstrap, paired, replay, sampled_rounds
from pydflash.training.generate import BatchGenerator, BatchRequest
from pydflash.training.prompts import read_prompts

Text = tuple[torch.Tensor, int]


def answers(
    target: Target, tokenizer: object, files: list[Path], count: int, tokens: int, temperature: float
) -> dict[str, list[Text]]:
    """The target's own text for the first prompts of each file: (ids, prompt_length)."""
    asked = {
        (file.stem, i): encode(first_turn(prompt), tokenizer, None, target.vocab_size)
        for file in files
        for i, prompt in enumerate(read_prompts(file)[:count])
    }
    stops = target.generation_config.eos_token_id
    generator = BatchGenerator(
        target,
        batch_size=min(len(asked), 256 if target.device.type != "cpu" else 40),
        capacity=max(map(len, asked.values())) + tokens,
        max_new_tokens=tokens,
        stop_token_ids=[stops] if isinstance(stops, int) else stops,
    )
    queue = [BatchRequest(key, ids, temperature, number) for number, (key, ids) in enumerate(asked.items())]

    def take(room: int) -> list[BatchRequest]:
        return [queue.pop() for _ in range(min(room, len(queue)))]

    found = {r.request.key: r for part in generator.run(take) for r in part}
    return {
        file.stem: [
            (torch.from_numpy(found[file.stem, i].ids).long(), len(asked[file.stem, i]))
            for i in range(count)
            if (file.stem, i) in found
        ]
        for file in files
    }


def without_loops(records: list[Text]) -> list[Text]:
    """The texts whose answers do not degenerate."""
    return [r for r in records if longest_loop(r[0][r[1] :].tolist()) < LOOP_TOKENS]


@dataclass(slots=True)
class Lengths:
    """Acceptance of one drafter at one temperature, request by request; nan where a request made no round."""

    per_request: dict[str, list[float]] = field(default_factory=dict)
    pooled: dict[str, float] = field(default_factory=dict)

    def add(self, name: str, tokens: list[int], rounds: list[float]) -> None:
        self.per_request[name] = [n / r if r else math.nan for n, r in zip(tokens, rounds, strict=True)]
        self.pooled[name] = sum(tokens) / max(sum(rounds), 1)

    def all(self) -> list[float]:
        return [x for values in self.per_request.values() for x in values]

    def row(self, name: str) -> dict[str, Any]:
        values = [x for x in self.per_request[name] if not math.isnan(x)]
        return {
            "acceptance_length": sum(values) / len(values) if values else math.nan,
            "interval": bootstrap(values),
            "pooled": self.pooled[name],
            "per_request": self.per_request[name],
        }

    def mean_of_sets(self) -> float:
        return sum(self.row(name)["acceptance_length"] for name in self.per_request) / len(self.per_request)


def load_target(name: str, dtype: str) -> tuple[str | Path, Target]:
    """Where the target lies (smollm2 is made ready), and the target."""
    folder = ensure_smollm2() if name == "smollm2" else name
    return folder, Target.from_pretrained(folder, dtype=getattr(torch, dtype))


def load_drafter(path: str, target: Target) -> Drafter:
    kind = InputConditionedDrafter if (Path(path) / ABLATION_CONFIG).exists() else Drafter
    backend = "native" if target.device.type == "cpu" else "reference"
    return kind.from_pretrained(path, device=target.device, dtype=target.dtype, backend=backend)


def measure(plain: Target, path: str, texts: dict[str, list[Text]], temperature: float) -> dict[str, Lengths]:
    drafter = load_drafter(path, plain)
    target = Target(plain.model, drafter.config.target_layer_ids)
    found = {"path": Lengths(), "argmax": Lengths()} | ({"sampled": Lengths()} if temperature else {})
    at_once = 1 if target.device.type == "cpu" else 16
    for name, records in texts.items():
        tokens = [max(len(ids) - prompt_length - 1, 0) for ids, prompt_length in records]
        for label, lengths in found.items():
            if label == "sampled":
                rounds = sampled_rounds(drafter, target, records, temperature, texts_at_once=at_once)
            else:
                walked = replay(drafter, target, records, selector=label == "path", texts_at_once=at_once)
                rounds = [float(len(r)) for r in walked]
            lengths.add(name, tokens, rounds)
    return found


def comparisons(results: dict[str, dict[str, Lengths]], temperature: float) -> list[dict[str, Any]]:
    """Each drafter's path against the first one's, and against its own per-slot argmax."""
    first = next(iter(results))
    pairs = [(name, "path", first, "path") for name in results if name != first]
    pairs += [(name, "path", name, "argmax") for name in results]
    pairs += [(name, "sampled", name, "path") for name in results if temperature]
    out = []
    for name, label, other, other_label in pairs:
        found = paired(results[name][label].all(), results[other][other_label].all())
        out.append(
            {
                "temperature": temperature,
                "a": f"{name} {label}",
                "b": f"{other} {other_label}",
                "difference": found.difference,
                "interval": found.interval,
                "pairs": found.pairs,
            }
        )
    return out


def show(rows: list[dict[str, Any]], pairs: list[dict[str, Any]]) -> None:
    console = Console(width=110)
    table = Table("T", "drafter", "prompts", "requests", "loops", "path", "95 %", "pooled", "argmax", "sampled")
    for row in rows:
        low, high = row["path"]["interval"]
        table.add_row(
            f"{row['temperature']:g}",
            row["drafter"],
            row["prompts"],
            str(row["requests"]),
            str(row["loops"]),
            f"{row['path']['acceptance_length']:.2f}",
            f"{low:.2f}-{high:.2f}",
            f"{row['path']['pooled']:.2f}",
            f"{row['argmax']['acceptance_length']:.2f}",
            f"{row['sampled']['acceptance_length']:.2f}" if "sampled" in row else "-",
        )
    console.print(table)
    table = Table("T", "a", "b", "a - b", "95 %", "pairs")
    for row in pairs:
        low, high = row["interval"]
        numbers = f"{row['difference']:+.3f}", f"{low:+.3f} to {high:+.3f}", str(row["pairs"])
        table.add_row(f"{row['temperature']:g}", row["a"], row["b"], *numbers)
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("target", help="folder or hub id, or smollm2")
    parser.add_argument("--drafter", nargs="+", required=True, metavar="[NAME=]DRAFTER")
    parser.add_argument("--prompts", nargs="+", type=Path, required=True)
    parser.add_argument("--num-prompts", type=int, default=40)
    parser.add_argument("--max-new-tokens", type=int, default=192)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    folder, plain = load_target(args.target, args.dtype)
    tokenizer = load_tokenizer(folder)
    rows: list[dict[str, Any]] = []
    pairs: list[dict[str, Any]] = []
    for temperature in args.temperatures:
        texts = answers(plain, tokenizer, args.prompts, args.num_prompts, args.max_new_tokens, temperature)
        kept = {name: without_loops(records) for name, records in texts.items()}
        results = {}
        for given in args.drafter:
            name, _, path = given.rpartition("=")
            name = name or Path(path).name
            results[name] = measure(plain, path, kept, temperature)
            for prompts in kept:
                row = {"temperature": temperature, "drafter": name, "prompts": prompts, "requests": len(kept[prompts])}
                row["loops"] = len(texts[prompts]) - len(kept[prompts])
                rows.append(row | {label: lengths.row(prompts) for label, lengths in results[name].items()})
            means = {label: round(lengths.mean_of_sets(), 3) for label, lengths in results[name].items()}
            print(f"T = {temperature:g}  {name}: mean of the sets {means}", flush=True)
        pairs += comparisons(results, temperature)
    show(rows, pairs)
    if args.json:
        settings = {k: [str(x) for x in v] if isinstance(v, list) else str(v) for k, v in vars(args).items()}
        settings["prompts"] = [p.name for p in args.prompts]
        settings["drafter"] = [given.rpartition("=")[0] or Path(given).name for given in args.drafter]
        settings["target"] = Path(args.target).name
        del settings["json"]
        report = {"machine": machine(), "settings": settings, "rows": rows, "comparisons": pairs}
        args.json.write_text(json.dumps(report) + "\n")


if __name__ == "__main__":
    main()
