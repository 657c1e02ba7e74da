"""The files of a drafter's folder: config.json, safetensors (single or sharded), the mask embedding."""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..messages import cut, shown

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
MASK_EMBEDDING = "mask_embedding.pt"
_HUB_FILES = ["config.json", "*.safetensors", INDEX, MASK_EMBEDDING]
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_LISTED = 8
_MOST_JSON = 256 << 20  # bytes; an index of 100,000 tensors has about 10 MB
_MOST_EMBEDDING = 16 << 20  # bytes, for one row
_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "F64": "float64", "I64": "int64", "I32": "int32"}
_DTYPES |= {"BOOL": "bool", "I8": "int8", "U8": "uint8", "I16": "int16", "F8_E4M3": "float8_e4m3fn"}
_DTYPES |= {"F8_E5M2": "float8_e5m2"}


class Header(NamedTuple):
    """What a file's header says of a tensor: which file, its shape, and its dtype in torch's words."""

    file: str
    shape: tuple[int, ...]
    dtype: str


def few(names: list[str]) -> str:
    """The first names of a list, and how many more there are."""
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(map(cut, names[:_LISTED])) + more


def refuse(where: object, problem: str) -> NoReturn:
    """Raise the ValueError of a file or folder that cannot be loaded."""
    raise ValueError(f"load_checkpoint: {where}: {problem}")


def is_hub_id(text: str) -> bool:
    """Whether a text has the form of a hub id, "owner/name" or the "name" of an old one."""
    return re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?", text) is not None


def local_folder(path_or_id: str | os.PathLike[str], revision: str | None, **hub: Any) -> Path:
    """The folder of a checkpoint; a hub id "owner/name" is downloaded (safetensors and config only).

    hub: Keywords of `huggingface_hub.snapshot_download`.
    """
    path = Path(path_or_id).expanduser()
    if path.is_dir():
        if revision is not None:
            raise ValueError(f"load_checkpoint: revision must be None for a local folder ({path}), got {revision!r}")
        return path
    if not isinstance(path_or_id, str) or path.exists() or not (is_hub_id(path_or_id) and "/" in path_or_id):
        expected = "a folder or a hub id 'owner/name'"
        told = f"path_or_id must be {expected}, got {os.fspath(path_or_id)!r}: no such folder"
        raise FileNotFoundError(f"load_checkpoint: {told}")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(path_or_id, revision=revision, allow_patterns=_HUB_FILES, **hub))
    except Exception as error:  # of the hub, the network, or the disk
        said = cut(f"{type(error).__name__}: {error}".splitlines()[0])
        raise OSError(
            f"load_checkpoint: there is no folder {path_or_id!r} here, and as a hub id it cannot be had: {said}"
        ) from error


def read_json(path: Path, who: str = "load_checkpoint") -> dict[str, Any]:
    """The object in a JSON file.

    Raises: FileNotFoundError without the file; ValueError, naming the file, where it is no regular file of a size
    that a config may have, or holds anything but an object.
    """
    if not path.exists():
        raise FileNotFoundError(f"{who}: there is no {path}")
    check_regular(path, who, _MOST_JSON)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except RecursionError as error:
        raise ValueError(f"{who}: {path}: not valid JSON of a config (nested too deep)") from error
    except ValueError as error:  # not UTF-8, not JSON, or an integer of more than 4,300 digits
        raise ValueError(f"{who}: {path}: not valid JSON ({error})") from error
    if not isinstance(content, dict):
        raise ValueError(f"{who}: {path}: must hold a JSON object, got {type(content).__name__}")
    return content


def check_regular(path: Path, who: str, most: int | None = None) -> None:
    """Raise ValueError for a folder, a pipe or a device in a file's place: reading one may never end."""
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise ValueError(
            f"{who}: {path}: must be a regular file, got a {'folder' if path.is_dir() else 'device or pipe'}"
        )
    if most is not None and found.st_size > most:
        raise ValueError(f"{who}: {path}: must be at most {most >> 20} MB, got {found.st_size >> 20} MB")


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
        there: dict[str, set[str]] = {}
        for name, file in weight_map.items():
            there.setdefault(file, set()).add(name)
        for file in there:
            if Path(file).name != file or not file.endswith(".safetensors"):
                refuse(folder / INDEX, f"weight_map must name .safetensors files of this folder, got {shown(file)}")
        files: dict[str, set[str] | None] = {file: there[file] for file in sorted(there)}
        if absent := [file for file in files if not (folder / file).is_file()]:
            raise FileNotFoundError(
                f"load_checkpoint: {folder / INDEX}: files of weight_map are missing: {few(absent)}"
            )
        return files
    found = sorted(path.name for path in folder.iterdir() if path.is_file())
    others = [name for name in found if name.endswith(".safetensors")]
    if len(others) == 1:
        return {others[0]: None}
    if not others and (pickles := [n for n in found if n.endswith(_PICKLES) and n != MASK_EMBEDDING]):
        refuse(folder, f"weights must be safetensors, pickled weights are not read, got {few(pickles)}")
    raise FileNotFoundError(
        f"load_checkpoint: {folder}: must hold {WEIGHTS} or {INDEX}, got {few(others) or 'neither'}"
    )


