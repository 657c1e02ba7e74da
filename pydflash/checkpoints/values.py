"""Values of a drafter's config: what they must be, and the error where they are not."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any, NoReturn

from ..messages import cut, shown

MOST = 2**31 - 1  # the kernels count in 32 bits
_MOST_FLOAT = 3.4e38  # and compute in float32


def fail(key: str, expected: str, got: object) -> NoReturn:
    """Raise the ValueError of a wrong config value: the key, what it must be, what it is."""
    raise ValueError(f"DrafterConfig: {cut(key)} must be {expected}, got {shown(got)}")


def warn(message: str) -> None:
    """Warn that something in the config is overruled or guessed."""
    warnings.warn(f"DrafterConfig: {message}", stacklevel=2)


def plain(value: Any, depth: int = 4) -> Any:
    """A config's content with arrays as lists and their scalars as numbers, as deep as its sections go."""
    if isinstance(value, Mapping) and depth:
        return {name: plain(item, depth - 1) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [item.tolist() if hasattr(item, "tolist") else item for item in value]
    return value.tolist() if hasattr(value, "tolist") else value


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
