"""Write the tables of figures in README.md and docs/ from the JSON files in bench/results.

A page marks the place of a table: `<!-- figures:NAME -->`, the table, `<!-- /figures -->`. What lies between is made
here and not by hand; TABLES has a function for each NAME. With --check nothing is written: the exit code
is 1 if a table is not current, or if a page states a measured figure outside of a table.

example: python bench/figures.py --check
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from figure_families import families
from figure_tables import TABLES as MEASURED

TABLES = MEASURED | {"families": families}
ROOT = Path(__file__).resolve().parents[1]
_PLACE = re.compile(r"(<!-- figures:([\w-]+) -->\n)(.*?)(<!-- /figures -->)", re.DOTALL)
_CODE = re.compile(r"^```.*?^```$|`[^`\n]*`", re.MULTILINE | re.DOTALL)
# Speeds, ratios and times, which somebody measured. Percentages and counts may be settings.
_MEASURED = re.compile(
    r"\d[\d.,]*\s?(?:tok/s|tokens/s|tokens a second|GB/s|TB/s|TFLOP/s|ms|us)\b|\b\d+(?:\.\d+)?x\b"
    r"|\d[\d.]* times (?:faster|slower|as long)|acceptance[^.|\n]{0,24} \d\.\d\d"
)


def pages(root: Path) -> list[Path]:
    """The pages that are held to this: README.md and docs/*.md."""
    return [root / "README.md", *sorted((root / "docs").glob("*.md"))]


def current(text: str) -> str:
    """The page's text with every table made anew.

    Raises: ValueError for a marker whose name is unknown or that is not closed.
    """
    opened, places = re.findall(r"<!-- figures:([\w-]+) -->", text), _PLACE.findall(text)
    if opened != [name for _, name, _, _ in places]:
        raise ValueError(f"figures: each marker must be closed by <!-- /figures -->, got {opened}")
    unknown = sorted(set(opened) - set(TABLES))
    if unknown:
        raise ValueError(f"figures: a marker must name one of {sorted(TABLES)}, got {unknown}")
    return _PLACE.sub(lambda found: found[1] + TABLES[found[2]]() + "\n" + found[4], text)


def typed_by_hand(text: str) -> list[tuple[int, str]]:
    """Line number and words of each measured figure outside of tables and code."""

    def blank(found: re.Match[str]) -> str:
        return re.sub(r"[^\n]", " ", found[0])

    prose = _CODE.sub(blank, _PLACE.sub(blank, text))
    return [(prose.count("\n", 0, found.start()) + 1, found[0]) for found in _MEASURED.finditer(prose)]


def main(argv: list[str] | None = None) -> int:
    """Write the pages, or check them; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a page is not current")
    arguments = parser.parse_args(argv)
    faults = []
    used: set[str] = set()
    for page in pages(ROOT):
        text = page.read_text(encoding="utf-8")
        name = page.relative_to(ROOT)
        used.update(re.findall(r"<!-- figures:([\w-]+) -->", text))
        made = current(text)
        if made != text and arguments.check:
            faults.append(f"{name}: a table is not what bench/results says; run python bench/figures.py")
        elif made != text:
            page.write_text(made, encoding="utf-8")
            print(f"wrote {name}")
        faults += [f"{name}:{line}: a figure by hand: {words!r}" for line, words in typed_by_hand(made)]
    faults += [f"figures: no page has {name!r}" for name in sorted(set(TABLES) - used)]
    print(*faults, sep="\n", file=sys.stderr, end="\n" if faults else "")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
