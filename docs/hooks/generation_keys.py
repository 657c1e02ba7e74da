"""A hook of mkdocs: the line `{{ generation keys }}` becomes the table of all keys of a generation config."""

from __future__ import annotations

from typing import Any

_PLACE = "{{ generation keys }}"


def table() -> str:
    """A row for each key, in the order of pydflash.target.defaults."""
    from pydflash.target.defaults import KEYS

    rows = ["| Key | What becomes of it | Note |", "| --- | --- | --- |"]
    for name, key in KEYS.items():
        off = ", ".join(map(repr, key.off)) if key.how == "refused" else ""
        note = "; ".join(filter(None, [key.note, f"off: None, {off}" if off else ""]))
        rows.append(f"| `{name}` | {key.how} | {note} |")
    return "\n".join(rows)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Called by mkdocs with the text of each page."""
    return markdown.replace(_PLACE, table()) if _PLACE in markdown else markdown
