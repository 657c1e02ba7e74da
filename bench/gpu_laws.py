"""What penalties, biases and log-probabilities add to a round on a GPU.

    python bench/gpu_laws.py --json bench/results/gpu_laws.json

The pairs and the contexts of gpu_round.py at batch 1, one graph for each of four ways, replayed in turn in one process:
a round as it is, with penalties, with the 5 most probable tokens of each position, and with both.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import torch
from gpu_round import BLOCK, SHAPES, build_drafter, build_target, fill
from gpu_time import milliseconds
from machine import machine

from pydflash.rounds.device_round import DeviceRounds
from pydflash.rounds.paths import Paths
from pydflash.rounds.round import Parts
from pydflash.sampling import SamplingParams
from pydflash.target.fused import FusedTarget

WAYS: dict[str, dict[str, Any]] = {
    "round": {},
    "penalties": {"penalties": True},
    "logprobs": {"logprobs": 5},
    "both": {"penalties": True, "logprobs": 5},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    fast, rows = FusedTarget(build_target(SHAPES["8b"])), []
    params = SamplingParams(repetition_penalty=1.1, presence_penalty=0.5, frequency_penalty=0.5)
    for version, nodes in ((1, None), (2, None), (2, 31)):
        drafter, size = build_drafter(SHAPES["8b"], version), BLOCK[version]
        paths = Paths("walk" if nodes is None else "tree", nodes, size - 1, drafter.config.num_candidates)
        parts = Parts(fast, drafter, paths, size, draft_sampling=False)
        rounds = {name: DeviceRounds(parts, 1, args.context + 512, **options) for name, options in WAYS.items()}
        for one in rounds.values():
            fill(one, args.context)
            if one.rows.penalties is not None:
                with torch.inference_mode():
                    one.rows.penalties.admit(0, range(args.context), params, {7: 1.0})
        times: dict[str, list[float]] = {name: [] for name in WAYS}
        for repeat in range(args.repeats + 3):
            for name, one in rounds.items():
                taken = milliseconds(one.program[0])
                if repeat >= 3:
                    times[name].append(taken)
        median = {name: statistics.median(taken) for name, taken in times.items()}
        row = {"drafter": f"v{version} b{size}", "path": paths.path, "slots": paths.rows, "context": args.context}
        row |= {f"{name}_ms": value for name, value in median.items()}
        row |= {f"{name}_ratio": median[name] / median["round"] for name in WAYS if name != "round"}
        rows.append(row)
        print(row, flush=True)
        del rounds, drafter
        torch.cuda.empty_cache()
    if args.json:
        report = {"machine": machine() | {"gpu": torch.cuda.get_device_name()}, "dtype": "bfloat16", "rows": rows}
        args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
