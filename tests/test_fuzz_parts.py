"""Configs, drafters, options and command lines at random: taken, or refused in the house form. See test_fuzz_api.py."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from fuzz_cases import HOUSE, VOCAB, attempt, cases, fuzz, pair
from hypothesis import given
from hypothesis import strategies as st
from pairs import HIDDEN, build_drafter, config_dict
from requests_at_random import HOSTILE, fresh

from pydflash import DrafterConfig
from pydflash.cli.commands import main
from pydflash.sampling import SamplingParams, row_seeds
from pydflash.target.defaults import KEYS
from pydflash.target.values import checked, token_biases, token_ids
from pydflash.text import Output, split_prompts

ANY = st.recursive(
    HOSTILE | st.integers(-3, 300) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)


@cases(60, 1_900)
def test_configs_are_taken_or_refused(count: int) -> None:
    @fuzz(count)
    @given(st.sampled_from([1, 2]), st.data())
    def run(version: int, data: Any) -> None:
        raw = config_dict(version)
        keys = [
            *raw,
            *raw["dflash_config"],
            "draft_vocab_size",
            "aux_hidden_state_layer_ids",
            "rope_scaling",
            "no_such_key",
        ]
        changes = data.draw(st.dictionaries(st.sampled_from(keys), ANY, max_size=3))
        for name, value in changes.items():
            section = raw["dflash_config"]
            (section if isinstance(section, dict) and name in section else raw)[name] = value
        config = attempt(DrafterConfig.from_dict, raw)
        if not isinstance(config, str):
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                assert DrafterConfig.from_dict(config.to_dict()) == config

    run()


@cases(40, 1_100)
def test_numbers_and_ids_are_taken_or_refused(count: int) -> None:
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")

    @fuzz(count)
    @given(st.dictionaries(st.sampled_from(names), ANY, max_size=2), st.sampled_from(sorted(KEYS)), ANY)
    def run(params: dict[str, Any], key: str, value: Any) -> None:
        found = attempt(SamplingParams, **params)
        if not isinstance(found, str):
            assert all(type(getattr(found, name)) is (int if name == "top_k" else float) for name in names)
        plain = attempt(checked, key, value, VOCAB)
        if key in ("suppress_tokens", "forced_eos_token_id") and isinstance(plain, list) and plain is not value:
            assert all(type(i) is int and 0 <= i < VOCAB for i in plain)
        attempt(token_biases, "logit_bias", value, VOCAB)
        seeds = attempt(row_seeds, value, 2)
        if not isinstance(seeds, str):
            assert len(seeds) == 2
            assert all(-(2**63) <= seed < 2**63 for seed in seeds)
        ids = attempt(token_ids, "stop_token_ids", value)
        assert isinstance(ids, str) or all(type(i) is int for i in ids)
        attempt(split_prompts, value)

    run()


@cases(30, 500)
def test_an_output_does_not_depend_on_how_its_tokens_come(count: int) -> None:
    tokenizer = pair(None).tokenizer

    @fuzz(count)
    @given(
        st.lists(st.integers(0, 256) | st.sampled_from(list("é漢🙂ab".encode())), max_size=30),
        st.lists(st.integers(1, 5), min_size=30, max_size=30),
        st.integers(0, 30),
        st.lists(st.text(alphabet="ab.é漢🙂�", min_size=1, max_size=3) | st.just("<eos>"), max_size=2),
        st.lists(st.integers(0, 256), max_size=3),
    )
    def run(tokens: list[int], sizes: list[int], limit: int, strings: list[str], stops: list[int]) -> None:
        whole, pieces = (Output(tokenizer, limit, stops, strings) for _ in range(2))
        whole.extend(tokens)
        left, said = list(tokens), ""
        for size in sizes:
            ends = pieces.ends_with(left[:size])
            said += pieces.extend(left[:size])[1]
            assert ends == (pieces.finish_reason is not None)
            left = left[size:]
        assert (pieces.token_ids, pieces.finish_reason) == (whole.token_ids, whole.finish_reason)
        assert said == pieces.text
        if whole.finish_reason is not None:  # else the text of a character that is not complete may be held back
            assert pieces.text == whole.text

    run()


@cases(40, 800)
def test_a_drafter_takes_or_refuses(count: int) -> None:
    drafter = build_drafter(2, vocab_size=VOCAB, block_size=5, mask_token_id=255)
    table, head = torch.zeros(VOCAB, HIDDEN), torch.nn.Linear(HIDDEN, VOCAB)
    which = st.sampled_from(
        ["batch", "capacity", "features", "counts", "anchors", "block_size", "temperature", "seeds"]
    )
    shapes = st.lists(st.integers(0, 3), max_size=4).map(lambda shape: torch.zeros(*shape, 2 * HIDDEN))
    numbers = st.lists(st.integers(-2, 300), max_size=3).map(torch.tensor)

    @fuzz(count)
    @given(st.dictionaries(which, HOSTILE | shapes | numbers, max_size=2))
    def run(changes: dict[str, Any]) -> None:
        def value(name: str, usual: Any) -> Any:
            return changes.get(name, usual)

        changes = fresh(changes)
        if any(isinstance(x := changes.get(name), int) and 10**4 < x < 2**31 for name in ("batch", "capacity")):
            return  # this is memory, which torch may have or not
        with torch.inference_mode():
            cache = attempt(drafter.new_cache, value("batch", 1), value("capacity", 20))
            if isinstance(cache, str):
                return
            features, anchors = value("features", torch.zeros(1, 3, 2 * HIDDEN)), value("anchors", torch.tensor([1]))
            if isinstance(attempt(drafter.append_context, features, cache, value("counts", None)), str):
                return
            out = attempt(
                drafter.propose,
                anchors,
                cache,
                embed=table,
                head=head,
                block_size=value("block_size", 4),
                temperature=value("temperature", None),
                seeds=value("seeds", 0),
            )
            if not isinstance(out, str):
                assert out.tokens.shape == (len(anchors), int(value("block_size", 4) or 5) - 1)
                assert bool(((out.tokens >= 0) & (out.tokens < VOCAB)).all())

    run()


@cases(40, 700)
def test_a_command_line_is_taken_or_refused(count: int, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is loaded: each line ends at its arguments or at a folder that is not there."""
    words = st.sampled_from([
        "generate", "bench", "export", "train", "fit", "data", "calibrate", "--temperature", "-1", "nan", "2.5", "inf",
        "--num-nodes", "15", "auto", "--path", "tree", "walk", "--device", "cuda", "cpu", "tpu", "--seed", "9" * 5000,
        "./no/such/folder", "--drafter", "--plain", "--max-new-tokens", "--block-size", "0", "--help", "--quantize",
        "int8", "é", "\ud800", "", "--settings", "--top-k", "--top-p", "--min-p", "--stop", "--debug=3", "--prompts",
    ])  # fmt: skip
    starts = st.sampled_from([[], ["generate", "./no/such/folder", "hi", "--plain"], ["bench", "./no/such/folder"]])

    @fuzz(count)
    @given(starts, st.lists(words, max_size=6))
    def run(start: list[str], line: list[str]) -> None:
        try:
            code = main([*start, *line])
        except SystemExit as ended:  # argparse's own
            code = ended.code
        said = capsys.readouterr().err
        assert code in (0, 2)
        assert "Traceback" not in said
        if code and said.startswith("pydflash: error: "):
            assert said.count("\n") == 1

    run()


def test_what_the_house_form_is() -> None:
    assert HOUSE.match("top_k: must be an integer >= 0, got -1")
    for other in ("top_k is wrong", "index out of range, got 3", "must be 3, got 4"):
        assert not HOUSE.match(other)
