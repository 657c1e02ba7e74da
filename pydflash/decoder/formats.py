"""Linear layers on a CPU with their weights in the order that they are read in, as they are or in 8 bits.

A packed weight is a copy, made anew by `pack` where the original has changed.
"""

from __future__ import annotations

from pathlib import Path
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.nn import functional as F

from .. import ops
from ..ops import backends
from ..ops.linear import packed_parts

PACKED_DTYPES = (torch.float32, torch.bfloat16)  # that weights keep in panels
_ROWS = 8192  # of one call, which keeps memory for all of them
_SHARE = 0.5  # of the memory that is free, at most, for copies


def panels_of(weight: Tensor) -> Tensor:
    """A weight [N, K] in float32, bfloat16 or int8, as `ops.packed_linear` takes it."""
    rows, width = weight.shape
    inputs = 4 // weight.element_size()
    padded = F.pad(weight, (0, -width % (16 * inputs), 0, -rows % 32))
    return padded.view(-1, 2, 16, padded.shape[1] // (16 * inputs), 16, inputs).permute(0, 3, 1, 4, 2, 5).contiguous()


class Packed:
    """x [M, K] to [M, N] for a weight [N, K] in float32 or bfloat16 and a bias [N] or None."""

    originals: object = None

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._out_features, self._in_features = weight.shape
        self._weight, self._bias = self._ordered(weight), bias

    def _ordered(self, weight: Tensor) -> Tensor:
        self._scales: Tensor | None = None
        return panels_of(weight)

    def __deepcopy__(self, memo: object) -> Packed:
        return self  # never changes

    def __call__(self, x: Tensor) -> Tensor:
        if len(x) > _ROWS:
            return torch.cat([self(part) for part in x.split(_ROWS)])
        return ops.packed_linear(x, self._weight, self._scales, self._bias, self._out_features)

    def parts(self) -> tuple[object, ...]:
        """What a compiled decoder reads, by address: it must keep this layer."""
        return packed_parts(self._weight, self._scales, self._bias, self._in_features, self._out_features)


class Int8(Packed):
    """The same with 8-bit weights, a scale per output, and 8-bit inputs, a scale per row; of any floating dtype."""

    def _ordered(self, weight: Tensor) -> Tensor:
        wide = weight.float()
        scales = wide.abs().amax(1, keepdim=True).clamp_min_(1e-30) / 127
        self._scales = scales.flatten()
        return panels_of(wide.div_(scales).round_().to(torch.int8))


def mark_of(tensor: Tensor) -> tuple[object, ...]:
    """Another one once a tensor moved or changed; those made in inference mode do not tell whether they changed."""
    version = None if tensor.is_inference() else tensor._version
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), version


_KEPT: WeakValueDictionary[tuple[object, ...], Packed] = WeakValueDictionary()


def pack(kind: type[Packed], weights: tuple[Tensor, ...], biases: tuple[Tensor | None, ...]) -> Packed:
    """Weights [N_i, K] side by side as one layer; those who pack the same unchanged tensors share it."""
    held = [t for t in (*weights, *biases) if t is not None]
    key = (kind, *map(mark_of, weights), *(None if b is None else mark_of(b) for b in biases))
    found = None if any(t.is_inference() for t in held) else _KEPT.get(key)
    if found is None:
        bias = None
        if any(b is not None for b in biases):
            pairs = zip(weights, biases, strict=True)
            bias = torch.cat([w.new_zeros(len(w)) if b is None else b for w, b in pairs])
        found = kind(torch.cat(weights), bias)
        found.originals = (weights, biases)  # while they live, their memory has no other tensors
        _KEPT[key] = found
    return found


def packing_fault(dtype: torch.dtype, nbytes: int, quantize: str | None = None) -> str | None:
    """Why weights of this dtype and size in bytes are not packed here, or None."""
    if (backend := backends.name_for("cpu")) != "cpu":
        return f"the {backend} backend has no packed layers"
    if quantize is None and dtype not in PACKED_DTYPES:
        return f"{str(dtype).removeprefix('torch.')} has no packed form"
    free = _free_memory()
    if free is not None and nbytes > _SHARE * free:
        return f"a copy of the weights takes {nbytes / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free"
    return None


def _free_memory() -> int | None:
    """Bytes, or None where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError):
        return None
