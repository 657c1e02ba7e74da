"""Rounds of a random Gated DeltaNet hybrid on a CPU, at the shapes of Qwen3.5-0.8B, beside transformers' own decoding.

    python bench/cpu_hybrid.py [--threads 2] [--repeats 9] [--json FILE]

Weights are random and the drafts perfect: they come from a table, so a walk of B slots keeps B tokens a round, and the
drafter's own time is not in it. Each side decodes behind the same prompt; the sides take turns, and times are medians
in milliseconds. "tree" has the walk as one of its paths. "state" is the largest relative difference of a
recurrent state after the walk from that of plain decoding.
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
from transformers import DynamicCache, Qwen3_5ForCausalLM, Qwen3_5TextConfig

from pydflash import Target
from pydflash.decoder.delta_store import DeltaStore
from pydflash.target.fused import FusedTarget
from pydflash.tree import tree_of

SHAPES: dict[str, Any] = {
    "vocab_size": 248320, "hidden_size": 1024, "intermediate_size": 3584, "num_hidden_layers": 24,
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256, "linear_num_key_heads": 16,
    "linear_num_value_heads": 16, "linear_key_head_dim": 128, "linear_value_head_dim": 128, "tie_word_embeddings": True,
}  # fmt: skip
PROMPT, BLOCK, NODES = 64, 8, 31


class Rounds:
    """Decodes one text behind its prompt, by blocks of any number of slots of which all are right."""

    def __init__(self, target: FusedTarget, ids: Tensor) -> None:
        self.target, self.ids, self.at = target, ids, PROMPT
        self.cache = target.new_cache(1, ids.shape[1] + 64)
        target.prefill(ids[:, :PROMPT], self.cache)

    def step(self, kept: int, slots: int) -> float:
        """Milliseconds of one block of `slots`, the first `kept` of which are the text's."""
        tokens = self.ids[:, self.at : self.at + kept]
        tree = None
        if slots > kept:
            tokens = torch.cat([tokens, tokens.new_full((1, slots - kept), 7)], 1)
            tree = tree_of([0, *range(kept - 1), *[0] * (slots - kept)], self.target.device)
        index = torch.full((1, slots), -1, dtype=torch.int32)
        index[0, :kept] = torch.arange(kept, dtype=torch.int32)
        begin = time.perf_counter()
        self.target.verify(tokens, self.cache, tree)
        self.target.commit(self.cache, index, torch.tensor([kept - 1]))
        spent = time.perf_counter() - begin
        self.at += kept
        return spent * 1e3

    def states(self) -> list[Tensor]:
        self.cache.settle()
        return [store.state for store in self.cache.stores if isinstance(store, DeltaStore)]


class Own:
    """transformers' own decoding of the same text, token by token."""

    def __init__(self, model: Any, ids: Tensor) -> None:
        self.model, self.ids, self.at = model, ids, PROMPT
        self.cache = DynamicCache(config=model.config)
        model(input_ids=ids[:, :PROMPT], past_key_values=self.cache, use_cache=True)

    def step(self) -> float:
        begin = time.perf_counter()
        self.model(input_ids=self.ids[:, self.at : self.at + 1], past_key_values=self.cache, use_cache=True)
        self.at += 1
        return (time.perf_counter() - begin) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**SHAPES)).bfloat16().eval()
    ids = torch.randint(0, 200000, (1, PROMPT + (args.repeats + 1) * BLOCK))
    with torch.inference_mode():
        target = FusedTarget(Target(model))
        plain, walk, tree, own = Rounds(target, ids), Rounds(target, ids), Rounds(target, ids), Own(model, ids)
        sides: dict[str, Callable[[], float]] = {
            "transformers": own.step,
            "plain": lambda: plain.step(1, 1),
            "walk": lambda: walk.step(BLOCK, BLOCK),
            "tree": lambda: tree.step(BLOCK, NODES + 1),
        }
        times: dict[str, list[float]] = {side: [] for side in sides}
        for _ in range(args.repeats + 1):
            for side, step in sides.items():
                times[side].append(step())
        while plain.at < walk.at:
            plain.step(1, 1)
        far = max(float((a - b).norm() / b.norm()) for a, b in zip(walk.states(), plain.states(), strict=True))
    row: dict[str, Any] = {side: statistics.median(each[1:]) for side, each in times.items()}
    found = {"machine": machine(), "shapes": SHAPES, "block": BLOCK, "nodes": NODES, "prompt": PROMPT, "ms": row}
    found |= {"target": target.description, "state": far, "weight_bytes": sum(p.nbytes for p in model.parameters())}
    table = Table("", "ms", "tokens", "times transformers", "times plain")
    for side, tokens in (("transformers", 1), ("plain", 1), ("walk", BLOCK), ("tree", BLOCK)):
        ratios = [row[against] * tokens / row[side] for against in ("transformers", "plain")]
        table.add_row(side, f"{row[side]:.1f}", str(tokens), *(f"{ratio:.2f}" for ratio in ratios))
    Console(width=100).print(table, f"{target.description}; states differ by {far:.1e}")
    if args.json is not None:
        work = args.json.with_suffix(".tmp")
        work.write_text(json.dumps(found, indent=1) + "\n")
        work.replace(args.json)


if __name__ == "__main__":
    main()
