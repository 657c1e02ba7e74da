"""Options of generation: honoured as in transformers' generate, or refused by name, never ignored."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from fakes import FakeTarget, byte_tokenizer, markov, scripted
from pairs import HIDDEN, MASK, VOCAB, Scripted, build_drafter, config_dict
from tiny_models import TINY
from torch import Tensor

import pydflash
from pydflash import Speculator, Stats, Target
from pydflash.target.defaults import GenerationDefaults

transformers = pytest.importorskip("transformers")

TAPS = (0, 2)
PROMPT = [3, 1, 4, 1, 5]


@functools.cache
def model_of() -> Any:
    return TINY["llama"](num_hidden_layers=3)


def with_config(**options: Any) -> Any:
    """The tiny model under another generation config; the weights are shared."""
    model = copy.copy(model_of())
    model.generation_config = transformers.GenerationConfig(**options)
    return model


def own_text(model: Any, count: int) -> list[int]:
    ids = torch.tensor([PROMPT])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False)
    return out[0, len(PROMPT) :].tolist()


# --- logits processors ------------------------------------------------------------------------------------------


def constant(row: list[float], taps: tuple[int, ...] = TAPS) -> FakeTarget:
    logits = torch.tensor(row)
    return FakeTarget(lambda position, token: logits, taps, vocab_size=len(row))


@pytest.mark.parametrize("drafts", [[0, 0, 0, 0, 0, 0], [0, 1, 0, 0, 0, 0], [2, 2, 2, 2, 2, 2]])
def test_repetition_penalty_counts_the_drafts_before_each_slot(drafts: list[int]) -> None:
    """Logits [2, 1.5, .8, -1], penalty 2, prompt [3]: 0, 1, 0, 0, 0, also inside a block."""
    penalty = transformers.RepetitionPenaltyLogitsProcessor(2.0)
    drafter = Scripted([3, *drafts], 4, vocab_size=4)
    out = Speculator(constant([2.0, 1.5, 0.8, -1.0]), drafter).generate([3], 5, logits_processor=[penalty])
    assert out.token_ids == [0, 1, 0, 0, 0]
    if drafts[1] == 1:
        assert out.stats.num_accepted == [3]
    plain = Speculator(constant([2.0, 1.5, 0.8, -1.0], ()), None).generate([3], 5, logits_processor=[penalty])
    assert plain.token_ids == [0, 1, 0, 0, 0]


def test_processors_see_what_comes_before_each_position() -> None:
    """One call a row, with [1, n] ids and [1, V] scores; the ids are the prompt, the text and the drafts so far."""
    text = [*PROMPT, *range(10, 40)]
    calls: list[list[int]] = []

    def spy(ids: Tensor, scores: Tensor) -> Tensor:
        assert ids.shape[0] == 1
        assert ids.dtype == torch.long
        assert scores.shape == (1, VOCAB)
        assert scores.dtype == torch.float32
        calls.append(ids[0].tolist())
        return scores

    Speculator(FakeTarget(scripted(text), TAPS), Scripted(text, 4)).generate(PROMPT, 9, logits_processor=[spy])
    assert calls == [text[:n] for n in range(5, 14)]


def test_processors_run_in_order_and_may_write_in_place() -> None:
    def ban_best(ids: Tensor, scores: Tensor) -> Tensor:
        scores[:, scores.argmax(-1)] = -torch.inf
        return scores

    def halve(ids: Tensor, scores: Tensor) -> Tensor:
        return torch.where(scores > 2.5, scores / 4, scores)

    rows = constant([3.0, 2.0, 1.0, 0.0])
    spec = Speculator(rows, Scripted([3] * 20, 4, vocab_size=4))
    assert spec.generate([3], 5, logits_processor=[ban_best, halve]).token_ids == [1] * 5
    assert spec.generate([3], 5, logits_processor=[halve, ban_best]).token_ids == [2] * 5
    assert spec.generate([3], 5).token_ids == [0] * 5


PROCESSORS: dict[str, dict[str, Any]] = {
    "repetition_penalty": {"repetition_penalty": 1.8},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 2},
    "bad_words_ids": {"bad_words_ids": [[6], [14, 26]]},
    "suppress_tokens": {"suppress_tokens": list(range(60))},
    "min_new_tokens": {"min_new_tokens": 6, "eos_token_id": list(range(0, 90, 2))},
    "min_length": {"min_length": 9, "eos_token_id": list(range(0, 90, 2))},
    "all": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2, "suppress_tokens": [5, 6], "bad_words_ids": [[9]]},
}


@pytest.mark.parametrize("name", PROCESSORS)
def test_the_generation_config_is_honoured(name: str) -> None:
    """The text is that of transformers' own generate under the same config, plain and speculative."""
    model = with_config(pad_token_id=0, **PROCESSORS[name])
    expected = own_text(model, 24)
    assert expected != own_text(model_of(), 24)[: len(expected)]
    for drafter in (None, build_drafter(2, num_target_layers=3), Scripted(PROMPT + expected, 6)):
        out = Speculator(model, drafter).generate(PROMPT, 24)
        assert out.token_ids == expected
        assert out.finish_reason == ("stop" if len(expected) < 24 else "length")


