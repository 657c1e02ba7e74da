"""pydflash: DFlash and DFlash 2 block-diffusion drafters for lossless speculative decoding.

>>> spec = pydflash.Speculator.from_pretrained("Qwen/Qwen3-8B", "z-lab/Qwen3-8B-DFlash-b16")
>>> print(spec.generate("How many positive divisors does 196 have?").text)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

__all__ = [
    "Drafter",
    "DrafterConfig",
    "Generation",
    "SamplingParams",
    "Speculator",
    "Stats",
    "Target",
    "backends",
    "load_checkpoint",
    "save_checkpoint",
]

if TYPE_CHECKING:
    from .checkpoints.checkpoint import load_checkpoint, save_checkpoint
    from .checkpoints.config import DrafterConfig
    from .drafter.module import Drafter
    from .ops.backends import backends
    from .request import Generation
    from .sampling import SamplingParams
    from .speculator import Speculator
    from .stats import Stats
    from .target.generic import Target

_HOMES = {
    "Drafter": "drafter.module",
    "DrafterConfig": "checkpoints.config",
    "Generation": "request",
    "SamplingParams": "sampling",
    "Speculator": "speculator",
    "Stats": "stats",
    "Target": "target.generic",
    "backends": "ops.backends",
    "load_checkpoint": "checkpoints.checkpoint",
    "save_checkpoint": "checkpoints.checkpoint",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        home = importlib.import_module(f".{_HOMES[name]}", __name__)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        said = (
            f"pydflash.{name} needs torch: pip install torch, or where this is the pure wheel pydflash without "
            "PYDFLASH_PURE (pydflash.export runs exported models as it is)"
        )
        raise ModuleNotFoundError(said, name="torch") from None
    return getattr(home, name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
