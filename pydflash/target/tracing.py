"""How a model's layers are put together: found in one forward, by which tensors its modules take and give.

What is found are names and numbers, bit by bit: no comparison of logits in half precision would notice a factor near 1.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from .. import ops
from ..ops import reference
from .modules import UnknownForm, parts_of, unknown
from .recognise import MIXERS, MLPS, LayerWiring

if TYPE_CHECKING:
    from ..protocols import ModelTarget

Run = Callable[[Tensor, Tensor], tuple[Tensor, dict[int, Tensor]]]


class Seen(NamedTuple):
    """One call of a module: its first tensor, what it gave, and all arguments."""

    taken: Tensor
    given: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class RotaryCall(NamedTuple):
    """Which module beside the layers makes a rotary table, called as module(x, positions, *extra, **named)."""

    name: str
    extra: tuple[Any, ...] = ()
    named: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class LogitForm:
    """What a model does to its head's output [..., V]. kind: "" for nothing, else "times", "over" or "cap" a value."""

    kind: str = ""
    value: float = 1.0

    def __call__(self, logits: Tensor, kernels: ModuleType | None = None) -> Tensor:
        """kernels: The module of the cap; `ops` where there is a kernel of it, else plain torch."""
        if self.kind == "times":
            return logits * self.value
        if self.kind == "over":
            return logits / self.value
        if not self.kind:
            return logits
        kernels = kernels or (ops if ops.registry.has("soft_cap", logits.device) else reference)
        capped: Tensor = kernels.soft_cap(logits.flatten(0, -2), self.value)
        return capped.view_as(logits)


@dataclass(frozen=True, slots=True)
class Wiring:
    """Of a whole model.

    Attributes:
        final: The last norm.
        embed_scale: Of the embedding's output before the first layer.
        logits: What follows the head.
    """

    layers: tuple[LayerWiring, ...]
    tables: tuple[RotaryCall, ...]
    final: str
    embed_scale: float
    logits: LogitForm


class Trace(NamedTuple):
    """One forward: what its modules took and gave, and the norm of the queries of each layer."""

    wiring: Wiring
    seen: dict[nn.Module, list[Seen]]
    norms: dict[int, Tensor]


