"""Rotary embedding: frequencies against transformers and float64, both pairings, spellings of one config."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from pairs import config_dict

from pydflash import DrafterConfig
from pydflash.drafter.rope import RotaryTable, frequencies

CPU = torch.device("cpu")
DIM = 64
PLAIN: dict[str, Any] = {"rope_type": "default", "rope_theta": 1e6}
YARN: dict[str, Any] = {
    "rope_type": "yarn", "rope_theta": 5e4, "factor": 64.0, "original_max_position_embeddings": 4096,
}  # fmt: skip
LLAMA3: dict[str, Any] = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
ROPES: dict[str, dict[str, Any]] = {
    "default": PLAIN,
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
    "yarn": YARN,
    "yarn betas": YARN | {"beta_fast": 16.0, "beta_slow": 2.0},
    "yarn attention factor": YARN | {"attention_factor": 1.25},
    "yarn mscale": YARN | {"mscale": 0.707, "mscale_all_dim": 1.0},
    "yarn not truncated": YARN | {"truncate": False},
    "yarn small": YARN | {"factor": 1.0},
    "llama3": LLAMA3,
}
POSITIONS = torch.tensor([0, 1, 2, 77, 4095, 4096, 31_000, 100_000])


def table(rope: dict[str, Any], dim: int = DIM, interleaved: bool = False) -> RotaryTable:
    made = RotaryTable(rope, dim, 131072, interleaved=interleaved)
    made.reserve(int(POSITIONS.max()) + 1, CPU)
    return made


def transformers_tables(rope: dict[str, Any], family: str) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin [positions, DIM / 2] by the rotary class of transformers."""
    transformers = pytest.importorskip("transformers")
    module = getattr(transformers.models, family)
    config_class, rotary_class = f"{family.title()}Config", f"{family.title()}RotaryEmbedding"
    modeling = getattr(module, f"modeling_{family}")
    sizes = {"hidden_size": 2 * DIM, "num_attention_heads": 2, "head_dim": DIM, "max_position_embeddings": 131072}
    if hasattr(transformers.Qwen3Config(), "rope_parameters"):
        config = getattr(transformers, config_class)(**sizes, rope_parameters=dict(rope))
    else:
        scaling = {k: v for k, v in rope.items() if k != "rope_theta"}
        scaling_or_none = None if rope["rope_type"] == "default" else scaling
        config = getattr(transformers, config_class)(
            **sizes, rope_theta=rope["rope_theta"], rope_scaling=scaling_or_none
        )
    cos, sin = getattr(modeling, rotary_class)(config)(torch.zeros(1, dtype=torch.float32), POSITIONS[None])
    return cos[0, :, : DIM // 2], sin[0, :, : DIM // 2]


@pytest.mark.parametrize("family", ["qwen3", "llama"])
@pytest.mark.parametrize("name", ROPES)
def test_tables_are_transformers_tables(name: str, family: str) -> None:
    """Up to its float32 angles: at position p those are off by about p * 2**-24."""
    cos, sin = table(ROPES[name]).lookup(POSITIONS)
    for got, want in zip((cos, sin), transformers_tables(ROPES[name], family), strict=True):
        error = (got - want).abs().amax(-1)
        assert (error <= 2e-6 + POSITIONS * 1.5e-7).all(), error


@pytest.mark.parametrize("theta", [1e4, 1e6, 1e7])
def test_position_100000_is_exact(theta: float) -> None:
    cos, sin = table({"rope_type": "default", "rope_theta": theta}, 128).lookup(torch.tensor([100_000]))
    for i in range(64):
        angle = 100_000 * theta ** (-2 * i / 128)
        assert abs(float(cos[0, i]) - math.cos(angle)) < 1e-6
        assert abs(float(sin[0, i]) - math.sin(angle)) < 1e-6


def test_frequencies_by_hand() -> None:
    base, factor = frequencies({"rope_type": "default", "rope_theta": 100.0}, 4, 512)
    assert base.tolist() == [1.0, 0.1]
    assert factor == 1.0
    assert frequencies({"rope_type": "linear", "rope_theta": 100.0, "factor": 4.0}, 4, 512)[0].tolist() == [0.25, 0.025]
    yarn = frequencies(YARN, DIM, 131072)
    assert yarn[1] == pytest.approx(0.1 * math.log(64) + 1)
    plain = frequencies({"rope_type": "default", "rope_theta": 5e4}, DIM, 512)[0]
    assert yarn[0][0] == plain[0]  # fast turns stay, slow ones are stretched by the factor
    assert yarn[0][-1] == pytest.approx(float(plain[-1]) / 64)
    without = {k: v for k, v in YARN.items() if k != "original_max_position_embeddings"}
    assert torch.equal(frequencies(without, DIM, 4096)[0], yarn[0])
    with pytest.raises(ValueError, match="rope: rope_type must be default, linear, yarn or llama3, got 'longrope'"):
        frequencies({"rope_type": "longrope", "rope_theta": 1e4}, DIM, 512)


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotation_is_a_complex_product(interleaved: bool) -> None:
    """Pair (a, b) at angle t is (a + ib) e^{it}; pairs are halves apart, or neighbours."""
    made = table(YARN, 8, interleaved)
    x = torch.randn(3, len(POSITIONS), 8, generator=torch.Generator().manual_seed(0))
    cos, sin = made.lookup(POSITIONS)
    base, factor = frequencies(YARN, 8, 131072)
    turn = torch.polar(torch.full((len(POSITIONS), 4), factor, dtype=torch.float64), POSITIONS[:, None] * base)
    pairs = (x.unflatten(-1, (4, 2)) if interleaved else x.unflatten(-1, (2, 4)).transpose(-1, -2)).double()
    turned = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * turn)
    want = turned.flatten(-2) if interleaved else turned.transpose(-1, -2).flatten(-2)
    torch.testing.assert_close(made.rotate(x, cos, sin).double(), want, rtol=0, atol=1e-5)
    half = made.rotate(x.bfloat16(), cos, sin)
    assert half.dtype == torch.bfloat16
    assert torch.equal(half, made.rotate(x.bfloat16().float(), cos, sin).bfloat16())  # rounded once


