"""What few bits cost a drafter on ONNX Runtime: acceptance length over the target's own greedy text.

    python bench/onnx_acceptance.py smollm2 --drafter models/smollm2-135m-instruct-dflash2 --prompts gsm8k.jsonl \\
        mbpp.jsonl --json bench/results/onnx_acceptance.json

The target answers each prompt once, plainly. Its features of that text then go through each drafter, round by round as
in decoding: greedy rounds follow from the text alone. Every kind of file is exported anew; "torch" is the checkpoint.
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
from pydflash.export import OnnxDrafter, export_drafter
from pydflash.target.loading import load_tokenizer
from pydflash.text import encode
from pydflash.training.prompts import read_prompts

KINDS: dict[str, dict[str, Any]] = {
    "float32": {},
    "8bit": {"quantize": "8bit"},
    "4bit": {"quantize": "4bit"},
    "int8": {"quantize": "int8"},
}


@torch.inference_mode()
def rounds(drafter: Any, target: Target, ids: list[int], prompt: int, features: torch.Tensor) -> list[int]:
    """Accepted drafts of each round over the text `ids`, whose first `prompt` tokens were given."""
    cache = drafter.new_cache(1, len(ids) + drafter.config.block_size)
    tables = {"embed": target.embed_weight, "head": target.head}
    start, held, accepted = prompt, 0, []
    while start + drafter.config.block_size <= len(ids):
        drafter.append_context(features[:, held:start], cache)
        held = start
        drafts = drafter.propose(torch.tensor([ids[start]]), cache, **tables).tokens[0].tolist()
        text = ids[start + 1 : start + 1 + len(drafts)]
        count = next((i for i, (a, b) in enumerate(zip(drafts, text, strict=True)) if a != b), len(drafts))
        accepted.append(count)
        start += count + 1
    return accepted


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("target", help="folder or hub id, or smollm2")
    parser.add_argument("--drafter", required=True)
    parser.add_argument("--prompts", nargs="+", type=Path, required=True)
    parser.add_argument("--num-prompts", type=int, default=8, help="of each file")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    folder = str(ensure_smollm2()) if args.target == "smollm2" else args.target
    checkpoint = Drafter.from_pretrained(args.drafter, dtype=torch.float32)
    target = Target.from_pretrained(folder, layer_ids=checkpoint.config.target_layer_ids, dtype=torch.float32)
    spec = Speculator(target, checkpoint, load_tokenizer(folder))
    texts = []
    for file in args.prompts:
        for prompt in read_prompts(file)[: args.num_prompts]:
            asked = encode(first_turn(prompt), spec.tokenizer, None, target.vocab_size)
            ids = asked + spec.generate(asked, args.max_new_tokens, temperature=0.0).token_ids
            with torch.inference_mode():
                found = target.prefill(torch.tensor([ids]), target.new_cache(1, len(ids)))
            texts.append((file.stem, ids, len(asked), found.features))
    rows = []
    with tempfile.TemporaryDirectory() as work:
        drafters: dict[str, Any] = {"torch": checkpoint}
        for kind, options in KINDS.items():
            export_drafter(args.drafter, folder, Path(work) / kind, **options)
            drafters[kind] = OnnxDrafter(Path(work) / kind, threads=torch.get_num_threads())
        for name, drafter in drafters.items():
            sets: dict[str, list[int]] = {}
            for file, ids, prompt, features in texts:
                sets.setdefault(file, []).extend(rounds(drafter, target, ids, prompt, features))
            every = [n for found in sets.values() for n in found]
            row = {"drafter": name, "rounds": len(every), "acceptance_length": sum(every) / len(every) + 1}
            row |= {"sets": {file: round(sum(n) / len(n) + 1, 3) for file, n in sets.items()}}
            rows.append(row | {"loss": 1 - row["acceptance_length"] / rows[0]["acceptance_length"] if rows else 0.0})
    table = Table("drafter", "rounds", "acceptance length", "loss")
    for row in rows:
        table.add_row(row["drafter"], str(row["rounds"]), f"{row['acceptance_length']:.3f}", f"{row['loss']:.1%}")
    Console(width=100).print(table)
    if args.json is not None:
        args.json.write_text(json.dumps({"machine": machine(), "prompts": len(texts), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
