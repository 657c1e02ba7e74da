"""Where targets and drafters come from: names, folders, hub ids, and the keywords that loading takes."""

from __future__ import annotations

import difflib
import os
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ..messages import shown
from .files import is_hub_id, local_folder, read_json
from .keys import is_drafter
from .smollm2 import ensure_smollm2

Source = str | os.PathLike[str]

SMOLLM2 = "smollm2"  # the demo's target, and the drafter for it that comes with the package
# Keywords that say how both sides are fetched; `drafter_` before one gives the drafter its own.
_SHARED = ("token", "cache_dir", "local_files_only", "force_download")
_TOKENIZER = ("revision", "subfolder", "trust_remote_code", "code_revision", "gguf_file")
_TARGET = (
    *_TOKENIZER,
    *("variant", "use_safetensors", "config", "key_mapping", "attn_implementation", "low_cpu_mem_usage", "tp_plan"),
    *("device_map", "max_memory", "offload_folder", "offload_state_dict", "offload_buffers", "quantization_config"),
)
_DRAFTER = ("revision", *_SHARED)
_LONGEST = 4096  # characters of a path, on Linux
_HINTS = {
    "torch_dtype": "dtype",
    "use_auth_token": "token",
    "model": "the first argument, target",
    "load_in_8bit": "quantization_config=transformers.BitsAndBytesConfig(load_in_8bit=True)",
    "load_in_4bit": "quantization_config=transformers.BitsAndBytesConfig(load_in_4bit=True)",
    "quantization": "quantize or quantization_config",
    "num_speculative_tokens": "block_size, one more than the drafts",
    "tokenizer": "Speculator(model, drafter, tokenizer), with a Target and a Drafter that are loaded",
    **dict.fromkeys(("assistant_model", "draft_model", "draft", "speculative_model"), "drafter"),
    **dict.fromkeys(("max_new_tokens", "temperature", "top_p", "top_k", "seed"), "an argument of generate and stream"),
}


class Keywords(NamedTuple):
    """The keywords of `Speculator.from_pretrained`, by who takes them."""

    target: dict[str, Any]
    tokenizer: dict[str, Any]
    drafter: dict[str, Any]
    options: dict[str, Any]


def split_keywords(given: Mapping[str, Any], options: Collection[str], *, device: object, drafter: object) -> Keywords:
    """Sort keywords; `options` are the names of those that `Speculator` itself takes.

    `token`, `cache_dir`, `local_files_only` and `force_download` are for target, tokenizer and drafter; `revision`,
    `trust_remote_code`, `device_map` and so on for the target; `drafter_revision` and its like for the drafter.
    Raises TypeError for an unknown keyword, with a hint; ValueError for those that do not go together.
    """
    options = set(options) - {"model", "drafter", "tokenizer"}
    own = {f"drafter_{name}": name for name in _DRAFTER}
    known = {*options, *_SHARED, *_TARGET, *own}
    for name in given:
        if name not in known:
            raise TypeError(f"Speculator.from_pretrained: {name} is no keyword here{_hint(name, known)}")
    if device is not None and given.get("device_map") is not None:
        raise ValueError(f"Speculator: device must be left out when device_map is given, got {device!r}")
    if drafter is None and (needless := sorted(given.keys() & own.keys())):
        raise ValueError(
            f"Speculator: {needless[0]} must be left out where drafter is None, got {given[needless[0]]!r}"
        )
    shared = {name: given[name] for name in _SHARED if name in given}
    return Keywords(
        target=shared | {name: given[name] for name in _TARGET if name in given},
        tokenizer=shared | {name: given[name] for name in _TOKENIZER if name in given},
        drafter=shared | {name: given[key] for key, name in own.items() if key in given},
        options={name: value for name, value in given.items() if name in options},
    )


def check_onnx_keywords(keywords: Keywords) -> None:
    """Raise ValueError for keywords of transformers and the hub beside an exported target, which is read as it lies."""
    if needless := sorted(keywords.target | keywords.drafter):
        raise ValueError(f"Speculator: {needless[0]} must be left out for a target on ONNX Runtime")


def _hint(name: str, known: Collection[str]) -> str:
    if name in _HINTS:
        return f"; use {_HINTS[name]}"
    close = difflib.get_close_matches(name, sorted(known), 1)
    return f"; did you mean {close[0]}?" if close else f"; there are {', '.join(sorted(known))}"


