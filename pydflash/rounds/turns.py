"""Turns on a model: whoever runs a round or a prompt on it waits for those who asked before."""

from __future__ import annotations

import threading
import weakref
from collections import deque


class Turns:
    """A lock that is given in the order of asking, and that a thread which holds it may take again.

    It is held for one prompt or one round, so a stream that is open, or abandoned, holds nobody up.
    """

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._owner: int | None = None
        self._depth = 0
        self._queue: deque[tuple[int, threading.Lock]] = deque()

    def __enter__(self) -> None:
        thread = threading.get_ident()
        with self._mutex:
            if self._owner == thread or (self._owner is None and not self._queue):
                self._owner = thread
                self._depth += 1
                return
            signal = threading.Lock()
            signal.acquire()
            place = (thread, signal)
            self._queue.append(place)
        try:
            signal.acquire()
        except BaseException:  # an interrupt while waiting, or just as the turn came
            with self._mutex:
                if place in self._queue:
                    self._queue.remove(place)
                else:
                    self._next()
            raise

    def __exit__(self, *_: object) -> None:
        with self._mutex:
            self._depth -= 1
            if not self._depth:
                self._next()

    def _next(self) -> None:
        self._owner, self._depth = None, 0
        if self._queue:
            self._owner, signal = self._queue.popleft()
            self._depth = 1
            signal.release()

    def __deepcopy__(self, memo: object) -> Turns:
        return Turns()  # of a copy of the model

    def __reduce__(self) -> tuple[type[Turns], tuple[()]]:
        return Turns, ()


_LOCK = threading.Lock()
_TURNS: weakref.WeakKeyDictionary[object, Turns] = weakref.WeakKeyDictionary()


def turns_of(model: object) -> Turns:
    """The turns that all who run this model share; one that cannot be hashed has a user of its own."""
    try:
        with _LOCK:
            return _TURNS.setdefault(model, Turns())
    except TypeError:
        return Turns()