@contextmanager
def watch(modules: Iterable[nn.Module]) -> Iterator[dict[nn.Module, list[Seen]]]:
    """The calls of each module in this thread."""
    seen: dict[nn.Module, list[Seen]] = {}
    thread = threading.get_ident()

    def take(key: nn.Module, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if threading.get_ident() == thread:
            first = args[0] if args else next(iter(kwargs.values()))
            seen.setdefault(key, []).append(Seen(first, output, args, kwargs))

    handles = [module.register_forward_hook(partial(take, module), with_kwargs=True) for module in modules]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def output_of(seen: Seen) -> Tensor:
    """A module's tensor, or the first of a tuple."""
    given: Tensor = seen.given if isinstance(seen.given, Tensor) else seen.given[0]
    return given


def trace(target: ModelTarget, ids: Tensor, positions: Tensor, run: Run) -> Trace:
    """One forward over ids [1, S] at positions [1, S], and how the layers are put together.

    run: the model's own forward; gives its logits [1, S, V] and the norm of the queries of each layer.

    Raises: UnknownForm where they are put together otherwise than a decoder of records is.
    """
    body, embed = body_of(target), target.model.get_input_embeddings()
    for layer in target.layers:
        names_of(layer)
    inside = {embed, *target.layers.modules()}
    beside = {name: module for name, module in body.named_modules() if name and module not in inside}
    children = [child for layer in target.layers for child in layer.children()]
    ends = list(dict.fromkeys([embed, target.head, *beside.values()]))
    with torch.no_grad(), watch([*ends, *target.layers, *children]) as seen:
        logits, norms = run(ids, positions)
    called = [(name, call) for name, module in beside.items() for call in seen.get(module, ())]
    calls = [(RotaryCall(name, *_extras(call)), call.given) for name, call in called if _is_table(call.given)]
    last, head = output_of(seen[target.layers[-1]][0]), _once(seen, target.head, "head")
    ends_in = [n for n, call in called if torch.equal(call.taken, last) and torch.equal(output_of(call), head.taken)]
    if not calls or not ends_in:
        unknown("a final norm and a rotary_emb beside the layers", [name for name, _ in body.named_children()])
    final = ends_in[0]
    numbers, tables = _numbers(target, body), [given for _, given in calls]
    x, first = output_of(_once(seen, embed, "embedding")), _once(seen, target.layers[0], "layer 0").taken
    embed_scale = next((s for s in (1.0, *numbers) if torch.equal(x if s == 1 else x * s, first)), None)
    if embed_scale is None:
        unknown("a plain norm before attention in layer 0", "something else behind the embedding")
    layers = tuple(_layer_wiring(layer, i, seen, tables) for i, layer in enumerate(target.layers))
    for i, (one, after) in enumerate(zip(target.layers, [*target.layers[1:], beside[final]], strict=True)):
        if not torch.equal(output_of(seen[one][0]), _once(seen, after, "final norm").taken):
            unknown(f"a residual stream that goes on behind layer {i}", "another")
    forms = [LogitForm(), *(LogitForm(kind, n) for n in numbers for kind in ("times", "over", "cap"))]
    form = next((form for form in forms if torch.equal(form(output_of(head), reference), logits)), None)
    if form is None:
        unknown("plain logits", "others than the head gives")
    return Trace(Wiring(layers, tuple(call for call, _ in calls), final, embed_scale, form), seen, norms)


def _is_table(given: Any) -> bool:
    """Whether a module gave the cosines and sines [1, S, channels] of positions."""
    pair = isinstance(given, tuple) and len(given) == 2 and all(isinstance(x, Tensor) for x in given)
    return pair and given[0].dim() == 3 and given[0].shape == given[1].shape


def names_of(layer: Any) -> tuple[str, str, list[str]]:
    """What a layer's mixer, its MLP and its norms are called. Raises: UnknownForm where it has other parts."""
    parts = set(parts_of(layer))
    mixers, mlps = parts & MIXERS.keys(), parts & MLPS.keys()
    norms = {name for name in parts - mixers - mlps if "norm" in name}
    if len(mixers) != 1 or len(mlps) != 1 or parts != {*mixers, *mlps, *norms}:
        unknown("layers of a mixer, an MLP and norms around them", ", ".join(sorted(parts)))
    return mixers.pop(), mlps.pop(), sorted(norms)


def body_of(target: ModelTarget) -> nn.Module:
    """The module that holds the list of layers."""
    for module in target.model.modules():
        if any(child is target.layers for child in module.children()):
            found: nn.Module = module
            return found
    raise UnknownForm("layers inside the model")


def _once(seen: dict[nn.Module, list[Seen]], module: nn.Module, name: str) -> Seen:
    if len(calls := seen.get(module, [])) != 1:
        unknown("a call of each of its modules", f"{len(calls)} of the {name}")
    return calls[0]


def _extras(call: Seen) -> tuple[tuple[Any, ...], tuple[tuple[str, Any], ...]]:
    """A rotary module's arguments behind x and the positions."""
    extra = tuple(x for x in call.args[2:] if not isinstance(x, Tensor))
    return extra, tuple((name, x) for name, x in call.kwargs.items() if not isinstance(x, Tensor))


def _numbers(target: ModelTarget, body: nn.Module) -> list[float]:
    """Factors that a model's own code may know: numbers of its config and of its modules."""
    config = target.facts.text_config.to_dict()
    held = [*config.values(), *vars(body).values(), *vars(target.model).values()]
    return list(dict.fromkeys(float(x) for x in held if isinstance(x, (int, float)) and x not in (0, 1)))


def _layer_wiring(layer: nn.Module, i: int, seen: dict[nn.Module, list[Seen]], tables: Sequence[Any]) -> LayerWiring:
    mixer, mlp, norms = names_of(layer)
    calls = {name: _once(seen, getattr(layer, name), f"{name} of layer {i}") for name in (mixer, mlp, *norms)}
    whole = _once(seen, layer, f"layer {i}")

    def before(part: str) -> tuple[str | None, Tensor]:
        """The norm before a part, and what goes into both."""
        taken = calls[part].taken
        name = next((n for n in norms if torch.equal(output_of(calls[n]), taken)), None)
        return name, taken if name is None else calls[name].taken

    def after(part: str) -> tuple[str | None, Tensor]:
        """The norm behind a part, and what is added."""
        given = output_of(calls[part])
        name = next((n for n in norms if torch.equal(calls[n].taken, given)), None)
        return name, given if name is None else output_of(calls[name])

    (first, x), (second, y), (third, between), (fourth, z) = before(mixer), after(mixer), before(mlp), after(mlp)
    if not torch.equal(x, whole.taken):
        unknown(f"a plain norm before attention in layer {i}", "another")
    scales = (1.0, *(v for v in vars(layer).values() if isinstance(v, float) and v != 1))
    if parallel := torch.equal(calls[mixer].taken, calls[mlp].taken):
        third = None
        scale = next((s for s in scales if torch.equal(_sum(_sum(x, y, s), z, s), output_of(whole))), None)
    else:
        scale = next((s for s in scales if torch.equal(_sum(x, y, s), between)), None)
    if scale is None or not (parallel or torch.equal(_sum(between, z, scale), output_of(whole))):
        part = "attention and the MLP" if parallel else "attention" if scale is None else "the MLP"
        unknown(f"a plain sum after {part} in layer {i}", "another")
    if left := set(norms) - {first, second, third, fourth}:
        unknown(f"norms around the mixer and the MLP in layer {i}", ", ".join(sorted(left)))
    table = _table_of(calls[mixer], tables)
    return LayerWiring(mixer, first, second, mlp, third, fourth, scale, table, parallel=parallel)


def _sum(x: Tensor, y: Tensor, scale: float) -> Tensor:
    return x + (y if scale == 1 else y * scale)


def _table_of(mixer: Seen, tables: Sequence[Any]) -> int:
    """Which table a mixer is given; 0 where it is given none."""
    pairs = [x for x in (*mixer.args, *mixer.kwargs.values()) if isinstance(x, tuple) and len(x) == 2]
    for given in (pair for pair in pairs if all(isinstance(x, Tensor) for x in pair)):
        for i, table in enumerate(tables):
            if all(torch.equal(a, b) for a, b in zip(given, table, strict=True)):
                return i
    return 0
