"""A packed decoder as one call: the numbers of the module's own forward, what it takes, and what it keeps."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from decoder_cases import KINDS, RAGGED, appended, both
from matching import assert_matches
from pairs import HIDDEN, VOCAB
from tiny_models import TINY
from torch import Tensor

from pydflash import Drafter, Target
from pydflash.decoder import formats
from pydflash.drafter.decoder import decoder_of
from pydflash.target.fused import FusedTarget

CPU = torch.device("cpu")


def packed_pair(version: int, format: str, dtype: torch.dtype = torch.float32, **changes: Any) -> list[Drafter]:
    """A drafter whose layers run as a program, and one that runs them as a module."""
    fused, module = both(version, CPU, dtype, **changes)
    made = decoder_of(fused.config, fused.stack, fused.norm.weight, fused.fc)
    assert made is not None
    made.pack(formats.of(format))
    assert made.decoder.program is not None
    object.__setattr__(fused, "decoder", lambda: made)
    return [fused, module]


def hiddens(pair: list[Drafter], size: int) -> list[Tensor]:
    anchors = torch.tensor([3, 4, 5])
    table = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(7)).to(pair[0].dtype)
    with torch.inference_mode():
        return [d.hidden(anchors, appended(d, RAGGED), table, size) for d in pair]


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_same_numbers_as_the_module(kind: str, interleaved: bool) -> None:
    """Ragged batches, every kind of layer, blocks of every size."""
    version, changes = KINDS[kind]
    pair = packed_pair(version, "float32", rope_interleaved=interleaved, **changes)
    for size in (1, 2, 8):
        got, want = hiddens(pair, size)
        assert got.shape == (3, size, HIDDEN)
        assert_matches(got, want, 4e-6)


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_int8_is_near(dtype: torch.dtype, version: int) -> None:
    got, want = hiddens(packed_pair(version, "int8", dtype), 8)
    assert got.dtype == dtype
    error = float((got.float() - want.float()).norm() / want.float().norm())
    assert 1e-4 < error < 0.12


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_target_taps_what_its_model_gives(family: str) -> None:
    """Residual streams of several layers, in the order of the layers and of the block's slots."""
    layers = (1, 0)
    target = Target(TINY[family](), layers)
    fast = FusedTarget(target)
    assert fast.recognised is not None
    assert fast.recognised.decoder.program is not None
    ids = torch.arange(1, 12)[None]
    cache, own = fast.new_cache(1, 32), target.new_cache(1, 32)
    fast.prefill(ids[:, :7], cache)
    target.prefill(ids[:, :7], own)
    got, want = fast.verify(ids[:, 7:], cache), target.verify(ids[:, 7:], own)
    assert got.features is not None
    assert_matches(got.features, want.features, 1e-5)
    assert_matches(got.logits, want.logits, 1e-5)


def test_it_keeps_what_it_reads() -> None:
    """The tensors it was built from may be dropped by all others."""
    pair = packed_pair(2, "float32")
    program = pair[0].decoder().decoder.program  # type: ignore[union-attr]
    before = hiddens(pair, 4)[0]
    for layer in pair[0].decoder().decoder.layers:  # type: ignore[union-attr]
        assert program is not None
        linears = (layer.mixer.qkv, layer.mlp.down)
        assert all(any(held is p.packed for held in program._held._kept) for p in linears)
    gc.collect()
    assert torch.equal(hiddens(pair, 4)[0], before)


def call(pair: list[Drafter], **changes: Any) -> None:
    """One forward of the compiled side, with some arguments exchanged."""
    from pydflash.ops.native import capsule

    config = pair[0].config
    shape = (config.num_layers, 2, config.num_kv_heads, 3, config.head_dim)
    cache = torch.zeros(*shape[:3], 5, config.head_dim)
    arguments = {
        "x": torch.zeros(2, 3, HIDDEN),
        "out": torch.zeros(2, 3, HIDDEN),
        "k_cache": cache,
        "v_cache": cache.clone(),
        "lengths": torch.zeros(2, dtype=torch.int32),
        "depths": torch.arange(3, dtype=torch.int32)[None],
        "visibility": torch.full((1, 3), 7),
        "causal": None,
        "k_block": torch.zeros(shape),
        "v_block": torch.zeros(shape),
        "cos": torch.ones(9, config.head_dim // 2),
        "sin": torch.zeros(9, config.head_dim // 2),
        "taken": torch.zeros(0, 2, 3, HIDDEN),
    } | changes
    cos, sin, taken = (capsule(arguments.pop(name)) for name in ("cos", "sin", "taken"))
    tables = [(cos, sin)] * (not changes.get("no_tables", False))
    arguments.pop("no_tables", None)
    program = pair[0].decoder().decoder.program  # type: ignore[union-attr]
    program._native.forward(*map(capsule, arguments.values()), tables, [], taken)


WRONG = (
    ({"x": torch.zeros(2, 3, HIDDEN + 1)}, r"x must be of shape \[B, S, H\]"),
    ({"x": torch.zeros(2, 3, HIDDEN).half()}, r"x must be of the weights' dtype"),
    ({"x": torch.zeros(2, 65, HIDDEN)}, r"x must be at most 64 slots"),
    ({"out": torch.zeros(2, 4, HIDDEN)}, r"out must be of shape"),
    ({"lengths": torch.zeros(3, dtype=torch.int32)}, r"lengths must be of shape"),
    ({"depths": torch.zeros(1, 3)}, r"depths must be int32"),
    ({"visibility": torch.full((2, 2), 3)}, r"visibility must be of shape"),
    ({"cos": torch.ones(9, 1)}, r"cos must be of shape"),
    ({"sin": torch.ones(8, 4)}, r"sin must be of shape"),
    ({"no_tables": True}, r"tables must be at least 1, got 0"),
    ({"k_block": torch.zeros(1, 2, 1, 3, 8)}, r"k_block must be of shape"),
    ({"taken": torch.zeros(1, 2, 3, HIDDEN)}, r"taken must be of shape"),
)


@pytest.mark.parametrize(("changes", "message"), WRONG)
def test_refusals(changes: dict[str, Any], message: str) -> None:
    pair = packed_pair(1, "float32")
    call(pair)
    with pytest.raises(ValueError, match=f"decoder: {message}"):
        call(pair, **changes)
