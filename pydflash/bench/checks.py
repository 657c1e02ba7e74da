"""What `pydflash bench` refuses before anything long begins."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..training.prompts import Prompt

PEERS = ("transformers", "lookup", "dflash")


def parse_temperatures(given: str) -> list[float]:
    """The numbers of a comma-separated list, each at least 0 and none twice."""
    try:
        found = [float(part) for part in given.split(",")]
    except ValueError:
        found = []
    if not found or len(set(found)) < len(found) or not all(t >= 0 and math.isfinite(t) for t in found):
        raise ValueError(f"bench: --temperatures must be different numbers >= 0, separated by commas, got {given!r}")
    return found


def parse_trees(given: str | None) -> list[int | str]:
    """Sizes of trees in a comma-separated list: numbers of drafts, "auto", none twice. A drafter may allow fewer."""
    from ..rounds.paths import MOST_NODES

    found: list[int | str] = []
    for part in [] if given is None else given.split(","):
        part = part.strip()
        found.append(int(part) if part.isascii() and part.isdigit() else part)
    good = all(size == "auto" or (isinstance(size, int) and 1 <= size <= MOST_NODES) for size in found)
    if not good or len(set(found)) < len(found):
        raise ValueError(
            f"bench: --trees must be different numbers of drafts from 1 to {MOST_NODES}, or auto, separated by commas, "
            f"got {given!r}"
        )
    return found


def parse_peers(given: str | None) -> list[str] | None:
    """Peers that are asked for by name; None for all that are there."""
    import importlib.util

    if given == "all":
        return None
    found = [] if given is None else [part.strip() for part in given.split(",")]
    if not set(found) <= set(PEERS) or len(set(found)) < len(found):
        raise ValueError(f"bench: --peers must be among {', '.join(PEERS)}, each once, got {given!r}")
    if "dflash" in found and importlib.util.find_spec("dflash") is None:
        raise ValueError(
            "bench: --peers must be installed, got dflash without its package (pip install --no-deps dflash)"
        )
    return found


def named(option: str, given: Sequence[str], name_of: Callable[[Path], str], reserved: Sequence[str]) -> dict[str, str]:
    """[NAME=]SOURCE arguments as name -> source; without a name it is `name_of` the source.

    Raises: ValueError for names that come twice or are `reserved`.
    """
    found: dict[str, str] = {}
    for text in given:
        name, sign, source = text.partition("=")
        if not sign or Path(text).exists():
            name, source = name_of(Path(text)), text
        if not name or not source:
            raise ValueError(f"bench: {option} must be SOURCE or NAME=SOURCE, got {text!r}")
        if name in found or name in reserved:
            taken = "is the name of another row" if name in reserved else f"also stands for {found[name]!r}"
            raise ValueError(f"bench: {option} must have names of their own (NAME=...), got {text!r}: {name!r} {taken}")
        found[name] = source
    return found


def check_numbers(arguments: argparse.Namespace) -> None:
    """Refuse counts that leave nothing to measure."""
    for name, least in (("num_prompts", 1), ("max_new_tokens", 2), ("block_size", 1)):
        value = getattr(arguments, name)
        if value is not None and value < least:
            raise ValueError(f"bench: --{name.replace('_', '-')} must be at least {least}, got {value}")
    if arguments.block_size == 1 and (arguments.trees is not None or arguments.viterbi):
        raise ValueError("bench: --block-size must be at least 2 with --trees or --viterbi, got 1")


def check_outputs(json_path: Path | None, png: Path | None) -> None:
    """Refuse files that could not be written once the measurement is done."""
    import importlib.util

    for option, path in (("--json", json_path), ("--png", png)):
        if path is None:
            continue
        if not path.parent.is_dir():
            raise ValueError(f"bench: {option} must be in a folder that exists, got {str(path)!r}")
        if path.is_dir():
            raise ValueError(f"bench: {option} must be a file, got the folder {str(path)!r}")
    if png is not None:
        if png.suffix.lower() != ".png":
            raise ValueError(f"bench: --png must end in .png, got {str(png)!r}")
        if importlib.util.find_spec("matplotlib") is None:
            message = "bench: --png needs matplotlib: pip install 'pydflash[train]'"
            raise ModuleNotFoundError(message, name="matplotlib")


def read_sets(files: dict[str, str], count: int) -> dict[str, list[Prompt]]:
    """The first `count` prompts of each file. Raises ValueError naming a file that is missing, wrong or empty."""
    from ..training.prompts import read_prompts

    sets = {}
    for name, file in files.items():
        if not Path(file).is_file():
            raise ValueError(f"bench: --prompts must be files that exist, got {file!r}")
        sets[name] = read_prompts(file)[:count]
        if not sets[name]:
            raise ValueError(f"bench: --prompts must have a prompt in each file, got none in {file!r}")
    return sets
