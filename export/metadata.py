"""What an exported drafter says of itself: in the model's own metadata and in draft.json beside it, the same twice."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from pydflash.config import DrafterConfig

FORMAT = 1
MODEL, DATA, DRAFT_JSON = "draft.onnx", "draft.onnx.data", "draft.json"
POSITIONS = 1 << 20  # that the rotary tables of a graph reach
_PREFIX = "pydflash."
_REQUIRED = ("format", "profile", "dtype", "quantize", "embed", "config", "source_sha256")


def describe(config: DrafterConfig, **more: Any) -> dict[str, Any]:
    """The metadata of a model: what a host has to know, and the whole config; `more` are profile, dtype and so on."""
    return {
        "format": FORMAT,
        "version": config.version,
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "target_layer_ids": list(config.target_layer_ids),
        "target_layer_convention": "L is the output of decoder layer L, counted from 0",
        "num_features": len(config.target_layer_ids) * config.target_hidden_size,
        "top_k": config.num_candidates,
        "num_layers": config.num_layers,
        "num_kv_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position": config.max_position_embeddings,
        "rope_theta": config.rope["rope_theta"],
        **more,
        "config": config.to_dict(),
    }


def to_properties(metadata: Mapping[str, Any]) -> dict[str, str]:
    """As an ONNX model holds it: a JSON text for each key."""
    return {_PREFIX + name: json.dumps(value) for name, value in metadata.items()}


def write_draft_json(path: Path, metadata: Mapping[str, Any], sizes: Mapping[str, int]) -> None:
    content = {"model": MODEL, "files": dict(sizes), "metadata": dict(metadata)}
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def read_draft_json(folder: Path) -> tuple[Path, dict[str, Any]]:
    """The model's path and the metadata; ValueError or FileNotFoundError, naming the file, for what is wrong."""
    path = folder / DRAFT_JSON
    if not path.is_file():
        raise FileNotFoundError(f"OnnxDrafter: folder must hold {DRAFT_JSON}, got {folder}")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"OnnxDrafter: {path}: not valid JSON ({error})") from error
    metadata = content.get("metadata") if isinstance(content, dict) else None
    if not isinstance(metadata, dict) or (missing := [name for name in _REQUIRED if name not in metadata]):
        wanted = missing if isinstance(metadata, dict) else ["metadata"]
        raise ValueError(f"OnnxDrafter: {path}: must hold {', '.join(wanted)}")
    if metadata["format"] != FORMAT:
        raise ValueError(f"OnnxDrafter: {path}: format must be {FORMAT}, got {metadata['format']!r}; export it again")
    name = content.get("model")
    if not isinstance(name, str) or Path(name).name != name or not name.endswith(".onnx"):
        raise ValueError(f"OnnxDrafter: {path}: model must be the name of an .onnx file of this folder, got {name!r}")
    for file, size in dict(content.get("files") or {}).items():
        if Path(file).name != file:
            raise ValueError(f"OnnxDrafter: {path}: files must be names in this folder, got {file!r}")
        if not (folder / file).is_file():
            raise FileNotFoundError(f"OnnxDrafter: {folder / file} is missing")
        if (got := (folder / file).stat().st_size) != size:
            raise ValueError(f"OnnxDrafter: {folder / file}: must have {size} bytes as {DRAFT_JSON} says, got {got}")
    return folder / name, metadata


def check_same(path: Path, metadata: Mapping[str, Any], properties: Mapping[str, str]) -> None:
    """Raise ValueError, naming a key, where the model's own metadata differs from that of draft.json."""
    own = {k.removeprefix(_PREFIX): json.loads(v) for k, v in properties.items() if k.startswith(_PREFIX)}
    for name in sorted(own.keys() | metadata.keys()):
        if own.get(name) != metadata.get(name):
            raise ValueError(
                f"OnnxDrafter: {path}: {name} must be that of {DRAFT_JSON} ({metadata.get(name)!r}), "
                f"got {own.get(name)!r}; the files are of different exports"
            )


def dtype_of(metadata: Mapping[str, Any]) -> Any:
    """The numpy type of the graph's activations and caches."""
    return np.dtype(metadata["dtype"]).type
