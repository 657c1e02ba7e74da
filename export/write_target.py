"""A target's checkpoint as target.onnx, compared with the model itself before it is put in place."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from pydflash import __version__
from pydflash.checkpoints.files import few, stored_tensors
from pydflash.checkpoints.sources import target_folder
from pydflash.drafter.rope import frequencies

from .linear import QUANTIZE
from .metadata import FORMAT, TARGET, to_properties, write_description
from .opset import Array
from .staging import Progress, save_model, staged
from .tables import plain, table_of, target_tables
from .write import checksum

Reference = Callable[[Array], tuple[Array, Array | None]]
_BESIDE = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
_SKIPPED = re.compile(r".*rotary_emb\..*")
_TRIAL, _BLOCK = 40, 8  # tokens of the comparison: a prompt, and a block behind it
_MOST_DIFFERENCE = 1e-4


def export_target(
    target: str | Path,
    layer_ids: Sequence[int],
    directory: str | Path,
    *,
    quantize: str | None = None,
    reference: Reference | None = None,
    progress: Progress | None = None,
) -> list[str]:
    """Write target.onnx, target.onnx.data, target.json and the tokenizer's files into a folder.

    Args:
        target: Folder or hub id of a Llama, Mistral, Qwen2 or Qwen3 model, with full attention.
        layer_ids: Decoder layers whose output a drafter reads.
        directory: Made where it is not there; an earlier export in it is replaced.
        quantize: "8bit", "4bit" or "int8" (weights and activations, each row with its own scale), or None.
        reference: The model itself: ids [1, P] to logits [1, P, V] and features [1, P, F * H]. The graph must agree
            with it up to rounding where nothing is quantised.
        progress: As for `export_drafter`.

    Returns: lines of a report.

    Raises: ValueError for a model that the graph does not compute; RuntimeError where the two differ.
    """
    say = progress or (lambda text, done, total: None)
    write = plan_target(target, layer_ids, directory, quantize=quantize, say=say)
    with staged(directory, TARGET, say=say) as part:
        return write(part, reference)


def plan_target(
    target: str | Path, layer_ids: Sequence[int], directory: str | Path, *, quantize: str | None, say: Progress
) -> Callable[[Path, Reference | None], list[str]]:
    """Read and check all that `export_target` needs; what fills a folder, compares with the model, and reports."""
    from .layer_graph import Weights
    from .target_graph import TargetSizes, build_target_graph

    begin = time.perf_counter()
    if quantize not in QUANTIZE:
        raise ValueError(f"export: quantize must be None, '8bit', '4bit' or 'int8', got {quantize!r}")
    folder = target_folder(target, "export")
    check_place(folder, directory)
    say("reading the target", 0, 1)
    stored = {
        name.removeprefix("model."): tensor
        for name, tensor in stored_tensors(folder, lambda name: _SKIPPED.fullmatch(name) is not None)
    }
    read = target_tables(folder, stored["norm.weight"].shape[0] if "norm.weight" in stored else 0)
    sizes = TargetSizes.from_config(read.config)
    found = dict([read.embed, read.head])
    if read.bias is not None:
        found[f"{read.head[0].removesuffix('.weight')}.bias"] = read.bias
    names = sizes.expected(frozenset(stored))
    other = sorted(stored.keys() - names - {name.removeprefix("model.") for name in found} - {"lm_head.weight"})
    if other or (missing := sorted(names - stored.keys())):
        problem = f"no tensors but the graph's, got {few(other)}" if other else f"the tensors {few(missing)}"
        raise ValueError(f"export: {folder}: must hold {problem}")
    if wrong := [i for i in layer_ids if not 0 <= i < sizes.num_layers]:
        raise ValueError(f"export: layer_ids must be in 0..{sizes.num_layers - 1}, got {wrong}")
    turns = frequencies(sizes.rope, sizes.head_dim, sizes.max_position_embeddings)
    embed, head = (table_of(name, found) for name in (read.embed[0], read.head[0]))
    weights = Weights(lambda name: plain(stored[name]), frozenset(names), embed, head, turns[0].numpy(), turns[1])
    metadata = {
        "format": FORMAT,
        "quantize": quantize,
        "target_layer_ids": list(layer_ids),
        "target_layer_convention": "L is the output of decoder layer L, counted from 0",
        "sizes": sizes.to_dict(),
        "embedding_rows": embed.rows,
        "head_rows": head.rows,
        "source_sha256": checksum({name: stored[name] for name in names} | found),
    }
    model = build_target_graph(sizes, weights, tuple(layer_ids), quantize, __version__, to_properties(metadata))
    planning = time.perf_counter() - begin

    def write(part: Path, reference: Reference | None) -> list[str]:
        begin = time.perf_counter()
        save_model(model, part, TARGET, say)
        written = write_description(part, TARGET, metadata)
        told = "not compared"
        if reference is not None:
            say("comparing with the model", 0, 1)
            difference, same = _compare(part, reference, sizes.vocab_size)
            if quantize is None and not difference < _MOST_DIFFERENCE:
                raise RuntimeError(
                    f"export: the graph must compute what the model does, it differs by {difference:.1e}"
                )
            verdict = "good: the same model, up to rounding"
            if quantize is not None:
                verdict = "another model, on purpose: its text is its own"
            told = f"logits and features within {difference:.1e}, {same:.0%} of the best tokens the same, over "
            told += f"{_TRIAL + _BLOCK} random tokens\n                    {verdict}"
        _copy_beside(folder, Path(directory), part)
        seconds = planning + time.perf_counter() - begin
        lines = [f"{directory}: target, {quantize or 'float32'}, {len(model.graph)} nodes, {seconds:.1f} s"]
        lines += [f"  {name:18} {size / 1e6:10.3f} MB" for name, size in written.items()]
        return [*lines, f"  beside the model: {told}"]

    return write


def check_place(target: str | Path, directory: str | Path) -> None:
    """ValueError where the target's files would replace, or be mixed with, those of another checkpoint."""
    folder, source = Path(directory), target_folder(target, "export")
    if folder.resolve() == source.resolve():
        return
    if found := sorted(p.name for p in folder.glob("*") if p.suffix in (".safetensors", ".bin")):
        raise ValueError(
            f"export: directory must hold no other checkpoint beside a target, {folder} holds {few(found)}"
        )
    if left := [name for name in _BESIDE if (folder / name).is_file() and not (source / name).is_file()]:
        raise ValueError(f"export: directory must not hold {few(left)}, which {source} has not, {folder} does")


