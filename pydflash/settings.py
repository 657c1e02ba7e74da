"""A file of settings that `pydflash calibrate` wrote, and what it was measured for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .speculator import Speculator

SETTINGS = ("block_size", "path", "num_nodes")  # keywords of `Speculator` that a file holds


def made_for(spec: Speculator) -> dict[str, Any]:
    """What a settings file is checked against: sizes of target and drafter, and the kind of device."""
    config = spec.drafter.config if spec.drafter is not None else None
    return {
        "hidden_size": spec.target.hidden_size,
        "num_layers": spec.target.num_layers,
        "vocab_size": spec.target.vocab_size,
        "block_size": getattr(config, "block_size", None),
        "drafter_layers": getattr(config, "num_layers", None),
        "device": spec.target.device.type,
    }


def read_settings(path: str | Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """(keywords of `Speculator`, what they were made for) of a file that `pydflash calibrate` wrote.

    Raises: ValueError where it is no such file, or where no way of drafting was faster than plain decoding.
    """
    try:
        report = json.loads(Path(path).read_text(encoding="utf-8"))
        settings, wanted = report["settings"], dict(report["made_for"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"settings: {path} must be a file of `pydflash calibrate`, got {error!r}") from None
    if settings is None:
        raise ValueError(f"settings: {path} says that no way of drafting was faster than plain decoding")
    return {name: settings[name] for name in SETTINGS if settings.get(name) is not None}, wanted


def check_fits(path: str | Path, wanted: dict[str, Any], spec: Speculator) -> None:
    """Raise ValueError where the settings were measured for another pair or another kind of device."""
    here = made_for(spec)
    if wrong := [name for name in here if wanted.get(name) != here[name]]:
        names = ", ".join(f"{name} {wanted.get(name)!r} (here {here[name]!r})" for name in wrong)
        raise ValueError(f"settings: {path} must be measured for this pair and device, got {names}")
