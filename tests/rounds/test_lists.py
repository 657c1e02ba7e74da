"""Lists of prompts on a CPU: together where that is faster, and every text is the one that its prompt gives alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from device_pairs import LAYERS, NOBODY, assert_same, counts, pair, prompts_of
from greedy_texts import RECURRENT, model_of, target_of
from grids import slow
from pairs import build_drafter
from tiny_models import TINY

from pydflash import Generation, Speculator
from pydflash.ops import backends
from pydflash.protocols import TargetOutput
from pydflash.rounds import by_rows
from pydflash.rounds.by_rows import LoopByRows, apart_reason
from pydflash.target.generic import Target

PATHS: dict[str, dict[str, Any]] = {
    "plain": {},
    "walk": {},
    "walk without q": {"draft_sampling": False},
    "viterbi": {"path": "viterbi"},
    "tree": {"path": "tree", "num_nodes": 7},
}
LIMITS = [9, 1, 14, 6, 11, 20]
QUICK = ("mistral", "gemma2", "gpt2", "qwen2_5_vl")
FAMILIES = [name if name in QUICK else slow(name) for name in TINY if name not in (*RECURRENT, "llama4")]


@pytest.fixture
def together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lists run together whether that is faster here or not."""
    monkeypatch.setattr(by_rows, "apart_reason", lambda parts, fused: None)