def target_source(source: Source, who: str = "Target") -> str:
    """What transformers loads a target from: a folder, made ready where `source` is "smollm2", or a hub id.

    Raises: FileNotFoundError for a folder that is not there; ValueError for a file, or a drafter's folder.
    """
    if source == SMOLLM2:
        return str(ensure_smollm2())
    folder = _folder(source, who, "gguf_file={!r} beside the folder {!r} as the target")
    if folder is None:
        return os.fspath(source)
    config = folder / "config.json"
    if not config.exists() and (folder / "draft.json").is_file() and not (folder / "target.json").is_file():
        raise ValueError(f"{who}: target must be a language model, got {folder}, which holds an exported drafter")
    if config.exists():
        refuse_drafter(read_json(config, who), str(folder), who)
    return str(folder)


def target_folder(source: Source, who: str) -> Path:
    """The folder of a target's config and safetensors, downloaded where `source` is a hub id."""
    return local_folder(target_source(source, who), None)


def refuse_drafter(raw: Mapping[str, Any], source: str, who: str) -> None:
    """Raise ValueError where the content of a config.json is a drafter's; `source` says whose it is."""
    if is_drafter(raw):
        verifier = (raw.get("speculators_config") or {}).get("verifier") or {}
        made_for = f" ({verifier['name_or_path']})" if verifier.get("name_or_path") else ""
        raise ValueError(
            f"{who}: target must be a language model, got {source}, which is a DFlash drafter: give the model it was "
            f"made for{made_for} as the target, and this as the drafter"
        )


def drafter_folder(source: Source, revision: str | None = None, **hub: Any) -> Path:
    """The folder of a drafter: of the package where `source` is "smollm2", else a local one or a hub id's download.

    hub: `token`, `cache_dir`, `local_files_only`, `force_download`.
    Raises: FileNotFoundError, OSError or ValueError that says what there is; TypeError for another keyword.
    """
    for name in hub:
        if name not in _SHARED:
            raise TypeError(f"load_checkpoint: {name} is no keyword here{_hint(name, _DRAFTER)}")
    if source == SMOLLM2:
        found = [folder for folder in packaged_drafters() if folder.name.startswith(SMOLLM2)]
        if not found:
            raise FileNotFoundError("load_checkpoint: this installation has no drafter for smollm2 in its models/")
        return found[0]
    _folder(source, "load_checkpoint", "a safetensors checkpoint: {!r} in {!r} is not read as a drafter")
    folder = local_folder(source, revision, **hub)
    if not (folder / "config.json").exists():
        for name, kind, loader in (("draft.json", "drafter", "OnnxDrafter"), ("target.json", "target", "OnnxTarget")):
            if (folder / name).is_file():
                say = f"which holds an exported {kind}: pydflash.export.{loader} or Speculator.from_pretrained loads it"
                raise ValueError(f"load_checkpoint: path_or_id must be a drafter's checkpoint, got {folder}, {say}")
    return folder


def packaged_drafters() -> Iterator[Path]:
    """Folders with a config.json in the package's models/, and in the repository's when run from there."""
    package = Path(__file__).parents[1]
    places = [package / "models"]
    if (package.parent / "pyproject.toml").exists():
        places.append(package.parent / "models")
    for place in places:
        for found in sorted(place.glob("*/config.json")):
            yield found.parent


def _folder(source: Source, who: str, instead_of_gguf: str) -> Path | None:
    """The folder that a source is; None where it can be a hub id only.

    Anything of the form owner/name may be one; that is for the hub to say, unless `owner` is a folder here.
    """
    text = os.fspath(source)
    if not text or len(text) > _LONGEST or "\0" in text:
        raise FileNotFoundError(f"{who}: path_or_id must be a folder or a hub id 'owner/name', got {shown(text)}")
    path = Path(source).expanduser()
    if path.is_dir():
        return path
    if path.suffix == ".gguf":
        raise ValueError(
            f"{who}: path_or_id must be a folder or a hub id, got a GGUF file: give "
            + instead_of_gguf.format(path.name, str(path.parent))
        )
    if path.exists():
        raise FileNotFoundError(f"{who}: path_or_id must be a folder or a hub id, got the file {os.fspath(source)!r}")
    owner, slash, _ = os.fspath(source).partition("/")
    if not isinstance(source, str) or not is_hub_id(source) or (slash and Path(owner).is_dir()):
        got = f"{os.fspath(source)!r}: no such folder"
        raise FileNotFoundError(f"{who}: path_or_id must be a folder or a hub id 'owner/name', got {got}")
    return None
