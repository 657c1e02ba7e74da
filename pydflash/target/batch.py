"""Many sequences at once through a target's own forward: keys and values in place, a length of its own for each row.

Like `cache.py` this is contact with transformers: a cache layer, and an attention function in a view of the model.
Sequences start at position 0 of their row; there is no padding on the left.
"""

from __future__ import annotations

import math
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
import transformers
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers.cache_utils import DynamicCache, DynamicLayer

from ..protocols import ModelTarget
from .view import ModelView

ATTENTION = ("auto", "flash", "dense")
KEY_STEP = 64  # the dense attention reads a multiple of this many keys
_NAME = "pydflash_batch"
# cuDNN builds a plan for every new shape, and prefills have many shapes.
_SDPA = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


@dataclass(slots=True)
class _Seen:
    """What a check learns from the attention calls: why a layer cannot use flash attention, and the windows."""

    calls: int = 0
    reasons: set[str] = field(default_factory=set)
    windows: set[int] = field(default_factory=set)


@dataclass(slots=True)
class _Step:
    """What all layers of one forward share. slots: where the new keys go, in the flat buffer [rows * capacity]."""

    slots: Tensor
    lengths: Tensor | None = None  # decoding: keys that each row had before; None in a prefill
    keys: int = 0  # decoding: keys that the dense attention reads
    capacity: int = 0
    used: Tensor | None = None  # flash: lengths + 1 as int32
    starts: tuple[Tensor, Tensor] | None = None  # flash: first query and first key of each row, int32 [n + 1]
    masks: dict[int, Tensor] = field(default_factory=dict)  # dense: additive mask of each window size
    seen: _Seen | None = None


_STEP: ContextVar[_Step] = ContextVar("pydflash_batch_step")


