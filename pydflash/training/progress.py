"""A progress bar with tokens per second and the time left; plain lines where stderr is no terminal."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

_LINE_SECONDS = 15.0


class Progress:
    """Shows one phase after the other; use it in a `with` block."""

    def __init__(self) -> None:
        console = Console(stderr=True, highlight=False)
        self._bar = RichProgress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._console = console
        self._task: TaskID | None = None
        self._name, self._total, self._first = "", 0, 0
        self._begun = self._printed = 0.0
        self._complete = False

    def start(self, name: str, total: int, done: int) -> None:
        """Begin a phase of `total` pieces, `done` of which are there already."""
        if self._task is not None:
            self._bar.stop_task(self._task)
        self._task = self._bar.add_task(name, total=total, completed=done, rate="")
        self._name, self._total, self._first = name, total, done
        self._begun = self._printed = time.monotonic()
        self._complete = False

    def update(self, done: int, tokens: int) -> None:
        """tokens: how many have come since the start of the phase."""
        now = time.monotonic()
        seconds = max(now - self._begun, 1e-9)
        rate = f"{tokens / seconds:,.0f} tokens/s"
        if self._console.is_terminal and self._task is not None:
            self._bar.update(self._task, completed=done, rate=rate)
        elif now - self._printed >= _LINE_SECONDS or (done >= self._total and not self._complete):
            self._printed, self._complete = now, done >= self._total
            new = done - self._first
            left = f"{(self._total - done) * seconds / new:,.0f} s left" if new else "time left unknown"
            self.say(f"{self._name}: {done:,} of {self._total:,}, {tokens:,} tokens, {rate}, {left}")

    def say(self, text: str) -> None:
        """A line above the bar."""
        self._bar.console.print(text, markup=False)

    def __enter__(self) -> Progress:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()
