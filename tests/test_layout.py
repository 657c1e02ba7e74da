"""The rooms of the package, read from its sources: who imports whom, what importing does, private names, sizes."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest
import source_graph
from source_graph import PACKAGE, ROOT, borrowed, edges_of, graph, inner, knots, modules, owned, room, within

# What a room imports of the package, itself aside; also inside functions. A file beside the rooms is one of its own.
BASE = {
    "ops",
    "decoder",
    "checkpoints",
    "tree",
    "sampling",
    "stats",
    "text",
    "request",
    "protocols",
    "progress",
    "messages",
}
ROOMS: dict[str, set[str]] = {
    "ops": set(),
    "progress": set(),
    "messages": set(),
    "checkpoints": {"progress", "messages"},
    "tree": set(),
    "sampling": {"messages"},
    "stats": set(),
    "text": {"messages"},
    "decoder": {"ops"},
    "protocols": {"decoder", "tree", "sampling", "stats"},
    "request": {"sampling", "stats", "text", "protocols", "messages"},
    "target": {"decoder", "checkpoints", "ops", "tree", "protocols", "sampling", "progress", "messages"},
    "drafter": {"decoder", "checkpoints", "ops", "protocols", "messages"},
    "rounds": BASE - {"checkpoints"},
    "export": {"drafter", "checkpoints", "ops", "protocols", "messages"},
    "options": BASE | {"target"},
    "settings": set(),
    "assemble": BASE | {"rounds", "target", "drafter", "export"},
    "speculator": BASE | {"rounds", "target", "drafter", "export", "assemble", "options", "settings"},
    "training": BASE | {"rounds", "target", "drafter", "speculator", "bench"},
    "bench": BASE | {"settings", "rounds", "target", "drafter", "speculator", "training", "cli"},
}
ABOVE = ("__init__", "__main__", "cli", "serve", "scheduler")  # may import every room
# Edges against the rules above, and circles; these lists only get shorter.
STILL_THERE: set[tuple[str, str]] = set()
STILL_ROUND: list[list[str]] = []
CONFIG = {f"checkpoints.{name}" for name in ("config", "keys", "rope", "layouts", "values", "foreign")}
# Single files that know less than their room may.
KNOWS_ONLY: dict[str, set[str]] = {
    "ops.sycl_runtime": set(),
    "decoder.adjacent": set(),
    "decoder.stores": {"ops"},
    "drafter.rope": set(),
    **{name: CONFIG | {"messages"} for name in CONFIG},
    "bench.report": {"bench.figures"},
}
# And pairs that stay apart: the first works without the second.
APART = (
    (("target.generic", "target.probe", "target.batch"), ("decoder", "target.layers", "target.wiring", "target.fused")),
    (("rounds.host", "rounds.paths"), ("rounds.device",)),
    (("rounds.device", "rounds.device_round"), ("rounds.host",)),
    (("bench.methods",), ("bench.run", "bench.figures", "bench.report", "training", "cli")),
)
TRANSFORMERS = ("target", "training.toy", "training.toy_target")
HEAVY = {"torch", "transformers", "numpy", "rich"}
LIGHT = (
    *(
        "__init__",
        "__main__",
        "stats",
        "protocols",
        "progress",
        "messages",
        "cli",
        "cli.commands",
        "cli.threads",
        "ops.backends",
    ),
    *CONFIG,
)
NEEDED_WITHOUT_TORCH = {
    f"export.{name}" for name in ("drafter", "draft_cache", "metadata", "target", "target_cache", "walk")
}
MOST_MODULES, MOST_LINES = 16, 400
# These lists, too, only get shorter.
LONGER = {"pydflash/drafter/module.py", "pydflash/training/trainer.py"}


def test_the_reader_finds_imports_of_every_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "pydflash"
    (package / "training").mkdir(parents=True)
    for name in ("ops", "stats", "target", "training/masks"):
        (package / f"{name}.py").write_text("")
    monkeypatch.setattr(source_graph, "PACKAGE", package)
    known = {"ops", "stats", "target", "training", "training.masks"}
    source = (
        "import torch\nfrom . import ops, __version__\nfrom .stats import Stats\nfrom typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    from .target import Target\nfrom pydflash import stats\n"
        "def f():\n    import transformers\n    from pydflash.target import Target\n"
    )
    (package / "a.py").write_text(source)
    assert edges_of(package / "a.py", known) == [
        ("torch", True), (".ops", True), (".__init__", True), (".stats", True), ("typing", True), (".stats", True),
        ("transformers", False), (".target", False),
    ]  # fmt: skip
    (package / "training" / "b.py").write_text("from ..target import T\nfrom .masks import m\nfrom .. import ops\n")
    assert [edge.name for edge in edges_of(package / "training" / "b.py", known)] == [
        ".target",
        ".training.masks",
        ".ops",
    ]
    (package / "training" / "__init__.py").write_text(
        "from . import masks\nfrom ..stats import Stats\nimport pydflash\n"
    )
    assert [edge.name for edge in edges_of(package / "training" / "__init__.py", known)] == [
        ".training.masks", ".stats", ".__init__"
    ]  # fmt: skip
    assert knots({"a": {"b"}, "b": {"c", "d"}, "c": {"a"}, "d": {"d"}, "e": {"a"}}) == [["a", "b", "c"]]


def test_rooms_import_in_one_direction() -> None:
    found = {
        (name, other)
        for name in graph()
        if room(name) not in ABOVE
        for other in inner(name)
        if room(other) not in {room(name), "__init__"} | ROOMS[room(name)]
    }
    found |= {
        (n, o)
        for n in graph()
        if room(n) == "rounds"
        for o in inner(n)
        if within(o, ["decoder"]) and o != "decoder.stores"
    }
    assert not found - STILL_THERE, "edges against the rules"
    assert not STILL_THERE - found, "gone: take these off the list"


def test_every_name_in_the_rules_is_there() -> None:
    coming = {"serve", "scheduler"}
    assert {room(name) for name in graph()} - coming == {*ROOMS, *ABOVE} - coming
    files = {
        *KNOWS_ONLY,
        *LIGHT,
        *NEEDED_WITHOUT_TORCH,
        *TRANSFORMERS,
        *(n for pair in APART for n in (*pair[0], *pair[1])),
    }
    assert {name for name in files if name not in graph() and name not in coming} == set()


def test_single_files_know_less_than_their_room() -> None:
    for name, allowed in KNOWS_ONLY.items():
        assert inner(name) <= allowed, name
    for name in graph():
        if name.startswith("ops.reference"):  # plain torch
            assert all(other.startswith("ops.reference") for other in inner(name)), name
    for names, others in APART:
        for name in names:
            assert not [other for other in inner(name) if within(other, others)], name


def test_nobody_needs_export_to_be_imported() -> None:
    late = {name for name in graph() if "export" in {room(other) for other in inner(name)} and room(name) != "export"}
    assert late <= {"assemble", "speculator", "cli.commands", "bench.run", "__init__"}
    for name in late:
        assert not [edge for edge in graph()[name] if edge.at_import and within(edge.name, [".export"])], name


def test_no_circle_of_imports() -> None:
    at_import = {
        n: {e.name[1:] for e in edges if e.at_import and e.name.startswith(".")} for n, edges in graph().items()
    }
    assert knots(at_import) == STILL_ROUND
    for folder in {room(name) for name in graph()}:
        inside = {name: {o for o in inner(name) if room(o) == folder} for name in graph() if room(name) == folder}
        assert knots(inside) == [knot for knot in STILL_ROUND if room(knot[0]) == folder]  # also inside functions


def test_transformers_is_met_by_the_target_only() -> None:
    for name, edges in graph().items():
        if not within(name, TRANSFORMERS):
            assert not [e for e in edges if room(e.name) == "transformers"], name


def test_heavy_packages_wait_until_they_are_needed() -> None:
    """What answers `pydflash --help`, reads a config or counts a run is there without torch."""
    for name in LIGHT:
        at_import = {room(edge.name) for edge in graph().get(name, []) if edge.at_import}
        assert not at_import & HEAVY, name
    for name, edges in graph().items():
        at_import = {room(edge.name) for edge in edges if edge.at_import}
        assert "transformers" not in at_import or name.startswith("target."), name


def test_the_drafter_on_onnx_runtime_imports_neither_torch_nor_onnx() -> None:
    for name in NEEDED_WITHOUT_TORCH:
        assert not {room(edge.name) for edge in graph()[name]} & {"torch", "transformers", "onnx", "onnx_ir"}, name
        allowed = NEEDED_WITHOUT_TORCH | {"checkpoints.config", "checkpoints.values", "protocols", "messages"}
        assert inner(name) <= allowed, name


def test_importing_everything_touches_no_device() -> None:
    names = [f"pydflash.{name}" for name in graph() if room(name) not in ("__init__", "__main__", "export", "training")]
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


# --- private names --------------------------------------------------------------------------------------------

# `module: names` that belong to another module. The list only gets shorter.
BORROWED: dict[str, set[str]] = {}


def test_the_reader_finds_private_names_of_others() -> None:
    sources = {
        "ops._native": "def _pack(x): ...\nclass A:\n    def f(self, other): self._x = other._x\n",
        "ops.fused": "from . import _native\nfrom ._native import _pack\n_native._pack(1)._y\n",
        "stats": "from .ops._native import A, _build_info\ndef f(self, a, torch): return self._x, a._x, torch._C\n",
    }
    trees = {name: ast.parse(source) for name, source in sources.items()}
    others = {name: owned(tree) for name, tree in trees.items()}
    assert others == {"ops._native": {"_pack", "_x"}, "ops.fused": set(), "stats": set()}
    found = {name: borrowed(name, tree, others) for name, tree in trees.items()}
    assert found == {"ops._native": set(), "ops.fused": {"_pack"}, "stats": {"_native", "_x"}}


def test_private_names_stay_in_their_module() -> None:
    trees = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in modules().items()}
    names = {name: owned(tree) for name, tree in trees.items()}
    found = {name: got for name, tree in trees.items() if (got := borrowed(name, tree, names))}
    new = {name: got - BORROWED.get(name, set()) for name, got in found.items()}
    assert {name: got for name, got in new.items() if got} == {}, "private names of other modules"
    gone = {name: listed - found.get(name, set()) for name, listed in BORROWED.items()}
    assert {name: left for name, left in gone.items() if left} == {}, "gone: take these off the list"


# --- sizes and folders ----------------------------------------------------------------------------------------


def test_the_top_of_the_package_stays_small() -> None:
    assert len(list(PACKAGE.glob("*.py"))) <= MOST_MODULES


def test_files_stay_short() -> None:
    files = [p for folder in ("pydflash", "export", "csrc") for p in (ROOT / folder).rglob("*")]
    endings = (".py", ".h", ".cpp", ".cu", ".cuh", ".hpp")
    lines = {str(p.relative_to(ROOT)): len(p.read_text("utf-8").splitlines()) for p in files if p.suffix in endings}
    assert len(lines) > 30
    assert {name: count for name, count in lines.items() if count > MOST_LINES and name not in LONGER} == {}
    assert {name for name in LONGER if lines[name] <= MOST_LINES} == set(), "short again: take these off the list"


def test_tests_are_grouped_as_the_package_is() -> None:
    folders = {path.parent.name for path in (ROOT / "tests").rglob("test_*.py")} - {"tests"}
    rooms = {path.parent.name for path in PACKAGE.glob("*/*.py")} | {"export"}
    assert rooms <= folders
    assert folders <= rooms | {path.name for path in ROOT.iterdir()}  # as docs/ and examples/ are
    for path in (ROOT / "tests").rglob("*.py"):
        assert not [e for e in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(e, ast.ImportFrom)
                    and (e.module or "").startswith(("test_", "conftest"))], path  # fmt: skip
