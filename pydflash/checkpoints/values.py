"""Values of a drafter's config: what they must be, and how they are shown where they are not."""

from __future__ import annotations

import reprlib
import warnings
from collections.abc import Mapping
from typing import Any, NoReturn

MOST = 2**31 - 1  # the kernels count in 32 bits
_MOST_FLOAT = 3.4e38  # and compute in float32
_SHOWN = 300

_short = reprlib.Repr()
_short.maxlevel, _short.maxstring, _short.maxother, _short.maxlong = 4, 200, 200, 60
_short.maxlist = _short.maxtuple = _short.maxdict = _short.maxset = 20


def shown(value: object) -> str:
    """A value for a message: its repr, cut where a hostile file made it long or deep."""
    try:
        return cut(_short.repr(value))
    except (ValueError, RecursionError):  # an integer of more than 4,300 digits
        return f"a {type(value).__name__} that is too long to show"


def cut(text: str) -> str:
    """A text for a message, at most 300 characters of it."""
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def fail(key: str, expected: str, got: object) -> NoReturn:
    """Raise the ValueError of a wrong config value: the key, what it must be, what it is."""
    raise ValueError(f"DrafterConfig: {cut(key)} must be {expected}, got {shown(got)}")


def warn(message: str) -> None:
    """Warn that something in the config is overruled or guessed."""
    warnings.warn(f"DrafterConfig: {message}", stacklevel=2)


def section(raw: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A nested mapping of the config, empty where the key is absent or null."""
    content = raw.get(name)
    if content is not None and not isinstance(content, Mapping):
        fail(name, "a mapping", content)
    return content or {}


def at_least_one(label: str, value: Any, most: int = MOST) -> int:
    """The value, checked to be an integer from 1 to `most` (a bool is none)."""
    if type(value) is not int or value < 1:
        fail(label, "a positive integer", value)
    if value > most:
        fail(label, f"at most {most}", value)
    return value


def positive(label: str, value: Any) -> float:
    """The value as a float, checked to be above 0 and in the range of float32."""
    if type(value) not in (int, float) or not 0 < value <= _MOST_FLOAT:
        fail(label, "a positive number", value)
    return float(value)


def boolean(label: str, value: Any) -> bool:
    """The value, checked to be true or false."""
    if type(value) is not bool:
        fail(label, "true or false", value)
    return bool(value)
