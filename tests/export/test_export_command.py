"""`pydflash export`: what it prints, what it refuses, and that a failed export leaves the folder as it was."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from exported import export, write_target
from pairs import HIDDEN, VOCAB, build_drafter
from safetensors.torch import load_file, save_file
from tiny_models import TINY

from pydflash import Speculator
from pydflash.cli.commands import main

pytest.importorskip("onnx_ir", reason="onnx_ir is not installed")
pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")

from pydflash.export import OnnxDrafter, export_drafter
from pydflash.export.parity import Parity


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """A folder with a tiny drafter and the two tables of its target."""
    write_target(tmp_path / "target")
    build_drafter(2).save_pretrained(tmp_path / "drafter")
    return tmp_path


def command(work: Path, *more: str) -> list[str]:
    return ["export", str(work / "drafter"), "--target", str(work / "target"), "-o", str(work / "out"), *more]


def test_it_writes_three_files_and_says_how_close_they_are(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command(work, "--profile", "inplace")) == 0
    printed = capsys.readouterr().out
    for part in ("profile inplace, float32", "draft.onnx.data", "MB", "beside torch:", "100.0% of drafts"):
        assert part in printed
    assert sorted(p.name for p in (work / "out").iterdir()) == ["draft.json", "draft.onnx", "draft.onnx.data"]
    metadata = json.loads((work / "out" / "draft.json").read_text())["metadata"]
    wanted = {"block_size": 4, "mask_token_id": 96, "target_layer_ids": [0, 2], "num_features": 2 * HIDDEN, "top_k": 4}
    assert {name: metadata[name] for name in wanted} == wanted
    assert metadata["embedding_initializer"] == "model.embed_tokens.weight"
    assert metadata["head_initializer"] == "lm_head.weight"
    assert len(metadata["source_sha256"]) == 64


def test_the_checksum_follows_the_weights(work: Path) -> None:
    def checksum() -> Any:
        return export_drafter(work / "drafter", work / "target", work / "out").metadata["source_sha256"]

    first = checksum()
    assert checksum() == first
    build_drafter(2, seed=1).save_pretrained(work / "drafter")
    assert checksum() != first


def test_with_target_makes_a_folder_that_generates(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = TINY["llama"]()
    model.save_pretrained(tmp_path / "target")
    build_drafter(1, num_target_layers=4).save_pretrained(tmp_path / "drafter")
    assert main(command(tmp_path, "--with-target", "--target-quantize", "8bit")) == 0
    printed = capsys.readouterr().out
    assert "beside the model: logits and features within" in printed
    assert "of the best tokens the same, over 48 random tokens" in printed
    assert "another model, on purpose" in printed
    assert main(command(tmp_path, "--with-target")) == 0
    assert "good: the same model, up to rounding" in capsys.readouterr().out
    from pydflash.export import OnnxTarget

    spec = Speculator(OnnxTarget(tmp_path / "out"), OnnxDrafter(tmp_path / "out"))
    got = spec.generate([5, 6, 7], 20, temperature=0.0).token_ids
    assert got == Speculator(model, None).generate([5, 6, 7], 20, temperature=0.0).token_ids


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--dtype", "bfloat16"], "ONNX Runtime's CPU provider has no bfloat16 attention, got 'bfloat16'"),
        (["--dtype", "float64"], "dtype must be 'float32', or 'float16'"),
        (["--dtype", "float16", "--quantize", "8bit"], "dtype must be 'float32' where quantize is '8bit'"),
    ],
)
def test_types_that_do_not_serve_are_refused(
    work: Path, more: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command(work, *more)) == 2
    assert message in capsys.readouterr().err
    assert not (work / "out").exists()


@pytest.mark.parametrize(
    ("kind", "candidates", "verdict"),
    [
        (None, 1.0, "good: the same drafter, up to the rounding of float32"),
        ("int8", 0.86, "random features do not tell what int8 costs: compare the accepted length of"),
        ("4bit", 0.01, "random features do not tell what 4bit costs: compare the accepted length of"),
    ],
)
def test_the_report_says_what_was_compared_and_whether_that_is_good(
    work: Path,
    kind: str | None,
    candidates: float,
    verdict: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = Parity(1e-6 if kind is None else None, 0.75, candidates)
    monkeypatch.setattr("pydflash.export.write.compare", lambda *_: found)
    assert main(command(work, *(["--quantize", kind] if kind else []))) == 0
    lines = capsys.readouterr().out.splitlines()
    within = ", scores within 1.0e-06" if kind is None else ""
    compared = f"75.0% of drafts and {candidates:.1%} of candidates the same{within}, over 12 rounds of random features"
    assert lines[-2] == f"  beside torch:    {compared}"
    assert lines[-1].strip().startswith(verdict)


def test_a_half_precision_graph_that_differs_is_told() -> None:
    assert Parity(None, 0.5, 0.89).verdict("float16").startswith("low for float16, 90% of candidates is usual")
    assert Parity(None, 0.5, 0.9).verdict("float16").startswith("good: the same drafter")


def test_cross_check_says_what_it_needs_before_any_work(
    work: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name == "onnxscript" else found(name, *more)
    )
    monkeypatch.setattr("pydflash.export.write.load_checkpoint", lambda *_: pytest.fail("work was begun"))
    assert main(command(work, "--cross-check")) == 2
    assert "needs onnxscript: pip install onnxscript" in capsys.readouterr().err
    with pytest.raises(ImportError, match=r"\(cross_check=True\) needs onnxscript: pip install onnxscript"):
        export_drafter(work / "drafter", work / "target", work / "out", cross_check=True)
    assert not (work / "out").exists()


def test_smollm2_names_the_drafter_too(work: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr("pydflash.checkpoints.sources.ensure_smollm2", lambda: work / "target")
    with pytest.raises(ValueError, match=r"embedding table \[vocabulary, 576\]"):
        export_drafter("smollm2", "smollm2", work / "out")


def test_float16_stays_close(work: Path) -> None:
    report = export_drafter(work / "drafter", work / "target", work / "out", dtype="float16")
    assert report.parity is not None
    assert report.parity.difference is not None
    assert 1e-5 < report.parity.difference < 2e-2
    assert report.parity.candidates > 0.95
    assert (work / "out" / "draft.onnx.data").stat().st_size < 200_000 + 4 * 1024 * 1024
    assert OnnxDrafter(work / "out").dtype.__name__ == "float16"


def _without_head(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
    del tensors["lm_head.weight"]


def _quantised_head(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
    tensors["lm_head.weight"] = tensors["lm_head.weight"].to(torch.int8)


def _without_table(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
    del tensors["model.embed_tokens.weight"]


def _wider(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
    config["num_hidden_layers"] = 7


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_without_head, r"must hold lm_head\.weight \(tie_word_embeddings is false\)"),
        (_quantised_head, r"lm_head\.weight must be a float tensor, not quantised, got int8"),
        (_without_table, r"must hold an embedding table \[vocabulary, 64\]"),
        (_wider, "num_target_layers"),
    ],
)
def test_targets_that_do_not_serve_are_refused(work: Path, change: Any, message: str) -> None:
    tensors = load_file(work / "target" / "model.safetensors")
    config = json.loads((work / "target" / "config.json").read_text())
    change(tensors, config)
    save_file(tensors, work / "target" / "model.safetensors", metadata={"format": "pt"})
    (work / "target" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=message):
        export_drafter(work / "drafter", work / "target", work / "out")


def test_an_export_is_no_checkpoint(work: Path) -> None:
    export_drafter(work / "drafter", work / "target", work / "out")
    with pytest.raises(ValueError, match=r"drafter must be a checkpoint, got .*out, which is an export"):
        export_drafter(work / "out", work / "target", work / "again")
    export_drafter(work / "drafter", work / "target", work / "drafter")  # beside its checkpoint, and over itself
    export_drafter(work / "drafter", work / "target", work / "drafter")


def test_no_target_is_an_error_where_tables_are_needed(work: Path) -> None:
    with pytest.raises(ValueError, match="the target must be given: this drafter has no embedding table and head"):
        export_drafter(work / "drafter", None, work / "out")


@pytest.mark.parametrize(
    ("parity", "message"),
    [
        (Parity(0.01, 1.0, 1.0), r"scores within 1\.0e-02"),
        (Parity(float("nan"), 1.0, 1.0), "scores within nan"),
        (Parity(None, 0.0, 0.3), "30.0% of candidates"),  # no slot is left whose scores could be compared
        (Parity(1e-7, 0.5, 0.5), "50.0% of candidates"),
    ],
)
def test_a_graph_that_differs_is_not_put_in_place(
    work: Path, monkeypatch: pytest.MonkeyPatch, parity: Parity, message: str
) -> None:
    found = export(work, build_drafter(2))
    before = {p.name: p.read_bytes() for p in found.folder.iterdir()}
    monkeypatch.setattr("pydflash.export.write.compare", lambda *_: parity)
    with pytest.raises(RuntimeError, match=f"must compute what torch does, got .*{message}"):
        export_drafter(work / "drafter", work / "target", found.folder)
    assert {p.name: p.read_bytes() for p in found.folder.iterdir()} == before


def test_vocabulary_of_the_tables_is_the_targets(work: Path) -> None:
    """Padded rows are no candidates."""
    write_target(work / "target", rows=VOCAB + 30)
    report = export_drafter(work / "drafter", work / "target", work / "out")
    assert report.parity is not None
    assert report.parity.drafts == 1.0


@pytest.mark.parametrize("name", ["embed_tokens.weight", "mask_embedding"])
@pytest.mark.parametrize("quantize", [None, "8bit"])
def test_rows_from_outside_cannot_replace_the_drafters_own(work: Path, name: str, quantize: str | None) -> None:
    drafter = build_drafter(1)
    drafter.load_canonical(drafter.canonical() | {name: torch.ones((VOCAB, HIDDEN) if "tokens" in name else HIDDEN)})
    drafter.save_pretrained(work / "drafter")
    with pytest.raises(ValueError, match=f"embed must be True for a drafter with its own {name}"):
        export_drafter(work / "drafter", work / "target", work / "out", embed=False, quantize=quantize)
    assert not (work / "out").exists()


def test_a_target_is_not_written_over_a_drafters_checkpoint(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {p.name: p.read_bytes() for p in (work / "drafter").iterdir()}
    assert main([*command(work, "--with-target")[:-2], str(work / "drafter"), "--with-target"]) == 2
    assert "must hold no other checkpoint" in capsys.readouterr().err
    assert {p.name: p.read_bytes() for p in (work / "drafter").iterdir()} == before


def test_a_target_is_not_mixed_with_files_of_another(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The template of an earlier target would go on being used."""
    TINY["llama"]().save_pretrained(tmp_path / "target")
    build_drafter(1, num_target_layers=4).save_pretrained(tmp_path / "drafter")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "chat_template.jinja").write_text("{{ other }}")
    assert main(command(tmp_path, "--with-target")) == 2
    assert "directory must not hold chat_template.jinja, which" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["chat_template.jinja"]
    (tmp_path / "target" / "chat_template.jinja").write_text("{{ own }}")
    assert main(command(tmp_path, "--with-target")) == 0
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == "{{ own }}"


def test_bits_of_a_target_that_is_not_written_are_refused(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command(work, "--target-quantize", "8bit")) == 2
    assert "--with-target must be given with --target-quantize" in capsys.readouterr().err
    assert not (work / "out").exists()


def test_a_target_in_onnx_has_no_table_to_give(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command(work, "--with-target", "--no-embed")) == 2
    assert "--no-embed must not be given with --with-target" in capsys.readouterr().err
    assert not (work / "out").exists()
