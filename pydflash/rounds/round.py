"""One round: draft, verify, accept, commit. The host's loop and the device's loop both run this, and only this.

They differ in who decides when: the host's runs it for one sequence and looks at what it brought before the next; the
device's runs it for all rows of a batch in fixed shapes, where a graph may have captured it, and nobody looks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import ops
from ..ops import reference
from ..protocols import BlockTarget, DrafterLike, RowTarget, TargetOutput
from ..sampling import SamplingTensors
from .logprobs import list_logprobs
from .paths import Block, Paths
from .penalties import Penalties
from .turns import Turns


@dataclass(frozen=True, slots=True)
class Parts:
    """What rounds are made of.

    Attributes:
        drafter: None for plain decoding.
        block_size: Slots of a drafter's block, anchor included; 1 without a drafter.
        draft_sampling: Whether drafts of sequences at temperature > 0 are drawn from the drafter's law.
        backend: "native" for the compiled ops, "reference" for plain torch.
        turns: Held for one prompt or one round, by whoever runs the model.
    """

    target: BlockTarget
    drafter: DrafterLike | None
    paths: Paths
    block_size: int
    draft_sampling: bool
    backend: str = "native"
    turns: Turns = field(default_factory=Turns)

    @property
    def ops(self) -> ModuleType:
        """The module whose functions run: the compiled ops, or their definitions in plain torch."""
        return reference if self.backend == "reference" else ops


class Accepted(NamedTuple):
    """What the target agrees with.

    Attributes:
        slots: [B, S] int32 of the block, the anchor first, padded with -1.
        num_accepted: [B] int32 drafts among them.
        bonus: [B] int64, the token that follows them.
    """

    slots: Tensor
    num_accepted: Tensor
    bonus: Tensor


@dataclass(slots=True, kw_only=True)
class Rows:
    """B sequences between two rounds; tensors are on the target's device.

    Attributes:
        anchors: [B] the newest token of each.
        starts: [B] int32 the anchor's position.
        cache, context: What target and drafter keep of each; context None without drafts.
        sampling: Of [B].
        draws: Whether drafts are drawn from the drafter's law where a row's temperature is above 0.
        features: [B, C, F * H] of tokens that are committed and not yet in the drafter's context, as far as they are
            valid: the first `counts` [B] int32, at most a block; all where `counts` is None.
        penalties: Of the logits, for tokens of the text; None where no row has any.
        logprobs: How many of the target's most probable tokens are listed at each new one, 0 for nothing at all.
        listed: `Listed.joined` of the last round's new tokens, where they are listed.
    """

    anchors: Tensor
    starts: Tensor
    cache: Any
    context: Any
    sampling: SamplingTensors
    draws: bool
    features: Tensor | None = None
    counts: Tensor | None = None
    penalties: Penalties | None = None
    logprobs: int = 0
    listed: Tensor | None = None

    def commit(self, block: Block, output: TargetOutput, accepted: Accepted) -> None:
        """Keep the accepted slots, in the target's cache and in what the next round starts from."""
        raise NotImplementedError

    def note(self, ops: ModuleType, output: TargetOutput, accepted: Accepted, tokens: Tensor) -> None:
        """Count new tokens [B, S], filled up with -1, and list what the target thought of them."""
        if self.penalties is not None:
            self.penalties.count(tokens)
        if self.logprobs:
            self.listed = list_logprobs(ops, output.logits, accepted.slots, tokens, self.logprobs).joined()


@dataclass(slots=True, kw_only=True)
class HostRow(Rows):
    """One sequence, whose accepted slots the host reads. tokens: What the last round brought."""

    target: BlockTarget
    tokens: list[int] = field(default_factory=list)

    def commit(self, block: Block, output: TargetOutput, accepted: Accepted) -> None:
        slots, num_accepted, bonus = accepted
        self.target.commit(self.cache, slots, num_accepted)
        kept = slots[0, : int(num_accepted) + 1].long()
        if output.features is not None:
            self.features = output.features[:, : len(kept)] if block.tree is None else output.features[:, kept]
        self.starts += len(kept)
        self.anchors = bonus
        self.tokens = [*block.tokens[0, kept[1:]].tolist(), int(bonus)]


