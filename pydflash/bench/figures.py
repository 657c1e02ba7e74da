"""What `pydflash bench` computes from answers: acceptance, speed, loops, and paired comparisons of two methods."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .methods import DraftPath

LOOP_TOKENS = 20
LONGEST_PERIOD = 16
ALL = "all"  # the name of all prompt sets together


def longest_loop(ids: Sequence[int]) -> int:
    """Tokens of the longest stretch that repeats one token, or one n-gram of up to 16 tokens, three times or more.

    >>> longest_loop([5, 7, 7, 7, 7])
    4
    >>> longest_loop([1, 2, 1, 2])
    0
    """
    longest = 0
    for period in range(1, min(LONGEST_PERIOD, len(ids) // 3) + 1):
        run = 0
        for i in range(period, len(ids)):
            run = run + 1 if ids[i] == ids[i - period] else 0
            if run >= 2 * period:
                longest = max(longest, run + period)
    return longest


@dataclass(frozen=True, slots=True)
class Answered:
    """One answer.

    Attributes:
        prompt: Name of the prompt's set, and its number there.
        tokens, seconds: Of the whole answer, prefill included.
        accepted, drafted, verified: Per round after the prefill; empty where the method reports no rounds.
        loop: Tokens of its longest loop.
    """

    prompt: tuple[str, int]
    tokens: int
    seconds: float
    accepted: tuple[int, ...]
    drafted: tuple[int, ...]
    verified: tuple[int, ...]
    loop: int

    @property
    def loops(self) -> bool:
        """Whether the text degenerates. Such an answer counts neither in the acceptance nor in the speed."""
        return self.loop >= LOOP_TOKENS

    @property
    def acceptance_length(self) -> float | None:
        """Tokens per round; None without a round."""
        return sum(self.accepted) / len(self.accepted) + 1 if self.accepted else None


@dataclass(slots=True)
class Cell:
    """The answers of one method to one prompt set at one temperature."""

    method: str
    prompts: str
    temperature: float
    answers: list[Answered] = field(default_factory=list)

    def kept(self) -> list[Answered]:
        """The answers that do not loop."""
        return [a for a in self.answers if not a.loops]

    def slots(self) -> list[float]:
        """For each drafting slot, a tree's by depth, the share of the rounds that drafted it in which it was kept."""
        rounds = [pair for a in self.kept() for pair in zip(a.accepted, a.drafted, strict=True)]
        shares = []
        for slot in range(1, max((drafted for _, drafted in rounds), default=0) + 1):
            there = [accepted for accepted, drafted in rounds if drafted >= slot]
            shares.append(sum(accepted >= slot for accepted in there) / len(there))
        return shares

    def report(self, path: DraftPath | None = None) -> dict[str, Any]:
        """The figures as plain data: of the answers that do not loop, nan where there are none.

        path: what our loop verifies, None for plain decoding and for methods that are not ours.
        """
        from ..training.evaluate import bootstrap

        kept = self.kept()
        lengths = [a.acceptance_length for a in kept if a.acceptance_length is not None]
        looping = [a.acceptance_length for a in self.answers if a.loops and a.acceptance_length is not None]
        accepted = [n for a in kept for n in a.accepted]
        seconds = sum(a.seconds for a in kept)
        return {
            "method": self.method,
            "drafter": path and path.drafter,
            "path": path and path.path,
            "num_nodes": path and path.num_nodes,
            "prompts": self.prompts,
            "temperature": self.temperature,
            "requests": len(kept),
            "loops": len(self.answers) - len(kept),
            "longest_loop": max((a.loop for a in self.answers), default=0),
            "acceptance_length": _mean(lengths),
            "interval": bootstrap(lengths),
            "pooled_acceptance_length": 1 + _mean(accepted),
            "looping_acceptance_length": _mean(looping),
            "num_verified": _mean([n for a in kept for n in a.verified]),
            "slot_acceptance": self.slots(),
            "tokens_per_second": sum(a.tokens for a in kept) / seconds if seconds else math.nan,
            "per_request": [
                {
                    "set": a.prompt[0],
                    "prompt": a.prompt[1],
                    "acceptance_length": a.acceptance_length,
                    "longest_loop": a.loop,
                    "tokens": a.tokens,
                    "rounds": len(a.accepted),
                    "seconds": a.seconds,
                }
                for a in self.answers
            ],
        }


