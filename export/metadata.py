"""What an exported model says of itself: in its own metadata and in a JSON file beside it, the same twice."""

from __future__ import annotations

import copy
import functools
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pydflash.checkpoints.config import DrafterConfig
from pydflash.messages import cut, shown

FORMAT = 1
POSITIONS = 1 << 20  # that the rotary tables of a graph reach
_PREFIX = "pydflash."


class Kind(NamedTuple):
    """A kind of exported model: who loads it, the names of its files, and the keys its metadata must have."""

    loader: str
    model: str
    data: str
    description: str
    required: tuple[str, ...]


def _kind(loader: str, name: str, *required: str) -> Kind:
    return Kind(loader, f"{name}.onnx", f"{name}.onnx.data", f"{name}.json", ("format", "source_sha256", *required))


DRAFT = _kind("OnnxDrafter", "draft", "profile", "dtype", "quantize", "embed", "config")
TARGET = _kind("OnnxTarget", "target", "quantize", "target_layer_ids", "sizes", "embedding_rows", "head_rows")


def describe(config: DrafterConfig, **more: Any) -> dict[str, Any]:
    """The metadata of a drafter: what a host has to know, and the whole config; `more` are profile, dtype and so on."""
    return {
        "format": FORMAT,
        "version": config.version,
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "target_layer_ids": list(config.target_layer_ids),
        "target_layer_convention": "L is the output of decoder layer L, counted from 0",
        "num_features": len(config.target_layer_ids) * config.target_hidden_size,
        "top_k": config.num_candidates,
        "num_layers": config.num_layers,
        "num_kv_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position": config.max_position_embeddings,
        "rope_theta": config.rope["rope_theta"],
        **more,
        "config": config.to_dict(),
    }


def to_properties(metadata: Mapping[str, Any]) -> dict[str, str]:
    """As an ONNX model holds it: a JSON text for each key."""
    return {_PREFIX + name: json.dumps(value) for name, value in metadata.items()}


def write_description(folder: Path, kind: Kind, metadata: Mapping[str, Any]) -> dict[str, int]:
    """Write the JSON file of a model that lies in the folder; the sizes of the files."""
    sizes = {name: (folder / name).stat().st_size for name in (kind.model, kind.data)}
    sums = {name: _sha256(folder / name) for name in sizes}
    content = {"model": kind.model, "files": sizes, "sha256": sums, "metadata": dict(metadata)}
    (folder / kind.description).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return sizes | {kind.description: (folder / kind.description).stat().st_size}


def read_description(folder: Path, kind: Kind) -> tuple[Path, dict[str, Any]]:
    """The model's path and the metadata; ValueError or FileNotFoundError, naming the file, for what is wrong."""
    path, who = folder / kind.description, kind.loader
    if not path.is_file():
        raise FileNotFoundError(f"{who}: folder must hold {path.name}, got {folder}")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{who}: {path}: not valid JSON ({error})") from error
    metadata = content.get("metadata") if isinstance(content, dict) else None
    if not isinstance(metadata, dict) or (missing := [name for name in kind.required if name not in metadata]):
        wanted = missing if isinstance(metadata, dict) else ["metadata"]
        raise ValueError(f"{who}: {path}: must hold {', '.join(wanted)}")
    if metadata["format"] != FORMAT:
        raise ValueError(f"{who}: {path}: format must be {FORMAT}, got {shown(metadata['format'])}; export it again")
    name = content.get("model")
    if not isinstance(name, str) or Path(name).name != name or not name.endswith(".onnx"):
        raise ValueError(f"{who}: {path}: model must be the name of an .onnx file of this folder, got {shown(name)}")
    files, sums = content.get("files", {}), content.get("sha256", {})  # the first exports had no sums
    for key, value in (("files", files), ("sha256", sums)):
        if not isinstance(value, dict):
            raise ValueError(f"{who}: {path}: {key} must be an object with the names of files, got {shown(value)}")
        if outside := [file for file in value if Path(file).name != file]:
            raise ValueError(f"{who}: {path}: {key} must be of names in this folder, got {shown(outside[0])}")
    for file in {name: None, **files, **sums}:
        if not (folder / file).is_file():
            raise FileNotFoundError(f"{who}: {folder / file} is missing")
    for file, size in files.items():
        if (found := (folder / file).stat().st_size) != size:
            raise ValueError(f"{who}: {folder / file}: must have {shown(size)} bytes as {path.name} says, got {found}")
    for file, wanted in sums.items():
        if (got := _sha256(folder / file)) != wanted:
            raise ValueError(
                f"{who}: {folder / file}: must have the sha256 that {path.name} says, {str(wanted)[:12]}..., got "
                f"{got[:12]}...; the file is damaged or of another export"
            )
    return folder / name, metadata


