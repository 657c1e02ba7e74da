"""A decoder with packed weights as one call of compiled code: on a CPU a call from Python costs as much as a kernel."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from ..ops import backends
from ..ops.native import capsule
from .block import BlockView, Table
from .linear import Projection
from .records import Layer, LayerNorm, NoCompiledForm, Norm
from .stores import Cache, KVStore


class Held:
    """Tensors as compiled code takes them, by address; it keeps them alive."""

    def __init__(self) -> None:
        self._kept: list[Any] = []
        self._common: dict[str, tuple[object, ...]] = {}

    def __call__(self, tensor: Tensor) -> object:
        self._kept.append(tensor)
        return capsule(tensor)

    def linear(self, projection: Projection) -> tuple[object, ...]:
        """Raises: NoCompiledForm where its weights are not packed."""
        if projection.packed is None:
            raise NoCompiledForm("weights that are not packed have no compiled form")
        self._kept.append(projection.packed)
        return projection.packed.arguments()

    def same(self, what: str, *values: object) -> None:
        """Raises: NoCompiledForm where a layer before was of other values."""
        if self._common.setdefault(what, values) != values:
            raise NoCompiledForm(f"layers with {what} of their own have no compiled form")


class Program:
    """Layers and the norm behind them, held by compiled code; the weights must not move while it lives."""

    def __init__(self, layers: Sequence[Layer], final_norm: Norm | LayerNorm, module: Any) -> None:
        """Raises: NoCompiledForm, or ValueError where sizes or dtypes do not fit."""
        self._held = held = Held()
        for layer in layers:
            held.same("stores", layer.mixer.store)
        self._native = module.Decoder(final_norm.arguments(held), [layer.arguments(held) for layer in layers])

    @staticmethod
    def of(layers: Sequence[Layer], final_norm: Norm | LayerNorm) -> Program | str:
        """The program, or why there is none."""
        module = backends.load("cpu").module
        if module is None:
            return "there is no compiled code"
        try:
            return Program(layers, final_norm, module)
        except NoCompiledForm as error:
            return str(error)

    def __deepcopy__(self, memo: object) -> Program:
        return self  # never changes

    def __reduce__(self) -> tuple[Any, ...]:
        return _absent, ()  # addresses cannot be pickled; the next request packs anew

    def __call__(
        self, x: Tensor, cache: Cache, tables: Sequence[Table], view: BlockView, taps: Collection[int]
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """As `Decoder`, of a contiguous x."""
        layers = list(taps)
        out, taken = torch.empty_like(x), x.new_empty(len(layers), *x.shape)
        store: KVStore = cache.stores[0]
        if store.block is None:
            raise ValueError("decoder: cache must hold an open block, got none")
        tensors = (x, out, store.k, store.v, cache.lengths, view.depths, view.visibility, view.causal, *store.block)
        pairs = [(capsule(cos), capsule(sin)) for cos, sin in tables]
        self._native.forward(*map(capsule, tensors), pairs, layers, capsule(taken))
        return out, dict(zip(layers, taken, strict=True))


def _absent() -> None:
    return None
