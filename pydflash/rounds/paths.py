"""Which drafts of a proposal go into the block: the walk, the best path through the lattice, or a tree of paths."""

from __future__ import annotations

import statistics
import time
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..drafter.module import Proposal
from ..ops import backends
from ..tree import Tree, tree_of

PATHS = ("walk", "viterbi", "tree")
MOST_NODES = 63
_SIZES = (15, 31, 63)  # what "auto" chooses from, beside a tree as large as the chain
_TRIALS = 3
# Tokens a round by the number of nodes, against a walk of 7 drafts: docs/trees.md, greedy, 200 prompts.
_TYPICAL = {15: 1.26, 31: 1.36, 63: 1.44}


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
        num_nodes: 1 to 63 drafts, or "auto": in each round the number that promises most tokens per second, by the
            nodes' own probabilities and the time that the target takes for so many slots.
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
        elif num_nodes is not None and (type(num_nodes) is not int or not 1 <= num_nodes <= limit):
            raise ValueError(
                f"Speculator: num_nodes must be 'auto' or 1 to {limit} ({slots} slots of {candidates} candidates), "
                f"got {num_nodes!r}"
            )
        self.path, self.slots, self.num_nodes = path, slots, int(num_nodes or 0)
        self.costs: dict[int, float] = {}

    @property
    def rows(self) -> int:
        """Slots of the largest block, anchor included."""
        return 1 + (self.num_nodes if self.path == "tree" else self.slots)

    def block(
        self, ops: ModuleType, anchors: Tensor, proposal: Proposal, slots: int, temperature: Tensor | float = 1.0
    ) -> Block:
        """The block after `anchors` [B] from the first `slots` drafting slots of a proposal.

        temperature: At which nodes and paths are weighed, [B] or a number. A tree over drafts that were sampled has
        their walk as its trunk: what was drawn from q may not be chosen after the fact.
        """
        q = None if proposal.probs is None else (proposal.candidates[:, :slots], proposal.probs[:, :slots])
        if self.path == "walk":
            return Block(torch.cat([anchors[:, None], proposal.tokens[:, :slots]], 1), None, q)
        scores = proposal.scores[:, :slots]
        if isinstance(temperature, Tensor):
            scores = scores / temperature.view(-1, *[1] * (scores.dim() - 1))
        elif temperature != 1:
            scores = scores / temperature
        lattice = proposal.candidates[:, :slots], scores
        normalizers = None if proposal.log_normalizers is None else proposal.log_normalizers[:, :slots]
        if self.path == "viterbi":
            tokens, _ = ops.path_viterbi(*lattice, normalizers)
            return Block(torch.cat([anchors[:, None], tokens], 1), None)
        nodes = min(self.num_nodes, lattice_nodes(slots, proposal.candidates.shape[-1]))
        found = None
        if self.auto:
            found = ops.path_tree(anchors, *lattice, nodes, normalizers)
            nodes = self._best_size(found[-1][0])
        if found is None or q is not None:
            width = min(slots, nodes)
            trunk = None if q is None else proposal.tokens[:, :width]
            found = ops.path_tree(anchors, *lattice, nodes, normalizers, trunk)
            q = None if q is None else (q[0][:, :width], q[1][:, :width])
        tokens, *shape, _ = (x[:, : nodes + 1] for x in found)
        return Block(tokens, Tree(*shape), q)

    def _best_size(self, log_probs: Tensor) -> int:
        """The number of nodes with the most expected tokens per second; a tree's first nodes are the smaller tree."""
        expected = log_probs.exp().cumsum(0).tolist()  # the anchor's 1 is the bonus token
        sizes = [size for size in self.costs if size < len(expected)] or [len(expected) - 1]
        return max(sizes, key=lambda size: expected[size] / self.costs.get(size, 1.0))

    def sizes(self) -> list[int]:
        """The sizes that "auto" chooses from."""
        return sorted({min(size, self.num_nodes) for size in (self.slots, *_SIZES)})

    def settle(self, costs: dict[int, float]) -> None:
        """Choose one size for all rounds, where a round cannot choose: by the seconds that each takes the target."""
        self.costs, self.auto = costs, False
        self.num_nodes = max(costs, key=lambda size: _TYPICAL.get(size, 1.0) / costs[size])

    def measure(self, target: Any, draft_seconds: float) -> None:
        """Time the target's forward for the sizes "auto" chooses from; `draft_seconds` is the rest of a round."""
        sizes = self.sizes()
        ids = torch.full((1, 64), 1, device=target.device)
        room = target.max_length or 256
        cache = target.new_cache(1, 256)
        target.prefill(ids[:, : max(1, min(64, room - self.slots - 1))], cache)
        times: dict[int, list[float]] = {size: [] for size in sizes}
        for trial in range(_TRIALS + 1):
            for size in sizes:
                seconds = _verify_seconds(target, cache, bushy(size, self.slots), ids)
                if trial:
                    times[size].append(seconds)
        self.costs = {size: statistics.median(found) + draft_seconds for size, found in times.items()}


def bushy(nodes: int, depth: int) -> list[int]:
    """Parents of a tree of `nodes` drafts: a chain down to `depth`, the others below the anchor."""
    chain = min(nodes, depth)
    return [-1, *range(chain), *[0] * (nodes - chain)]


def _verify_seconds(target: Any, cache: Any, parents: list[int], ids: Tensor) -> float:
    tree = tree_of(parents, target.device)
    begin = time.perf_counter()
    target.verify(ids[:, : len(parents)], cache, tree)
    index = torch.full((1, len(parents)), -1, dtype=torch.int32, device=target.device)
    index[0, 0] = 0
    length = cache.length
    target.commit(cache, index, index.new_zeros(1))
    if (accelerator := backends.accelerator(target.device)) is not None:
        accelerator.synchronize(target.device)
    seconds = time.perf_counter() - begin
    cache.advance(length - cache.length)
    return seconds
