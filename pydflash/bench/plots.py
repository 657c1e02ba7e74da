"""The picture that `pydflash bench` draws."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..checkpoints.files import write_file
from .figures import ALL

_BLACK = "#444444"
# Okabe and Ito's colours for methods and Tol's for prompt sets: people who see few colours tell them apart too.
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#b8a800", "#8c564b")
_SET_COLOURS = ("#332288", "#44aa99", "#cc6677", "#999933", "#88ccee", "#aa4499", "#117733", "#ddaa33")
_MARKERS = "osv^PX<>"
_RING: dict[str, Any] = {"marker": "D", "markersize": 8, "markerfacecolor": "white", "markeredgewidth": 1.6}

Rows = Sequence[dict[str, Any]]


def plot(rows: Rows, path: Path) -> None:
    """Acceptance length and speed by prompt set, and acceptance by slot, a column per temperature; needs matplotlib.

    Where there are trees, also acceptance length and speed by their size, two rows of panels for each drafter. The
    other panels leave trees of fixed size out where the methods are more than the colours.

    Writes a PNG, 1200 pixels wide, atomically. Whiskers are 95 % intervals over prompts.
    """
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    temperatures = sorted({row["temperature"] for row in rows})
    methods = list(dict.fromkeys(row["method"] for row in rows))
    shown = rows
    if len(methods) - 1 > len(_COLOURS):
        shown = [row for row in rows if row["path"] != "tree" or row["num_nodes"] == "auto"]
        methods = list(dict.fromkeys(row["method"] for row in shown))
    grown = list(dict.fromkeys(row["drafter"] for row in rows if row["path"] == "tree"))
    plain, others = methods[0], methods[1:]
    colours = {plain: _BLACK} | {name: _COLOURS[i % len(_COLOURS)] for i, name in enumerate(others)}
    height = 3 + 2 * len(grown)
    layout = ConstrainedLayoutEngine(h_pad=0.16)  # titles keep off the labels above
    figure = Figure(figsize=(12, 3.5 * height), dpi=100, layout=layout)
    grid = figure.subplots(height, len(temperatures), sharey="row", squeeze=False)
    for column, temperature in enumerate(temperatures):
        here = [row for row in shown if row["temperature"] == temperature]
        lengths, slots, speeds, *trees = grid[:, column]
        drafting = [row for row in here if row["slot_acceptance"]]
        _bars(lengths, drafting, "acceptance_length", colours, "tokens per round")
        lengths.set_title(f"Acceptance length, mean over prompts with 95 % interval, T = {temperature:g}")
        _slot_lines(slots, drafting, colours)
        slots.set_title(f"Acceptance by slot, T = {temperature:g}")
        _bars(speeds, here, "tokens_per_second", colours, "tokens per second")
        speeds.set_title(f"Speed, T = {temperature:g}")
        everything = [row for row in rows if row["temperature"] == temperature]
        for i, drafter in enumerate(grown):
            panels = trees[2 * i : 2 * i + 2]
            legend = _tree_panels(panels, everything, drafter, plain)
            for panel, what in zip(panels, ("Acceptance length", "Speed"), strict=True):
                panel.set_title(f"{what} by size of the tree, {drafter}, T = {temperature:g}")
            if column == 0:
                box = {"facecolor": "white", "edgecolor": "white", "framealpha": 1}  # over the line of plain decoding
                panels[0].legend(handles=legend, loc="lower center", ncols=4, fontsize=9, **box)
    for axis in grid.flat:
        axis.grid(alpha=0.3, axis="y")
        axis.set_axisbelow(True)
        axis.spines[["top", "right"]].set_visible(False)
    for axis in grid[:, 1:].flat:
        axis.set_ylabel("")
    handles = [_patch(colours[name], name) for name in methods]
    figure.legend(handles=handles, loc="outside upper center", ncols=min(3, len(handles)), frameon=False, fontsize=11)
    write_file(path, lambda part: figure.savefig(part, format="png"))


def tree_lines(rows: Rows, drafter: str) -> dict[str, list[dict[str, Any]]]:
    """A drafter's rows of one temperature that have answers, by prompt set: the walk, trees by size, "auto" last."""
    own = [r for r in rows if r["drafter"] == drafter and r["path"] in ("walk", "tree") and r["requests"]]
    own.sort(key=lambda row: math.inf if row["num_nodes"] == "auto" else row["num_nodes"] or 0)
    sets = dict.fromkeys(row["prompts"] for row in rows)
    return {name: [row for row in own if row["prompts"] == name] for name in sets}


