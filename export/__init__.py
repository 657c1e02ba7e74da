"""`pydflash.export`: drafters as ONNX models, and a drafter that runs them.

Importing it needs neither torch nor onnx; `OnnxDrafter` needs numpy and onnxruntime only.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__all__ = ["OnnxDrafter", "export_drafter"]

if TYPE_CHECKING:
    from .drafter import OnnxDrafter
    from .write import export_drafter

_HOMES = {"OnnxDrafter": "drafter", "export_drafter": "write"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)


def __dir__() -> list[str]:
    return list(__all__)