def with_totals(cells: Sequence[Cell]) -> list[Cell]:
    """The cells, and where there are several sets one more for each method and temperature, over all of them."""
    out: list[Cell] = []
    for temperature in dict.fromkeys(cell.temperature for cell in cells):
        here = [cell for cell in cells if cell.temperature == temperature]
        out += here
        if len({cell.prompts for cell in here}) > 1:
            for method in dict.fromkeys(cell.method for cell in here):
                parts = [cell.answers for cell in here if cell.method == method]
                out.append(Cell(method, ALL, temperature, [a for part in parts for a in part]))
    return out


def compare_acceptance(cell: Cell, base: Cell) -> dict[str, Any]:
    """Acceptance length of `cell` less that of `base`, over the prompts that both answered without a loop."""
    from ..training.evaluate import paired

    pairs = _pairs(cell, base)
    straight = [(a, b) for a, b in pairs if not (a.loops or b.loops)]
    found = paired([a.acceptance_length for a, _ in straight], [b.acceptance_length for _, b in straight])
    return _of(cell, base, len(pairs) - len(straight)) | {
        "difference": found.difference,
        "interval": found.interval,
        "pairs": found.pairs,
    }


def compare_speed(cell: Cell, base: Cell, resamples: int = 2000) -> dict[str, Any]:
    """Tokens per second of `cell` over those of `base`, on the prompts that both answered without a loop.

    Sums over prompts on both sides; the 95 % interval is a percentile bootstrap over prompts with a fixed seed.
    """
    import torch

    pairs = _pairs(cell, base)
    straight = [(a, b) for a, b in pairs if not (a.loops or b.loops)]
    ratio, interval = math.nan, (math.nan, math.nan)
    if straight:
        x = torch.tensor([(a.tokens, b.seconds, a.seconds, b.tokens) for a, b in straight], dtype=torch.float64)
        chosen = torch.randint(0, len(x), (resamples, len(x)), generator=torch.Generator().manual_seed(0))

        def of(sums: torch.Tensor) -> torch.Tensor:
            return sums[..., 0] * sums[..., 1] / (sums[..., 2] * sums[..., 3])

        ratio = float(of(x.sum(0)))
        low, high = of(x[chosen].sum(1)).quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
        interval = low, high
    return _of(cell, base, len(pairs) - len(straight)) | {
        "ratio": ratio,
        "interval": interval,
        "pairs": len(straight),
    }


def comparisons(
    cells: Sequence[Cell], first_drafter: str, plain: str, walks: Mapping[str, str]
) -> dict[str, list[dict[str, Any]]]:
    """Every pair of methods that is compared, at every place.

    Args:
        walks: The walk of the same drafter, for each method that is ours; a walk stands for itself.

    Returns: `acceptance`: every walk and peer that drafts against the first drafter; `speed`: every method against
    plain; `walk_acceptance` and `walk_speed`: trees and Viterbi paths against the walk of their drafter.
    """
    at = {(cell.method, cell.prompts, cell.temperature): cell for cell in cells}
    found: dict[str, list[dict[str, Any]]] = {
        name: [] for name in ("acceptance", "speed", "walk_acceptance", "walk_speed")
    }
    for cell in cells:
        if cell.method == plain:
            continue
        walk = at[walks.get(cell.method, cell.method), cell.prompts, cell.temperature]
        if walk is not cell:
            found["walk_acceptance"].append(compare_acceptance(cell, walk))
            found["walk_speed"].append(compare_speed(cell, walk))
        elif cell.method != first_drafter and any(a.accepted for a in cell.answers):
            first = at[first_drafter, cell.prompts, cell.temperature]
            found["acceptance"].append(compare_acceptance(cell, first))
        found["speed"].append(compare_speed(cell, at[plain, cell.prompts, cell.temperature]))
    return found


def _pairs(cell: Cell, base: Cell) -> list[tuple[Answered, Answered]]:
    """Both answers of every prompt that both have answered; a run that was broken off has them for some."""
    other = {b.prompt: b for b in base.answers}
    return [(a, other[a.prompt]) for a in cell.answers if a.prompt in other]


def _of(cell: Cell, base: Cell, left_out: int) -> dict[str, Any]:
    return {
        "method": cell.method,
        "against": base.method,
        "prompts": cell.prompts,
        "temperature": cell.temperature,
        "loops": left_out,
    }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan
