"""Requests at random through the public API: an answer that holds what it promises, or an error in the house form.

`--full -m slow` draws 10,000 of them. What is drawn depends on the test alone, so that every run draws the same.
"""

from __future__ import annotations

import functools
import gc
import math
import re
import warnings
from typing import Any

import pytest
import torch
from fakes import byte_tokenizer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pairs import HIDDEN, config_dict
from requests_at_random import HOSTILE, JSON, OPTIONS, SINGLE, TEMPLATE, options, prompts
from tiny_models import TINY

from pydflash import Drafter, DrafterConfig, Generation, Speculator
from pydflash.cli.commands import main

SMALL, FULL = 60, 3_300  # cases of each of the three tests that generate
VOCAB = 257
HOUSE = re.compile(r"^[\w.\[\]-]+( \w+)?: ")
UNEXPECTED = re.compile(r"^(generate|stream)\(\) got an unexpected keyword argument '\w+'")
COUNTS = (pytest.param(SMALL, id="some"), pytest.param(FULL, id="all", marks=pytest.mark.slow))


@functools.cache
def pair(drafts: bool, form: str = "auto") -> Speculator:
    """A tiny model of 64 positions over bytes, with a drafter or without."""
    torch.manual_seed(0)
    model = TINY["llama"](num_hidden_layers=3, vocab_size=VOCAB, max_position_embeddings=64)
    model.generation_config.eos_token_id = 256
    drafter = None
    if drafts:
        config = config_dict(1, vocab_size=VOCAB, target_layer_ids=[0, 2], block_size=5, mask_token_id=255)
        config["dflash_config"] = config.get("dflash_config", {}) | {"mask_token_id": 255, "target_layer_ids": [0, 2]}
        drafter = Drafter(DrafterConfig.from_dict(config | {"num_target_layers": 3}))
    return Speculator(model, drafter, byte_tokenizer(TEMPLATE), target_path=form)


