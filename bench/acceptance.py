"""Acceptance length of drafters over prompt sets, found by replay of the target's own text.

    python bench/acceptance.py smollm2 --drafter models/smollm2-135m-instruct-dflash2 --prompts gsm8k.jsonl mbpp.jsonl \
        --json bench/results/acceptance.json

The target answers each prompt plainly, all in one batch; `pydflash.training.evaluate.replay` then finds the rounds that
speculative decoding makes over that text. It is exact where the text does not depend on the drafter: greedy, and at a
temperature with the rule without q. Loops are counted apart.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from machine import machine
from rich.console import Console
from rich.table import Table

from pydflash import Drafter, Target
from pydflash.bench import LOOP_TOKENS, first_turn, longest_loop
from pydflash.smollm2 import ensure_smollm2
from pydflash.target import load_tokenizer
from pydflash.text import encode
from pydflash.training.evaluate import acceptance_length, bootstrap, replay
from pydflash.training.generate import BatchGenerator, Request
from pydflash.training.prompts import read_prompts


def answers(
    target: Target, tokenizer: object, files: list[Path], count: int, tokens: int, temperature: float
) -> dict[str, list[tuple[torch.Tensor, int]]]:
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
    queue = [Request(key, ids, temperature, number) for number, (key, ids) in enumerate(asked.items())]

    def take(room: int) -> list[Request]:
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("target", help="folder or hub id, or smollm2")
    parser.add_argument("--drafter", nargs="+", required=True)
    parser.add_argument("--prompts", nargs="+", type=Path, required=True)
    parser.add_argument("--num-prompts", type=int, default=40)
    parser.add_argument("--max-new-tokens", type=int, default=192)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    folder = ensure_smollm2() if args.target == "smollm2" else args.target
    plain = Target.from_pretrained(folder, dtype=getattr(torch, args.dtype))
    tokenizer = load_tokenizer(folder)
    rows = []
    for temperature in args.temperatures:
        texts = answers(plain, tokenizer, args.prompts, args.num_prompts, args.max_new_tokens, temperature)
        for path in args.drafter:
            native = plain.device.type == "cpu"
            drafter = Drafter.from_pretrained(
                path, device=plain.device, dtype=plain.dtype, backend="native" if native else "reference"
            )
            target = Target(plain.model, drafter.config.target_layer_ids)
            for name, records in texts.items():
                kept = [r for r in records if longest_loop(r[0][r[1] :].tolist()) < LOOP_TOKENS]
                row = {"temperature": temperature, "drafter": Path(path).name, "prompts": name, "requests": len(kept)}
                row["loops"] = len(records) - len(kept)
                for label, selector in (("path", True), ("argmax", False)):
                    rounds = replay(drafter, target, kept, selector=selector)
                    lengths = [acceptance_length(r) for r in rounds if r]
                    pooled = sum(map(sum, rounds)) / sum(map(len, rounds)) + 1
                    row[label] = {
                        "acceptance_length": sum(lengths) / len(lengths),
                        "interval": bootstrap(lengths),
                        "pooled": pooled,
                    }
                rows.append(row)
    table = Table("T", "drafter", "prompts", "requests", "loops", "path", "95 %", "argmax")
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
            f"{row['argmax']['acceptance_length']:.2f}",
        )
    Console(width=110).print(table)
    if args.json:
        settings = {k: [str(x) for x in v] if isinstance(v, list) else str(v) for k, v in vars(args).items()}
        settings["prompts"] = [p.name for p in args.prompts]
        args.json.write_text(json.dumps({"machine": machine(), "settings": settings, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
