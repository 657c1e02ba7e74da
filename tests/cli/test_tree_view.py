"""A round's tree for people: the kept path, text and picture, and the command line's options for it."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cli_cases import run
from pairs import fitted, fitted_prompts
from rich.console import Console

from pydflash import Speculator
from pydflash.cli.tree_view import TreeOfRound, accepted_path

TOKENS, PARENTS = [9, 1, 2, 3, 3, 4], [-1, 0, 0, 1, 2, 3]


def text(tree: Any) -> str:
    console = Console(width=60, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(tree)
    return console.export_text()


def test_the_kept_path_is_found_among_equal_tokens() -> None:
    assert accepted_path(TOKENS, PARENTS, [2, 3]) == [0, 2, 4]
    assert accepted_path(TOKENS, PARENTS, [1, 3, 4]) == [0, 1, 3, 5]
    assert accepted_path(TOKENS, PARENTS, []) == [0]


def test_the_round_that_kept_most_is_shown() -> None:
    stats = SimpleNamespace(proposals=[[9, 1], (TOKENS, PARENTS), (TOKENS, PARENTS)], num_accepted=[1, 0, 2], rounds=3)
    output: Any = SimpleNamespace(stats=stats, token_ids=[9, 1, 8, 7, 2, 3, 6])
    shown = TreeOfRound.of(output, str)
    assert shown.title == "round 3 of 3: 5 drafts verified, 2 kept"
    lines = text(shown.tree).splitlines()
    assert lines[0].rstrip() == "'9' (anchor)"
    assert [line.lstrip("│├└─ ").rstrip() for line in lines[1:]] == [
        "'1'", "'3'", "'4'", "'2' kept", "'3' kept", "'6' (the target's own)",
    ]  # fmt: skip
    stats.proposals = [[9, 1]]
    with pytest.raises(ValueError, match="must have a round with a tree"):
        TreeOfRound.of(output, str)


def test_real_rounds_can_be_shown(tmp_path: Path) -> None:
    model, drafter = fitted(2)
    spec = Speculator(model, drafter, path="tree", num_nodes=9)
    out = spec.generate(fitted_prompts()[0], 30, stop_token_ids=[], return_proposals=True)
    shown = TreeOfRound.of(out, str)
    assert f"{max(out.stats.num_accepted)} kept" in shown.title
    assert text(shown.tree).count(" kept") == max(out.stats.num_accepted)
    shown.save_svg(tmp_path / "tree.svg")
    svg = (tmp_path / "tree.svg").read_text()
    assert svg.startswith("<svg")
    assert "@font-face" not in svg
    assert "url(" not in re.sub(r"url\(#", "", svg)  # only its own clips are referred to
    assert [p.name for p in tmp_path.iterdir()] == ["tree.svg"]


def test_generate_shows_a_tree(pair: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = ("generate", pair[0], "--drafter", pair[1], "hello", "--max-new-tokens", 8, "--device", "cpu")
    want = run(capsys, *base)
    svg = tmp_path / "t.svg"
    code, out, err = run(capsys, *base, "--num-nodes", 6, "--show-tree", "--tree-svg", svg)
    assert (code, out) == (0, want[1])
    assert "6 drafts verified" in err
    assert "(anchor)" in err
    assert "6 nodes a round" in err
    assert svg.exists()
    code, _, err = run(capsys, *base, "--path", "walk", "--num-nodes", 6)
    assert code == 2
    assert "num_nodes must be None where path is 'walk', got 6" in err
    code, _, err = run(capsys, *base, "--tree-svg", tmp_path / "none" / "t.svg")
    assert code == 2
    assert "--tree-svg: the folder of FILE must exist" in err
