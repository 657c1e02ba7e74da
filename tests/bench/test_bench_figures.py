"""What `pydflash bench` computes from answers, and how it shows it."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from pydflash.bench import methods as bench_methods
from pydflash.bench import plots as bench_plots
from pydflash.bench import report as bench_report
from pydflash.bench import run as bench
from pydflash.bench.figures import (
    Answered,
    Cell,
    compare_acceptance,
    compare_speed,
    comparisons,
    longest_loop,
    with_totals,
)
from pydflash.bench.methods import Answer, DraftPath, draft_paths
from pydflash.training.evaluate import paired


def answered(
    number: int, accepted: Sequence[int], *, loop: int = 0, seconds: float = 1.0, drafted: int = 3
) -> Answered:
    tokens = 1 + sum(accepted) + len(accepted)
    rounds = (drafted,) * len(accepted)
    return Answered(("s", number), tokens, seconds, tuple(accepted), rounds, rounds, loop)


def cell(*answers: Answered, method: str = "d", prompts: str = "s", temperature: float = 0.0) -> Cell:
    return Cell(method, prompts, temperature, list(answers))


@pytest.mark.parametrize(
    ("ids", "length"),
    [
        ([], 0),
        ([1, 1], 0),
        ([1, 2, 3, 4, 5, 6, 7], 0),
        ([5, 7, 7, 7, 7, 5], 4),
        ([9] * 20, 20),
        ([1, 2, 3, 1, 2, 3, 4, 5, 6], 0),  # said twice
        ([8, 1, 2, 3, 1, 2, 3, 1, 2, 3, 9], 9),
        ([*range(16)] * 3, 48),
        ([*range(17)] * 4, 0),
        ([1, 2] * 4 + [3] + [1, 2] * 4, 8),
    ],
)
def test_longest_loop(ids: list[int], length: int) -> None:
    assert longest_loop(ids) == length


def test_figures_of_a_cell_are_of_answers_that_do_not_loop() -> None:
    row = cell(
        answered(0, [3, 3]),
        answered(1, [0, 0, 0, 1], seconds=3.0),
        answered(2, [3] * 9, loop=20, seconds=0.5),
        answered(3, [2, 2], loop=19),
        answered(4, []),
    ).report()
    assert (row["requests"], row["loops"], row["longest_loop"]) == (4, 1, 20)
    assert row["acceptance_length"] == pytest.approx((4 + 1.25 + 3) / 3)
    assert row["pooled_acceptance_length"] == pytest.approx(1 + 11 / 8)
    assert row["looping_acceptance_length"] == pytest.approx(4)
    assert row["slot_acceptance"] == pytest.approx([5 / 8, 4 / 8, 2 / 8])
    assert (row["num_verified"], row["drafter"], row["path"], row["num_nodes"]) == (3, None, None, None)
    assert row["tokens_per_second"] == pytest.approx((9 + 6 + 7 + 1) / 6)
    low, high = row["interval"]
    assert 1.25 <= low < row["acceptance_length"] < high <= 4
    assert [r["longest_loop"] for r in row["per_request"]] == [0, 0, 20, 19, 0]
    assert [r["prompt"] for r in row["per_request"]] == [0, 1, 2, 3, 4]
    assert row["per_request"][4]["acceptance_length"] is None
    nothing = cell(answered(0, [1], loop=30)).report()
    assert math.isnan(nothing["acceptance_length"])
    assert math.isnan(nothing["tokens_per_second"])


def test_slots_count_only_rounds_that_drafted_them() -> None:
    assert cell(Answered(("s", 0), 9, 1.0, (2, 1, 0), (3, 1, 2), (3, 3, 3), 0)).slots() == pytest.approx(
        [2 / 3, 1 / 2, 0]
    )


def test_paired_takes_prompts_with_two_values() -> None:
    got = paired([3.0, 5.0, None, 2.0, math.nan], [2.0, 2.0, 9.0, None, 1.0])
    assert (got.difference, got.pairs) == (2.0, 2)
    assert got.interval == (1.0, 3.0)
    steady = paired([float(i) + 0.5 for i in range(30)], [float(i) for i in range(30)])
    assert steady.interval == pytest.approx((0.5, 0.5))  # prompts differ widely, the two methods do not
    assert paired([1.0], [None]).pairs == 0
    assert math.isnan(paired([1.0], [None]).difference)
    with pytest.raises(ValueError, match=r"paired: a and b must .* got 1 and 2"):
        paired([1.0], [1.0, 2.0])


def test_acceptance_is_compared_prompt_by_prompt() -> None:
    a = cell(answered(2, [2]), answered(0, [1]), answered(1, [3], loop=40), answered(3, [3]), method="a")
    b = cell(answered(0, [0]), answered(1, [0]), answered(2, [0]), answered(3, [0], loop=20), answered(4, [3]))
    got = compare_acceptance(a, b)
    assert (got["method"], got["against"], got["pairs"], got["loops"]) == ("a", "d", 2, 2)
    assert got["difference"] == pytest.approx((2 + 1) / 2)
    assert got["interval"] == (1, 2)
    assert compare_acceptance(b, a)["difference"] == -got["difference"]
    spread = [answered(i, [i]) for i in range(8)]
    got = compare_acceptance(cell(*spread[::-1]), cell(*spread))
    assert (got["difference"], got["interval"]) == (0, (0, 0))  # pairs by number, not by place


def test_speed_is_a_ratio_of_sums() -> None:
    plain = cell(answered(0, [0] * 9, seconds=10.0), answered(1, [0] * 19, seconds=1.0), method="plain")
    fast = cell(answered(1, [3] * 5, seconds=2.0), answered(0, [4, 3], seconds=2.0, drafted=4))
    got = compare_speed(fast, plain)
    assert got["ratio"] == pytest.approx(((21 + 10) / 4) / ((10 + 20) / 11))
    assert got["interval"] == pytest.approx((21 / 2 / 20, 5.0))  # one prompt drawn twice is the worst and the best
    assert got["pairs"] == 2
    fast.answers.append(answered(2, [3], loop=99, seconds=1e6))
    plain.answers.append(answered(2, [3]))
    got = compare_speed(fast, plain)
    assert (got["pairs"], got["loops"]) == (2, 1)
    assert got["ratio"] == pytest.approx(31 / 4 / (30 / 11))
    assert math.isnan(compare_speed(cell(), plain)["ratio"])


def test_totals_and_comparisons() -> None:
    cells = [
        cell(answered(0, [accepted]), method=method, prompts=prompts, temperature=temperature)
        for temperature in (0.0, 1.0)
        for prompts in ("x", "y")
        for method, accepted in (("plain", 0), ("one", 2), ("two", 3))
    ]
    cells += [cell(answered(0, []), method="silent", prompts=p, temperature=0.0) for p in ("x", "y")]
    for c in cells:
        c.answers = [
            Answered((c.prompts, a.prompt[1]), *[getattr(a, n) for n in list(a.__slots__)[1:]]) for a in c.answers
        ]
    found = with_totals(cells)
    places = [(c.temperature, c.prompts) for c in found if c.method == "two"]
    assert places == [(0.0, "x"), (0.0, "y"), (0.0, "all"), (1.0, "x"), (1.0, "y"), (1.0, "all")]
    assert next(len(c.answers) for c in found if c.prompts == "all") == 2
    compared = comparisons(found, "one", "plain", {"one": "one", "two": "two"})
    assert {(c["method"], c["against"]) for c in compared["acceptance"]} == {("two", "one")}
    assert {c["difference"] for c in compared["acceptance"]} == {1.0}
    assert [c["pairs"] for c in compared["acceptance"]] == [1, 1, 2, 1, 1, 2]
    assert {(c["method"], c["against"]) for c in compared["speed"]} == {(m, "plain") for m in ("one", "two", "silent")}
    assert with_totals(found[:1]) == found[:1]


def tree_answer(number: int, accepted: int, nodes: Sequence[int], prompts: str = "s", seconds: float = 1.0) -> Answered:
    """Rounds that each keep `accepted` drafts of a tree of so many nodes, three levels deep."""
    rounds = len(nodes)
    tokens = 1 + rounds * (accepted + 1)
    return Answered((prompts, number), tokens, seconds, (accepted,) * rounds, (3,) * rounds, tuple(nodes), 0)


def test_the_size_of_trees_is_the_mean_over_rounds_of_answers_that_do_not_loop() -> None:
    looping = Answered(("s", 2), 9, 1.0, (1, 1), (3, 3), (60, 60), 40)
    row = cell(tree_answer(0, 1, [7]), tree_answer(1, 2, [15, 31, 63]), looping).report(DraftPath("d", "tree", "auto"))
    assert row["num_verified"] == (7 + 15 + 31 + 63) / 4
    assert (row["drafter"], row["path"], row["num_nodes"]) == ("d", "tree", "auto")


def tree_cells() -> list[Cell]:
    """Plain decoding, two drafters with their trees, and a peer, on three prompts each of two sets."""
    cells = []
    for prompts in ("x", "y"):
        for method, accepted, nodes in (
            ("plain", 0, 0),
            ("a", 1, 3),
            ("a tree 9", 2, 9),
            ("a tree auto", 2, 5),
            ("b", 0, 3),
            ("b tree 9", 3, 9),
            ("peer", 1, 3),
        ):
            answers = [tree_answer(i, accepted, [nodes] * 4, prompts, 1.0 + (method == "a")) for i in range(3)]
            cells.append(Cell(method, prompts, 0.0, answers))
    return with_totals(cells)


PATHS = draft_paths(["a"], [9, "auto"], False) | draft_paths(["b"], [9], False)


def test_trees_are_compared_with_the_walk_of_their_drafter() -> None:
    found = comparisons(tree_cells(), "a", "plain", {name: path.drafter for name, path in PATHS.items()})
    differences = {(c["method"], c["against"], c["difference"]) for c in found["walk_acceptance"]}
    assert differences == {("a tree 9", "a", 1), ("a tree auto", "a", 1), ("b tree 9", "b", 3)}
    assert {(c["method"], c["against"], c["difference"]) for c in found["acceptance"]} == {
        ("b", "a", -1),
        ("peer", "a", 0),
    }
    ratios = {(c["method"], c["against"]): c["ratio"] for c in found["walk_speed"]}
    assert ratios == {
        ("a tree 9", "a"): pytest.approx(13 / (9 / 2)),
        ("a tree auto", "a"): pytest.approx(13 / (9 / 2)),
        ("b tree 9", "b"): pytest.approx(17 / 5),
    }
    assert [c["pairs"] for c in found["walk_acceptance"]] == [3] * 6 + [6] * 3
    assert {c["against"] for c in found["speed"]} == {"plain"}
    assert len(found["speed"]) == 6 * 3


def test_tables_with_trees(capsys: pytest.CaptureFixture[str]) -> None:
    cells = tree_cells()
    compared = comparisons(cells, "a", "plain", {name: path.drafter for name, path in PATHS.items()})
    bench_report.print_report([c.report(PATHS.get(c.method)) for c in cells], compared, "plain")
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 100
    lines = [line.split() for line in out.splitlines() if line.strip()]
    assert lines[1][:5] == ["prompts", "method", "n", "loops", "drafts"]
    assert ["a", "tree", "auto", "3", "0", "5.0", "3.00"] in [line[:7] for line in lines]
    ratio = ["2.89", "[2.89,", "2.89]"]
    assert ["0", "x", "a", "tree", "9", "+1.00", "[+1.00,", "+1.00]", *ratio, "3", "0"] in lines
    assert ["0", "all", "b", "tree", "9", "+3.00", "[+3.00,", "+3.00]", "3.40", "[3.40,", "3.40]", "6", "0"] in lines
    assert ["0", "x", "b", "-1.00", "[-1.00,", "-1.00]", "3", "0"] in lines


def test_panels_of_trees() -> None:
    from matplotlib.figure import Figure

    rows = [c.report(PATHS.get(c.method)) for c in tree_cells()]
    rows += [r | {"requests": 0, "acceptance_length": math.nan, "num_nodes": 40} for r in rows if r["num_nodes"] == 9]
    assert [[r["num_nodes"] for r in line] for line in bench_plots.tree_lines(rows, "a").values()] == [
        [None, 9, "auto"]
    ] * 3
    assert list(bench_plots.tree_lines(rows, "b")) == ["x", "y", "all"]
    lengths, speeds = Figure().subplots(1, 2)
    legend = bench_plots._tree_panels([lengths, speeds], rows, "a", "plain")
    assert [line.get_label() for line in legend] == ["x", "y", "all", "plain", "auto, at its mean size"]
    for axis, values, auto in ((lengths, [2, 3], 3), (speeds, [4.5, 13], 13)):
        drawn = [line for line in axis.lines if line not in legend[3:] and line.get_label() != "plain"]
        assert [list(line.get_ydata()) for line in drawn] == [values, [auto]] * 3
        assert [round(x) for line in drawn for x in line.get_xdata()] == [0, 9, 5] * 3
        assert [label.get_text() for label in axis.get_xticklabels()] == ["walk", "9"]
    assert len(lengths.collections) == 9  # whiskers
    assert list(legend[3].get_ydata()) == [5, 5]


def test_the_picture_leaves_fixed_trees_to_their_panels_where_methods_are_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[list[str]] = []
    monkeypatch.setattr(bench_plots, "_bars", lambda axis, rows, *_: drawn.append([r["method"] for r in rows]))
    for sizes, left in (([9], []), ([3, 5, 7, 9, 11, 13, 15, "auto"], [3, 5, 7, 9, 11, 13, 15])):
        paths = draft_paths(["a"], sizes, False)
        rows = [row_of("plain", "x"), *(row_of(name, "x", **path._asdict()) for name, path in paths.items())]
        bench_plots.plot(rows, tmp_path / "b.png")
        assert drawn[-1] == ["plain", *(name for name, path in paths.items() if path.num_nodes not in left)]


def test_measure_interleaves_and_keeps_what_there_is() -> None:
    calls: list[tuple[Any, ...]] = []

    def method(name: str) -> bench_methods.Method:
        def answer(ids: Sequence[int], temperature: float, seed: int, limit: int) -> Answer:
            calls.append((name, ids[0], temperature, seed, limit))
            if len(calls) == 6:
                raise KeyboardInterrupt
            return Answer([1] * ids[0], [1], [2], [4])

        return answer

    cells: list[Cell] = []
    ticks: list[None] = []
    with pytest.raises(KeyboardInterrupt):
        bench.measure(
            {"a": method("a"), "b": method("b")},
            {"x": [[30], [5]], "y": [[6]]},
            [0.5],
            9,
            cells,
            lambda: ticks.append(None),
        )
    assert calls == [(m, i, 0.5, seed, 9) for i, seed in ((30, 0), (5, 1), (6, 0)) for m in ("a", "b")]
    assert len(ticks) == 5
    assert [(c.method, c.prompts, [a.prompt for a in c.answers]) for c in cells] == [
        ("a", "x", [("x", 0), ("x", 1)]),
        ("b", "x", [("x", 0), ("x", 1)]),
        ("a", "y", [("y", 0)]),
        ("b", "y", []),
    ]
    assert [a.loop for a in cells[0].answers] == [30, 5]
    assert {(a.accepted, a.drafted, a.verified) for c in cells for a in c.answers} == {((1,), (2,), (4,))}
    assert cells[0].answers[0].seconds > 0


def test_json_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "b.json"
    bench_report.write_json({"a": (math.nan, [math.inf, 1.5]), "b": None}, path)
    assert json.loads(path.read_text()) == {"a": [None, [None, 1.5]], "b": None}
    with pytest.raises(TypeError):
        bench_report.write_json({"a": object()}, path)
    assert json.loads(path.read_text())["b"] is None


def row_of(method: str, prompts: str, **changes: Any) -> dict[str, Any]:
    return cell(answered(0, [1, 2]), answered(1, [0, 2]), method=method, prompts=prompts).report() | changes


def test_loops_are_told_for_every_method_and_set() -> None:
    rows = [
        row_of("plain", "x", loops=1, requests=3, longest_loop=21),
        row_of("d", "x"),
        row_of("d", "y", loops=2, requests=0, longest_loop=80),
        row_of("d", "all", loops=2),
    ]
    lines = bench_report.loop_warnings(rows)
    assert lines[0].startswith("warning: answers that loop")
    assert lines[1:] == [
        "  x, T = 0, plain: 1 of 4, the longest 21 tokens",
        "  y, T = 0, d: 2 of 2, the longest 80 tokens",
    ]
    assert bench_report.loop_warnings(rows[1:2]) == []


def test_the_table_shows_the_right_figures_and_folds_long_names(capsys: pytest.CaptureFixture[str]) -> None:
    name = "a-drafter-whose-name-is-longer-than-the-column-it-stands-in"
    cells = [
        cell(answered(0, [0] * 3, seconds=4.0), answered(1, [0] * 3, seconds=4.0), method="plain"),
        cell(answered(0, [3, 3]), answered(1, [0, 0, 0, 1], seconds=3.0), method=name),
        cell(answered(0, [2, 0]), method="[b]"),
    ]
    bench_report.print_report([c.report() for c in cells], comparisons(cells, name, "plain", {}), "plain")
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 100
    lines = [line.split() for line in out.splitlines() if line.strip()]
    assert ["2", "0", "2.62", "[1.25,", "4.00]", "2.17", "3.8", "3.75", "[2.00,", "9.00]"] in [
        line[-10:] for line in lines
    ]
    assert ["[b]", "1", "0", "2.00", "[-,", "-]", "2.00", "5.0", "5.00", "[-,", "-]"] in lines
    assert any(line[:3] == ["0", "s", "[b]"] and line[3] == "-2.00" for line in lines)
