"""Bars on stderr while something takes long, for people who asked for them or look on; they vanish when it ends."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, NamedTuple

LONG_PROMPT = 8192  # tokens; what is shorter gets no bar of its own


class _Step(NamedTuple):
    """An open step: rich's display, its line there, its text and its pieces."""

    display: Any
    task: Any
    text: str
    total: int | None


_shown: ContextVar[bool | None] = ContextVar("_shown", default=None)
_inner: ContextVar[_Step | None] = ContextVar("_inner", default=None)


@contextmanager
def shown(wanted: bool | None = True) -> Iterator[None]:
    """Inside the block, long steps are shown or not; None is as outside, and there where stderr is a terminal.

    >>> from pydflash import progress
    >>> with progress.shown():
    ...     for chunk in spec.stream(long_text):
    ...         print(chunk.text, end="", flush=True)
    """
    if wanted is None:
        wanted = _shown.get()
    if wanted is None:
        wanted = sys.stderr is not None and sys.stderr.isatty()
    token = _shown.set(wanted)
    try:
        yield
    finally:
        _shown.reset(token)


@contextmanager
def step(text: str, total: int | None = None, least: int = 1) -> Iterator[None]:
    """A line with a bar while the block runs, where steps are shown.

    total: Its pieces, which `advance` counts; None where they are not known. With fewer than `least` nothing is shown.
    """
    small = total is not None and total < least
    if small or not _shown.get() or importlib.util.find_spec("rich") is None:
        yield
        return
    outer = _inner.get()
    display = _display() if outer is None else outer.display
    task = display.add_task(text, total=None)  # a running light until the first piece is done
    token = _inner.set(_Step(display, task, text, total))
    try:
        with display if outer is None else nullcontext():
            yield
    finally:
        _inner.reset(token)
        display.remove_task(task)


def advance(text: str, count: int, after: Any = None) -> None:
    """Count pieces of the step of that text, if it is the innermost one shown.

    after: A tensor that is there once they are done, to be waited for: a GPU's queue runs behind the host.
    """
    found = _inner.get()
    if found is None or found.text != text:
        return
    if after is not None:
        after.flatten()[:1].tolist()
    found.display.update(found.task, total=found.total, advance=count)


def _display() -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    # What others print meanwhile stays on the stream that they print it to.
    return Progress(*columns, console=console, transient=True, redirect_stdout=False, redirect_stderr=False)
