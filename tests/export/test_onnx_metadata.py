"""Descriptions and configs that are damaged: a ValueError that names the file, never a raw KeyError."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from exported import write_target
from pairs import build_drafter
from tiny_models import TINY

pytest.importorskip("onnx_ir", reason="onnx_ir is not installed")
pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")

from pydflash.export import OnnxDrafter, OnnxTarget, export_drafter
from pydflash.export.metadata import DRAFT, TARGET, read_description
from pydflash.export.target_graph import TargetSizes
from pydflash.export.write_target import export_target


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an exported drafter and an exported target."""
    folder = tmp_path_factory.mktemp("metadata")
    write_target(folder / "tables")
    build_drafter(2).save_pretrained(folder / "drafter")
    export_drafter(folder / "drafter", folder / "tables", folder / "out")
    TINY["llama"]().save_pretrained(folder / "target")
    export_target(folder / "target", [1], folder / "out")
    return folder / "out"


@pytest.mark.parametrize(
    ("file", "change"),
    [
        ("draft.json", {"config": {}}),
        ("draft.json", {"config": [1]}),
        ("draft.json", {"config": None}),
        ("draft.json", {"dtype": "no dtype"}),
        ("draft.json", {"dtype": 7}),
        ("target.json", {"sizes": {}}),
        ("target.json", {"sizes": None}),
        ("target.json", {"sizes": {"hidden_size": "x" * 5_000_000}}),
        ("target.json", {"target_layer_ids": 3}),
        ("target.json", {"head_rows": None}),
        ("target.json", {"embedding_rows": "many"}),
    ],
)
def test_metadata_of_another_kind_names_the_file(
    made: Path, file: str, change: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The description and the model say the same, as somebody's own writer may have it."""
    metadata = json.loads((made / file).read_text())["metadata"] | change
    loader = OnnxDrafter if file == "draft.json" else OnnxTarget
    monkeypatch.setattr(
        f"pydflash.export.{file[:-5] + 'er' if loader is OnnxDrafter else 'target'}.open_model",
        lambda *_: (None, metadata),
    )
    with pytest.raises(
        ValueError, match=rf"{loader.__name__}: .*{file}: metadata must be as .pydflash export."
    ) as caught:
        loader(made)
    assert len(str(caught.value)) < 800


def test_descriptions_are_checked_and_shown_in_short(made: Path, tmp_path: Path) -> None:
    for kind in (DRAFT, TARGET):
        content = json.loads((made / kind.description).read_text())
        for name in (kind.model, kind.data):
            (tmp_path / name).write_bytes(b"")
        changes: tuple[dict[str, Any], ...] = (
            {"model": "x" * 10**6},
            {"files": "y" * 10**6},
            {"files": {kind.model: "n" * 10**6}},
            {"sha256": {"../" + "z" * 10**6: 1}},
            {"metadata": content["metadata"] | {"format": "f" * 10**6}},
        )
        for change in changes:
            (tmp_path / kind.description).write_text(json.dumps(content | change))
            with pytest.raises(ValueError, match=rf"{kind.loader}: .*{kind.description}|bytes") as caught:
                read_description(tmp_path, kind)
            assert len(str(caught.value)) < 1000
        (tmp_path / kind.model).unlink()
        (tmp_path / kind.description).write_text(json.dumps(content | {"files": {}, "sha256": {}}))
        with pytest.raises(FileNotFoundError, match=rf"{kind.model} is missing"):
            read_description(tmp_path, kind)


@pytest.mark.parametrize("value", [None, "64", 0, -1, 1.5, 10**23])
@pytest.mark.parametrize("name", ["hidden_size", "num_hidden_layers", "vocab_size", "max_position_embeddings"])
def test_a_targets_sizes_are_named(name: str, value: Any) -> None:
    raw = TINY["llama"]().config.to_dict() | {name: value}
    with pytest.raises(ValueError, match=f"^export: the target's {name} must be a positive integer, got "):
        TargetSizes.from_config(raw)
