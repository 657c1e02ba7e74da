"""What comes from Python and fits no kernel is refused by name, on torch's dispatcher and past it; nothing crashes."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import Tensor

from pydflash import ops
from pydflash.ops import backends, reference

MODES = pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
INT32_MAX = 2**31 - 1


def attention(**changes: Any) -> Tensor:
    q, cache = torch.randn(1, 2, 3, 8), torch.randn(1, 1, 5, 8)
    block, depths = torch.randn(1, 1, 3, 8), torch.arange(3)[None]
    arguments: dict[str, Any] = {
        "q": q, "k_cache": cache, "v_cache": cache, "k_block": block, "v_block": block, "lengths": torch.tensor([4]),
        "visibility": torch.full((1, 3), 7), "depths": depths,
    }  # fmt: skip
    return ops.block_attention(**(arguments | changes))


@MODES
@pytest.mark.parametrize("name", ["visibility", "depths", "lengths", "q", "k_cache"])
def test_tensors_without_dimensions_are_refused(name: str, mode: Any) -> None:
    scalar = torch.tensor(1.0 if name in ("q", "k_cache") else 1)
    with mode(), pytest.raises(ValueError, match=rf"^block_attention: {name} must be .*, got \[\]$"):
        attention(**{name: scalar})


@MODES
def test_depths_of_heads_have_dimensions(mode: Any) -> None:
    qkv, block, table = torch.randn(1, 2, 24), torch.zeros(1, 1, 2, 8), torch.ones(4, 4)
    lengths, depths = torch.zeros(1, dtype=torch.int32), torch.tensor(0, dtype=torch.int32)
    with mode(), pytest.raises(ValueError, match=r"^head_norm_rope: depths must be of at least 1 dim.*, got \[\]$"):
        ops.head_norm_rope(qkv, None, None, 1e-6, table, table, lengths, depths, block, block.clone(), 1, 8)


class Wrapped(Tensor):
    """A subclass that says where it went."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError("dispatched")


@pytest.mark.parametrize("place", range(3))
def test_in_inference_mode_every_tensor_is_looked_at(place: int) -> None:
    tensors = [torch.randn(2, 4, 8), torch.randn(2, 8), torch.randn(2, 4, 2, 2)]
    with torch.inference_mode():
        wrapped = list(tensors)
        wrapped[place] = torch.Tensor._make_wrapper_subclass(Wrapped, tensors[place].shape)  # type: ignore[attr-defined]
        with pytest.raises(NotImplementedError, match="dispatched"):
            ops.block_conv(*wrapped)


@MODES
def test_a_lazy_negation_is_resolved(mode: Any) -> None:
    with mode():
        x = torch.complex(torch.randn(2, 4, 8), torch.randn(2, 4, 8)).conj().imag
        base, delta = torch.randn(2, 8), torch.randn(2, 4, 2, 2)
        assert x.is_neg()
        torch.testing.assert_close(ops.block_conv(x, base, delta), reference.block_conv(x, base, delta))
        with pytest.raises(ValueError, match=r"^swiglu: x must be float32, bfloat16 or float16, got complex64$"):
            ops.swiglu(torch.randn(2, 8, dtype=torch.complex64).conj())


@MODES
def test_tensors_without_memory_have_shapes_alone(mode: Any) -> None:
    with mode():
        assert ops.swiglu(torch.empty(3, 8, device="meta")).shape == (3, 4)
        with pytest.raises(ValueError, match=r"^add_rms_norm: all tensors must be on one device, got cpu and meta$"):
            ops.add_rms_norm(torch.ones(2, 8), None, torch.ones(8, device="meta"), 1e-6)


@MODES
@pytest.mark.parametrize("window", [-1, 2**31, 2**32 + 5])
def test_a_window_that_does_not_fit_is_refused(window: int, mode: Any) -> None:
    with mode(), pytest.raises(ValueError, match=f"^block_attention: window must be .* below 2.31, got {window}$"):
        attention(window=window)
    with mode():
        torch.testing.assert_close(attention(window=INT32_MAX).shape, attention().shape)


