"""bench/figures.py: pages that are current, and the two faults that it finds."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench"


@pytest.fixture(scope="module")
def figures() -> ModuleType:
    sys.path.insert(0, str(BENCH))
    try:
        return importlib.import_module("figures")
    finally:
        sys.path.remove(str(BENCH))


@pytest.fixture
def site(figures: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the pages, which the script takes for the repository's."""
    for page in figures.pages(figures.ROOT):
        copy = tmp_path / page.relative_to(figures.ROOT)
        copy.parent.mkdir(exist_ok=True)
        copy.write_text(page.read_text(encoding="utf-8"), encoding="utf-8")
    monkeypatch.setattr(figures, "ROOT", tmp_path)
    return tmp_path


def test_the_pages_are_current(site: Path, figures: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert figures.main(["--check"]) == 0, capsys.readouterr().err


def test_a_changed_table_is_found_and_made_anew(
    site: Path, figures: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    page = site / "docs" / "performance.md"
    good = page.read_text()
    page.write_text(good.replace("| plain token | 512 | 4.46 |", "| plain token | 512 | 4.26 |"))
    assert page.read_text() != good
    assert figures.main(["--check"]) == 1
    assert "docs/performance.md: a table is not what bench/results says" in capsys.readouterr().err
    assert figures.main([]) == 0
    assert page.read_text() == good


@pytest.mark.parametrize(
    "words",
    ["197 tokens/s", "1.9x", "5.8 ms", "4,260 GB/s", "twice or 3.1 times faster", "an acceptance length of 3.67"],
)
def test_a_figure_by_hand_is_refused(
    words: str, site: Path, figures: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    page = site / "docs" / "install.md"
    page.write_text(f"# Install\n\nIt makes {words} here.\n" + page.read_text())
    assert figures.main(["--check"]) == 1
    assert "docs/install.md:3: a figure by hand" in capsys.readouterr().err


def test_settings_and_code_are_no_figures(figures: ModuleType) -> None:
    text = "A block of 16, 95 % of them, `1.5x`, torch 2.13.\n\n```text\n52 tokens in 0.10 s (568.4 tok/s)\n```\n"
    assert figures.typed_by_hand(text) == []


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("<!-- figures:nothing -->\n<!-- /figures -->\n", r"must name one of .* got \['nothing'\]"),
        ("<!-- figures:cpu -->\n| a |\n", r"must be closed by"),
    ],
)
def test_wrong_markers_are_errors(text: str, says: str, figures: ModuleType) -> None:
    with pytest.raises(ValueError, match=says):
        figures.current(text)
