"""What a target, a drafter and their caches must offer, and the one function that checks whether an object does.

An object is a target or a drafter by what it offers, never by its class. Shapes: B sequences, S slots of a block (the
anchor first), P tokens, C context rows, F tapped layers, H hidden size, V vocabulary, K candidates.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from .target.facts import TargetFacts
    from .tree import Tree


class TargetOutput(NamedTuple):
    """One target forward. logits: [B, rows, V] in the model's dtype, rows = 1 for a prefill and S for a block;
    features: [B, S, F * H], the tapped layers' outputs side by side in the order of `layer_ids`, or None without taps.
    """

    logits: Tensor
    features: Tensor | None


class Proposal(NamedTuple):
    """One block of drafts.

    Attributes:
        tokens: [B, S-1] the path, target ids.
        candidates: [B, S-1, K] target ids per slot, best first.
        probs: [B, S-1, K] float32, the law the path was drawn from, or None where it is greedy.
        scores: [B, S-1, K, K] edge scores (previous candidate, candidate), or [B, S-1, K] without a selector.
        log_normalizers: [B, S-1] float32 logsumexp of each slot's logits / T, without a selector and where asked for.
    """

    tokens: Tensor
    candidates: Tensor
    probs: Tensor | None
    scores: Tensor
    log_normalizers: Tensor | None = None


# --- caches -----------------------------------------------------------------------------------------------------------


class SequenceStore(Protocol):
    """A target's cache of one sequence. length: committed positions."""

    @property
    def length(self) -> int: ...
    def advance(self, count: int, /) -> None:
        """Count committed positions in, or, below 0, forget the last ones."""


class RowStore(Protocol):
    """A cache of B sequences. lengths: [B] int32 committed positions, on the device; capacity: the most of a row."""

    lengths: Tensor
    capacity: int


class ContextStore(RowStore, Protocol):
    """A drafter's cache of B sequences."""

    def row(self, b: int, /) -> Any:
        """Sequence b alone, as a cache of one row over the same memory."""


# --- targets ----------------------------------------------------------------------------------------------------------


class BlockTarget(Protocol):
    """A target inside a round: a prompt runs, then block after block is verified and committed in part."""

    @property
    def device(self) -> torch.device: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def layer_ids(self) -> tuple[int, ...]:
        """Decoder layers whose outputs make the features."""

    @property
    def hidden_size(self) -> int: ...
    @property
    def vocab_size(self) -> int:
        """Columns of the logits."""

    @property
    def max_length(self) -> int | None:
        """Positions that the model takes at most; None where it states none."""

    @property
    def embed_weight(self) -> Tensor:
        """The embedding table [V, H]; on the meta device where its values are not to be had."""

    @property
    def head(self) -> Any:
        """The output head, called with hidden states; None where it is not to be had."""

    def new_cache(self, batch: int, capacity: int, /) -> Any:
        """An empty cache for `batch` sequences of about `capacity` positions."""

    def prefill(self, ids: Tensor, cache: Any, /) -> TargetOutput:
        """Run the next tokens [1, P] and commit them: logits [1, 1, V] of the last, features [1, P, F * H]."""

    def verify(self, tokens: Tensor, cache: Any, tree: Tree | None = None, /) -> TargetOutput:
        """Run a block [B, S] without committing it: logits [B, S, V], features [B, S, F * H]; None is a chain."""

    def commit(self, cache: Any, index: Tensor, num_accepted: Tensor, /) -> None:
        """Keep slots of the verified block. index: [B, S], the anchor first, -1 padded; num_accepted: [B] drafts."""


class TargetLike(BlockTarget, Protocol):
    """A target that a `Speculator` takes: `pydflash.Target`, `pydflash.export.OnnxTarget`, or your own."""

    @property
    def num_layers(self) -> int: ...
    @property
    def generation_config(self) -> Any:
        """transformers' form of it, as it is now, or None."""

    def check_trees(self) -> None:
        """Raise ValueError where a tree of slots cannot be verified exactly."""

    def close(self) -> None:
        """End the use of this target."""


