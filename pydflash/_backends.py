"""Loads the native modules and keeps the reason why one is missing.

A backend is "built" if its module is in the package and "usable" if it loads on this machine. Nothing here creates
a device context: a module is loaded when it is first asked for.
"""

from __future__ import annotations

import importlib
import os
import warnings
from dataclasses import dataclass
from functools import cache
from types import ModuleType

NAMES = ("cpu", "cuda", "sycl")


@dataclass(frozen=True, slots=True)
class Backend:
    """One backend of this installation.

    Attributes:
        name: "cpu", "cuda" or "sycl".
        module: The loaded native module, or None.
        reason: Why `module` is None, in one line; empty where it is usable.
    """

    name: str
    module: ModuleType | None
    reason: str

    @property
    def usable(self) -> bool:
        return self.module is not None


@cache
def load(name: str) -> Backend:
    """Load the native module of backend `name` ("cpu", "cuda" or "sycl") and say why where that fails."""
    if name not in NAMES:
        raise ValueError(f"backend: must be one of {', '.join(NAMES)}, got {name!r}")
    import torch  # noqa: F401  # its OpenMP and device libraries come first, so that one copy serves both

    module = f"{__package__}._{name}"
    try:
        return Backend(name, importlib.import_module(module), "")
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        return Backend(name, None, _not_built(name))
    except ImportError as error:
        reason = f"built, but it does not load: {error}"
        warnings.warn(f"pydflash: the {name} backend is {reason}", RuntimeWarning, stacklevel=2)
        return Backend(name, None, reason)


def _not_built(name: str) -> str:
    try:
        info = importlib.import_module(f"{__package__}._build_info")
    except ModuleNotFoundError:
        return "the package is not installed (run `pip install .`; the source tree alone has no native modules)"
    return info.NOT_BUILT.get(name, "not part of this build")


def backends() -> dict[str, Backend]:
    """All backends with their state: what was built, what is usable, and why not.

    >>> pydflash.backends()["cpu"].usable
    True
    """
    return {name: load(name) for name in NAMES}


def require(names: str | None = None) -> None:
    """Raise RuntimeError unless every backend of a comma-separated list is usable.

    `names` defaults to the environment variable PYDFLASH_REQUIRE_BACKENDS, so that a test run can refuse to pass
    on a build that lacks what it is meant to test.
    """
    wanted = os.environ.get("PYDFLASH_REQUIRE_BACKENDS", "") if names is None else names
    for name in filter(None, (part.strip() for part in wanted.split(","))):
        if not (backend := load(name)).usable:
            raise RuntimeError(f"pydflash: backend {name!r} is required but not usable: {backend.reason}")