def test_own_processors_come_after_the_configs(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    def first(*_: Any) -> list[Any]:
        return [lambda ids, scores: order.append("config") or scores]

    spec = Speculator(constant([1.0, 0.0], ()), None)
    monkeypatch.setattr(GenerationDefaults, "processors", first)
    spec.generate([0], 1, logits_processor=[lambda ids, scores: order.append("own") or scores])
    assert order == ["config", "own"]


# --- sampling options -------------------------------------------------------------------------------------------


def test_sampling_defaults_come_from_the_generation_config() -> None:
    torch.manual_seed(0)
    table = torch.randn(VOCAB, VOCAB) * 2
    config = transformers.GenerationConfig(do_sample=True, temperature=0.7, top_k=5, top_p=0.9, min_p=0.1)
    spec = Speculator(FakeTarget(markov(table), generation_config=config), None)
    plain = Speculator(FakeTarget(markov(table)), None)
    options = {"temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.1}
    assert spec.generate(PROMPT, 30, seed=1).token_ids == plain.generate(PROMPT, 30, seed=1, **options).token_ids
    for name, off in (("top_k", 0), ("top_p", 1.0), ("min_p", 0.0), ("temperature", 1.6)):
        changed = plain.generate(PROMPT, 60, seed=1, **(options | {name: off})).token_ids
        assert spec.generate(PROMPT, 60, seed=1, **{name: off}).token_ids == changed
        assert changed != plain.generate(PROMPT, 60, seed=1, **options).token_ids
    assert spec.generate(PROMPT, 30, temperature=0).token_ids == plain.generate(PROMPT, 30).token_ids


def test_a_config_that_does_not_sample_is_greedy() -> None:
    table = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(0))
    greedy = Speculator(FakeTarget(markov(table)), None).generate(PROMPT, 10).token_ids
    for options in ({}, {"do_sample": False}, {"temperature": 0.7, "top_k": 3}):
        config = transformers.GenerationConfig(**options)
        spec = Speculator(FakeTarget(markov(table), generation_config=config), None)
        assert spec.generate(PROMPT, 10).token_ids == greedy


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -0.1}, "temperature must be a number from 0 to inf, got -0.1"),
        ({"temperature": float("nan")}, "temperature must be a number"),
        ({"temperature": float("inf")}, "temperature must be finite"),
        ({"top_p": 0.0}, "top_p must be above 0"),
        ({"top_p": 1.1}, "top_p must be a number from 0 to 1, got 1.1"),
        ({"top_k": -1}, "top_k must be an integer >= 0, got -1"),
        ({"top_k": 2.5}, "top_k must be an integer >= 0, got 2.5"),
        ({"min_p": 1.5}, "min_p must be a number from 0 to 1, got 1.5"),
        ({"max_new_tokens": -1}, "max_new_tokens: must be"),
        ({"max_new_tokens": 2.5}, "max_new_tokens: must be"),
        ({"max_new_tokens": True}, "max_new_tokens: must be"),
        ({"max_new_tokens": None}, "states no context limit, got None"),
        ({"seed": [1, 2]}, "seed must be a number or 1 numbers"),
        ({"seed": 2**64}, "seed must be an integer of 64 bits"),
        ({"seed": 1.5}, "seed must be"),
        ({"stop_strings": "x"}, "stop_strings: need a tokenizer"),
    ],
    ids=str,
)
def test_values_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    spec = Speculator(FakeTarget(scripted([1, 2, 3])), None)
    with pytest.raises(ValueError) as caught:
        spec.generate(PROMPT, **options)
    assert message in str(caught.value)