class RowTarget(BlockTarget, Protocol):
    """A target whose rounds need no decision on the host: fixed shapes, B rows, lengths on the device (`RowStore`)."""

    def prefill_chunks(self, ids: Tensor, cache: Any, row: int, /) -> Iterator[TargetOutput]:
        """As `prefill`, for one row and in forwards of bounded size, each with its own features and last logits."""

    def append(self, cache: Any, index: Tensor, /) -> None:
        """As `commit`, but the round itself moves `cache.lengths`, since only some rows may be active."""

    def derived(self) -> tuple[object, ...]:
        """What was computed from weights and is read by `verify`: other objects once these changed."""

    def tables(self, positions: int, /) -> object:
        """What `verify` reads beside weights and cache, up to so many positions; a captured graph keeps it alive."""


class ModelTarget(TargetLike, Protocol):
    """A target around a transformers model, whose layers other code may run: see `pydflash.target.facts`."""

    layers: nn.ModuleList
    closed: bool

    @property
    def model(self) -> Any: ...
    @property
    def facts(self) -> TargetFacts: ...
    @property
    def replaceable(self) -> bool:
        """Whether other code may run the model in its place; a subclass may have changed what its methods do."""

    def borrow(self, taken: dict[int, Tensor], layer_ids: Iterable[int], /) -> AbstractContextManager[None]:
        """Evaluation mode and taps for one forward of `model`; the outputs of the layers lie in `taken` then."""

    def tap(self, taken: dict[int, Tensor], layer_ids: Iterable[int], /) -> AbstractContextManager[None]:
        """The taps alone, for a forward of a view of `model`."""

    def trial_ids(self, count: int, /) -> Tensor:
        """Token ids [1, at most `count`] for a trial, no special ones among them."""

    def try_forward(self, ids: Tensor, /) -> Any:
        """The model's own output for ids [1, P], with its own new cache."""


class Retappable(Protocol):
    """A target that can listen to other layers."""

    def tapping(self, layer_ids: tuple[int, ...], /) -> TargetLike:
        """The same model behind a target with these `layer_ids`."""


# --- drafters ---------------------------------------------------------------------------------------------------------


class DrafterLike(Protocol):
    """A drafter that a `Speculator` takes: `pydflash.Drafter`, `pydflash.export.OnnxDrafter`, or your own.

    config: has block_size, target_layer_ids, num_candidates and version (2 where drafts of a block know of each other).
    """

    @property
    def config(self) -> Any: ...
    def new_cache(self, batch: int, capacity: int, /) -> Any:
        """An empty context cache."""

    def append_context(self, features: Tensor, cache: Any, counts: Tensor | None = None, /) -> None:
        """Take in features [B, C, F * H] of positions just committed; counts: [B] valid rows, None for all."""

    def propose(
        self,
        anchors: Tensor,
        cache: Any,
        /,
        *,
        embed: Any = None,
        head: Any = None,
        block_size: int | None = None,
        temperature: Any = None,
        seeds: Any = 0,
        node_temperature: Any = None,
    ) -> Proposal:
        """Draft a block after each anchor [B].

        temperature: [B], draws drafts from softmax(score / T); None takes the best. node_temperature: [B] above 0,
        fills `log_normalizers`, which trees and Viterbi paths need where slots are independent.
        """


class RowDrafter(DrafterLike, Protocol):
    """A drafter for fixed shapes: caches are `ContextStore`s, and no call decides anything on the host."""

    def tables(self) -> object:
        """What it reads beside weights and cache; a captured graph keeps it alive."""

    def derived(self) -> tuple[object, ...]:
        """What is computed from the weights and kept: other objects once it must be computed anew."""


