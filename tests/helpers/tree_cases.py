"""Trees of drafts of any shape, filled with right and wrong tokens."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from pairs import VOCAB

Fill = Callable[[random.Random, list[int], int], int]


def random_parents(draw: random.Random, nodes: int, depth: int = 6) -> list[int]:
    """Any shape: each node below any earlier one that is not too deep."""
    parents, depths = [-1], [0]
    for _ in range(nodes):
        parent = draw.choice([i for i, d in enumerate(depths) if d < depth])
        parents.append(parent)
        depths.append(depths[parent] + 1)
    return parents


def right(draw: random.Random, text: list[int], at: int) -> int:
    return text[at] if at < len(text) else 0


def wrong(draw: random.Random, text: list[int], at: int) -> int:
    return (right(draw, text, at) + 1 + draw.randrange(VOCAB - 2)) % VOCAB


def mixed(draw: random.Random, text: list[int], at: int) -> int:
    return right(draw, text, at) if draw.random() < 0.6 else draw.randrange(VOCAB)


def filled(draw: random.Random, parents: Sequence[int], anchor: int, text: list[int], at: int, fill: Fill) -> list[int]:
    """Tokens for a tree: `fill` names the one for its place in the text; siblings differ."""
    depths, tokens = [0], [anchor]
    for slot, parent in enumerate(parents[1:], 1):
        depths.append(depths[parent] + 1)
        taken = {tokens[i] for i in range(1, slot) if parents[i] == parent}
        token = fill(draw, text, at + depths[slot] - 1)
        while token in taken or (fill is wrong and token == right(draw, text, at + depths[slot] - 1)):
            token = draw.randrange(VOCAB)
        tokens.append(token)
    return tokens
