"""What the target tells the drafter during training: tapped features, and its logits where they are distilled."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..target.generic import Target
from .objective import Batch


class Padded(NamedTuple):
    """Records on the CPU, padded on the right: ids [B, P] int64, supervised [B, P] bool, length of each."""

    ids: Tensor
    supervised: Tensor
    lengths: list[int]


def record_lengths(records: Any, longest: int, vocabulary: int) -> list[int]:
    """Tokens of each record, `longest` at most; ValueError, naming the record, for ids outside the vocabulary."""
    lengths = []
    for i in range(len(records)):
        ids = torch.as_tensor(records[i][0])
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < vocabulary:
            where = records.where(i) if hasattr(records, "where") else f"record {i}"
            got = f"{int(ids.min())} to {int(ids.max())}"
            raise ValueError(f"training: token ids must be 0 to {vocabulary - 1} (the target's), got {got} in {where}")
        lengths.append(min(len(ids), longest))
    return lengths


def pad_records(records: Sequence[tuple[Tensor, int]], multiple: int = 64, limit: int | None = None) -> Padded:
    """Pad records (ids, prompt_length) to a multiple of `multiple`, or to `limit`; response tokens are supervised."""
    lengths = [len(ids) for ids, _ in records]
    width = -(-max(lengths) // multiple) * multiple
    if limit is not None:
        width = max(min(width, limit), max(lengths))
    ids = torch.zeros(len(records), width, dtype=torch.long)
    supervised = torch.zeros(len(records), width, dtype=torch.bool)
    for row, (tokens, prompt_length) in enumerate(records):
        ids[row, : len(tokens)] = tokens
        supervised[row, prompt_length : len(tokens)] = True
    return Padded(ids, supervised, lengths)


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """Copy without waiting for the work queued before: pageable memory would make the host wait for it."""
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x.to(device)


@contextmanager
def compiled_layers(layers: Sequence[nn.Module]) -> Iterator[None]:
    """Each layer's forward compiled for the duration of the block, its hooks outside the compiled part.

    The layers are alike, so one is compiled and serves all.
    """
    before = [layer.__dict__.get("forward") for layer in layers]
    for layer in layers:
        layer.forward = torch.compile(layer.forward)
    try:
        yield
    finally:
        for layer, own in zip(layers, before, strict=True):
            del layer.forward
            if own is not None:
                layer.forward = own


class FeatureSource:
    """Runs the frozen target over padded batches; keeps features in memory as far as a budget allows.

    Args:
        target: With the drafter's `layer_ids`.
        distil: Whether batches carry the target's logits (they are never cached: V values a token).
        cache_gb: Memory for features of records that were seen, on the target's device. Later epochs read them
            from there; records that do not fit are computed again.
    """

    def __init__(self, target: Target, *, distil: bool = False, cache_gb: float = 0.0) -> None:
        self.target, self.distil = target, distil
        self._left = int(cache_gb * 1e9)
        self._kept: dict[int, Tensor] = {}
        self.tokens = 0  # positions the target has computed

    def batch(self, keys: Sequence[int], padded: Padded) -> Batch:
        """Add the target's part to sequences from `pad_records`; `keys` name the records for the cache."""
        lengths, width = padded.lengths, padded.ids.shape[1]
        ids, supervised = (to_device(x, self.target.device) for x in (padded.ids, padded.supervised))
        if not self.distil and all(key in self._kept for key in keys):
            stored = [self._kept[key] for key in keys]
            kept = nn.utils.rnn.pad_sequence(stored, batch_first=True)
            return Batch(ids, supervised, F.pad(kept, (0, 0, 0, width - kept.shape[1])), None)
        logits, features = self.target.encode(ids, all_logits=self.distil)
        if features is None:
            raise ValueError("FeatureSource: target must have the drafter's layer_ids, got none")
        self.tokens += sum(lengths)
        for row, key in enumerate(keys):
            size = lengths[row] * features.shape[-1] * features.element_size()
            if key not in self._kept and size <= self._left:
                self._kept[key] = features[row, : lengths[row]].clone()
                self._left -= size
        return Batch(ids, supervised, features, logits if self.distil else None)
