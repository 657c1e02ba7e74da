"""Text on ONNX Runtime alone, with and without drafts, beside plain decoding by the torch model.

    python bench/onnx_generate.py smollm2 --drafter models/smollm2-135m-instruct-dflash2 --prompts gsm8k.jsonl \\
        mbpp.jsonl --threads 2 --json bench/results/onnx_generate.json

Greedy, the methods take turns prompt by prompt; of a prompt's repeats the fastest counts, since the machine is shared.
"plain" rows run single tokens as such (`even=False`), the fastest way; the drafted text is compared with the same
target's own, decoded with `even=True`. Tokens per second are of the decoding alone, over all prompts.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from machine import machine
from rich.console import Console
from rich.table import Table

from pydflash import Drafter, Speculator, Target
from pydflash.bench.run import first_turn
from pydflash.checkpoints.smollm2 import ensure_smollm2
from pydflash.export import OnnxDrafter, OnnxTarget, export_drafter, export_target
from pydflash.target.loading import load_tokenizer
from pydflash.training.prompts import read_prompts

PAIRS = ((None, None), (None, "int8"), ("8bit", "8bit"), ("int8", "int8"))  # few bits of target and drafter


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("target", help="folder or hub id, or smollm2")
    parser.add_argument("--drafter", required=True)
    parser.add_argument("--prompts", nargs="+", type=Path, required=True)
    parser.add_argument("--num-prompts", type=int, default=3, help="of each file")
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    folder = str(ensure_smollm2()) if args.target == "smollm2" else args.target
    tokenizer = load_tokenizer(folder)
    layer_ids = Drafter.from_pretrained(args.drafter).config.target_layer_ids
    specs: dict[str, Speculator] = {}
    exact: dict[str, Speculator] = {}
    with tempfile.TemporaryDirectory() as work:
        for bits in dict.fromkeys(b for pair in PAIRS for b in pair):
            place = Path(work) / str(bits)
            export_drafter(args.drafter, folder, place, quantize=bits, profile="inplace")
            export_target(folder, layer_ids, place, quantize=bits)
        torch_target = Target.from_pretrained(folder, dtype=torch.bfloat16)
        specs["torch bfloat16, plain"] = Speculator(torch_target, None, tokenizer)
        for bits in dict.fromkeys(pair[0] for pair in PAIRS):
            place = Path(work) / str(bits)
            own = OnnxTarget(place, threads=args.threads, even=False)
            specs[f"{bits or 'float32'}, plain"] = Speculator(own, None, tokenizer)
            exact[bits or "float32"] = Speculator(OnnxTarget(place, threads=args.threads), None, tokenizer)
        for target, bits in PAIRS:
            drafter = OnnxDrafter(Path(work) / str(bits), threads=args.threads)
            own = OnnxTarget(Path(work) / str(target), threads=args.threads)
            specs[f"{target or 'float32'}, {bits or 'float32'} drafter"] = Speculator(own, drafter, tokenizer)
        totals: dict[str, Any] = {name: {"tokens": 0, "seconds": 0.0, "rounds": 0, "same": 0} for name in specs}
        prompts = [first_turn(p) for file in args.prompts for p in read_prompts(file)[: args.num_prompts]]
        for spec in specs.values():
            spec.generate(prompts[0], 8, temperature=0.0)
        for prompt in prompts:
            texts = {
                bits: s.generate(prompt, args.max_new_tokens, temperature=0.0).token_ids for bits, s in exact.items()
            }
            seconds: dict[str, float] = {}
            for repeat in range(args.repeats):
                for name, spec in specs.items():
                    out = spec.generate(prompt, args.max_new_tokens, temperature=0.0)
                    seconds[name] = min(seconds.get(name, out.stats.decode_seconds), out.stats.decode_seconds)
                    if repeat == 0:
                        totals[name]["tokens"] += len(out.token_ids) - 1
                        totals[name]["rounds"] += len(out.stats.num_accepted)
                        totals[name]["same"] += texts.get(name.split(",")[0]) == out.token_ids
            for name, best in seconds.items():
                totals[name]["seconds"] += best
    rows = []
    for name, row in totals.items():
        plain = totals.get(f"{name.split(',')[0]}, plain", totals["torch bfloat16, plain"])
        speed = row["tokens"] / row["seconds"]
        ratio = speed * plain["seconds"] / plain["tokens"]
        length = row["tokens"] / row["rounds"]
        rows.append(
            {"method": name, "tokens_per_second": speed, "times_plain": ratio, "acceptance_length": length} | row
        )
    table = Table("method", "tokens/s", "times its plain", "tokens a round", "texts as decoded plainly")
    for row in rows:
        shares = f"{row['same']} of {len(prompts)}" if "drafter" in row["method"] else ""
        numbers = (f"{row[key]:.2f}" for key in ("tokens_per_second", "times_plain", "acceptance_length"))
        table.add_row(row["method"], *numbers, shares)
    Console(width=110).print(table)
    if args.json is not None:
        content = {"machine": machine(), "threads": args.threads, "prompts": len(prompts), "rows": rows}
        args.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
