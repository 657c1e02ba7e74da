"""Rows of a generic target that run together: their logits are those of the model's own forward, whoever is beside."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from greedy_texts import EXACT_RECURRENT, RECURRENT, model_of, prompt_of, target_of
from grids import slow
from matching import assert_matches
from tiny_models import TINY

from pydflash import Speculator
from pydflash.protocols import RowTarget, offers
from pydflash.target.generic import Target
from pydflash.target.rows import GenericRows, RowsCache
from pydflash.target.tree_masks import TreeMasks
from pydflash.tree import tree_of

ALONE = (*RECURRENT, "llama4")
QUICK = ("llama", "mistral", "gemma3", "gpt2", "gpt_oss", "deepseek_v3")
FAMILIES = [name if name in QUICK else slow(name) for name in TINY if name not in ALONE]
LENGTHS = (3, 17, 9)
TREE = (-1, 0, 0, 1, 2, 2, 5)


def text_of(row: int) -> torch.Tensor:
    """What row `row` reads in the end: [1, 48]."""
    return prompt_of(48 + row)


def block_of(text: torch.Tensor, at: int, path: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """A block of 7 slots that holds the text's next tokens on `path` and others elsewhere; and its index, -1 padded."""
    block, index = (text[0, :7] + 1) % 97, torch.full((7,), -1, dtype=torch.int32)
    block[path], index[: len(path)] = text[0, at : at + len(path)], torch.tensor(path, dtype=torch.int32)
    return block, index


@pytest.mark.parametrize("shape", ["chain", "tree"])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_features_are_those_of_each_row_alone(family: str, shape: str) -> None:
    """Ragged prompts, rounds that keep other slots in each row, and a row that is free in between and begins again."""
    target = target_of(family)
    rows = GenericRows(target)
    assert offers(rows, RowTarget)
    draw = random.Random(len(family))
    wanted = [target.encode(text_of(row)) for row in range(3)]
    cache, at = rows.new_cache(3, 48), list(LENGTHS)

    def check(row: int, start: int, got: torch.Tensor, features: torch.Tensor | None) -> None:
        assert_matches(got, wanted[row].logits[0, start : start + len(got)], 2e-4)
        assert features is not None
        assert_matches(features, wanted[row].features[0, start : start + len(features)], 2e-4)

    def begin(row: int) -> None:
        output = rows.prefill(text_of(row)[:, : LENGTHS[row]], cache, row)
        check(row, LENGTHS[row] - 1, output.logits[0], output.features[0, -1:])
        at[row] = LENGTHS[row]

    for row in range(3):
        begin(row)
    paths = [[0], [0, 1, 3], [0, 2, 4], [0, 2, 5, 6]] if shape == "tree" else [[*range(n)] for n in (1, 2, 5, 7)]
    for step in range(6):
        if step == 2:
            cache.lengths[1] = 0
        if step == 4:
            begin(1)
        kept = [draw.choice(paths) for _ in range(3)]
        blocks, index = map(torch.stack, zip(*(block_of(text_of(b), at[b], kept[b]) for b in range(3)), strict=True))
        tree = tree_of(TREE) if shape == "tree" else None
        output = rows.verify(blocks, cache, tree)
        rows.append(cache, index)
        for row in [0, 2] if step in (2, 3) else [0, 1, 2]:
            check(row, at[row], output.logits[row, kept[row]], output.features[row, kept[row]])
            at[row] += len(kept[row])
            cache.lengths[row] += len(kept[row])
        if step in (2, 3):
            assert not output.logits[1].any()
        assert cache.lengths.tolist() == [at[0], 0 if step in (2, 3) else at[1], at[2]]


def test_attention_of_plain_products_takes_rows_too() -> None:
    rows = GenericRows(Target(model_of("qwen3", "eager"), (2, 0)))
    cache = rows.new_cache(2, 16)
    for row, length in enumerate((2, 9)):
        rows.prefill(text_of(row)[:, :length], cache, row)
    got = rows.verify(torch.stack([text_of(0)[0, 2:6], text_of(1)[0, 9:13]]), cache).logits
    for row, length in enumerate((2, 9)):
        assert_matches(got[row], rows.target.try_forward(text_of(row)[:, : length + 4]).logits[0, length:], 2e-4)


def test_what_an_earlier_sequence_left_is_never_met() -> None:
    rows = GenericRows(target_of("qwen3"))
    cache = rows.new_cache(2, 32)
    got = []
    for _ in range(2):
        for row, length in enumerate((12, 4)):
            rows.prefill(text_of(row)[:, :length], cache, row)
        got.append(rows.verify(torch.stack([text_of(0)[0, :3], text_of(1)[0, :3]]), cache).logits)
        for layer in cache.model_cache.layers:
            for buffer in layer.buffers:
                buffer.fill_(torch.nan)
        cache.lengths.zero_()
    assert torch.equal(*got)


