"""Every op of a round on a GPU, beside the best that other packages do: runs the scripts gpu_ops_*.py in turn.

    python bench/gpu_ops.py --json bench/results/gpu_ops.json
    python bench/gpu_ops.py attention sampling

attention: torch's SDPA, FlexAttention, flash-attn, flashinfer; linear: cuBLAS; sampling: sort-based sampling,
torch.topk, flashinfer; small: the same steps in torch, plain and compiled. What is not installed is left out. Each
script has options of its own.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import tempfile
from pathlib import Path

GROUPS = ("attention", "linear", "sampling", "small")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("groups", nargs="*", default=list(GROUPS), choices=GROUPS, help="which (default: all)")
    parser.add_argument("--json", type=Path, help="write all results to this file")
    args = parser.parse_args()
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for group in args.groups:
            out = Path(folder, f"{group}.json")
            sys.argv = [f"gpu_ops_{group}.py", "--out", str(out)]
            importlib.import_module(f"gpu_ops_{group}").main()
            found[group] = json.loads(out.read_text())
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
