"""Requests for the public API drawn by hypothesis: prompts and options, most that fit and some that do not."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)

HOSTILE = st.sampled_from([
    True, -1, 0, 1, 3, 64, 2**31 - 1, 2**31, 2**63, 2**64 + 5, 2**70, -(2**63) - 1, 0.5, -0.5, 1e308, float("nan"),
    float("inf"), float("-inf"), "", "3", "a\ud800", b"3", [], [1], [-1], [[]], [None], ["x", 3], (), {}, {"a": 1},
    {3: float("nan")}, {2**40: 1.0}, np.int64(2), np.float32(0.5), np.array([1, 2]), np.array(3.5), torch.tensor(1),
    torch.tensor([0.5]), torch.tensor([[1, 2], [3, 4]]), object(), print, 1 + 2j, range(3),
])  # fmt: skip

JSON = st.sampled_from([
    None, True, False, -1, 0, 1, 2**31, 2**63, 10**400, 0.5, -0.5, 1e308, float("nan"), float("inf"), "", "3", "silu",
    "a\ud800", [], [1], [-1], [[]], [None], ["x", 3], [0, 2], {}, {"a": 1}, {"rope_type": "yarn"},
])  # fmt: skip

_TOKEN = st.integers(0, 255)
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
    _WORD, _IDS, _CHAT, _IDS.map(torch.tensor), _IDS.map(np.array), _IDS.map(lambda ids: {"input_ids": ids})
)


def _or_hostile(strategy: st.SearchStrategy[Any], one_in: int = 12) -> st.SearchStrategy[Any]:
    return st.integers(1, one_in).flatmap(lambda n: HOSTILE if n == 1 else strategy)


def _floats(low: float, high: float) -> st.SearchStrategy[Any]:
    return st.none() | st.floats(low, high) | st.integers(int(low), max(1, int(high)))


OPTIONS: dict[str, st.SearchStrategy[Any]] = {
    "max_new_tokens": st.integers(0, 14),
    "temperature": st.sampled_from([None, 0, 0.0, 0.7, 1, 2.5]),
    "top_p": _floats(0.05, 1.0),
    "top_k": st.none() | st.integers(0, 300),
    "min_p": _floats(0.0, 0.9),
    "seed": st.none() | st.integers(0, 2**64 - 1),
    "stop_token_ids": st.none() | st.lists(_TOKEN, max_size=4),
    "stop_strings": st.none() | _WORD | st.lists(_WORD, max_size=3),
    "repetition_penalty": _floats(0.5, 3.0),
    "presence_penalty": st.floats(-2, 2),
    "frequency_penalty": st.floats(-2, 2),
    "logit_bias": st.none() | st.dictionaries(_TOKEN, st.floats(-50, 50) | st.just(float("-inf")), max_size=4),
    "logprobs": st.none() | st.integers(0, 20),
    "min_new_tokens": st.integers(0, 9),
    "no_repeat_ngram_size": st.integers(0, 4),
    "bad_words_ids": st.lists(_IDS, min_size=1, max_size=3),
    "suppress_tokens": st.lists(_TOKEN, max_size=4),
    "begin_suppress_tokens": st.lists(_TOKEN, max_size=4),
    "forced_eos_token_id": _TOKEN,
    "typical_p": st.floats(0.05, 1.0),
    "epsilon_cutoff": st.floats(0.0, 0.5),
    "return_proposals": st.booleans(),
    "continue_final_message": st.none() | st.booleans(),
    "max_time": st.just(1e6),
}
RARE = (
    *("chat_template", "tools", "logits_processor", "stopping_criteria", "generation_config", "beams"),
    *("stop", "use_cache", "sequence_bias", "top_h", "eta_cutoff", "encoder_no_repeat_ngram_size", "min_length"),
    *("forced_bos_token_id", "exponential_decay_length_penalty", "watermarking_config", "remove_invalid_values"),
)


@st.composite
def prompts(draw: st.DrawFn) -> Any:
    """A prompt, a list of up to three, or something that is none."""
    kind = draw(st.integers(0, 11))
    if kind == 0:
        return draw(HOSTILE)
    if kind <= 3:
        return draw(st.lists(_or_hostile(SINGLE, 20), min_size=1, max_size=3))
    return draw(SINGLE)


@st.composite
def options(draw: st.DrawFn) -> dict[str, Any]:
    """Some options by name; about two requests in three fit."""
    names = draw(st.lists(st.sampled_from(sorted(OPTIONS)), max_size=5, unique=True))
    found = {name: draw(_or_hostile(OPTIONS[name], 15)) for name in names}
    if draw(st.integers(0, 19)) == 0:
        found[draw(st.sampled_from(RARE))] = draw(HOSTILE)
    found.setdefault("max_new_tokens", draw(st.integers(1, 14)))
    return found
