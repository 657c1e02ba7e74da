"""Where the time of a round goes: the models' own forwards, and everything else that the loop adds.

    python bench/round.py --json bench/results/round.json

Runs SmolLM2-135M-Instruct (fetched on first use) with the drafter in models/, or an untrained one. One process, medians
over rounds. "own" is top-k, path, accept, commit and bookkeeping.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from machine import machine
from rich.console import Console
from rich.table import Table

from pydflash import Speculator
from pydflash.checkpoints.smollm2 import ensure_smollm2
from pydflash.cli.demo import pick_drafter
from pydflash.rounds.host import HostLoop


def timed(function: Callable[..., Any], clock: dict[str, float], name: str) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        begin = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            clock[name] = clock.get(name, 0.0) + time.perf_counter() - begin

    return call


def measure(spec: Speculator, prompts: list[str], tokens: int, temperature: float) -> dict[str, Any]:
    clock: dict[str, float] = {}
    parts = spec.loop.parts
    assert isinstance(spec.loop, HostLoop)
    undo = [(parts.target, "verify"), *((parts.drafter, name) for name in ("append_context", "hidden", "logits"))]
    for owner, name in undo:
        label = "target" if owner is parts.target else "drafter"
        object.__setattr__(owner, name, timed(getattr(owner, name), clock, label))
    rounds: list[dict[str, float]] = []
    try:
        for prompt in prompts:
            stream = spec.stream(prompt, tokens, temperature=temperature, seed=0, stop_token_ids=[])
            next(stream)
            while True:
                clock.clear()
                begin = time.perf_counter()
                if next(stream, None) is None:
                    break
                rounds.append(dict(clock) | {"round": time.perf_counter() - begin})
    finally:
        for owner, name in undo:
            object.__delattr__(owner, name)
    own = sorted(r["round"] - r["target"] - r["drafter"] for r in rounds)
    middle = {key: sorted(r[key] for r in rounds)[len(rounds) // 2] * 1e3 for key in ("round", "target", "drafter")}
    middle["own"] = own[len(own) // 2] * 1e3
    share = sum(own) / sum(r["round"] for r in rounds)
    return {"temperature": temperature, "rounds": len(rounds), "median_ms": middle, "own_share": share}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--threads", type=int, default=0, help="torch threads (default: torch's own)")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    plain = Speculator.from_pretrained(ensure_smollm2(), dtype=args.dtype)
    drafter, origin = pick_drafter(None, plain.target)
    spec = Speculator(plain.target, drafter, plain.tokenizer)
    print(f"drafter: {origin}")
    prompts = [
        "Write a short story about a lighthouse keeper.",
        "Explain why the sky is blue.",
        "List ten uses of a brick.",
    ]
    measure(spec, prompts[:1], 16, 0.0)
    results = [measure(spec, prompts, args.tokens, temperature) for temperature in (0.0, 1.0)]
    table = Table("T", "rounds", "round ms", "target ms", "drafter ms", "own ms", "own share")
    for row in results:
        ms = row["median_ms"]
        cells = [f"{ms[key]:.2f}" for key in ("round", "target", "drafter", "own")]
        table.add_row(f"{row['temperature']:g}", str(row["rounds"]), *cells, f"{row['own_share']:.2%}")
    Console().print(table)
    if args.json:
        report = {"machine": machine(), "dtype": args.dtype, "prompts": prompts, "tokens": args.tokens, "rows": results}
        args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
