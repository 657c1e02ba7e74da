"""The folders of exported models: what in them must be there, be whole, and be of one export."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from exported import Exported, export
from pairs import build_drafter
from tiny_models import TINY

pytest.importorskip("onnx_ir", reason="onnx_ir is not installed")
pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")

from pydflash.export import OnnxDrafter, OnnxTarget, export_target, metadata


@pytest.fixture
def v2(tmp_path: Path) -> Exported:
    return export(tmp_path, build_drafter(2))


def broken(folder: Path, copy: Path, change: Any) -> Path:
    """A copy of an export whose draft.json was changed."""
    shutil.copytree(folder, copy)
    content = json.loads((copy / "draft.json").read_text())
    change(content)
    (copy / "draft.json").write_text(json.dumps(content))
    return copy


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c["metadata"].update(mask_token_id=3), "mask_token_id must be that of draft.json"),
        (lambda c: c["metadata"].update(source_sha256="0"), "source_sha256 must be that of draft.json"),
        (lambda c: c["metadata"].update(format=99), "format must be 1, got 99"),
        (lambda c: c["metadata"].pop("profile"), "must hold profile"),
        (lambda c: c.pop("metadata"), "must hold metadata"),
        (lambda c: c.update(model="../draft.onnx"), "model must be the name of an .onnx file of this folder"),
        (lambda c: c.update(model="/etc/passwd"), "model must be the name of an .onnx file of this folder"),
        (lambda c: c.update(files=[1]), "files must be an object with the names of files"),
        (lambda c: c.update(files=[]), "files must be an object with the names of files"),
        (lambda c: c.update(sha256=None), "sha256 must be an object with the names of files"),
        (lambda c: c["files"].update({"../x": 1}), "files must be of names in this folder"),
        (lambda c: c["files"].update({"draft.onnx.data": 5}), "must have 5 bytes as draft.json says"),
        (lambda c: c["sha256"].update({"draft.onnx": "0" * 64}), r"draft\.onnx: must have the sha256 .* 000000000000"),
        (lambda c: c["sha256"].update({"draft.onnx": None}), r"draft\.onnx: must have the sha256"),
        (lambda c: c["sha256"].update({"/etc/passwd": "0"}), "sha256 must be of names in this folder"),
        (lambda c: c.update(sha256="0"), "sha256 must be an object with the names of files"),
    ],
)
def test_a_draft_json_of_another_export_is_refused(v2: Exported, tmp_path: Path, change: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        OnnxDrafter(broken(v2.folder, tmp_path / "copy", change))


def test_missing_and_unreadable_files_are_named(v2: Exported, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"must hold draft\.json"):
        OnnxDrafter(tmp_path)
    copy = broken(v2.folder, tmp_path / "copy", lambda content: None)
    (copy / "draft.onnx.data").unlink()
    with pytest.raises(FileNotFoundError, match=r"draft\.onnx\.data is missing"):
        OnnxDrafter(copy)
    for content in ("{", "[" * 100_000):
        (copy / "draft.json").write_text(content)
        with pytest.raises(ValueError, match="not valid JSON"):
            OnnxDrafter(copy)


@pytest.mark.parametrize("place", ["../secret.data", "/etc/passwd"])
def test_data_outside_the_folder_is_not_read(v2: Exported, tmp_path: Path, place: str) -> None:
    onnx = pytest.importorskip("onnx", reason="onnx is not installed")
    copy = tmp_path / "copy"
    shutil.copytree(v2.folder, copy)
    shutil.copy(copy / "draft.onnx.data", tmp_path / "secret.data")
    model = onnx.load(copy / "draft.onnx", load_external_data=False)
    for tensor in model.graph.initializer:
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = place
    (copy / "draft.onnx").write_bytes(model.SerializeToString())
    content = json.loads((copy / "draft.json").read_text())
    content["files"] = content["sha256"] = {}
    (copy / "draft.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match="ONNX Runtime cannot load it"):
        OnnxDrafter(copy)


# --- content -----------------------------------------------------------------------------------------------------


def flip(path: Path) -> None:
    """Another byte in the middle, without a change of size."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def of_another_export(path: Path) -> None:
    other = export(path.parent.parent / "other", build_drafter(2, seed=1)).folder
    assert (other / path.name).stat().st_size == path.stat().st_size
    shutil.copy(other / path.name, path)


@pytest.mark.parametrize("change", [flip, of_another_export])
def test_weights_of_the_right_size_with_other_content_are_refused(v2: Exported, change: Callable[[Path], None]) -> None:
    OnnxDrafter(v2.folder)
    change(v2.folder / "draft.onnx.data")
    for _ in range(2):
        with pytest.raises(ValueError, match=r"draft\.onnx\.data: must have the sha256 that draft\.json says"):
            OnnxDrafter(v2.folder)


def test_a_targets_weights_are_checked_as_well(tmp_path: Path) -> None:
    TINY["llama"]().save_pretrained(tmp_path / "target")
    export_target(tmp_path / "target", (0, 2), tmp_path / "onnx")
    OnnxTarget(tmp_path / "onnx")
    flip(tmp_path / "onnx" / "target.onnx.data")
    with pytest.raises(ValueError, match=r"OnnxTarget: .*target\.onnx\.data: must have the sha256"):
        OnnxTarget(tmp_path / "onnx")


def test_a_file_is_read_once_as_long_as_it_stays_the_same(v2: Exported, monkeypatch: pytest.MonkeyPatch) -> None:
    OnnxDrafter(v2.folder)
    before = metadata._sha256_of.cache_info()
    OnnxDrafter(v2.folder)
    after = metadata._sha256_of.cache_info()
    assert (after.misses, after.hits) == (before.misses, before.hits + 2)
    data = v2.folder / "draft.onnx.data"
    kept = data.stat()
    flip(data)
    os.utime(data, ns=(kept.st_atime_ns, kept.st_mtime_ns))  # as a tool that copies times does
    with pytest.raises(ValueError, match="must have the sha256"):
        OnnxDrafter(v2.folder)


def test_an_export_from_before_there_were_checksums_loads(v2: Exported, tmp_path: Path) -> None:
    copy = broken(v2.folder, tmp_path / "copy", lambda content: content.pop("sha256"))
    cache = (onnx := OnnxDrafter(copy)).new_cache(1, 8)
    onnx.append_context(np.zeros((1, 2, v2.drafter.fc.in_features), np.float32), cache)
    assert onnx.propose(np.array([3]), cache).tokens.shape == (1, 3)
