"""What changes the target's law beyond filters, through every loop: plain text and text with drafts are the same."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch
from pairs import Scripted, build_drafter
from scipy import stats as scipy_stats
from tiny_models import TINY
from torch import Tensor

from pydflash import Drafter, Speculator, Target

PROMPT = [3, 1, 4, 1, 5]
PENALTIES: dict[str, dict[str, Any]] = {
    "repetition": {"repetition_penalty": 1.6},
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 0.9},
    "bias": {"logit_bias": {9: 3.0, 21: float("-inf")}},
    "all": {"repetition_penalty": 1.2, "presence_penalty": 0.4, "frequency_penalty": 0.3, "logit_bias": {9: 1.0}},
}
WAYS: dict[str, dict[str, Any]] = {
    "host walk": {"target_path": "generic"},
    "host tree": {"target_path": "generic", "path": "tree", "num_nodes": 9},
    "device walk": {"target_path": "fused"},
    "device tree": {"target_path": "fused", "path": "tree", "num_nodes": 9},
}


@functools.cache
def built(kind: str) -> Any:
    return TINY["llama"](num_hidden_layers=3).to(kind)


@pytest.fixture
def model(device: torch.device) -> Any:
    return built(device.type)


def drafter_for(model: Any) -> Drafter:
    return build_drafter(2, num_target_layers=3).to(model.device)


def plain(model: Any, **options: Any) -> list[int]:
    return Speculator(model, None, target_path="generic").generate(PROMPT, 24, stop_token_ids=[], **options).token_ids


def right(model: Any, text: list[int], way: dict[str, Any]) -> Speculator:
    """Drafts that are mostly right: the text itself where the way allows it, else a drafter of the block's shape."""
    if way["target_path"] == "generic" and "path" not in way and model.device.type == "cpu":
        return Speculator(model, Scripted([*PROMPT, *text], 6), **way)
    return Speculator(model, drafter_for(model), **way)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", PENALTIES)
def test_penalties_are_those_of_plain_decoding(model: Any, name: str, way: str) -> None:
    options = PENALTIES[name]
    for sampled in ({"temperature": 0.0}, {"temperature": 0.9, "seed": 7}):
        text = plain(model, **options, **sampled)
        assert text != plain(model, **sampled)
        spec = right(model, text, WAYS[way])
        if sampled["temperature"] and spec.draft_sampling:
            spec = Speculator(model, drafter_for(model), draft_sampling=False, **WAYS[way])
        out = spec.generate(PROMPT, 24, stop_token_ids=[], **options, **sampled)
        assert out.token_ids == text
        if way == "host walk" and model.device.type == "cpu":
            assert out.stats.acceptance_length > 2


def test_repetition_penalty_is_transformers(model: Any) -> None:
    ids = torch.tensor([PROMPT], device=model.device)
    want = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False,
                          repetition_penalty=1.3, pad_token_id=0, eos_token_id=None)  # fmt: skip
    assert plain(model, repetition_penalty=1.3, temperature=0.0) == want[0, len(PROMPT) :].tolist()


def test_presence_and_frequency_by_hand(model: Any) -> None:
    """Each step of a plain text: the best of the logits less what the text so far takes off."""
    text = plain(model, presence_penalty=0.7, frequency_penalty=0.4, temperature=0.0)
    for i, token in enumerate(text):
        with torch.no_grad():
            logits = model(torch.tensor([[*PROMPT, *text[:i]]], device=model.device)).logits[0, -1]
        for seen in set(text[:i]):
            logits[seen] -= 0.7 + 0.4 * text[:i].count(seen)
        assert int(logits.argmax()) == token


