"""What one generation did, in numbers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple


class TokenLogprob(NamedTuple):
    """What the target thought of an emitted token.

    Attributes:
        token_id, logprob: The token and its log-probability, by the logits as the model gives them.
        top: (token id, log-probability) of the most probable tokens, best first.
    """

    token_id: int
    logprob: float
    top: list[tuple[int, float]]


@dataclass(slots=True)
class Stats:
    """Counts and times of one request.

    The prefill's token belongs to no round, and what is cut at the end counts nowhere, so
    `sum(n + 1 for n in num_accepted) + 1` is the number of new tokens.

    Attributes:
        prompt_tokens: Length of the prompt.
        num_drafted: Drafts that could have been kept in each round: the chain's, or those of a tree's longest path.
        num_verified: Drafts that went through the target in each round: the chain's, or a tree's nodes.
        num_accepted: Drafts kept in each round, the bonus token excluded.
        prefill_seconds: From the start to the first token, drafter's context excluded.
        decode_seconds: From the first token to the last.
        backends: Which implementation ran each part.
        peak_bytes: The most memory that torch has held on the target's GPU so far, None on a CPU.
        proposals: The block [anchor, drafts...] of each round, where asked for; a tree's with its parents, as a pair.
    """

    prompt_tokens: int = 0
    num_drafted: list[int] = field(default_factory=list)
    num_accepted: list[int] = field(default_factory=list)
    num_verified: list[int] = field(default_factory=list)
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    backends: dict[str, str] = field(default_factory=dict)
    peak_bytes: int | None = None
    proposals: list[Any] | None = None

    @property
    def rounds(self) -> int:
        return len(self.num_accepted)

    @property
    def new_tokens(self) -> int:
        """Tokens emitted by rounds, the prefill's token not among them."""
        return sum(self.num_accepted) + self.rounds

    @property
    def acceptance_length(self) -> float:
        """Mean tokens per round, the bonus token included; nan without a round."""
        return self.new_tokens / self.rounds if self.rounds else float("nan")

    @property
    def slot_acceptance(self) -> list[float]:
        """For each drafting slot, the share of the rounds that drafted it in which it was kept."""
        slots = max(self.num_drafted, default=0)
        kept = []
        for slot in range(1, slots + 1):
            rounds = [n for n, drafted in zip(self.num_accepted, self.num_drafted, strict=True) if drafted >= slot]
            kept.append(sum(n >= slot for n in rounds) / len(rounds))
        return kept

    @property
    def tokens_per_second(self) -> float:
        """Decoding speed: tokens of all rounds over `decode_seconds`; nan without a round."""
        return self.new_tokens / self.decode_seconds if self.rounds and self.decode_seconds > 0 else float("nan")

    def summary(self) -> str:
        """One line for people."""
        if not self.rounds:
            return f"{self.prompt_tokens} prompt tokens, no rounds"
        line = (
            f"{self.new_tokens + 1} tokens in {self.prefill_seconds + self.decode_seconds:.2f} s "
            f"({self.tokens_per_second:.1f} tok/s after the first), {self.rounds} rounds"
        )
        if any(self.num_drafted):
            line += f", acceptance length {self.acceptance_length:.2f}"
        if sum(self.num_verified) > sum(self.num_drafted):  # a tree's
            line += f", {sum(self.num_verified) / self.rounds:.0f} nodes a round"
        return line
