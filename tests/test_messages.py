"""Values in error messages: whatever was given, the sentence names the argument and stays short."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from pairs import HIDDEN, VOCAB, build_drafter, config_dict
from requests_at_random import Unprintable
from tiny_models import TINY

from pydflash import DrafterConfig, Speculator
from pydflash.messages import cut, shown
from pydflash.sampling import row_seeds

HUGE = 10**5000  # Python itself refuses to print it
# As many as there is room for, and what a template may make something of.
FINE = {("max_new_tokens", int), ("max_new_tokens", list), ("min_new_tokens", int), ("tools", list)}


def test_values_are_shown_short() -> None:
    assert shown(2.5) == "2.5"
    assert shown(HUGE) == "a int that is too long to show"
    assert shown([HUGE]) == "a list that is too long to show"
    assert shown(Unprintable()).startswith("<Unprintable instance at ")
    assert len(shown([1] * 5000)) < 100
    assert len(shown("x" * 5000)) < 300
    assert cut("x" * 301) == "x" * 300 + "..."


@pytest.mark.parametrize("value", [HUGE, -HUGE, Unprintable(), [HUGE], "x" * 5000], ids=lambda x: type(x).__name__)
@pytest.mark.parametrize(
    "name",
    [
        *("max_new_tokens", "temperature", "top_k", "top_p", "min_p", "seed", "stop_token_ids", "repetition_penalty"),
        *("presence_penalty", "frequency_penalty", "logprobs", "n", "min_new_tokens", "bad_words_ids", "logit_bias"),
        *("suppress_tokens", "typical_p", "max_time", "tools", "continue_final_message", "stopping_criteria"),
    ],
)
def test_no_option_is_too_long_for_a_message(name: str, value: Any) -> None:
    if (name, type(value)) in FINE and value in (HUGE, [HUGE]):
        return
    spec = Speculator(TINY["llama"](), None)
    values = [value, {value: 1.0}, {3: value}] if name == "logit_bias" and not isinstance(value, list) else [value]
    for given in values:
        if name == "logit_bias" and given == {3: -HUGE}:
            continue  # forbids a token
        with pytest.raises(ValueError, match=r"^[\w.]+: .*must be .*") as caught:
            spec.generate([1, 2], **{"max_new_tokens": 2, name: given})
        assert name in str(caught.value)
        assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    "prompt", [HUGE, [HUGE], Unprintable(), [Unprintable()], {"x" * 5000: 1}], ids=lambda x: type(x).__name__
)
def test_no_prompt_is_too_long_for_a_message(prompt: Any) -> None:
    with pytest.raises(ValueError, match=r"^prompt: ") as caught:
        Speculator(TINY["llama"](), None).generate(prompt, 2)
    assert len(str(caught.value)) < 500


def test_configs_take_numpys_numbers_and_refuse_its_arrays() -> None:
    raw = config_dict(1)
    arrays = raw | {"hidden_size": np.int64(64), "layer_types": np.array(raw["layer_types"])}
    arrays["dflash_config"] = raw["dflash_config"] | {"target_layer_ids": np.array([0, 2])}
    assert DrafterConfig.from_dict(arrays) == DrafterConfig.from_dict(raw)
    for name in ("hidden_size", "vocab_size"):
        with pytest.raises(ValueError, match=rf"^DrafterConfig: {name}.* must be .*, got \[\]"):
            DrafterConfig.from_dict(raw | {name: np.array([])})


def test_seeds_may_be_an_array() -> None:
    assert row_seeds(np.array([3, 5]), 2) == row_seeds(torch.tensor([3, 5]), 2) == [3, 5]
    with pytest.raises(ValueError, match="seed must be a number or 2 numbers"):
        row_seeds(np.array([0.5]), 2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch": 0}, "new_cache: batch must be an integer of 1 to 2147483647, got 0"),
        ({"capacity": -1}, "new_cache: capacity must be an integer of 1 to 2147483647, got -1"),
        ({"capacity": 2.0}, "new_cache: capacity must be an integer of 1 to 2147483647, got 2.0"),
        ({"features": [1.0]}, "append_context: the first argument must be a tensor, got [1.0]"),
        ({"features": torch.zeros(1, 3, 2 * HIDDEN).long()}, "append_context: features must be a tensor of floating"),
        ({"counts": [1]}, "append_context: counts must be [1] integers, got [1]"),
        ({"counts": torch.tensor([0.5])}, "append_context: counts must be [1] integers, got [1] torch.float32"),
        ({"anchors": torch.tensor([1.0])}, "propose: anchors must be [1] integers, B as the cache's, got [1]"),
        ({"anchors": torch.tensor([1, 2])}, "propose: anchors must be [1] integers, B as the cache's, got [2]"),
        ({"anchors": torch.tensor([VOCAB])}, "propose: anchors must be ids of the embedding table, got tensor([97])"),
        ({"block_size": 2.5}, "propose: block_size must be 1 to 4 (as trained), got 2.5"),
        ({"block_size": True}, "propose: block_size must be 1 to 4 (as trained), got True"),
        ({"temperature": "1"}, "propose: temperature must be None, [B] or 0 to 1e+30, got '1'"),
        ({"temperature": float("nan")}, "propose: temperature must be None, [B] or 0 to 1e+30, got nan"),
        ({"seeds": 2**64}, "propose: seeds must be integers of 64 bits, got 18446744073709551616"),
        ({"seeds": [0.5]}, "propose: seeds must be integers of 64 bits, got 0.5"),
    ],
    ids=str,
)
def test_what_a_drafters_methods_refuse(changes: dict[str, Any], message: str) -> None:
    drafter = build_drafter(2)
    usual = {"batch": 1, "capacity": 9, "features": torch.zeros(1, 3, 2 * HIDDEN), "counts": None, "block_size": 4}
    value = usual | {"anchors": torch.tensor([1]), "temperature": None, "seeds": 0} | changes

    @torch.inference_mode()
    def run() -> None:
        cache = drafter.new_cache(value["batch"], value["capacity"])
        drafter.append_context(value["features"], cache, value["counts"])
        options = {name: value[name] for name in ("block_size", "temperature", "seeds")}
        drafter.propose(
            value["anchors"], cache, embed=torch.zeros(VOCAB, HIDDEN), head=torch.nn.Linear(HIDDEN, VOCAB), **options
        )

    with pytest.raises(ValueError) as caught:
        run()
    assert str(caught.value).startswith(message)


def test_seeds_of_a_drafter_are_64_bits() -> None:
    """The upper half of the unsigned numbers is the lower half of the signed ones, alone and in a list."""
    drafter, table, head = build_drafter(2), torch.randn(VOCAB, HIDDEN), torch.nn.Linear(HIDDEN, VOCAB)
    with torch.inference_mode():
        cache = drafter.new_cache(1, 9)
        drafter.append_context(torch.randn(1, 3, 2 * HIDDEN), cache)
        anchors = torch.tensor([1])
        drafts = [
            drafter.propose(anchors, cache, embed=table, head=head, temperature=5, seeds=seeds).tokens.tolist()
            for seeds in (2**64 - 3, -3, [2**64 - 3], np.int64(-3), torch.tensor([-3]), 4)
        ]
    assert all(tokens == drafts[0] for tokens in drafts[:5])
    assert drafts[5] != drafts[0]
