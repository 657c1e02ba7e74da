"""The target's embedding table and head, read from its safetensors without the rest of the model."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pydflash.checkpoints.config import DrafterConfig, check_target
from pydflash.checkpoints.files import few, read_json, stored_tensors
from pydflash.checkpoints.sources import target_folder

from .linear import Table
from .opset import Array

_EMBED = re.compile(r"(.*\.)?(embed_tokens|wte|word_embeddings|embed_in|tok_embeddings)\.weight")
_HEAD = re.compile(r"(.*\.)?(lm_head|embed_out)\.(weight|bias)")


def plain(tensor: Tensor) -> Array:
    """A numpy array of a tensor; floating point ones in float32."""
    return (tensor.float() if tensor.is_floating_point() else tensor).detach().cpu().numpy()


def tables(
    target: str | Path | None, config: DrafterConfig, own: dict[str, Tensor]
) -> tuple[Table, Table, dict[str, Tensor]]:
    """The embedding table and the head that a drafter uses, and their tensors under their names.

    Both are the target's, under its names (one table where they are tied), unless the drafter has its own (`own`).
    target: Folder or hub id; None for a drafter with both.

    Raises: ValueError where the drafter was not made for the target, or a table is not to be found.
    """
    found: dict[str, Tensor] = {}
    for name in ("embed_tokens.weight", "lm_head.weight"):
        if name in own:
            found[name] = own[name]
    if len(found) < 2:
        if target is None:
            raise ValueError(
                "export: the target must be given: this drafter has no embedding table and head of its own"
            )
        _, embed, head, bias = _fitting_tables(target, config)
    names = {}
    for key, theirs in (("embed", "embed_tokens.weight"), ("head", "lm_head.weight")):
        if theirs in found:
            names[key] = f"drafter.{theirs}"
            found[names[key]] = found.pop(theirs)
        else:
            names[key], tensor = embed if key == "embed" else head
            found[names[key]] = tensor
            if key == "head" and bias is not None:
                found[f"{names[key].removesuffix('.weight')}.bias"] = bias
    made = [table_of(names[key], found) for key in ("embed", "head")]
    return made[0], made[1], found


def table_of(name: str, found: dict[str, Tensor]) -> Table:
    """The table of that name, and its bias where there is one."""
    bias = found.get(f"{name.removesuffix('.weight')}.bias")
    return Table(name, found[name].shape[0], lambda: plain(found[name]), None if bias is None else lambda: plain(bias))


class TargetTables(NamedTuple):
    """Name and tensor of a target's embedding and of its head (the same where they are tied), and the head's bias.

    config: The content of config.json, of the text model where there are several.
    """

    config: dict[str, Any]
    embed: tuple[str, Tensor]
    head: tuple[str, Tensor]
    bias: Tensor | None


def target_tables(folder: Path, width: int) -> TargetTables:
    """Read the tables of hidden size `width` from a target's folder; ValueError, naming the folder, without them."""
    raw = read_json(folder / "config.json")
    embeds: dict[str, Tensor] = {}
    heads: dict[str, Tensor] = {}
    seen: list[str] = []

    def skip(name: str) -> bool:
        seen.append(name)
        return not (_EMBED.fullmatch(name) or _HEAD.fullmatch(name))

    for name, tensor in stored_tensors(folder, skip):
        (heads if _HEAD.fullmatch(name) else embeds)[name] = tensor
    fitting = {n: t for n, t in embeds.items() if t.dim() == 2 and t.shape[1] == width}
    if not fitting:
        raise ValueError(
            f"export: {folder}: must hold an embedding table [vocabulary, {width}], got {few(sorted(embeds) or seen)}"
        )
    name = min(fitting, key=len)
    text: dict[str, Any] = raw.get("text_config") or raw
    own = {n: t for n, t in heads.items() if n.endswith(".weight")}
    tied = raw.get("tie_word_embeddings", text.get("tie_word_embeddings", True))
    if not tied and not own:
        raise ValueError(f"export: {folder}: must hold lm_head.weight (tie_word_embeddings is false)")
    head = name if tied or not own else min(own, key=len)
    tensor = fitting[name] if head == name else own[head]
    for label, table in ((name, fitting[name]), (head, tensor)):
        if not table.is_floating_point() or table.dtype.itemsize < 2:
            kind = str(table.dtype).removeprefix("torch.")
            raise ValueError(f"export: {folder}: {label} must be a float tensor, not quantised, got {kind}")
    return TargetTables(text, (name, fitting[name]), (head, tensor), heads.get(f"{head.removesuffix('.weight')}.bias"))


def _fitting_tables(target: str | Path, config: DrafterConfig) -> TargetTables:
    """The tables of a target that the drafter was made for."""
    read = target_tables(target_folder(target, "export"), config.target_hidden_size)
    rows, text = read.embed[1].shape[0], read.config
    check_target(
        config,
        hidden_size=int(text.get("hidden_size") or text.get("n_embd") or config.target_hidden_size),
        num_layers=int(text.get("num_hidden_layers") or text.get("n_layer") or 0),
        vocab_size=int(text.get("vocab_size") or rows),
        embedding_rows=rows,
    )
    return read


def modules_of(
    embed: Table, head: Table, found: dict[str, Tensor], dtype: torch.dtype = torch.float32
) -> tuple[Tensor, torch.nn.Module]:
    """The tables as `pydflash.Drafter.propose` takes them."""
    weight = found[head.name].to(dtype)
    linear = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=head.bias is not None, device="meta")
    state = {"weight": weight}
    if head.bias is not None:
        state["bias"] = torch.from_numpy(head.bias()).to(dtype)
    linear.load_state_dict(state, assign=True)
    return found[embed.name].to(dtype), linear
