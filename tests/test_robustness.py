"""Other libraries' types, surrounding modes, combinations that cannot run: taken, or refused by name."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from fakes import byte_tokenizer
from pairs import build_drafter
from tiny_models import TINY
from torch.fx.experimental.proxy_tensor import make_fx

from pydflash import Speculator, ops
from pydflash.text import Output

PROMPT = [1, 2, 3, 4, 5]


@pytest.fixture(scope="module")
def model() -> Any:
    return TINY["llama"](num_hidden_layers=6)


@pytest.fixture(scope="module")
def greedy(model: Any) -> list[int]:
    return Speculator(model, None).generate(PROMPT, 12).token_ids


@pytest.mark.parametrize("kind", [int, np.int64, torch.tensor, lambda i: [torch.tensor(i)], lambda i: np.array([i])])
def test_stop_ids_of_any_integer_type(model: Any, greedy: list[int], kind: Any) -> None:
    out = Speculator(model, None).generate(PROMPT, 12, stop_token_ids=kind(greedy[4]))
    assert out.token_ids == greedy[: greedy.index(greedy[4]) + 1]
    assert out.finish_reason == "stop"


@pytest.mark.parametrize("wrong", ["a", b"a", ["a"], [1.5], {"a": 1}, [None]])
def test_stop_ids_of_another_type_are_refused(model: Any, wrong: Any) -> None:
    with pytest.raises(ValueError, match="stop_token_ids: must be token ids, got"):
        Speculator(model, None).generate(PROMPT, 4, stop_token_ids=wrong)


def test_numbers_and_prompts_of_numpy(model: Any, greedy: list[int]) -> None:
    spec = Speculator(model, None)
    assert spec.generate(np.array(PROMPT), 12).token_ids == greedy
    options = {"temperature": np.float32(0.5), "top_k": np.int64(9), "top_p": np.float64(0.9), "seed": np.int64(3)}
    plain = {"temperature": 0.5, "top_k": 9, "top_p": 0.9, "seed": 3}
    assert spec.generate(PROMPT, 12, **options).token_ids == spec.generate(PROMPT, 12, **plain).token_ids


def test_a_changed_generation_config_counts_at_once(greedy: list[int]) -> None:
    model = TINY["llama"](num_hidden_layers=6)
    spec = Speculator(model, None)
    assert spec.generate(PROMPT, 12).token_ids == greedy
    model.generation_config.eos_token_id = torch.tensor([greedy[2]])
    assert spec.generate(PROMPT, 12).token_ids == greedy[: greedy.index(greedy[2]) + 1]


def test_a_stop_string_ends_with_the_token_that_completes_it() -> None:
    """The completing token may also bring the first byte of a character that is not complete yet."""
    tokenizer = byte_tokenizer()
    ids = tokenizer("x: \u2603")["input_ids"]
    out = Output(tokenizer, 50, [], [": "])
    for i in ids:
        out.extend([i])
    assert out.text == "x: "
    assert tokenizer.decode(out.token_ids).startswith("x: ")
    assert len(out.token_ids) <= len(ids) - 2
    assert out.finish_reason == "stop"


def test_lengths_and_rows_out_of_range_are_refused() -> None:
    cache = torch.zeros(1, 2, 1, 8, 4)
    block = torch.ones(1, 2, 1, 1, 4)
    index = torch.tensor([[-1], [0]])
    with pytest.raises(ValueError, match=r"cache_append: lengths\[1\] must be >= 0, got -3"):
        ops.cache_append(cache, cache.clone(), block, block, index, torch.tensor([0, -3]))
    with pytest.raises(ValueError, match="cache_append: index must hold rows of the block, at most 0, got 1"):
        ops.cache_append(cache, cache.clone(), block, block, index + 1, torch.tensor([0, 3]))
    with pytest.raises(ValueError, match="cache_append: lengths must fit in 32 bits, got values up to 4294967301"):
        ops.cache_append(cache, cache.clone(), block, block, index, torch.tensor([0, 2**32 + 5]))
    with pytest.raises(ValueError, match=r"cache_append: lengths must be int32 or int64, got torch.float32"):
        ops.cache_append(cache, cache.clone(), block, block, index, torch.tensor([0.0, 1.0]))
    assert not cache.any()


def test_traced_ops_stay_ops() -> None:
    base, delta = torch.randn(2, 8), torch.randn(1, 3, 2, 2)
    traced = make_fx(lambda x: ops.block_conv(x, base, delta))(torch.randn(1, 3, 8))
    assert "pydflash.block_conv" in traced.code
    x = torch.randn(1, 3, 8)
    torch.testing.assert_close(traced(x), ops.block_conv(x, base, delta))


def test_autocast_around_the_loop_changes_nothing(model: Any, greedy: list[int]) -> None:
    drafter = build_drafter(2)
    spec = Speculator(model, drafter)
    with torch.autocast("cpu", torch.bfloat16, enabled=False):
        assert spec.generate(PROMPT, 12).token_ids == greedy
    with torch.autocast("cpu", torch.bfloat16):
        assert len(spec.generate(PROMPT, 12).token_ids) == 12


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"head_dim": 12}, "head_dim must be a multiple of 8 up to 256 for the native ops, got 12"),
        ({"block_size": 65}, "block_size must be at most 64 for the native ops, got 65"),
    ],
)
def test_what_the_ops_cannot_run_is_refused_at_construction(model: Any, changes: dict[str, Any], message: str) -> None:
    drafter = build_drafter(1, **changes)
    with pytest.raises(ValueError, match=message):
        Speculator(model, drafter)
    Speculator(model, drafter, backend="reference")


def test_a_float64_target_needs_the_reference() -> None:
    model = TINY["llama"]().double()
    with pytest.raises(ValueError, match="float32, bfloat16 or float16 for the native ops"):
        Speculator(model, None)
    assert len(Speculator(model, None, backend="reference").generate(PROMPT, 3).token_ids) == 3


def test_speculators_do_not_change_each_other(model: Any, greedy: list[int]) -> None:
    drafter = build_drafter(2)
    first = Speculator(model, drafter)
    second = Speculator(model, drafter, backend="reference")
    assert (first.drafter.backend, second.drafter.backend, drafter.backend) == ("native", "reference", "native")
    assert second.drafter.fc.weight is drafter.fc.weight
    assert copy.deepcopy(first).generate(PROMPT, 12).token_ids == greedy


def test_filters_without_a_temperature_are_not_dropped_silently(model: Any) -> None:
    with pytest.warns(UserWarning, match="top_p, top_k and min_p change nothing"):
        Speculator(model, None).generate(PROMPT, 2, top_p=0.9)


def test_a_single_processor_and_a_wrong_one(model: Any, greedy: list[int]) -> None:
    spec = Speculator(model, None)
    assert spec.generate(PROMPT, 12, logits_processor=lambda ids, scores: scores).token_ids == greedy
    with pytest.raises(ValueError, match=r"logits_processor: must return scores \[1, V\], got NoneType"):
        spec.generate(PROMPT, 2, logits_processor=lambda ids, scores: None)
