"""Linear layers at the speed of their weights' bytes: of few rows on a GPU, of packed weights on a CPU."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from . import reference
from .native import capsule, module_for, rows
from .registry import register

SKINNY_ROWS = 16  # at most, of skinny_linear
HALF = (torch.bfloat16, torch.float16)
_SMALL, _BALANCED = 8 << 20, 0.9  # bytes, and the share of a GPU's time that must be work


def skinny_linear(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None] | None = None,
    gated: bool = False,
) -> Tensor:
    """Few rows through up to three linear layers that read the same input, at the speed of the weights' bytes.

    A row's result does not depend on the other rows, nor on how many there are, to the last bit.

    Args:
        x: [M, K], M at most 16, K a multiple of 8; bfloat16 or float16.
        weights: 1 to 3 of [N_i, K], contiguous.
        biases: One [N_i] or None each.
        gated: With two weights of one size: silu(first) * second, each factor rounded before it is used.

    Returns: [M, sum of N_i], or [M, N_0] where gated. Sums in float32, rounded once.

    Raises: ValueError on shapes, dtypes or devices that do not fit; GPUs need compute capability 9.0.
    """
    biases = [None] * len(weights) if biases is None else biases
    return _skinny_linear(x, list(weights), list(biases), gated)


def _linear_out(x: Tensor, weights: Sequence[Tensor], gated: bool) -> Tensor:
    return x.new_empty(x.shape[0], weights[0].shape[0] if gated else sum(weight.shape[0] for weight in weights))


@register(
    "skinny_linear(Tensor x, Tensor[] weights, Tensor?[] biases, bool gated) -> Tensor",
    fake=lambda x, weights, biases, gated: _linear_out(x, weights, gated),
    reference=reference.skinny_linear,
    backends=("cuda",),
)
def _skinny_linear(x: Tensor, weights: list[Tensor], biases: list[Tensor | None], gated: bool) -> Tensor:
    module, stream, device = module_for("skinny_linear", x, *weights, *biases)
    out = _linear_out(x, weights, gated)
    given = [capsule(bias) for bias in biases]
    module.skinny_linear(capsule(rows(x)), [capsule(w) for w in weights], given, gated, capsule(out), stream, device)
    return out


def takes_skinny(x: Tensor, weights: Sequence[Tensor]) -> bool:
    """Whether `skinny_linear` takes x [M, K] and these weights, and faster than one product of them all."""
    rows, width = x.shape
    if not x.is_cuda or x.dtype not in HALF or not 0 < rows <= SKINNY_ROWS or width % 8 or x.stride(0) % 8:
        return False
    aligned = all(tensor.data_ptr() % 16 == 0 and tensor.is_contiguous() for tensor in weights)
    return aligned and x.data_ptr() % 16 == 0 and _balanced(tuple(map(len, weights)), width, x.device)


@cache
def _balanced(out_features: tuple[int, ...], in_features: int, device: torch.device) -> bool:
    """Small weights always are: there the number of launches decides."""
    balance = _skinny_linear_balance(out_features, in_features, device)
    return balance > 0 and (2 * sum(out_features) * in_features < _SMALL or balance >= _BALANCED)


def _skinny_linear_balance(out_features: tuple[int, ...], in_features: int, device: torch.device) -> float:
    """The share of a GPU's time that is work in `skinny_linear`; 0 where it cannot run."""
    module, _, index = module_for("skinny_linear", torch.empty(0, device=device))
    return module.skinny_linear_balance(list(out_features), in_features, index)


def _packed_out(
    x: Tensor, weight: Tensor, scales: Tensor | None, bias: Tensor | None, out_features: int, format: str
) -> Tensor:
    return x.new_empty(x.shape[0], out_features)


@register(
    "packed_linear(Tensor x, Tensor weight, Tensor? scales, Tensor? bias, int out_features, str format) -> Tensor",
    fake=_packed_out,
    reference=reference.packed_linear,
    backends=("cpu",),
)
def packed_linear(
    x: Tensor, weight: Tensor, scales: Tensor | None, bias: Tensor | None, out_features: int, format: str
) -> Tensor:
    """A linear layer on a CPU, at the speed of its weight's bytes; `pydflash.decoder.formats` makes the weight.

    A row's result does not depend on the other rows, nor on how many there are, to the last bit.

    Args:
        x: [M, K], M at most 65535; of the format's dtype, or with int8 float32, bfloat16 or float16.
        weight: [panels, steps, 2, 16, 16, inputs]: panels of 32 outputs, steps of 16 words of 4 bytes, in halves of 16
            outputs; 1, 2 or 4 inputs in a word of float32, bfloat16 or int8. Zero beyond N and K.
        scales: [N] float32 with int8: then each row of x is rounded to 8 bits by its largest magnitude, and the
            products of whole numbers are exact. Else None.
        bias: [N] or None.
        out_features: N.
        format: "float32", "bfloat16" or "int8"; see `pydflash.decoder.formats`.

    Returns: [M, N]. Sums in float32, rounded once.

    Raises: ValueError on shapes, dtypes or devices that do not fit.
    """
    module, stream, device = module_for("packed_linear", x, weight, scales, bias)
    out = _packed_out(x, weight, scales, bias, out_features, format)
    parts = packed_parts(weight, scales, bias, x.shape[-1], out_features, format)
    module.packed_linear(capsule(rows(x)), parts, capsule(out), stream, device)
    return out


def packed_parts(
    weight: Tensor, scales: Tensor | None, bias: Tensor | None, in_features: int, out_features: int, format: str
) -> tuple[object, object, object, int, int, str]:
    """A packed layer as compiled code takes it; the caller keeps the tensors."""
    return capsule(weight), capsule(scales), capsule(bias), in_features, out_features, format