@pytest.mark.parametrize("way", ["host walk", "device walk", "device tree"])
def test_a_penalised_law_is_sampled(model: Any, way: str) -> None:
    """The second token's law at T = 1 given the first, over 300 seeds with sampled drafts: chi-square at 1e-4."""
    drafter = drafter_for(model)
    options = {"presence_penalty": 2.0, "logit_bias": {9: 2.0}, "top_k": 4}
    spec = Speculator(model, drafter, draft_sampling=True, **WAYS[way])
    seeds = list(range(300))
    first = plain(model, temperature=0.0, **options)[0]
    prompt = [*PROMPT, first]
    texts = [
        spec.generate(prompt, 2, temperature=1.0, seed=seed, stop_token_ids=[], **options).token_ids for seed in seeds
    ]
    common = max({t[0] for t in texts}, key=lambda token: sum(t[0] == token for t in texts))
    second = [t[1] for t in texts if t[0] == common]
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, common]], device=model.device)).logits[0, -1]
    logits[9] += 2.0
    logits[common] -= 2.0
    top = logits.topk(4)
    law = dict(zip(top.indices.tolist(), top.values.softmax(0).tolist(), strict=True))
    assert set(second) <= set(law)
    counts = [sum(token == t for token in second) for t in law]
    assert scipy_stats.chisquare(counts, [p * len(second) for p in law.values()]).pvalue > 1e-4


@pytest.mark.parametrize("way", WAYS)
def test_logprobs_are_the_models(model: Any, way: str) -> None:
    spec = Speculator(model, drafter_for(model), **WAYS[way])
    for options in (
        {"temperature": 0.0},
        {"temperature": 1.0, "seed": 3, "presence_penalty": 0.5},
        {"temperature": 0.0, "suppress_tokens": list(range(0, 97, 2))},  # a processor, which writes in place
    ):
        out = spec.generate(PROMPT, 12, logprobs=3, stop_token_ids=[], **options)
        assert out.logprobs is not None
        assert [one.token_id for one in out.logprobs] == out.token_ids
        with torch.no_grad():
            rows = (
                model(torch.tensor([[*PROMPT, *out.token_ids]], device=model.device)).logits[0].double().log_softmax(-1)
            )
        for i, one in enumerate(out.logprobs):
            row = rows[len(PROMPT) - 1 + i]
            assert one.logprob == pytest.approx(row[one.token_id].item(), abs=1e-4)
            assert [token for token, _ in one.top] == row.topk(3).indices.tolist()
            assert one.top[0][1] == pytest.approx(row.max().item(), abs=1e-4)
    assert spec.generate(PROMPT, 3, temperature=0.0).logprobs is None
    alone = spec.generate(PROMPT, 3, temperature=0.0, logprobs=0).logprobs
    assert alone is not None
    assert [one.top for one in alone] == [[], [], []]


class Counting:
    """A processor with a state: it must be called for each position once, in order, with the text so far."""

    def __init__(self) -> None:
        self.seen: list[list[int]] = []

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        self.seen.append(ids[0].tolist())
        changed = scores.clone()
        changed[0, (7 * len(self.seen)) % 97] += 4.0  # by the number of calls, so that a call too many shows
        return changed


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("sampled", [False, True])
def test_a_processor_with_a_state_meets_each_position_once(model: Any, way: str, sampled: bool) -> None:
    options: dict[str, Any] = {"temperature": 0.9, "seed": 5} if sampled else {"temperature": 0.0}
    one = Counting()
    text = plain(model, logits_processor=one, **options)
    assert len(one.seen) == 24
    spec = right(model, text, WAYS[way])
    if spec.draft_sampling and sampled:
        spec = Speculator(model, drafter_for(model), draft_sampling=False, **WAYS[way])
    two = Counting()
    out = spec.generate(PROMPT, 24, logits_processor=two, stop_token_ids=[], **options)
    assert out.token_ids == text
    assert two.seen == one.seen
    if way == "host walk" and model.device.type == "cpu":
        assert out.stats.acceptance_length > 2, "drafts stay on"


