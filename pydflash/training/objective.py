"""The training objective: random anchors, all blocks in one forward, position-weighted losses, selector loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..drafter.module import Drafter
from ..ops import reference
from .build import InputConditionedDrafter, block_only
from .masks import dense_mask, flex_mask, mask_rule

DENSE_KEYS = 4096  # up to here a dense mask is as fast as FlexAttention


@dataclass(frozen=True, slots=True)
class ObjectiveConfig:
    """What is minimised.

    Attributes:
        num_anchors: Blocks per sequence and step.
        gamma: Decay of the slot weights exp(-(i - 1) / gamma); None takes 7, 5 or 4 by block size, as published.
        weighting: "decay", or "dpace": the weight of a slot is the chance that the block survives up to it,
            judged by the drafter's own confidence (alpha 0.5).
        distillation: Share of the target's own distribution in the loss; the rest is the text's next token.
        selector_weight: Factor on the selector's loss (DFlash 2).
        selector_share: Share of the blocks the selector's loss looks at; finding candidates is its cost.
        missing_gold: A next token that is not among the candidates is dropped from the selector's loss, or
            replaces the weakest candidate for the loss ("inject").
        chunk_rows: Rows whose logits exist at once.
        attention: "dense" mask with SDPA, "flex" for FlexAttention; "auto" takes flex on CUDA beyond 4,096 keys.
    """

    num_anchors: int = 64
    gamma: float | None = None
    weighting: Literal["decay", "dpace"] = "decay"
    distillation: float = 0.0
    selector_weight: float = 0.3
    selector_share: float = 0.25
    missing_gold: Literal["drop", "inject"] = "drop"
    chunk_rows: int = 4096
    attention: Literal["auto", "dense", "flex"] = "auto"

    def __post_init__(self) -> None:
        for name, low, high in (("distillation", 0, 1), ("selector_share", 0, 1), ("selector_weight", 0, float("inf"))):
            if not low <= getattr(self, name) <= high:
                raise ValueError(f"training: {name} must be {low} to {high}, got {getattr(self, name)}")
        if self.gamma is not None and not 0 < self.gamma < float("inf"):
            raise ValueError(f"training: gamma must be above 0, got {self.gamma}")
        if self.num_anchors < 1 or self.chunk_rows < 1:
            raise ValueError(
                f"training: num_anchors and chunk_rows must be >= 1, got {self.num_anchors}, {self.chunk_rows}"
            )


class Batch(NamedTuple):
    """Sequences to train on, padded on the right.

    Attributes:
        ids: [B, P] int64.
        supervised: [B, P] bool, true on response tokens.
        features: [B, P, F * H] of the target.
        logits: [B, P, V] of the target, only where its distribution is distilled.
    """

    ids: Tensor
    supervised: Tensor
    features: Tensor
    logits: Tensor | None


def sample_anchors(supervised: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Anchors [B, count], sorted, without replacement; -1 fills up rows that have fewer.

    An anchor and the token after it are both supervised, so blocks at the end of a response are trained too.
    """
    eligible = supervised.clone()
    eligible[:, :-1] &= supervised[:, 1:]
    eligible[:, -1] = False
    keys = torch.rand(eligible.shape, generator=generator).to(eligible.device).masked_fill(~eligible, -1)
    best, chosen = keys.topk(min(count, keys.shape[1]), -1)
    chosen = chosen.masked_fill(best < 0, keys.shape[1]).sort(-1).values
    anchors = chosen.masked_fill(chosen == keys.shape[1], -1)
    return F.pad(anchors, (0, count - anchors.shape[1]), value=-1)


