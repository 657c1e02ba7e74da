"""Requests for the public API drawn by hypothesis: prompts and options, most that fit and some that do not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from transformers import GenerationConfig

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)
KNOWN = [3, 1, 4, 1, 5]  # a prompt that comes often


class Unprintable:
    """What not even a message can show."""

    def __repr__(self) -> str:
        raise RuntimeError("no repr")


class Hidden:
    """Stands for a value that hypothesis could not print."""

    def __init__(self, value: Any, name: str) -> None:
        self.value, self.name = value, name

    def __repr__(self) -> str:
        return self.name


class Made:
    """A value that is made anew for every request, since it keeps a state."""

    def __init__(self, kind: Callable[[int], Any], number: int) -> None:
        self.kind, self.number = kind, number

    def __repr__(self) -> str:
        return f"{self.kind.__name__}({self.number})"


def once(number: int) -> Iterator[int]:
    return iter([number])


HUGE, NO_REPR = Hidden(10**5000, "10**5000"), Hidden(Unprintable(), "Unprintable()")
HOSTILE = st.sampled_from([
    True, -1, 0, 1, 3, 64, 2**31 - 1, 2**31, 2**63, 2**64 + 5, 2**70, -(2**63) - 1, HUGE, 0.5, -0.5, 1e308,
    float("nan"), float("inf"), float("-inf"), "", "3", "a\ud800", b"3", [], [1], [-1], [300], [[]], [[300]], [None],
    ["x", 3], [HUGE], (), {}, {"a": 1}, {3: float("nan")}, {2**40: 1.0}, {"role": 3}, [{"role": "user"}],
    [{"role": "user", "content": 3}], {"input_ids": [1], "attention_mask": [1, 1]}, {"input_ids": None}, {1, 2},
    np.int64(2), np.float32(0.5), np.float64("nan"), np.array([1, 2]), np.array([[1, 2], [3, 4]]), np.array(3.5),
    np.array([], dtype=np.int64), np.bool_(True), torch.tensor(1), torch.tensor([0.5]), torch.tensor([[1, 2], [3, 4]]),
    torch.tensor([], dtype=torch.long), torch.tensor(True), object(), print, 1 + 2j, range(3), Made(once, 1),
    "x" * 5000, [1] * 5000, NO_REPR, [NO_REPR], int, GenerationConfig(max_new_tokens=3),
])  # fmt: skip

_TOKEN = st.integers(0, 256)
_WORD = st.text(alphabet="ab \n.é漢🙂", min_size=1, max_size=12)
_IDS = st.lists(_TOKEN, min_size=1, max_size=20)
_MESSAGE = st.fixed_dictionaries({"role": st.sampled_from(["system", "user", "assistant"]), "content": _WORD})
_PART = st.fixed_dictionaries({"type": st.just("text"), "text": _WORD})
_CHAT = st.lists(_MESSAGE, min_size=1, max_size=3) | st.lists(
    st.fixed_dictionaries({"role": st.just("user"), "content": st.lists(_PART, min_size=1, max_size=2)}),
    min_size=1,
    max_size=2,
)
SINGLE = st.one_of(
    st.just(KNOWN),
    _WORD,
    _IDS,
    _CHAT,
    _IDS.map(torch.tensor),
    _IDS.map(np.array),
    _IDS.map(lambda ids: {"input_ids": ids}),
)


class Shifts:
    """A processor with a state: at its n-th call it forbids the last token and lifts another, by n."""

    def __init__(self, step: int) -> None:
        self.step, self.calls = step, 0

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        scores[0, ids[0, -1]] = float("-inf")
        scores[0, self.calls * self.step % scores.shape[1]] += 2.0
        return scores


class EndsAt:
    """A criterion with a state: it is met the n-th time that it is asked."""

    def __init__(self, count: int) -> None:
        self.left = count

    def __call__(self, ids: torch.Tensor, scores: Any) -> bool:
        self.left -= 1
        return self.left <= 0


def fresh(value: Any) -> Any:
    """What stands for a value as that value, for one call."""
    if isinstance(value, Made):
        return value.kind(value.number)
    if isinstance(value, Hidden):
        return value.value
    if type(value) in (list, tuple):
        return type(value)(fresh(item) for item in value)
    return {name: fresh(item) for name, item in value.items()} if type(value) is dict else value


def _or_hostile(strategy: st.SearchStrategy[Any], one_in: int) -> st.SearchStrategy[Any]:
    return st.integers(1, one_in).flatmap(lambda n: HOSTILE if n == one_in else strategy)


def _floats(low: float, high: float) -> st.SearchStrategy[Any]:
    return st.none() | st.floats(low, high) | st.integers(max(1, int(low)), max(1, int(high)))


_BIAS = st.floats(-50, 50) | st.just(float("-inf"))
OPTIONS: dict[str, st.SearchStrategy[Any]] = {
    "max_new_tokens": st.integers(0, 14) | st.integers(1, 14).map(np.int64) | st.just(None),
    "temperature": st.sampled_from([0.7, 0, 0.2, 0.0, 1, 2.5, np.float32(0.5), None]),
    "top_p": _floats(0.05, 1.0),
    "top_k": st.none() | st.integers(0, 300) | st.just(np.int64(5)),
    "min_p": st.none() | st.floats(0.0, 0.9),
    "seed": st.none() | st.integers(-(2**63), 2**64 - 1),
    "stop_token_ids": st.none() | st.lists(_TOKEN, max_size=40) | _TOKEN.map(torch.tensor) | _IDS.map(np.array),
    "stop_strings": st.none() | _WORD | st.lists(_WORD, max_size=3) | st.sampled_from(["<eos>", "�", "\x00"]),
    "repetition_penalty": _floats(0.5, 3.0),
    "presence_penalty": st.floats(-2, 2),
    "frequency_penalty": st.floats(-2, 2),
    "logit_bias": st.none() | st.dictionaries(_TOKEN | _TOKEN.map(str), _BIAS, max_size=4),
    "logprobs": st.none() | st.integers(0, 20) | st.booleans(),
    "logits_processor": st.integers(1, 99).map(lambda n: Made(Shifts, n)),
    "stopping_criteria": st.integers(1, 9).map(lambda n: Made(EndsAt, n)),
    "generation_config": st.builds(
        GenerationConfig,
        max_new_tokens=st.none() | st.integers(1, 9),
        eos_token_id=st.none() | _TOKEN,
        min_new_tokens=st.none() | st.integers(0, 5),
        no_repeat_ngram_size=st.none() | st.integers(1, 3),
    ),
    "min_new_tokens": st.integers(0, 9),
    "min_length": st.integers(0, 20),
    "no_repeat_ngram_size": st.integers(0, 4),
    "encoder_no_repeat_ngram_size": st.integers(0, 4),
    "encoder_repetition_penalty": st.floats(0.5, 2.0) | st.just(1),
    "bad_words_ids": st.lists(_IDS, min_size=1, max_size=3),
    "sequence_bias": st.lists(st.tuples(_IDS, st.floats(-9, 9)).map(list), min_size=1, max_size=2),
    "suppress_tokens": st.lists(_TOKEN, max_size=4),
    "begin_suppress_tokens": st.lists(_TOKEN, max_size=4) | _IDS.map(np.array),
    "forced_bos_token_id": _TOKEN,
    "forced_eos_token_id": _TOKEN | st.lists(_TOKEN, min_size=1, max_size=2),
    "exponential_decay_length_penalty": st.tuples(st.integers(0, 5), st.floats(1.0, 2.0)),
    "remove_invalid_values": st.booleans(),
    "typical_p": st.floats(0.05, 1.0),
    "top_h": st.floats(0.05, 1.0),
    "epsilon_cutoff": st.floats(0.0, 0.5),
    "eta_cutoff": st.floats(0.0, 0.5),
    "return_proposals": st.booleans(),
    "continue_final_message": st.none() | st.booleans(),
    "chat_template": st.none() | st.booleans() | st.just("{{ messages[0].content }}"),
    "chat_template_kwargs": st.none() | st.just({"enable_thinking": False}),
    "tools": st.none() | st.just([]),
    "max_time": st.just(1e6),
}
# Names that are hardly ever right, whatever their value.
RARE = ("watermarking_config", "num_beams", "stop", "use_cache", "no_such_name", "eos_token_id", "do_sample")


@st.composite
def prompts(draw: st.DrawFn) -> Any:
    """A prompt, a list of up to three, or something that is none."""
    kind = draw(st.integers(0, 11))
    if kind == 11:
        return draw(HOSTILE)
    if kind >= 9:
        return draw(st.lists(_or_hostile(SINGLE, 12), min_size=1, max_size=3))
    return draw(SINGLE)


@st.composite
def options(draw: st.DrawFn, one_in: int = 15) -> dict[str, Any]:
    """Some options by name, one in `one_in` of them hostile; most requests fit."""
    names = draw(st.lists(st.sampled_from(sorted(OPTIONS)), max_size=4, unique=True))
    names += [name for name in ("temperature", "stop_token_ids", "stop_strings") if draw(st.integers(0, 3)) == 3]
    found = {name: draw(_or_hostile(OPTIONS[name], one_in)) for name in names}
    if draw(st.integers(0, 19)) == 19:
        found[draw(st.sampled_from(RARE))] = draw(HOSTILE)
    if "generation_config" not in found:
        found.setdefault("max_new_tokens", draw(st.integers(1, 14)))
    return found
