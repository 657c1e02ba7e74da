"""The cache behind the generic target path: attention layers in preallocated buffers, recurrent layers by snapshot.

Everything here relies on `transformers.cache_utils`; `generic.py` imports this module when a model is at hand.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
import transformers
from torch import Tensor
from transformers import cache_utils
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

LayerKind = Literal["attention", "stateful", "empty"]


@dataclass(slots=True)
class _Extent:
    """What all layers of one cache share: how many positions are committed, and how many rows to allocate."""

    length: int
    capacity: int


class _KVLayer(DynamicLayer):
    """Keys and values of one attention layer. Rows from `extent.length` on are scratch: each forward writes its
    block there, and the block becomes context when the length moves. So dropping a block costs nothing.
    A sliding-window layer keeps its whole history too; the model's own mask applies the window.
    """

    is_sliding = False

    def __init__(self, extent: _Extent) -> None:
        super().__init__()
        self._extent = extent
        self._buffers: tuple[Tensor, Tensor] | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write [1, heads, S, dim] keys and values after the committed rows; returns all rows up to them."""
        start, size = self._extent.length, key_states.shape[-2]
        self._reserve(start + size, key_states, value_states)
        views = []
        for buffer, states in zip(self._buffers or (), (key_states, value_states), strict=True):
            buffer.narrow(-2, start, size).copy_(states)
            views.append(buffer.narrow(-2, 0, start + size))
        self.keys, self.values = views
        return views[0], views[1]

    def get_seq_length(self, *args: Any) -> int:
        """Number of committed positions."""
        return self._extent.length

    def gather(self, slots: Tensor, rows: int) -> None:
        """Move these rows of the block, rising and below `rows`, to its front."""
        for buffer in self._buffers or ():
            block = buffer.narrow(-2, self._extent.length, rows)
            block.narrow(-2, 0, len(slots)).copy_(block.index_select(-2, slots))

    def _reserve(self, rows: int, key_states: Tensor, value_states: Tensor) -> None:
        old = self._buffers
        if old is not None and old[0].shape[-2] >= rows:
            return
        capacity = self._extent.capacity if rows <= self._extent.capacity else 2 * rows
        # Normal tensors even when the caller is in inference mode: they may be written outside of it later.
        with torch.inference_mode(False):
            new = tuple(
                states.new_empty((*states.shape[:-2], capacity, states.shape[-1]))
                for states in (key_states, value_states)
            )
        if old is not None:
            for source, target in zip(old, new, strict=True):
                target.narrow(-2, 0, self._extent.length).copy_(source.narrow(-2, 0, self._extent.length))
        self._buffers = (new[0], new[1])
        self.is_initialized, self.dtype, self.device = True, key_states.dtype, key_states.device


class VerifiedBlock(NamedTuple):
    """A block that went through the target but is not committed: its tokens [1, S], the state before it, its shape."""

    tokens: Tensor
    snapshot: list[dict[str, Any]]
    is_tree: bool = False


class TargetCache:
    """Cache of one sequence for the generic target path, made by `Target.new_cache`.

    `length` counts committed positions. A verified block is held in `block` until `Target.commit`.
    """

    def __init__(self, config: Any, plan: Sequence[str], batch: int, capacity: int) -> None:
        self.batch = batch
        self.capacity = capacity
        self.block: VerifiedBlock | None = None
        self.usable = True
        self._extent = _Extent(0, capacity)
        layers: list[Any] = [_KVLayer(self._extent) for _ in plan]
        if any(kind != "attention" for kind in plan):
            models = DynamicCache(config=config).layers
            layers = [layers[i] if kind == "attention" else models[i] for i, kind in enumerate(plan)]
        self._stateful = [layer for layer, kind in zip(layers, plan, strict=True) if kind == "stateful"]
        self.model_cache = DynamicCache()
        self.model_cache.layers = layers
        self.model_cache.layer_class_to_replicate = None

    @property
    def length(self) -> int:
        """Number of committed positions."""
        return self._extent.length

    @property
    def recurrent(self) -> bool:
        """Whether some layers cannot be cut back by length, so that a rejected block costs a replay."""
        return bool(self._stateful)

    def advance(self, rows: int) -> None:
        """Commit the first `rows` positions of what the last forward wrote."""
        self._extent.length += rows

    def gather(self, slots: Sequence[int]) -> None:
        """Move the rows of these slots of the last block, rising, to its front, in every attention layer."""
        layers = [layer for layer in self.model_cache.layers if isinstance(layer, _KVLayer)]
        index = torch.tensor(slots, device=layers[0].device)  # a target is whole on one device
        for layer in layers:
            layer.gather(index, slots[-1] + 1)

    def snapshot(self) -> list[dict[str, Any]]:
        """Copies of the recurrent layers' state (empty for an attention-only model)."""
        return [_copy_state(layer) for layer in self._stateful]

    def restore(self, snapshot: list[dict[str, Any]]) -> None:
        """Put the recurrent layers back as they were when `snapshot` was taken; a snapshot serves once."""
        for layer, state in zip(self._stateful, snapshot, strict=True):
            vars(layer).clear()
            vars(layer).update(state)


def plan_layers(cache: object) -> tuple[LayerKind, ...]:
    """How to hold each layer of a model: "attention" in place, "stateful" by snapshot, "empty" ones store nothing.

    cache: what the model's forward returned when it was called without a cache.
    Raises ValueError, as the rest of a sentence about the model, for a cache or a layer of an unknown kind.
    """
    if type(cache) is not DynamicCache:
        raise ValueError(
            "must use transformers' DynamicCache (how to roll others back exactly is not known), got "
            f"{type(cache).__name__} from its forward, transformers {transformers.__version__}"
        )
    # One window mask serves all sliding layers, so they are either all replaced or all left alone.
    mixed = any(
        isinstance(layer, DynamicSlidingWindowLayer) and type(layer) is not DynamicSlidingWindowLayer
        for layer in cache.layers
    )
    plain = (DynamicLayer,) if mixed else (DynamicLayer, DynamicSlidingWindowLayer)
    return tuple("attention" if type(layer) in plain else _kind(layer) for layer in cache.layers)


def _kind(layer: object) -> LayerKind:
    recurrent = getattr(cache_utils, "LinearAttentionCacheLayerMixin", ())
    if isinstance(layer, (DynamicSlidingWindowLayer, recurrent)):
        return "stateful"
    if not any(isinstance(value, Tensor) for value in vars(layer).values()):
        return "empty"
    raise ValueError(
        "must have cache layers of plain or recurrent attention (how to roll others back exactly is not known), got "
        f"{type(layer).__name__}, transformers {transformers.__version__}"
    )


def _copy_state(layer: object) -> dict[str, Any]:
    # Dynamic layers replace `keys` and `values` by a concatenation and never write into them.
    shared = ("keys", "values") if isinstance(layer, DynamicLayer) else ()
    return {name: value if name in shared else _copy(value) for name, value in vars(layer).items()}


def _copy(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {key: _copy(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_copy(item) for item in value)
    return value