def test_lengths_that_a_tile_would_carry_over_are_refused() -> None:
    for length in (-1, INT32_MAX):
        with pytest.raises(ValueError, match=rf"^block_attention: lengths\[0\] must be .*, got {length}$"):
            attention(lengths=torch.tensor([length]))


def append(lengths: int, counts: int) -> Tensor:
    cache = torch.zeros(1, 1, 1, 4, 8)
    table = torch.ones(4, 4)
    numbers = (torch.tensor([n], dtype=torch.int32) for n in (lengths, counts))
    ops.context_append(torch.ones(1, 3, 16), None, 1e-6, table, table, cache, cache.clone(), *numbers, 8)
    return cache


def test_context_is_written_into_the_cache_alone() -> None:
    assert append(2, 1)[0, 0, 0].any(-1).tolist() == [False, False, True, False]
    with pytest.raises(ValueError, match=r"^context_append: lengths\[0\] must be >= 0, got -4$"):
        append(-4, 3)
    for counts in (-1, 4):
        with pytest.raises(
            ValueError, match=rf"^context_append: counts\[0\] must be >= 0 and at most 3, got {counts}$"
        ):
            append(0, counts)


def commit(index: list[int], accepted: int, length: int = 9, active: int = 1) -> list[int]:
    int32 = lambda *values: torch.tensor(values, dtype=torch.int32)  # noqa: E731
    record = torch.zeros(1, 4, dtype=torch.int64)
    features = torch.ones(1, 3, 2)
    ops.round_commit(
        torch.tensor([[5, 6, 7]]), int32(*index)[None], int32(accepted), torch.tensor([8]), int32(active), features,
        features.clone(), torch.tensor([5]), int32(length), int32(9), int32(0), record,
    )  # fmt: skip
    return record[0].tolist()


def test_a_round_is_committed_from_its_block_alone() -> None:
    assert commit([0, 2, -1], 1) == [7, 8, -1, 2]
    assert commit([0, 99, -99], 7, active=0) == [-1, -1, -1, 0], "nothing of a row that is not active is read"
    for index, accepted, name in (([0, 3, -1], 1, "index"), ([0, -1, -1], 1, "index"), ([0, 1, 2], 3, "num_accepted")):
        with pytest.raises(ValueError, match=rf"^round_commit: {name}\[\d\] must be >= 0 and at most 2, got "):
            commit(index, accepted)
    with pytest.raises(ValueError, match=r"^round_commit: num_accepted\[0\] must be .*, got -1$"):
        commit([0, 1, 2], -1)
    with pytest.raises(ValueError, match=r"^round_commit: lengths and starts must stay below 2\^31"):
        commit([0, 2, -1], 1, length=INT32_MAX - 1)


@pytest.mark.parametrize("start", [INT32_MAX, INT32_MAX - 1, -(2**31)])
def test_draws_at_the_last_positions(start: int) -> None:
    """The reference counts in 64 bits and takes the lower 32 for the key."""
    logits, tokens = torch.randn(3, 4, 50), torch.randint(0, 50, (3, 4))
    options: dict[str, Any] = {"temperature": 1.0, "seeds": torch.tensor([1, 2, 3]), "starts": start}
    for got, want in zip(
        ops.reject_sample(logits, tokens, **options), reference.reject_sample(logits, tokens, **options), strict=True
    ):
        assert torch.equal(got, want)


def test_a_failed_load_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.import_module
    monkeypatch.setattr(backends, "_loaded", {})

    def no_memory(name: str, package: str | None = None) -> Any:
        if name == "pydflash._cpu":
            raise ImportError("cannot allocate memory")
        return real(name, package)

    with monkeypatch.context() as patch:
        patch.setattr(importlib, "import_module", no_memory)
        with pytest.warns(RuntimeWarning, match="cannot allocate memory"):
            assert not backends.load("cpu").usable
    assert backends.load("cpu").usable