def stored_headers(folder: Path, skip: Callable[[str], bool]) -> dict[str, Header]:
    """Shape and dtype of each tensor in a folder's safetensors, without reading one; not those that `skip` drops.

    Raises ValueError for pickled weights, unreadable files and an index that does not match them, and
    FileNotFoundError for files that are not there.
    """
    headers: dict[str, Header] = {}
    for file, indexed in _weight_files(folder).items():
        with _opened(folder / file) as reader:
            stored = reader.keys()
            if indexed is not None and set(stored) != indexed:
                wrong = few(sorted(set(stored) ^ indexed))
                refuse(folder / file, f"must hold the tensors that {INDEX} puts there, they differ in {wrong}")
            for name in sorted(name for name in stored if not skip(name)):
                part = reader.get_slice(name)
                dtype = part.get_dtype()
                headers[name] = Header(file, tuple(part.get_shape()), _DTYPES.get(dtype, dtype))
    return headers


def read_tensors(folder: Path, headers: dict[str, Header]) -> Iterator[tuple[str, Tensor]]:
    """Name and value of each of these tensors, file by file."""
    files: dict[str, list[str]] = {}
    for name, header in headers.items():
        files.setdefault(header.file, []).append(name)
    for file, names in files.items():
        with _opened(folder / file) as reader:
            for name in names:
                yield name, reader.get_tensor(name)


def stored_tensors(folder: Path, skip: Callable[[str], bool]) -> Iterator[tuple[str, Tensor]]:
    """Name and value of each tensor in a folder's safetensors; skips and raises as `stored_headers`."""
    yield from read_tensors(folder, stored_headers(folder, skip))


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt", device="cpu") as reader:
            yield reader
    except SafetensorError as error:
        raise ValueError(f"load_checkpoint: {path}: not a readable safetensors file ({cut(str(error))})") from error


def read_mask_embedding(path: Path, mask_token_id: int, hidden_size: int) -> Tensor:
    """The embedding of the mask token, from a pickle that holds nothing but tensors and an id."""
    expected = f"a tensor [{hidden_size}] or a dict of mask_token_id and embedding"
    check_regular(path, "load_checkpoint", _MOST_EMBEDDING)
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch.load raises many types; a pickle of anything else must not be run
        raise ValueError(
            f"load_checkpoint: {path}: must hold {expected}, it cannot be read ({cut(str(error))})"
        ) from error
    if isinstance(content, dict):
        if set(content) != {"mask_token_id", "embedding"}:
            refuse(path, f"must hold {expected}, got a dict of {few(sorted(map(str, content)))}")
        token = content["mask_token_id"]
        token = int(token) if isinstance(token, Tensor) and token.numel() == 1 else token
        if token != mask_token_id:
            refuse(path, f"mask_token_id must be {mask_token_id} (config.json), got {shown(token)}")
        content = content["embedding"]
    if not isinstance(content, Tensor):
        refuse(path, f"must hold {expected}, got {type(content).__name__}")
    return content.detach()


def write_file(path: Path, write: Callable[[Path], object]) -> None:
    """Write beside the file with `write`, then put it in place in one step, readable for whom the umask lets.

    Raises: OSError naming the file where it cannot be written, as on a full disk.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        part.touch()
        mode = stat.S_IMODE(part.stat().st_mode)
        write(part)
        part.chmod(mode)  # safetensors writes for the owner alone
        os.replace(part, path)
    except (OSError, SafetensorError) as error:
        number = getattr(error, "errno", None)
        told = f"{path} cannot be written: {error}"
        raise (OSError(told) if number is None else OSError(number, told)) from error
    finally:
        part.unlink(missing_ok=True)
