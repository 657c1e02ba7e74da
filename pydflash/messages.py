"""How a value stands in an error message, whatever it is."""

from __future__ import annotations

import reprlib

_SHOWN = 300

_short = reprlib.Repr()
_short.maxlevel, _short.maxstring, _short.maxother, _short.maxlong = 4, 200, 200, 60
_short.maxlist = _short.maxtuple = _short.maxdict = _short.maxset = 20


def shown(value: object) -> str:
    """A value for a message: its repr, cut where it is long or deep."""
    try:
        return cut(_short.repr(value))
    except (ValueError, RecursionError):  # an integer of more than 4,300 digits
        return f"a {type(value).__name__} that is too long to show"


def cut(text: str) -> str:
    """A text for a message, at most 300 characters of it."""
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