def nodes_of(row: dict[str, Any]) -> float:
    """Where a row stands among the sizes of trees: the walk at 0, "auto" at its mean size."""
    return row["num_verified"] if row["num_nodes"] == "auto" else row["num_nodes"] or 0


def _tree_panels(axes: Sequence[Any], rows: Rows, drafter: str, plain: str) -> list[Any]:
    """Acceptance length and speed against the number of nodes: a line per prompt set, and "auto" as a ring.

    Returns: what the legend shows.
    """
    lengths, speeds = axes
    lines = tree_lines(rows, drafter)
    reach = max((nodes_of(row) for line in lines.values() for row in line), default=1)
    legend: list[Any] = []
    for i, (name, line) in enumerate(lines.items()):
        whole = name == ALL or len(lines) == 1
        colour = "black" if whole else _SET_COLOURS[i % len(_SET_COLOURS)]
        weight = {"linewidth": 2.4, "zorder": 4} if whole else {"linewidth": 1.3, "zorder": 3}
        shift = reach * 0.005 * (i - (len(lines) - 1) / 2)  # else whiskers hide each other
        marks = {"marker": _MARKERS[i % len(_MARKERS)], "markersize": 5, "label": name}
        fixed = [row for row in line if row["num_nodes"] != "auto"]
        for points, style in ((fixed, marks), (line[len(fixed) :], _RING)):
            x = [nodes_of(row) + shift for row in points]
            drawn = lengths.plot(x, [row["acceptance_length"] for row in points], color=colour, **weight, **style)
            speeds.plot(x, [row["tokens_per_second"] for row in points], color=colour, **weight, **style)
            legend += drawn if style is marks else []
            for place, row in zip(x, points, strict=True):
                if row["requests"] > 1:
                    lengths.vlines(place, *row["interval"], color=colour, linewidth=weight["linewidth"] / 1.6)
    level = [r["tokens_per_second"] for r in rows if r["method"] == plain and (r["prompts"] == ALL or len(lines) == 1)]
    dotted: dict[str, Any] = {"color": _BLACK, "linewidth": 1.2, "linestyle": ":", "label": plain}
    for y in level:
        legend.append(speeds.axhline(y, **dotted))
        lengths.axhline(1, **dotted)  # plain decoding: a token per round
    sizes = sorted({r["num_nodes"] for line in lines.values() for r in line if isinstance(r["num_nodes"], int)})
    sizes = [size for size in sizes if size > reach * 0.08] or [round(reach)]  # smaller ones would run into the walk
    for axis, what in ((lengths, "tokens per round"), (speeds, "tokens per second")):
        axis.set_xticks([0, *sizes], ["walk", *map(str, sizes)])
        axis.set(xlabel="drafts in the tree", ylabel=what)
        axis.set_ylim(bottom=0)  # below the lines is room for the legend
    if any(row["num_nodes"] == "auto" for row in rows if row["drafter"] == drafter):
        legend += lengths.plot([], [], color=_BLACK, linewidth=0, label="auto, at its mean size", **_RING)
    return legend


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
    label = "slot, or depth in a tree" if any(row["path"] == "tree" for row in rows) else "slot"
    axis.set(xlabel=label, ylabel="share of rounds that keep it", ylim=(0, 1))
    axis.xaxis.get_major_locator().set_params(integer=True)


def _patch(colour: str, label: str) -> Any:
    from matplotlib.patches import Patch

    return Patch(color=colour, label=label)
