"""`pydflash.export`: drafters and their targets as ONNX models, and classes that run them.

Importing it needs neither torch nor onnx; `OnnxDrafter` and `OnnxTarget` need numpy and onnxruntime only.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__all__ = ["OnnxDrafter", "OnnxTarget", "export_drafter", "export_target"]

if TYPE_CHECKING:
    from .drafter import OnnxDrafter
    from .target import OnnxTarget
    from .write import export_drafter
    from .write_target import export_target

_HOMES = {
    "OnnxDrafter": "drafter",
    "OnnxTarget": "target",
    "export_drafter": "write",
    "export_target": "write_target",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)


def __dir__() -> list[str]:
    return list(__all__)
