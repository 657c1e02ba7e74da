"""Does the file that was written draft as the torch drafter does? The same random context through both."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pydflash.drafter.module import Drafter

from .drafter import OnnxDrafter

ROUNDS = 12
_LEAST_HALF = 0.9  # share of a float16 graph's candidates below which something may be wrong


@dataclass(frozen=True)
class Parity:
    """Over some rounds, beside the torch drafter in float32.

    difference: Largest difference of a score, relative to the largest score, over slots with the same candidates; None
        where there are none.
    drafts, candidates: Share of drafts and of candidates that are the same.
    """

    difference: float | None
    drafts: float
    candidates: float

    def __str__(self) -> str:
        shares = f"{self.drafts:.1%} of drafts and {self.candidates:.1%} of candidates the same"
        if self.difference is not None:
            shares += f", scores within {self.difference:.1e}"
        return f"{shares}, over {ROUNDS} rounds of random features"

    def verdict(self, kind: str) -> str:
        """What this says of a graph in 8bit, int8, 4bit, float16 or float32; of few bits, what it does not say."""
        if kind not in ("float32", "float16"):
            return (
                f"random features do not tell what {kind} costs: compare the accepted length of `pydflash generate`, "
                "over your own text, with this drafter and with the checkpoint"
            )
        if kind == "float16" and self.candidates < _LEAST_HALF:
            return f"low for float16, {_LEAST_HALF:.0%} of candidates is usual: measure the accepted length before use"
        return f"good: the same drafter, up to the rounding of {kind}"


@torch.inference_mode()
def compare(onnx: OnnxDrafter, drafter: Drafter, embed: Tensor, head: Any, seed: int = 0) -> Parity:
    """Run rounds of random features and lengths through both, with chunks, short blocks and rounds without context."""
    config = drafter.config
    rng = np.random.default_rng(seed)
    width = len(config.target_layer_ids) * config.target_hidden_size
    lengths = [3, 140, *rng.integers(0, config.block_size + 1, ROUNDS - 2)]
    capacity = int(sum(lengths)) + config.block_size
    caches = onnx.new_cache(1, capacity), drafter.new_cache(1, capacity)
    worst, largest = 0.0, 0.0
    drafts, candidates = [], []
    for i, rows in enumerate(lengths):
        features = rng.standard_normal((1, rows, width), np.float32)
        onnx.append_context(features, caches[0])
        if rows:
            drafter.append_context(torch.from_numpy(features), caches[1])
        anchors = rng.integers(0, config.vocab_size, 1)
        size = config.block_size if i % 3 else max(1, config.block_size - i)
        got = onnx.propose(anchors, caches[0], embed=embed, block_size=size)
        want = drafter.propose(torch.from_numpy(anchors), caches[1], embed=embed, head=head, block_size=size)
        theirs = want.candidates.numpy()
        same = (got.candidates == theirs).all(-1)
        if config.version == 2:
            same[:, 1:] &= same[:, :-1]  # edges come from the candidates before them
        drafts += (got.tokens == want.tokens.numpy()).ravel().tolist()
        overlap = (got.candidates[..., None] == theirs[..., None, :]).any(-1)
        candidates += overlap.ravel().tolist()
        if same.any():
            scores = want.scores.numpy()
            worst = max(worst, float(np.abs(got.scores - scores)[same].max()))
            largest = max(largest, float(np.abs(scores).max()))
    difference = worst / largest if largest else None
    return Parity(difference, float(np.mean(drafts)), float(np.mean(candidates)))
