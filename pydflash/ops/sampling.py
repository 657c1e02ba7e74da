"""How far the target agrees with a block, the token that follows, and what logits lose for tokens before them."""

from __future__ import annotations

import torch
from torch import Tensor

from . import reference
from .native import capsule, float32, int32, int64, module_for, per_row, rows, scratch_of
from .registry import register


def reject_sample(
    target_logits: Tensor,
    tokens: Tensor,
    parents: Tensor | None = None,
    draft_probs: tuple[Tensor, Tensor] | Tensor | None = None,
    temperature: Tensor | float = 0.0,
    top_k: Tensor | int = 0,
    top_p: Tensor | float = 1.0,
    min_p: Tensor | float = 0.0,
    seeds: Tensor | int = 0,
    starts: Tensor | int = 0,
    vocab_size: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """How far the target agrees with a block of drafts, and the token that comes after.

    Row i of `target_logits` is the target's law p of the token after slot i, filtered in this order: temperature,
    top-k (exactly k survive ties, lower id first), top-p, min-p. Three rules, chosen by row and by `draft_probs`:

    - temperature <= 0: descend from the anchor while a child carries the row's argmax.
    - with q (`draft_probs`) of the first W drafts, which must be a chain: accept its drafts while u * q < p; at the
      first refusal draw from the residual max(p - q, 0), and descend if another child of the slot carries the token.
      From there on, and after the last draft of the chain, the rule without q goes on.
    - without q: draw from the row of the current slot by inverse CDF, with the uniform that plain decoding uses at
      that position, and descend while a child carries the drawn token. So the text does not depend on the drafts.

    Every emitted token is distributed as p given its prefix, whatever the drafts.

    Args:
        target_logits: [B, S, V] float32, bfloat16 or float16.
        tokens: [B, S]: slot 0 the anchor, then drafts; a negative id means no draft there.
        parents: [B, S] slot each slot continues, an earlier one; None for a chain.
        draft_probs: None; (ids [B, W, K], probs [B, W, K]), q zero elsewhere; or dense [B, W, V]. q of the drafts in
            slots 1..W, W at most S-1; with `parents` those slots' are 0..W-1.
        temperature, top_k, top_p, min_p: [B] or numbers; 0 switches top_k and min_p off, 1 switches top_p off.
        seeds: [B] or a number, the key of every draw.
        starts: [B] position of the anchor.
        vocab_size: only the first `vocab_size` columns are real; default V.

    Returns:
        index [B, S] int32: the accepted slots, the anchor first, padded with -1; num_accepted [B] int32, drafts
        only; bonus [B] int64, the token that follows them.

    Raises: ValueError on shapes, dtypes or devices that do not fit, parents that are not earlier slots, or slots 1..W
        that are not a chain.

    Source: Leviathan et al., "Fast inference from transformers via speculative decoding", 2023, for the rule with q.
    """
    batch, device = target_logits.shape[0], target_logits.device
    ids, probs = draft_probs if isinstance(draft_probs, tuple | list) else (None, draft_probs)
    return _reject_sample(
        target_logits,
        tokens,
        parents,
        ids,
        probs,
        per_row(temperature, batch, torch.float32, device),
        per_row(top_k, batch, torch.int32, device),
        per_row(top_p, batch, torch.float32, device),
        per_row(min_p, batch, torch.float32, device),
        per_row(seeds, batch, torch.int64, device),
        per_row(starts, batch, torch.int32, device),
        target_logits.shape[-1] if vocab_size is None else vocab_size,
    )


def _reject_outputs(tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    batch = tokens.shape[0]
    return (
        torch.empty_like(tokens, dtype=torch.int32, memory_format=torch.contiguous_format),
        tokens.new_empty(batch, dtype=torch.int32),
        tokens.new_empty(batch, dtype=torch.int64),
    )


@register(
    "reject_sample(Tensor target_logits, Tensor tokens, Tensor? parents, Tensor? draft_ids, Tensor? draft_probs,"
    " Tensor temperature, Tensor top_k, Tensor top_p, Tensor min_p, Tensor seeds, Tensor starts, int vocab_size)"
    " -> (Tensor, Tensor, Tensor)",
    fake=lambda logits, tokens, *_: _reject_outputs(tokens),
    reference=reference.reject_sample,
)
def _reject_sample(
    target_logits: Tensor,
    tokens: Tensor,
    parents: Tensor | None,
    draft_ids: Tensor | None,
    draft_probs: Tensor | None,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    starts: Tensor,
    vocab_size: int,
) -> tuple[Tensor, Tensor, Tensor]:
    params = (temperature, top_k, top_p, min_p, seeds, starts)
    module, stream, device = module_for(
        "reject_sample", target_logits, tokens, parents, draft_ids, draft_probs, *params
    )
    if draft_ids is not None and draft_probs is None:
        raise ValueError("reject_sample: draft_probs must be given with draft_ids, got None")
    index, num_accepted, bonus = _reject_outputs(tokens)
    inputs = (
        rows(target_logits),
        int64(tokens, "reject_sample: tokens"),
        None if parents is None else int32(parents, "reject_sample: parents"),
        None if draft_ids is None else int64(draft_ids, "reject_sample: draft_ids"),
        None if draft_probs is None else rows(draft_probs.to(torch.float32)),
        float32(temperature),
        int32(top_k, "reject_sample: top_k"),
        float32(top_p),
        float32(min_p),
        int64(seeds, "reject_sample: seeds"),
        int32(starts, "reject_sample: starts"),
    )
    outputs = [capsule(t) for t in (index, num_accepted, bonus)]
    module.reject_sample(*[capsule(t) for t in inputs], vocab_size, *outputs, stream, device, scratch_of(tokens))
    return index, num_accepted, bonus


@register(
    "apply_penalties(Tensor logits, Tensor tokens, Tensor visibility, Tensor in_prompt, Tensor counts, Tensor bias,"
    " Tensor repetition, Tensor presence, Tensor frequency) -> Tensor",
    fake=lambda logits, *_: logits.new_empty(logits.shape, dtype=torch.float32),
    reference=reference.apply_penalties,
)
def apply_penalties(
    logits: Tensor,
    tokens: Tensor,
    visibility: Tensor,
    in_prompt: Tensor,
    counts: Tensor,
    bias: Tensor,
    repetition: Tensor,
    presence: Tensor,
    frequency: Tensor,
) -> Tensor:
    """Logits of a block with what each slot's text takes off them, in float32.

    A slot's text is what `counts` counts, and the drafts on the slot's path behind the anchor. A token that this text
    or the prompt holds has a positive logit divided by `repetition` and another one multiplied; one that the text holds
    n > 0 times loses `presence` and n times `frequency`; then the bias is added.

    Args:
        logits: [B, S, V] float32, bfloat16 or float16, S at most 64.
        tokens: [B, S], slot 0 the anchor, which `counts` has counted; a negative id means no draft there.
        visibility: [B or 1, S] int64; bit j of slot i: whether slot j is i itself or an ancestor.
        in_prompt: [B, V], not 0 where the prompt holds the token.
        counts: [B, V], how often the new text holds it.
        bias: [B, V].
        repetition, presence, frequency: [B]; 1, 0 and 0 change nothing.

    Returns: [B, S, V] float32.

    Raises: ValueError on shapes, dtypes or devices that do not fit.
    """
    inputs = (logits, tokens, visibility, in_prompt, counts, bias, repetition, presence, frequency)
    module, stream, device = module_for("apply_penalties", *inputs)
    out = logits.new_empty(logits.shape, dtype=torch.float32)
    module.apply_penalties(
        capsule(rows(logits)),
        *[
            capsule(int64(x, f"apply_penalties: {name}"))
            for x, name in ((tokens, "tokens"), (visibility, "visibility"))
        ],
        *[capsule(int32(x, f"apply_penalties: {name}")) for x, name in ((in_prompt, "in_prompt"), (counts, "counts"))],
        *[capsule(float32(x)) for x in (bias, repetition, presence, frequency)],
        capsule(out),
        stream,
        device,
    )
    return out
