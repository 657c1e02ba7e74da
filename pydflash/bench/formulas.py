"""What speculative decoding promises, from acceptance by slot and from times; checked as doctests.

Source: Leviathan et al., "Fast inference from transformers via speculative decoding", 2023, for the speed-up.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from operator import mul


def expected_length(acceptance: Sequence[float]) -> float:
    """Tokens that a round brings, the bonus token included: 1 + a1 + a1 a2 + ...

    acceptance: for each drafting slot, how often its draft is kept where the slot before it was.

    >>> expected_length([0.8, 0.5])
    2.2
    >>> expected_length([])
    1.0
    """
    return 1.0 + sum(accumulate(acceptance, mul))


def speed_up(length: float, round_seconds: float, plain_seconds: float) -> float:
    """How many times faster than plain decoding rounds of `length` tokens are.

    round_seconds: a draft and a verification; plain_seconds: one token of plain decoding.

    >>> speed_up(4.15, 0.0673, 0.0633)
    3.903...
    """
    return length * plain_seconds / round_seconds


def break_even(round_seconds: float, plain_seconds: float) -> float:
    """The acceptance length at which a round is as fast as plain decoding.

    >>> break_even(0.006, 0.004)
    1.5
    """
    return round_seconds / plain_seconds