def forwards_of(model: Any, run: Any) -> list[list[int]]:
    """The shapes of the tokens that the model's forwards got."""
    shapes: list[list[int]] = []

    def note(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        shapes.append(list(kwargs["input_ids"].shape))

    handle = model.register_forward_pre_hook(note, with_kwargs=True)
    try:
        run()
    finally:
        handle.remove()
    return shapes


def alone(spec: Speculator, prompts: list[list[int]], options: dict[str, Any]) -> list[Generation]:
    """Each prompt by itself, with its own entry of every option that is a list of them."""
    each = ("max_new_tokens", "seed", "temperature")
    return [
        spec.generate(prompt, **{k: v[i] if k in each else v for k, v in options.items()})
        for i, prompt in enumerate(prompts)
    ]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.usefixtures("together")
def test_a_list_is_its_prompts_alone(path: str) -> None:
    """Ragged prompts, lengths, temperatures and seeds of their own; text, counts and proposals."""
    model, drafter = pair(2, "cpu")
    spec = Speculator(model, None if path == "plain" else drafter, target_path="generic", **PATHS[path])
    assert isinstance(spec.loop, LoopByRows)
    prompts, kept = prompts_of(6), 0
    common: dict[str, Any] = {"max_new_tokens": LIMITS, "seed": [*range(20, 26)], "stop_token_ids": NOBODY}
    for temperature in ([0.0] * 6, [0.7, 0.0, 0.7, 0.7, 0.0, 0.7]):
        options = common | {"temperature": temperature, "return_proposals": True}
        got = spec.generate(prompts, **options)
        want = alone(spec, prompts, options)
        for one, other, its in zip(got, want, temperature, strict=True):
            if path == "tree" and its != max(temperature):  # beside sampled rows a greedy one's tree has a trunk too
                assert one.token_ids == other.token_ids
            else:
                assert_same(one, other)
        assert [len(one.token_ids) for one in got] == LIMITS
        kept += sum(sum(one.stats.num_accepted) for one in got)
    assert (kept > 0) == (path != "plain")
    assert got[0].stats.backends["lists"] == "together"
    assert got[0].stats.backends["round"] == "eager"
    assert want[0].stats.backends["round"] == "by the host, a sequence at a time"


@pytest.mark.parametrize("path", ["plain", "walk", "tree"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.usefixtures("together")
def test_families(family: str, path: str) -> None:
    changes: dict[str, Any] = {}
    if path != "plain":
        try:
            layers = model_of(family).config.get_text_config().layer_types[:2]
        except (AttributeError, TypeError):
            layers = None
        changes = {"num_hidden_layers": LAYERS} | ({} if layers is None else {"layer_types": list(layers) * 3})
    model = TINY[family](**changes) if changes else model_of(family)
    spec = Speculator(model, build_drafter(2) if changes else None, target_path="generic", **PATHS[path])
    prompts = prompts_of(8)[4:]
    for temperature in ([0.0] * 4, [0.8, 0.5, 1.0, 0.6]):
        options: dict[str, Any] = {"max_new_tokens": [12, 4, 9, 7], "seed": [1, 2, 3, 4], "temperature": temperature}
        options["stop_token_ids"] = NOBODY
        for one, other in zip(spec.generate(prompts, **options), alone(spec, prompts, options), strict=True):
            assert (one.token_ids, counts(one.stats)) == (other.token_ids, counts(other.stats))


def test_a_round_is_one_forward_of_the_rows_that_go_on() -> None:
    model, _ = pair(2, "cpu")
    spec = Speculator(model, None, target_path="generic")
    prompts = prompts_of(3)
    shapes = forwards_of(model, lambda: spec.generate(prompts, max_new_tokens=[5, 1, 3], stop_token_ids=NOBODY))
    assert shapes == [[1, len(p)] for p in prompts] + [[2, 1], [2, 1], [1, 1], [1, 1]]
    assert forwards_of(model, lambda: spec.generate([prompts[0]], 3, stop_token_ids=NOBODY))[1:] == [[1, 1], [1, 1]]


@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.usefixtures("together")
def test_options_hold_for_each_row(drafts: bool) -> None:
    """Stops, penalties, biases, log-probabilities and processors."""
    model, drafter = pair(2, "cpu")
    spec = Speculator(model, drafter if drafts else None, target_path="generic")
    prompts = prompts_of(4)
    first = [out.token_ids for out in spec.generate(prompts, 12, stop_token_ids=NOBODY, temperature=0.0)]
    never = first[1][2]
    cases: list[dict[str, Any]] = [
        {"stop_token_ids": [first[0][3], first[2][5]]},
        {"repetition_penalty": 1.4, "presence_penalty": 0.5, "logit_bias": {never: -100.0}},
        {"logprobs": 2},
        {"logits_processor": [lambda ids, scores: scores.index_fill(1, ids[0, -1:], -torch.inf)]},
    ]
    for case in cases:
        options = {"max_new_tokens": [12] * 4, "temperature": [0.0] * 4, "stop_token_ids": NOBODY} | case
        got, want = spec.generate(prompts, **options), alone(spec, prompts, options)
        for one, other in zip(got, want, strict=True):
            assert_same(one, other)
            assert [(x.token_id, [i for i, _ in x.top]) for x in one.logprobs or ()] == [
                (x.token_id, [i for i, _ in x.top]) for x in other.logprobs or ()
            ]
        if "logprobs" not in case:
            assert [one.token_ids for one in got] != first
    assert "in pieces" in got[0].stats.backends["round"]


def test_a_prompt_that_fails_leaves_the_others_alone() -> None:
    spec = Speculator(pair(2, "cpu")[0], None, target_path="generic")
    prompts = prompts_of(3)
    want = spec.generate(prompts, 6, stop_token_ids=NOBODY)
    got = spec.generate([prompts[0], [], prompts[1], [10**6], prompts[2]], 6, stop_token_ids=NOBODY, return_errors=True)
    assert [isinstance(one, ValueError) for one in got] == [False, True, False, True, False]
    assert [one.token_ids for one in got if isinstance(one, Generation)] == [one.token_ids for one in want]


@pytest.mark.usefixtures("together")
def test_texts_may_end_at_the_models_last_position() -> None:
    model = TINY["gpt2"](num_hidden_layers=LAYERS, max_position_embeddings=44)
    for drafter, options in ((None, {}), (build_drafter(2), {}), (build_drafter(2), PATHS["tree"])):
        spec = Speculator(model, drafter, target_path="generic", **options)
        prompts, options = prompts_of(8)[5:], {"max_new_tokens": [None] * 3, "temperature": [0.0] * 3}
        options["stop_token_ids"] = NOBODY
        got = spec.generate(prompts, **options)
        assert [len(p) + len(one.token_ids) for p, one in zip(prompts, got, strict=True)] == [44] * 3
        assert [one.token_ids for one in got] == [one.token_ids for one in alone(spec, prompts, options)]


@pytest.mark.usefixtures("together")
def test_a_batchs_trees_have_one_size_and_the_hosts_their_own() -> None:
    model, drafter = pair(2, "cpu")
    for target_path in ("generic", "auto"):
        spec = Speculator(model, drafter, path="tree", target_path=target_path)
        many, single = (spec.generate(p, 12, stop_token_ids=NOBODY) for p in (prompts_of(3), prompts_of(1)[0]))
        assert len({size for one in many for size in one.stats.num_verified}) == 1
        assert single.token_ids == many[0].token_ids
        assert spec.loop.parts.paths.by_round


def test_a_copy_is_made_again_after_refresh_and_autocast() -> None:
    model, _ = pair(2, "cpu")
    spec = Speculator(model, None, target_path="generic")
    prompts, options = prompts_of(2), {"stop_token_ids": NOBODY, "temperature": 0.0}
    want = [one.token_ids for one in spec.generate(prompts, 5, **options)]
    with torch.autocast("cpu", torch.bfloat16):
        spec.generate(prompts, 5, **options)
    assert [one.token_ids for one in spec.generate(prompts, 5, **options)] == want
    several = spec.loop.several  # type: ignore[attr-defined]
    assert several.free
    spec.refresh()
    assert not several.free


# --- which lists run together -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["amx", "avx512", "avx512_bf16", None])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("drafts", [False, True])
def test_drafts_of_several_rows_pay_in_fused_layers_in_bfloat16_on_amx(
    drafts: bool, dtype: torch.dtype, level: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = None if level is None else SimpleNamespace(description=lambda: level)
    monkeypatch.setattr(backends, "load", lambda name: SimpleNamespace(module=module))
    parts: Any = SimpleNamespace(
        drafter=object() if drafts else None, target=SimpleNamespace(dtype=dtype, device=torch.device("cpu"))
    )
    reason = apart_reason(parts, fused=True)
    assert (reason is None) == (not drafts or (dtype is torch.bfloat16 and level == "amx"))
    assert apart_reason(parts, fused=False) is None
    parts.target.device = torch.device("cuda")
    for fused in (False, True):
        assert apart_reason(parts, fused=fused) == "batches on cuda need attention in place"


def test_fused_layers_and_generic_ones_ask_the_rule_each_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    model, drafter = pair(2, "cpu")
    asked: list[bool] = []
    monkeypatch.setattr(by_rows, "apart_reason", lambda parts, fused: asked.append(fused))
    for target_path in ("generic", "auto"):
        Speculator(model, drafter, target_path=target_path)
    assert asked == [False, True]


@pytest.mark.parametrize("target_path", ["generic", "auto"])
def test_the_rule_decides(target_path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, drafter = pair(2, "cpu")
    for reason in (None, "it is slow"):
        monkeypatch.setattr(by_rows, "apart_reason", lambda parts, fused, reason=reason: reason)
        spec = Speculator(model, drafter, target_path=target_path)
        assert isinstance(spec.loop, LoopByRows) == (reason is None)
        out = spec.generate(prompts_of(2), 3, stop_token_ids=NOBODY)[0]
        assert out.stats.backends["lists"] == ("together" if reason is None else "one after the other (it is slow)")


class Changed(Target):
    def prefill(self, *args: Any) -> TargetOutput:
        return super().prefill(*args)


@pytest.mark.parametrize(
    ("target", "options", "reason"),
    [
        (lambda: target_of("lfm2"), {}, "GenericRows: Lfm2ForCausalLM must have attention layers only"),
        (lambda: model_of("llama4"), {}, "GenericRows: Llama4ForCausalLM must have attention whose masks are known"),
        (lambda: Changed(model_of("llama")), {}, "a target of type Changed"),
        (lambda: model_of("llama"), {"backend": "reference"}, "backend='reference'"),
    ],
)
def test_others_run_one_after_the_other_and_say_why(target: Any, options: dict[str, Any], reason: str) -> None:
    spec = Speculator(target(), None, target_path="generic", **options)
    out = spec.generate(prompts_of(2), 3, stop_token_ids=NOBODY)[1]
    assert out.stats.backends["lists"].startswith(f"one after the other ({reason}")
    assert out.stats.backends["round"] == "by the host, a sequence at a time"
    assert out.token_ids == spec.generate(prompts_of(2)[1], 3, stop_token_ids=NOBODY).token_ids
