"""The imports and private names of the package's modules, read from their sources."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PACKAGE, EXPORT = ROOT / "pydflash", ROOT / "export"


class Edge(NamedTuple):
    """An import: `.name` for a module of the package; whether it runs when the file is imported."""

    name: str
    at_import: bool


def name_of(path: Path) -> str:
    """Dotted and below pydflash: `ops.backends`, `export.walk`; a folder for its `__init__`, and that at the top."""
    inside = path.relative_to(PACKAGE) if path.is_relative_to(PACKAGE) else Path("export", path.relative_to(EXPORT))
    parts = inside.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


@cache
def modules() -> dict[str, Path]:
    return {name_of(path): path for folder in (PACKAGE, EXPORT) for path in sorted(folder.rglob("*.py"))}


def edges_of(path: Path, known: Collection[str]) -> list[Edge]:
    """Every import of a file but those for type checkers."""
    return list(_edges(ast.parse(path.read_text(encoding="utf-8")), path, known, True))


def _edges(node: ast.AST, path: Path, known: Collection[str], at_import: bool) -> Iterator[Edge]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            yield from _edges(ast.Module(child.orelse, []), path, known, at_import)
        elif isinstance(child, ast.Import):
            yield from (Edge(_inside(alias.name), at_import) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            base = _base(child, name_of(path), path.name == "__init__.py")
            for alias in child.names:
                whole = f"{base}.{alias.name}" if base != "." else f".{alias.name}"
                name = whole if base.startswith(".") and whole[1:] in known else base
                yield Edge(".__init__" if name == "." else name, at_import)
        else:
            inside = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
            yield from _edges(child, path, known, at_import and not inside)


def _inside(name: str) -> str:
    if name == "pydflash":
        return ".__init__"
    return name.removeprefix("pydflash") if name.startswith("pydflash.") else name


def _base(node: ast.ImportFrom, name: str, is_folder: bool = False) -> str:
    """The module after `from` in a module of this name, a folder's `__init__` or not; `.` for the package itself."""
    if not node.level:
        base = _inside(node.module or "")
        return "." if base == ".__init__" else base
    parts = [part for part in name.split(".") if part != "__init__"]
    folder = parts if is_folder or name == "__init__" else parts[:-1]
    return "." + ".".join([*folder[: len(folder) - node.level + 1], *([node.module] if node.module else [])])


@cache
def graph() -> dict[str, list[Edge]]:
    return {name: edges_of(path, modules()) for name, path in modules().items()}


def inner(name: str) -> set[str]:
    """Modules of the package that one imports, at any time."""
    return {edge.name[1:] for edge in graph()[name] if edge.name.startswith(".")}


def room(name: str) -> str:
    return name.partition(".")[0]


def within(name: str, rooms: Iterable[str]) -> bool:
    return any(name == other or name.startswith(other + ".") for other in rooms)


def knots(edges: dict[str, set[str]]) -> list[list[str]]:
    """Groups of modules that import one another in a circle (strongly connected components of two and more)."""
    reach = {name: set(others) for name, others in edges.items()}
    for middle in reach:
        for others in reach.values():
            if middle in others:
                others |= reach[middle]
    groups = {tuple(sorted(b for b in reach[a] if a in reach.get(b, ()))) for a in reach if a in reach[a]}
    return [list(group) for group in sorted(groups) if len(group) > 1]


def private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


def owned(tree: ast.AST) -> set[str]:
    """Private names that a file defines: functions, classes, variables, attributes, arguments."""
    names = {n.name for n in ast.walk(tree) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))}
    names |= {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    names |= {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)}
    return {name for name in names if private(name)}


def borrowed(name: str, tree: ast.AST, others: dict[str, set[str]]) -> set[str]:
    """Private names of other modules of the package that a file imports, or reads from what is not itself."""
    mine, theirs = others[name], set().union(*(names for other, names in others.items() if other != name))
    is_folder = name in modules() and modules()[name].name == "__init__.py"
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            base = _base(node, name, is_folder)
            if not base.startswith("."):
                continue
            parts = {*base.split("."), *(alias.name for alias in node.names)} - {"_build_info"}
            if room(base[1:]) == room(name):  # files of a room are not private to each other
                parts -= {other.rpartition(".")[2] for other in others if room(other) == room(name)}
            found |= {part for part in parts if private(part)}
        elif isinstance(node, ast.Attribute) and node.attr in theirs - mine:
            own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            found |= set() if own else {node.attr}
    return found
