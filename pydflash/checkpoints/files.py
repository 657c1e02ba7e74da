"""The files of a drafter's folder: config.json, safetensors (single or sharded), the mask embedding."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
MASK_EMBEDDING = "mask_embedding.pt"
_HUB_FILES = ["config.json", "*.safetensors", INDEX, MASK_EMBEDDING]
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_LISTED = 8


def few(names: list[str]) -> str:
    """The first names of a list, and how many more there are."""
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(names[:_LISTED]) + more


def refuse(where: object, problem: str) -> NoReturn:
    """Raise the ValueError of a file or folder that cannot be loaded."""
    raise ValueError(f"load_checkpoint: {where}: {problem}")


def local_folder(path_or_id: str | os.PathLike[str], revision: str | None) -> Path:
    """The folder of a checkpoint; a hub id "owner/name" is downloaded (safetensors and config only)."""
    path = Path(path_or_id).expanduser()
    if path.is_dir():
        if revision is not None:
            raise ValueError(f"load_checkpoint: revision must be None for a local folder ({path}), got {revision!r}")
        return path
    if not isinstance(path_or_id, str) or path.exists() or not re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", path_or_id):
        expected = "a folder or a hub id 'owner/name'"
        raise FileNotFoundError(f"load_checkpoint: path_or_id must be {expected}, got {os.fspath(path_or_id)!r}")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(path_or_id, revision=revision, allow_patterns=_HUB_FILES))
    except Exception as error:  # of the hub, the network, or the disk
        said = f"{type(error).__name__}: {error}".splitlines()[0]
        raise OSError(
            f"load_checkpoint: there is no folder {path_or_id!r} here, and as a hub id it cannot be had: {said}"
        ) from error


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; ValueError, naming the file, where it holds anything else."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"load_checkpoint: {path}: not valid JSON ({error})") from error
    if not isinstance(content, dict):
        refuse(path, f"must hold a JSON object, got {type(content).__name__}")
    return content


def _weight_files(folder: Path) -> dict[str, set[str] | None]:
    """File names with the tensors the index puts there; None where there is no index."""
    single, index = (folder / WEIGHTS).is_file(), (folder / INDEX).is_file()
    if single and index:
        refuse(folder, f"must hold {WEIGHTS} or {INDEX}, got both")
    if single:
        return {WEIGHTS: None}
    if index:
        weight_map = read_json(folder / INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
            refuse(
                folder / INDEX,
                f"weight_map must map tensor names to file names, got {type(weight_map).__name__}",
            )
        files: dict[str, set[str] | None] = {}
        for file in sorted(set(weight_map.values())):
            if Path(file).name != file or not file.endswith(".safetensors"):
                refuse(folder / INDEX, f"weight_map must name .safetensors files of this folder, got {file!r}")
            files[file] = {name for name, home in weight_map.items() if home == file}
        if absent := [file for file in files if not (folder / file).is_file()]:
            raise FileNotFoundError(
                f"load_checkpoint: {folder / INDEX}: files of weight_map are missing: {few(absent)}"
            )
        return files
    found = sorted(path.name for path in folder.iterdir())
    others = [name for name in found if name.endswith(".safetensors")]
    if len(others) == 1:
        return {others[0]: None}
    if not others and (pickles := [n for n in found if n.endswith(_PICKLES) and n != MASK_EMBEDDING]):
        refuse(folder, f"weights must be safetensors, pickled weights are not read, got {few(pickles)}")
    raise FileNotFoundError(
        f"load_checkpoint: {folder}: must hold {WEIGHTS} or {INDEX}, got {few(others) or 'neither'}"
    )


def stored_tensors(folder: Path, skip: Callable[[str], bool]) -> Iterator[tuple[str, Tensor]]:
    """Name and value of each tensor in a folder's safetensors, those apart whose name `skip` drops.

    Raises ValueError for pickled weights, unreadable files and an index that does not match them, and
    FileNotFoundError for files that are not there.
    """
    for file, indexed in _weight_files(folder).items():
        try:
            with safe_open(folder / file, framework="pt", device="cpu") as reader:
                stored = set(reader.keys())
                if indexed is not None and stored != indexed:
                    wrong = few(sorted(stored ^ indexed))
                    refuse(
                        folder / file,
                        f"must hold the tensors that {INDEX} puts there, they differ in {wrong}",
                    )
                for name in sorted(stored):
                    if not skip(name):
                        yield name, reader.get_tensor(name)
        except SafetensorError as error:
            raise ValueError(f"load_checkpoint: {folder / file}: not a readable safetensors file ({error})") from error


def read_mask_embedding(path: Path, mask_token_id: int, hidden_size: int) -> Tensor:
    """The embedding of the mask token, from a pickle that holds nothing but tensors and an id."""
    expected = f"a tensor [{hidden_size}] or a dict of mask_token_id and embedding"
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch.load raises many types; a pickle of anything else must not be run
        raise ValueError(f"load_checkpoint: {path}: must hold {expected}, it cannot be read ({error})") from error
    if isinstance(content, dict):
        if set(content) != {"mask_token_id", "embedding"}:
            refuse(path, f"must hold {expected}, got a dict of {few(sorted(map(str, content)))}")
        token = content["mask_token_id"]
        token = int(token) if isinstance(token, Tensor) and token.numel() == 1 else token
        if token != mask_token_id:
            refuse(path, f"mask_token_id must be {mask_token_id} (config.json), got {token!r}")
        content = content["embedding"]
    if not isinstance(content, Tensor):
        refuse(path, f"must hold {expected}, got {type(content).__name__}")
    return content.detach()


def write_file(path: Path, write: Callable[[Path], object]) -> None:
    """Write beside the file with `write`, then put it in place in one step."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        write(part)
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
