"""Writing an ONNX graph by hand: a method per operator, constants and weights as initializers."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

Array = NDArray[Any]
MICROSOFT = "com.microsoft"  # ONNX Runtime's own operators
KINDS = {
    np.dtype(np.float32): ir.DataType.FLOAT,
    np.dtype(np.float16): ir.DataType.FLOAT16,
    np.dtype(np.int64): ir.DataType.INT64,
    np.dtype(np.int8): ir.DataType.INT8,
    np.dtype(np.uint8): ir.DataType.UINT8,
    np.dtype(np.bool_): ir.DataType.BOOL,
}


class GraphBuilder:
    """Collects nodes, inputs, outputs and initializers of one graph; `g.MatMul(x, w)` adds a node and gives its value.

    A list of integers or a number among the inputs becomes a constant, each once. Keywords are attributes.
    """

    def __init__(self, opset: int) -> None:
        self.opset = opset
        self.inputs: list[ir.Value] = []
        self.outputs: list[ir.Value] = []
        self._nodes: list[ir.Node] = []
        self._initializers: list[ir.Value] = []
        self._constants: dict[tuple[Any, ...], ir.Value] = {}
        self._weights: dict[str, ir.Value] = {}
        self._domains = {"": opset}
        self._count = itertools.count()

    def __getattr__(self, operator: str) -> Callable[..., Any]:
        if not operator[:1].isupper():
            raise AttributeError(operator)

        def add(*inputs: Any, outputs: int = 1, domain: str = "", name: str | None = None, **attributes: Any) -> Any:
            values = [self._value(x) for x in inputs]
            if domain:
                self._domains[domain] = 1
            made = [ir.Value(name=f"{operator}.{next(self._count)}") for _ in range(outputs)]  # unique in branches too
            found = [ir.convenience.convert_attribute(k, v) for k, v in attributes.items() if v is not None]
            node = ir.Node(domain, operator, values, found, outputs=made, name=name)
            self._nodes.append(node)
            return made[0] if outputs == 1 else made

        return add

    def either(self, condition: ir.Value, first: Callable[[], ir.Value], second: Callable[[], ir.Value]) -> Any:
        """What `first` adds to the graph where `condition` holds, else what `second` does; only one of them runs."""
        branches = {}
        for name, make in (("then_branch", first), ("else_branch", second)):
            outer, self._nodes = self._nodes, []
            value = make()
            branches[name] = ir.Graph([], [value], nodes=self._nodes, name=name)
            self._nodes = outer
        return self.If(condition, **branches)

    def _value(self, x: Any) -> ir.Value | None:
        return x if x is None or isinstance(x, ir.Value) else self.constant(x)

    def constant(self, x: Any, dtype: Any = None) -> ir.Value:
        """An initializer for a small constant; integers are int64, other numbers float32."""
        if dtype is None and not isinstance(x, np.ndarray | np.generic):
            dtype = np.int64 if np.asarray(x).dtype.kind in "iu" or np.size(x) == 0 else np.float32
        array = np.asarray(x, dtype)
        key = (array.dtype.str, array.shape, array.tobytes())
        if key not in self._constants:
            self._constants[key] = self._initializer(f"constant.{len(self._constants)}", array)
        return self._constants[key]

    def weight(self, name: str, dtype: Any, shape: Sequence[int], make: Callable[[], Array]) -> ir.Value:
        """An initializer whose data `make` gives when the file is written; a name stands for one tensor."""
        if name not in self._weights:
            kind = np.dtype(dtype)

            def tensor() -> ir.TensorProtocol:
                array = np.ascontiguousarray(make(), kind)
                if array.shape != tuple(shape):
                    raise RuntimeError(f"export: {name} must be {list(shape)}, got {list(array.shape)}")
                return ir.Tensor(array, name=name)

            lazy = ir.LazyTensor(tensor, KINDS[kind], ir.Shape(shape), name=name)
            self._weights[name] = self._register(name, lazy)
        return self._weights[name]

    def _initializer(self, name: str, array: Array) -> ir.Value:
        return self._register(name, ir.Tensor(array, name=name))

    def _register(self, name: str, tensor: Any) -> ir.Value:
        value = ir.Value(name=name, type=ir.TensorType(tensor.dtype), shape=tensor.shape, const_value=tensor)
        self._initializers.append(value)
        return value

    def input(self, name: str, dtype: Any, shape: Sequence[int | str]) -> ir.Value:
        value = ir.Value(name=name, type=ir.TensorType(KINDS[np.dtype(dtype)]), shape=ir.Shape(shape))
        self.inputs.append(value)
        return value

    def output(self, name: str, value: ir.Value, dtype: Any, shape: Sequence[int | str]) -> None:
        value.name, value.type, value.shape = name, ir.TensorType(KINDS[np.dtype(dtype)]), ir.Shape(shape)
        self.outputs.append(value)

    def cast(self, x: ir.Value, dtype: Any) -> Any:
        return self.Cast(x, to=int(KINDS[np.dtype(dtype)]))

    def size(self, x: ir.Value, axis: int) -> Any:
        """The size of an axis, int64 [1]."""
        return self.Shape(x, start=axis, end=axis + 1)

    def model(self, name: str, version: str, metadata: dict[str, str]) -> ir.Model:
        graph = ir.Graph(
            self.inputs,
            self.outputs,
            nodes=self._nodes,
            initializers=self._initializers,
            opset_imports=dict(self._domains),
            name=name,
        )
        return ir.Model(
            graph, ir_version=11, producer_name="pydflash", producer_version=version, metadata_props=dict(metadata)
        )
