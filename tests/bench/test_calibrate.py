"""Calibration: the formulas, what is measured, and the file of settings."""

from __future__ import annotations

import doctest
import json
from pathlib import Path
from typing import Any

import pytest
from pairs import Scripted
from tiny_models import TINY

from pydflash import Speculator, Target
from pydflash.bench import calibrate as module
from pydflash.bench import formulas
from pydflash.bench.calibrate import Row, calibrate, draw, show
from pydflash.settings import check_fits, made_for, read_settings

PROMPT = [3, 1, 4, 1, 5]


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(TINY["llama"](num_hidden_layers=3), (0, 2))


@pytest.fixture(scope="module")
def text(target: Target) -> list[int]:
    return Speculator(target, None).generate(PROMPT, 40, temperature=0.0).token_ids


def test_formulas() -> None:
    found = doctest.testmod(formulas, optionflags=doctest.ELLIPSIS)
    assert (found.attempted, found.failed) == (4, 0)


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stats whose rounds take 10 ms plainly, and 1 ms more for each slot."""
    monkeypatch.setattr(module, "_round_seconds", lambda found: 0.01 + 0.001 * (found[0][0].num_verified[0]))
    monkeypatch.setattr(
        module,
        "_speed",
        lambda found: found[0][0].new_tokens / (found[0][0].rounds * (0.01 + 0.001 * found[0][0].num_verified[0])),
    )


def test_rows_follow_from_acceptance_and_cost(timed: None, target: Target, text: list[int]) -> None:
    """A drafter that is wrong at every third token."""
    wrong = [token if i % 3 else (token + 1) % 97 for i, token in enumerate(text)]
    spec = Speculator(target, Scripted([*PROMPT, *wrong], 6))
    done: list[tuple[int, int]] = []
    plain, rows, acceptance = calibrate(spec, [PROMPT], [], 0.0, 30, lambda *x: done.append(x))
    assert plain == pytest.approx(0.01)
    assert [row.block_size for row in rows] == [2, 3, 4, 6]
    assert done[-1] == (5, 5)
    full = rows[-1]
    assert full.acceptance_length == pytest.approx(1 + sum(acceptance), rel=0.05)  # the last round is cut
    assert full.measured == pytest.approx(full.acceptance_length * 0.01 / 0.015)
    for row in rows:
        assert row.predicted == pytest.approx((1 + sum(acceptance[: row.block_size - 1])) * 0.01 / row.round_seconds)


def test_plain_speculators_and_short_answers_are_refused(target: Target, text: list[int]) -> None:
    with pytest.raises(ValueError, match="must have a drafter"):
        calibrate(Speculator(target, None), [PROMPT], [], 0.0, 9)
    with pytest.raises(ValueError, match="answers must have more than one token"):
        calibrate(Speculator(target, Scripted([*PROMPT, *text], 4)), [PROMPT], [], 0.0, 1)


def row(**changes: Any) -> Row:
    values: dict[str, Any] = {
        "path": "walk", "block_size": 4, "num_nodes": None, "slots": 4.0, "round_seconds": 0.012,
        "acceptance_length": 2.5, "predicted": 2.0, "measured": 1.9,
    }  # fmt: skip
    return Row(**(values | changes))


def test_the_table_and_the_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    rows = [row(), row(path="tree", num_nodes="auto", slots=16.4, predicted=None, measured=0.9)]
    show(rows, 0.01, rows[0])
    out = capsys.readouterr().out
    assert "plain decoding: 10.00 ms a token" in out
    assert "1.20" in out  # pays from
    show(rows[1:], 0.01, rows[1])
    assert "no way of drafting was faster" in capsys.readouterr().out
    draw(rows, [0.8, 0.5, 0.2], 0.01, tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_settings_are_read_back(tmp_path: Path, target: Target) -> None:
    spec = Speculator(target, Scripted([*PROMPT], 6))
    path = tmp_path / "calibration.json"
    report: dict[str, Any] = {
        "settings": {"block_size": 4, "path": "walk", "num_nodes": None},
        "made_for": made_for(spec),
    }
    path.write_text(json.dumps(report))
    assert read_settings(path) == ({"block_size": 4, "path": "walk"}, made_for(spec))
    check_fits(path, made_for(spec), spec)
    with pytest.raises(ValueError, match=r"settings: .* must be measured for this pair and device, got device 'cuda'"):
        check_fits(path, made_for(spec) | {"device": "cuda"}, spec)
    path.write_text(json.dumps(report | {"settings": None}))
    with pytest.raises(ValueError, match="no way of drafting was faster"):
        read_settings(path)
    for text in ("{", "[]", "{}", '{"settings": {}, "made_for": 3}'):
        path.write_text(text)
        with pytest.raises(ValueError, match="must be a file of `pydflash calibrate`"):
            read_settings(path)
