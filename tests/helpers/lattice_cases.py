"""Random lattices for the tests of path_tree and path_viterbi, and every node of them in float64."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
from matching import assert_matches
from torch import Tensor

from pydflash import ops

Arguments = dict[str, Any]
Path = tuple[int, ...]  # candidate indices from the anchor on
KINDS = ("edges", "slots", "normalized")
NAMES = ("tokens", "parents", "depths", "visibility", "log_probs")


def lattice_case(
    batch: int, slots: int, top_k: int, kind: str, values: str = "normal", dtype: Any = torch.float32, seed: int = 0
) -> Arguments:
    """A random lattice. The rows of the first slot differ: only row 0 belongs to the anchor.

    `kind`: "edges" is [B, S-1, K, K], "slots" is [B, S-1, K], "normalized" that with log-normalizers. `values`:
    "normal", "ties" (integers, normalizers too), "equal", "broken" (NaN and -inf) or "infinite" (also +inf).
    """
    generator = torch.Generator().manual_seed(seed)
    square = (top_k,) if kind == "edges" else ()
    scores = 2 * torch.randn(batch, slots, *square, top_k, generator=generator)
    normalizers = scores.logsumexp(-1) + 0.3
    if values in ("ties", "equal"):
        scores = scores.round() if values == "ties" else torch.zeros_like(scores)
        normalizers = scores.logsumexp(-1).ceil()
    elif values != "normal":
        choice = torch.rand(scores.shape, generator=generator)
        scores = scores.masked_fill(choice < 0.2, torch.nan).masked_fill(choice > 0.7, -torch.inf)
        if values == "infinite":
            scores = scores.masked_fill(choice.sub(0.25).abs() < 0.05, torch.inf)
            normalizers = normalizers.masked_fill(torch.rand(normalizers.shape, generator=generator) < 0.2, torch.nan)
    candidates = torch.rand(batch, slots, 3 * top_k, generator=generator).argsort(-1)[..., :top_k]
    return {
        "anchors": torch.randint(1000, (batch,), generator=generator),
        "candidates": candidates,
        "scores": scores.to(dtype),
        "log_normalizers": normalizers if kind == "normalized" else None,
    }


def on(case: Arguments, device: torch.device) -> Arguments:
    return {name: None if value is None else value.to(device) for name, value in case.items()}


def tree(case: Arguments, num_nodes: int, module: ModuleType = ops) -> dict[str, Tensor]:
    outputs = module.path_tree(**case, num_nodes=num_nodes)
    return dict(zip(NAMES, (t.cpu() for t in outputs), strict=True))


def viterbi(case: Arguments, module: ModuleType = ops) -> tuple[Tensor, Tensor]:
    tokens, log_probs = module.path_viterbi(case["candidates"], case["scores"], case["log_normalizers"])
    return tokens.cpu(), log_probs.cpu()


def log_probability(case: Arguments, b: int, path: Path) -> float:
    """The cumulative log-probability of a node, in float64, from the definition of an edge alone."""
    total = 0.0
    for slot, candidate in enumerate(path):
        row = case["scores"][b, slot].double().nan_to_num(-math.inf, math.inf, -math.inf)
        if row.dim() == 2:
            row = row[path[slot - 1] if slot else 0]
        if case["log_normalizers"] is not None:
            edges = row - case["log_normalizers"][b, slot].double()
        else:
            edges = torch.log_softmax(row, -1).nan_to_num(-math.inf, math.inf, -math.inf)
        total += edges[candidate].item()
    return total


def every_path(case: Arguments, depth: int) -> list[Path]:
    return list(itertools.product(range(case["candidates"].shape[2]), repeat=depth))


def best_nodes(case: Arguments, b: int, num_nodes: int, exact: bool, trunk: Sequence[Path] = ()) -> list[Path]:
    """The trunk and all other nodes of the lattice in the order of taking, cut: by log-probability, then depth, parent
    and token id.
    """
    candidates = case["candidates"][b].tolist()
    digits = 12 if exact else 9  # sums of the same edges in another order are ties
    order = {}
    for depth in range(1, len(candidates) + 1):
        for path in every_path(case, depth):
            order[path] = (-round(log_probability(case, b, path), digits), depth)
    rank: dict[Path, int] = {path: i for i, path in enumerate([(), *trunk])}
    # A parent is of the trunk or stands in an earlier group than its children, so its rank is known.
    for _, group in itertools.groupby(sorted(order, key=order.__getitem__), key=order.__getitem__):
        for path in sorted(group, key=lambda path: (rank[path[:-1]], candidates[len(path) - 1][path[-1]])):
            rank.setdefault(path, len(rank))
    return sorted(rank, key=rank.__getitem__)[1 : num_nodes + 1]


def taken_nodes(case: Arguments, got: dict[str, Tensor], b: int) -> list[Path]:
    """Checks the form of one row's tree and returns its nodes as paths."""
    tokens, parents, depths, visibility = (got[name][b].tolist() for name in NAMES[:4])
    assert (tokens[0], parents[0], depths[0], visibility[0]) == (case["anchors"][b].item(), -1, 0, 1)
    paths: list[Path] = [()]
    for slot in range(1, len(tokens)):
        assert 0 <= parents[slot] < slot
        candidates = case["candidates"][b, len(paths[parents[slot]])].tolist()
        paths.append((*paths[parents[slot]], candidates.index(tokens[slot])))
        assert depths[slot] == len(paths[slot])
        line, bits = slot, 0
        while line >= 0:
            bits += 2**line
            line = parents[line]
        assert visibility[slot] % 2**64 == bits
    assert len(set(paths)) == len(paths)  # no node twice: siblings carry distinct tokens
    return paths[1:]


def assert_log_probs(case: Arguments, got: dict[str, Tensor], b: int, paths: list[Path]) -> None:
    want = torch.tensor([0.0] + [log_probability(case, b, path) for path in paths], dtype=torch.float64)
    finite = want.isfinite()
    assert torch.equal(got["log_probs"][b][~finite].double(), want[~finite])
    assert_matches(got["log_probs"][b][finite], want[finite])
