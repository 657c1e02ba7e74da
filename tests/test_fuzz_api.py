"""Requests at random through the public API: an answer that holds what it promises, or an error in the house form.

With --full these and those of test_fuzz_parts.py are 10,000. What is drawn depends on the test alone, so that every run
draws the same.
"""

from __future__ import annotations

import gc
import threading
from typing import Any

import torch
from fuzz_cases import FORMS, attempt, cases, check, fuzz, pair, texts, told
from hypothesis import given
from hypothesis import strategies as st
from requests_at_random import HOSTILE, KNOWN, OPTIONS, SINGLE, options, prompts

from pydflash import Generation


def same_as_ever(form: str | None) -> None:
    """A plain request gives what it gives without a drafter."""
    assert pair(form).generate(KNOWN, 5).token_ids == pair(None).generate(KNOWN, 5).token_ids


@cases(90, 2_600)
def test_a_request_gives_the_plain_text_or_says_what_is_wrong(count: int) -> None:
    @fuzz(count)
    @given(prompts(), options(), st.sampled_from(list(FORMS)))
    def run(prompt: Any, asked: dict[str, Any], form: str) -> None:
        fixed = {"seed": 3} | asked
        if fixed["seed"] is None:
            fixed["seed"] = 3
        drafted = attempt(pair(form).generate, prompt, **fixed)
        plain = attempt(pair(None).generate, prompt, **fixed)
        if isinstance(drafted, str) or isinstance(plain, str):
            assert drafted == plain
            same_as_ever(form)
            return
        assert texts(drafted) == texts(plain)
        for one in drafted if isinstance(drafted, list) else [drafted]:
            check(one, fixed)

    run()


@cases(30, 800)
def test_sampled_drafts_give_the_plain_text_where_it_is_greedy_and_repeat(count: int) -> None:
    @fuzz(count)
    @given(SINGLE, options(one_in=60), st.integers(0, 2**63))
    def run(prompt: Any, asked: dict[str, Any], seed: int) -> None:
        spec, fixed = pair("sampled"), asked | {"seed": seed}
        first, again = (attempt(spec.generate, prompt, **fixed) for _ in range(2))
        if isinstance(first, str):
            assert first == again
            return
        assert texts(first) == texts(again)
        check(first, fixed)
        if not fixed.get("temperature"):
            assert texts(first) == texts(attempt(pair(None).generate, prompt, **fixed))

    run()


@cases(60, 1_400)
def test_a_stream_gives_the_same_in_pieces_and_may_be_left(count: int) -> None:
    @fuzz(count)
    @given(
        SINGLE, options(one_in=40), st.integers(0, 9), st.booleans(), st.sampled_from(["walk", "device", "device tree"])
    )
    def run(prompt: Any, asked: dict[str, Any], leave_after: int, leave: bool, form: str) -> None:
        fixed = {"seed": 5} | asked
        if fixed["seed"] is None:
            fixed["seed"] = 5
        spec = pair(form)
        whole = attempt(spec.generate, prompt, **fixed)
        stream = attempt(spec.stream, prompt, **fixed)
        chunks: list[Any] = []
        while not isinstance(stream, str):
            chunk = attempt(next, stream, None)
            if chunk is None or (leave and len(chunks) == leave_after):
                break
            if isinstance(chunk, str):
                stream = chunk
                break
            chunks.append(chunk)
        if isinstance(stream, str):
            assert stream.replace("stream", "generate") == str(whole).replace("stream", "generate")
            return
        ids, text = [t for chunk in chunks for t in chunk.token_ids], "".join(chunk.text for chunk in chunks)
        if leave and not isinstance(whole, Generation):  # an error that comes later
            return
        assert whole.token_ids[: len(ids)] == ids
        assert whole.text.startswith(text)
        if not leave:
            assert (ids, text, stream.output.finish_reason) == texts(whole)
            assert texts(stream.output) == texts(whole)
        else:
            same_as_ever(form)

    run()


@cases(40, 900)
def test_lists_and_several_texts_give_each_what_it_gets_alone(count: int) -> None:
    @fuzz(count)
    @given(
        st.lists(st.one_of(SINGLE, SINGLE, SINGLE, HOSTILE), min_size=1, max_size=3),
        options(one_in=40),
        st.integers(1, 2),
        st.booleans(),
        st.sampled_from(["walk", "device", None, "tree"]),
        st.lists(st.sampled_from([0.0, 0.7, 1.3]), min_size=3, max_size=3),
    )
    def run(many: list[Any], asked: dict[str, Any], n: int, errors: bool, form: Any, heats: list[float]) -> None:
        fixed = {name: x for name, x in asked.items() if not isinstance(x, (list, tuple))} | {"seed": 7}
        each = [{"temperature": heat} for heat in heats[: len(many)]]
        spec = pair(form)
        found = attempt(spec.generate, many, n=n, return_errors=errors, **fixed | {"temperature": heats[: len(many)]})
        if isinstance(found, str) or not isinstance(found, list) or len(found) != len(many):
            return  # one prompt, as a list of ids is, or refused
        for prompt, rows, its in zip(many, found, each, strict=True):
            for i, one in enumerate(rows if n > 1 else [rows]):
                alone = attempt(spec.generate, prompt, **fixed | its | {"seed": 7 + i})
                if isinstance(one, ValueError):  # which may be a list of prompts, alone
                    assert isinstance(alone, list) or told(one) == alone or "a list of single prompts" in str(one)
                elif isinstance(alone, Generation):
                    assert texts(one) == texts(alone)

    run()


@cases(8, 200)
def test_two_threads_get_what_each_gets_alone(count: int) -> None:
    @fuzz(count)
    @given(
        st.lists(st.tuples(SINGLE, options(one_in=20)), min_size=2, max_size=2),
        st.sampled_from(["walk", "device", "device tree"]),
    )
    def run(asked: list[tuple[Any, dict[str, Any]]], form: str) -> None:
        spec, found = pair(form), {}

        def ask(i: int) -> Any:
            prompt, given_options = asked[i]
            return attempt(spec.generate, prompt, **given_options | {"seed": 11 + i})

        threads = [threading.Thread(target=lambda i=i: found.update({i: ask(i)})) for i in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for i in range(2):
            alone, together = ask(i), found[i]
            assert together == alone if isinstance(alone, str) else texts(together) == texts(alone)

    run()


def test_nothing_is_left_behind() -> None:
    """As many tensors live after 250 requests as after 50."""
    counts = []

    @fuzz(25)
    @given(prompts(), options(), st.sampled_from(list(FORMS)))
    def run(prompt: Any, asked: dict[str, Any], form: str) -> None:
        attempt(pair(form).generate, prompt, **asked)
        stream = attempt(pair(form).stream, prompt, **asked)
        if not isinstance(stream, str):
            attempt(next, stream, None)  # and is left there

    for repeats in (2, 8):
        for _ in range(repeats):
            run()
        gc.collect()
        counts.append(sum(issubclass(type(x), torch.Tensor) for x in gc.get_objects()))
    assert counts[1] <= counts[0] + 2, counts


def test_the_strategies_draw_requests_that_fit() -> None:
    """Else the tests above would try nothing but refusals."""
    fits = []

    @fuzz(120)
    @given(prompts(), options())
    def run(prompt: Any, asked: dict[str, Any]) -> None:
        fits.append(not isinstance(attempt(pair(None).generate, prompt, **asked), str))

    run()
    assert 0.4 <= sum(fits) / len(fits) <= 0.9
    assert set(OPTIONS) >= {"temperature", "stop_strings", "logprobs"}
