"""Sampling parameters of a request: checked, and filled in from the target's own generation config."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .messages import shown

MOST_TEMPERATURE = 1e30  # above it, float32 arithmetic on logits / temperature means nothing

MOST_PENALTY = 1e30  # above it, and below its inverse, float32 has no room for a penalised logit


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the target's law is sampled.

    Attributes:
        temperature: 0 is greedy.
        top_k: 0 is off; exactly k tokens survive ties, lower id first.
        top_p: 1 is off; a token stays while the mass before it is below top_p.
        min_p: 0 is off; tokens below min_p times the best one's probability go.
        repetition_penalty: 1 is off; logits of tokens in prompt or text are divided by it, or multiplied below 0.
        presence_penalty, frequency_penalty: 0 is off; taken off the logits of tokens of the new text, once or as often
            as they stand there.

    Raises: ValueError naming the parameter, what is allowed and what came.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0

    def __post_init__(self) -> None:
        for name, high in (("temperature", float("inf")), ("min_p", 1.0), ("top_p", 1.0)):
            value: Any = getattr(self, name)
            if not (_is_number(value) and 0.0 <= value <= high):
                raise ValueError(f"sampling: {name} must be a number from 0 to {high:g}, got {shown(value)}")
            if value > MOST_TEMPERATURE:  # before a conversion that may overflow
                raise ValueError(
                    f"sampling: temperature must be finite, at most {MOST_TEMPERATURE:g}, got {shown(value)}"
                )
            object.__setattr__(self, name, float(value))
        for name in ("repetition_penalty", "presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            if not (_is_number(value) and -MOST_PENALTY <= value <= MOST_PENALTY):
                raise ValueError(
                    f"sampling: {name} must be a finite number of at most {MOST_PENALTY:g} in size, got {shown(value)}"
                )
            object.__setattr__(self, name, float(value))
        if self.repetition_penalty < 1 / MOST_PENALTY:
            raise ValueError(
                f"sampling: repetition_penalty must be above 0, at least {1 / MOST_PENALTY:g}, "
                f"got {shown(self.repetition_penalty)}"
            )
        if self.top_p == 0:
            raise ValueError("sampling: top_p must be above 0, got 0")
        if not is_integer(self.top_k) or self.top_k < 0:
            raise ValueError(f"sampling: top_k must be an integer >= 0, got {shown(self.top_k)}")
        if self.top_k >= 2**31:
            raise ValueError(f"sampling: top_k must be below 2**31, got {shown(self.top_k)}")
        object.__setattr__(self, "top_k", int(self.top_k))

    @property
    def greedy(self) -> bool:
        return self.temperature <= 0

    @property
    def penalised(self) -> bool:
        """Whether the law of a token depends on the tokens before it beyond the target's logits."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)

    @classmethod
    def resolve(
        cls,
        defaults: dict[str, Any],
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        **penalties: float,
    ) -> SamplingParams:
        """Fill what is None from `defaults`, the options that a generation config sets explicitly.

        A config that does not sample (`do_sample` false or absent) gives temperature 0.
        """
        if temperature is None:
            stated = defaults.get("temperature")
            temperature = 0.0 if not defaults.get("do_sample") else 1.0 if stated is None else stated
        if top_k is None:
            top_k = defaults.get("top_k") or 0
        if top_p is None:
            top_p = 1.0 if defaults.get("top_p") is None else defaults["top_p"]
        if min_p is None:
            min_p = defaults.get("min_p") or 0.0
        return cls(temperature, top_k, top_p, min_p, **penalties)


def is_integer(value: object) -> bool:
    """Whether it is a whole number, numpy's too; True and False are none."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


class SamplingTensors(NamedTuple):
    """How B sequences are sampled, one entry each: from a request to the kernels (`path_select`, `reject_sample`).

    Attributes:
        temperature, top_p, min_p: [B] float32, as in `SamplingParams`.
        top_k: [B] int32.
        seeds: [B] int64, the key of every draw.
        node_temperature: [B] float32, at which paths and nodes of a tree are weighed: the temperature, 1 where greedy.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seeds: Tensor
    node_temperature: Tensor

    @classmethod
    def of(cls, params: SamplingParams, seed: int, device: torch.device | str | None = None) -> SamplingTensors:
        """One sequence's. seed: 64 bits, signed."""
        temperatures = torch.tensor([[params.temperature], [params.top_p], [params.min_p], [params.temperature or 1.0]])
        temperature, top_p, min_p, node_temperature = temperatures.to(device)
        top_k = torch.tensor([params.top_k], dtype=torch.int32, device=device)
        return cls(temperature, top_k, top_p, min_p, torch.tensor([seed], device=device), node_temperature)

    @classmethod
    def greedy(cls, batch: int, device: torch.device) -> SamplingTensors:
        """Room for `batch` sequences."""
        one = cls.of(SamplingParams(), 0, device)
        return cls(*(value.repeat(batch) for value in one))

    def put(self, row: int, other: SamplingTensors) -> None:
        """Make a row what the only one of `other` is, in place."""
        for mine, its in zip(self, other, strict=True):
            mine[row : row + 1].copy_(its)


def row_seeds(seed: int | Sequence[int] | None, batch: int) -> list[int]:
    """One 64-bit seed per request: a number serves all, a list gives each its own, None draws fresh ones.

    Fresh seeds come from torch's default generator, so `torch.manual_seed` makes them repeat.

    Raises: ValueError if a list does not have `batch` entries.
    """
    if seed is None:
        return torch.randint(0, 2**63 - 1, (batch,)).tolist()
    given = seed
    if hasattr(seed, "tolist"):  # of an array or a tensor
        seed = seed.tolist()
    if is_integer(seed):
        return [_signed(seed)] * batch
    if not isinstance(seed, Sequence) or len(seed) != batch:
        raise ValueError(f"sampling: seed must be a number or {batch} numbers (one per prompt), got {shown(given)}")
    return [_signed(s) for s in seed]


def _signed(seed: Any) -> int:
    """The same 64 bits as a signed integer, as torch stores them."""
    if not is_integer(seed) or not -(2**63) <= int(seed) < 2**64:
        raise ValueError(f"sampling: seed must be an integer of 64 bits, got {shown(seed)}")
    seed = int(seed)
    return seed - 2**64 if seed >= 2**63 else seed
