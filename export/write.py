"""A checkpoint as draft.onnx, compared with the torch drafter before it is put in place."""

from __future__ import annotations

import hashlib
import importlib.util
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pydflash import __version__
from pydflash.checkpoints.checkpoint import load_checkpoint
from pydflash.checkpoints.config import DrafterConfig
from pydflash.drafter.module import Drafter
from pydflash.drafter.rope import frequencies

from .linear import QUANTIZE, Table
from .metadata import DRAFT, describe, to_properties, write_description
from .parity import Parity, compare
from .staging import Progress, save_model, staged
from .tables import modules_of, plain, tables

DTYPES = ("float32", "float16")
_MOST_DIFFERENCE = 1e-4  # of a float32 graph's scores, relative
_LEAST_SAME = 0.9  # of its candidates; near ties may fall either way


@dataclass(frozen=True)
class Report:
    """What was written.

    sizes: Bytes of each file. nodes: Of the graph. parity: None where the CPU cannot run the graph, `unchecked` says
    why. cross_check: Largest relative difference of hidden states from torch.onnx's graph, where asked for.
    """

    folder: Path
    sizes: dict[str, int]
    nodes: int
    parity: Parity | None
    unchecked: str = ""
    cross_check: float | None = None
    seconds: float = 0.0
    metadata: dict[str, Any] = field(default_factory=dict)

    def lines(self) -> list[str]:
        """For people."""
        kind = self.metadata["quantize"] or self.metadata["dtype"]
        found = [f"{self.folder}: profile {self.metadata['profile']}, {kind}, {self.nodes} nodes, {self.seconds:.1f} s"]
        found += [f"  {name:16} {size / 1e6:10.3f} MB" for name, size in self.sizes.items()]
        found.append(f"  beside torch:    {self.unchecked or self.parity}")
        if self.parity is not None:
            found.append(f"                   {self.parity.verdict(kind)}")
        if self.cross_check is not None:
            found.append(f"  beside torch.onnx: hidden states within {self.cross_check:.1e}")
        return found


@dataclass(frozen=True)
class Planned:
    """An export that can be made, as far as this can be known before anything is written.

    write: Fills a folder, compares what is in it with torch, and gives the report.
    """

    metadata: dict[str, Any]
    write: Callable[[Path], Report]


def export_drafter(
    drafter: str | Path,
    target: str | Path | None,
    directory: str | Path,
    *,
    profile: str = "portable",
    dtype: str = "float32",
    quantize: str | None = None,
    embed: bool = True,
    debug_outputs: bool = False,
    cross_check: bool = False,
    progress: Progress | None = None,
) -> Report:
    """Write draft.onnx, draft.onnx.data and draft.json into a folder.

    Args:
        drafter: Checkpoint folder or hub id.
        target: Folder or hub id of the target, for its embedding table and head; None where the drafter has its own.
        directory: Made where it is not there; an earlier export in it is replaced.
        profile: "portable" (opset 23: ONNX Runtime, OpenVINO) or "inplace" (opset 24: ONNX Runtime).
        dtype: "float32", or "float16" for a GPU's provider.
        quantize: "8bit" or "4bit" weights, or "int8" weights and activations, of all but the small projections.
        embed: False: the graph takes embedding rows instead of ids.
        debug_outputs: Also the layers' outputs.
        cross_check: Export through torch.onnx as well, and compare.
        progress: Called with a text, what is done and what there is to do.

    Raises: ValueError for what does not go together; ImportError without a needed package; RuntimeError where the
    graph does not compute what torch does.
    """
    options: dict[str, Any] = {"profile": profile, "dtype": dtype, "quantize": quantize, "embed": embed}
    options |= {"debug_outputs": debug_outputs, "cross_check": cross_check}
    say = progress or (lambda text, done, total: None)
    planned = plan_drafter(drafter, target, directory, **options, say=say)
    with staged(directory, DRAFT, say=say) as part:
        return planned.write(part)