class ModuleDrafter(RowDrafter, Protocol):
    """A drafter around a module, whose layers other code may run; see `ModelTarget`."""

    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def replaceable(self) -> bool: ...
    def parameters(self) -> Iterator[nn.Parameter]: ...


class ChoosesOps(Protocol):
    """A drafter of torch that runs on the compiled ops or on plain torch."""

    @property
    def device(self) -> torch.device: ...
    @property
    def backend(self) -> str: ...
    def with_backend(self, backend: str, /) -> DrafterLike:
        """The same weights on the compiled ops ("native") or on plain torch ("reference")."""


class NeedsTables(Protocol):
    """A drafter that may need the target's embedding table and head."""

    @property
    def needs_tables(self) -> bool: ...


class ChecksTarget(Protocol):
    """A drafter that knows which targets it was made for."""

    def check_target(self, *, hidden_size: int, num_layers: int, vocab_size: int, embedding_rows: int) -> None:
        """Raise ValueError, naming the key, where it was not made for such a target."""


class Described(Protocol):
    """A drafter with a line for `stats.backends`."""

    @property
    def description(self) -> str: ...


class Refreshable(Protocol):
    """A target or a drafter that keeps copies computed from weights."""

    def refresh(self) -> None:
        """Forget them; the next request computes them anew."""


# --- the check --------------------------------------------------------------------------------------------------------


def missing(value: object, protocol: type) -> list[str]:
    """What `value` lacks of a protocol: attributes and methods, and methods that do not take its arguments."""
    lacking = []
    for name, wanted in _members(protocol).items():
        try:
            held = getattr(value, name)
        except AttributeError:
            lacking.append(name)
            continue
        if inspect.isfunction(wanted) and (fault := _call_fault(held, wanted)) is not None:
            lacking.append(f"{name} ({fault})")
    return lacking


def offers(value: object, protocol: type) -> bool:
    """Whether `value` is what a protocol describes."""
    return not missing(value, protocol)


def _members(protocol: type) -> dict[str, Any]:
    members: dict[str, Any] = {}
    for kind in reversed(protocol.__mro__):
        if getattr(kind, "_is_protocol", False) and kind is not Protocol:
            members |= dict.fromkeys(vars(kind).get("__annotations__", {}))
            members |= {name: member for name, member in vars(kind).items() if not name.startswith("_")}
    return members


def _call_fault(held: object, wanted: Any) -> str | None:
    """Why `held` cannot be called with the arguments of the protocol's method, or None."""
    if not callable(held):
        return "not a method"
    try:
        signature = inspect.signature(held)
    except (TypeError, ValueError):
        return None  # written in C, which does not say
    parameters = [*inspect.signature(wanted).parameters.values()][1:]
    positional = [None for parameter in parameters if parameter.kind is not parameter.KEYWORD_ONLY]
    keywords = {parameter.name: None for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY}
    try:
        signature.bind(*positional, **keywords)
    except TypeError as error:
        return str(error)
    return None


if TYPE_CHECKING:
    from export.drafter import OnnxDrafter
    from export.target import OnnxTarget

    from .decoder.stores import Cache
    from .drafter.module import Drafter
    from .target.cache import TargetCache
    from .target.generic import Target
    from .target.own import OwnTarget

    # For mypy: what the package itself has of each kind.
    def _own_kinds(
        target: Target, own: OwnTarget, drafter: Drafter, row_cache: Cache, cache: TargetCache
    ) -> tuple[ModelTarget, Retappable, RowTarget, ContextStore, SequenceStore, SequenceStore]:
        return target, target, own, row_cache, row_cache, cache

    def _drafter_kinds(drafter: Drafter) -> tuple[ModuleDrafter, ChoosesOps, NeedsTables, ChecksTarget]:
        return drafter, drafter, drafter, drafter

    def _exported_kinds(target: OnnxTarget, drafter: OnnxDrafter) -> tuple[TargetLike, DrafterLike, Described]:
        return target, drafter, drafter
