"""Whether a model's layers do what the decoder built of them does: in one forward, module by module.

Its residual stream must be carried on bit by bit, since no comparison of logits in half precision would notice a
factor near 1; queries, attention and MLP must agree up to rounding, at the start of the context and at its end.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from ..decoder.block import BlockView, Forward, Table, block_masks
from ..decoder.records import Attention, Mixer

if TYPE_CHECKING:
    from .layers import Recognised

_FAR = 1 << 16  # where a model states no context limit
_CLOSE = {torch.float32: (1e-4, 1e-4), torch.bfloat16: (0.1, 0.02), torch.float16: (0.03, 0.01)}  # outputs, norms of q


class _Seen(NamedTuple):
    taken: Tensor
    given: Tensor


def wiring_fault(
    own: Recognised, ids: Tensor, run: Callable[[Tensor, Tensor], tuple[Tensor, dict[int, Tensor]]]
) -> str | None:
    """What the model does otherwise than its decoder, or None.

    ids: [1, S]. run: the model's own forward over ids at positions [1, S]; gives its logits [1, S, V] and the norm of
    the queries of each layer.
    """
    size = ids.shape[1]
    for start in (0, max(0, (own.target.max_length or _FAR) - size)):
        positions = torch.arange(start, start + size, device=ids.device)[None]
        with torch.no_grad(), _watch(own) as seen:
            logits, norms = run(ids, positions)
            fault = _residual_fault(own, seen, logits) or _record_fault(own, seen, norms, own.tables_at(positions))
        if fault is not None:
            return fault
    return None


@contextmanager
def _watch(own: Recognised) -> Iterator[dict[nn.Module, _Seen]]:
    """What each module of interest takes and gives."""
    seen: dict[nn.Module, _Seen] = {}
    thread = threading.get_ident()

    def take(key: nn.Module, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if threading.get_ident() != thread:
            return
        given = output if isinstance(output, Tensor) else output[0]
        seen[key] = _Seen(args[0] if args else next(iter(kwargs.values())), given)

    handles = [module.register_forward_hook(partial(take, module), with_kwargs=True) for module in _modules(own)]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def _modules(own: Recognised) -> list[nn.Module]:
    modules = [own.embed, own.final, own.target.head]
    return modules + [module for layer in own.modules for module in layer]


def _residual_fault(own: Recognised, seen: dict[nn.Module, _Seen], logits: Tensor) -> str | None:
    if any(module not in seen for module in _modules(own)):
        return "a call of each of its modules"
    x = seen[own.embed].given
    for i, layer in enumerate(own.modules):
        attention, mlp, last = seen[layer.mixer], seen[layer.mlp], seen[layer.layer].given
        first, second = seen[layer.mixer_norm], seen[layer.mlp_norm]
        between = x + attention.given
        pairs = (
            ("norm before attention", first.taken, x),
            ("attention's input", attention.taken, first.given),
            ("sum after attention", second.taken, between),
            ("MLP's input", mlp.taken, second.given),
            ("sum after the MLP", last, between + mlp.given),
        )
        for name, got, wanted in pairs:
            if not torch.equal(got, wanted):
                return f"a plain {name} in layer {i}"
        x = last
    final, head = seen[own.final], seen[own.target.head]
    ends = (("final norm", final.taken, x), ("head", head.taken, final.given), ("logits", logits, head.given))
    return next((f"plain {name}" for name, got, wanted in ends if not torch.equal(got, wanted)), None)


def _record_fault(
    own: Recognised, seen: dict[nn.Module, _Seen], norms: dict[int, Tensor], tables: tuple[Table, ...]
) -> str | None:
    outputs_close, norms_close = _CLOSE[own.target.dtype]
    for i, (modules, layer) in enumerate(zip(own.modules, own.decoder.layers, strict=True)):
        queries, mixed = _mixed(layer.mixer, seen[modules.mixer].taken, tables)
        pairs = [
            (
                "attention" if queries is not None else "mixing",
                mixed.float(),
                seen[modules.mixer].given[0].float(),
                outputs_close,
            ),
            ("MLP", layer.mlp(seen[modules.mlp].taken[0]).float(), seen[modules.mlp].given[0].float(), outputs_close),
        ]
        if queries is not None:
            if i not in norms:
                return f"attention through transformers' AttentionInterface in layer {i}"
            pairs.insert(0, ("queries", queries, norms[i], norms_close))
        for name, got, wanted, close in pairs:
            distance = ((got - wanted).norm() / wanted.norm()).item()
            if not distance <= close:
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
