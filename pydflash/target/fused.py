"""The fused target: a model's layers as our decoder of records, in few launches.

Blocks run through the decoder; prompts through the model's own layers over the same caches, or through the decoder too
where a layer keeps a state.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..decoder import formats
from ..decoder.block import BlockView
from ..decoder.stores import Cache
from ..progress import advance
from ..protocols import ModelTarget, TargetOutput
from .layers import Head, Recognised
from .modules import UnknownForm
from .own import OwnTarget
from .tracing import Trace, trace
from .wiring import rotations_tried, wiring_fault


class FusedTarget(OwnTarget):
    """A target behind the calls of a round, whose layers were recognised.

    Attributes:
        form: One line on what runs.
        weights: How a CPU's are packed, or why not; else "".
    """

    def __init__(self, target: ModelTarget, quantize: str | None = None) -> None:
        """Compares the layers with the decoder one by one, then a chain, rollbacks and a tree with the model's forward.

        On a CPU weights are packed, which copies them, where there is room. quantize: "int8" packs them into 8 bits;
        prompts still run through the model's own weights.

        Raises: UnknownForm, a ValueError, where the layers are not of the common form; ValueError, naming the model's
        class and the reason, where not even its own layers can run in place.
        """
        self.prepare(target)
        self.form, self.weights = "fused layers", ""
        self._format: formats.WeightFormat | None = None
        self._recognised: Recognised | None = None
        try:
            self._recognised = self._recognise(quantize)
            fault = self.trial_fault()
        except UnknownForm:
            raise
        except Exception as error:  # whatever else a model of another form may lack
            raise UnknownForm(f"{type(error).__name__}: {error}") from error
        if fault is not None:
            raise UnknownForm(fault)
        if quantize is not None:
            self._pack(self.recognised, quantize)

    def _recognise(self, quantize: str | None) -> Recognised:
        ids = self.target.trial_ids(24)
        first = trace(self.target, ids, torch.arange(ids.shape[1], device=self.device)[None], self.run_at)
        if (fault := self.window_fault()) is not None:
            raise UnknownForm(fault)
        recognised = self._as_traced(first, ids)
        if self.device.type != "cpu":  # where weights may still lie in their file
            recognised.join_weights()
        elif quantize is None:
            self._pack(recognised, None)
        return recognised

    def _as_traced(self, first: Trace, ids: Tensor) -> Recognised:
        """The decoder that does what the model does. Raises: UnknownForm."""
        recognised = Recognised(self.target, self.windows, first.wiring)
        layers = rotations_tried(recognised, first, ids)
        if layers != first.wiring.layers:
            recognised = Recognised(self.target, self.windows, replace(first.wiring, layers=layers))
        if (fault := wiring_fault(recognised, first, ids, self.run_at)) is not None:
            raise UnknownForm(fault)
        return recognised

    def _pack(self, recognised: Recognised, quantize: str | None) -> None:
        format = formats.choose(recognised.weights(), quantize, self.device)
        if isinstance(format, formats.WeightFormat):
            recognised.pack(format)
            self._format = format
            self.weights = f"{quantize or 'packed'} weights"
            if recognised.decoder.uncompiled:
                self.weights += f", record by record: {recognised.decoder.uncompiled}"
        elif quantize is not None:
            self.refuse(f"weights that quantize={quantize!r} can pack", format)
        else:
            self.weights = f"weights not packed: {format}"

    @property
    def recognised(self) -> Recognised:
        """The decoder that runs the blocks."""
        if self._recognised is None:
            raise RuntimeError("FusedTarget: its layers must be recognised first")
        return self._recognised

    def derived(self) -> tuple[object, ...]:
        """What a captured round reads beside the caches: other objects once weights or modules of the model changed.

        For the beginning of a request: on a device it waits for samples of the weights. What is captured must keep it.

        Raises: ValueError where the model's layers are no longer what they were.
        """
        if self.recognised.changed():
            self._recognised = self._renewed()
        return (self.recognised,)

    def refresh(self) -> None:
        """Drop every copy of weights, whether they seem to have changed or not: for edits that no sample shows."""
        formats.forget_shared()
        self._recognised = self._renewed()

    def _renewed(self) -> Recognised:
        """The model as it is now."""
        if self.target.model.dtype != self.dtype:
            self.refuse(f"parameters of {self.dtype}, as when it was taken", self.target.model.dtype)
        try:
            recognised = Recognised(self.target, self.windows, self.recognised.wiring)
        except UnknownForm as error:
            self.refuse("layers of the common form, as when it was taken", f"others: they need {error}")
        if self.device.type != "cpu":
            recognised.join_weights()
        if self._format is not None:
            recognised.pack(self._format)
        return recognised

    @property
    def description(self) -> str:
        return ", ".join(filter(None, (self.form, self.weights)))

    @property
    def head(self) -> Any:
        """The target's head, packed where the layers are."""
        head = self.recognised.head
        return self.target.head if head is None or head.packed is None else Head(head)

    def new_cache(self, batch: int, capacity: int) -> Cache:
        """Room for `batch` sequences of `capacity` positions."""
        return self.recognised.decoder.new_cache(batch, capacity, dtype=self.dtype, device=self.device)

    def prefill_chunks(self, ids: Tensor, cache: Cache, row: int = 0) -> Iterator[TargetOutput]:
        """As `prefill`, in forwards of bounded size, each of which gives its own rows' features and last logits."""
        if self.device.type == "cpu":  # elsewhere a captured round reads what would go
            self.derived()
        if self.recognised.decoder.keeps_states:
            return self._decoded_chunks(ids, cache, row)
        return super().prefill_chunks(ids, cache, row)

    def _decoded_chunks(self, ids: Tensor, cache: Cache, row: int) -> Iterator[TargetOutput]:
        """A prompt through the decoder: the model's own forward would keep its recurrent states elsewhere."""
        self._check_open("prefill")
        one, start = cache.row(row), int(cache.lengths[row])
        if start == 0:
            one.begin()
        else:
            one.settle()
        for part in ids.split(self.prefill_rows, 1):
            with torch.no_grad(), self.exact_dtype():
                embedded, tables = self.recognised.embed(part), self.recognised.tables(cache.capacity + 64)
                hidden, taken = self.recognised.decoder.prefill(embedded, one, start, tables, set(self.layer_ids))
                output = self._output(hidden[:, -1:], taken)
            start += part.shape[1]
            cache.lengths[row] = start
            advance("prompt", part.shape[1], after=output.logits)
            yield output

    def _check_layers(self) -> None:
        """Which layers there may be is for the recognisers to say."""

    def tables(self, positions: int) -> object:
        """The rotary tables that `verify` reads up to `positions`; a captured graph must keep them alive."""
        return self.recognised.tables(positions)

    def verify_block(self, tokens: Tensor, cache: Cache, view: BlockView) -> TargetOutput:
        """As `verify`, by the decoder."""
        recognised = self.recognised
        with torch.no_grad(), self.exact_dtype():
            embedded, tables = recognised.embed(tokens), recognised.tables(cache.capacity + 64)
            return self._output(*recognised.decoder(embedded, cache, tables, view, set(self.layer_ids)))

    def _output(self, hidden: Tensor, taken: dict[int, Tensor]) -> TargetOutput:
        features = torch.cat([taken[i] for i in self.layer_ids], -1) if self.layer_ids else None
        head, form = self.recognised.head, self.recognised.wiring.logits
        if head is None:
            return TargetOutput(form(self.target.head(hidden)), features)
        return TargetOutput(form(head(hidden.flatten(0, 1)).unflatten(0, hidden.shape[:2])), features)


def in_place(target: ModelTarget, quantize: str | None = None, form: str = "auto") -> OwnTarget:
    """The target in a form that needs no decision on the host.

    form: "fused", "own", or "auto" for the first of the two that it can have.

    Raises: ValueError, naming the model's class and the reason, where it cannot have that form, or not with `quantize`.
    """
    if form == "own":
        return OwnTarget(target)
    try:
        return FusedTarget(target, quantize)
    except UnknownForm as error:
        reason = str(error)
    if form == "fused" or quantize is not None:
        why = "" if quantize is None else f" for quantize={quantize!r}"
        raise ValueError(
            f"FusedTarget: {type(target.model).__name__} must have layers of the common form{why}, got others: they "
            f"need {reason}"
        )
    own = OwnTarget(target)
    own.form = f"the model's own layers (fused ones need {reason})"
    return own
