"""Drafter checkpoints: config.json with safetensors, read strictly and written back bit for bit.

In memory the tensors have the names of the Z-Lab layout: q/k/v and gate/up apart, bare codebook names.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor

from ..progress import advance, step
from .config import LAYOUTS, DrafterConfig
from .files import (
    MASK_EMBEDDING,
    WEIGHTS,
    few,
    read_json,
    read_mask_embedding,
    read_tensors,
    refuse,
    stored_headers,
    write_file,
)
from .keys import drafter_version
from .sources import drafter_folder

_FLOATS = ("float32", "bfloat16", "float16", "float64")
_TABLES = ("embed_tokens.weight", "lm_head.weight", "mask_embedding")  # may be of another dtype than the layers

_RENAMED = (("encoder.fc.", "fc."), ("encoder.output_norm_enc.", "hidden_norm."), ("midlayer.", "layers.0."))
_CODEBOOK = re.compile(r"candidate_selector\.(predecessor|successor)_codebook\.weight")
_FUSED = re.compile(r"(layers\.\d+\.(?:self_attn|mlp)\.)(qkv_proj|gate_up_proj)(\.weight|\.bias)")
_SKIPPED = re.compile(r".*rotary_emb\..*|(model\.)?verifier_(lm_head|norm)\..*")  # buffers; the target's own tensors


def expected_tensors(config: DrafterConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that a checkpoint of `config` must have.

    Linear weights are [out, in]. `embed_tokens.weight`, `lm_head.weight` and `d2t` are among them only where
    the target's cannot serve: another hidden size, or a reduced vocabulary.
    """
    hidden, width = config.hidden_size, config.intermediate_size
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, len(config.target_layer_ids) * config.target_hidden_size),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    projections = {"q_proj": (queries, hidden), "k_proj": (keys, hidden), "v_proj": (keys, hidden)}
    projections["o_proj"] = (hidden, queries)
    taps = config.conv_kernel_size
    for layer in (f"layers.{i}." for i in range(config.num_layers)):
        for name in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{layer}{name}.weight"] = (hidden,)
        for name, shape in projections.items():
            shapes[f"{layer}self_attn.{name}.weight"] = shape
            if config.attention_bias:
                shapes[f"{layer}self_attn.{name}.bias"] = shape[:1]
        for name in ("q_norm", "k_norm"):
            shapes[f"{layer}self_attn.{name}.weight"] = (config.head_dim,)
        for name in ("gate_proj", "up_proj"):
            shapes[f"{layer}mlp.{name}.weight"] = (width, hidden)
        shapes[f"{layer}mlp.down_proj.weight"] = (hidden, width)
        for name in ("attention_conv", "mlp_conv") if config.version == 2 else ():
            groups = hidden // config.conv_group_size
            shapes[f"{layer}{name}.base_kernel"] = (2, taps, hidden)
            shapes[f"{layer}{name}.kernel_projection.weight"] = (2 * taps * groups, hidden)
    if config.version == 2:
        for name in ("predecessor_codebook", "successor_codebook"):
            shapes[f"candidate_selector.{name}"] = (config.vocab_size, config.selector_rank)
        shapes["candidate_selector.hidden_projection.weight"] = (config.selector_rank, hidden)
    optional = _optional_tensors(config)
    needed = ["embed_tokens.weight", "lm_head.weight"] if hidden != config.target_hidden_size else []
    needed += ["lm_head.weight", "d2t"] if config.draft_vocab_size != config.vocab_size else []
    return shapes | {name: optional[name] for name in needed}


class _Spec(NamedTuple):
    """What is known of a tensor before it is read. dtype: In torch's words."""

    shape: tuple[int, ...]
    dtype: str


