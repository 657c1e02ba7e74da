"""Training records on disk: safetensors shards and a manifest, written so that a killed run can go on."""

from __future__ import annotations

import bisect
import contextlib
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file
from torch import Tensor

from ..checkpoints.files import read_json, write_file
from ..checkpoints.wheel import sha256_of
from ..messages import cut, shown

FORMAT = 1
MANIFEST = "manifest.json"
_ARRAYS = ("ids", "offsets", "prompt_lengths", "temperatures", "items", "done")
_ENTRY: dict[str, type] = {"file": str, "sha256": str, "counts": dict}  # what the manifest says of a shard
_ENTRY |= dict.fromkeys(("prompts", "records", "tokens", "response_tokens"), int)


class Record(NamedTuple):
    """ids: int32 [n], prompt and response; the first `prompt_length` of them are the prompt."""

    ids: np.ndarray
    prompt_length: int
    temperature: float


@dataclass(slots=True)
class _Pending:
    """What belongs to the next shard. done: keys of prompts that are finished, whether they left records or not."""

    records: list[Record] = field(default_factory=list)
    items: list[int] = field(default_factory=list)
    done: list[int] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)


class ShardWriter:
    """Adds records to a folder, a shard at a time; use it in a `with` block, which writes what is left at its end.

    A shard is written under a temporary name and moved into place, and counts only from the moment that the
    manifest names it. One process at a time may write to a folder.

    Args:
        folder: New, empty, or one that holds data of the same identity.
        identity: What all records must have in common, as JSON values; compared with the manifest's.
        shard_tokens: Tokens after which a shard is written.

    Attributes:
        done: Keys that need no answer any more, those of earlier runs included.
        info: Free entries of the manifest, which may change from run to run.

    Raises: ValueError for a folder with other data, of another identity (naming the first difference), or with a
    damaged shard; RuntimeError where another process writes to the folder.
    """

    def __init__(self, folder: str | Path, identity: dict[str, Any], shard_tokens: int = 2_000_000) -> None:
        self.folder, self.shard_tokens = Path(folder), shard_tokens
        self.done: set[int] = set()
        self.info: dict[str, Any] = {}
        self._identity = json.loads(json.dumps(identity))
        self._shards: list[dict[str, Any]] = []
        self._pending = _Pending()
        self._tokens = 0
        if self.folder.is_dir() and not (self.folder / MANIFEST).exists() and any(self.folder.glob("*.safetensors")):
            raise ValueError(f"ShardWriter: folder must be empty or hold a {MANIFEST}, got {self.folder}")
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = lock_folder(self.folder, "ShardWriter")
        try:
            for part in self.folder.glob(".*.part"):  # a killed run was writing it
                part.unlink()
            self._resume()
        except BaseException:
            self._lock.close()
            raise

    def add(self, key: int, records: Sequence[Record], counts: Counter[str]) -> None:
        """All that a prompt of this key has given; `counts` are added to the manifest's.

        Raises: ValueError for a key that is done.
        """
        if key in self.done:
            raise ValueError(f"ShardWriter: key must be a new one, got {key} again")
        pending = self._pending
        self.done.add(key)
        pending.done.append(key)
        pending.records += records
        pending.items += [key] * len(records)
        pending.counts += counts
        self._tokens += sum(len(record.ids) for record in records)
        if self._tokens >= self.shard_tokens:
            self.flush()

    def flush(self) -> None:
        """Write what has been added since the last shard; does nothing where there is nothing."""
        pending = self._pending
        if not pending.done:
            return
        lengths = [len(record.ids) for record in pending.records]
        prompts = [record.prompt_length for record in pending.records]
        ids = [record.ids for record in pending.records]
        tensors: dict[str, np.ndarray] = {
            "ids": np.concatenate(ids).astype(np.int32) if ids else np.zeros(0, np.int32),
            "offsets": np.array([0, *accumulate(lengths)], np.int64),
            "prompt_lengths": np.array(prompts, np.int32),
            "temperatures": np.array([record.temperature for record in pending.records], np.float32),
            "items": np.array(pending.items, np.int64),
            "done": np.array(pending.done, np.int64),
        }
        name = f"shard-{len(self._shards):05d}.safetensors"
        write_file(self.folder / name, lambda path: save_file(tensors, path))
        entry = {
            "file": name,
            "sha256": sha256_of(self.folder / name),
            "prompts": len(pending.done),
            "records": len(pending.records),
            "tokens": sum(lengths),
            "response_tokens": sum(lengths) - sum(prompts),
            "counts": dict(sorted(pending.counts.items())),
        }
        self._shards.append(entry)
        self._pending, self._tokens = _Pending(), 0
        self.write_manifest()

    def write_manifest(self) -> None:
        """Bring the manifest up to date."""
        content = json.dumps(self.manifest, indent=2, ensure_ascii=False) + "\n"
        write_file(self.folder / MANIFEST, lambda path: path.write_text(content, encoding="utf-8"))

    @property
    def manifest(self) -> dict[str, Any]:
        """The manifest as it would be written now: format, identity, info, totals and shards."""
        counts: Counter[str] = Counter()
        for shard in self._shards:
            counts.update(shard["counts"])
        names = ("prompts", "records", "tokens", "response_tokens")
        totals = {name: sum(shard[name] for shard in self._shards) for name in names}
        totals["counts"] = dict(sorted(counts.items()))
        return {"format": FORMAT, **self._identity, **self.info, "totals": totals, "shards": self._shards}

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Write the last shard, after an error or Ctrl-C too: what is finished is finished."""
        try:
            self.flush()
        finally:
            self._lock.close()

    def _resume(self) -> None:
        if not (self.folder / MANIFEST).exists():
            return
        manifest = read_manifest(self.folder)
        for path, want in _leaves(self._identity):
            got: Any = manifest
            for name in path:
                got = got.get(name) if isinstance(got, dict) else None
            if got != want:
                raise ValueError(
                    f"ShardWriter: {'.'.join(path)} must be {got!r} (the data in {self.folder}), got {want!r}; "
                    "choose another folder"
                )
        self._shards = manifest["shards"]
        self.info = {k: v for k, v in manifest.items() if k not in {"format", "totals", "shards", *self._identity}}
        for shard in self._shards:
            _check_file(self.folder, shard, "ShardWriter")
            self.done.update(_load(self.folder, shard, "ShardWriter")["done"].tolist())


class ShardReader:
    """The records of a folder, in the order of its shards: `reader[i]` is (ids int64 [n], prompt_length).

    Args:
        folder: What a `ShardWriter` has written.
        verify: Check the sha256 of every shard, at about 1 GB/s (4 bytes a token).

    Attributes:
        manifest: The folder's manifest.

    Raises: ValueError for a folder that holds no such data, or a damaged shard, naming the file.
    """

    def __init__(self, folder: str | Path, verify: bool = True) -> None:
        self.folder = Path(folder)
        self.manifest: dict[str, Any] = read_manifest(self.folder)
        shards = self.manifest["shards"]
        for shard in shards:
            _check_file(self.folder, shard, "ShardReader", verify)
        self._ends = list(accumulate(shard["records"] for shard in shards))
        self._loaded: dict[int, dict[str, np.ndarray]] = {}

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        tensors, i = self._find(i)
        begin, end = tensors["offsets"][i : i + 2].tolist()
        ids = torch.from_numpy(tensors["ids"][begin:end].astype(np.int64))
        return ids, int(tensors["prompt_lengths"][i])

    def temperature(self, i: int) -> float:
        """The temperature at which the response of record `i` was drawn."""
        tensors, i = self._find(i)
        return float(tensors["temperatures"][i])

    def where(self, i: int) -> str:
        """The file of record `i`, and its number in there from 0."""
        _, inside = self._find(i)
        shard = bisect.bisect_right(self._ends, i % len(self))
        return f"{self.folder / self.manifest['shards'][shard]['file']}, record {inside}"

    def _find(self, i: int) -> tuple[dict[str, np.ndarray], int]:
        """The shard of record i, and its place in there."""
        if not -len(self) <= i < len(self):
            raise IndexError(f"ShardReader: index must be below {len(self)}, got {i}")
        i %= len(self)
        shard = bisect.bisect_right(self._ends, i)
        if shard not in self._loaded:
            self._loaded[shard] = _load(self.folder, self.manifest["shards"][shard], "ShardReader")
        return self._loaded[shard], i - (self._ends[shard - 1] if shard else 0)


def read_manifest(folder: str | Path) -> dict[str, Any]:
    """The manifest of a folder. Raises: ValueError where there is none, one of an unknown format, or a damaged one."""
    path = Path(folder) / MANIFEST
    try:
        manifest = read_json(path, "training data")
    except (OSError, ValueError) as error:
        raise ValueError(f"training data: folder must hold a {MANIFEST}, got {folder} ({error})") from None
    if (version := manifest.get("format")) != FORMAT:
        raise ValueError(f"training data: {path} must have format {FORMAT}, got {shown(version)}")
    shards = manifest.get("shards")
    if not isinstance(shards, list):
        raise ValueError(f"training data: {path}: shards must be a list, got {shown(shards)}")
    for i, shard in enumerate(shards):
        for name, kind in _ENTRY.items():
            value = shard.get(name) if isinstance(shard, dict) else None
            wrong = type(value) is not kind or (isinstance(value, int) and value < 0)
            if wrong or (name == "file" and Path(str(value)).name != value):
                allowed = "a count" if kind is int else "a file name here" if name == "file" else f"a {kind.__name__}"
                raise ValueError(f"training data: {path}: shards[{i}].{name} must be {allowed}, got {shown(value)}")
    return manifest


def _check_file(folder: Path, shard: dict[str, Any], who: str, verify: bool = True) -> None:
    """ValueError, naming the file, for a shard that is missing or not the one that the manifest tells of."""
    path = folder / shard["file"]
    if not path.is_file():
        raise ValueError(f"{who}: {path} must be as its manifest says, got a missing file")
    if verify and (got := sha256_of(path)) != shard["sha256"]:
        raise ValueError(
            f"{who}: {path} must be as its manifest says (sha256 {cut(shard['sha256'][:12])}...), got a changed or "
            f"truncated file ({got[:12]}...); take it from where it was made, or make the folder anew"
        )


def _load(folder: Path, shard: dict[str, Any], who: str) -> dict[str, np.ndarray]:
    """The arrays of a shard, which belong together and are as many as the manifest says."""
    path = folder / shard["file"]
    try:
        arrays = load_file(path)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{who}: {path} must be a readable shard, got {cut(str(error))}") from error
    if missing := [name for name in _ARRAYS if name not in arrays]:
        raise ValueError(f"{who}: {path} must hold {', '.join(_ARRAYS)}, {', '.join(missing)} are missing")
    offsets, count = arrays["offsets"], shard["records"]
    sizes = {"offsets": count + 1, "prompt_lengths": count, "temperatures": count, "items": count}
    sizes |= {"ids": shard["tokens"], "done": shard["prompts"]}
    if wrong := [name for name, size in sizes.items() if arrays[name].shape != (size,)]:
        got = list(arrays[wrong[0]].shape)
        raise ValueError(f"{who}: {path}: {wrong[0]} must be [{sizes[wrong[0]]}] as the manifest says, got {got}")
    lengths = np.diff(offsets)
    if offsets[0] != 0 or offsets[-1] != shard["tokens"] or (lengths < 0).any():
        raise ValueError(f"{who}: {path}: offsets must rise from 0 to {shard['tokens']} (the tokens)")
    if (arrays["prompt_lengths"] < 0).any() or (arrays["prompt_lengths"] > lengths).any():
        raise ValueError(f"{who}: {path}: prompt_lengths must be 0 to the length of each record")
    return arrays


def _leaves(value: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, item in value.items():
        if isinstance(item, dict):
            yield from _leaves(item, (*path, name))
        else:
            yield (*path, name), item


def lock_folder(folder: Path, who: str) -> Any:
    """An open file whose lock the system drops with the process.

    Raises: RuntimeError in the name of `who` where another process holds it.
    """
    import fcntl

    file = open(folder / ".lock", "a")  # noqa: SIM115  it stays open as long as the writer lives
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        with contextlib.suppress(OSError):
            file.close()
        raise RuntimeError(f"{who}: another process is writing to {folder}") from None
    return file