def test_a_full_cache_has_room_for_a_block() -> None:
    """The last block may reach behind the capacity, and a row behind it must not be touched."""
    rows = GenericRows(target_of("qwen3"))
    cache = rows.new_cache(2, 8)
    for row in range(2):
        rows.prefill(text_of(row)[:, :8], cache, row)
    wide = torch.stack([(text_of(0)[0] + 1) % 97] * 2).repeat(1, 2)[:, :64]
    rows.verify(wide, cache)
    again = rows.verify(torch.stack([text_of(0)[0, 8:10], text_of(1)[0, 8:10]]), cache).logits
    for row in range(2):
        assert_matches(again[row], rows.target.try_forward(text_of(row)[:, :10]).logits[0, 8:], 2e-4)


def test_slots_behind_the_models_last_position_do_no_harm() -> None:
    model = TINY["gpt2"](max_position_embeddings=20)
    rows = GenericRows(Target(model, (2, 0)))
    cache = rows.new_cache(2, 24)
    for row, length in enumerate((18, 5)):
        rows.prefill(text_of(row)[:, :length], cache, row)
    got = rows.verify(torch.stack([text_of(0)[0, 18:23], text_of(1)[0, 5:10]]), cache).logits
    assert_matches(got[0, :2], model(text_of(0)[:, :20]).logits[0, 18:], 2e-4)
    assert_matches(got[1], model(text_of(1)[:, :10]).logits[0, 5:], 2e-4)


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("llama4", "attention whose masks are known, got attention that depends on the place in the block"),
        *[(name, "attention layers only, got layers whose state follows one sequence") for name in ("lfm2", "bamba")],
    ],
)
def test_models_whose_rows_cannot_run_together(family: str, reason: str) -> None:
    target = target_of(family)
    with pytest.raises(ValueError, match=f"GenericRows: {type(target.model).__name__} must have {reason}"):
        GenericRows(target)


def test_rope_that_changes_with_the_length_is_refused() -> None:
    rope = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [3.0] * 8, "factor": 4.0}
    rope = {**rope, "rope_theta": 10000.0, "original_max_position_embeddings": 20}
    field = "rope_parameters" if EXACT_RECURRENT else "rope_scaling"
    model = TINY["llama"](original_max_position_embeddings=20, **{field: rope})
    with pytest.raises(ValueError, match="must have RoPE that does not change with the length"):
        GenericRows(Target(model))
    with pytest.raises(ValueError, match="must have a context of at least 13 positions, got 12"):
        GenericRows(Target(TINY["llama"](max_position_embeddings=12)))


@pytest.mark.parametrize("wrong", ["window", "free row", "rejected slots", "error"])
def test_the_trial_notices(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mask that hides too much, a row that takes another's logits, rejected slots that stay, and what raises."""
    target, build, verify = Target(model_of("llama"), (2, 0)), TreeMasks.build, GenericRows.verify

    def masks(self: TreeMasks, lengths: Any, depths: Any, visibility: Any, columns: int) -> Any:
        if wrong == "error":
            raise RuntimeError("no such mask")
        found = build(self, lengths, depths, visibility, columns)
        assert isinstance(found, torch.Tensor)
        if wrong == "window":
            found[..., 0] = torch.finfo(found.dtype).min
        elif wrong == "rejected slots" and int(lengths[1]) > 6:
            found[1, :, 0, int(lengths[1]) + 1 :] = 0
        return found

    def turned(self: GenericRows, *args: Any) -> Any:
        output = verify(self, *args)
        return output if wrong != "free row" else output._replace(logits=output.logits.roll(1, 0))

    monkeypatch.setattr(TreeMasks, "build", masks)
    monkeypatch.setattr(GenericRows, "verify", turned)
    got = "RuntimeError: no such mask" if wrong == "error" else "logits off by"
    with pytest.raises(ValueError, match=f"must have attention that takes rows of unequal length exactly, got {got}"):
        GenericRows(target)


def test_calls_out_of_order_are_refused() -> None:
    target = Target(model_of("llama"), (2, 0))
    rows = GenericRows(target)
    cache: RowsCache = rows.new_cache(2, 16)
    with pytest.raises(ValueError, match="new_cache: batch and capacity must be at least 1, got 0 and 5"):
        rows.new_cache(0, 5)
    with pytest.raises(ValueError, match="append: cache must hold a block from verify, got none"):
        rows.append(cache, torch.zeros(2, 1, dtype=torch.int32))
    rows.prefill(text_of(0)[:, :4], cache, 1)
    with pytest.raises(ValueError, match="prefill: cache must have an empty row 1, got 4 positions"):
        rows.prefill(text_of(0)[:, :4], cache, 1)
    target.close()
    for call in (lambda: rows.prefill(text_of(0)[:, :4], cache, 0), lambda: rows.verify(text_of(0)[:, :2], cache)):
        with pytest.raises(ValueError, match="target must be open, got one after close"):
            call()


def test_a_model_that_changed_its_dtype_is_refused() -> None:
    spec = Speculator(TINY["llama"](num_hidden_layers=3), None, target_path="generic")
    prompts = [[1, 2, 3], [4, 5]]
    before = spec.generate(prompts, 3)
    spec.target.model.bfloat16()
    with pytest.raises(ValueError, match=r"must have parameters of torch\.float32, as when it was taken, got"):
        spec.generate(prompts, 3)
    spec.target.model.float()
    assert [len(one.token_ids) for one in spec.generate(prompts, 3)] == [len(one.token_ids) for one in before]
