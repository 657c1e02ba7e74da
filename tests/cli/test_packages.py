"""What commands say where packages are missing: one sentence that names what to install; `info` works without."""

from __future__ import annotations

import importlib.machinery
import json
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

from pydflash import ops
from pydflash.checkpoints import smollm2
from pydflash.cli import info, packages
from pydflash.cli.commands import main
from pydflash.ops import backends

BLOCK = """
import sys

class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {names}:
            raise ModuleNotFoundError("No module named " + repr(name), name=name)

sys.meta_path.insert(0, Block())
import pydflash.cli
sys.exit(pydflash.cli.main({argv}))
"""


def run_without(names: list[str], *argv: str) -> tuple[int, str, str]:
    """Exit code and both streams of the command line in a process that cannot import `names`."""
    code = BLOCK.format(names=names, argv=list(argv))
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    ("blocked", "argv", "needs"),
    [
        ("torch", ["generate", "t", "p", "--plain"], "`pydflash generate` needs torch: pip install torch"),
        ("torch", ["train", "fit", "t", "--data", "r", "--out", "o"], "`pydflash train fit` needs torch"),
        ("rich", ["demo"], "`pydflash demo` needs rich: pip install rich"),
        ("rich", ["bench", "t", "--drafter", "d", "--prompts", "p"], "`pydflash bench` needs rich: pip install rich"),
        ("rich", ["train", "toy"], "`pydflash train toy` needs rich: pip install rich"),
        ("accelerate", ["train", "toy"], "`pydflash train toy` needs accelerate: pip install 'pydflash[train]'"),
        ("onnx_ir", ["export", "d", "-o", "x"], "`pydflash export` needs onnx_ir: pip install 'pydflash[onnx]'"),
        (
            "onnxscript",
            ["export", "d", "-o", "x", "--cross-check"],
            "`pydflash export` needs onnxscript: pip install onnxscript",
        ),
    ],
)
def test_a_missing_package_is_named_at_once(blocked: str, argv: list[str], needs: str) -> None:
    code, out, err = run_without([blocked], *argv)
    assert (code, out) == (2, "")
    assert err.startswith(f"pydflash: error: {needs}")
    assert err.count("\n") == 1


def test_info_needs_neither_torch_nor_rich() -> None:
    code, out, _ = run_without(["torch", "rich"], "info")
    assert code == 0
    assert "backend cpu: not usable: needs torch: pip install torch" in out
    report = json.loads(run_without(["torch", "rich"], "info", "--json")[1])
    assert report["backends"]["cpu"]["built"]
    assert not report["backends"]["cpu"]["usable"]
    assert report["openmp"]["threads"] is None


def test_all_that_is_missing_is_named_together() -> None:
    message = packages.needs("train fit", ["accelerate", "matplotlib", "rich"])
    assert message == "`pydflash train fit` needs accelerate, matplotlib, rich: pip install 'pydflash[train]' rich"


@pytest.mark.parametrize("command", ["train data", "calibrate t --drafter d --prompts p"])
def test_all_that_a_command_needs_is_named_at_once(command: str) -> None:
    """Also where its parser needs torch already."""
    code, _, err = run_without(["torch", "transformers", "rich"], *command.split())
    name = command.partition(" t ")[0]
    want = f"`pydflash {name}` needs torch, transformers, rich: pip install torch transformers rich"
    assert (code, err) == (2, f"pydflash: error: {want}\n")


def pure(monkeypatch: pytest.MonkeyPatch) -> str:
    """As if this was the pure wheel: the reason that its build leaves, read from pyproject.toml."""
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    (template,) = re.findall(r"^template = '''\n(.*?)'''", text, re.MULTILINE | re.DOTALL)
    module = types.ModuleType("pydflash._build_info")
    module.__spec__ = importlib.machinery.ModuleSpec("pydflash._build_info", None)
    exec(template, module.__dict__)
    monkeypatch.setitem(sys.modules, "pydflash._build_info", module)
    return module.NOT_BUILT["cpu"]


def test_commands_of_a_pure_wheel_say_how_to_install_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    pure(monkeypatch)
    tail = ", which the pure wheel leaves out: install"
    assert packages.needs("demo", ["torch", "rich"]) == (
        f"`pydflash demo` needs torch, rich{tail} pydflash without PYDFLASH_PURE"
    )
    assert packages.needs("train fit", ["torch", "accelerate", "matplotlib", "pyarrow"]) == (
        f"`pydflash train fit` needs torch, accelerate, matplotlib, pyarrow{tail} 'pydflash[train]' pyarrow without "
        "PYDFLASH_PURE"
    )
    assert packages.needs("demo", ["rich"]) == "`pydflash demo` needs rich: pip install rich"


def test_ops_and_info_of_a_pure_wheel_say_that_it_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    reason = pure(monkeypatch)
    monkeypatch.setattr(backends, "_loaded", {})
    monkeypatch.setitem(sys.modules, "pydflash._cpu", None)
    monkeypatch.setattr(info, "_is_built", lambda name: False)
    x = torch.ones(1, 2, 4)
    with pytest.raises(RuntimeError) as caught:
        ops.block_conv(x, torch.ones(2, 4), torch.zeros(1, 2, 2, 1))
    assert str(caught.value) == f"block_conv: the cpu backend is not usable: {reason}"
    assert "without PYDFLASH_PURE" in reason
    assert info.collect_info()["backends"]["cpu"] == {
        "built": False, "usable": False, "description": None, "reason": reason
    }  # fmt: skip


def test_the_demo_names_its_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = smollm2.importlib.util.find_spec
    monkeypatch.setattr(smollm2.importlib.util, "find_spec", lambda name: None if name == "gguf" else found(name))
    assert main(["demo", "--cache-dir", str(tmp_path / "cache")]) == 2
    assert capsys.readouterr().err == "pydflash: error: `pydflash demo` needs gguf: pip install 'pydflash[demo]'\n"
    assert not (tmp_path / "cache").exists()
