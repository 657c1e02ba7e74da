"""Loading a target and its tokenizer with transformers, from a folder, a hub id or a name."""

from __future__ import annotations

import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..checkpoints.sources import refuse_drafter, target_source
from ..messages import cut
from ..progress import step

# Keywords of `from_pretrained` that say where the files are, so that the config is read from the same place.
_HUB_ARGUMENTS = (
    *("revision", "trust_remote_code", "code_revision", "token", "cache_dir", "local_files_only", "subfolder"),
    *("gguf_file", "force_download"),
)
_TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "sentencepiece.bpe.model"),
    *("tekken.json", "tokenizer_config.json"),
)


def load_model(
    path_or_id: str | os.PathLike[str],
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    **kwargs: Any,
) -> nn.Module:
    """The model of `Target.from_pretrained`, which says what the arguments are, in evaluation mode.

    Raises: FileNotFoundError for a folder that is not there, OSError for a hub id that cannot be had, ValueError for
    a drafter in the target's place.
    """
    import transformers

    if device is not None and kwargs.get("device_map") is not None:
        raise ValueError(f"Target: device must be left out when device_map is given, got {device!r}")
    source = target_source(path_or_id)
    kwargs.setdefault("trust_remote_code", False)  # left out, transformers asks on standard input
    hub = {name: kwargs[name] for name in _HUB_ARGUMENTS if name in kwargs}
    config = kwargs.pop("config", None) or _load_config(source, hub)
    refuse_drafter(config.to_dict(), source, "Target")
    auto: Any = transformers.AutoModelForCausalLM
    remote = getattr(config, "auto_map", None) or {}
    remote = remote if kwargs["trust_remote_code"] else {}
    if type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING and auto.__name__ not in remote:
        auto = transformers.AutoModelForImageTextToText
    theirs = transformers.utils.logging.is_progress_bar_enabled()
    with nullcontext() if theirs else step("loading the target"):
        model = auto.from_pretrained(source, config=config, dtype=dtype or "auto", **kwargs)
    placed = getattr(model, "is_quantized", False) and device is None and model.device.type != "cpu"
    if kwargs.get("device_map") is None and not placed:
        try:
            model = model.to(device or _default_device())
        except (AssertionError, RuntimeError) as error:
            raise RuntimeError(f"Target: device {device} cannot be used: {error}") from error
    found: nn.Module = model.eval()
    return found


def _load_config(source: str, hub: dict[str, Any]) -> Any:
    import transformers

    try:
        return transformers.AutoConfig.from_pretrained(source, **hub)
    except OSError as error:
        if Path(source).is_dir():
            raise
        said = cut(f"{type(error).__name__}: {error}".splitlines()[0])
        raise OSError(
            f"Target: there is no folder {source!r} here, and as a hub id it cannot be had: {said}"
        ) from error


def load_tokenizer(path_or_id: str | os.PathLike[str], **kwargs: Any) -> Any:
    """The tokenizer that belongs to a target: a folder or a hub id, and keywords of transformers' AutoTokenizer.

    Raises: FileNotFoundError for a folder without one; ValueError, naming what there is, for one that does not load.
    """
    import transformers

    source = target_source(path_or_id, "load_tokenizer")
    kwargs.setdefault("trust_remote_code", False)
    here = [name for name in _TOKENIZER_FILES if Path(source, kwargs.get("subfolder") or "", name).is_file()]
    if Path(source).is_dir() and not here and kwargs.get("gguf_file") is None:
        raise FileNotFoundError(
            f"load_tokenizer: {source} must hold a tokenizer ({', '.join(_TOKENIZER_FILES[:2])}, ...), got none"
        )
    try:
        return transformers.AutoTokenizer.from_pretrained(source, **kwargs)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, ImportError) as error:
        said = cut(f"{type(error).__name__}: {error}".splitlines()[0])
        have = f"of {', '.join(here)} " if here else ""
        raise ValueError(f"load_tokenizer: {source}: the tokenizer {have}cannot be loaded ({said})") from error


def tokenizer_or_none(path_or_id: str | os.PathLike[str], **kwargs: Any) -> Any:
    """As `load_tokenizer`, or None for a folder that has none: token ids do without."""
    try:
        return load_tokenizer(path_or_id, **kwargs)
    except FileNotFoundError:
        return None


def _default_device() -> str:
    return next((kind for kind in ("cuda", "xpu") if getattr(torch, kind).is_available()), "cpu")
