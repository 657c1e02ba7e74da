"""Weights in few bits, as ONNX Runtime's operators read them."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
BLOCK = 32  # input channels that share a scale
_ROWS = 4096  # quantised at a time, for tables that are large


def packed_shape(outputs: int, inputs: int, bits: int) -> tuple[int, int, int]:
    """Shape of `quantize_blocks`'s first result."""
    return outputs, -(-inputs // BLOCK), BLOCK * bits // 8


def quantize_blocks(weight: Array, bits: int) -> tuple[Array, Array]:
    """Symmetric, a scale for each 32 inputs of a row: w = (q - 2 ** (bits - 1)) * scale.

    Args:
        weight: [N, K] float.
        bits: 8 or 4.

    Returns: uint8 [N, ceil(K / 32), 32 * bits / 8], of 4 bits the low half first, and float32 [N, ceil(K / 32)].
    """
    if bits not in (4, 8):
        raise ValueError(f"quantize_blocks: bits must be 4 or 8, got {bits}")
    outputs, inputs = weight.shape
    shape = packed_shape(outputs, inputs, bits)
    packed, scales = np.empty(shape, np.uint8), np.empty(shape[:2], np.float32)
    middle = 1 << bits - 1
    for first in range(0, outputs, _ROWS):
        part = np.asarray(weight[first : first + _ROWS], np.float32)
        part = np.pad(part, ((0, 0), (0, -inputs % BLOCK))).reshape(len(part), shape[1], BLOCK)
        if bits == 8:
            scale = np.abs(part).max(-1) / 127
        else:  # the value of largest magnitude becomes -8, which has no positive partner
            largest = np.take_along_axis(part, np.abs(part).argmax(-1)[..., None], -1)[..., 0]
            scale = -largest / 8
        scale = scale.astype(np.float32)
        steps = np.rint(part / np.where(scale == 0, 1, scale)[..., None]) + middle
        q = steps.clip(0, 2 * middle - 1).astype(np.uint8)
        packed[first : first + _ROWS] = q if bits == 8 else q[..., ::2] | q[..., 1::2] << 4
        scales[first : first + _ROWS] = scale
    return packed, scales


def quantize_columns(weight: Array) -> tuple[Array, Array]:
    """Symmetric, a scale for each output: w.T = q * scale.

    Args:
        weight: [N, K] float.

    Returns: int8 [K, N] and float32 [N].
    """
    outputs, inputs = weight.shape
    q, scales = np.empty((inputs, outputs), np.int8), np.empty(outputs, np.float32)
    for first in range(0, outputs, _ROWS):
        part = np.asarray(weight[first : first + _ROWS], np.float32)
        scale = (np.abs(part).max(-1) / 127).astype(np.float32)
        steps = np.rint(part / np.where(scale == 0, 1, scale)[:, None])
        q[:, first : first + _ROWS] = steps.clip(-127, 127).astype(np.int8).T
        scales[first : first + _ROWS] = scale
    return q, scales