def attempt(call: Any, *arguments: Any, **named: Any) -> Any:
    """The result, or a documented error as its text; everything else fails the test."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return call(*arguments, **named)
        except (ValueError, TypeError) as error:
            text, kind = str(error), type(error).__name__
    assert HOUSE.match(text) or UNEXPECTED.match(text), f"{kind}: {text}"
    assert len(text) < 2000
    return text


def check(out: Generation, asked: dict[str, Any]) -> None:
    """What every answer holds."""
    assert all(0 <= token < VOCAB for token in out.token_ids)
    assert out.finish_reason in ("stop", "length")
    limit = asked["max_new_tokens"]
    limit = limit[0] if isinstance(limit, list) else limit  # one for each prompt of one
    assert len(out.token_ids) <= (64 if limit is None else int(limit))
    if out.stats.rounds:
        assert all(0 <= n <= 4 for n in out.stats.num_accepted)
        assert out.stats.new_tokens + 1 >= 1
    if out.logprobs is not None:
        assert [listed.token_id for listed in out.logprobs] == out.token_ids
        for listed in out.logprobs:
            assert listed.logprob <= 1e-5
            assert not math.isnan(listed.logprob)
            assert len(listed.top) == (0 if asked["logprobs"] is True else int(asked["logprobs"]))
            assert sorted((-x, i) for i, x in listed.top) == [(-x, i) for i, x in listed.top]


def texts(found: Any) -> Any:
    """Token ids and reasons, of lists too."""
    return [texts(one) for one in found] if isinstance(found, list) else (found.token_ids, found.finish_reason)


def fuzz(count: int) -> Any:
    return settings(
        max_examples=count, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
    )


@pytest.mark.parametrize("count", COUNTS)
def test_a_request_gives_the_plain_text_or_says_what_is_wrong(count: int) -> None:
    @fuzz(count)
    @given(prompts(), options(), st.sampled_from(["auto", "auto", "generic"]))
    def run(prompt: Any, asked: dict[str, Any], form: str) -> None:
        fixed = {"seed": 3} | asked
        if fixed["seed"] is None:
            fixed["seed"] = 3
        drafted = attempt(pair(True, form).generate, prompt, **fixed)
        plain = attempt(pair(False).generate, prompt, **fixed)
        assert isinstance(drafted, str) == isinstance(plain, str), (drafted, plain)
        if isinstance(drafted, str):
            assert drafted == plain
            return
        assert texts(drafted) == texts(plain)
        for one in drafted if isinstance(drafted, list) else [drafted]:
            check(one, fixed)

    run()
    assert pair(True).generate([1, 2, 3], 5).token_ids == pair(False).generate([1, 2, 3], 5).token_ids


@pytest.mark.parametrize("count", COUNTS)
def test_a_stream_gives_the_same_in_pieces_and_may_be_left(count: int) -> None:
    @fuzz(count)
    @given(SINGLE, options(), st.integers(0, 6), st.booleans())
    def run(prompt: Any, asked: dict[str, Any], leave_after: int, leave: bool) -> None:
        fixed = {"seed": 5} | asked
        if fixed["seed"] is None:
            fixed["seed"] = 5
        spec = pair(True)
        stream = attempt(spec.stream, prompt, **fixed)
        whole = attempt(spec.generate, prompt, **fixed)
        if isinstance(stream, str):
            assert stream.replace("stream", "generate") == str(whole).replace("stream", "generate")
            return
        if leave:
            for n, _ in enumerate(stream):
                if n == leave_after:
                    break
            stream.close()
            return
        ids, pieces = [], []
        for chunk in stream:
            ids += chunk.token_ids
            pieces.append(chunk.text)
        assert (ids, "".join(pieces)) == (whole.token_ids, whole.text)
        assert stream.output.finish_reason == whole.finish_reason

    run()


@pytest.mark.parametrize("count", COUNTS)
def test_lists_and_several_texts_give_each_what_it_gets_alone(count: int) -> None:
    @fuzz(count)
    @given(st.lists(SINGLE | HOSTILE, min_size=1, max_size=3), options(), st.integers(1, 2), st.booleans())
    def run(many: list[Any], asked: dict[str, Any], n: int, errors: bool) -> None:
        fixed = {name: x for name, x in asked.items() if not isinstance(x, (list, tuple))} | {"seed": 7}
        spec = pair(True)
        found = attempt(spec.generate, many, n=n, return_errors=errors, **fixed)
        if isinstance(found, str) or not isinstance(found, list) or len(found) != len(many):
            return  # one prompt, as a list of ids is, or refused
        for prompt, rows in zip(many, found, strict=True):
            for i, one in enumerate(rows if n > 1 else [rows]):
                alone = attempt(spec.generate, prompt, **fixed | {"seed": 7 + i})
                if isinstance(one, ValueError):
                    assert isinstance(alone, str)
                elif isinstance(alone, Generation):
                    assert texts(one) == texts(alone)

    run()


def test_nothing_is_left_behind() -> None:
    """As many tensors live after 300 requests as after 30."""
    counts = []

    @fuzz(30)
    @given(prompts(), options())
    def run(prompt: Any, asked: dict[str, Any]) -> None:
        attempt(pair(True).generate, prompt, **asked)

    for repeats in (1, 1, 8):
        for _ in range(repeats):
            run()
        gc.collect()
        counts.append(sum(isinstance(x, torch.Tensor) for x in gc.get_objects()))
    assert counts[2] <= counts[1] + 2, counts


@pytest.mark.parametrize("count", [pytest.param(100, id="some"), pytest.param(2_000, id="all", marks=pytest.mark.slow)])
def test_configs_are_taken_or_refused(count: int) -> None:
    raw = config_dict(2)
    keys = [*raw, *raw.get("dflash_config", {}), "no_such_key"]

    @fuzz(count)
    @given(st.dictionaries(st.sampled_from(keys), JSON | st.integers(-3, 300), max_size=3), st.booleans())
    def run(changes: dict[str, Any], inside: bool) -> None:
        changed = dict(raw)
        for name, value in changes.items():
            if name in raw.get("dflash_config", {}) and inside:
                changed["dflash_config"] = dict(changed["dflash_config"]) | {name: value}
            else:
                changed[name] = value
        attempt(DrafterConfig.from_dict, changed)

    run()


@pytest.mark.parametrize("count", [pytest.param(60, id="some"), pytest.param(600, id="all", marks=pytest.mark.slow)])
def test_the_command_line_is_taken_or_refused(count: int, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is loaded: each line ends at its arguments or at a folder that is not there."""
    words = st.sampled_from([
        "generate", "bench", "demo", "export", "info", "train", "fit", "calibrate", "--temperature", "-1", "nan", "2.5",
        "--num-nodes", "15", "--path", "tree", "walk", "--device", "cuda", "cpu", "tpu", "--json", "--seed", "9" * 30,
        "/no/such/folder", "--drafter", "--max-new-tokens", "--block-size", "0", "--help", "--quantize", "int3", "é",
    ])  # fmt: skip

    @fuzz(count)
    @given(st.lists(words, max_size=6))
    def run(line: list[str]) -> None:
        if line[:1] == ["demo"] or line[:2] == ["train", "toy"] or "info" in line[:1]:
            return  # these run without a target
        try:
            code = main(line)
        except SystemExit as ended:
            code = ended.code
        assert code in (0, 1, 2, None)
        assert "Traceback" not in capsys.readouterr().err

    run()


def test_low_level_calls_are_checked() -> None:
    drafter = pair(True).drafter

    @fuzz(80)
    @given(HOSTILE, st.sampled_from(["features", "capacity", "counts", "anchors", "block_size"]))
    def run(value: Any, which: str) -> None:
        features = torch.zeros(1, 3, 2 * HIDDEN)
        with torch.inference_mode():
            cache = attempt(drafter.new_cache, 1, value if which == "capacity" and not isinstance(value, int) else 20)
            if isinstance(cache, str):
                return
            if isinstance(attempt(drafter.append_context, value if which == "features" else features, cache), str):
                return
            attempt(
                drafter.propose,
                value if which == "anchors" else torch.tensor([1]),
                cache,
                embed=torch.zeros(VOCAB, HIDDEN),
                head=torch.nn.Linear(HIDDEN, VOCAB),
                block_size=value if which == "block_size" else 4,
            )

    run()


def test_the_strategies_draw_requests_that_fit() -> None:
    """Else the tests above would try nothing but refusals."""
    fits = []

    @fuzz(120)
    @given(prompts(), options())
    def run(prompt: Any, asked: dict[str, Any]) -> None:
        fits.append(not isinstance(attempt(pair(False).generate, prompt, **asked), str))

    run()
    assert 0.4 <= sum(fits) / len(fits) <= 0.95
    assert set(OPTIONS) >= {"temperature", "stop_strings", "logprobs"}
