"""The devices that op tests run on, and why one is left out."""

from __future__ import annotations

import torch

from pydflash.ops import backends

DEVICES = ("cpu", "cuda", "sycl")


def unusable(kind: str) -> str:
    """Why tests cannot run on a device of this kind; empty if they can."""
    backend = backends.load(kind)
    if not backend.usable:
        return backend.reason
    return "torch sees no CUDA device" if kind == "cuda" and not torch.cuda.is_available() else ""
