"""A target's own layers with attention in place: preallocated keys and values, nothing on the host, any number of rows.

The model's own forward runs, in a view of the model whose attention is ours by transformers' AttentionInterface.
Sequences start at position 0 of their row.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NoReturn, cast

import torch
import transformers
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer

from .. import ops
from ..decoder.block import BlockView, block_masks
from ..decoder.fingerprints import Fingerprint
from ..decoder.prompt import prompt_attention
from ..decoder.stores import Cache, KVCache
from ..ops import HALF
from ..progress import advance
from ..protocols import ModelTarget, TargetOutput
from ..tree import Tree
from .probe import PROBE_TOKENS, rollback_fault, tree_fault
from .view import ModelView

_NAME = "pydflash_own"
_PREFILL_ROWS = 2048  # of one forward; fewer in float32, whose attention needs a matrix of scores
_PREFILL_ROWS_WIDE = 512


@dataclass(slots=True)
class _Step:
    """What the layers of one forward share. view: None in a prefill of `row` from position `start` on.

    cache: None where nothing is kept. windows: What each layer's attention was told. norms: Those of each layer's
    queries, where they are asked for.
    """

    cache: Cache | None
    row: int = 0
    start: int = 0
    view: BlockView | None = None
    layer: int = 0
    windows: dict[int, int] = field(default_factory=dict)
    norms: dict[int, Tensor] | None = None


_STEP: ContextVar[_Step] = ContextVar("pydflash_own_step")


class _Layer(DynamicLayer):
    """Puts a layer's new keys and values where the step wants them."""

    is_sliding = False

    def __init__(self, i: int) -> None:
        super().__init__()
        self._i = i
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        step, i = _STEP.get(), self._i
        assert step.cache is not None
        step.layer = i
        part, both = step.cache.part(i), (key_states, value_states)
        if step.view is not None:
            for buffer, states in zip((part.block_k, part.block_v), both, strict=True):
                buffer.copy_(states)
            return both
        end = step.start + key_states.shape[2]
        views = [buffer[step.row : step.row + 1, :, :end] for buffer in (part.k, part.v)]
        for view, states in zip(views, both, strict=True):
            view[:, :, step.start :].copy_(states)
        return views[0], views[1]

    def get_seq_length(self, *args: Any) -> int:
        """0: positions are always given, so nothing may be derived from the cache."""
        return 0