def _compare(part: Path, reference: Reference, vocab_size: int) -> tuple[float, float]:
    """Largest relative difference of logits and features over a prompt and a block; share of equal best tokens."""
    from .target import OnnxTarget

    onnx = OnnxTarget(part)
    ids = np.random.default_rng(0).integers(0, vocab_size, (1, _TRIAL + _BLOCK))
    cache = onnx.new_cache(1, _TRIAL + _BLOCK)
    pieces = []
    for piece in np.split(ids, [_TRIAL], 1):
        pieces.append(onnx.run(piece, cache, np.arange(piece.shape[1])))
        cache.length += piece.shape[1]
    logits, features = reference(ids)
    got = np.concatenate([piece[0] for piece in pieces], 1)
    pairs = [(got, logits)]
    if features is not None:
        pairs.append((np.concatenate([p[1] for p in pieces if p[1] is not None], 1), features))
    differences = [float(np.linalg.norm(a - b) / np.linalg.norm(b)) for a, b in pairs]
    return max(differences), float((got.argmax(-1) == logits.argmax(-1)).mean())


def _copy_beside(source: Path, folder: Path, part: Path) -> None:
    """What text in and text out need."""
    for name in _BESIDE:
        if (source / name).is_file() and (source / name).resolve() != (folder / name).resolve():
            shutil.copyfile(source / name, part / name)
