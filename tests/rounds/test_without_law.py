"""A target whose logits leave no token: refused by every loop, at its position, where the text goes on to it."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from device_pairs import NOBODY, pair
from pairs import Scripted

from pydflash import Speculator
from pydflash.request import Chunk
from pydflash.rounds.device_round import Record
from pydflash.rounds.round import first_without_law, lawful

PROMPT = [3, 1, 4, 1, 5]
WAYS: dict[str, dict[str, Any]] = {
    "generic": {"target_path": "generic"},
    "fused": {"target_path": "fused"},
    "generic tree": {"target_path": "generic", "path": "tree", "num_nodes": 3},
    "fused tree": {"target_path": "fused", "path": "tree", "num_nodes": 3},
}
DRAWN = {"temperature": 0.8, "seed": 5}


@functools.cache
def with_a_quiet_feature(kind: str) -> Any:
    """The first feature is 0 at every position, and takes so much off all logits that they are -inf where it is not."""
    model = copy.deepcopy(pair("knowing", kind)[0])
    with torch.no_grad():
        model.get_input_embeddings().weight[:, 0] = 0
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight[0] = 0
            layer.mlp.down_proj.weight[0] = 0
        model.model.norm.weight[0] = 1
        model.lm_head.weight[:, 0] = -3e38
    return model


def broken(model: Any, text: list[int], drafter: Any, **way: Any) -> tuple[Speculator, int]:
    """One whose target leaves no token behind one of the text, and the index of that one.

    The trial of a new target would notice it, so the weights change behind that.
    """
    at = next(i for i in range(6, len(text)) if text[i] not in [*PROMPT, *text[:i]])
    bad = copy.deepcopy(model)
    spec = Speculator(bad, drafter, **way)
    with torch.no_grad():
        bad.get_input_embeddings().weight[text[at], 0] = 1000
    spec.refresh()
    return spec, at


def right_pair(kind: str, **sampling: Any) -> tuple[Any, Any, list[int]]:
    """A model, a drafter that knows its text, and that text of 30 tokens."""
    model, drafter = with_a_quiet_feature(kind), pair("knowing", kind)[1]
    text = Speculator(model, None).generate(PROMPT, 30, stop_token_ids=NOBODY, **sampling).token_ids
    drafter.texts[0].zero_()
    drafter.texts[0, : len(PROMPT) + 30] = torch.tensor([*PROMPT, *text])
    return model, drafter, text


def message(position: int, changed: str = "") -> str:
    return (
        f"generate: the target's logits{changed} must leave a token that can come next, got -inf or NaN alone at "
        f"position {position}"
    )


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, DRAWN], ids=["greedy", "drawn"])
@pytest.mark.parametrize(
    ("way", "drafting"), [(way, drafting) for way in WAYS for drafting in ("none", "right") if "tree" not in way or
                          drafting == "right"]
)  # fmt: skip
def test_a_position_without_law_is_named(
    device: torch.device, way: str, drafting: str, sampling: dict[str, Any]
) -> None:
    model, drafter, text = right_pair(device.type, **sampling)
    spec, at = broken(model, text, drafter if drafting == "right" else None, **WAYS[way])
    options = {"stop_token_ids": NOBODY, **sampling}
    with pytest.raises(ValueError) as caught:
        spec.generate(PROMPT, 30, **options)
    assert str(caught.value) == message(len(PROMPT) + at + 1)
    # Where the text ends before it, nobody meets it, though it may stand in the block; and all is as before.
    assert spec.generate(PROMPT, at + 1, **options).token_ids == text[: at + 1]
    ended = spec.generate(PROMPT, 30, stop_token_ids=[text[at]], **sampling)
    assert (ended.token_ids, ended.finish_reason) == (text[: at + 1], "stop")


def test_what_came_before_is_given(device: torch.device) -> None:
    model, _, text = right_pair(device.type)
    for target_path in ("generic", "fused"):
        spec, at = broken(model, text, None, target_path=target_path)
        stream = spec.stream(PROMPT, 30, stop_token_ids=NOBODY)
        with pytest.raises(ValueError, match="got -inf or NaN alone at position"):
            list(stream)
        assert stream.output.token_ids == text[: at + 1]
    with pytest.raises(ValueError, match=rf"at position {len(PROMPT) + at + 1}$"):  # of one in a list
        spec.generate([[7, 8], PROMPT], at + 2, stop_token_ids=NOBODY)


@pytest.mark.parametrize("way", WAYS)
def test_biases_that_leave_no_token_are_named(device: torch.device, way: str) -> None:
    model, drafter = pair("knowing", device.type)
    spec = Speculator(model, drafter, **WAYS[way])
    with pytest.raises(ValueError) as caught:
        spec.generate(PROMPT, 4, logit_bias=dict.fromkeys(range(97), float("-inf")))
    assert str(caught.value) == message(5, " with penalties and biases")
    all_but_0 = dict.fromkeys(range(1, 97), float("-inf"))
    assert spec.generate(PROMPT, 4, logit_bias=all_but_0, stop_token_ids=NOBODY).token_ids == [0] * 4


@pytest.mark.parametrize("way", WAYS)
def test_a_processor_is_not_blamed_for_the_targets_logits(device: torch.device, way: str) -> None:
    """It may mend them, as transformers' remove_invalid_values does, or leave them; what it spoils is its own fault."""
    model, drafter, text = right_pair(device.type)
    spec, at = broken(model, text, drafter, **WAYS[way])
    with pytest.raises(ValueError) as caught:
        spec.generate(PROMPT, 30, stop_token_ids=NOBODY, logits_processor=lambda ids, scores: scores)
    assert str(caught.value) == message(len(PROMPT) + at + 1)

    def spoil(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.fill_(-torch.inf) if ids.shape[1] == 8 else scores

    with pytest.raises(ValueError, match=r"^logits_processor: must leave a token .* alone at position 8$"):
        spec.generate(PROMPT, 30, stop_token_ids=NOBODY, logits_processor=spoil)
    mended = spec.generate(PROMPT, at + 2, stop_token_ids=NOBODY, remove_invalid_values=True).token_ids
    assert mended == [*text[: at + 1], 0]  # all logits are the same there


def test_slots_that_tokens_follow() -> None:
    #         0 -> 1 (8) -> 3 (9) -> 4 (8);  0 -> 2 (9) -> 5 (8) -> 6 (0); one slot is empty
    block, parents = [5, 8, 9, 9, 8, 8, 0, -1], [-1, 0, 0, 1, 3, 2, 5, 0]
    record = Record([9, 8, 0, 7], block, parents, [], [1] * 8)
    assert record.followed == [0, 2, 5, 6]
    assert Record([8, 9, 4], block, parents, [], [1] * 8).followed == [0, 1, 3]
    assert Record([8, 0], [5, 8], None, [], [1, 0]).followed == [0, 1]
    for unlawful, want in ((5, 2), (2, None), (4, None)):
        known = [int(slot != unlawful) for slot in range(8)]
        assert first_without_law(record.tokens, lambda known=known: (record.followed, known)) == want
    assert first_without_law([4, 3], lambda: pytest.fail("no token 0, so nobody looks")) is None


def test_lawful_slots(device: torch.device) -> None:
    nan, inf = torch.nan, torch.inf
    logits = torch.tensor([[[nan, nan], [-inf, 1.0], [-inf, -inf], [0.5, nan], [inf, 0.0]]], device=device)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert lawful(logits.to(dtype)).tolist() == [[False, False, False, True, True]]
        room = torch.full((1, 7), 9, device=device)
        lawful(logits.to(dtype), out=room[:, 2:])
        assert room.tolist() == [[9, 9, 0, 0, 0, 1, 1]]


def test_a_fake_target_that_ends() -> None:
    """The host's loop over any target; a law of -inf alone behind the third token, inside a block."""
    from fakes import FakeTarget

    text = [3, 7, 8, 9, 10, 11]

    def law(position: int, token: int) -> torch.Tensor:
        logits = torch.full((97,), -torch.inf)
        if position != 3:
            logits[text[(position + 1) % 6]] = 3.0
        return logits

    spec = Speculator(FakeTarget(law, (0, 2)), Scripted(text, 6))
    chunks: list[Chunk] = []
    with pytest.raises(ValueError, match=r"at position 4$"):
        chunks.extend(spec.stream([3], 9))
    assert spec.generate([3], 3).token_ids == [7, 8, 9]
