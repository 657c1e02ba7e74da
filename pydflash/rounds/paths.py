"""Which drafts of a proposal go into the block: the walk, the best path through the lattice, or a tree of paths."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from ..protocols import Proposal
from ..sampling import is_integer
from ..tree import Tree

PATHS = ("walk", "viterbi", "tree")
MOST_NODES = 63
_SIZES = (15, 31, 63)  # what "auto" chooses from, beside a tree as large as the chain
# Tokens a round by the number of nodes, against a walk of 7 drafts: docs/trees.md, greedy, 200 prompts.
_TYPICAL = ((0, 1.0), (15, 1.26), (31, 1.36), (63, 1.44))


class Block(NamedTuple):
    """Slots to verify.

    Attributes:
        tokens: [B, S], the anchor first.
        tree: Their shape, None for a chain.
        q: (ids [B, W, K], probs [B, W, K]), the law that the drafts of slots 1..W were drawn from one after the other,
            or None where they were chosen.
    """

    tokens: Tensor
    tree: Tree | None
    q: tuple[Tensor, Tensor] | None = None

    @property
    def parents(self) -> Tensor | None:
        """[B, S] int32 of a tree."""
        return None if self.tree is None else self.tree.parents

    def row(self, b: int) -> Block:
        """Sequence b alone."""
        its = slice(b, b + 1)
        tree = None if self.tree is None else Tree(*(x if len(x) == 1 else x[its] for x in self.tree))
        return Block(self.tokens[its], tree, None if self.q is None else (self.q[0][its], self.q[1][its]))


def lattice_nodes(slots: int, candidates: int) -> int:
    """How many nodes a tree over `slots` drafting slots can have at most, 63 where there are more."""
    total, level = 0, 1
    for _ in range(slots):
        level *= candidates
        total += level
        if total >= MOST_NODES:
            return MOST_NODES
    return total


class Paths:
    """Makes the block of each round.

    Args:
        path: "walk" takes the drafter's own walk, "viterbi" the path with the highest probability, "tree" the
            `num_nodes` most probable nodes, best first.
        num_nodes: 1 to 63 drafts, or "auto", which is one rule: of a few sizes the one with the most expected tokens
            per second of a round, `best_size`. The seconds are measured at construction. Where the host sees every
            round, the expected tokens are those of the round's own nodes, and every round has its size; rounds of
            fixed shape have one size, by the tokens that trees of a size typically bring (`typical_tokens`).
        slots: Drafting slots of a block.
        candidates: Candidates of a slot.

    Raises: ValueError for what does not go together.
    """

    def __init__(self, path: str, num_nodes: int | str | None, slots: int, candidates: int) -> None:
        if path not in PATHS:
            raise ValueError(f"Speculator: path must be one of {', '.join(map(repr, PATHS))}, got {path!r}")
        if path != "tree" and num_nodes is not None:
            raise ValueError(f"Speculator: num_nodes must be None where path is {path!r}, got {num_nodes!r}")
        limit = lattice_nodes(slots, candidates)
        if num_nodes is None and path == "tree":
            num_nodes = "auto"
        self.auto = num_nodes == "auto"
        if self.auto:
            num_nodes = limit
        elif num_nodes is not None and not (is_integer(num_nodes) and 1 <= int(num_nodes) <= limit):
            raise ValueError(
                f"Speculator: num_nodes must be 'auto' or 1 to {limit} ({slots} slots of {candidates} candidates), "
                f"got {num_nodes!r}"
            )
        self.path, self.slots, self.num_nodes = path, slots, int(num_nodes or 0)
        self.seconds: dict[int, float] = {}  # of a round, by the size of its tree
        self.by_round = False

    @property
    def rows(self) -> int:
        """Slots of the largest block, anchor included."""
        return 1 + (self.num_nodes if self.path == "tree" else self.slots)

    def block(self, ops: ModuleType, anchors: Tensor, proposal: Proposal, slots: int, temperature: Tensor) -> Block:
        """The block after `anchors` [B] from the first `slots` drafting slots of a proposal.

        temperature: [B], at which nodes and paths are weighed. A tree over drafts that were sampled has their walk as
        its trunk: what was drawn from q may not be chosen after the fact.
        """
        q = None if proposal.probs is None else (proposal.candidates[:, :slots], proposal.probs[:, :slots])
        if self.path == "walk":
            return Block(torch.cat([anchors[:, None], proposal.tokens[:, :slots]], 1), None, q)
        scores = proposal.scores[:, :slots]
        scores = scores / temperature.view(-1, *[1] * (scores.dim() - 1))
        lattice = proposal.candidates[:, :slots], scores
        normalizers = None if proposal.log_normalizers is None else proposal.log_normalizers[:, :slots]
        if self.path == "viterbi":
            tokens, _ = ops.path_viterbi(*lattice, normalizers)
            return Block(torch.cat([anchors[:, None], tokens], 1), None)
        nodes = min(self.num_nodes, lattice_nodes(slots, proposal.candidates.shape[-1]))
        tree = None
        if self.by_round:
            tree = ops.path_tree(anchors, *lattice, nodes, normalizers)
            nodes = self._size_of(tree[-1][0])
        if tree is None or q is not None:
            width = min(slots, nodes)
            trunk = None if q is None else proposal.tokens[:, :width]
            tree = ops.path_tree(anchors, *lattice, nodes, normalizers, trunk)
            q = None if q is None else (q[0][:, :width], q[1][:, :width])
        tokens, *shape, _ = (x[:, : nodes + 1] for x in tree)
        return Block(tokens, Tree(*shape), q)

    def sizes(self) -> list[int]:
        """The sizes that "auto" chooses from."""
        return sorted({min(size, self.num_nodes) for size in (self.slots, *_SIZES)})

    def settle(self, seconds: dict[int, float], *, by_round: bool) -> None:
        """Take the measured seconds of a round with a tree of each of `sizes`, and choose: in every round, or now."""
        self.seconds, self.by_round = seconds, by_round
        if not by_round:
            sizes = list(seconds)
            self.num_nodes = best_size([typical_tokens(size) for size in sizes], seconds)

    def _size_of(self, log_probs: Tensor) -> int:
        """The size of this round's tree; a tree's first nodes are the smaller tree. log_probs: [1 + nodes]."""
        expected = log_probs.exp().cumsum(0).tolist()  # the anchor's 1 is the bonus token
        seconds = {size: spent for size, spent in self.seconds.items() if size < len(expected)}
        return best_size([expected[size] for size in seconds], seconds) if seconds else len(expected) - 1

    @property
    def description(self) -> str | None:
        """A line for `stats.backends`, where there is a tree."""
        if self.path != "tree":
            return None
        if self.by_round:
            return f"{', '.join(map(str, self.seconds))} nodes, chosen in every round"
        return f"{self.num_nodes} nodes{', chosen once' if self.auto else ''}"


def best_size(expected: Sequence[float], seconds: dict[int, float]) -> int:
    """The size with the most expected tokens per second; `expected` in the order of `seconds`, a round's by size."""
    rates = {size: tokens / seconds[size] for size, tokens in zip(seconds, expected, strict=True)}
    return max(rates, key=rates.__getitem__)


def typical_tokens(size: int) -> float:
    """Tokens of a round with a tree of `size` nodes, against a walk: of the largest measured tree that is no larger."""
    return [tokens for nodes, tokens in _TYPICAL if nodes <= size][-1]
