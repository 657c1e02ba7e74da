"""Packages that a command needs and that may not be there: one form of message, which says what to install."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

# How to get a module that an installation may lack; `pip install pydflash` brings torch to rich.
_INSTALL = {
    "torch": "torch",
    "transformers": "transformers",
    "safetensors": "safetensors",
    "huggingface_hub": "huggingface_hub",
    "numpy": "numpy",
    "rich": "rich",
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
    missing = [name for name in (*_BY_COMMAND.get(command, ()), *modules) if not _is_there(name)]
    if missing:
        raise ImportError(needs(command, missing))


def needs(command: str, modules: Sequence[str]) -> str:
    """The message about missing modules."""
    install = dict.fromkeys(_INSTALL.get(name, name) for name in modules)
    return f"`pydflash {command}` needs {', '.join(modules)}: pip install {' '.join(install)}"


def missing_module(error: BaseException) -> str | None:
    """The package whose absence an import error reports; None for errors of other kinds and for other packages."""
    name = (getattr(error, "name", None) or "").partition(".")[0]
    return name if isinstance(error, ModuleNotFoundError) and name in _INSTALL else None


def _is_there(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):  # hidden by an import hook, or half loaded
        return False
