"""The drafter on ONNX Runtime: numpy in and out, or torch tensors where those come in; torch is not needed."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pydflash.checkpoints.config import DrafterConfig, check_target
from pydflash.protocols import Proposal

from .draft_cache import DraftCache
from .metadata import DRAFT, SharesSession, dtype_of, named, open_model
from .walk import walk

Array = NDArray[Any]
CHUNK = 512  # context rows of one run; a long prompt takes several


class OnnxDrafter(SharesSession):
    """A drafter that `pydflash export` wrote, with the methods of `pydflash.Drafter`.

    Args:
        folder: Holds draft.json, draft.onnx and draft.onnx.data.
        providers: As `onnxruntime.InferenceSession` takes them; default: the CPU's.
        threads: Of one operator; None lets ONNX Runtime choose.
        session_options: An `onnxruntime.SessionOptions` for anything else.

    Raises: ImportError without onnxruntime; FileNotFoundError or ValueError, naming the file, where files are missing,
    are of different exports, or cannot be loaded.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        providers: Sequence[Any] | None = None,
        threads: int | None = None,
        session_options: Any = None,
    ) -> None:
        self.session, self.metadata = open_model(Path(folder), DRAFT, providers, threads, session_options)
        with named(Path(folder) / DRAFT.description, DRAFT):
            self.config = DrafterConfig.from_dict(self.metadata["config"])
            self.dtype = dtype_of(self.metadata)
        self.inplace = self.metadata["profile"] == "inplace"

    @property
    def providers(self) -> list[str]:
        """What the session runs on, in order of preference."""
        return list(self.session.get_providers())

    @property
    def description(self) -> str:
        """For `stats.backends`."""
        kind = self.metadata["quantize"] or self.metadata["dtype"]
        return f"onnxruntime, {self.providers[0]}, {self.metadata['profile']}, {kind}"

    def check_target(self, *, hidden_size: int, num_layers: int, vocab_size: int, embedding_rows: int) -> None:
        """Raise ValueError, naming the key, where this drafter was not made for such a target."""
        check_target(
            self.config,
            hidden_size=hidden_size,
            num_layers=num_layers,
            vocab_size=vocab_size,
            embedding_rows=embedding_rows,
        )

    def new_cache(self, batch: int, capacity: int) -> DraftCache:
        """An empty context cache for `batch` sequences of up to `capacity` positions; its memory grows with use."""
        return DraftCache(self.session, self.config, batch, capacity, dtype=self.dtype, inplace=self.inplace)

    def append_context(self, features: Any, cache: DraftCache, counts: Any = None) -> None:
        """Take in the target's features of committed positions; they wait for the next `propose`.

        Args:
            features: [B, C, F * target_hidden_size], the positions from `cache.length` on.
            cache: From `new_cache`.
            counts: [B] valid rows of each sequence, all the same number; None for all C.

        Raises: ValueError if the features' width is wrong, the counts differ or the cache is full.
        """
        self._check_cache("append_context", cache)
        width = len(self.config.target_layer_ids) * self.config.target_hidden_size
        array = as_numpy(features)
        if array.ndim != 3 or array.shape[0] != cache.batch or array.shape[2] != width or array.dtype.kind not in "fiu":
            raise ValueError(
                f"append_context: features must be numbers [B, C, {width}], B = {cache.batch} as the cache's, got "
                f"{array.dtype} {list(array.shape)}"
            )
        rows = array.shape[1]
        if counts is not None:
            given = per_row("append_context", "counts", counts, cache.batch, "iu")
            if given.min() != given.max() or not 0 <= given[0] <= rows:
                raise ValueError(
                    f"append_context: counts must be one number from 0 to {rows} for all sequences (such of unequal "
                    f"lengths need a cache each), got {given.tolist()}"
                )
            rows = int(given[0])
        cache.append(array[:, :rows].astype(self.dtype))

    def propose(
        self,
        anchors: Any,
        cache: DraftCache,
        *,
        embed: Any = None,
        head: Any = None,
        block_size: int | None = None,
        temperature: Any = None,
        seeds: Any = 0,
        node_temperature: Any = None,
    ) -> Proposal:
        """Draft one block after each anchor.

        Args:
            anchors: [B] the newest token of each sequence, at position `cache.length`.
            cache: Its context must be complete: the features of every position before the anchor.
            embed: The target's raw embedding table [V, H] or the module that holds it, for a graph exported without.
            head: Not used; the head is in the graph.
            block_size: S, at most the trained block size (the default); S - 1 tokens are drafted.
            temperature: [B] or a number: the path is drawn from softmax(score / T). None: the best edges.
            seeds: [B] or a number, the key of the draws; they are those of `pydflash.Drafter`.
            node_temperature: Also fill `log_normalizers` at this temperature, a number above 0 or [B] (DFlash).

        Returns: a `Proposal`, of arrays or tensors as the anchors were.

        Raises: ValueError if block_size is not 1 .. the trained size, an argument is not what it must be, or `embed`
        is needed.
        """
        config = self.config
        self._check_cache("propose", cache)
        size = config.block_size if block_size is None else block_size
        if not whole(size) or not 1 <= size <= config.block_size:
            raise ValueError(f"propose: block_size must be 1 to {config.block_size} (as trained), got {size!r}")
        ids = self._ids(anchors, cache.batch, embed)
        drawn = weighed = None
        if temperature is not None:
            temperatures = per_row("propose", "temperature", temperature, cache.batch, "fiu").astype(np.float32)
            drawn = temperatures, per_row("propose", "seeds", seeds, cache.batch, "iu").astype(np.int64)
        if node_temperature is not None and config.version == 1:
            weighed = per_row("propose", "node_temperature", node_temperature, cache.batch, "fiu").astype(np.float32)
            if not (weighed > 0).all():
                raise ValueError(f"propose: node_temperature must be above 0, got {weighed.tolist()}")
        starts = np.full(cache.batch, cache.length)
        # Two slots are the fewest that a run has: before 1.31, ONNX Runtime crashes where no slot is left to draft.
        while cache.waiting > CHUNK:
            self._run(ids, cache, 2, CHUNK, embed, [])
        scored = "edge_scores" if config.version == 2 else "cand_scores"
        names = ["draft_ids", "cand_ids", scored]
        if weighed is not None:
            names.append("log_normalizers")
        found = self._run(ids, cache, max(size, 2), cache.waiting, embed, names, weighed)
        tokens, candidates, scores, *rest = [x[:, : size - 1] for x in found]
        probs = None
        if drawn is not None:
            tokens, probs = walk(candidates, scores, *drawn, starts)
        arrays: list[Any] = [tokens, candidates, probs, scores, rest[0] if rest else None]
        proposal = Proposal(*arrays)
        return as_torch(proposal, anchors.device) if hasattr(anchors, "detach") else proposal

    def _check_cache(self, op: str, cache: Any) -> None:
        if not isinstance(cache, DraftCache) or not cache.runs(self.session):
            raise ValueError(f"{op}: cache must be one of this drafter's new_cache, got {type(cache).__name__}")

    def _ids(self, anchors: Any, batch: int, embed: Any) -> Array:
        """The anchors in int64, found to be rows of the tables: a graph would read them from the end, or stop."""
        ids, config = as_numpy(anchors), self.config
        if ids.shape != (batch,):
            raise ValueError(f"propose: anchors must be [{batch}], got {list(ids.shape)}")
        table = getattr(embed, "weight", embed)
        inside = self.metadata["embed"]
        rows = self.metadata.get("embedding_rows") if inside else None if table is None else len(table)
        below = 2**63 if rows is None else rows  # the first exports do not say
        if config.version == 2:
            below = min(below, config.vocab_size)
        if ids.dtype.kind not in "iu" or ids.min() < 0 or ids.max() >= below:
            raise ValueError(f"propose: anchors must be token ids below {below}, got {ids.tolist()}")
        return ids.astype(np.int64)

    def _run(
        self, ids: Array, cache: DraftCache, size: int, rows: int, embed: Any, names: list[str], temperature: Any = None
    ) -> list[Array]:
        """One step over the next `rows` context rows and a block of `size`; the outputs named."""
        config, batch = self.config, cache.batch
        inputs: dict[str, Array] = {"target_hidden": cache.first(rows)}
        block = np.full((batch, size), config.mask_token_id, np.int64)
        block[:, 0] = ids
        if self.metadata["embed"]:
            inputs["input_ids"] = block
        else:
            inputs["inputs_embeds"] = self._rows(block, embed)
            if config.version == 2:
                inputs["anchors"] = ids
        if config.version == 1:
            inputs["temperature"] = np.zeros(batch, np.float32) if temperature is None else temperature
        if self.inplace:
            inputs["past_len"] = np.full(batch, cache.held, np.int64)
        else:
            first = cache.held + np.arange(rows + size)
            inputs["pos_ctx"], inputs["pos_block"] = (
                np.ascontiguousarray(np.broadcast_to(part, (batch, len(part)))) for part in np.split(first, [rows])
            )
        return cache.run(inputs, names, rows, size)

    def _rows(self, block: Array, embed: Any) -> Array:
        table = getattr(embed, "weight", embed)
        if table is None or getattr(table, "is_meta", False):
            raise ValueError("propose: embed must be the target's table: this graph was exported without one")
        used = table[sys.modules["torch"].from_numpy(block)] if hasattr(table, "detach") else table[block]
        return (as_numpy(used) * np.float32(self.config.input_embedding_scale)).astype(self.dtype)


def as_numpy(x: Any) -> Array:
    """A numpy array of an array, a number or a torch tensor; bfloat16 becomes float32."""
    if hasattr(x, "detach"):
        x = x.detach().cpu()
        x = (x.float() if x.is_floating_point() and x.element_size() < 4 else x).numpy()
    return np.asarray(x)


def whole(x: Any) -> bool:
    """An integer of Python's or numpy's."""
    return isinstance(x, int | np.integer) and not isinstance(x, bool)


def per_row(op: str, name: str, value: Any, batch: int, kinds: str) -> Array:
    """[B] of a number or of one number a row, of these kinds of numpy's types."""
    found = as_numpy(value)
    if found.dtype.kind not in kinds or found.shape not in ((), (1,), (batch,)):
        sort = "numbers" if "f" in kinds else "integers"
        raise ValueError(f"{op}: {name} must be {sort}, one or [{batch}], got {value!r}")
    return np.broadcast_to(found, (batch,))


def as_torch(found: Proposal, device: Any) -> Proposal:
    """The same proposal in torch tensors on a device; only for callers that have torch."""
    torch = sys.modules["torch"]
    tensors: list[Any] = [None if x is None else torch.from_numpy(x).to(device) for x in found]
    return Proposal(*tensors)
