"""The methods that `pydflash bench` compares, on a tiny target and a drafter fitted to it."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from pairs import VOCAB as PAIR_VOCAB
from pairs import build_drafter, fit, fitted_prompts
from tiny_models import TINY

from pydflash.bench import checks as bench_checks
from pydflash.bench import methods as bench_methods
from pydflash.bench.methods import Answer, Ends
from pydflash.drafter.module import Drafter
from pydflash.speculator import Speculator
from pydflash.target.generic import Target


def official_there() -> bool:
    if importlib.util.find_spec("dflash") is None:
        return False
    from transformers import DynamicCache

    return hasattr(DynamicCache, "activate_past_recording")


needs_official = pytest.mark.skipif(not official_there(), reason="needs the official dflash package and transformers 5")


@pytest.fixture(scope="module")
def fitted() -> tuple[Target, Drafter]:
    """A tiny target, and a DFlash 2 drafter that has learnt its greedy text after some prompts."""
    model = TINY["qwen3"](num_hidden_layers=6)
    return Target(model, (0, 2)), fit(build_drafter(2, seed=5), model)


NO_END = Ends([], [], None)


def plain_ids(target: Target, prompt: list[int], count: int, stops: Sequence[int] = ()) -> list[int]:
    spec = Speculator(target.model, None)
    return spec.generate(prompt, count, temperature=0.0, stop_token_ids=list(stops)).token_ids


def counted(target: Target, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of every forward of the model from now on."""
    forward, rows = target.model.forward, []

    def spy(*given: Any, **named: Any) -> Any:
        rows.append((given[0] if given else named["input_ids"]).shape[1])
        return forward(*given, **named)

    monkeypatch.setattr(target.model, "forward", spy)
    return rows


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_lookup_rounds_are_those_of_its_forwards(
    fitted: tuple[Target, Drafter], temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = fitted[0]
    prompt = fitted_prompts()[1].tolist()
    prompt += plain_ids(target, prompt, 30)  # the target may go on with what stands there
    rows = counted(target, monkeypatch)
    ends = Ends([PAIR_VOCAB], [], None)  # never met; transformers 4 needs one
    out = bench_methods.lookup_method(target, ends, 4)(prompt[:-15], temperature, 3, 24)
    assert len(out.ids) == 24
    assert not target.model._forward_pre_hooks
    assert len(out.accepted) == len(out.drafted) == len(rows) - 1
    first = 24 - sum(out.accepted) - len(out.accepted)  # what the prefill brought, which belongs to no round
    assert 1 <= first <= 5
    assert out.verified == [n - 1 for n in rows[1:]]
    assert out.drafted == [*out.verified[:-1], out.accepted[-1]]
    assert all(n <= m for n, m in zip(out.accepted, out.drafted, strict=True))
    if temperature == 0:
        assert out.ids == plain_ids(target, prompt[:-15], 24)
        assert max(out.drafted) == 4


def test_transformers_row_is_its_generate(fitted: tuple[Target, Drafter]) -> None:
    target = fitted[0]
    prompt = fitted_prompts()[2].tolist()
    whole = plain_ids(target, prompt, 20)
    method = bench_methods.transformers_method(target, NO_END)
    assert method(prompt, 0.0, 0, 20) == Answer(whole, [], [], [])
    stop = next(t for i, t in enumerate(whole) if i > 3 and t not in whole[:i])
    ended = bench_methods.transformers_method(target, Ends([stop], [], None))(prompt, 0.0, 0, 20)
    assert ended.ids == whole[: whole.index(stop) + 1]
    sampled = [method(prompt, 1.0, seed, 20).ids for seed in (1, 1, 2)]
    assert sampled[0] == sampled[1] != sampled[2]


def test_transformers_samples_without_its_top_k_of_50(
    fitted: tuple[Target, Drafter], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    monkeypatch.setattr(fitted[0].model, "generate", lambda prompt, **named: asked.append(named) or prompt)
    bench_methods.transformers_method(fitted[0], NO_END)([1, 2], 0.7, 0, 5)
    assert {k: asked[0][k] for k in ("do_sample", "temperature", "top_k", "top_p", "max_new_tokens")} == {
        "do_sample": True,
        "temperature": 0.7,
        "top_k": 0,
        "top_p": 1.0,
        "max_new_tokens": 5,
    }


def test_ends_are_the_target_s_or_the_tokenizer_s(fitted: tuple[Target, Drafter]) -> None:
    target, tokenizer = fitted[0], SimpleNamespace(eos_token_id=7)
    assert Ends.of(target, tokenizer) == Ends([7], [], None)
    assert Ends.of(target, None) == Ends([], [], None)
    config = target.model.generation_config
    config.eos_token_id, config.stop_strings = [3, 4], ["x"]
    try:
        assert Ends.of(target, tokenizer) == Ends([3, 4], ["x"], tokenizer)
    finally:
        config.eos_token_id = config.stop_strings = None


def test_our_row_ignores_filters_of_the_generation_config(fitted: tuple[Target, Drafter]) -> None:
    target = fitted[0]
    spec = Speculator(target.model, None)
    method = bench_methods.speculator_method(spec, NO_END)
    free = [method([1, 2, 3], 5.0, seed, 12).ids for seed in range(3)]
    target.model.generation_config.top_k = 1
    try:
        assert [method([1, 2, 3], 5.0, seed, 12).ids for seed in range(3)] == free
    finally:
        target.model.generation_config.top_k = None


def test_paths_of_each_drafter() -> None:
    got = bench_methods.draft_paths(["a", "b"], [15, "auto"], True)
    assert list(got) == [d + row for d in "ab" for row in ("", " viterbi", " tree 15", " tree auto")]
    assert list(got.values())[4:] == [
        ("b", "walk", None),
        ("b", "viterbi", None),
        ("b", "tree", 15),
        ("b", "tree", "auto"),
    ]
    assert list(bench_methods.draft_paths(["a"], [], False).values()) == [("a", "walk", None)]


def test_trees_keep_more_of_the_same_text(fitted: tuple[Target, Drafter]) -> None:
    target, drafter = fitted
    paths = bench_methods.draft_paths(["d"], [15, 31, "auto"], True)
    methods = bench_methods.drafter_methods(target, {"d": drafter}, paths, NO_END)
    rounds = dict.fromkeys(methods, 0)
    for number, prompt in enumerate(fitted_prompts()[:3].tolist()):
        whole = plain_ids(target, prompt, 30)
        for name, method in methods.items():
            got, nodes = method(prompt, 0.0, number, 30), paths[name].num_nodes
            assert got.ids == whole
            assert len(got.accepted) == len(got.drafted) == len(got.verified)
            assert all(n <= m <= 3 for n, m in zip(got.accepted, got.drafted, strict=True))
            assert set(got.verified) <= ({3, 15, 31, 63} if nodes == "auto" else {nodes or 3})
            rounds[name] += len(got.accepted)
    assert rounds["d tree 31"] <= rounds["d tree 15"] < 0.9 * rounds["d"]
    assert max(rounds.values()) < 3 * 29


@needs_official
def test_official_rounds_are_ours(fitted: tuple[Target, Drafter]) -> None:
    target, drafter = fitted
    ours = bench_methods.speculator_method(Speculator(target, drafter), NO_END)
    official = bench_methods.official_method(target, drafter, NO_END)
    deep = 0
    for prompt in fitted_prompts().tolist():
        want, got = ours(prompt, 0.0, 0, 40), official(prompt, 0.0, 0, 40)
        assert got.ids == want.ids
        assert sum(got.accepted) + len(got.accepted) + 1 == 40
        # Near the end it drafts no more than fits, where ours drafts full blocks and cuts.
        whole = len(want.accepted) - 2
        assert got.accepted[:whole] == want.accepted[:whole]
        assert got.drafted[:whole] == [3] * whole
        assert got.drafted[-1] == got.accepted[-1]
        deep = max([deep, *got.accepted])
    assert deep == 3
    short = bench_methods.official_method(target, drafter, NO_END, 2)(fitted_prompts()[0].tolist(), 0.0, 0, 12)
    assert set(short.drafted[:-1]) == {1}
    sampled = [official(fitted_prompts()[0].tolist(), 1.0, seed, 12).ids for seed in (1, 1, 2)]
    assert sampled[0] == sampled[1] != sampled[2]


@needs_official
def test_official_loop_stops_where_ours_does_and_shares_the_tensors(fitted: tuple[Target, Drafter]) -> None:
    target, drafter = fitted
    prompt = fitted_prompts()[0].tolist()
    whole = plain_ids(target, prompt, 40)
    stop = next(t for i, t in enumerate(whole) if i > 5 and t not in whole[:i])
    ends = Ends([stop], [], None)
    got = bench_methods.official_method(target, drafter, ends)(prompt, 0.0, 0, 40)
    assert got.ids == whole[: whole.index(stop) + 1]
    assert sum(got.accepted) + len(got.accepted) + 1 == len(got.ids)
    model = bench_methods.official_model(importlib.import_module("dflash.model"), drafter)
    assert model.fc.weight.data_ptr() == drafter.fc.weight.data_ptr()
    with pytest.raises(ValueError, match="stop strings"):
        bench_methods.official_method(target, drafter, Ends([], "x", None))


def test_missing_peers_are_named_or_refused(fitted: tuple[Target, Drafter], monkeypatch: pytest.MonkeyPatch) -> None:
    target, drafter = fitted
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None)
    monkeypatch.setattr(bench_methods, "lookup_method", lambda *given: (_ for _ in ()).throw(TypeError("no crop")))
    methods: dict[str, bench_methods.Method] = {}
    prompt = fitted_prompts()[0].tolist()
    missing = bench_methods.add_peers(methods, None, target, {"d": drafter}, NO_END, prompt)
    assert list(methods) == ["transformers"]
    assert missing == {
        "prompt lookup": "no crop",
        "official dflash": "the package is not installed (pip install --no-deps dflash)",
    }
    with pytest.raises(ValueError, match="peer 'lookup' must work where it is asked for, got: no crop"):
        bench_methods.add_peers({}, ["lookup"], target, {"d": drafter}, NO_END, prompt)
    assert bench_methods.add_peers({}, [], target, {"d": drafter}, NO_END, prompt) == {}
    with pytest.raises(ValueError, match="--peers must be installed, got dflash"):
        bench_checks.parse_peers("dflash")
    assert bench_methods.official_name("d", ["d", "e"]) == "official dflash, d"