def plan_drafter(
    drafter: str | Path,
    target: str | Path | None,
    directory: str | Path,
    *,
    profile: str,
    dtype: str,
    quantize: str | None,
    embed: bool,
    debug_outputs: bool,
    cross_check: bool,
    say: Progress,
) -> Planned:
    """Read and check all that `export_drafter` needs."""
    from .draft_graph import PROFILES, GraphOptions, build_draft_graph
    from .layer_graph import Weights

    begin = time.perf_counter()
    _check_options(PROFILES, profile, dtype, quantize)
    if cross_check and importlib.util.find_spec("onnxscript") is None:
        raise ImportError("export: --cross-check (cross_check=True) needs onnxscript: pip install onnxscript")
    say("reading the checkpoint", 0, 1)
    if (Path(drafter) / DRAFT.description).is_file() and not list(Path(drafter).glob("*.safetensors")):
        raise ValueError(f"export: drafter must be a checkpoint, got {drafter}, which is an export")
    config, tensors = load_checkpoint(drafter)
    if not embed and (own := sorted(tensors.keys() & {"embed_tokens.weight", "mask_embedding"})):
        raise ValueError(f"export: embed must be True for a drafter with its own {', '.join(own)}, got False")
    embedding, head, found = tables(target, config, tensors)
    options = GraphOptions(
        profile=profile,
        dtype=np.dtype(dtype).type,
        quantize=quantize,
        embed=embed,
        debug_outputs=debug_outputs,
    )
    kept = frequencies(config.rope, config.head_dim, config.max_position_embeddings)
    weights = Weights(
        lambda name: plain(tensors[name]),
        frozenset(tensors),
        embedding if embed else None,
        head,
        kept[0].numpy(),
        kept[1],
    )
    metadata = _metadata(config, options, embedding, head, dtype, checksum(tensors | found))
    model = build_draft_graph(config, weights, options, __version__, to_properties(metadata))
    found_in = modules_of(embedding, head, found)
    planning = time.perf_counter() - begin

    def write(part: Path) -> Report:
        begin = time.perf_counter()
        result: dict[str, Any] = {}
        save_model(model, part, DRAFT, say)
        result["sizes"] = write_description(part, DRAFT, metadata)
        say("comparing with torch", 0, 1)
        torch_drafter = _torch_drafter(config, tensors)
        parity, result["unchecked"] = _parity(part, torch_drafter, found_in, dtype)
        exact = dtype == "float32" and quantize is None
        if parity is not None and exact and not _same(parity):
            raise RuntimeError(f"export: the graph must compute what torch does, got {parity}")
        if cross_check:
            from .cross_check import cross_check_difference

            say("exporting through torch.onnx", 0, 1)
            (part / "check").mkdir()
            result["cross_check"] = cross_check_difference(torch_drafter, weights, __version__, part / "check")
        seconds = planning + time.perf_counter() - begin
        return Report(
            Path(directory), nodes=len(model.graph), parity=parity, seconds=seconds, metadata=metadata, **result
        )

    return Planned(metadata, write)


def _same(parity: Parity) -> bool:
    """Scores are compared where the candidates agree, so these must agree nearly everywhere."""
    close = parity.difference is not None and parity.difference < _MOST_DIFFERENCE
    return close and parity.candidates > _LEAST_SAME


def _check_options(profiles: Mapping[str, int], profile: str, dtype: str, quantize: str | None) -> None:
    if profile not in profiles:
        raise ValueError(f"export: profile must be one of {', '.join(map(repr, profiles))}, got {profile!r}")
    if dtype not in DTYPES:
        why = "; ONNX Runtime's CPU provider has no bfloat16 attention" if dtype == "bfloat16" else ""
        raise ValueError(f"export: dtype must be 'float32', or 'float16' for a GPU's provider{why}, got {dtype!r}")
    if quantize not in QUANTIZE:
        raise ValueError(f"export: quantize must be None, '8bit', '4bit' or 'int8', got {quantize!r}")
    if quantize is not None and dtype != "float32":
        raise ValueError(f"export: dtype must be 'float32' where quantize is {quantize!r}, got {dtype!r}")


def _metadata(
    config: DrafterConfig, options: Any, embedding: Table, head: Table, dtype: str, source: str
) -> dict[str, Any]:
    return describe(
        config,
        profile=options.profile,
        dtype=dtype,
        quantize=options.quantize,
        embed=options.embed,
        embedding_initializer=embedding.name if options.embed else None,
        embedding_rows=embedding.rows if options.embed else None,
        head_initializer=head.name,
        source_sha256=source,
    )


def checksum(tensors: Mapping[str, Tensor]) -> str:
    """Over names, types, shapes and bytes of a checkpoint's tensors."""
    total = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        total.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        total.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return total.hexdigest()


def _torch_drafter(config: DrafterConfig, tensors: dict[str, Tensor]) -> Drafter:
    drafter = Drafter(config, backend="reference")
    drafter.load_canonical(dict(tensors))
    return drafter.float().eval()


def _parity(part: Path, drafter: Drafter, modules: tuple[Any, Any], dtype: str) -> tuple[Parity | None, str]:
    from .drafter import OnnxDrafter

    try:
        onnx = OnnxDrafter(part)
    except (ImportError, ValueError) as error:
        if isinstance(error, ValueError) and dtype == "float32":
            raise
        return None, f"not compared ({error})"
    return compare(onnx, drafter, *modules), ""