class _BatchLayer(DynamicLayer):
    """Keys and values of one layer: buffers [rows, capacity, heads, dim], written at the slots of the step."""

    is_sliding = False

    def __init__(self, rows: int, capacity: int) -> None:
        super().__init__()
        self._rows, self._capacity = rows, capacity
        self.buffers: list[Tensor] = []

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write [n, heads, S, dim]. A prefill gets its own states back, a decoding step all keys of its rows."""
        step, both = _STEP.get(), (key_states, value_states)
        if not self.buffers:
            # Zeros, since a masked key still meets its value: 0 * NaN would be NaN.
            self.buffers = [x.new_zeros(self._rows, self._capacity, x.shape[1], x.shape[3]) for x in both]
            self.is_initialized, self.dtype, self.device = True, key_states.dtype, key_states.device
        for buffer, states in zip(self.buffers, both, strict=True):
            buffer.flatten(0, 1).index_copy_(0, step.slots, states.transpose(1, 2).flatten(0, 1))
        if step.lengths is None:
            return key_states, value_states
        keys, values = (x[: key_states.shape[0], : step.keys].transpose(1, 2) for x in self.buffers)
        return keys, values

    def get_seq_length(self, *args: Any) -> int:
        """0: positions are always given, so nothing may be derived from the cache."""
        return 0


class BatchForward:
    """Prefill and one-token steps of up to `rows` sequences of up to `capacity` positions.

    Positions are counted per row, so rows are independent: what one computes does not depend on the others.
    `attention` says how a step attends: "flash" (FlashAttention over each row's own keys, half precision on a GPU)
    or "dense" (torch's SDPA under a mask over the first `keys` positions of all rows).
    """

    def __init__(self, target: ModelTarget, rows: int, capacity: int, attention: str = "auto") -> None:
        """capacity is rounded up to a multiple of 64. attention: "auto" takes flash where it can serve every layer.

        Compares a few tokens with the target's own forward.

        Raises: ValueError for a model that cannot run this way and for flash attention where it cannot be had;
        RuntimeError where the buffers do not fit into the device's memory.
        """
        if rows < 1 or capacity < 1:
            raise ValueError(f"BatchForward: rows and capacity must be at least 1, got {rows} and {capacity}")
        if attention not in ATTENTION:
            raise ValueError(f"BatchForward: attention must be one of {', '.join(ATTENTION)}, got {attention!r}")
        self.target, self.rows = target, rows
        self.capacity = -(-capacity // KEY_STEP) * KEY_STEP
        self._check_target(capacity)
        transformers.AttentionInterface.register(_NAME, _attend)
        self._view = ModelView(target, _NAME)
        self._cache = DynamicCache()
        self._layers = [_BatchLayer(rows, self.capacity) for _ in target.facts.layer_kinds]
        self._cache.layers = list(self._layers)
        self._cache.layer_class_to_replicate = None
        self.attention = "dense"
        self._seen: _Seen | None = None
        device = target.device
        self._first_slots = torch.arange(rows, device=device) * self.capacity
        self._starts = tuple(
            (torch.arange(rows + 1, device=device) * width).to(torch.int32) for width in (1, self.capacity)
        )
        try:
            reasons = self._check_forward()
        except torch.OutOfMemoryError as error:
            raise RuntimeError(
                f"BatchForward: keys and values of {rows} rows of {self.capacity} positions do not fit into the "
                f"memory of {device}; take a smaller batch or shorter texts"
            ) from error
        if attention == "flash" and reasons:
            raise ValueError(f"BatchForward: attention must be dense here ({'; '.join(sorted(reasons))}), got 'flash'")
        if attention != "dense" and not reasons:
            self.attention = "flash"
            self._check_forward()

    @property
    def bytes_per_row(self) -> int:
        """Memory that the keys and values of one row take."""
        return sum(x[0].nbytes for layer in self._layers for x in layer.buffers)

    def prefill(self, ids: Tensor, rows: Tensor) -> None:
        """Write the keys and values of prompts, from position 0 on.

        ids: [R, P] integers, shorter prompts filled up on the right with any ids: what they write lies behind the
        row's length and is overwritten before it is read. rows: [R] int64, distinct.
        """
        positions = torch.arange(ids.shape[1], device=ids.device)
        step = _Step((self._first_slots[rows][:, None] + positions).flatten())
        self._forward(ids, positions[None].expand_as(ids), step)

    def step(self, tokens: Tensor, lengths: Tensor, keys: int) -> Tensor:
        """Run one token of each of the rows 0..n-1; returns logits [n, V].

        tokens: [n] the tokens at positions `lengths` [n] int64. keys: how many positions the dense attention reads,
        more than any of `lengths`; flash attention does not need it.
        """
        n = len(tokens)
        keys = self.capacity if self.attention == "flash" else keys
        step = _Step(self._first_slots[:n] + lengths, lengths, keys, self.capacity, seen=self._seen)
        if self.attention == "flash":
            step.used = (lengths + 1).to(torch.int32)
            step.starts = (self._starts[0][: n + 1], self._starts[1][: n + 1])
        return self._forward(tokens[:, None], lengths[:, None], step)[:, -1]

    def move(self, source: Tensor, destination: Tensor) -> None:
        """Copy the keys and values of rows `source` [R] into rows `destination` [R]; the two have none in common."""
        for layer in self._layers:
            for buffer in layer.buffers:
                buffer[destination] = buffer[source]

    def _forward(self, ids: Tensor, positions: Tensor, step: _Step) -> Tensor:
        target = self.target
        arguments: dict[str, Any] = {target.facts.cache_argument: self._cache, "position_ids": positions}
        if target.facts.takes_logits_to_keep:
            arguments["logits_to_keep"] = 1
        token = _STEP.set(step)
        try:
            with torch.no_grad(), sdpa_kernel(_SDPA):
                logits: Tensor = self._view.current()(input_ids=ids, use_cache=True, **arguments).logits
        finally:
            _STEP.reset(token)
        return logits

    def _refuse(self, expected: str, got: object) -> NoReturn:
        name = type(self.target.model).__name__
        raise ValueError(f"BatchForward: {name} must have {expected}, got {got}")

    def _check_target(self, capacity: int) -> None:
        target = self.target
        kinds = set(target.facts.layer_kinds) - {"attention"}
        if kinds:
            self._refuse("attention layers only (others keep a state that cannot be addressed by position)", kinds)
        if not target.facts.takes_positions:
            self._refuse("a forward that takes position_ids", "none")
        limits = (target.max_length, target.facts.rope_switch)
        limit = min((x for x in limits if x is not None), default=capacity)
        if capacity > limit:
            self._refuse(f"texts of at most {limit} positions (its context or its short RoPE factors)", capacity)

    def _check_forward(self) -> set[str]:
        """Prompts of unequal length and some steps must give the logits of the target's own forward.

        Returns why flash attention cannot be used.
        """
        target, device = self.target, self.target.device
        vocab, total = len(target.embed_weight), min(self.capacity, target.max_length or self.capacity, 24)
        n, steps = min(2, self.rows), min(4, total - 1)
        ids = (torch.arange(n * total, device=device).reshape(n, total) * 7 + vocab // 2) % vocab
        rows = torch.arange(n, device=device)
        lengths = (total - steps - 2 * rows).clamp(min=1)
        self._seen = seen = _Seen()
        try:
            self.prefill(ids[:, : total - steps], rows)
            got = [self.step(ids[rows, at], at, total) for at in (lengths - 1 + i for i in range(steps))]
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            self._refuse("attention through transformers' AttentionInterface", f"{type(error).__name__}: {error}")
        finally:
            self._seen = None
        plain = [target.try_forward(row[None]).logits[0] for row in ids]
        want = torch.stack([x[at - 1 :][:steps] for x, at in zip(plain, lengths.tolist(), strict=True)]).float()
        distance = ((torch.stack(got, 1).float() - want).norm(dim=-1) / want.norm(dim=-1)).max().item()
        if not seen.calls:
            self._refuse("attention through transformers' AttentionInterface", "attention of its own")
        if not distance <= (2e-4 if target.dtype == torch.float32 else 0.1):
            self._refuse(
                "attention that positions, windows, caps and sinks describe fully",
                f"logits off by {distance:.0e} of their norm, transformers {transformers.__version__}",
            )
        self._check_windows(seen.windows)
        return seen.reasons

    def _check_windows(self, windows: set[int]) -> None:
        """A window that only transformers' masks know of would be lost."""
        config = self.target.facts.text_config
        kinds = getattr(config, "layer_types", None) or ["sliding_attention"]
        chunk = getattr(config, "attention_chunk_size", None)
        if "chunked_attention" in kinds and chunk is not None and self.capacity > chunk:
            self._refuse(f"texts within one attention chunk ({chunk} positions)", self.capacity)
        window = getattr(config, "sliding_window", None)
        if "sliding_attention" in kinds and window is not None and self.capacity > window and not windows:
            self._refuse(f"texts within its sliding window ({window} positions)", self.capacity)


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
    """transformers' attention interface: [n, heads, S, dim] queries to [n, S, heads, dim]. The mask is not read."""
    step = _STEP.get()
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    window = sliding_window or 0
    if step.seen is not None:
        step.seen.calls += 1
        step.seen.windows |= {window} - {0}
        step.seen.reasons |= _no_flash(query, value, softcap, s_aux)
    plain = softcap is None and s_aux is None
    if step.starts is not None:
        out = _flash(query, key, value, step, scale, window)[:, None]
    elif step.lengths is None and plain and not 0 < window < query.shape[2]:
        grouped = query.shape[1] != key.shape[1]
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=grouped)
        out = out.transpose(1, 2)
    else:
        out = _dense(query, key, value, _mask(query, step, window), scale, softcap, s_aux)
    return out.contiguous(), None


def _no_flash(query: Tensor, value: Tensor, softcap: float | None, sinks: Tensor | None) -> set[str]:
    """Why FlashAttention cannot serve a layer; empty if it can."""
    dim = query.shape[-1]
    half = query.dtype in (torch.bfloat16, torch.float16)
    reasons = {
        "a GPU of compute capability 8 or higher is needed": not query.is_cuda
        or torch.cuda.get_device_capability(query.device) < (8, 0)
        or torch.version.hip is not None,
        f"{query.dtype} is not half precision": not half,
        f"head sizes are {dim} and {value.shape[-1]}": dim != value.shape[-1] or dim % 8 != 0 or dim > 256,
        "logits are capped": softcap is not None,
        "there are attention sinks": sinks is not None,
    }
    return {reason for reason, holds in reasons.items() if holds}


def _flash(query: Tensor, key: Tensor, value: Tensor, step: _Step, scale: float, window: int) -> Tensor:
    """One query of each row [n, heads, 1, dim] over that row's own keys; returns [n, heads, dim]."""
    flat = [x.transpose(1, 2).flatten(0, 1) for x in (key, value)]
    starts = step.starts or ()
    # The operator below torch's varlen_attn, which takes key counts only in its latest releases.
    return torch.ops.aten._flash_attention_forward(
        query[:, :, 0],
        *flat,
        *starts,
        1,
        step.capacity,
        0.0,
        False,
        False,
        scale=scale,
        window_size_left=window - 1 if window else None,
        window_size_right=0 if window else None,
        seqused_k=step.used,
    )[0]


def _mask(query: Tensor, step: _Step, window: int) -> Tensor:
    """Additive mask [n or 1, 1, S, keys]: a token sees itself and what lies before it, inside the window."""
    if window not in step.masks:
        size, device = query.shape[2], query.device
        at = torch.arange(size, device=device)[None] if step.lengths is None else step.lengths[:, None]
        keys = torch.arange(size if step.lengths is None else step.keys, device=device)
        distance = at[..., None] - keys
        hidden = distance < 0
        if window:
            hidden |= distance >= window
        zeros = torch.zeros(hidden.shape, dtype=query.dtype, device=device)
        step.masks[window] = zeros.masked_fill_(hidden, -math.inf)[:, None]
    return step.masks[window]


def _dense(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """[n, heads, S, dim] to [n, S, heads, dim]; the query heads of a key head are folded into its rows."""
    n, heads, size, dim = query.shape
    kv_heads = key.shape[1]
    groups = heads // kv_heads
    q = query.reshape(n, kv_heads, groups * size, dim)
    mask = mask.repeat(1, 1, groups, 1) if size > 1 else mask
    if softcap is None and sinks is None:
        mask = mask.expand(n, kv_heads, groups * size, -1)
        out = F.scaled_dot_product_attention(q, key, value, attn_mask=mask, scale=scale)
    else:
        scores = (q @ key.transpose(-1, -2) * scale).float()
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        scores = scores + mask
        if sinks is not None:
            column = sinks.float().reshape(1, kv_heads, groups, 1, 1).expand(n, -1, -1, size, 1)
            scores = torch.cat([scores, column.reshape(n, kv_heads, groups * size, 1)], -1)
        out = scores.softmax(-1)[..., : key.shape[2]].to(value.dtype) @ value
    return out.reshape(n, heads, size, -1).transpose(1, 2)
