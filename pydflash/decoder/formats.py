"""Weight formats: in which bits a linear layer's weights are kept, and packing them so.

Packed means in panels: a copy of the weights in the order that a kernel reads them in (`panels_of`). A format is an
entry of the registry below; another one is another entry, and a kernel that knows its name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.nn import functional as F

from .. import ops
from ..ops import backends
from ..ops.linear import packed_parts
from .fingerprints import Fingerprint, marks_of

_ROWS = 8192  # of one call, which keeps memory for all of them
_SHARE = 0.5  # of the memory that is free, at most, for copies


@dataclass(frozen=True, eq=False)
class WeightFormat:
    """How weights [N, K] are kept, and who computes with them.

    Attributes:
        name: As users and the compiled code know it.
        dtypes: Of the weights that it takes; inputs and outputs have the same.
        quantized: Whether it rounds weights, so that it must be asked for (`quantize=`).
        kernels: The op that computes with it, by backend.
        order: A weight [N, K] as (panels, scales [N] or None).
        most_inputs: Largest K.
    """

    name: str
    dtypes: tuple[torch.dtype, ...]
    quantized: bool
    kernels: Mapping[str, str]
    order: Callable[[Tensor], tuple[Tensor, Tensor | None]]
    most_inputs: int | None = None

    def fault(self, weight: Tensor, device: torch.device) -> str | None:
        """Why a weight is not packed so for a device, or None."""
        if (backend := backends.name_for(device.type)) not in self.kernels:
            return f"the {backend} backend has no packed layers"
        if weight.dtype not in self.dtypes:
            return f"{_name(weight.dtype)} weights are not packed as {self.name}"
        if self.most_inputs is not None and weight.dim() == 2 and weight.shape[1] > self.most_inputs:
            return f"{self.name} takes at most {self.most_inputs} inputs, got {weight.shape[1]}"
        return None

    def linear(self, weight: Tensor, bias: Tensor | None) -> PackedLinear:
        """One linear layer with a packed copy of its weight [N, K]."""
        return PackedLinear(self, *self.order(weight), bias, weight.shape[1], weight.shape[0])

    def pack(self, weights: tuple[Tensor, ...], biases: tuple[Tensor | None, ...]) -> PackedLinear:
        """Weights [N_i, K] side by side as one layer; those who pack the same unchanged tensors share it."""
        held = [t for t in (*weights, *biases) if t is not None]
        key = (self.name, len(weights), tuple(b is None for b in biases), marks_of(held))
        found = _SHARED.get(key)
        if found is None or found.source.changed(held):
            source = Fingerprint(held)
            bias = None
            if any(b is not None for b in biases):
                pairs = zip(weights, biases, strict=True)
                bias = torch.cat([w.new_zeros(len(w)) if b is None else b for w, b in pairs])
            found = self.linear(torch.cat(weights), bias)
            found.source = source
            _SHARED[key] = found
        return found

    def __deepcopy__(self, memo: object) -> WeightFormat:
        return self

    def __reduce__(self) -> tuple[Callable[[str], WeightFormat], tuple[str]]:
        return of, (self.name,)


class PackedLinear:
    """x [M, K] to [M, N] with a packed weight and a bias [N] or None. Never changes."""

    def __init__(
        self,
        format: WeightFormat,
        weight: Tensor,
        scales: Tensor | None,
        bias: Tensor | None,
        in_features: int,
        out_features: int,
    ) -> None:
        self.format, self.weight, self.scales, self.bias = format, weight, scales, bias
        self.in_features, self.out_features = in_features, out_features
        self.source = Fingerprint()

    def __deepcopy__(self, memo: object) -> PackedLinear:
        return self

    def __call__(self, x: Tensor) -> Tensor:
        if len(x) > _ROWS:
            return torch.cat([self(part) for part in x.split(_ROWS)])
        return ops.packed_linear(x, self.weight, self.scales, self.bias, self.out_features, self.format.name)

    def arguments(self) -> tuple[object, ...]:
        """What a compiled decoder reads, by address: it must keep this layer."""
        name = self.format.name
        return packed_parts(self.weight, self.scales, self.bias, self.in_features, self.out_features, name)


_SHARED: WeakValueDictionary[tuple[object, ...], PackedLinear] = WeakValueDictionary()


def forget_shared() -> None:
    """Share no layer that was packed before: what is packed from now on is copied anew."""
    _SHARED.clear()


def panels_of(weight: Tensor) -> Tensor:
    """A weight [N, K] of elements of 4, 2 or 1 bytes, as `ops.packed_linear` takes it."""
    rows, width = weight.shape
    inputs = 4 // weight.element_size()
    padded = F.pad(weight, (0, -width % (16 * inputs), 0, -rows % 32))
    return padded.view(-1, 2, 16, padded.shape[1] // (16 * inputs), 16, inputs).permute(0, 3, 1, 4, 2, 5).contiguous()


def _as_it_is(weight: Tensor) -> tuple[Tensor, Tensor | None]:
    return panels_of(weight), None


def _int8(weight: Tensor) -> tuple[Tensor, Tensor | None]:
    """8-bit weights with a scale per output; inputs are rounded to 8 bits too, with a scale per row."""
    wide = weight.float()
    scales = wide.abs().amax(1, keepdim=True).clamp_min_(1e-30) / 127
    return panels_of(wide.div_(scales).round_().to(torch.int8)), scales.flatten()


_FLOATING = (torch.float32, torch.bfloat16, torch.float16)
_ON_CPU = {"cpu": "packed_linear"}
_FORMATS = {
    found.name: found
    for found in (
        WeightFormat("float32", (torch.float32,), False, _ON_CPU, _as_it_is),
        WeightFormat("bfloat16", (torch.bfloat16,), False, _ON_CPU, _as_it_is),
        # 127 * 127 * K must fit in 32 bits.
        WeightFormat("int8", _FLOATING, True, _ON_CPU, _int8, most_inputs=133000),
    )
}


def of(name: str) -> WeightFormat:
    """The format of this name. Raises: ValueError where there is none."""
    if name not in _FORMATS:
        raise ValueError(f"formats: name must be one of {', '.join(_FORMATS)}, got {name!r}")
    return _FORMATS[name]


def quantized() -> tuple[str, ...]:
    """The names that `quantize=` takes."""
    return tuple(name for name, found in _FORMATS.items() if found.quantized)


def as_it_is(dtype: torch.dtype) -> WeightFormat | None:
    """The format that keeps every bit of weights of this dtype, where there is one."""
    return next((found for found in _FORMATS.values() if not found.quantized and dtype in found.dtypes), None)


def choose(weights: Sequence[Tensor], quantize: str | None, device: torch.device) -> WeightFormat | str:
    """The format to pack weights in, `quantize` or as they are, or why they are not packed.

    A copy may take half of the memory that is free.
    """
    found = as_it_is(weights[0].dtype) if quantize is None else of(quantize)
    if found is None:
        return f"{_name(weights[0].dtype)} has no packed form"
    for weight in weights:
        if (fault := found.fault(weight, device)) is not None:
            return fault
    nbytes, free = sum(weight.nbytes for weight in weights), _free_memory()
    if free is not None and nbytes > _SHARE * free:
        return f"a copy of the weights takes {nbytes / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free"
    return found


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _free_memory() -> int | None:
    """Bytes, or None where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError):
        return None
