"""The files of a drafter's folder: shards, unreadable and pickled files, the mask embedding, hub ids."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from safetensors.torch import save_file
from tiny_drafters import assert_bits_equal, not_loaded, tensors_of, tiny_1, write_checkpoint

from pydflash.checkpoints.checkpoint import load_checkpoint
from pydflash.checkpoints.config import DrafterConfig


def test_shards(tmp_path):
    tensors = tensors_of(tiny_1())
    write_checkpoint(tmp_path, tiny_1(), {})
    (tmp_path / "model.safetensors").unlink()
    names = sorted(tensors)
    files = {"model-00001-of-00002.safetensors": names[:9], "model-00002-of-00002.safetensors": names[9:]}
    for file, part in files.items():
        save_file({name: tensors[name] for name in part}, tmp_path / file)
    index = {"weight_map": {name: file for file, part in files.items() for name in part}}
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(json.dumps(index))
    assert_bits_equal(load_checkpoint(tmp_path)[1], tensors)

    def with_map(**changes: str) -> None:
        path.write_text(json.dumps({"weight_map": index["weight_map"] | changes}))

    with_map(**{"fc.weight": "../model-00001-of-00002.safetensors"})
    not_loaded(tmp_path, "weight_map", "../model-00001")
    with_map(**{names[0]: "model-00002-of-00002.safetensors"})
    not_loaded(tmp_path, "model-00001-of-00002.safetensors", names[0])
    with_map(other="model-00003-of-00003.safetensors")
    with pytest.raises(FileNotFoundError, match=r"index.json: .*model-00003-of-00003.safetensors"):
        load_checkpoint(tmp_path)
    path.write_text("{}")
    not_loaded(tmp_path, "weight_map", "NoneType")
    save_file(tensors, tmp_path / "model.safetensors")
    not_loaded(tmp_path, "got both")


def test_unreadable_files_are_named(tmp_path):
    tensors = tensors_of(tiny_1())
    path = write_checkpoint(tmp_path, tiny_1(), tensors) / "model.safetensors"
    whole = path.read_bytes()
    for cut in (whole[:-1], whole[:1000], whole[:4], b"", b"\xff" * 64):
        path.write_bytes(cut)
        not_loaded(tmp_path, "model.safetensors: not a readable safetensors file")
    path.write_bytes(whole)
    config = tmp_path / "config.json"
    for text in ("{", "\xff", ""):
        config.write_text(text, encoding="latin-1")
        not_loaded(tmp_path, "config.json: not valid JSON")
    config.write_text("[]")
    not_loaded(tmp_path, "config.json: must hold a JSON object, got list")
    config.write_text(json.dumps(tiny_1(block_size=0)))
    not_loaded(tmp_path, "config.json: DrafterConfig: block_size must be a positive integer, got 0")
    config.unlink()
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        load_checkpoint(tmp_path)


def test_weights_that_are_pickled_absent_or_ambiguous(tmp_path):
    write_checkpoint(tmp_path, tiny_1(), {})
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"must hold model.safetensors or .*, got neither"):
        load_checkpoint(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    not_loaded(tmp_path, "safetensors", "got pytorch_model.bin")
    save_file(tensors_of(tiny_1()), tmp_path / "drafter.safetensors")
    assert_bits_equal(load_checkpoint(tmp_path)[1], tensors_of(tiny_1()))
    save_file(tensors_of(tiny_1()), tmp_path / "again.safetensors")
    with pytest.raises(FileNotFoundError, match=r"got again.safetensors, drafter.safetensors"):
        load_checkpoint(tmp_path)


class Evil:
    """Unpickling this makes a file: reading a checkpoint must not."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.path,))


def test_mask_embedding_file(tmp_path):
    tensors = tensors_of(tiny_1())
    path = write_checkpoint(tmp_path, tiny_1(), tensors) / "mask_embedding.pt"
    row = torch.randn(64)
    for content in (
        row,
        {"mask_token_id": 255, "embedding": row},
        {"mask_token_id": torch.tensor(255), "embedding": row},
    ):
        torch.save(content, path)
        assert_bits_equal(load_checkpoint(tmp_path)[1], tensors | {"mask_embedding": row})
    torch.save({"mask_token_id": 254, "embedding": row}, path)
    not_loaded(tmp_path, "mask_embedding.pt: mask_token_id must be 255 (config.json), got 254")
    for content, got in (({"embedding": row}, "a dict of embedding"), ([row], "got list")):
        torch.save(content, path)
        not_loaded(tmp_path, "mask_embedding.pt: must hold a tensor [64] or a dict", got)
    torch.save(row[:63], path)
    not_loaded(tmp_path, "mask_embedding must be [64], got [63]")
    torch.save(Evil(tmp_path / "pwned"), path)
    not_loaded(tmp_path, "mask_embedding.pt", "cannot be read")
    assert not (tmp_path / "pwned").exists()


def test_hub_ids_and_paths(tmp_path, monkeypatch):
    calls: list[Any] = []

    def snapshot(repo_id: str, **options: Any) -> str:
        calls.append((repo_id, options))
        return str(write_checkpoint(tmp_path / "hub", tiny_1(), tensors_of(tiny_1())))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    config, _ = load_checkpoint("z-lab/Tiny-DFlash-b4", revision="abc")
    assert config == DrafterConfig.from_dict(tiny_1())
    ((repo, options),) = calls
    assert (repo, options["revision"]) == ("z-lab/Tiny-DFlash-b4", "abc")
    assert not any(name.endswith((".bin", ".py", ".pth")) for name in options["allow_patterns"])
    monkeypatch.chdir(tmp_path)
    load_checkpoint("hub")
    load_checkpoint(tmp_path / "hub")
    with pytest.raises(ValueError, match="revision must be None"):
        load_checkpoint("hub", revision="abc")
    for path in ("nothing", "./no/where", tmp_path / "x", "a/b/c", "hub/config.json", Path("z-lab/Tiny")):
        with pytest.raises(FileNotFoundError, match="path_or_id must be a folder or a hub id"):
            load_checkpoint(path)
    assert len(calls) == 1
