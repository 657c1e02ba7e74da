"""The installed package: what its import needs and touches, what it links, and what README.md says about it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny_drafters import nested, tiny_2
from tiny_models import TINY
from tiny_tokenizer import MASK, VOCAB, save_tokenizer

import pydflash
from pydflash import Drafter, DrafterConfig
from pydflash.ops import backends

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PACKAGE = Path(pydflash.__file__).parent
BLOCKED = """
import sys

class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "transformers", "numpy", "rich", "onnx", "onnxruntime"):
            raise ModuleNotFoundError(f"{name} is blocked", name=name)

sys.meta_path.insert(0, Block())
"""


def run_python(code: str, folder: Path) -> str:
    """What `code` prints in a fresh interpreter that is started outside the source tree."""
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def test_import_needs_no_torch(tmp_path: Path) -> None:
    code = BLOCKED + (
        "import pydflash, pydflash.export, pydflash.cli\n"
        "print(pydflash.__version__, sorted(pydflash.__all__) == sorted(set(dir(pydflash)) - {'__version__'}))\n"
        "try:\n    pydflash.Drafter\n"
        "except ModuleNotFoundError as error:\n    print(error.name, error)\n"
    )
    says = f"{pydflash.__version__} True torch pydflash.Drafter needs torch: pip install torch, "
    assert " ".join(run_python(code, tmp_path).split()).startswith(says)


def test_version_and_help_need_no_torch(tmp_path: Path) -> None:
    code = BLOCKED + "import pydflash.cli\nsys.argv = ['pydflash', '--version']\npydflash.cli.main()"
    assert run_python(code, tmp_path) == f"pydflash {pydflash.__version__}\n"


def test_import_loads_no_native_library(tmp_path: Path) -> None:
    code = (
        "import sys, pydflash\n"
        "print('torch' in sys.modules, 'pydflash._cpu' in sys.modules)\n"
        "print(*{line.split('/')[-1].strip() for line in open('/proc/self/maps') if '/' in line}, sep='\\n')"
    )
    first, *libraries = run_python(code, tmp_path).splitlines()
    assert first == "False False"
    assert not [name for name in libraries if re.search("torch|cuda|sycl|gomp", name)]


def test_loading_the_backends_creates_no_device_context(tmp_path: Path) -> None:
    code = (
        "import pydflash, torch\n"
        "states = pydflash.backends()\n"
        "print(states['cpu'].usable, torch.cuda.is_initialized(), torch.xpu.is_initialized())"
    )
    assert run_python(code, tmp_path).split() == ["True", "False", "False"]


@pytest.mark.parametrize("name", pydflash.__all__)
def test_public_names_resolve(name: str) -> None:
    assert getattr(pydflash, name).__name__ == name


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'pydflash' has no attribute 'Speculato'"):
        pydflash.Speculato  # noqa: B018


def test_version_is_that_of_the_metadata() -> None:
    assert importlib.metadata.version("pydflash") == pydflash.__version__
    text = (ROOT / "pyproject.toml").read_text()
    assert 'dynamic = ["version", "dependencies"]' in text  # the version's one place is __init__.py


def test_type_checkers_read_the_annotations() -> None:
    assert (PACKAGE / "py.typed").is_file()


def test_readme_fits_one_screen() -> None:
    assert len(README.split()) <= 1200


def test_gguf_is_the_demos_alone() -> None:
    requires = importlib.metadata.requires("pydflash") or []
    (gguf,) = [text for text in requires if text.startswith("gguf")]
    assert re.search(r"extra == ['\"]demo['\"]", gguf)


def test_console_script() -> None:
    (script,) = importlib.metadata.entry_points(group="console_scripts", name="pydflash")
    assert script.load() is importlib.import_module("pydflash.cli").main


def test_torch_is_no_build_dependency() -> None:
    requires = re.search(r"^requires = \[(.*)\]$", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert requires is not None
    assert re.findall(r'"([\w-]+)', requires[1]) == ["scikit-build-core", "pybind11"]


def test_build_info_has_the_reasons() -> None:
    info = importlib.import_module("pydflash._build_info")
    assert info.COMPILER
    for name in ("cuda", "sycl"):
        if importlib.util.find_spec(f"pydflash._{name}") is None:
            assert backends.load(name).reason == info.NOT_BUILT[name] != ""


def test_export_and_models_come_with_the_package() -> None:
    spec = importlib.util.find_spec("pydflash.export")
    assert spec is not None
    # An editable install reads both from the repository.
    assert spec.origin in (str(PACKAGE / "export" / "__init__.py"), str(PACKAGE.parent / "export" / "__init__.py"))
    assert (Path(spec.origin).parents[1] / "models" / "README.md").is_file()


@pytest.mark.parametrize("name", ["cpu"])
def test_native_module_links_no_torch_and_no_device_library(name: str) -> None:
    readelf = shutil.which("readelf")
    if readelf is None:
        pytest.skip("readelf is not on this machine")
    spec = importlib.util.find_spec(f"pydflash._{name}")
    assert spec is not None
    assert spec.origin is not None
    table = subprocess.run([readelf, "-d", spec.origin], capture_output=True, text=True, check=True).stdout
    needed = re.findall(r"\(NEEDED\).*\[(.+)\]", table)
    assert [lib for lib in needed if lib.startswith("libc.so")]
    assert not [lib for lib in needed if re.search("torch|c10|cuda|cudart|sycl|python", lib)]
    assert not re.findall(r"\((?:RPATH|RUNPATH)\).*", table)


def test_readme_has_the_two_commands() -> None:
    commands = [block.strip() for block in blocks("bash")]
    assert len(commands) == 2
    ends = (".venv/bin/pydflash demo", ".venv/bin/pytest")
    for command, end in zip(commands, ends, strict=True):
        assert "\n" not in command
        venv, install, run = command.split(" && ")
        assert venv == "python3 -m venv .venv"
        assert install.startswith(".venv/bin/pip install torch==")
        assert run == end


def test_readme_example_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    target, drafter = tmp_path / "target", tmp_path / "drafter"
    TINY["llama"](vocab_size=VOCAB).save_pretrained(target)
    save_tokenizer(target)
    raw = nested(tiny_2(vocab_size=VOCAB, num_target_layers=4), mask_token_id=MASK, target_layer_ids=[0, 2])
    torch.manual_seed(0)
    Drafter(DrafterConfig.from_dict(raw)).save_pretrained(drafter)
    (code,) = blocks("python")
    assert len(code.splitlines()) <= 12
    for pair, folders in (
        ('"smollm2", "smollm2"', f"{str(target)!r}, {str(drafter)!r}"),
        ('"smollm2", drafter=None', f"{str(target)!r}, drafter=None"),
    ):
        assert pair in code
        code = code.replace(pair, folders)
    monkeypatch.setattr("pydflash.target.loading._default_device", lambda: "cpu")
    names: dict = {}
    exec(compile(code, "README.md", "exec"), names)
    out, plain = names["out"], names["plain"]
    assert capsys.readouterr().out.startswith(out.text)
    assert len(out.token_ids) == 256 or out.finish_reason == "stop"
    assert (names["spec"].block_size, plain.drafter, plain.block_size) == (4, None, 1)
    assert plain.generate("How many positive divisors does 196 have?", 256).token_ids == out.token_ids