def test_no_call_comes_behind_a_stop() -> None:
    model = built("cpu")
    text = plain(model, temperature=0.0)
    stop = text[9]
    spec = Speculator(model, Scripted([*PROMPT, *text], 6))
    seen: list[int] = []

    def watch(ids: Tensor, scores: Tensor) -> Tensor:
        seen.append(ids.shape[1])
        return scores

    out = spec.generate(PROMPT, 24, temperature=0.0, stop_token_ids=[stop], logits_processor=watch)
    assert seen == [len(PROMPT) + i for i in range(len(out.token_ids))]


def test_a_batch_mixes_what_rows_ask_for(model: Any) -> None:
    """Rows with penalties, log-probabilities and neither, in one batch on the device's loop, equal to alone."""
    spec = Speculator(model, drafter_for(model), target_path="fused")
    prompts = [[3, 1, 4], [2, 7, 1, 8], [1, 6]]
    wanted = {"presence_penalty": [1.5, 0.0, 0.0], "repetition_penalty": [None, None, 1.4]}
    together = spec.generate(prompts, 10, temperature=0.0, logprobs=1, stop_token_ids=[], **wanted)
    for i, prompt in enumerate(prompts):
        its = {name: values[i] for name, values in wanted.items()}
        alone = spec.generate(prompt, 10, temperature=0.0, logprobs=1, stop_token_ids=[], **its)
        assert together[i].token_ids == alone.token_ids
        assert all(math.isclose(a.logprob, b.logprob, abs_tol=1e-4)
                   for a, b in zip(together[i].logprobs, alone.logprobs, strict=True))  # fmt: skip


def test_several_texts_for_a_prompt_and_errors_for_single_ones(model: Any) -> None:
    spec = Speculator(Target(model), None)
    three = spec.generate(PROMPT, 6, temperature=1.0, seed=4, n=3, stop_token_ids=[])
    assert [one.token_ids for one in three] == [
        spec.generate(PROMPT, 6, temperature=1.0, seed=4 + i, stop_token_ids=[]).token_ids for i in range(3)
    ]
    long = list(range(90)) * 100
    found = spec.generate([PROMPT, long, [2]], 4, temperature=0.0, return_errors=True)
    assert isinstance(found[1], ValueError)
    assert found[0].token_ids == spec.generate(PROMPT, 4, temperature=0.0).token_ids
    with pytest.raises(ValueError, match="prompt: must fit the target's"):
        spec.generate([PROMPT, long], 4)
    for wrong in ([], [1.5], [[1]], None):  # what is no prompt at all
        first, second = spec.generate([wrong, PROMPT], 4, temperature=0.0, return_errors=True)
        assert isinstance(first, ValueError)
        assert second.token_ids == found[0].token_ids
        with pytest.raises(ValueError, match="prompt: "):
            spec.generate([wrong, PROMPT], 4)
    with pytest.raises(ValueError, match="n: must be an integer of 1 to 1024, got 0"):
        spec.generate(PROMPT, 4, n=0)


@pytest.mark.parametrize("way", WAYS)
def test_a_processor_that_leaves_no_token_is_refused(model: Any, way: str) -> None:
    spec = Speculator(model, drafter_for(model), **WAYS[way])
    with pytest.raises(ValueError, match="logits_processor: must leave a token that can come next"):
        spec.generate(PROMPT, 4, temperature=0.0, logits_processor=lambda ids, scores: scores.fill_(float("-inf")))


def test_a_target_of_another_size_is_refused_by_its_size() -> None:
    small = TINY["llama"](num_hidden_layers=2, hidden_size=32)
    with pytest.raises(ValueError, match=r"hidden_size of the drafter must be 32 \(the target's hidden size\)"):
        Speculator(small, build_drafter(2, num_target_layers=3))


def test_a_speculator_says_what_it_is() -> None:
    text = repr(Speculator(built("cpu"), drafter_for(built("cpu")), path="tree", num_nodes=9))
    assert text.startswith("Speculator(LlamaForCausalLM on cpu, Drafter, tree, block of ")
    assert "target: fused layers" in text
