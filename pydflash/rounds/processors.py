"""Logits processors inside a block: called once for each position that is emitted, in order, as plain decoding does."""

from __future__ import annotations

import torch
from torch import Tensor

from ..request import Request
from ..tree import tree_of
from .paths import Block
from .round import Parts, accept


def process(parts: Parts, request: Request, block: Block, logits: Tensor, starts: Tensor) -> Tensor:
    """The logits [1, S, V] of a block, changed by a request's processors where the target's path leads.

    The path is walked slot by slot with the draws that `accept` will make: a slot whose token is not emitted, or stands
    behind a stop, meets no processor. So one with a state sees what it sees in plain decoding, whatever the drafts.

    starts: [1] position of the anchor.
    """
    if not request.processors:
        return logits
    out = logits.float().clone()
    parents = range(-1, block.tokens.shape[1] - 1) if block.parents is None else block.parents[0].tolist()
    tokens = block.tokens[0].tolist()
    trunk = 0 if block.q is None else block.q[0].shape[1]  # slots 1 .. trunk are a chain that was drawn from q
    slot, depth = 0, 0
    new: list[int] = []
    while True:
        out[:, slot] = request.scores(logits[:, slot], new)
        children = [child for child, parent in enumerate(parents) if parent == slot and tokens[child] >= 0]
        if not children:
            return out
        q = None
        if slot == depth < trunk and block.q is not None:
            q = (block.q[0][:, slot : slot + 1], block.q[1][:, slot : slot + 1])
        here = torch.tensor([slot, *children], device=logits.device)
        tree = None if len(children) == 1 else tree_of([-1] + [0] * len(children), logits.device)
        step = Block(block.tokens[:, here], tree, q)
        taken = accept(parts, step, out[:, here], request.sampling, starts + depth)
        if not int(taken.num_accepted):
            return out
        slot = int(here[taken.slots[0, 1]])
        depth += 1
        new.append(tokens[slot])
        if request.output.ends_with(new):
            return out