def block_hidden(drafter: Drafter, table: Tensor, batch: Batch, anchors: Tensor, attention: str = "auto") -> Tensor:
    """Hidden states [B, A, S, H] of the blocks at `anchors` [B, A], all in one forward.

    One anchor gives what `Drafter.hidden` computes at that position.
    """
    config, size = drafter.config, drafter.config.block_size
    batch_size, blocks = anchors.shape
    length, device = batch.ids.shape[1], batch.ids.device
    slots = torch.arange(size, device=device)
    positions = (anchors.clamp_min(0)[..., None] + slots).flatten(1)
    drafter.reserve(length + size)

    def convolve(x: Tensor, base: Tensor, delta: Tensor) -> Tensor:
        split = (batch_size * blocks, size)
        y = reference.block_conv(x.reshape(*split, -1), base, delta.reshape(*split, *delta.shape[2:]))
        return y.view_as(x)

    block = torch.full((batch_size, blocks, size), config.mask_token_id, device=device)
    block[..., 0] = batch.ids.gather(1, anchors.clamp_min(0))
    embeddings = drafter.embed(block.flatten(1), table)
    if isinstance(drafter, InputConditionedDrafter):
        before = (anchors - 1).clamp_min(0)[..., None].expand(-1, -1, batch.features.shape[-1])
        newest = drafter.fuse(batch.features.gather(1, before)).repeat_interleave(size, 1)
        hidden = drafter(embeddings + newest, positions, block_only(size), convolve)
        return hidden.unflatten(1, (blocks, size))
    here = torch.arange(length, device=device).expand(batch_size, -1)
    k_context, v_context = drafter.context_keys(drafter.fuse(batch.features), here)
    keys_in_all = length + blocks * size
    flex = attention == "flex" or (attention == "auto" and device.type == "cuda" and keys_in_all > DENSE_KEYS)
    groups = config.num_heads // config.num_kv_heads
    masks: dict[tuple[int, bool], Any] = {}

    def mask_of(layer: int, dtype: torch.dtype) -> Any:
        kind = config.window(layer), config.causal[layer]
        if kind not in masks:
            rule = mask_rule(anchors, length, size, *kind)
            # An additive mask: torch's kernels would make one from booleans in every layer.
            masks[kind] = (
                flex_mask(rule, anchors, length, size)
                if flex
                else torch.zeros((), dtype=dtype, device=device).where(
                    dense_mask(rule, anchors, length, size), float("-inf")
                )
            )
        return masks[kind]

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = torch.cat([k_context[layer], k], 2), torch.cat([v_context[layer], v], 2)
        mask = mask_of(layer, q.dtype)
        if flex:
            return _flex_attention(q, keys, values, mask)
        # Repeated heads: torch's memory-efficient kernel takes a mask, but no grouped heads.
        keys, values = keys.repeat_interleave(groups, 1), values.repeat_interleave(groups, 1)
        return F.scaled_dot_product_attention(q, keys, values, mask)

    return drafter(embeddings, positions, attend, convolve).unflatten(1, (blocks, size))


def _flex_attention(q: Tensor, k: Tensor, v: Tensor, mask: object) -> Tensor:
    from torch.nn.attention import flex_attention as flex

    run: Any = _compiled_flex() if q.is_cuda else flex.flex_attention
    return run(q, k, v, block_mask=mask, enable_gqa=True)


@cache
def _compiled_flex() -> Callable[..., Tensor]:
    from torch.nn.attention import flex_attention as flex

    return torch.compile(flex.flex_attention)


