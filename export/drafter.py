"""The drafter on ONNX Runtime: numpy in and out, or torch tensors where those come in; torch is not needed."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pydflash.config import DrafterConfig, check_target

from .draft_cache import DraftCache
from .metadata import DRAFT, SharesSession, dtype_of, open_model
from .walk import walk

Array = NDArray[Any]
CHUNK = 512  # context rows of one run; a long prompt takes several


class Proposal(NamedTuple):
    """One block of drafts; arrays of the kind that the anchors were.

    Attributes:
        tokens: [B, S-1] int64, the path.
        candidates: [B, S-1, K] int64 per slot, best first.
        probs: [B, S-1, K] float32, the law the path was drawn from, or None where it is greedy.
        scores: [B, S-1, K, K] edge scores (previous candidate, candidate), or [B, S-1, K] for DFlash.
        log_normalizers: [B, S-1] float32 logsumexp of each slot's logits / T, for DFlash and where asked for.
    """

    tokens: Any
    candidates: Any
    probs: Any
    scores: Any
    log_normalizers: Any = None


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
        width = len(self.config.target_layer_ids) * self.config.target_hidden_size
        shape = list(features.shape)
        if len(shape) != 3 or shape[0] != cache.batch or shape[2] != width:
            raise ValueError(
                f"append_context: features must be [B, C, {width}], B = {cache.batch} as the cache's, got {shape}"
            )
        rows = shape[1]
        if counts is not None:
            given = np.broadcast_to(as_numpy(counts), (cache.batch,))
            if given.min() != given.max() or not 0 <= given[0] <= rows:
                raise ValueError(
                    f"append_context: counts must be one number from 0 to {rows} for all rows, got {given.tolist()}"
                )
            rows = int(given[0])
        cache.append(as_numpy(features[:, :rows]).astype(self.dtype))

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
        normalizers: Any = None,
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
            normalizers: Also fill `log_normalizers` at this temperature, a number above 0 or [B] (DFlash).

        Returns: a `Proposal`.

        Raises: ValueError if block_size is not 1 .. the trained size, or `embed` is needed.
        """
        config = self.config
        size = config.block_size if block_size is None else block_size
        if not 1 <= size <= config.block_size:
            raise ValueError(f"propose: block_size must be 1 to {config.block_size} (as trained), got {size}")
        ids = as_numpy(anchors)
        if ids.shape != (cache.batch,):
            raise ValueError(f"propose: anchors must be [{cache.batch}], got {list(ids.shape)}")
        if ids.dtype.kind not in "iu" or ids.min() < 0:  # a graph would read the table from its end
            raise ValueError(f"propose: anchors must be token ids, got {ids.tolist()}")
        ids = ids.astype(np.int64)
        starts = np.full(cache.batch, cache.length)
        # Two slots are the fewest that a run has: before 1.31, ONNX Runtime crashes where no slot is left to draft.
        while cache.waiting > CHUNK:
            self._run(ids, cache, 2, CHUNK, embed, [])
        scored = "edge_scores" if config.version == 2 else "cand_scores"
        names = ["draft_ids", "cand_ids", scored]
        heat = None
        if normalizers is not None and config.version == 1:
            names.append("log_normalizers")
            heat = np.full(cache.batch, as_numpy(normalizers), np.float32)
        found = self._run(ids, cache, max(size, 2), cache.waiting, embed, names, heat)
        tokens, candidates, scores, *rest = [x[:, : size - 1] for x in found]
        probs = None
        if temperature is not None:
            given = [np.broadcast_to(as_numpy(x), (cache.batch,)) for x in (temperature, seeds)]
            tokens, probs = walk(candidates, scores, given[0].astype(np.float32), given[1].astype(np.int64), starts)
        proposal = Proposal(tokens, candidates, probs, scores, rest[0] if rest else None)
        return as_torch(proposal, anchors.device) if hasattr(anchors, "detach") else proposal

    def _run(
        self, ids: Array, cache: DraftCache, size: int, rows: int, embed: Any, names: list[str], heat: Any = None
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
            inputs["temperature"] = np.zeros(batch, np.float32) if heat is None else heat
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


def as_torch(found: Proposal, device: Any) -> Proposal:
    """The same proposal in torch tensors on a device; only for callers that have torch."""
    torch = sys.modules["torch"]
    return Proposal(*(None if x is None else torch.from_numpy(x).to(device) for x in found))
