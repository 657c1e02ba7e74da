"""Whether a model's layers do what the decoder built of them does: in two forwards, module by module.

They must be put together the same way at the start of the context and at its end, bit by bit; queries, mixers and MLPs
must agree up to rounding.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..decoder.block import BlockView, Forward, Table, block_masks
from ..decoder.records import Attention, Mixer
from .recognise import LayerWiring
from .tracing import Run, Trace, output_of, trace

if TYPE_CHECKING:
    from .layers import Recognised

_FAR = 1 << 16  # where a model states no context limit
_CLOSE = {torch.float32: (1e-4, 1e-4), torch.bfloat16: (0.1, 0.02), torch.float16: (0.03, 0.01)}  # outputs, norms of q


def wiring_fault(own: Recognised, first: Trace, ids: Tensor, run: Run) -> str | None:
    """What the model does otherwise than its decoder, or None. first: Of ids [1, S] at the start of the context."""
    size = ids.shape[1]
    start = max(0, (own.target.max_length or _FAR) - size)
    positions = torch.arange(size, device=ids.device)[None]
    with torch.no_grad():
        if (fault := _record_fault(own, first, own.tables_at(positions))) is not None:
            return fault
        last = trace(own.target, ids, positions + start, run)
        if last.wiring != first.wiring:  # both as found, before rotations were tried
            return f"layers that are put together the same way at position {start}"
        return _record_fault(own, last, own.tables_at(positions + start))


def rotations_tried(own: Recognised, first: Trace, ids: Tensor) -> tuple[LayerWiring, ...]:
    """The layers' wiring with the rotation of each attention whose output comes nearest to the model's."""
    tables = own.tables_at(torch.arange(ids.shape[1], device=ids.device)[None])
    found = []
    for its, modules, layer in zip(first.wiring.layers, own.modules, own.decoder.layers, strict=True):
        mixer, seen = layer.mixer, first.seen[modules.mixer][0]
        if isinstance(mixer, Attention):
            others = {"given": mixer, "none": replace(mixer, rotary_dim=0)}
            if not mixer.interleaved:
                others["neighbours"] = replace(mixer, interleaved=True)
            with torch.no_grad():
                far = {n: _distance(_mixed(m, seen.taken, tables)[1], output_of(seen)[0]) for n, m in others.items()}
            its = its._replace(rotation=min(far, key=far.__getitem__))
        found.append(its)
    return tuple(found)


def _distance(got: Tensor, wanted: Tensor) -> float:
    return ((got.float() - wanted.float()).norm() / wanted.float().norm()).item()


def _record_fault(own: Recognised, found: Trace, tables: tuple[Table, ...]) -> str | None:
    outputs_close, norms_close = _CLOSE[own.target.dtype]
    for i, (modules, layer) in enumerate(zip(own.modules, own.decoder.layers, strict=True)):
        mixer, mlp = (found.seen[module][0] for module in (modules.mixer, modules.mlp))
        queries, mixed = _mixed(layer.mixer, mixer.taken, tables)
        pairs = [
            ("mixing" if queries is None else "attention", mixed, output_of(mixer)[0], outputs_close),
            ("MLP", layer.mlp(mlp.taken[0]), output_of(mlp)[0], outputs_close),
        ]
        if queries is not None:
            if i not in found.norms:
                return f"attention through transformers' AttentionInterface in layer {i}"
            pairs.insert(0, ("queries", queries, found.norms[i], norms_close))
        for name, got, wanted, close in pairs:
            if not (distance := _distance(got, wanted)) <= close:
                return f"plain {name} in layer {i}, off by {distance:.0e}"
    return None


def _mixed(mixer: Mixer, x: Tensor, tables: tuple[Table, ...]) -> tuple[Tensor | None, Tensor]:
    """The norm of attention's queries, and what a mixer makes [S, H] of the rows x [1, S, H] alone, as a chain.

    They stand at the tables' rows.
    """
    size = x.shape[1]
    depths, _, visibility = block_masks(size, x.device)
    lengths = torch.zeros(1, dtype=torch.int32, device=x.device)
    forward = Forward(1, size, lengths, BlockView(visibility, depths), tables)
    store = mixer.store.new(1, 1, size, x.dtype, x.device)
    store.open(size)
    out = mixer(x[0], store.part(0), forward)
    if not isinstance(mixer, Attention):
        return None, out
    return mixer.queries(x[0], store.part(0), forward).float().norm(), out
