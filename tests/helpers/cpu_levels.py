"""The instruction-set levels of the CPU backend, for tests that run a kernel at each of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from pydflash.ops import backends

NAMES = ("base", "avx2", "avx512", "avx512_bf16", "amx")


@contextmanager
def at_level(name: str) -> Iterator[bool]:
    """Use level `name` inside the block; yields whether build and machine have it."""
    module = backends.load("cpu").module
    assert module is not None
    before = module.description()
    try:
        module.select_level(name)
    except ValueError:
        yield False
        return
    try:
        yield True
    finally:
        module.select_level(before)


def usable_levels(device: torch.device) -> list[str]:
    """Every usable level of the CPU backend; with another backend the one nameless level."""
    if backends.name_for(device.type) != "cpu":
        return [""]
    usable = []
    for name in NAMES:
        with at_level(name) as found:
            if found:
                usable.append(name)
    return usable


def over_levels(device: torch.device) -> Iterator[str]:
    """Iterate the usable levels with each of them selected in turn."""
    for name in usable_levels(device):
        if not name:
            yield name
            continue
        with at_level(name):
            yield name
