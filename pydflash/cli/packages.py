"""Packages that a command needs and that may not be there: one form of message, which says what to install."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence

_DEPENDENCIES = ("torch", "transformers", "safetensors", "huggingface_hub", "numpy", "rich")
# How to get a module that an installation may lack.
_INSTALL = {
    **{name: name for name in _DEPENDENCIES},
    "tokenizers": "tokenizers",
    "gguf": "'pydflash[demo]'",
    "accelerate": "'pydflash[train]'",
    "matplotlib": "'pydflash[train]'",
    "pyarrow": "pyarrow",
    "onnx": "'pydflash[onnx]'",
    "onnx_ir": "'pydflash[onnx]'",
    "onnxruntime": "'pydflash[onnx]'",
    "onnxscript": "onnxscript",
}
_BY_COMMAND: dict[str, tuple[str, ...]] = {
    "generate": ("torch", "transformers"),
    "demo": ("torch", "transformers", "rich"),
    "bench": ("torch", "transformers", "rich"),
    "calibrate": ("torch", "transformers", "rich"),
    "train data": ("torch", "transformers", "rich"),
    "train fit": ("torch", "transformers", "rich", "accelerate", "matplotlib"),
    "train toy": ("torch", "transformers", "rich", "accelerate", "matplotlib", "tokenizers"),
    "export": ("torch", "transformers", "rich", "onnx_ir", "onnxruntime"),
}


def require(command: str, *modules: str) -> None:
    """Refuse a command whose packages are not there, before it does anything.

    command: as typed, "bench" or "train fit"; its own needs are known. modules: what else this call needs.

    Raises: ImportError that names all that is missing and what to install.
    """
    if missing := lacking(command, *modules):
        raise ImportError(needs(command, missing))


def lacking(command: str, *modules: str) -> list[str]:
    """Which of the modules of a command, and of `modules`, are not there."""
    wanted = dict.fromkeys((*_BY_COMMAND.get(command, ()), *modules))
    return [name for name in wanted if not _is_there(name)]


def needs(command: str, modules: Sequence[str]) -> str:
    """The message about missing modules."""
    text = f"`pydflash {command}` needs {', '.join(modules)}"
    install = dict.fromkeys(_INSTALL.get(name, name) for name in modules)
    if "torch" in modules and _is_pure():
        more = [name for name in install if name not in _DEPENDENCIES]
        package = [] if any("pydflash[" in name for name in more) else ["pydflash"]
        return f"{text}, which the pure wheel leaves out: install {' '.join(package + more)} without PYDFLASH_PURE"
    return f"{text}: pip install {' '.join(install)}"


def _is_pure() -> bool:
    """Whether this is the wheel without compiled ops, which PYDFLASH_PURE=1 makes."""
    try:
        return "cpu" in importlib.import_module("pydflash._build_info").NOT_BUILT
    except ModuleNotFoundError:  # the source tree
        return False


def missing_module(error: BaseException) -> str | None:
    """The package whose absence an import error reports; None for errors of other kinds and for other packages."""
    name = (getattr(error, "name", None) or "").partition(".")[0]
    return name if isinstance(error, ModuleNotFoundError) and name in _INSTALL else None


def _is_there(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):  # hidden by an import hook, or half loaded
        return False
