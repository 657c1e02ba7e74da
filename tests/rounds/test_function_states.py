"""Processors and criteria with a state: each text has its own, and neither meets more than plain decoding shows it."""

from __future__ import annotations

import functools
import threading
from typing import Any

import pytest
import torch
from device_pairs import NOBODY, pair
from pairs import Scripted, build_drafter
from tiny_models import TINY
from torch import Tensor
from transformers import LogitsProcessorList

from pydflash import Speculator

PROMPTS = [[3, 1, 4, 1, 5], [2, 7, 1], [9, 9, 8, 2]]
WAYS: dict[str, dict[str, Any]] = {
    "host walk": {"target_path": "generic"},
    "host tree": {"target_path": "generic", "path": "tree", "num_nodes": 9},
    "device walk": {"target_path": "fused"},
    "device tree": {"target_path": "fused", "path": "tree", "num_nodes": 9},
}
OPTIONS: dict[str, Any] = {"temperature": 0.0, "stop_token_ids": NOBODY}


class Numbered:
    """Raises another token at each call, and ends its text at a length: a processor and a criterion in one."""

    def __init__(self, end: int = 99) -> None:
        self.end = end
        self.seen: list[list[int]] = []
        self.asked: list[list[int]] = []

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        self.seen.append(ids[0].tolist())
        return scores.index_add(
            1, torch.tensor([7 * len(self.seen) % 97], device=scores.device), scores.new_full((1, 1), 5)
        )

    def ends(self, ids: Tensor, scores: Any) -> bool:
        self.asked.append(ids[0].tolist())
        return len(self.seen) >= self.end


