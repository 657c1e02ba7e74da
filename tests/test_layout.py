"""The import order of the package, read from its sources; what importing does; the size of the files."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE, EXPORT = ROOT / "pydflash", ROOT / "export"
MODULES = sorted(PACKAGE.glob("*.py"))

# A module imports from earlier rows only, also inside functions. What is in no row is at the top.
ORDER = (
    ("_sycl_runtime",),
    (
        "_backends",
        "_wheel",
        "adjacent",
        "cache",
        "config_keys",
        "reference",
        "reference_fused",
        "rope",
        "sampling",
        "stats",
        "tree",
    ),
    ("_native", "target_cache", "target_defaults", "target_probe", "target_tree", "text", "weight_files"),
    ("_native_fused", "config_rope", "ops"),
    ("fused", "layouts"),
    ("packed",),
    ("decoder_program",),
    ("config", "decoder"),
    ("checkpoint", "layers", "target_layers"),
    ("drafter_decoder", "drafter_weights", "target"),
    ("drafter", "target_wiring"),
    ("drafter_packed", "paths", "request", "target_fast"),
    ("device_round", "host_loop"),
    ("device_loop",),
    ("loops",),
    ("speculator",),
)
LEAVES = (
    "_sycl_runtime",
    "adjacent",
    "reference",
    "reference_fused",
    "sampling",
    "cache",
    "rope",
    "stats",
    "tree",
)
FAST = ("decoder", "decoder_program", "target_layers", "target_wiring", "target_fast", "device_round", "device_loop")
CONFIG = ("config", "config_keys", "config_rope", "layouts")
TRANSFORMERS = ("target", "target_batch", "target_cache", "target_defaults", "target_fast")
MOST_LINES = 430  # "about 400"


class Found(NamedTuple):
    """An import: the module, `.name` inside the package; whether it runs when the file is imported."""

    name: str
    at_import: bool


def imports_of(path: Path) -> list[Found]:
    """Every import of a file but those for type checkers."""
    return list(_imports(ast.parse(path.read_text(encoding="utf-8")), path, True))


def _imports(node: ast.AST, path: Path, at_import: bool) -> Iterator[Found]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        if isinstance(child, ast.Import):
            names = [alias.name for alias in child.names]
        elif isinstance(child, ast.ImportFrom):
            names = _names(child, path)
        else:
            inside = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
            yield from _imports(child, path, at_import and not inside)
            continue
        for name in names:
            yield Found("." + name.removeprefix("pydflash.") if name.startswith("pydflash.") else name, at_import)


def _names(node: ast.ImportFrom, path: Path) -> list[str]:
    base = node.module or ""
    if node.level:
        folders = path.relative_to(PACKAGE).parts[:-1] if PACKAGE in path.parents else ("export",)
        here = ["pydflash", *folders]
        base = ".".join([*here[: len(here) - node.level + 1], *([base] if base else [])])
    if base == "pydflash":
        return [f"pydflash.{alias.name}" for alias in node.names]
    return [base]


def inner(path: Path) -> set[str]:
    """Modules of the package that a file imports, at any time."""
    return {found.name[1:].split(".")[0] for found in imports_of(path) if found.name.startswith(".")}


def row(name: str) -> int:
    return next((i for i, names in enumerate(ORDER) if name in names), len(ORDER))


def test_the_reader_finds_imports_of_every_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "pydflash"
    (package / "training").mkdir(parents=True)
    monkeypatch.setattr(sys.modules[__name__], "PACKAGE", package)
    source = (
        "import torch\nfrom . import ops, reference\nfrom .cache import KVCache\nfrom typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    from .target import Target\nfrom pydflash import stats\n"
        "def f():\n    import transformers\n    from pydflash.drafter import Drafter\n"
    )
    (package / "a.py").write_text(source)
    assert imports_of(package / "a.py") == [
        ("torch", True), (".ops", True), (".reference", True), (".cache", True), ("typing", True), (".stats", True),
        ("transformers", False), (".drafter", False),
    ]  # fmt: skip
    source = "from ..target import Target\nfrom .masks import m\nfrom .. import rope\n"
    (package / "training" / "b.py").write_text(source)
    assert inner(package / "training" / "b.py") == {"target", "training", "rope"}


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_modules_import_earlier_rows_only(path: Path) -> None:
    if path.stem == "__init__":
        return  # every public name, lazily
    late = {name for name in inner(path) if row(name) >= row(path.stem) and row(path.stem) < len(ORDER)}
    late -= {"export"}  # see test_training_and_export_stand_where_they_should
    assert not late, f"{path.stem} must not import {sorted(late)}"


def test_every_row_names_files_that_exist() -> None:
    assert {name for names in ORDER for name in names} <= {path.stem for path in MODULES}


def test_leaves_and_the_named_edges() -> None:
    found = {path.stem: inner(path) for path in MODULES}
    for leaf in LEAVES:
        assert found[leaf] == set(), leaf
    assert found["_backends"] == {"_sycl_runtime"}
    assert found["ops"] == {"_native"}
    assert found["_native"] == {"_backends"}
    assert found["fused"] == {"_native_fused", "ops"}
    assert found["_native_fused"] == {"_backends", "_native", "reference_fused"}
    assert found["packed"] == {"_backends", "_native_fused", "fused"}
    assert found["decoder_program"] == {"_backends", "_native", "cache", "packed"}
    assert found["decoder"] == {"adjacent", "cache", "decoder_program", "fused", "ops", "packed"}
    for name in CONFIG:
        assert found[name] <= set(CONFIG), name
    assert not found["drafter"] & {"target", "speculator", "sampling", "request", "text"}
    assert not found["target"] & {"drafter", "speculator", "checkpoint", "config"}
    for name in ("target", "target_probe", "target_batch", "host_loop", "paths", "request"):
        assert not found[name] & set(FAST), name  # works without the fast path
    for name in ("target_layers", "target_wiring", "target_fast"):
        assert not found[name] & {"drafter", "drafter_weights", "paths", "request", "config", "checkpoint"}, name
    for name in ("device_round", "device_loop"):
        assert not found[name] & {"host_loop", "speculator", "decoder", "target_layers", "target_probe"}, name
    assert found["bench_figures"] == {"training"}
    assert found["bench_report"] == {"bench_figures"}
    assert not found["bench_methods"] & {"bench", "bench_figures", "bench_report", "training", "cli"}


def test_training_and_export_stand_where_they_should() -> None:
    for path in (PACKAGE / "training").rglob("*.py"):
        assert not inner(path) & {"cli", "demo", "export", "__main__"}, path
    for path in EXPORT.rglob("*.py"):
        assert not inner(path) & {"speculator", "target", "training", "cli", "demo", "request"}, path
    for path in MODULES:
        allowed = path.stem in ("cli", "speculator", "bench", "__init__")
        assert allowed or "export" not in inner(path), path
        assert not [f for f in imports_of(path) if f.at_import and f.name.startswith(".export")], path
        assert "training" not in inner(path) or row(path.stem) == len(ORDER), path


def test_transformers_is_met_in_the_target_files_only() -> None:
    for path in [*MODULES, *EXPORT.rglob("*.py")]:
        if path.stem not in TRANSFORMERS:
            assert not [f for f in imports_of(path) if f.name.split(".")[0] == "transformers"], path


def test_heavy_packages_wait_until_they_are_needed() -> None:
    """The package, its config, command line and statistics import without torch; transformers only where it is met."""
    heavy = ("torch", "transformers", "numpy")
    for name in ("__init__", "__main__", "_backends", "cli", "stats", *CONFIG):
        at_import = {f.name.split(".")[0] for f in imports_of(PACKAGE / f"{name}.py") if f.at_import}
        assert not at_import & set(heavy), name
    for name in ("target", "target_defaults", "target_layers", "target_wiring", "host_loop", "speculator", "drafter"):
        at_import = {f.name.split(".")[0] for f in imports_of(PACKAGE / f"{name}.py") if f.at_import}
        assert "transformers" not in at_import, name


def test_the_drafter_on_onnx_runtime_imports_neither_torch_nor_onnx() -> None:
    needed = {"drafter", "draft_cache", "metadata", "target", "target_cache", "walk"}
    for name in needed:
        found = imports_of(EXPORT / f"{name}.py")
        assert not {f.name.split(".")[0] for f in found} & {"torch", "transformers", "onnx", "onnx_ir"}, name
        assert {f.name for f in found if f.name.startswith(".")} <= {f".export.{n}" for n in needed} | {".config"}, name


def test_importing_everything_touches_no_device() -> None:
    names = [f"pydflash.{path.stem}" for path in MODULES if path.stem not in ("__init__", "__main__")]
    code = (
        "import importlib, sys\n"
        "import pydflash\n"
        "assert not {'torch', 'transformers', 'numpy'} & set(sys.modules), 'loaded by the package alone'\n"
        f"for name in {names}:\n    importlib.import_module(name)\n"
        "import torch\n"
        "assert 'pydflash._cpu' not in sys.modules, 'a backend was loaded'\n"
        "assert not torch.cuda.is_initialized() and not torch.xpu.is_initialized(), 'a device was touched'\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]


def test_files_stay_short() -> None:
    files = [p for folder in ("pydflash", "export", "csrc") for p in (ROOT / folder).rglob("*")]
    endings = (".py", ".h", ".cpp", ".cu", ".cuh", ".hpp")
    lines = {str(p.relative_to(ROOT)): len(p.read_text("utf-8").splitlines()) for p in files if p.suffix in endings}
    assert len(lines) > 30
    assert {name: count for name, count in lines.items() if count > MOST_LINES} == {}
