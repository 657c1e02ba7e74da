"""Tries a tiny random model of each family in every path, and says which it takes, and why not the others.

    python bench/families.py [--json bench/results/families.json]

Nothing is timed. A family counts as served by a path when its construction passes the trial against the model's own
forward, and 24 greedy tokens behind a prompt of 19 are the model's own.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from machine import machine
from rich.console import Console
from rich.table import Table

from pydflash import Speculator, Target

COUNT, PROMPT = 24, 19
PATHS = ("fused", "own", "generic")


def longrope(switch: int) -> dict[str, Any]:
    """Settings of a model whose factors change behind so many positions."""
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 8, "long_factor": [3.0] * 8}
    rope |= {"factor": 16.0, "original_max_position_embeddings": switch}
    return {"original_max_position_embeddings": switch, "rope_parameters": rope}


# Settings that decide about a family whose tiny model has them otherwise.
VARIANTS: dict[str, dict[str, Any]] = {
    "gemma2 without attention caps": {"attn_logit_softcapping": None},
    "phi3 with longrope": longrope(64),
    "phi3 with longrope across its switch": longrope(32),
    "granite with factors": {"residual_multiplier": 0.22, "embedding_multiplier": 12.0, "logits_scaling": 16.0},
}


def builders() -> dict[str, Any]:
    """Name and builder of each tiny model."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "helpers"))
    tiny: dict[str, Any] = dict(importlib.import_module("tiny_models").TINY)
    for name, changes in VARIANTS.items():
        build = tiny[name.partition(" ")[0]]
        tiny[name] = lambda build=build, changes=changes: build(**changes)
    return tiny


def served(model: Any, path: str) -> str:
    """How a path serves a model: "" or what it runs, or "no: " and why not."""
    ids = torch.randint(0, model.config.get_text_config().vocab_size, (1, PROMPT), generator=torch.Generator())
    want = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=COUNT, do_sample=False)
    try:
        speculator = Speculator(Target(model), None, target_path=path)
    except ValueError as error:
        return f"no: {error}"
    out = speculator.generate(ids[0], COUNT)
    if out.token_ids != want[0, PROMPT:].tolist():
        return "no: another text"
    return str(out.stats.backends["target"])


def tried(name: str, build: Any) -> dict[str, str]:
    """A row: the family, and what each path says of it."""
    model = build()
    row = {"family": name, **{path: served(model, path) for path in PATHS}}
    row["takes"] = next((path for path in PATHS if not row[path].startswith("no: ")), "none")
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    rows = [tried(name, build) for name, build in sorted(builders().items())]
    table = Table("family", "takes", "fused", "own")
    for row in rows:
        table.add_row(*(row[key] for key in ("family", "takes", "fused", "own")))
    Console().print(table)
    if args.json:
        args.json.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
