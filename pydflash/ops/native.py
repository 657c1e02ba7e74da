"""What the ops need to call a compiled module: the module of a call, and tensors as its kernels take them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.utils.dlpack import to_dlpack

from . import backends, registry

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def module_for(op: str, *tensors: Tensor | None) -> tuple[Any, int, int]:
    """The module, stream and device of a call; all tensors must live on the first one's device.

    Raises: RuntimeError where no backend has the op for this device, with the reason.
    """
    device: torch.device | None = None
    for t in tensors:
        if t is None:
            continue
        if not isinstance(t, Tensor):
            raise TypeError(f"{op}: arguments must be tensors, got {type(t).__name__}")
        if device is None:
            device = t.device
        elif t.device != device:
            raise ValueError(f"{op}: all tensors must be on {device}, got one on {t.device}")
    if device is None:
        raise ValueError(f"{op}: the arguments must hold at least one tensor, got none")
    kind = device.type
    name = backends.name_for(kind)
    backend = backends.load(name) if name in backends.NAMES else None
    if backend is None or backend.module is None or name not in registry.backends_of(op):
        _refuse(op, kind, name)
    return backend.module, 0 if kind == "cpu" else stream_of(device), device.index or 0


def _refuse(op: str, kind: str, name: str) -> NoReturn:
    if name not in backends.NAMES:
        raise RuntimeError(f"{op}: no backend runs on tensors of {kind}")
    if name not in (having := registry.backends_of(op)):
        raise RuntimeError(f"{op}: the {name} backend does not have it, only {' and '.join(having)}")
    raise RuntimeError(f"{op}: the {name} backend is not usable: {backends.load(name).reason}")


def stream_of(device: torch.device) -> int:
    """The current stream of a device as the kernels take it; 0 on a CPU."""
    if device.type == "cuda":
        return torch.cuda.current_stream(device).cuda_stream
    return torch.xpu.current_stream(device).sycl_queue if device.type == "xpu" else 0


def scratch_of(like: Tensor) -> Callable[[int], int]:
    """Gives a kernel working memory that lives until its call returns; work in a stream may outlive it safely."""
    held: list[Tensor] = []

    def allocate(size: int) -> int:
        held.append(torch.empty(size, dtype=torch.uint8, device=like.device))
        return held[-1].data_ptr()

    return allocate


def int32(x: Tensor, name: str) -> Tensor:
    if x.dtype is torch.int32 and x.is_contiguous():
        return x
    narrow = int64(x, name).to(torch.int32)
    if x.device.type == "cpu" and not torch.equal(narrow.to(torch.int64), x.to(torch.int64)):
        raise ValueError(f"{name} must fit in 32 bits, got values up to {int(x.abs().max())}")
    return narrow.contiguous()


def int64(x: Tensor, name: str) -> Tensor:
    if x.dtype is torch.int64 and x.is_contiguous():
        return x
    if x.dtype not in _INTEGERS:
        raise ValueError(f"{name} must be int32 or int64, got {x.dtype}")
    return x.to(torch.int64).contiguous()


def float32(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float32 and x.is_contiguous() else x.to(torch.float32).contiguous()


def rows(x: Tensor) -> Tensor:
    """Kernels take any strides but the last, which must be 1."""
    return x if x.dim() == 0 or x.stride(-1) == 1 or x.shape[-1] <= 1 else x.contiguous()


def capsule(x: Tensor | None) -> object:
    return None if x is None else to_dlpack(x.detach() if x.requires_grad else x)


def per_row(value: Tensor | Sequence[float] | float, batch: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[B] of a number or of one number a row; numbers are filled in on the device, which a graph can capture."""
    if isinstance(value, Tensor):
        return value.expand(batch) if value.dim() == 0 else value
    values = list(value) if isinstance(value, Sequence) else [value]
    if dtype == torch.int64:  # the upper half of the unsigned numbers, as a seed may be
        values = [v - 2**64 if v >= 2**63 else v for v in values]
    if len(values) == 1:
        return torch.full((batch,), values[0], dtype=dtype, device=device)
    return torch.tensor(values, dtype=dtype, device=device)
