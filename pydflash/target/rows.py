"""Several sequences in one forward of a generic target, through the model's own attention and a cache of their rows.

Every row begins at column 0 of the cache, so nothing is padded on the left and no row moves when another one grows.
Which columns count for which row is said by a 4-D mask.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer

from ..decoder.block import block_masks
from ..protocols import ModelTarget, TargetOutput
from ..tree import Tree
from .probe import PROBE_TOKENS, rows_fault
from .tree_masks import TreeMasks

_MOST_SLOTS = 64  # of a block


@dataclass(slots=True)
class _Places:
    """Where the layers of one forward write and read.

    slots: Of each new position, in the flat buffer [rows * columns]. columns: That a block reads, 0 for a prompt, which
    reads its own. rows: That take part, None for all.
    """

    slots: Tensor
    columns: int = 0
    rows: Tensor | None = None


class _RowLayer(DynamicLayer):
    """Keys and values of one layer, in buffers [rows, columns, heads, dim]."""

    is_sliding = False

    def __init__(self, cache: RowsCache) -> None:
        super().__init__()
        self._cache = cache
        self.buffers: list[Tensor] = []

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write [n, heads, S, dim]; a prompt gets its own states back, a block the columns of its rows."""
        places, both = self._cache.places, (key_states, value_states)
        if not self.buffers:
            shape = (len(self._cache.lengths), self._cache.columns)
            with torch.inference_mode(False):  # they may be written outside of inference mode later
                self.buffers = [x.new_zeros(*shape, x.shape[1], x.shape[3]) for x in both]
            self.is_initialized, self.dtype, self.device = True, key_states.dtype, key_states.device
        for buffer, states in zip(self.buffers, both, strict=True):
            buffer.flatten(0, 1).index_copy_(0, places.slots, states.transpose(1, 2).flatten(0, 1))
        if not places.columns:
            return key_states, value_states
        views = [buffer[:, : places.columns] for buffer in self.buffers]
        if places.rows is not None:
            views = [view.index_select(0, places.rows) for view in views]
        return views[0].transpose(1, 2), views[1].transpose(1, 2)

    def get_seq_length(self, *args: Any) -> int:
        """0: positions are always given, so nothing may be derived from the cache."""
        return 0


class RowsCache:
    """Sequences of a `GenericRows`; see `pydflash.protocols.RowStore`.

    Attributes:
        columns: Positions that a row has room for, those of a block behind the last one included.
        block: Whether the verified block is a tree; None where there is none to commit.
    """

    def __init__(self, layers: int, batch: int, capacity: int, device: torch.device) -> None:
        if batch < 1 or capacity < 1:
            raise ValueError(f"new_cache: batch and capacity must be at least 1, got {batch} and {capacity}")
        self.capacity, self.columns = capacity, capacity + _MOST_SLOTS
        self.lengths = torch.zeros(batch, dtype=torch.int32, device=device)
        self.first = torch.arange(batch, device=device) * self.columns
        self.places = _Places(self.first)
        self.block: bool | None = None
        self.model_cache = DynamicCache()
        self._layers = [_RowLayer(self) for _ in range(layers)]
        self.model_cache.layers = list(self._layers)
        self.model_cache.layer_class_to_replicate = None

    def clear(self, row: int) -> None:
        """Zeros for what an earlier sequence left: a masked key still meets its value, and 0 * NaN is NaN."""
        for layer in self._layers:
            for buffer in layer.buffers:
                buffer[row] = 0

    def keep(self, index: Tensor) -> None:
        """Move the block's slots `index` [B, N], rising and -1 padded, to the front of the block."""
        rows, to = (index > torch.arange(index.shape[1], device=index.device)).nonzero(as_tuple=True)
        front = self.first[rows] + self.lengths[rows]
        source, target = front + index[rows, to], front + to
        for layer in self._layers:
            for buffer in layer.buffers:
                flat = buffer.flatten(0, 1)
                flat.index_copy_(0, target, flat.index_select(0, source))


