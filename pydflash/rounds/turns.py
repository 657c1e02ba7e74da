"""Turns on a model: whoever runs a round or a prompt on it waits for those who asked before."""

from __future__ import annotations

import threading
import weakref
from _thread import RLock
from collections.abc import Callable
from queue import SimpleQueue


class Turns(RLock):  # type: ignore[misc]  # which is final for type checkers only
    """A lock that is given in the order of asking, and that a thread which holds it may take again.

    It is held for one prompt or one round, so a stream that is open, or abandoned, holds nobody up. Nor does one that
    is interrupted, wherever that happens: `__exit__` is the lock's own, inside of which no interrupt can come.
    """

    _is_owned: Callable[[], bool]  # the lock's, as `threading.Condition` asks it

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._line: list[SimpleQueue[None]] = []  # whoever waits; the first of them stands at the lock

    def __enter__(self) -> bool:  # type: ignore[override]
        if self._is_owned():
            return self.acquire()
        place: SimpleQueue[None] = SimpleQueue()
        try:
            with self._mutex:
                self._line.append(place)
                if self._line[0] is place:
                    place.put(None)
            place.get()
            self.acquire()
            self._leave(place)
        except BaseException:  # an interrupt while waiting, or just as the turn came
            if self._is_owned():
                self.release()
            self._leave(place)
            raise
        return True

    def _leave(self, place: SimpleQueue[None]) -> None:
        """Leave the line, and tell whoever is first in it now; once more does no harm."""
        with self._mutex:
            if place in self._line:
                self._line.remove(place)
            if self._line:
                self._line[0].put(None)

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
