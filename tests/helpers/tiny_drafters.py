"""Tiny drafter configs, as they stand in a config.json, random tensors for them, and checkpoints of both."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from pydflash.checkpoints.checkpoint import expected_tensors, load_checkpoint
from pydflash.checkpoints.config import DrafterConfig


def tiny_1(**changes: Any) -> dict[str, Any]:
    """A DFlash config in the Z-Lab layout, block_size at the top level; `changes` replace or add top-level keys."""
    raw: dict[str, Any] = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "vocab_size": 256,
        "max_position_embeddings": 512,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "layer_types": ["full_attention", "full_attention"],
        "sliding_window": None,
        "num_target_layers": 8,
        "block_size": 4,
        "dflash_config": {"mask_token_id": 255, "target_layer_ids": [1, 5]},
    }
    return raw | changes


def tiny_2(**changes: Any) -> dict[str, Any]:
    """A DFlash 2 config in the Z-Lab layout: bidirectional sliding layers, the DFlash keys nested."""
    raw = tiny_1(architectures=["DFlash2DraftModel"], is_causal=False, sliding_window=32)
    del raw["block_size"]
    raw["layer_types"] = ["sliding_attention", "sliding_attention"]
    raw["dflash_config"] |= {"block_size": 4, "conv_kernel_size": 2, "conv_group_size": 16}
    raw["dflash_config"] |= {"selector_rank": 8, "selector_top_k": 4}
    return raw | changes


def nested(raw: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """The config with keys of `dflash_config` replaced or added; None takes a key out."""
    section = {name: v for name, v in (raw["dflash_config"] | changes).items() if v is not None}
    return raw | {"dflash_config": section}


def without(raw: dict[str, Any], *names: str) -> dict[str, Any]:
    """The config less some keys."""
    return {name: value for name, value in raw.items() if name not in names}


def speculators(raw: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """A Z-Lab config rewritten by hand in the speculators layout; `changes` are keys of the root."""
    moved = ("architectures", "dflash_config", "block_size", "is_causal", "num_target_layers")
    section = raw["dflash_config"] | {k: raw[k] for k in ("block_size",) if k in raw}
    version = 2 if raw["architectures"] == ["DFlash2DraftModel"] else 1
    kind = "dflash" if version == 1 else "dflash2"
    root = {
        "architectures": ["DFlashSpeculator" if version == 1 else "DFlash2DraftModel"],
        "speculators_model_type": kind,
        "speculators_version": "0.8.0",
        "speculators_config": {"algorithm": kind, "verifier": {"name_or_path": "a/b", "architectures": ["C"]}},
        "transformer_layer_config": without(raw, *moved),
        "aux_hidden_state_layer_ids": [i + 1 for i in section["target_layer_ids"]],
        "draft_vocab_size": raw["vocab_size"],
        "target_hidden_size": None,
        "sample_from_anchor": False,
        "sliding_window_non_causal": version == 2,
    }
    return root | without(section, "target_layer_ids") | changes


def refused(raw: Any, *fragments: str) -> None:
    """Reading `raw` must fail with an error that says key, expected and got, and holds the fragments."""
    with pytest.raises(ValueError) as caught:
        DrafterConfig.from_dict(raw)
    for fragment in ("DrafterConfig: ", "must be", "got", *fragments):
        assert fragment in str(caught.value)


def random_tensors(config: DrafterConfig, dtype: torch.dtype = torch.float32, seed: int = 0) -> dict[str, torch.Tensor]:
    """Normal values for every tensor the config asks for, and a map to odd target ids where it asks for d2t."""
    generator = torch.Generator().manual_seed(seed)
    shapes = expected_tensors(config)
    tensors = {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}
    if "d2t" in tensors:
        tensors["d2t"] = torch.arange(config.draft_vocab_size) + 1  # draft id i stands for target id 2 i + 1
    return tensors


def write_checkpoint(folder: Path, raw: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Path:
    """A checkpoint as somebody else wrote it."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw))
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def tensors_of(raw: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Random float32 tensors for the content of a config.json."""
    return random_tensors(DrafterConfig.from_dict(raw))


def assert_bits_equal(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    """Same names, dtypes and bits."""
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        assert got[name].dtype == tensor.dtype, name
        assert torch.equal(got[name], tensor), name


def not_loaded(folder: Path, *fragments: str) -> None:
    """Loading must fail with an error that names the folder and holds the fragments."""
    with pytest.raises(ValueError, match=r"^load_checkpoint: ") as caught:
        load_checkpoint(folder)
    for fragment in (str(folder), *fragments):
        assert fragment in str(caught.value)
