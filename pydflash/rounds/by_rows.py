"""Which loop a batch takes on a CPU: one sequence the host's; several the device's, which read the weights once."""

from __future__ import annotations

from typing import Any

from ..request import Batch
from .device import DeviceLoop
from .host import HostLoop


class LoopByRows:
    """The host's loop for one row, the device's for more; both over the same parts, so a text is the same in both."""

    def __init__(self, one: HostLoop, several: DeviceLoop) -> None:
        self.one, self.several = one, several
        self.most_rows, self.parts = several.most_rows, one.parts

    def open(self, rows: int, positions: int, **kinds: Any) -> Batch:
        """See `pydflash.request.Loop`."""
        loop: HostLoop | DeviceLoop = self.one if rows == 1 else self.several
        return loop.open(rows, positions, **kinds)

    def refresh(self) -> None:
        """Forget buffers whose programs read copies of weights."""
        self.several.refresh()
