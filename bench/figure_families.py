"""The table of families for figures.py, from what families.py tried."""

from __future__ import annotations

import json
import re
from pathlib import Path

_RESULTS = Path(__file__).parent / "results" / "families.json"
_SENTENCE = re.compile(r".* (?:others: they need|must have) ", re.DOTALL)
_MOST = 110  # characters of a reason


def families() -> str:
    """docs/targets.md: which path each family takes, and why not an earlier one."""
    found = json.loads(_RESULTS.read_text(encoding="utf-8"))
    lines = ["| family | path | how, or what an earlier path needs |", "| --- | --- | --- |"]
    for row in found["rows"]:
        steps = row["fused"].partition("record by record: ")[2]
        said = _reason(row) if row["takes"] != "fused" else f"on a CPU step by step: {steps}" if steps else ""
        lines.append(f"| {row['family']} | {row['takes']} | {said} |".replace("|  |", "| |"))
    machine = found["machine"]
    versions = f"torch {machine['torch'].partition('+')[0]}, transformers {machine['transformers']}, {machine['date']}"
    return "\n".join(lines) + f"\n\n{versions}, on a CPU; `bench/families.py`, `bench/results/families.json`."


def _reason(row: dict[str, str]) -> str:
    """Why it is not fused, in one line that a table holds."""
    reason = " ".join(_SENTENCE.sub("", row["fused"].removeprefix("no: "), count=1).replace("|", "/").split())
    return reason if len(reason) <= _MOST else reason[:_MOST].rpartition(" ")[0].rstrip(",") + " ..."