class Objective(nn.Module):
    """Loss and metrics of a drafter on a batch; the target's table and head are used, not owned.

    forward(batch, anchors) returns the loss and a dict of sums, to be added over batches and read by `summarise`.
    """

    table: Tensor
    head: nn.Module
    decay: Tensor

    def __init__(self, drafter: Drafter, table: Tensor, head: nn.Module, config: ObjectiveConfig) -> None:
        super().__init__()
        self.drafter = drafter
        self.config = config
        # Plain attributes: the target is frozen, and must not appear among this module's parameters.
        object.__setattr__(self, "table", table)
        object.__setattr__(self, "head", head)
        size = drafter.config.block_size
        gamma = config.gamma if config.gamma is not None else 7.0 if size >= 16 else 5.0 if size >= 10 else 4.0
        self.register_buffer("decay", torch.exp(-torch.arange(size - 1) / gamma), persistent=False)

    def forward(self, batch: Batch, anchors: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        drafter, size = self.drafter, self.drafter.config.block_size
        hidden = block_hidden(drafter, self.table, batch, anchors, self.config.attention)[:, :, 1:]
        at = anchors[..., None] + torch.arange(1, size, device=anchors.device)
        inside = (anchors[..., None] >= 0) & (at < batch.ids.shape[1])
        at = at.clamp(0, batch.ids.shape[1] - 1)
        rows = torch.arange(len(at), device=at.device)[:, None, None]
        labels, used = batch.ids[rows, at], inside & batch.supervised[rows, at]
        used = used.long().cumprod(-1).bool()
        teacher = None
        if batch.logits is not None:
            teacher = batch.logits.flatten(0, 1), (rows * batch.ids.shape[1] + (at - 1).clamp_min(0)).flatten()
        total, ce, correct = self._row_losses(hidden, labels, teacher)
        weight = self._weights(ce, used)
        loss = (total * weight).sum() / weight.sum().clamp_min(1e-6)
        alive = (correct & used).long().cumprod(-1)
        sums = {
            "blocks": (used.any(-1)).sum(),
            "slots": used.sum((0, 1)),
            "correct": (correct & used).sum((0, 1)),
            "alive": alive.sum((0, 1)),
            "ce": (ce * weight).sum(),
            "weight": weight.sum(),
        }
        if drafter.candidate_selector is not None and self.config.selector_weight > 0:
            selector_loss, selector_sums = self._selector(hidden, labels, used, weight, batch.ids, anchors)
            loss = loss + self.config.selector_weight * selector_loss
            sums |= selector_sums
        return loss, sums

    def _weights(self, ce: Tensor, used: Tensor) -> Tensor:
        if self.config.weighting == "decay":
            return used * self.decay
        confidence = torch.where(used, 0.5 * torch.exp(-ce) + 0.5, 1.0)
        survival = confidence.cumprod(-1) * used
        return survival.flip(-1).cumsum(-1).flip(-1) * used

    def _row_losses(
        self, hidden: Tensor, labels: Tensor, teacher: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Loss (with a gradient), cross-entropy and top-1 hits of every row [B, A, S-1].

        teacher: logits [N, V] of the target and the row of them that belongs to each label, [B * A * (S-1)].
        """
        logits, where = teacher if teacher is not None else (None, None)
        total, ce, correct = _RowLosses.apply(
            hidden.flatten(0, 2),
            labels.flatten(),
            lambda z: self.drafter.logits(z, self.head),
            self.config,
            logits,
            where,
        )
        return total.view(labels.shape), ce.view(labels.shape), correct.view(labels.shape)

    def _selector(
        self, hidden: Tensor, labels: Tensor, used: Tensor, weight: Tensor, ids: Tensor, anchors: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Cross-entropy over the candidates' edge scores, the true token before each slot as predecessor."""
        drafter, selector = self.drafter, self.drafter.candidate_selector
        assert selector is not None
        config = drafter.config
        blocks = max(1, round(hidden.shape[1] * self.config.selector_share))
        # Anchors are sorted; a stride takes blocks from all over the sequence.
        picked = torch.linspace(0, hidden.shape[1] - 1, blocks, device=hidden.device).long()
        hidden, labels, used, weight = (x[:, picked] for x in (hidden, labels, used, weight))
        with torch.no_grad():
            logits = drafter.logits(hidden, self.head)
            candidates = logits.topk(min(config.selector_top_k, logits.shape[-1]), -1).indices
        if self.config.missing_gold == "inject":
            absent = ~(candidates == labels[..., None]).any(-1)
            candidates = torch.cat(
                [candidates[..., :-1], torch.where(absent, labels, candidates[..., -1])[..., None]], -1
            )
        unary = self._candidate_logits(hidden, candidates)
        first = ids.gather(1, anchors[:, picked].clamp_min(0))[..., None]
        before = torch.cat([first, labels[..., :-1]], -1)
        left = selector.predecessor_codebook[before] * selector.hidden_projection(hidden)
        edges = unary + (selector.successor_codebook[candidates] @ left[..., None]).squeeze(-1).float()
        found = candidates == labels[..., None]
        kept = used & found.any(-1)
        ce = edges.logsumexp(-1) - (edges * found).sum(-1)
        loss = (ce * weight * kept).sum() / (weight * kept).sum().clamp_min(1e-6)
        right = (edges.argmax(-1) == found.long().argmax(-1)) & kept
        sums = {
            "selector_slots": used.sum((0, 1)),
            "recall": kept.sum((0, 1)),
            "selector_correct": right.sum((0, 1)),
            "selector_alive": right.long().cumprod(-1).sum((0, 1)),
            "selector_blocks": used.any(-1).sum(),
        }
        return loss, sums

    def _candidate_logits(self, hidden: Tensor, candidates: Tensor) -> Tensor:
        """Logits [..., K], float32 and with a gradient, of candidates [..., K] alone where the head is a plain one."""
        head = self.drafter.lm_head if self.drafter.lm_head is not None else self.head
        if type(head) is not nn.Linear:
            return self.drafter.logits(hidden, self.head).gather(-1, candidates).float()
        logits = (head.weight[candidates] @ hidden.to(head.weight.dtype)[..., None]).squeeze(-1)
        if head.bias is not None:
            logits = logits + head.bias[candidates]
        return self.drafter.scale_logits(logits).float()


class _RowLosses(torch.autograd.Function):
    """Losses of rows under a frozen head, a chunk of logits at a time.

    Each row's loss depends on its own hidden state only, so its gradient [rows, H] is made in the forward pass, while
    the chunk's logits exist; the backward pass scales it. Logits are neither kept nor computed twice.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        labels: Tensor,
        to_logits: Callable[[Tensor], Tensor],
        config: ObjectiveConfig,
        teacher: Tensor | None,
        where: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        compute = _compiled_losses() if hidden.is_cuda else losses_of_logits
        gradient = torch.empty_like(hidden)
        pieces = []
        for start in range(0, len(hidden), config.chunk_rows):
            part = slice(start, start + config.chunk_rows)
            with torch.enable_grad():
                z = hidden[part].detach().requires_grad_()
                logits = to_logits(z)
            taught = None if teacher is None or where is None else teacher.index_select(0, where[part])
            loss, ce, correct, slope = compute(logits.detach(), labels[part], taught, config.distillation)
            gradient[part] = torch.autograd.grad(logits, z, slope)[0]
            pieces.append((loss, ce, correct))
        ctx.save_for_backward(gradient)
        total, ce, correct = (torch.cat(column) for column in zip(*pieces, strict=True))
        ctx.mark_non_differentiable(ce, correct)
        return total, ce, correct

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return gradient * upstream[0][:, None].to(gradient.dtype), None, None, None, None, None


def losses_of_logits(
    logits: Tensor, labels: Tensor, teacher: Tensor | None, share: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Mixed loss, cross-entropy, top-1 hits [rows] and the loss's slope in the logits [rows, V]."""
    wide = logits.float()
    log_z = wide.logsumexp(-1)
    ce = log_z - wide.gather(-1, labels[:, None])[:, 0]
    gold = torch.arange(wide.shape[-1], device=wide.device) == labels[:, None]
    wanted, loss = gold.float(), ce
    if teacher is not None:
        p = torch.softmax(teacher.float(), -1)
        loss = (1 - share) * ce + share * (log_z - (p * wide).sum(-1))
        wanted = (1 - share) * wanted + share * p
    slope = torch.exp(wide - log_z[:, None]) - wanted
    return loss, ce, wide.argmax(-1) == labels, slope.to(logits.dtype)


@cache
def _compiled_losses() -> Callable[..., Any]:
    return torch.compile(losses_of_logits)


def summarise(sums: dict[str, Tensor]) -> dict[str, float | list[float]]:
    """Readable metrics of added-up sums: loss, per-slot accuracy, expected accepted length, selector figures."""

    def ratio(a: str, b: str) -> list[float]:
        return (sums[a].double() / sums[b].double().clamp_min(1)).tolist()

    out: dict[str, float | list[float]] = {
        "ce": float(sums["ce"] / sums["weight"].clamp_min(1e-6)),
        "slot_accuracy": ratio("correct", "slots"),
        "accepted_length": 1 + float(sums["alive"].sum() / sums["blocks"].clamp_min(1)),
    }
    if "recall" in sums:
        out |= {
            "selector_recall": ratio("recall", "selector_slots"),
            "selector_accuracy": ratio("selector_correct", "selector_slots"),
            "selector_length": 1 + float(sums["selector_alive"].sum() / sums["selector_blocks"].clamp_min(1)),
        }
    return out