UNKNOWN = ("num_beams", "num_return_sequences", "past_key_values", "penalty_alpha", "do_sample", "max_tokens")


@pytest.mark.parametrize("name", UNKNOWN)
def test_unknown_arguments_are_errors(name: str) -> None:
    spec = Speculator(FakeTarget(scripted([1, 2, 3])), None)
    with pytest.raises(TypeError, match=name):
        spec.generate(PROMPT, **{name: 1})
    with pytest.raises(TypeError, match=name):
        spec.stream(PROMPT, **{name: 1})


REFUSED = {
    "num_beams": 4,
    "num_return_sequences": 2,
    "penalty_alpha": 0.6,
    "guidance_scale": 1.5,
    "token_healing": True,
}


@pytest.mark.parametrize("name", REFUSED)
def test_options_that_are_not_honoured_are_refused_by_name(name: str) -> None:
    config = transformers.GenerationConfig()
    setattr(config, name, REFUSED[name])
    with pytest.raises(ValueError, match=rf"generation_config\.{name} is not honoured here"):
        Speculator(FakeTarget(scripted([1]), generation_config=config), None)


def test_options_at_their_neutral_value_are_fine() -> None:
    neutral = {"num_beams": 1, "typical_p": 1.0, "repetition_penalty": 1.0, "num_return_sequences": 1}
    defaults = GenerationDefaults(transformers.GenerationConfig(**neutral))
    assert defaults.processors([3], [2], 5, torch.device("cpu")) == []
    assert defaults.sampling == {}


# --- the Speculator itself --------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 5, 16, -1])
def test_block_size_beyond_the_trained_one_is_refused(size: int) -> None:
    drafter = build_drafter(1)
    with pytest.raises(ValueError, match=rf"block_size must be 1 to 4 .*got {size}"):
        Speculator(FakeTarget(scripted([1]), TAPS), drafter, block_size=size)
    with pytest.raises(ValueError, match=rf"propose: block_size must be 1 to 4 .*got {size}"):
        drafter.propose(torch.tensor([1]), drafter.new_cache(1, 8), block_size=size)


def test_a_block_of_8_drafts_7() -> None:
    text = [*PROMPT, *range(10, 80)]
    out = Speculator(FakeTarget(scripted(text), TAPS), Scripted(text, 8)).generate(PROMPT, 33, return_proposals=True)
    assert out.stats.num_drafted == [7] * 4
    assert out.stats.proposals == [text[5 + 8 * i : 13 + 8 * i] for i in range(4)]


@pytest.mark.parametrize(
    "options",
    [
        {"path": "tree"},
        {"path": "viterbi"},
        {"num_nodes": 8},
        {"quantize": "int8"},
        {"optimize": "onnx"},
        {"backend": "x"},
    ],
    ids=str,
)
def test_speculator_options_are_refused_by_name(options: dict[str, Any]) -> None:
    ((name, value),) = options.items()
    with pytest.raises(ValueError, match=f"Speculator: {name} must be .*got '?{value}"):
        Speculator(FakeTarget(scripted([1])), None, **options)


