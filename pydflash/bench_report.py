"""How `pydflash bench` shows its figures: tables, warnings, JSON, and a picture."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .bench_figures import ALL, LOOP_TOKENS

WIDTH = 100
_BLACK = "#444444"
# Okabe and Ito's colours, which also people who see few colours tell apart.
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#b8a800", "#8c564b")

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

    table = _table("prompts", "method", "n", "loops", "acceptance", "pooled", "tok/s", f"x {plain}")
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
            with_interval(row["acceptance_length"], row["interval"], row["requests"]),
            number(row["pooled_acceptance_length"]),
            number(row["tokens_per_second"], 1),
            "" if ratio is None else with_interval(ratio["ratio"], ratio["interval"], ratio["pairs"]),
        )
        before = row["prompts"]
    return table


def _difference_table(found: Sequence[dict[str, Any]]) -> Any:
    from rich.markup import escape

    table = _table("T", "prompts", "method", "difference", "pairs", "looping pairs")
    for c in found:
        table.add_row(
            f"{c['temperature']:g}",
            escape(c["prompts"]),
            escape(c["method"]),
            with_interval(c["difference"], c["interval"], c["pairs"], "+.2f"),
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


def plot(rows: Rows, path: Path) -> None:
    """Acceptance length and speed by prompt set, and acceptance by slot, a column per temperature; needs matplotlib.

    Writes a PNG, 1200 pixels wide, atomically. Whiskers are 95 % intervals over prompts.
    """
    from matplotlib.figure import Figure

    temperatures = list(dict.fromkeys(row["temperature"] for row in rows))
    methods = list(dict.fromkeys(row["method"] for row in rows))
    plain, others = methods[0], methods[1:]
    colours = {plain: _BLACK} | {name: _COLOURS[i % len(_COLOURS)] for i, name in enumerate(others)}
    figure = Figure(figsize=(12, 10.5), dpi=100, layout="constrained")
    grid = figure.subplots(3, len(temperatures), sharey="row", squeeze=False)
    for column, temperature in enumerate(temperatures):
        here = [row for row in rows if row["temperature"] == temperature]
        lengths, slots, speeds = grid[:, column]
        drafting = [row for row in here if row["slot_acceptance"]]
        _bars(lengths, drafting, "acceptance_length", colours, "tokens per round, mean over prompts")
        lengths.set_title(f"Acceptance length with 95 % interval, T = {temperature:g}")
        _slot_lines(slots, drafting, colours)
        slots.set_title(f"Acceptance by slot, T = {temperature:g}")
        _bars(speeds, here, "tokens_per_second", colours, "tokens per second")
        speeds.set_title(f"Speed, T = {temperature:g}")
    for axis in grid.flat:
        axis.grid(alpha=0.3, axis="y")
        axis.set_axisbelow(True)
        axis.spines[["top", "right"]].set_visible(False)
    for axis in grid[:, 1:].flat:
        axis.set_ylabel("")
    handles = [_patch(colours[name], name) for name in methods]
    figure.legend(handles=handles, loc="outside upper center", ncols=min(3, len(handles)), frameon=False, fontsize=11)
    part = path.with_name(path.name + ".part")
    figure.savefig(part, format="png")
    os.replace(part, path)


def _bars(axis: Any, rows: Rows, key: str, colours: dict[str, str], label: str) -> None:
    """Bars side by side, grouped by prompt set, with whiskers where the figure has an interval."""
    sets = list(dict.fromkeys(row["prompts"] for row in rows))
    methods = list(dict.fromkeys(row["method"] for row in rows))
    width = 0.84 / max(len(methods), 1)
    for row in rows:
        x = sets.index(row["prompts"]) + (methods.index(row["method"]) - (len(methods) - 1) / 2) * width
        axis.bar(x, row[key], width * 0.94, color=colours[row["method"]])
        if key == "acceptance_length" and row["requests"] > 1:
            low, high = row["interval"]
            axis.vlines(x, low, high, color="black", linewidth=1.2)
    if ALL in sets:
        axis.axvline(sets.index(ALL) - 0.5, color="gray", linewidth=0.8, linestyle=":")
    axis.set_xticks(range(len(sets)), sets, fontsize=10 if len(sets) < 5 else 9)
    axis.set_xlim(-0.5, max(len(sets), 1) - 0.5)
    axis.set_ylabel(label)


def _slot_lines(axis: Any, rows: Rows, colours: dict[str, str]) -> None:
    """Share of the rounds in which each slot was kept, over all sets."""
    sets = {row["prompts"] for row in rows}
    for row in rows:
        if row["prompts"] == ALL or len(sets) == 1:
            shares = row["slot_acceptance"]
            axis.plot(range(1, len(shares) + 1), shares, marker="o", markersize=4, color=colours[row["method"]])
    axis.set(xlabel="slot", ylabel="share of rounds that keep it", ylim=(0, 1))
    axis.xaxis.get_major_locator().set_params(integer=True)


def _patch(colour: str, label: str) -> Any:
    from matplotlib.patches import Patch

    return Patch(color=colour, label=label)
