"""Options of a request: names, ranges, and what the generation configs of target and request say."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from fakes import FakeTarget, byte_tokenizer, scripted
from pairs import build_drafter
from tiny_models import TINY
from transformers import GenerationConfig

from pydflash import Speculator
from pydflash.options import HINTS, Options, Resolved, resolve
from pydflash.sampling import row_seeds
from pydflash.target.defaults import KEYS, GenerationDefaults


def resolved(config: Any = None, *, ids: Any = (3, 1), max_length: int | None = 100, **given: Any) -> Resolved:
    place = {"tokenizer": None, "max_length": max_length, "vocab_size": 97, "device": torch.device("cpu")}
    return resolve(Options.of("generate", **given), ids, target_config=config, **place)


@pytest.mark.parametrize("name", HINTS)
def test_names_of_other_libraries_get_a_hint(name: str) -> None:
    with pytest.raises(TypeError) as caught:
        Options.of("stream", **{name: 1})
    assert str(caught.value) == f"stream() got an unexpected keyword argument {name!r}; use {HINTS[name]}"


def test_other_names_are_plain_errors() -> None:
    for name in ("past_key_values", "max_newtokens", "use_cache"):
        with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}'$"):
            Options.of("generate", **{name: 1})


def test_every_key_of_transformers_is_in_the_table() -> None:
    """A newer transformers may know keys that this table does not: these are refused, and named here."""
    assert {name for name in vars(GenerationConfig()) if not name.startswith("_")} <= KEYS.keys()


LENGTHS = (
    ({}, {}, 98),  # 256 do not fit
    ({}, {"max_new_tokens": 5}, 5),
    ({"max_new_tokens": 7}, {}, 7),
    ({"max_length": 22}, {}, 20),
    ({"max_length": 22, "max_new_tokens": 7}, {}, 7),
    ({"max_new_tokens": 7}, {"max_new_tokens": 256}, 98),
    ({"max_new_tokens": 7}, {"max_new_tokens": None}, 98),
    ({"max_new_tokens": 7}, {"generation_config": GenerationConfig(max_new_tokens=9)}, 9),
    ({"max_new_tokens": 7}, {"generation_config": GenerationConfig(max_new_tokens=9), "max_new_tokens": 8}, 8),
    ({}, {"max_new_tokens": np.int64(5)}, 5),
    ({}, {"max_new_tokens": 0}, 0),
)


@pytest.mark.parametrize(("config", "given", "limit"), LENGTHS)
def test_lengths(config: dict[str, Any], given: dict[str, Any], limit: int) -> None:
    assert resolved(GenerationConfig(**config), **given).output.limit == limit


def test_a_config_without_room_behind_the_prompt_is_refused() -> None:
    with pytest.raises(ValueError, match=r"prompt: must be shorter than generation_config\.max_length = 2, got 2"):
        resolved(GenerationConfig(max_length=2))


def test_a_requests_config_goes_before_the_targets() -> None:
    own = GenerationConfig(do_sample=True, temperature=0.5, top_k=3, eos_token_id=7)
    given = GenerationConfig(do_sample=True, temperature=0.9, stop_strings=["x"])
    found = resolve(
        Options(generation_config=given), [1], target_config=own, tokenizer=byte_tokenizer(), max_length=None,
        vocab_size=97, device=torch.device("cpu"),
    )  # fmt: skip
    assert (found.params.temperature, found.params.top_k) == (0.9, 3)
    found.output.extend([5, 7])
    assert found.output.finish_reason == "stop"
    assert resolved(own, generation_config=given.__class__(), temperature=0.0).params.greedy
    with pytest.raises(ValueError, match="generation_config: must be a GenerationConfig, got dict"):
        resolved(None, generation_config={"max_new_tokens": 3})


PROCESSORS: dict[str, Any] = {
    "sequence_bias": [[[5], 1.0]],
    "encoder_repetition_penalty": 1.5,
    "no_repeat_ngram_size": 2,
    "encoder_no_repeat_ngram_size": 2,
    "bad_words_ids": [[4]],
    "min_length": 4,
    "min_new_tokens": 4,
    "forced_bos_token_id": 4,
    "forced_eos_token_id": 4,
    "remove_invalid_values": True,
    "exponential_decay_length_penalty": (3, 1.1),
    "suppress_tokens": [4],
    "begin_suppress_tokens": [4],
    "watermarking_config": {"bias": 2.0},
    "top_h": 0.5,
    "typical_p": 0.9,
    "epsilon_cutoff": 0.1,
    "eta_cutoff": 0.1,
}


@pytest.mark.parametrize("name", [n for n, key in KEYS.items() if key.how == "processor" and n != "repetition_penalty"])
def test_each_processor_by_config_and_by_name(name: str) -> None:
    if name not in vars(GenerationConfig()):
        pytest.skip(f"this transformers has no {name}")
    config = {"eos_token_id": 9, name: PROCESSORS[name]}
    sampled = {"do_sample": True, "temperature": 0.7}
    one = resolved(GenerationConfig(**config, **sampled)).processors
    two = resolved(GenerationConfig(eos_token_id=9, **sampled), **{name: PROCESSORS[name]}).processors
    assert [type(x) for x in one] == [type(x) for x in two]
    filters = name in ("top_h", "typical_p", "epsilon_cutoff", "eta_cutoff", "watermarking_config")
    assert len(one) == (2 if filters else 1)  # temperature acts first
    assert resolved(GenerationConfig(eos_token_id=9, **sampled)).processors == []


def test_filters_behind_temperature_take_all_filters_along() -> None:
    found = resolved(None, temperature=0.7, top_k=3, top_p=0.9, min_p=0.1, typical_p=0.5)
    names = [type(x).__name__.removesuffix("LogitsWarper") for x in found.processors]
    assert names == ["Temperature", "TopK", "TopP", "MinP", "Typical"]
    assert (found.params.temperature, found.params.top_k, found.params.top_p, found.params.min_p) == (1.0, 0, 1.0, 0.0)
    assert resolved(None, typical_p=0.5).processors == [], "greedy text is not filtered, as in transformers"


def test_repetition_penalties_run_with_the_sampling() -> None:
    found = resolved(GenerationConfig(repetition_penalty=1.2))
    assert (found.params.repetition_penalty, found.processors) == (1.2, [])
    found = resolved(
        GenerationConfig(repetition_penalty=1.2), repetition_penalty=1.5, presence_penalty=1, frequency_penalty=-1
    )
    assert found.params.repetition_penalty == 1.5
    assert (found.params.presence_penalty, found.params.frequency_penalty, found.params.penalised) == (1.0, -1.0, True)
    # Behind a processor that acts before it, it keeps its place.
    found = resolved(GenerationConfig(repetition_penalty=1.2, encoder_repetition_penalty=1.1))
    assert [type(x).__name__ for x in found.processors] == [
        "EncoderRepetitionPenaltyLogitsProcessor",
        "RepetitionPenaltyLogitsProcessor",
    ]
    assert not found.params.penalised


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"max_new_tokens": 2.5}, "max_new_tokens: must be an integer >= 0, got 2.5"),
        ({"max_new_tokens": True}, "max_new_tokens: must be an integer >= 0, got True"),
        ({"repetition_penalty": 0}, "sampling: repetition_penalty must be above 0"),
        ({"presence_penalty": float("nan")}, "sampling: presence_penalty must be a finite number"),
        ({"frequency_penalty": "1"}, "sampling: frequency_penalty must be a finite number"),
        ({"logit_bias": [1]}, "logit_bias: must be a mapping of token ids to numbers, got list"),
        ({"logit_bias": {97: 1.0}}, "logit_bias: token ids must be 0 to 96, got 97"),
        ({"logit_bias": {3: None}}, "logit_bias: values must be numbers of at most 1e+30, got None for 3"),
        ({"logprobs": 21}, "logprobs: must be None or 0 to 20, got 21"),
        ({"logits_processor": [3]}, "logits_processor: must be functions, got int"),
        ({"stopping_criteria": "x"}, "stopping_criteria: must be functions, got str"),
        ({"logits_processor": 3}, "logits_processor: must be functions, got int"),
        ({"temperature": 10**400}, "sampling: temperature must be finite, at most 1e+30"),
        ({"repetition_penalty": 1e300}, "sampling: repetition_penalty must be a finite number of at most 1e+30"),
        ({"repetition_penalty": 1e-300}, "sampling: repetition_penalty must be above 0, at least 1e-30"),
        ({"frequency_penalty": 10**400}, "sampling: frequency_penalty must be a finite number of at most 1e+30"),
        ({"logit_bias": {3: 10**400}}, "logit_bias: values must be numbers of at most 1e+30"),
        ({"logit_bias": {3: float("inf")}}, "logit_bias: values must be numbers of at most 1e+30, got inf for 3"),
        ({"logit_bias": {"\u00b2": 1.0}}, "logit_bias: token ids must be 0 to 96"),
        ({"max_time": "1"}, "max_time: must be a number of seconds >= 0, got '1'"),
        ({"bad_words_ids": []}, "bad_words_ids: "),
        ({"no_repeat_ngram_size": -1}, "no_repeat_ngram_size: "),
        ({"forced_eos_token_id": []}, "forced_eos_token_id: must be what transformers takes for it"),
        ({"watermarking_config": {"bais": 2.0}}, "must hold the keys of a WatermarkingConfig, got {'bais': 2.0}"),
        ({"num_beams": 2}, "nothing: beams are not offered"),
    ],
    ids=str,
)
def test_values_that_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError)) as caught:
        resolved(None, **given)
    assert message in str(caught.value)


NO_COUNTS = (-3, True, 2.5, float("nan"), "3", [3])
NO_IDS = (-1, 97, 2**70, 3.0, float("nan"), True, "a", {3: 1})
COUNTS = ("min_new_tokens", "min_length", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "max_length")
IDS = ("suppress_tokens", "begin_suppress_tokens", "forced_bos_token_id", "forced_eos_token_id", "stop_token_ids")
RANGES: dict[str, tuple[Any, ...]] = {
    "typical_p": (0, 1.5, float("nan"), True, "a"),
    "top_h": (0.0, 1.5, float("nan"), True),
    "epsilon_cutoff": (-0.1, 1.0, float("nan"), False),
    "eta_cutoff": (-0.1, 1.0, float("nan"), False),
    "encoder_repetition_penalty": (0, -1.0, float("nan"), float("inf"), True),
    "max_time": (-1, float("nan"), True),
    "exponential_decay_length_penalty": ((-1, 1.5), (1.5, 1.5), (1, 0.0), (1, float("nan")), (True, 1.5), (1,), 3),
    "bad_words_ids": ([3], [[]], [[3], []], [[3, 97]], [[-1]], [[True]], [[3.0]], "a", 3),
    "sequence_bias": ({(): 1.0}, {(97,): 1.0}, {(3,): float("nan")}, {(3,): True}, [[[3], "1"]], [[3]], [], 3),
    "logit_bias": ({True: 1.0}, {-1: 1.0}, {2.0: 1.0}, {3: float("nan")}, {3: True}, {2**70: 1.0}),
    "logprobs": (-1, 2.0, float("nan"), 2**70),
    "max_new_tokens": (-3, float("nan"), "3", [3.5]),
}
WRONG = [
    *((name, value) for name in COUNTS for value in NO_COUNTS if name != "max_length"),
    *((name, value) for name in IDS for value in NO_IDS),
    *((name, [3, value]) for name in IDS for value in NO_IDS),
    *((name, value) for name, values in RANGES.items() for value in values),
]


@pytest.mark.parametrize(("name", "value"), WRONG, ids=str)
def test_each_option_is_refused_by_its_name_before_any_work(name: str, value: Any) -> None:
    target = FakeTarget(scripted([1, 2, 3]), max_length=100)
    with pytest.raises(ValueError, match=rf"^{name}: (must be|token ids must be|values must be) .*, got "):
        Speculator(target, None).generate([3, 1], **{name: value})
    assert target.caches == []


@pytest.mark.parametrize("name", [*COUNTS, "max_new_tokens", "bad_words_ids", "eos_token_id", "repetition_penalty"])
def test_keys_of_a_config_are_held_to_the_same(name: str) -> None:
    config = GenerationConfig()
    setattr(config, name, -3)
    with pytest.raises(ValueError, match=rf"^{name}: .*got -3$"):
        resolved(None, generation_config=config)
    if name != "eos_token_id":
        with pytest.raises(ValueError, match=rf"^{name}: .*got -3$"):
            resolved(config, max_new_tokens=4)


def test_plain_numbers_are_made_of_arrays_and_numpy() -> None:
    found = resolved(None, stop_token_ids=torch.tensor([9, 5]), min_new_tokens=np.int64(4), typical_p=np.float32(0.5),
                     suppress_tokens=np.array([3, 4]), sequence_bias={(np.int64(3),): 1}, temperature=1.0)  # fmt: skip
    assert [type(x).__name__ for x in found.processors] == [
        "SequenceBiasLogitsProcessor",
        "MinNewTokensLengthLogitsProcessor",
        "SuppressTokensLogitsProcessor",
        "TypicalLogitsWarper",
    ]
    scores = torch.zeros(1, 97)
    for processor in found.processors[:3]:
        scores = processor(torch.tensor([[3, 1]]), scores)
    assert scores[0].isinf().nonzero().flatten().tolist() == [3, 4, 5, 9]


def test_stop_tokens_of_the_target_that_it_does_not_have_never_come() -> None:
    """Padded models name some; the first that can come counts. A tokenizer's may lie beyond the model's vocabulary."""
    assert GenerationDefaults(GenerationConfig(eos_token_id=[-1, 97, 7]), vocab_size=97).stop_token_ids == [7]
    found = resolved(GenerationConfig(eos_token_id=[-1, 97, 7]), min_new_tokens=3)
    scores = found.processors[0](torch.tensor([[3, 1]]), torch.zeros(1, 97))
    assert scores[0].isinf().nonzero().flatten().tolist() == [7]
    assert byte_tokenizer().eos_token_id == 256
    place = {"max_length": 100, "vocab_size": 97, "device": torch.device("cpu"), "target_config": None}
    for vocab_size, ends in ((97, False), (257, True)):
        given = Options.of("generate", min_new_tokens=1)
        found = resolve(given, [3], tokenizer=byte_tokenizer(), **(place | {"vocab_size": vocab_size}))
        assert bool(found.processors) is ends


def test_counts_without_end() -> None:
    """Huge ones mean what they say where that can be had: no end before the limit, a limit that is never met."""
    for name in ("min_new_tokens", "min_length", "no_repeat_ngram_size"):
        found = resolved(GenerationConfig(eos_token_id=9), **{name: 2**70})
        assert found.processors[0](torch.tensor([[3, 1, 3]]), torch.zeros(1, 97)).shape == (1, 97)
    assert resolved(None, max_new_tokens=2**70).output.limit == 98
    assert resolved(None, max_new_tokens=2**31 - 1, max_length=None).output.limit == 2**31 - 1
    with pytest.raises(ValueError, match=r"max_new_tokens: must be at most 2147483647 where the target states no"):
        resolved(None, max_new_tokens=2**31, max_length=None)


@pytest.mark.parametrize("seed", [True, [True], 1.0, float("nan"), 2**64, -(2**63) - 1])
def test_seeds_are_integers_of_64_bits(seed: Any) -> None:
    with pytest.raises(ValueError, match=r"^sampling: seed must be .*, got "):
        row_seeds(seed, 1)


def test_bias_and_logprobs() -> None:
    found = resolved(None, logit_bias={"5": 1, 6: float("-inf")}, logprobs=True)
    assert found.logit_bias == {5: 1.0, 6: float("-inf")}
    assert resolved(None, logit_bias={5: -(10**400)}).logit_bias == {5: float("-inf")}
    assert (found.logprobs, resolved(None, logprobs=3).logprobs, resolved(None).logprobs) == (0, 3, None)


def test_options_of_each_prompt() -> None:
    rows = Options.of("generate", temperature=[0.0, 0.5], max_new_tokens=3, stop_token_ids=[1, 2]).rows(2)
    assert [row.temperature for row in rows] == [0.0, 0.5]
    assert [(row.max_new_tokens, row.stop_token_ids) for row in rows] == [(3, [1, 2])] * 2
    with pytest.raises(ValueError, match="temperature: a list must have 3 entries"):
        Options.of("generate", temperature=[0.0, 0.5]).rows(3)


def test_criteria_end_the_text_behind_the_token_that_meets_them() -> None:
    seen = []

    def long_enough(ids: torch.Tensor, scores: Any) -> bool:
        seen.append(ids.tolist())
        return ids.shape[1] >= 5

    output = resolved(None, stopping_criteria=long_enough).output
    assert output.extend([7, 8, 9, 10, 11])[0] == [7, 8, 9]
    assert output.finish_reason == "stop"
    assert seen == [[[3, 1, 7]], [[3, 1, 7, 8]], [[3, 1, 7, 8, 9]]]


def test_integers_of_numpy_are_integers() -> None:
    model, drafter = TINY["qwen3"](num_hidden_layers=6), build_drafter(2)
    assert Speculator(model, drafter, block_size=np.int64(3)).block_size == 3  # type: ignore[arg-type]
    spec = Speculator(model, drafter, path="tree", num_nodes=np.int64(5))  # type: ignore[arg-type]
    assert spec.loop.parts.paths.num_nodes == 5
    for wrong in (True, np.int64(5), 3.0):
        with pytest.raises(ValueError, match="block_size must be 1 to 4"):
            Speculator(model, drafter, block_size=wrong)  # type: ignore[arg-type]


def test_criteria_answer_yes_or_no() -> None:
    output = resolved(None, stopping_criteria=lambda ids, scores: None).output
    with pytest.raises(ValueError, match="stopping_criteria: must return True or False, got None"):
        output.extend([7])


def test_max_time_ends_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("pydflash.text.time.monotonic", lambda: now[0])
    output = resolved(GenerationConfig(max_time=2.0)).output
    output.extend([1, 2])
    now[0] = 102.5
    assert output.extend([3, 4])[0] == [3]
    assert output.finish_reason == "length"


def test_notes_that_authors_leave_are_passed_over() -> None:
    config = GenerationConfig()
    config.chat_format = "chatml"
    GenerationDefaults(config)