def load_checkpoint(
    path_or_id: str | os.PathLike[str], *, revision: str | None = None, **hub: Any
) -> tuple[DrafterConfig, dict[str, Tensor]]:
    """Read a drafter from a local folder or, for an id "owner/name", from the Hugging Face hub.

    "smollm2" is the drafter that comes with the package.
    `hub`: `token`, `cache_dir`, `local_files_only`, `force_download`.
    Returns the config and the tensors on the CPU under their Z-Lab names, in the dtypes of the files; with
    them, where the drafter has its own: `embed_tokens.weight` [V, H], `lm_head.weight` [V_d, H], `d2t` int64
    [V_d] (target id = draft id + d2t[draft id]) and `mask_embedding` [H].
    Shapes and dtypes are held against the config before a tensor is read, values are checked to be finite.
    Raises FileNotFoundError for a missing file and ValueError for everything else that does not fit: it names
    the file and the key or the tensors, what was expected and what was found.
    """
    folder = drafter_folder(path_or_id, revision, **hub)
    path = folder / "config.json"
    raw = read_json(path)
    try:
        config = DrafterConfig.from_dict(raw)
    except ValueError as error:
        raise ValueError(f"load_checkpoint: {path}: {error}") from error
    headers = stored_headers(folder, lambda name: _SKIPPED.fullmatch(name) is not None)
    specs: dict[str, _Spec] = {}
    parts: dict[str, list[str]] = {}
    origins: dict[str, str] = {}
    for origin, header in headers.items():
        for name, shape in _canonical(config, origin, header.shape):
            if name == "mask_embedding":
                refuse(folder, f"the mask embedding must be in {MASK_EMBEDDING}, got the tensor {origin}")
            if name in specs:
                refuse(folder, f"{name} is stored twice, as {origins[name]} and as {origin}")
            specs[name], origins[name] = _Spec(shape, header.dtype), origin
            parts.setdefault(origin, []).append(name)
    own: dict[str, Tensor] = {}
    if (path := folder / MASK_EMBEDDING).exists():
        own["mask_embedding"] = read_mask_embedding(path, config.mask_token_id, config.hidden_size)
    specs |= {name: _spec(tensor) for name, tensor in own.items()}
    specs.pop("t2d", None)
    _check_specs("load_checkpoint", str(folder), config, specs)
    _check_plain("load_checkpoint", str(folder), own)
    with step("reading the drafter", len(headers)):
        for origin, tensor in read_tensors(folder, headers):
            names = parts[origin]
            pieces = [tensor] if len(names) == 1 else tensor.split([specs[name].shape[0] for name in names])
            own |= dict(zip(names, pieces, strict=True))
            advance("reading the drafter", 1)
    t2d = own.pop("t2d", None)
    if "d2t" in own and config.draft_vocab_size == config.vocab_size and not own["d2t"].any():
        del own["d2t"]  # the identity
    if "d2t" in own:
        own["d2t"] = own["d2t"].to(torch.int64)
    _check_values("load_checkpoint", str(folder), own)
    _check_vocabulary_map("load_checkpoint", str(folder), config, own.get("d2t"), t2d)
    return config, own


