"""How `pydflash bench` tells its figures: tables, warnings, JSON."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .figures import ALL, LOOP_TOKENS

WIDTH = 100

Rows = Sequence[dict[str, Any]]


def write_json(report: dict[str, Any], path: Path) -> None:
    """Write `report` atomically; what is not a number becomes null."""
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(_plain(report), indent=1, allow_nan=False) + "\n", encoding="utf-8")
    os.replace(part, path)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def print_report(rows: Rows, compared: dict[str, list[dict[str, Any]]], plain: str) -> None:
    """The tables, 100 columns wide, then a warning where answers loop."""
    from rich.console import Console

    # A terminal's own width would cut numbers off; a wider one than asked for is left empty.
    console = Console(width=WIDTH, highlight=False)
    for temperature in dict.fromkeys(row["temperature"] for row in rows):
        here = [row for row in rows if row["temperature"] == temperature]
        speed = {(c["method"], c["prompts"]): c for c in compared["speed"] if c["temperature"] == temperature}
        console.print(f"T = {temperature:g}", style="bold")
        console.print(_main_table(here, speed, plain))
    if compared["acceptance"]:
        against = compared["acceptance"][0]["against"]
        console.print(f"acceptance length less that of {against}, prompt by prompt", markup=False)
        console.print(_difference_table(compared["acceptance"]))
    if compared["walk_acceptance"]:
        console.print("against the walk of the same drafter, prompt by prompt: acceptance length, tokens per second")
        console.print(_difference_table(compared["walk_acceptance"], compared["walk_speed"]))
    for line in loop_warnings(rows):
        console.print(line, markup=False, soft_wrap=True)


def _table(*columns: str) -> Any:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for name in columns:
        if name in ("prompts", "method"):
            table.add_column(name, overflow="fold")
        else:
            table.add_column(name, justify="right", no_wrap=True)
    return table


def _main_table(rows: Rows, speed: dict[tuple[str, str], dict[str, Any]], plain: str) -> Any:
    from rich.markup import escape

    trees = any(row["path"] == "tree" for row in rows)  # blocks of all else have one size
    drafts = ["drafts"] if trees else []
    table = _table("prompts", "method", "n", "loops", *drafts, "acceptance", "pooled", "tok/s", f"x {plain}")
    before = None
    for row in rows:
        if before not in (None, row["prompts"]):
            table.add_section()
        ratio = speed.get((row["method"], row["prompts"]))
        table.add_row(
            "" if row["prompts"] == before else escape(row["prompts"]),
            escape(row["method"]),
            str(row["requests"]),
            str(row["loops"]),
            *([number(row["num_verified"], 1)] if trees else []),
            with_interval(row["acceptance_length"], row["interval"], row["requests"]),
            number(row["pooled_acceptance_length"]),
            number(row["tokens_per_second"], 1),
            "" if ratio is None else with_interval(ratio["ratio"], ratio["interval"], ratio["pairs"]),
        )
        before = row["prompts"]
    return table


def _difference_table(found: Sequence[dict[str, Any]], speed: Sequence[dict[str, Any]] = ()) -> Any:
    """Differences of acceptance, and beside them ratios of `speed` for the same pairs of methods where given."""
    from rich.markup import escape

    ratios = [with_interval(c["ratio"], c["interval"], c["pairs"]) for c in speed]
    table = _table("T", "prompts", "method", "difference", *(["x walk"] if speed else []), "pairs", "looping pairs")
    for i, c in enumerate(found):
        table.add_row(
            f"{c['temperature']:g}",
            escape(c["prompts"]),
            escape(c["method"]),
            with_interval(c["difference"], c["interval"], c["pairs"], "+.2f"),
            *ratios[i : i + 1],
            str(c["pairs"]),
            str(c["loops"]),
        )
    return table


def number(value: float, digits: int = 2) -> str:
    """A figure for the tables; a dash where there is none."""
    return "-" if math.isnan(value) else f"{value:.{digits}f}"


def with_interval(value: float, interval: tuple[float, float], count: int, form: str = ".2f") -> str:
    """A figure and its 95 % interval, which one value alone does not have.

    >>> with_interval(3.2, (3.0, 3.5), 12)
    '3.20 [3.00, 3.50]'
    """
    if math.isnan(value):
        return "-"
    if count < 2:
        return f"{value:{form}} [-, -]"
    return f"{value:{form}} [{interval[0]:{form}}, {interval[1]:{form}}]"


def loop_warnings(rows: Rows) -> list[str]:
    """Which methods gave degenerate text, on which set, and how often; empty where none did."""
    lines = []
    for row in rows:
        if row["loops"] and row["prompts"] != ALL:
            lines.append(
                f"  {row['prompts']}, T = {row['temperature']:g}, {row['method']}: {row['loops']} of "
                f"{row['loops'] + row['requests']}, the longest {row['longest_loop']} tokens"
            )
    if lines:
        lines.insert(
            0,
            f"warning: answers that loop (a token or n-gram repeated over {LOOP_TOKENS} tokens or more); "
            "they count neither in acceptance nor in speed:",
        )
    return lines
