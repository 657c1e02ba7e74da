"""Weights that follow each other in memory: one matrix product for several linear layers, without a copy of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn


def joined(tensors: Sequence[Tensor]) -> Tensor | None:
    """Tensors [N_i, ...] that follow each other in one storage as the one [sum of N_i, ...], a view, else None."""
    first = tensors[0]
    if len(tensors) == 1:
        return first
    place = first.storage_offset()
    for tensor in tensors:
        same = tensor.dtype == first.dtype and tensor.shape[1:] == first.shape[1:] and tensor.is_contiguous()
        if not same or tensor.storage_offset() != place or _storage(tensor) != _storage(first):
            return None
        place += tensor.numel()
    rows = sum(len(tensor) for tensor in tensors)
    return first.as_strided((rows, *first.shape[1:]), first.stride())


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def lay_together(linears: Sequence[nn.Linear]) -> None:
    """Move the weights, and the biases, of linear layers to follow each other in memory.

    The parameters stay what they are, with the values they have; only their place changes. Those that are not plain
    tensors, or were made in inference mode, stay.
    """
    weights: list[Any] = [linear.weight for linear in linears]
    biases: list[Any] = [linear.bias for linear in linears]
    for parameters in (weights, biases):
        if any(type(p) is not nn.Parameter or type(p.data) is not Tensor or p.is_inference() for p in parameters):
            return
        if joined(parameters) is None:
            with torch.no_grad():
                whole = torch.cat([p.data for p in parameters])
                for parameter, part in zip(parameters, whole.split([len(p) for p in parameters]), strict=True):
                    parameter.data = part