def save_checkpoint(
    directory: str | os.PathLike[str],
    config: DrafterConfig,
    tensors: Mapping[str, Tensor],
    *,
    layout: str = "zlab",
) -> None:
    """Write config.json, model.safetensors and, where there is one, mask_embedding.pt into `directory`.

    `tensors` are named as `load_checkpoint` returns them and keep their dtypes. `layout`: "zlab" or
    "speculators". An earlier drafter in the folder is replaced, each file in one step; a folder that holds
    another model is refused. Raises ValueError for tensors that do not fit `config`.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"save_checkpoint: layout must be 'zlab' or 'speculators', got {layout!r}")
    folder = Path(directory)
    _check_specs("save_checkpoint", "tensors", config, {name: _spec(tensor) for name, tensor in tensors.items()})
    _check_plain("save_checkpoint", "tensors", tensors)
    _check_values("save_checkpoint", "tensors", tensors)
    _check_vocabulary_map("save_checkpoint", "tensors", config, tensors.get("d2t"), None)
    _refuse_other_model(folder)
    stored = _ready_to_write({name: t for name, t in tensors.items() if name != "mask_embedding"})
    if layout == "speculators" and (d2t := stored.get("d2t")) is not None:
        t2d = torch.zeros(config.vocab_size, dtype=torch.bool)
        t2d[torch.arange(config.draft_vocab_size) + d2t] = True
        stored["t2d"] = t2d
    raw = config.to_dict(layout) | {"dtype": str(tensors["fc.weight"].dtype).removeprefix("torch.")}
    folder.mkdir(parents=True, exist_ok=True)
    write_file(folder / WEIGHTS, lambda path: save_file(stored, path, metadata={"format": "pt"}))
    if (embedding := tensors.get("mask_embedding")) is not None:
        side = {"mask_token_id": config.mask_token_id, "embedding": embedding.detach().cpu().clone()}
        write_file(folder / MASK_EMBEDDING, lambda path: torch.save(side, path))
    else:
        (folder / MASK_EMBEDDING).unlink(missing_ok=True)
    write_file(
        folder / "config.json",
        lambda path: path.write_text(json.dumps(raw, indent=2) + "\n", encoding="utf-8"),
    )


def _optional_tensors(config: DrafterConfig) -> dict[str, tuple[int, ...]]:
    return {
        "embed_tokens.weight": (config.vocab_size, config.hidden_size),
        "lm_head.weight": (config.draft_vocab_size, config.hidden_size),
        "d2t": (config.draft_vocab_size,),
        "mask_embedding": (config.hidden_size,),
    }


def _canonical(config: DrafterConfig, origin: str, shape: tuple[int, ...]) -> list[tuple[str, tuple[int, ...]]]:
    """Z-Lab name and shape of a stored tensor; of a fused one those of its parts, unless its rows do not add up."""
    name = origin.removeprefix("model.")
    for old, new in _RENAMED:
        if name.startswith(old):
            name = new + name[len(old) :]
    if _CODEBOOK.fullmatch(name):
        name = name.removesuffix(".weight")
    if (fused := _FUSED.fullmatch(name)) is None:
        return [(name, shape)]
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    rows = {"q_proj": queries, "k_proj": keys, "v_proj": keys}
    if fused[2] == "gate_up_proj":
        rows = dict.fromkeys(("gate_proj", "up_proj"), config.intermediate_size)
    if not shape or shape[0] != sum(rows.values()):
        raise ValueError(
            f"load_checkpoint: {origin}: must have {sum(rows.values())} rows ({' + '.join(rows)}), "
            f"got shape {list(shape)}"
        )
    return [(fused[1] + part + fused[3], (count, *shape[1:])) for part, count in rows.items()]


def _spec(tensor: Tensor) -> _Spec:
    return _Spec(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))


def _check_specs(op: str, where: str, config: DrafterConfig, specs: Mapping[str, _Spec]) -> None:
    """Names, shapes and dtypes; one floating dtype for all but the tables."""
    required = expected_tensors(config)
    shapes = _optional_tensors(config) | required
    missing = [name for name in required if name not in specs]
    unknown = [f"{name} {list(spec.shape)}" for name, spec in specs.items() if name not in shapes]
    shape, dtype = [], []
    common = specs["fc.weight"].dtype if "fc.weight" in specs else ""
    for name, spec in specs.items():
        if name not in shapes:
            continue
        if spec.shape != shapes[name]:
            note = ""
            if name == "fc.weight":
                count, width = len(config.target_layer_ids), config.target_hidden_size
                note = f" ({count} target_layer_ids x hidden size {width} = {count * width} columns)"
            shape.append(f"{name} must be {list(shapes[name])}{note}, got {list(spec.shape)}")
        if spec.dtype not in (("int64", "int32") if name == "d2t" else _FLOATS):
            kind = "int64" if name == "d2t" else "float32, bfloat16 or float16"
            dtype.append(f"{name} must be {kind}, got {spec.dtype}")
        elif (
            name != "d2t"
            and common in _FLOATS
            and spec.dtype != common
            and (name not in _TABLES or "float64" in (spec.dtype, common))
        ):
            dtype.append(f"{name} must be {common} as fc.weight is, got {spec.dtype}")
    _report(
        op,
        where,
        {"missing tensors": missing, "unexpected tensors": unknown, "wrong shapes": shape, "wrong dtypes": dtype},
    )


def _check_plain(op: str, where: str, tensors: Mapping[str, Tensor]) -> None:
    odd = []
    for name, tensor in tensors.items():
        if type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.layout != torch.strided:
            odd.append(f"{name} must be a plain tensor, got {type(tensor).__name__} ({tensor.layout})")
        elif tensor.is_meta:
            odd.append(f"{name} must hold values, got a meta tensor")
    _report(op, where, {"wrong kinds": odd})


def _check_values(op: str, where: str, tensors: Mapping[str, Tensor]) -> None:
    """The extremes of a tensor are finite where all its values are: NaN goes through them, and no copy is made."""
    names = [n for n, t in tensors.items() if t.is_floating_point() and t.numel()]
    bad = [n for n in names if not all(e.isfinite() for e in torch.aminmax(tensors[n].detach()))]
    _report(op, where, {"tensors that must be finite, got NaN or infinity": bad})


def _report(op: str, where: str, problems: Mapping[str, list[str]]) -> None:
    """Raise one ValueError with all problems; nothing where there are none."""
    told = [f"{title} ({len(names)}): {few(names)}" for title, names in problems.items() if names]
    if told:
        raise ValueError(f"{op}: {where}: " + "; ".join(told))


def _check_vocabulary_map(op: str, where: str, config: DrafterConfig, d2t: Tensor | None, t2d: Tensor | None) -> None:
    """d2t must name different target ids, and t2d, its other half in a file, must mark just those."""
    kept, size = config.draft_vocab_size, config.vocab_size
    if d2t is not None and kept == size:
        raise ValueError(f"{op}: {where}: d2t must be absent or zero where draft_vocab_size is vocab_size {size}")
    if d2t is None and t2d is None:
        return  # and no table as long as a vocabulary that no tensor has vouched for
    if t2d is not None and (tuple(t2d.shape) != (size,) or t2d.dtype != torch.bool):
        raise ValueError(f"{op}: {where}: t2d must be bool [{size}], got {t2d.dtype} {list(t2d.shape)}")
    ids = torch.arange(kept) if d2t is None else torch.arange(kept) + d2t.cpu()
    different = ids.unique().numel()
    if ids.min() < 0 or ids.max() >= size or different != kept:
        raise ValueError(
            f"{op}: {where}: d2t must hold offsets to {kept} different target ids from 0 to {size - 1}, "
            f"got {different} different ids from {int(ids.min())} to {int(ids.max())}"
        )
    if t2d is None:
        return
    if int(t2d.sum()) != kept or not t2d[ids].all():
        marks = f"{int(t2d.sum())} marks, {int(t2d[ids].sum())} of them right"
        raise ValueError(f"{op}: {where}: t2d must mark the {kept} target ids of the drafter, got {marks}")


def _ready_to_write(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """On the CPU, contiguous, and no two in one storage: safetensors refuses shared memory."""
    ready: dict[str, Tensor] = {}
    storages: set[int] = set()
    for name, tensor in tensors.items():
        plain = tensor.detach().cpu().contiguous()
        if plain.untyped_storage().data_ptr() in storages:
            plain = plain.clone()
        storages.add(plain.untyped_storage().data_ptr())
        ready[name] = plain.to(torch.int64) if name == "d2t" else plain
    return ready


def _refuse_other_model(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"save_checkpoint: directory must be a folder, got the file {folder}")
    found = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    foreign = [n for n in found if n.endswith((".safetensors", ".safetensors.index.json", ".bin")) and n != WEIGHTS]
    if "config.json" in found:
        try:
            drafter_version(read_json(folder / "config.json"))
        except ValueError:
            foreign.append("config.json")
    elif WEIGHTS in found:
        foreign.append(WEIGHTS)
    if foreign:
        expected = "a new folder or one with a drafter that was saved there before"
        raise ValueError(f"save_checkpoint: directory must be {expected}, {folder} holds {few(foreign)}")
