"""Values of options and of a generation config's keys: checked before any work, and made plain numbers and lists."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from numbers import Integral, Real
from typing import Any

from ..messages import shown
from ..sampling import MOST_PENALTY, is_integer


def checked(name: str, value: Any, vocab_size: int | None) -> Any:
    """What a key asks for, numpy's numbers and arrays as plain ones; None, and keys without a rule, stay as they are.

    vocab_size: token ids are below it; None where it is not known yet.

    Raises: ValueError naming the key, what is allowed and what came.
    """
    if value is None or (rule := _RULES.get(name)) is None:
        return value
    return rule(name, value, vocab_size)


def token_ids(name: str, value: Any, vocab_size: int | None = None) -> list[int]:
    """Token ids of a number, a list, an array or a tensor, as a list of int.

    vocab_size: they are 0 to `vocab_size` - 1; None takes any integers.

    Raises: ValueError naming the argument for anything else.
    """
    items = value.tolist() if hasattr(value, "tolist") else value
    items = [items] if isinstance(items, Integral) else items
    if not isinstance(items, Iterable) or isinstance(items, (str, bytes, Mapping)):
        raise ValueError(f"{name}: must be token ids, got {shown(value)}")
    found = [item.tolist() if hasattr(item, "tolist") else item for item in items]
    for item in found:
        if not is_integer(item):
            raise ValueError(f"{name}: must be token ids, got {shown(value)}")
        if vocab_size is not None and not 0 <= item < vocab_size:
            raise ValueError(f"{name}: token ids must be 0 to {vocab_size - 1}, got {shown(item)}")
    return [int(item) for item in found]


def token_biases(name: str, biases: Mapping[int, float] | None, vocab_size: int) -> dict[int, float]:
    """{token id: number} of a mapping, whose ids may be texts, as JSON has no other keys; empty for None.

    Raises: ValueError naming the argument.
    """
    if biases is None:
        return {}
    if not isinstance(biases, Mapping):
        raise ValueError(f"{name}: must be a mapping of token ids to numbers, got {type(biases).__name__}")
    found: dict[int, float] = {}
    for token, value in biases.items():
        number = int(token) if isinstance(token, str) and token.isdecimal() and len(token) < 20 else token
        if not is_integer(number) or not 0 <= int(number) < vocab_size:
            raise ValueError(f"{name}: token ids must be 0 to {vocab_size - 1}, got {shown(token)}")
        if isinstance(value, bool) or not isinstance(value, Real) or not value <= MOST_PENALTY:
            raise ValueError(
                f"{name}: values must be numbers of at most {MOST_PENALTY:g}, got {shown(value)} for {shown(token)}"
            )
        found[int(number)] = float(value) if value >= -MOST_PENALTY else -math.inf
    return found


def _token_id(name: str, value: Any, vocab_size: int | None) -> int:
    found = token_ids(name, value, vocab_size)
    if len(found) != 1:
        raise ValueError(f"{name}: must be one token id, got {shown(value)}")
    return found[0]


def _count(name: str, value: Any, _: int | None = None) -> int:
    if not is_integer(value) or value < 0:
        raise ValueError(f"{name}: must be an integer >= 0, got {shown(value)}")
    return int(value)


def _number(name: str, value: Any, _: int | None = None, *, meaning: str, fits: Callable[[Any], bool]) -> float:
    """A number within its range, which NaN is in none of."""
    if isinstance(value, bool) or not isinstance(value, Real) or not fits(value):
        raise ValueError(f"{name}: must be {meaning}, got {shown(value)}")
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"{name}: must be {meaning}, that a float has, got {shown(value)}") from None


def _sequences(name: str, value: Any, vocab_size: int | None) -> list[list[int]]:
    items = value.tolist() if hasattr(value, "tolist") else value
    if not _is_list(items) or not items or not all(_is_list(item) and item for item in items):
        raise ValueError(f"{name}: must be a list of lists of token ids, none of them empty, got {shown(value)}")
    return [token_ids(name, item, vocab_size) for item in items]


def _biases(name: str, value: Any, vocab_size: int | None) -> dict[tuple[int, ...], float]:
    items: Any = list(value.items()) if isinstance(value, Mapping) else value
    if not _is_list(items) or not items or not all(_is_list(item) and len(item) == 2 for item in items):
        raise ValueError(f"{name}: must be pairs of token ids and a number, got {shown(value)}")
    found = {}
    for ids, bias in items:
        (sequence,) = _sequences(name, [ids], vocab_size)
        number = _number(name, bias, meaning=f"numbers of at most {MOST_PENALTY:g}", fits=lambda x: x <= MOST_PENALTY)
        found[tuple(sequence)] = number
    return found


def _decay(name: str, value: Any, _: int | None) -> tuple[int, float]:
    if not _is_list(value) or len(value) != 2:
        raise ValueError(f"{name}: must be a number of tokens and a factor, got {shown(value)}")
    return _count(name, value[0]), _above_0(name, value[1])


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes))


_above_0 = partial(_number, meaning=f"a number above 0, at most {MOST_PENALTY:g}", fits=lambda x: 0 < x <= MOST_PENALTY)
_share = partial(_number, meaning="a number above 0, at most 1", fits=lambda x: 0 < x <= 1)
_cutoff = partial(_number, meaning="a number >= 0 and below 1", fits=lambda x: 0 <= x < 1)
_seconds = partial(_number, meaning="a number of seconds >= 0", fits=lambda x: x >= 0)
_RULES: dict[str, Callable[[str, Any, int | None], Any]] = {
    "max_new_tokens": _count,
    "max_length": _count,
    "min_new_tokens": _count,
    "min_length": _count,
    "no_repeat_ngram_size": _count,
    "encoder_no_repeat_ngram_size": _count,
    "max_time": _seconds,
    "sequence_bias": _biases,
    "bad_words_ids": _sequences,
    "suppress_tokens": token_ids,
    "begin_suppress_tokens": token_ids,
    "forced_bos_token_id": _token_id,
    "forced_eos_token_id": token_ids,
    "repetition_penalty": _above_0,
    "encoder_repetition_penalty": _above_0,
    "exponential_decay_length_penalty": _decay,
    "top_h": _share,
    "typical_p": _share,
    "epsilon_cutoff": _cutoff,
    "eta_cutoff": _cutoff,
}
