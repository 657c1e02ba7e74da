"""Loads the native modules and keeps the reason why one is missing.

A backend is "built" if its module is in the package and "usable" if it loads on this machine. Nothing here creates
a device context: a module is loaded when it is first asked for.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from types import ModuleType
from typing import Any

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


_loaded: dict[str, Backend] = {}


def load(name: str) -> Backend:
    """Load the native module of backend `name` ("cpu", "cuda" or "sycl") and say why where that fails.

    A failure is not kept: what was missing for a moment, such as memory, is tried again.
    """
    if (known := _loaded.get(name)) is not None:
        return known
    if name not in NAMES:
        raise ValueError(f"backend: must be one of {', '.join(NAMES)}, got {name!r}")
    found = _load(name)
    if found.usable:
        _loaded[name] = found
    return found


def _load(name: str) -> Backend:
    import torch  # noqa: F401  # its OpenMP and device libraries come first, so that one copy serves both

    module = f"pydflash._{name}"
    if name == "sycl" and importlib.util.find_spec(module) is not None:
        from . import sycl_runtime

        if reason := sycl_runtime.prepare():
            return Backend(name, None, reason)
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
        info = importlib.import_module("pydflash._build_info")
    except ModuleNotFoundError:
        return _why_not_installed()
    return info.NOT_BUILT.get(name, "not part of this build")


def _why_not_installed() -> str:
    """The source tree has no native modules; Python finds it before an installed package when started inside it."""
    import importlib.metadata
    from pathlib import Path

    here = Path(__file__).resolve().parents[1]
    try:
        found = importlib.metadata.distribution("pydflash").locate_file("pydflash")
    except importlib.metadata.PackageNotFoundError:
        found = here
    if Path(str(found)).resolve() != here:
        return f"this is the source tree in {here.parent}, not the installed package: start Python in another folder"
    return "the package is not installed (run `pip install .`; the source tree alone has no native modules)"


_on_cpu: ContextVar[str] = ContextVar("_on_cpu", default="cpu")


def name_for(device_type: str) -> str:
    """The backend that runs the ops on tensors of a device."""
    return _on_cpu.get() if device_type == "cpu" else {"xpu": "sycl"}.get(device_type, device_type)


def accelerator(device: Any) -> Any:
    """torch.cuda or torch.xpu for a device of theirs, whose streams and events go by the same names; else None."""
    import torch

    return getattr(torch, device.type) if device.type in ("cuda", "xpu") else None


@contextmanager
def running(name: str) -> Iterator[None]:
    """Inside the block backend `name`, "cpu" or "sycl", runs the ops on tensors of the CPU.

    So SYCL kernels can be tested without a GPU.
    """
    if name not in ("cpu", "sycl"):
        raise ValueError(f"running: backend must be 'cpu' or 'sycl' for tensors of the CPU, got {name!r}")
    token = _on_cpu.set(name)
    try:
        yield
    finally:
        _on_cpu.reset(token)


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


def choose(backend: str, device_type: str) -> str:
    """What runs the ops of a Speculator, for people: "auto" and "native" ask for the compiled ops of the device.

    Raises: RuntimeError where there are none, with the reason; ValueError for another name.
    """
    if backend == "reference":
        return "reference (plain torch)"
    if backend not in ("auto", "native"):
        raise ValueError(f"Speculator: backend must be 'auto', 'native' or 'reference', got {backend!r}")
    loaded = load(name_for(device_type))
    if loaded.module is None:
        raise RuntimeError(
            f"Speculator: there are no native ops for {device_type} ({loaded.reason}); "
            "backend='reference' runs in plain torch"
        )
    return f"{loaded.name} ({loaded.module.description()})"


def check_native(config: Any, block_size: int) -> None:
    """Refuse at construction what the compiled ops would refuse in the first round."""
    limits = (
        ("head_dim", config.head_dim, config.head_dim % 8 == 0 and config.head_dim <= 256, "a multiple of 8 up to 256"),
        ("block_size", block_size, block_size <= 64, "at most 64"),
        ("conv_kernel_size", config.conv_kernel_size, config.conv_kernel_size <= 8, "at most 8"),
    )
    for name, got, fits, expected in limits:
        if not fits:
            raise ValueError(
                f"Speculator: the drafter's {name} must be {expected} for the native ops, got {got}; "
                "backend='reference' takes it"
            )
