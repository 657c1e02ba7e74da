"""Linear layers, the embedding table and the head of the graph, in float or in few bits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from .opset import MICROSOFT, Array, GraphBuilder
from .quantize import BLOCK, packed_shape, quantize_blocks, quantize_columns

QUANTIZE = (None, "8bit", "4bit", "int8")
_BITS = {"8bit": 8, "4bit": 4}


@dataclass(frozen=True)
class Table:
    """A matrix [rows, hidden] of the target or of the drafter, under the name its initializer gets.

    bias: [rows], of a head that has one.
    """

    name: str
    rows: int
    load: Callable[[], Array]
    bias: Callable[[], Array] | None = None


class Linears:
    """Adds products with weights to a graph.

    Args:
        dtype: Of the activations.
        quantize: None, "8bit" or "4bit" (blocks of 32, `MatMulNBits`), or "int8" (activations too, a scale for each
            tensor and for each output; standard operators).
        rows_apart: With "int8", a scale for each row of the activations: a row's result does not depend on the others.
    """

    def __init__(self, g: GraphBuilder, dtype: Any, quantize: str | None, rows_apart: bool = False) -> None:
        self.g, self.dtype, self.quantize, self.rows_apart = g, dtype, quantize, rows_apart

    def linear(
        self, x: Any, name: str, outputs: int, inputs: int, load: Callable[[], Array], exact: bool = False
    ) -> Any:
        """x [..., inputs] times a weight that `load` gives as [outputs, inputs]; `exact` ones stay in float."""
        if exact or self.quantize is None:
            weight = self.g.weight(name, self.dtype, (inputs, outputs), lambda: load().T)
            return self.g.MatMul(x, weight)
        return self._quantized(x, name, outputs, inputs, load)

    def _quantized(self, x: Any, name: str, outputs: int, inputs: int, load: Callable[[], Array]) -> Any:
        g = self.g
        q, scales = self._stored(name, outputs, inputs, load)
        if self.quantize == "int8":
            if self.rows_apart:
                largest = g.ReduceMax(g.Abs(x), [-1], keepdims=1)
                step = g.Max(g.Mul(largest, g.constant(np.float32(1 / 127))), g.constant(np.float32(1e-30)))
                zero = g.constant(np.uint8(128))
                xq = g.cast(g.Add(g.Round(g.Div(x, step)), g.constant(np.float32(128))), np.uint8)
            else:
                xq, step, zero = g.DynamicQuantizeLinear(x, outputs=3)
            product = g.cast(g.MatMulInteger(xq, q, zero), np.float32)
            return g.Mul(product, g.Mul(step, scales))
        options = {"K": inputs, "N": outputs, "bits": _BITS[str(self.quantize)], "block_size": BLOCK}
        return g.MatMulNBits(x, q, scales, domain=MICROSOFT, accuracy_level=4, **options)

    def _stored(self, name: str, outputs: int, inputs: int, load: Callable[[], Array]) -> tuple[Any, Any]:
        g = self.g
        if self.quantize == "int8":
            q = g.weight(f"{name}.q", np.int8, (inputs, outputs), lambda: quantize_columns(load())[0])
            return q, g.weight(f"{name}.scales", np.float32, (outputs,), lambda: quantize_columns(load())[1])
        bits = _BITS[str(self.quantize)]
        shape = packed_shape(outputs, inputs, bits)
        q = g.weight(f"{name}.q", np.uint8, shape, lambda: quantize_blocks(load(), bits)[0])
        return q, g.weight(f"{name}.scales", self.dtype, shape[:2], lambda: quantize_blocks(load(), bits)[1])

    def head(self, x: Any, table: Table, width: int) -> Any:
        """Logits [N, rows] of x [N, width]."""
        g = self.g
        bias = None
        if (load := table.bias) is not None:
            bias = g.weight(f"{table.name.removesuffix('.weight')}.bias", self.dtype, (table.rows,), load)
        if self.quantize is None:
            weight = g.weight(table.name, self.dtype, (table.rows, width), table.load)
            return g.Gemm(x, weight, *([bias] if bias is not None else []), transB=1)
        logits = self._quantized(x, table.name, table.rows, width, table.load)
        return logits if bias is None else g.Add(logits, bias)

    def embedding(self, ids: Any, table: Table, width: int, tied: bool) -> Any:
        """Rows [B, S, width] of the table, out of the tensors that the head reads where both are tied."""
        g = self.g
        if self.quantize is None:
            return g.Gather(g.weight(table.name, self.dtype, (table.rows, width), table.load), ids)
        if not tied:
            return self.half_rows(ids, table.name, table.rows, width, table.load)
        q, scales = self._stored(table.name, table.rows, width, table.load)
        if self.quantize == "int8":
            columns = g.Transpose(g.Gather(q, ids, axis=1), perm=[1, 2, 0])
            return g.Mul(g.cast(columns, self.dtype), g.Unsqueeze(g.Gather(scales, ids), [-1]))
        rows, step = g.Gather(q, ids), g.Unsqueeze(g.Gather(scales, ids), [-1])
        if self.quantize == "4bit":
            low = g.BitwiseAnd(rows, g.constant(np.uint8(15)))
            high = g.BitShift(rows, g.constant(np.uint8(4)), direction="RIGHT")
            rows = g.Concat(g.Unsqueeze(low, [-1]), g.Unsqueeze(high, [-1]), axis=-1)
            rows = g.Reshape(rows, [0, 0, -(-width // BLOCK), BLOCK])
        middle = g.constant(1 << _BITS[str(self.quantize)] - 1, self.dtype)
        flat = g.Reshape(g.Mul(g.Sub(g.cast(rows, self.dtype), middle), step), [0, 0, -1])
        return flat if width % BLOCK == 0 else g.Slice(flat, [0], [width], [2])

    def half_rows(self, ids: Any, name: str, rows: int, width: int, load: Callable[[], Array]) -> Any:
        """Rows of a table that is only read from: kept in half precision where the weights are quantised."""
        g = self.g
        if self.quantize is None:
            return g.Gather(g.weight(name, self.dtype, (rows, width), load), ids)
        return g.cast(g.Gather(g.weight(name, np.float16, (rows, width), load), ids), self.dtype)
