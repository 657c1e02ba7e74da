"""One rule for whether a weight has changed since a copy of it was made.

A tensor counts as changed if it lies elsewhere in memory, has another shape or dtype, counts another version (torch
counts edits in place, but not those through `.data`), or if one of 16 elements spread over it holds other bits. So an
edit of most of a weight is noticed however it was made. One of a few elements through `.data`, or of tensors made in
inference mode, which count no versions, may pass unnoticed: for those there is `refresh()` on what holds the copies.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

_SAMPLES = 16  # elements of each tensor
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Fingerprint:
    """Of the tensors that a copy is made from; take it before the copy is made.

    It keeps their memory alive, so that no other tensor can come to lie in the same place.
    """

    def __init__(self, tensors: Iterable[Tensor] = ()) -> None:
        self._held = list(tensors)
        self._marks = marks_of(self._held)
        self._reader = _Reader(self._held)
        self._samples = self._reader.read()

    def moved(self, tensors: Sequence[Tensor]) -> bool:
        """Whether these are no longer the same tensors, or count another version: reads nothing from a device."""
        return self._marks != marks_of(tensors)

    def changed(self, tensors: Sequence[Tensor]) -> bool:
        """The whole rule, for the beginning of a request: on a device it waits for the samples."""
        if self.moved(tensors):
            return True
        return not all(map(torch.equal, self._samples, self._reader.read()))

    def __deepcopy__(self, memo: object) -> Fingerprint:
        return Fingerprint()  # a copy of the tensors lies elsewhere

    def __reduce__(self) -> tuple[type[Fingerprint], tuple[()]]:
        return Fingerprint, ()


class _Reader:
    """Reads the samples of tensors: on a GPU, from the second time on, by a graph, for each view is a launch there."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._views = _views(tensors)
        devices = {views[0].device for views in self._views}
        self._device = devices.pop() if len(devices) == 1 else None
        self._graph: torch.cuda.CUDAGraph | None = None
        self._read: list[Tensor] | None = None

    def read(self) -> list[Tensor]:
        """One tensor for each device and size of an element; the next reading may overwrite it."""
        if self._read is None or self._device is None or self._device.type != "cuda":
            self._read = [torch.cat(views) for views in self._views]
            return self._read
        with torch.cuda.device(self._device):
            if self._graph is None:
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                    self._read = [torch.cat(views) for views in self._views]
                self._graph = graph
            self._graph.replay()
        return self._read


def marks_of(tensors: Iterable[Tensor]) -> tuple[object, ...]:
    """Where each tensor lies and in what form, and its version where it counts versions."""
    return tuple(
        (
            id(t) if hasattr(t, "__tensor_flatten__") else t.data_ptr(),  # quantised ones have no memory of their own
            t.dtype,
            t.shape,
            t.stride(),
            None if t.is_inference() else t._version,
        )
        for t in tensors
    )


def _views(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """The bits of some elements of each tensor, as views, by device and size of an element."""
    groups: dict[tuple[torch.device, int], list[Tensor]] = {}
    for tensor in tensors:
        if tensor.numel() == 0 or tensor.is_complex() or hasattr(tensor, "__tensor_flatten__"):
            continue
        bits = _spread(tensor.detach()).view(_BITS[tensor.element_size()])
        groups.setdefault((tensor.device, tensor.element_size()), []).append(bits)
    return list(groups.values())


def _spread(tensor: Tensor) -> Tensor:
    """Up to 16 elements, in other rows and other columns, as a view [N]."""
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    ordered = tensor.permute(order)
    if not ordered.is_contiguous():  # a part of a larger tensor: along its diagonal
        while ordered.dim() > 1:
            ordered = ordered.diagonal(dim1=0, dim2=1)
        return ordered[:: max(1, len(ordered) // _SAMPLES)][:_SAMPLES]
    size, width = ordered.numel(), ordered.shape[-1] if ordered.dim() else 1
    step = max(1, size // (_SAMPLES + 1))
    if step > width > 2:  # a step of whole rows would stay in one column
        step += round(0.38 * width) - step % width
    return ordered.reshape(-1)[step // 2 :: step][:_SAMPLES]