class GenericRows:
    """A generic target whose blocks run for many rows at once; see `pydflash.protocols.RowTarget`.

    Each forward looks at the rows' lengths, so it is for devices whose tensors the host reads at no cost. Rows without
    a committed position are free: a block leaves them out, and their logits mean nothing.
    """

    def __init__(self, target: ModelTarget) -> None:
        """Tries rows of unequal length on a few tokens against the model's own forward.

        Raises: ValueError, naming the model's class and the reason, for a model whose rows cannot run together.
        """
        self.target, self.facts = target, target.facts
        self.device, self.dtype, self.max_length = target.device, target.dtype, target.max_length
        self.vocab_size, self.layer_ids = target.vocab_size, target.layer_ids
        self.embed_weight, self.hidden_size, self.head = target.embed_weight, target.hidden_size, target.head
        if "stateful" in self.facts.layer_kinds:
            self._refuse("attention layers only", "layers whose state follows one sequence")
        if not self.facts.takes_positions:
            self._refuse("a forward that takes position_ids", "none")
        if self.facts.rope_switch is not None:
            self._refuse("RoPE that does not change with the length", self.facts.rope)
        # Some releases count this scale by the cache, and only far positions would tell.
        if "llama_4_scaling_beta" in self.facts.rope:
            self._refuse("attention that does not depend on the place in the cache", self.facts.rope)
        if (self.max_length or PROBE_TOKENS) < PROBE_TOKENS:
            self._refuse(f"a context of at least {PROBE_TOKENS} positions", self.max_length)
        try:
            self._masks = TreeMasks(self.facts.text_config, self.dtype)
        except ValueError as error:
            self._refuse("attention whose masks are known", error)
        ids = target.trial_ids(PROBE_TOKENS)
        if (fault := rows_fault(self, ids, target.try_forward(ids).logits)) is not None:
            self._refuse("attention that takes rows of unequal length exactly", fault)

    def new_cache(self, batch: int, capacity: int) -> RowsCache:
        """Room for `batch` sequences of `capacity` positions."""
        return RowsCache(len(self.target.layers), batch, capacity, self.device)

    def derived(self) -> tuple[object, ...]:
        """What buffers depend on; nothing is computed from weights.

        Raises: ValueError where the model's parameters are of another dtype than when it was taken.
        """
        if self.target.model.dtype != self.dtype:
            self._refuse(f"parameters of {self.dtype}, as when it was taken", self.target.model.dtype)
        return (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"))

    def tables(self, positions: int) -> object:
        """Nothing: the model's forward computes what it needs."""
        return None

    def prefill(self, ids: Tensor, cache: RowsCache, row: int = 0) -> TargetOutput:
        """Run a prompt [1, P] into an empty row and commit it: logits [1, 1, V] of the last, features [1, P, F * H]."""
        self._check_open("prefill")
        if int(cache.lengths[row]):
            raise ValueError(f"prefill: cache must have an empty row {row}, got {int(cache.lengths[row])} positions")
        cache.clear(row)
        places = torch.arange(ids.shape[1], device=self.device)
        cache.places = _Places(cache.first[row] + places)
        arguments = {"logits_to_keep": 1} if self.facts.takes_logits_to_keep else {}
        output = self._forward(ids, cache, position_ids=places[None], **arguments)
        cache.lengths[row] = ids.shape[1]
        return TargetOutput(output.logits[:, -1:], output.features)

    def prefill_chunks(self, ids: Tensor, cache: RowsCache, row: int = 0) -> Iterator[TargetOutput]:
        """As `prefill`, in one piece."""
        yield self.prefill(ids, cache, row)

    def verify(self, tokens: Tensor, cache: RowsCache, tree: Tree | None = None) -> TargetOutput:
        """Run a block [B, S] behind every row's committed positions, which stay as they are; S at most 64.

        Returns logits [B, S, V] and features [B, S, F * H], zeros for free rows.
        """
        self._check_open("verify")
        batch, size = tokens.shape
        depths, _, visibility = block_masks(size, self.device)
        if tree is not None:
            depths, visibility = tree.depths, tree.visibility
        lengths, first, rows = cache.lengths.long(), cache.first, None
        if 0 < len(taken := lengths.nonzero()[:, 0]) < batch:
            rows = taken
            tokens, lengths, first = tokens[rows], lengths[rows], first[rows]
            depths, visibility = (x if len(x) == 1 else x[rows] for x in (depths, visibility))
        columns = int(lengths.max()) + size
        at = lengths[:, None] + torch.arange(size, device=self.device)
        cache.places = _Places((first[:, None] + at).flatten(), columns, rows)
        positions = lengths[:, None] + depths
        if self.max_length is not None:  # slots behind it are cut away by the caller
            positions = positions.clamp(max=self.max_length - 1)
        masks = self._masks.build(lengths, depths, visibility, columns)
        output = self._forward(tokens, cache, position_ids=positions, attention_mask=masks)
        cache.block = tree is not None
        if rows is None:
            return output
        logits, features = output
        whole = logits.new_zeros(batch, *logits.shape[1:]).index_copy_(0, rows, logits)
        if features is not None:
            features = features.new_zeros(batch, *features.shape[1:]).index_copy_(0, rows, features)
        return TargetOutput(whole, features)

    def append(self, cache: RowsCache, index: Tensor) -> None:
        """Keep the block's slots `index` [B, S] behind every row's committed positions; lengths are the caller's."""
        if cache.block is None:
            raise ValueError("append: cache must hold a block from verify, got none")
        if cache.block:
            cache.keep(index)
        cache.block = None

    def commit(self, cache: RowsCache, index: Tensor, num_accepted: Tensor) -> None:
        """Keep the anchor and the accepted drafts of the verified block, and forget the rest."""
        self.append(cache, index)
        cache.lengths += num_accepted.to(torch.int32) + 1

    def _forward(self, tokens: Tensor, cache: RowsCache, **arguments: Any) -> TargetOutput:
        target, taken = self.target, dict[int, Tensor]()
        arguments[self.facts.cache_argument] = cache.model_cache
        with torch.no_grad(), target.borrow(taken, self.layer_ids):
            logits = target.model(input_ids=tokens, use_cache=True, **arguments).logits
        features = torch.cat([taken[i] for i in self.layer_ids], -1).to(self.dtype) if taken else None
        return TargetOutput(logits, features)

    def _check_open(self, op: str) -> None:
        if self.target.closed:
            raise ValueError(f"{op}: target must be open, got one after close()")

    def _refuse(self, expected: str, got: object) -> NoReturn:
        raise ValueError(f"GenericRows: {type(self.target.model).__name__} must have {expected}, got {got}")
