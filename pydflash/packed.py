"""Linear layers on a CPU with their weights in the order that oneDNN reads, as they are or in 8 bits.

A packed weight is a copy, made anew by `pack` where the original has changed.
"""

from __future__ import annotations

from pathlib import Path
from weakref import WeakValueDictionary

import torch
from torch import Tensor

_ROWS = 8  # of x, for which the order is chosen; any other number works
_SHARE = 0.5  # of the memory that is free, at most, for copies


class Packed:
    """x [M, K] to [M, N] for a weight [N, K] and a bias [N] or None.

    Attributes:
        least_rows: Fewer rows are faster with the weight as it was.
    """

    least_rows = 1
    originals: object = None

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight, self._bias = torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS), bias
        if weight.dtype == torch.float32:
            self.least_rows = 2

    def __deepcopy__(self, memo: object) -> Packed:
        return self  # never changes

    def __call__(self, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise.default(x, self._weight, self._bias, "none", [], "")


class Int8(Packed):
    """The same with 8-bit weights, a scale per output, and 8-bit inputs, a scale per row.

    Products of whole numbers are exact, so a row's result does not depend on the other rows.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        wide = weight.float()
        scales = _largest(wide) / 127
        self._weight = torch.ops.onednn.qlinear_prepack(wide.div_(scales).round_().to(torch.int8), None)
        self._scales = scales.flatten() / 127  # the rows' scales are kept 127 times too large
        self._zeros = torch.zeros(len(weight), dtype=torch.int32)
        self._bias = None if bias is None else bias.float()

    def __call__(self, x: Tensor) -> Tensor:
        wide = x.float()
        largest = _largest(wide)
        whole = wide.div(largest).mul_(127).round_().to(torch.int8)
        product = torch.ops.onednn.qlinear_pointwise.default(
            whole, 1.0, 0, self._weight, self._scales, self._zeros, None, 1.0, 0, torch.float32, "none", [], ""
        )
        if self._bias is not None:
            return torch.addcmul(self._bias, product, largest).to(x.dtype)
        return torch.mul(product, largest, out=x.new_empty(product.shape))


def _largest(x: Tensor) -> Tensor:
    """The largest magnitude of each row [M, 1], never 0."""
    return x.abs().amax(1, keepdim=True).clamp_min_(1e-30)


_KEPT: WeakValueDictionary[tuple[object, ...], Packed] = WeakValueDictionary()


def pack(kind: type[Packed], weights: tuple[Tensor, ...], biases: tuple[Tensor | None, ...]) -> Packed:
    """Weights [N_i, K] side by side as one layer; those who pack the same unchanged tensors share it."""
    key = (kind, *((w.data_ptr(), w.dtype, w.shape, None if w.is_inference() else w._version) for w in weights))
    found = None if any(w.is_inference() for w in weights) else _KEPT.get(key)
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
    if not torch.backends.mkldnn.is_available():
        return "torch is built without oneDNN"
    asked = {"bfloat16": "_is_mkldnn_bf16_supported", "float16": "_is_mkldnn_fp16_supported"}
    name = str(dtype).removeprefix("torch.")
    able = name == "float32" or (name in asked and getattr(torch.ops.mkldnn, asked[name])())
    if quantize is None and not able:
        return f"oneDNN has no {name} on this processor"
    if quantize is not None and not hasattr(torch.ops.onednn, "qlinear_pointwise"):
        return "torch's quantised oneDNN ops are missing"
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