@contextmanager
def named(path: Path, kind: Kind, what: str = "metadata") -> Iterator[None]:
    """Errors of reading what a file says, as a ValueError that names it."""
    try:
        yield
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        said = cut(f"{type(error).__name__}: {error}")
        raise ValueError(f"{kind.loader}: {path}: {what} must be as `pydflash export` writes it, got {said}") from error


def _sha256(path: Path) -> str:
    """Of a file's content; read once in a process, as long as the file stays as it is."""
    found = path.stat()
    return _sha256_of(str(path), (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns))


@functools.lru_cache(64)
def _sha256_of(path: str, identity: tuple[int, ...]) -> str:
    total = hashlib.sha256()
    with open(path, "rb") as file:
        while part := file.read(1 << 20):
            total.update(part)
    return total.hexdigest()


class SharesSession:
    """A deep copy has the session, which nothing changes once it is loaded; all else is its own."""

    session: Any

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        memo[id(self.session)] = self.session
        memo[id(self)] = made = object.__new__(type(self))
        made.__dict__.update({name: copy.deepcopy(value, memo) for name, value in vars(self).items()})
        return made


def open_model(
    folder: Path, kind: Kind, providers: Sequence[Any] | None, threads: int | None, session_options: Any
) -> tuple[Any, dict[str, Any]]:
    """An ONNX Runtime session of a folder's model, and its metadata, found to be the same in both places.

    Raises: ImportError without onnxruntime; FileNotFoundError or ValueError naming the file.
    """
    try:
        import onnxruntime
    except ImportError as error:
        raise ImportError(f"{kind.loader}: needs onnxruntime (pip install 'pydflash[onnx]'): {error}") from error
    path, metadata = read_description(folder, kind)
    options = onnxruntime.SessionOptions() if session_options is None else session_options
    if threads is not None:
        if type(threads) is not int or threads < 0:
            raise ValueError(f"{kind.loader}: threads must be an integer >= 0 or None, got {threads!r}")
        options.intra_op_num_threads = threads
    chosen = ["CPUExecutionProvider"] if providers is None else providers
    _check_providers(kind, chosen)
    try:
        session = onnxruntime.InferenceSession(str(path), options, providers=list(chosen))
    except Exception as error:  # onnxruntime's own types
        raise ValueError(f"{kind.loader}: {path}: ONNX Runtime cannot load it ({cut(str(error))})") from error
    properties = session.get_modelmeta().custom_metadata_map
    with named(path, kind, "its metadata"):
        own = {k.removeprefix(_PREFIX): json.loads(v) for k, v in properties.items() if k.startswith(_PREFIX)}
    for name in sorted(own.keys() | metadata.keys()):
        if own.get(name) != metadata.get(name):
            raise ValueError(
                f"{kind.loader}: {path}: {name} must be that of {kind.description} ({shown(metadata.get(name))}), "
                f"got {shown(own.get(name))}; the files are of different exports"
            )
    return session, metadata


def _check_providers(kind: Kind, providers: Sequence[Any]) -> None:
    """ONNX Runtime would only warn, and run on the CPU, where no provider asked for is there."""
    from onnxruntime import get_all_providers, get_available_providers

    available = get_available_providers()
    names = [] if isinstance(providers, str) else [p if isinstance(p, str) else p[0] for p in providers]
    if not set(names) & set(available) or not set(names) <= {*get_all_providers(), *available}:
        raise ValueError(f"{kind.loader}: providers must be a list out of {', '.join(available)}, got {providers!r}")


def dtype_of(metadata: Mapping[str, Any]) -> Any:
    """The numpy type of the graph's activations and caches."""
    return np.dtype(metadata["dtype"]).type