def test_pairs_that_do_not_fit_are_refused() -> None:
    target = FakeTarget(scripted([1]), TAPS)
    for changes, fragments in (
        ({"vocab_size": 96, "mask_token_id": 95}, ("vocab_size", "97", "96")),
        ({"num_target_layers": 8}, ("num_target_layers", "6", "8")),
        ({"target_hidden_size": 32}, ("target_hidden_size", str(HIDDEN), "32")),
    ):
        raw = build_config(**changes)
        with pytest.raises(ValueError) as caught:
            Speculator(target, pydflash.Drafter(pydflash.DrafterConfig.from_dict(raw)))
        assert all(fragment in str(caught.value) for fragment in fragments)


def build_config(**changes: Any) -> dict[str, Any]:
    raw = config_dict(1)
    if "mask_token_id" in changes:
        raw["dflash_config"]["mask_token_id"] = changes.pop("mask_token_id")
    return raw | changes


def test_a_missing_backend_is_an_error_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    from pydflash.ops import backends

    monkeypatch.setattr(backends, "load", lambda name: backends.Backend(name, None, "not built today"))
    with pytest.raises(RuntimeError, match=r"no native ops for cpu \(not built today\).*backend='reference'"):
        Speculator(FakeTarget(scripted([1])), None)
    assert Speculator(FakeTarget(scripted([1])), None, backend="reference").generate([2], 2).token_ids == [1, 1]


def test_a_target_with_other_taps_is_wrapped_again() -> None:
    plain = Target(model_of())
    spec = Speculator(plain, build_drafter(1, num_target_layers=3))
    assert spec.target is not plain
    assert spec.target.model is plain.model
    assert spec.target.layer_ids == TAPS
    assert Speculator(spec.target, build_drafter(1, num_target_layers=3)).target is spec.target


def test_nothing_of_the_target_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """The drafter works on the target's own embedding table and head."""
    model = model_of()
    drafter = build_drafter(2, num_target_layers=3)
    seen: list[tuple[int, Any]] = []
    propose = drafter.propose

    def spy(*args: Any, **options: Any) -> Any:
        seen.append((options["embed"].data_ptr(), options["head"]))
        return propose(*args, **options)

    monkeypatch.setattr(drafter, "propose", spy)
    Speculator(model, drafter, target_path="generic").generate(PROMPT, 4)
    assert seen[0] == (model.model.embed_tokens.weight.data_ptr(), model.lm_head)
    assert not [name for name, _ in drafter.named_parameters() if "embed" in name or "head" in name]


def test_without_a_drafter_no_drafter_key_is_needed() -> None:
    out = Speculator(model_of(), None).generate(PROMPT, 6, return_proposals=True)
    assert out.token_ids == own_text(model_of(), 6)
    assert out.stats.proposals == [[token] for token in out.token_ids[:-1]]
    assert "drafter" not in out.stats.backends
    assert isinstance(out.stats, Stats)


def test_from_pretrained(tmp_path: Any) -> None:
    model, drafter = model_of(), build_drafter(2, num_target_layers=3)
    model.save_pretrained(tmp_path / "target")
    byte_tokenizer().save_pretrained(tmp_path / "target")
    drafter.save_pretrained(tmp_path / "drafter")
    spec = Speculator.from_pretrained(tmp_path / "target", tmp_path / "drafter", device="cpu", block_size=3)
    assert spec.block_size == 3
    assert spec.tokenizer.eos_token == "<eos>"
    assert spec.drafter.dtype == spec.target.dtype == torch.float32
    assert spec.generate(PROMPT, 8, stop_token_ids=[]).token_ids == own_text(model, 8)
    half = Speculator.from_pretrained(tmp_path / "target", tmp_path / "drafter", device="cpu", dtype="bfloat16")
    assert half.drafter.dtype == half.target.dtype == torch.bfloat16
    plain = Speculator.from_pretrained(tmp_path / "target", device="cpu")
    assert plain.drafter is None
    assert MASK not in plain.generate(PROMPT, 8, stop_token_ids=[]).token_ids


def test_an_ngram_longer_than_the_prompt_is_not_built() -> None:
    """transformers makes a list of as many entries as the n-gram is long."""
    found = Speculator(model_of(), None).generate(PROMPT, 4, encoder_no_repeat_ngram_size=2**31 - 1)
    assert found.token_ids == own_text(model_of(), 4)