@dataclass(slots=True, kw_only=True)
class DeviceRows(Rows):
    """Sequences in buffers that stay where they are, which nobody reads during a round.

    Attributes:
        active: [B] int32, 0 for rows that a round leaves as they are.
        record: [B, S + 1] int64 new tokens of the last round, filled up with -1, and in the last column their number.
    """

    target: RowTarget
    counts: Tensor
    active: Tensor
    record: Tensor

    def commit(self, block: Block, output: TargetOutput, accepted: Accepted) -> None:
        self.target.append(self.cache, accepted.slots)
        ops.round_commit(
            block.tokens,
            *accepted,
            self.active,
            None if self.features is None else output.features,
            self.features,
            self.anchors,
            self.cache.lengths,
            self.starts,
            self.counts,
            self.record,
        )


def draft(parts: Parts, rows: Rows, slots: int) -> Block:
    """The block to verify: the anchors, and drafts for the first `slots` - 1 slots behind them."""
    if parts.drafter is None or rows.context is None or slots == 1:
        return Block(rows.anchors[:, None].clone(), None)
    if rows.features is None:
        raise RuntimeError("Speculator: a round needs the features of the tokens committed before it")
    sampling, target = rows.sampling, parts.target
    features = rows.features if rows.counts is None else rows.features[:, : parts.block_size]
    parts.drafter.append_context(features, rows.context, rows.counts)
    proposal = parts.drafter.propose(
        rows.anchors,
        rows.context,
        embed=target.embed_weight,
        head=target.head,
        block_size=parts.block_size,
        temperature=sampling.temperature if rows.draws else None,
        seeds=sampling.seeds,
        node_temperature=sampling.node_temperature if parts.paths.path != "walk" else None,
    )
    return parts.paths.block(parts.ops, rows.anchors, proposal, slots - 1, sampling.node_temperature)


def verify(parts: Parts, rows: Rows, block: Block) -> TargetOutput:
    """The target's logits and features of the block."""
    return parts.target.verify(block.tokens, rows.cache, block.tree)


def penalised(parts: Parts, rows: Rows, block: Block, logits: Tensor) -> Tensor:
    """The logits [B, S, V] of a block with what the rows' texts take off them."""
    if rows.penalties is None:
        return logits
    sees = chain_visibility(block.tokens.shape[1], logits.device) if block.tree is None else block.tree.visibility
    return rows.penalties.apply(parts.ops, logits, block.tokens, sees)


def chain_visibility(slots: int, device: torch.device) -> Tensor:
    """[1, S] int64: every slot sees itself and the slots before it."""
    return (torch.full((1, slots), 2, dtype=torch.int64, device=device) << torch.arange(slots, device=device)) - 1


def accept(parts: Parts, block: Block, logits: Tensor, sampling: SamplingTensors, starts: Tensor) -> Accepted:
    """How far the target agrees with the block, by its logits [B, S, V]."""
    accepted = parts.ops.reject_sample(
        logits,
        block.tokens,
        block.parents,
        block.q,
        sampling.temperature,
        sampling.top_k,
        sampling.top_p,
        sampling.min_p,
        sampling.seeds,
        starts,
    )
    return Accepted(*accepted)


def lawful(logits: Tensor, out: Tensor | None = None) -> Tensor:
    """[B, S] whether token 0 can come behind each slot, by the logits [B, S, V] that `accept` gets."""
    return torch.gt(logits[:, :, 0], -torch.inf, out=out)


def first_without_law(tokens: Sequence[int], look: Callable[[], tuple[Sequence[int], Sequence[Any]]]) -> int | None:
    """Index of the first new token whose logits were -inf or NaN alone, None where all were sound.

    From such logits `accept` takes token 0, which cannot come then: only where there is one does anybody have to look.

    look: gives the slots that the tokens follow, and of each slot of the block whether it is `lawful`.
    """
    if 0 not in tokens:
        return None
    slots, known = look()
    found = (i for i, (token, slot) in enumerate(zip(tokens, slots, strict=True)) if token == 0 and not known[slot])
    return next(found, None)
