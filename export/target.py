"""A target on ONNX Runtime, with the methods of `pydflash.Target` that the loop calls."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pydflash.protocols import TargetOutput

from .metadata import POSITIONS, TARGET, SharesSession, named, open_model
from .target_cache import BufferCache

Array = NDArray[Any]
_SIZES = ("hidden_size", "num_layers", "num_kv_heads", "head_dim", "max_position_embeddings")
CHUNK = 512  # tokens of one run; a long prompt takes several


class GenerationConfig:
    """generation_config.json as it stands, in the form that transformers gives it."""

    def __init__(self, content: dict[str, Any]) -> None:
        self._content = content

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._content.get(name)

    def to_diff_dict(self) -> dict[str, Any]:
        return dict(self._content)


class OnnxTarget(SharesSession):
    """A target that `pydflash export --with-target` wrote: attention in place, no torch in its forwards.

    `run` takes and gives numpy arrays, for hosts without torch; `Speculator` calls the methods below it.

    Args:
        folder: Holds target.json, target.onnx and target.onnx.data.
        threads: Of one operator; None lets ONNX Runtime choose.
        even: Run a single token in two rows. One row alone takes other kernels, whose rounding differs, and quantised
            activations make much of it: with `even` a token's logits do not depend on how many went through
            together, and greedy text is the same with and without drafts. Off, plain decoding is 5 to 20 % faster.
        session_options: An `onnxruntime.SessionOptions` for anything else.

    Raises: ImportError without onnxruntime; FileNotFoundError or ValueError, naming the file, for what is wrong there.
    """

    def __init__(
        self, folder: str | Path, *, threads: int | None = None, even: bool = True, session_options: Any = None
    ) -> None:
        # On the CPU only: a commit moves rows of the buffers on the host.
        self.session, self.metadata = open_model(Path(folder), TARGET, None, threads, session_options)
        with named(Path(folder) / TARGET.description, TARGET):
            sizes = {name: int(self.metadata["sizes"][name]) for name in _SIZES}
            self.layer_ids = tuple(map(int, self.metadata["target_layer_ids"]))
            self._rows, self.vocab_size = int(self.metadata["embedding_rows"]), int(self.metadata["head_rows"])
        self._sizes = sizes
        self.hidden_size, self.num_layers = sizes["hidden_size"], sizes["num_layers"]
        self.max_length: int | None = min(sizes["max_position_embeddings"], POSITIONS)
        self.generation_config = GenerationConfig(_object_in(Path(folder) / "generation_config.json"))
        self.even = even
        self._closed = False

    # --- for hosts without torch ------------------------------------------------------------------------------

    def run(
        self, ids: Array, cache: BufferCache, rows: Array, depths: Array | None = None, visible: Array | None = None
    ) -> tuple[Array, Array | None]:
        """One forward over a block behind the committed positions.

        Args:
            ids: [1, S] integers.
            cache: From `new_cache`; its buffers take the block's keys and values, uncommitted.
            rows: [N] slots whose logits are wanted.
            depths, visible: [1, S] int64 and [1, S, S] bool of a tree; None for a chain.

        Returns: logits [1, N, V] and features [1, S, F * H] (None without tapped layers).

        Raises: ValueError for what is not of these shapes, no ids of the table, or beyond the model's positions.
        """
        ids = self._ids("run", ids, cache, None if depths is None else int(np.max(depths)) + 1)
        rows = np.asarray(rows)
        if rows.ndim != 1 or rows.dtype.kind not in "iu" or not ((rows >= 0) & (rows < ids.shape[1])).all():
            raise ValueError(f"run: rows must be [N] slots from 0 to {ids.shape[1] - 1}, got {rows.tolist()}")
        wanted = slots = ids.shape[1]
        if slots == 1 and self.even:
            ids, slots = np.repeat(ids, 2, 1), 2  # the second row sees itself, and nobody sees it
            depths, visible = np.zeros((1, 2), np.int64), np.eye(2, dtype=np.bool_)[None]
        cache.reserve(cache.length + slots)
        binding = self.session.io_binding()
        inputs = {
            "input_ids": ids,
            "depths": np.arange(slots)[None] if depths is None else depths,
            "past_len": np.array([cache.length]),
            "rows": rows.astype(np.int64),
            "visible": np.tri(slots, dtype=np.bool_)[None] if visible is None else visible,
        }
        for name, array in inputs.items():
            binding.bind_cpu_input(name, np.ascontiguousarray(array))
        names = ["logits", *(["features"] if self.layer_ids else [])]
        for name in names:
            binding.bind_output(name)
        for name, value in zip(cache.names, cache.values, strict=True):
            binding.bind_ortvalue_input(f"past.{name}", value)
            binding.bind_ortvalue_output(f"present.{name}", value)
        self.session.run_with_iobinding(binding)
        found = [value.numpy() for value in binding.get_outputs()[: len(names)]]
        return found[0], found[1][:, :wanted] if len(found) > 1 else None

    # --- for the loop -----------------------------------------------------------------------------------------

    @property
    def device(self) -> Any:
        return sys.modules["torch"].device("cpu")

    @property
    def dtype(self) -> Any:
        return sys.modules["torch"].float32

    @property
    def embed_weight(self) -> Any:
        """The shape of the embedding table, without its values: they are in the graph."""
        return sys.modules["torch"].empty(self._rows, self.hidden_size, device="meta")

    @property
    def head(self) -> None:
        """The head is in the graph."""

    def new_cache(self, batch: int, capacity: int) -> BufferCache:
        """An empty cache. batch: must be 1. capacity: not allocated at once; buffers grow with use."""
        if batch != 1 or not isinstance(capacity, int | np.integer) or capacity < 1:
            raise ValueError(f"new_cache: batch must be 1 and capacity at least 1, got {batch!r} and {capacity!r}")
        return BufferCache(self.num_layers, self._sizes["num_kv_heads"], self._sizes["head_dim"])

    def prefill(self, ids: Any, cache: BufferCache) -> TargetOutput:
        """Run the next tokens [1, P] and commit them: logits [1, 1, V] of the last, features [1, P, F * H]."""
        tokens = self._tokens("prefill", ids, cache)
        features: list[Array] = []
        for first in range(0, tokens.shape[1], CHUNK):
            part = tokens[:, first : first + CHUNK]
            logits, found = self.run(part, cache, np.array([part.shape[1] - 1]))
            cache.length += part.shape[1]
            features += [] if found is None else [found]
        return self._output(logits, np.concatenate(features, 1) if features else None)

    def verify(self, tokens: Any, cache: BufferCache, tree: Any = None) -> TargetOutput:
        """Run a block [1, S] without committing it: logits [1, S, V] and features; `commit` must follow."""
        ids = self._tokens("verify", tokens, cache, None if tree is None else int(tree.depths.max()) + 1)
        slots = ids.shape[1]
        depths = visible = None
        if tree is not None:
            depths = tree.depths.numpy().astype(np.int64)
            bits = tree.visibility.numpy().astype(np.int64)[:, :, None]
            visible = (bits >> np.arange(slots) & 1).astype(np.bool_)
        logits, features = self.run(ids, cache, np.arange(slots), depths, visible)
        cache.open = slots
        return self._output(logits, features)

    def commit(self, cache: BufferCache, index: Any, num_accepted: Any) -> None:
        """Keep the anchor and the accepted drafts of the verified block: index [1, S], -1 padded; num_accepted [1]."""
        if not cache.open:
            raise ValueError("commit: cache must hold a block from verify, got none")
        cache.commit(index[0, : int(num_accepted) + 1].tolist())

    def check_trees(self) -> None:
        """Trees are part of the graph: every slot has its own position and row of the mask."""

    def close(self) -> None:
        """End the use of this target."""
        self._closed = True

    def _tokens(self, op: str, tokens: Any, cache: BufferCache, deep: int | None = None) -> Array:
        if not isinstance(cache, BufferCache):
            raise ValueError(f"{op}: cache must be one of new_cache, got {type(cache).__name__}")
        if self._closed:
            raise ValueError(f"{op}: target must be open, got one after close()")
        if cache.open:
            raise ValueError(f"{op}: cache must have its verified block committed first, got an open block")
        return self._ids(op, tokens.numpy() if hasattr(tokens, "detach") else tokens, cache, deep)

    def _ids(self, op: str, tokens: Any, cache: BufferCache, deep: int | None) -> Array:
        """Tokens [1, S] in int64, found to be rows of the table: a graph would read it from its end, or stop."""
        ids = np.asarray(tokens)
        if ids.ndim != 2 or ids.shape[0] != 1 or ids.shape[1] < 1 or ids.dtype.kind not in "iu":
            raise ValueError(f"{op}: tokens must be integers [1, S], S at least 1, got {ids.dtype} {list(ids.shape)}")
        rows = self._rows
        if ids.min() < 0 or ids.max() >= rows:
            raise ValueError(f"{op}: tokens must be ids from 0 to {rows - 1}, got {ids.min()} to {ids.max()}")
        end = cache.length + (ids.shape[1] if deep is None else deep)
        if self.max_length is not None and end > self.max_length:
            raise ValueError(
                f"{op}: tokens must end within {self.max_length} positions (the model's max_position_embeddings), "
                f"got {ids.shape[1]} after {cache.length}"
            )
        return ids.astype(np.int64)

    def _output(self, logits: Array, features: Array | None) -> TargetOutput:
        torch = sys.modules["torch"]
        return TargetOutput(torch.from_numpy(logits), None if features is None else torch.from_numpy(features))


def _object_in(file: Path) -> dict[str, Any]:
    """The object in a JSON file; nothing where there is no file."""
    try:
        content = json.loads(file.read_text("utf-8")) if file.is_file() else {}
    except ValueError as error:
        raise ValueError(f"OnnxTarget: {file}: not valid JSON ({error})") from error
    if not isinstance(content, dict):
        raise ValueError(f"OnnxTarget: {file}: must hold an object, got {type(content).__name__}")
    return content