def test_the_config_decides_the_pairing() -> None:
    from pairs import build_drafter

    features = torch.randn(1, 6, 128, generator=torch.Generator().manual_seed(0))
    keys = []
    for interleaved in (False, True):
        drafter = build_drafter(1)
        object.__setattr__(drafter.config, "rope_interleaved", interleaved)
        other = type(drafter)(drafter.config)
        other.load_state_dict(drafter.state_dict())
        cache = other.eval().new_cache(1, 6)
        with torch.no_grad():
            other.append_context(features, cache)
        keys.append(cache.k)
    assert torch.allclose(keys[0][:, :, :, 0], keys[1][:, :, :, 0], atol=1e-6)  # position 0 turns nothing
    assert not torch.allclose(keys[0], keys[1], atol=1e-2)


def test_four_spellings_of_one_rope_give_one_table() -> None:
    """rope_parameters; rope_theta with rope_scaling, old and new; parameters by layer type."""
    scaling = {k: v for k, v in YARN.items() if k != "rope_theta"}
    old = {("type" if k == "rope_type" else k): v for k, v in scaling.items()}
    spellings: list[dict[str, Any]] = [
        {"rope_parameters": YARN},
        {"rope_theta": 5e4, "rope_scaling": scaling},
        {"rope_theta": 5e4, "rope_scaling": old},
        {"rope_parameters": {"full_attention": YARN, "sliding_attention": YARN}},
    ]
    tables = []
    for spelling in spellings:
        raw = {k: v for k, v in config_dict(1).items() if k != "rope_parameters"} | {"max_position_embeddings": 4096}
        config = DrafterConfig.from_dict(raw | spelling)
        made = RotaryTable(config.rope, config.head_dim, 4096, interleaved=False)
        made.reserve(5000, CPU)
        tables.append(made.lookup(torch.arange(5000)))
    for cos, sin in tables[1:]:
        assert torch.equal(cos, tables[0][0])
        assert torch.equal(sin, tables[0][1])
    plain = table({"rope_type": "default", "rope_theta": 5e4}, 16).lookup(torch.arange(5000))
    assert not torch.allclose(plain[0], tables[0][0], atol=1e-2)


def test_the_table_grows_and_keeps_its_values() -> None:
    made = RotaryTable(PLAIN, DIM, 512, interleaved=False)
    made.reserve(3, CPU)
    first = made.lookup(torch.arange(3))[0].clone()
    for length in (256, 257, 2000, 10):
        made.reserve(length, CPU)
        assert torch.equal(made.lookup(torch.arange(3))[0], first)
    cos, _ = made.lookup(torch.tensor([[0], [1999]]))
    assert cos.shape == (2, 1, DIM // 2)
    assert cos.dtype == torch.float32
    assert abs(float(cos[1, 0, 0]) - math.cos(1999)) < 1e-6