class Locked(Numbered):
    """One that cannot be copied."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()


@functools.cache
def built(kind: str) -> Any:
    return TINY["llama"](num_hidden_layers=3).to(kind)


def spec_of(device: torch.device, way: str) -> Speculator:
    model = built(device.type)
    return Speculator(model, build_drafter(2, num_target_layers=3).to(model.device), **WAYS[way])


@pytest.mark.parametrize("way", WAYS)
def test_each_text_of_a_list_has_its_own_state(device: torch.device, way: str) -> None:
    spec = spec_of(device, way)
    alone = [spec.generate(prompt, 9, logits_processor=Numbered(), **OPTIONS).token_ids for prompt in PROMPTS]
    given = Numbered()
    for form in (given, [given], LogitsProcessorList([given]), given.__call__, functools.partial(given)):
        found = spec.generate(PROMPTS, 9, logits_processor=form, **OPTIONS)
        assert [one.token_ids for one in found] == alone
    assert given.seen == []


def test_each_of_n_texts_has_its_own_state(device: torch.device) -> None:
    spec = spec_of(device, "device walk")
    given, sampled = Numbered(), {"temperature": 0.9, "stop_token_ids": NOBODY}
    alone = [spec.generate(PROMPTS[0], 9, seed=4 + i, logits_processor=Numbered(), **sampled) for i in range(3)]
    found = spec.generate(PROMPTS[0], 9, seed=4, n=3, logits_processor=given, **sampled)
    assert [one.token_ids for one in found] == [one.token_ids for one in alone]
    rows = spec.generate(PROMPTS[:2], 9, seed=4, n=2, logits_processor=[[given], [given]], **sampled)
    assert [one.token_ids for one in rows[0]] == [one.token_ids for one in alone[:2]]
    assert given.seen == []
    spec.generate(PROMPTS[0], 9, logits_processor=given, **OPTIONS)
    assert len(given.seen) == 9, "one text: the object itself"


def test_a_processor_and_a_criterion_share_their_state_in_each_text(device: torch.device) -> None:
    for way in ("host walk", "device walk"):
        spec, both = spec_of(device, way), Numbered(end=4)
        found = spec.generate(PROMPTS, 9, logits_processor=both, stopping_criteria=both.ends, **OPTIONS)
        assert [(len(one.token_ids), one.finish_reason) for one in found] == [(4, "stop")] * 3
        assert both.asked == []


def test_each_prompt_may_bring_its_own(device: torch.device) -> None:
    spec = spec_of(device, "device walk")
    own = [Locked() for _ in PROMPTS]
    alone = [spec.generate(prompt, 9, logits_processor=Numbered(), **OPTIONS).token_ids for prompt in PROMPTS]
    found = spec.generate(PROMPTS, 9, logits_processor=[[its] for its in own], **OPTIONS)
    assert [one.token_ids for one in found] == alone
    assert [[*its.seen[-1], token] for its, token in zip(own, [text[-1] for text in alone], strict=True)] == [
        [*prompt, *text] for prompt, text in zip(PROMPTS, alone, strict=True)
    ]
    one_has = spec.generate(PROMPTS, 9, logits_processor=[None, [Numbered()], []], **OPTIONS)
    plain = spec.generate(PROMPTS, 9, **OPTIONS)
    assert [x.token_ids for x in one_has] == [plain[0].token_ids, alone[1], plain[2].token_ids]
    ends = [[lambda ids, scores, n=n: ids.shape[1] >= n] for n in (8, 5, 6)]
    found = spec.generate(PROMPTS, 9, stopping_criteria=ends, **OPTIONS)
    assert [len(one.token_ids) for one in found] == [3, 2, 2]
    with pytest.raises(ValueError, match=r"^logits_processor: a list must have 3 entries \(one per prompt\), got 2$"):
        spec.generate(PROMPTS, 9, logits_processor=[[], []], **OPTIONS)


def test_what_cannot_be_copied_is_refused_for_several_texts() -> None:
    spec, its = spec_of(torch.device("cpu"), "host walk"), Locked()
    for prompt, n, given in ((PROMPTS, 1, its), (PROMPTS[:1], 1, its), (PROMPTS[0], 2, its), (PROMPTS[:1], 2, [[its]])):
        for name in ("logits_processor", "stopping_criteria"):
            with pytest.raises(
                ValueError, match=rf"^{name}: must be what copy\.deepcopy can copy.* each prompt.*; got "
            ):
                spec.generate(prompt, 4, n=n, return_errors=True, **{name: given}, **OPTIONS)
    assert its.seen == []
    assert len(spec.generate(PROMPTS[0], 4, logits_processor=its, **OPTIONS).token_ids) == 4


@pytest.mark.parametrize("way", [*WAYS, "right"])
def test_no_call_comes_behind_a_criterions_end(device: torch.device, way: str) -> None:
    """The calls of both, in one order, are those of plain decoding; and each comes once."""
    model, drafter = pair("knowing", device.type)
    prompt, calls = PROMPTS[0], []

    def watch(ids: Tensor, scores: Tensor) -> Tensor:
        calls.append(("processor", ids[0].tolist()))
        return scores

    def ends(ids: Tensor, scores: Any) -> bool:
        calls.append(("criterion", ids[0].tolist()))
        return ids.shape[1] >= len(prompt) + 6

    options = {**OPTIONS, "logits_processor": watch, "stopping_criteria": ends}
    plain = Speculator(model, None, target_path="generic").generate(prompt, 20, **options)
    assert [kind for kind, _ in calls] == ["processor", "criterion"] * 6
    wanted, text = list(calls), Speculator(model, None).generate(prompt, 20, **OPTIONS).token_ids
    drafter.texts[0].zero_()
    drafter.texts[0, : len(prompt) + 20] = torch.tensor([*prompt, *text])
    if way == "right" and device.type != "cpu":
        pytest.skip("this drafter is a CPU's")
    how = WAYS.get(way, {}) | ({"num_nodes": 3} if "tree" in way else {})  # it has one candidate a slot
    spec = Speculator(model, Scripted([*prompt, *text], 6) if way == "right" else drafter, **how)
    calls.clear()
    out = spec.generate(prompt, 20, **options)
    assert (out.token_ids, out.finish_reason) == (plain.token_ids, "stop")
    assert calls == wanted
    if way == "right":
        assert out.stats.num_accepted[0] == 4, "the end stood inside a block"


def test_criteria_are_asked_once_a_token_beside_other_ends() -> None:
    spec, asked = spec_of(torch.device("cpu"), "host walk"), []
    text = spec.generate(PROMPTS[0], 12, **OPTIONS).token_ids

    def never(ids: Tensor, scores: Any) -> bool:
        asked.append(ids.shape[1])
        return False

    for options in ({"stop_token_ids": [text[6]]}, {"max_new_tokens": 7, "stop_token_ids": NOBODY}):
        asked.clear()
        spec = Speculator(built("cpu"), Scripted([*PROMPTS[0], *text], 6))
        given = {"max_new_tokens": 12, "temperature": 0.0, **options}
        out = spec.generate(PROMPTS[0], stopping_criteria=never, logits_processor=lambda ids, scores: scores, **given)
        assert asked == [len(PROMPTS[0]) + i for i in range(1, len(out.token_ids) + 1)]


def test_filters_behind_a_processor_that_leaves_no_token_do_not_speak_first() -> None:
    spec = Speculator(TINY["llama"](num_hidden_layers=3), None)
    asked: dict[str, Any] = {"suppress_tokens": [0], "forced_eos_token_id": 0, "top_h": 1.0, "temperature": 0.7}
    with pytest.raises(
        ValueError, match=r"^logits_processor: must leave a token that can come next, got scores of -inf"
    ):
        spec.generate([3, 1, 4, 1, 5], 1, **asked)
