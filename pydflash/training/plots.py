"""Pictures of a training run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any


def plot_training(history: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw loss, per-slot accuracy, accepted length and the selector's recall into a PNG; needs matplotlib.

    Args:
        history: Rows of log.jsonl.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    steps = [row["step"] for row in history]
    selector = bool(history) and "selector_recall" in history[-1]
    figure, axes = plt.subplots(2, 2, figsize=(11, 7), constrained_layout=True)
    (loss, slots), (length, recall) = axes
    loss.plot(steps, [row["ce"] for row in history])
    loss.set(title="weighted cross-entropy", ylabel="nats")
    _per_slot(slots, steps, [row["slot_accuracy"] for row in history], "accuracy of slot 1, 2, ...")
    length.plot(steps, [row["accepted_length"] for row in history], label="per-slot argmax")
    if selector:
        length.plot(steps, [row["selector_length"] for row in history], label="selector, true predecessor")
        _per_slot(recall, steps, [row["selector_recall"] for row in history], "next token among the candidates")
    else:
        recall.axis("off")
    length.set(title="expected accepted length (training batches)", ylabel="tokens")
    length.legend()
    for axis in (loss, slots, length, recall):
        axis.grid(alpha=0.3)
        axis.set_xlabel("step")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _per_slot(axis: Any, steps: Sequence[int], rows: Sequence[Sequence[float]], title: str) -> None:
    from matplotlib import pyplot as plt

    slots = list(zip(*rows, strict=True))
    for i, values in enumerate(slots):
        axis.plot(steps, values, color=plt.cm.viridis(i / max(len(slots) - 1, 1)), label=str(i + 1))
    axis.set(title=title, ylim=(0, 1))
    axis.legend(fontsize=7, ncols=4)
