"""Drafters written by `pydflash.export` into temporary folders, with the tables they were written with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from pairs import HIDDEN, TARGET_LAYERS, VOCAB
from safetensors.torch import save_file
from torch import nn

from pydflash import Drafter

Arrays = dict[str, Any]


class Exported(NamedTuple):
    """A drafter, its export, and the target's tables."""

    folder: Path
    drafter: Drafter
    table: torch.Tensor
    head: nn.Linear


def write_target(folder: Path, tied: bool = False, rows: int = VOCAB, **changes: Any) -> tuple[torch.Tensor, nn.Linear]:
    """What `pydflash export` reads of a target: config.json and the two tables; `rows` may be padded."""
    generator = torch.Generator().manual_seed(5)
    table = torch.randn(rows, HIDDEN, generator=generator) * 0.4
    head = nn.Linear(HIDDEN, rows, bias=False)
    head.weight = nn.Parameter(table if tied else torch.randn(rows, HIDDEN, generator=generator) * 0.4)
    tensors = {"model.embed_tokens.weight": table, "model.norm.weight": torch.ones(HIDDEN)}
    if not tied:
        tensors["lm_head.weight"] = head.weight.detach()
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    raw = {"hidden_size": HIDDEN, "num_hidden_layers": TARGET_LAYERS, "vocab_size": VOCAB, "tie_word_embeddings": tied}
    (folder / "config.json").write_text(json.dumps(raw | changes))
    return table, head


def export(work: Path, drafter: Drafter, *, tied: bool = False, rows: int = VOCAB, **options: Any) -> Exported:
    """Write a drafter and a target into `work`, and the export into a folder named after its options."""
    from pydflash.export import export_drafter

    table, head = write_target(work / "target", tied, rows)
    drafter.save_pretrained(work / "drafter")
    folder = work / ("-".join(f"{v}" for v in options.values()) or "export")
    export_drafter(work / "drafter", work / "target", folder, **options)
    return Exported(folder, drafter, table, head)


def feed_of(
    found: Exported, profile: str, batch: int, rows: int, past: int, slots: int, seed: int = 0, most: int = 0
) -> tuple[Arrays, Arrays]:
    """Inputs of the graph for a random context of past + rows positions, and what torch makes of it.

    most: Rows of the buffers of the inplace profile.
    """
    drafter, config = found.drafter, found.drafter.config
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(batch, past + rows, drafter.fc.in_features, generator=generator)
    anchors = torch.randint(0, VOCAB, (batch,), generator=generator)
    ids = torch.full((batch, slots), config.mask_token_id)
    ids[:, 0] = anchors
    length = past + rows
    with torch.inference_mode():
        drafter.reserve(length + config.block_size)
        positions = torch.arange(length).expand(batch, -1)
        k, v = drafter.context_keys(drafter.fuse(features), positions)
        cache = drafter.new_cache(batch, length + 1)
        if length:
            drafter.append_context(features, cache)
        want: Arrays = {"hidden": drafter.hidden(anchors, cache, found.table, slots), "k": k, "v": v}
        tables = {"embed": found.table, "head": found.head}
        want |= drafter.propose(anchors, cache, **tables, block_size=slots, node_temperature=0.7)._asdict()
    feed: Arrays = {"input_ids": ids.numpy(), "target_hidden": features[:, past:].numpy()}
    if config.version == 1:
        feed["temperature"] = np.full(batch, 0.7, np.float32)
    if profile == "inplace":
        feed["past_len"] = np.full(batch, past)
    else:
        at = np.broadcast_to(np.arange(past, length + slots), (batch, rows + slots))
        feed["pos_ctx"], feed["pos_block"] = (np.ascontiguousarray(part) for part in np.split(at, [rows], 1))
    held = most if profile == "inplace" else past
    for layer in range(config.num_layers):
        for name, values in (("k", k), ("v", v)):
            buffer = np.full(
                (batch, config.num_kv_heads, held, config.head_dim), 3.0, np.float32
            )  # scratch is not read
            buffer[:, :, :past] = values[layer, :, :, :past]
            feed[f"past.{layer}.{name}"] = buffer
    return feed, {name: None if x is None else x.numpy() for name, x in want.items()}


def session_of(folder: Path) -> Any:
    """An ONNX Runtime session on one thread."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(str(folder / "draft.onnx"), options, providers=["CPUExecutionProvider"])


def run(session: Any, feed: Arrays) -> Arrays:
    """All outputs by name."""
    return dict(zip([o.name for o in session.get_outputs()], session.run(None, feed), strict=True))