class OwnTarget:
    """A target behind the calls of a round, without a decision on the host.

    Attributes:
        form: One line on what runs.
    """

    def __init__(self, target: ModelTarget) -> None:
        """Tries a chain, rollbacks and a tree on a few tokens against the model's own forward.

        Raises: ValueError, naming the model's class and the reason, where the target cannot run this way.
        """
        self.prepare(target)
        self.form = "the model's own layers"
        if (fault := self.trial_fault()) is not None:
            self.refuse("attention that positions and windows describe fully", fault)

    def prepare(self, target: ModelTarget) -> None:
        """What comes before a trial. Raises: ValueError for a model whose attention cannot run in place."""
        self.target, self.facts = target, target.facts
        self.device, self.dtype, self.max_length = target.device, target.dtype, target.max_length
        self.vocab_size = target.vocab_size
        self.embed_weight, self.hidden_size, self.layer_ids = target.embed_weight, target.hidden_size, target.layer_ids
        self._check_family()
        self._check_layers()
        transformers.AttentionInterface.register(_NAME, _attend)
        self._view = ModelView(target, _NAME)
        self._model_cache = DynamicCache()
        self._model_cache.layers = [_Layer(i) for i in range(len(target.layers))]
        self._model_cache.layer_class_to_replicate = None
        self._masks: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
        self.windows: dict[int, int] = {}
        self._source = Fingerprint()

    @property
    def description(self) -> str:
        """A line for `stats.backends`."""
        return self.form

    @property
    def head(self) -> Any:
        """The target's head."""
        return self.target.head

    def new_cache(self, batch: int, capacity: int) -> Cache:
        """Room for `batch` sequences of `capacity` positions."""
        layers, heads, dim = self._shape
        return KVCache(layers, batch, heads, dim, capacity, dtype=self.dtype, device=self.device)

    def derived(self) -> tuple[object, ...]:
        """What a captured round reads beside the caches: another object once a parameter lies elsewhere."""
        parameters = list(self.target.model.parameters())
        if self._source.moved(parameters):
            self._source = Fingerprint(parameters)
        return (self._source,)

    def refresh(self) -> None:
        """There is no copy of weights; what was captured is captured anew."""
        self._source = Fingerprint()

    @property
    def prefill_rows(self) -> int:
        """The most rows of one forward of a prompt."""
        return _PREFILL_ROWS if self.dtype in HALF else _PREFILL_ROWS_WIDE

    def prefill(self, ids: Tensor, cache: Cache, row: int = 0) -> TargetOutput:
        """Run the next tokens [1, P] of a row and commit them. Returns logits [1, 1, V] and features [1, P, F * H]."""
        chunks = list(self.prefill_chunks(ids, cache, row))
        features = [chunk.features for chunk in chunks if chunk.features is not None]
        return TargetOutput(chunks[-1].logits, torch.cat(features, 1) if features else None)

    def prefill_chunks(self, ids: Tensor, cache: Cache, row: int = 0) -> Iterator[TargetOutput]:
        """As `prefill`, in forwards of bounded size, each of which gives its own rows' features and last logits."""
        self._check_open("prefill")
        start = int(cache.lengths[row])
        for part in ids.split(self.prefill_rows, 1):
            positions = torch.arange(start, start + part.shape[1], device=self.device)[None]
            output = self._forward(part, positions, _Step(cache, row, start), last_only=True)
            start += part.shape[1]
            cache.lengths[row] = start
            advance("prompt", part.shape[1], after=output.logits)
            yield output

    def verify(self, tokens: Tensor, cache: Cache, tree: Tree | None = None) -> TargetOutput:
        """Run a block [B, S] behind every row's committed positions, which stay as they are; S at most 64.

        Returns logits [B, S, V] and features [B, S, F * H].
        """
        self._check_open("verify")
        size = tokens.shape[1]
        if size not in self._masks:
            self._masks[size] = block_masks(size, self.device)
        depths, _, visibility = self._masks[size]
        if tree is not None:
            depths, visibility = tree.depths, tree.visibility
        cache.open(size)
        return self.verify_block(tokens, cache, BlockView(visibility, depths))

    def verify_block(self, tokens: Tensor, cache: Cache, view: BlockView) -> TargetOutput:
        """As `verify`; keys and values go into the cache's open block."""
        positions = cache.lengths[:, None].long() + view.depths
        if self.target.max_length is not None:  # rows behind it are cut away by the caller
            positions = positions.clamp(max=self.target.max_length - 1)
        return self._forward(tokens, positions, _Step(cache, view=view))

    def append(self, cache: Cache, index: Tensor) -> None:
        """Put the block's slots `index` [B, S] behind every row's committed positions; lengths are the caller's."""
        if not cache.is_open:
            raise ValueError("append: cache must hold a block from verify, got none")
        cache.commit(index)

    def commit(self, cache: Cache, index: Tensor, num_accepted: Tensor) -> None:
        """Keep the anchor and the accepted drafts of the verified block, and forget the rest."""
        self.append(cache, index.to(self.device, torch.int32))
        cache.lengths += num_accepted.to(self.device, torch.int32) + 1

    def tables(self, positions: int) -> object:
        """What `verify` reads beside weights and cache; a captured graph must keep it alive."""
        return None

    def _forward(self, ids: Tensor, positions: Tensor, step: _Step, last_only: bool = False) -> TargetOutput:
        target = self.target
        arguments: dict[str, Any] = {"position_ids": positions, "use_cache": step.cache is not None}
        if step.cache is not None:
            arguments[self.facts.cache_argument] = self._model_cache
        if last_only and self.facts.takes_logits_to_keep:
            arguments["logits_to_keep"] = 1
        taken: dict[int, Tensor] = {}
        token = _STEP.set(step)
        try:
            with torch.no_grad(), self.exact_dtype(), target.tap(taken, target.layer_ids):
                logits = self._view.current()(input_ids=ids, **arguments).logits
        finally:
            _STEP.reset(token)
        self.windows = step.windows  # not the step: it would keep the cache of the last forward
        features = torch.cat([taken[i] for i in target.layer_ids], -1).to(self.dtype) if taken else None
        return TargetOutput(logits[:, -1:] if last_only else logits, features)

    def exact_dtype(self) -> torch.autocast:
        """Keeps a surrounding autocast out: the cache and the ops take the model's own dtype."""
        return torch.autocast(self.device.type, enabled=False)

    def _check_open(self, op: str) -> None:
        if self.target.closed:
            raise ValueError(f"{op}: target must be open, got one after close()")

    def refuse(self, expected: str, got: object) -> NoReturn:
        """Raise the ValueError of a model that cannot run this way."""
        raise ValueError(f"{type(self).__name__}: {type(self.target.model).__name__} must have {expected}, got {got}")

    def _check_family(self) -> None:
        facts = self.facts
        config, rope = facts.text_config, facts.rope
        if not facts.takes_positions:
            self.refuse("a forward that takes position_ids", "none")
        if self.dtype not in (*HALF, torch.float32):
            self.refuse("parameters of float32, bfloat16 or float16", self.dtype)
        if facts.rope_switch is not None or rope.get("rope_type", rope.get("type")) == "dynamic":
            self.refuse("RoPE that does not change with the length", rope)
        if getattr(config, "attn_temperature_tuning", False) or getattr(config, "attention_types", None):
            self.refuse("attention that does not depend on the place in the block", type(config).__name__)
        if "chunked_attention" in (getattr(config, "layer_types", None) or ()):
            self.refuse("full or sliding attention", "chunked_attention")
        if (self.max_length or PROBE_TOKENS) < PROBE_TOKENS:
            self.refuse(f"a context of at least {PROBE_TOKENS} positions", self.max_length)

    def _check_layers(self) -> None:
        """What the layers keep must have a place in the cache: keys and values of one shape, from one forward's."""
        if kinds := set(self.facts.layer_kinds) - {"attention"}:
            self.refuse("attention layers only", ", ".join(sorted(kinds)))
        output = self.target.try_forward(self.target.trial_ids(2))
        cache = getattr(output, self.facts.cache_argument)
        shapes = {(*layer.keys.shape[1::2], *layer.values.shape[1::2]) for layer in cache.layers}
        heads, dim, *values = shapes.pop()
        if shapes or values != [heads, dim]:
            self.refuse("keys and values of one shape in all layers", [*shapes, (heads, dim, *values)])
        if dim % 8 != 0 or dim > 256:
            self.refuse("a head size that is a multiple of 8 up to 256", dim)
        self._shape = (len(self.target.layers), heads, dim)

    def trial_fault(self) -> str | None:
        """What trees, chains and rollbacks on tokens with known logits find wrong, or None."""
        ids = self.target.trial_ids(24)
        fault = tree_fault(self, ids[:, :PROBE_TOKENS])
        fault = fault or rollback_fault(self, ids, self.target.try_forward(ids).logits)
        return fault or self.window_fault()

    def run_at(self, ids: Tensor, positions: Tensor) -> tuple[Tensor, dict[int, Tensor]]:
        """Logits over ids [1, P] at `positions` [1, P], and the norm of each layer's queries."""
        norms: dict[int, Tensor] = {}
        return self._forward(ids, positions, _Step(None, norms=norms)).logits, norms

    def window_fault(self) -> str | None:
        """A window that only transformers' masks know of would be lost; after a forward."""
        config = self.facts.text_config
        if not self.windows:
            return "attention of its own beside transformers' AttentionInterface"
        kinds = getattr(config, "layer_types", None) or ["sliding_attention"]
        window = getattr(config, "sliding_window", None)
        if "sliding_attention" in kinds and window and not any(self.windows.values()):
            return f"a sliding window ({window}) that its attention is not told"
        return None


def _attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: [B, heads, S, dim] queries to [B, S, heads, dim]. The mask is not read."""
    if softcap is not None or s_aux is not None:
        raise ValueError("attention must be without soft caps and sinks")
    step = _STEP.get()
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    window = sliding_window or 0
    if step.cache is None:
        step.layer = int(cast("Any", module.layer_idx))
    step.windows[step.layer] = window
    if step.norms is not None:
        step.norms[step.layer] = query.float().norm()
    if step.view is None or step.cache is None:
        return prompt_attention(query, key, value, scale, window), None
    part, lengths, view = step.cache.part(step.layer), step.cache.lengths, step.view
    out = ops.block_attention(query, part.k, part.v, key, value, lengths, view.visibility, view.depths, window, scale)
    return out.transpose(1, 2), None
