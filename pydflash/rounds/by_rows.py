"""Which loop a batch takes on a CPU: one sequence the host's; several the device's, which read the weights once."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import torch

from ..ops import backends
from ..protocols import RowTarget
from ..request import Batch
from .device import DeviceLoop
from .host import HostLoop
from .round import Parts


def apart_reason(parts: Parts, *, fused: bool) -> str | None:
    """Why several sequences that the host runs do so one after the other, or None where they are faster together.

    On a GPU rounds that run together are not the host's. On a CPU a forward without drafts takes the time of reading
    the weights, which all rows share, and one through a model's own layers much time that does not grow with its rows.
    In fused layers a block of drafts keeps vector units busy by itself; AMX tiles, which take bfloat16, have room.
    """
    if parts.target.device.type != "cpu":
        return f"batches on {parts.target.device.type} need attention in place"
    if parts.drafter is None or not fused:
        return None
    module = backends.load("cpu").module
    level = "no kernels" if module is None else module.description()
    if level == "amx" and parts.target.dtype is torch.bfloat16:
        return None
    name = str(parts.target.dtype).removeprefix("torch.")
    return f"a block of drafts keeps a CPU busy by itself where it is not bfloat16 on AMX, got {name} on {level}"


class LoopByRows:
    """The host's loop for one row, the device's for more: a text is the same in both."""

    most_rows = DeviceLoop.most_rows

    def __init__(self, one: HostLoop, target: RowTarget) -> None:
        """target: Runs the batches, in place of the one that `one` runs."""
        self.one, self.parts = one, one.parts
        self._target = target
        self._several: DeviceLoop | None = None

    @property
    def several(self) -> DeviceLoop:
        """Made for the first batch: a tree's size is measured there."""
        with self.parts.turns:
            if self._several is None:
                # Paths of their own: the host chooses a tree's size in every round, this loop once.
                paths = copy.copy(self.parts.paths)
                self._several = DeviceLoop(replace(self.parts, target=self._target, paths=paths))
            return self._several

    def open(self, rows: int, positions: int, **kinds: Any) -> Batch:
        """See `pydflash.request.Loop`."""
        loop: HostLoop | DeviceLoop = self.one if rows == 1 else self.several
        return loop.open(rows, positions, **kinds)

    def refresh(self) -> None:
        """Forget buffers whose programs read copies of weights."""
        if self._several is not None:
            self._several.refresh()
