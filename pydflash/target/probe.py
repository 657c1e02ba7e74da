"""Trials of a target on a few tokens: whether recurrent layers roll back, and whether trees are taken, exactly."""

from __future__ import annotations

import torch
from torch import Tensor

from ..protocols import BlockTarget, RowTarget
from ..tree import tree_of

_PARENTS = (0, 0, 0, 1, 1, 2, 3, 6)  # two branches with siblings; the path 0, 2, 5 leaves gaps
_PATH = (0, 2, 5)
PROBE_TOKENS = 13


def rollback_fault(target: BlockTarget, ids: Tensor, expected: Tensor) -> str | None:
    """Rounds of several sizes, some with rejected tokens: the logits must be those of one forward over `ids`.

    Returns: what is wrong, or None.
    """
    start = end = 5
    cache = target.new_cache(1, ids.shape[1])
    rows = []
    try:
        target.prefill(ids[:, :start], cache)
        for size, kept in ((4, 2), (1, 1), (3, 3), (2, 1), (1, 1), (4, 4), (1, 1)):
            block = torch.cat([ids[:, end : end + kept], ids[:, : size - kept]], 1)
            rows.append(target.verify(block, cache).logits[:, :kept])
            index = torch.tensor([[*range(kept), *[-1] * (size - kept)]])
            target.commit(cache, index, torch.tensor([kept - 1]))
            end += kept
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return _distance(target, torch.cat(rows, 1)[0], expected[0, start:end])


def mixing_fault(logits: Tensor, others: Tensor) -> str:
    """How rows depend on one behind them: logits [1, S, V] of two texts that differ in their last token alone.

    Returns: a line, or "" where all rows but the last are the same up to rounding.
    """
    before, after = logits[0, :-1].float(), others[0, :-1].float()
    largest = before.abs().max().clamp_min(1e-30)
    distance = ((before - after).abs().max() / largest).item()
    # The same products in the same shapes: what is left is far below the rounding of the dtype itself.
    if distance <= (1e-5 if logits.dtype is torch.float32 else 4 * torch.finfo(logits.dtype).eps):
        return ""
    return f"rows that depend on each other: one token changed the logits before it by {distance:.0e} of the largest"


def tree_fault(target: BlockTarget, ids: Tensor) -> str | None:
    """A tree after a few tokens, and a chain after one of its paths: the logits must be those of plain forwards.

    ids: [1, PROBE_TOKENS]. Returns: what is wrong, or None.
    """
    context, slots, after = ids[:, :3], ids[:, 3:11], ids[:, 11:13]
    parents = list(_PARENTS)
    try:
        cache = target.new_cache(1, 16)
        target.prefill(context, cache)
        got = target.verify(slots, cache, tree_of(parents, target.device)).logits[0]
        wanted = torch.empty_like(got)
        for slot in range(len(parents)):
            path = [slot]
            while path[0]:
                path.insert(0, parents[path[0]])
            wanted[slot] = _plain(target, torch.cat([context, slots[:, path]], 1))[-1]
        if (fault := _distance(target, got, wanted)) is not None:
            return fault
        index = torch.tensor([[*_PATH, *[-1] * (len(parents) - len(_PATH))]])
        target.commit(cache, index, torch.tensor([len(_PATH) - 1]))
        got = target.verify(after, cache).logits[0]
        wanted = _plain(target, torch.cat([context, slots[:, list(_PATH)], after], 1))[-2:]
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return _distance(target, got, wanted)


def rows_fault(target: RowTarget, ids: Tensor, expected: Tensor) -> str | None:
    """Two rows of unequal length with a free one between them, over blocks of which they keep unequal parts: the logits
    must be those of one forward over `ids`.

    ids: [1, PROBE_TOKENS], expected: its logits [1, PROBE_TOKENS, V]. Returns: what is wrong, or None.
    """
    lengths, kept, size = {0: 3, 2: 6}, {0: 3, 2: 1}, 3
    got, wanted = [], []
    try:
        cache = target.new_cache(3, ids.shape[1])
        for row, length in lengths.items():
            got += [output.logits[0] for output in target.prefill_chunks(ids[:, :length], cache, row)]
            wanted.append(expected[0, length - 1 : length])
        for _ in range(2):
            block, index = ids[:, :size].repeat(3, 1), torch.full((3, size), -1, dtype=torch.int32)
            for row, count in kept.items():
                block[row, :count] = ids[0, lengths[row] : lengths[row] + count]
                index[row, :count] = torch.arange(count, dtype=torch.int32)
            logits = target.verify(block, cache).logits
            target.append(cache, index.to(target.device))
            for row, count in kept.items():
                got.append(logits[row, :count])
                wanted.append(expected[0, lengths[row] : lengths[row] + count])
                lengths[row] += count
                cache.lengths[row] += count
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return _distance(target, torch.cat(got), torch.cat(wanted))


def _plain(target: BlockTarget, ids: Tensor) -> Tensor:
    cache = target.new_cache(1, ids.shape[1])
    return target.verify(ids, cache).logits[0]


def _distance(target: BlockTarget, got: Tensor, wanted: Tensor) -> str | None:
    got, wanted = got.float(), wanted.float()
    distance = ((got - wanted).norm(dim=-1) / wanted.norm(dim=-1)).max().item()
    # Rounding stays far below; a state that is dropped, doubled or updated by another rule does not.
    return (
        None
        if distance <= (2e-4 if target.dtype == torch.float32 else 0.2)
        else f"logits off by {distance:.0e} of their norm"
    )
