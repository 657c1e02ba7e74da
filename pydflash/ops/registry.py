"""Where an op is declared: its schema, what runs it, its shapes without data, its definition, and who has it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.nn import Parameter

from . import backends

P = ParamSpec("P")
R = TypeVar("R")

_library = torch.library.Library("pydflash", "DEF")
_PLAIN = frozenset((int, float, bool, type(None)))


@dataclass(frozen=True, slots=True)
class Op:
    """One declared op.

    Attributes:
        name: As in `torch.ops.pydflash`, and of its kernel.
        schema: What torch.library knows it by.
        reference: Its definition in `pydflash.ops.reference`.
        backends: Those that have a kernel of it.
    """

    name: str
    schema: str
    reference: Callable[..., Any]
    backends: tuple[str, ...]


_declared: dict[str, Op] = {}


def ops(backend: str | None = None) -> dict[str, Op]:
    """All ops by name, or those of backend "cpu", "cuda" or "sycl"."""
    return {name: op for name, op in _declared.items() if backend is None or backend in op.backends}


def backends_of(name: str) -> tuple[str, ...]:
    return _declared[name].backends


def has(name: str, device: torch.device) -> bool:
    """Whether the backend that runs on a device has a kernel of an op."""
    return backends.name_for(device.type) in backends_of(name)


def register(
    schema: str,
    *,
    fake: Callable[..., Any],
    reference: Callable[..., Any],
    backends: tuple[str, ...] = backends.NAMES,
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Declares an op; decorates the function that checks what Python has to and calls the compiled module.

    Args:
        schema: Name, arguments with their defaults, and results, as torch.library takes them.
        fake: The results' shapes and dtypes, from the arguments.
        reference: The definition in plain torch.
        backends: Those that have the kernel; on tensors of another the op is refused.

    Returns: The function as callers get it. In inference mode plain tensors go straight to it: torch's dispatcher takes
        as long as a small kernel. All others, subclasses and traced ones among them, go through the dispatcher.
    """
    name = schema.partition("(")[0]

    def declare(run: Callable[P, R]) -> Callable[P, R]:
        _declared[name] = Op(name, schema, reference, backends)
        _library.define(schema)
        _library.impl(name, run, "CompositeExplicitAutograd")
        torch.library.register_fake(f"pydflash::{name}", _on_one_device(name, fake), lib=_library)
        dispatched: Callable[..., R] = getattr(torch.ops.pydflash, name).default

        @functools.wraps(run)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            if (
                not (torch.compiler.is_compiling() or torch.jit.is_tracing())  # first: nothing behind it can be traced
                and torch.is_inference_mode_enabled()
                and _direct(args)
                and (not kwargs or _direct(kwargs.values()))
            ):
                return run(*args, **kwargs)
            return dispatched(*args, **kwargs)

        return call

    return declare


def _on_one_device(name: str, fake: Callable[..., Any]) -> Callable[..., Any]:
    """torch asks the fake too where one tensor alone is without memory; the others would give results of noise."""

    def shapes(*args: Any, **kwargs: Any) -> Any:
        devices = {str(t.device) for t in (*args, *kwargs.values()) if isinstance(t, Tensor)}
        if len(devices) > 1:
            raise ValueError(f"{name}: all tensors must be on one device, got {' and '.join(sorted(devices))}")
        return fake(*args, **kwargs)

    return shapes


def _direct(values: Iterable[Any]) -> bool:
    """Whether nothing among the arguments needs torch's dispatcher: a subclass, a lazy negation, no memory."""
    for value in values:
        kind = type(value)
        if kind is Tensor or kind is Parameter:
            if value.is_neg() or value.is_meta:
                return False
        elif kind is list or kind is tuple:
            if not _direct(value):
                return False
        elif kind not in _PLAIN:
            return False
    return True
