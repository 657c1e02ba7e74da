"""The generic target: any Hugging Face causal LM, verified through its own forward and its own cache."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, cast

import torch
from torch import Tensor, nn

from ..protocols import TargetOutput
from ..tree import Tree, accepted_slots
from . import facts
from .loading import load_model
from .probe import PROBE_TOKENS, mixing_fault, rollback_fault, tree_fault

if TYPE_CHECKING:
    from .cache import TargetCache


class Target:
    """A causal LM behind the calls that a speculative loop needs: `new_cache`, `prefill`, `verify`, `commit`.

    Feature of layer i = the residual stream after decoder layer i (0-based), so `hidden_states[i + 1]` of a forward
    with `output_hidden_states=True`, and the state before the final norm for the last layer.
    The model always runs in evaluation mode without gradients. Modules found in training mode are put back into it
    after each forward, hooks live only during a forward and act in its thread only, and nothing else is ever set on
    the model. One sequence per cache.
    """

    replaceable: ClassVar[bool] = True

    def __init__(self, model: nn.Module, layer_ids: Sequence[int] = ()) -> None:
        """model: a transformers model with a language model head, whole and on one device.
        layer_ids: decoder layers whose outputs make the features, each in 0..num_layers - 1.

        Runs the model on a few tokens to see what its cache is made of, and, where it has recurrent layers, whether
        their rollback is exact. Raises ValueError, naming the model's class and the reason, for what cannot work.
        """
        self.model = cast("Any", model)
        self.closed = False
        facts.check_model(model)
        self.facts = facts.facts_of(model)
        self._all_modules = list(model.modules())
        self.head: nn.Module = facts.find_head(model)
        self.embed_weight = facts.find_embed_weight(model)
        self.layers = facts.find_layers(model, self.facts.text_config.num_hidden_layers)
        self.num_layers = len(self.layers)
        self.layer_ids = self._check_layer_ids(layer_ids)
        self.hidden_size: int = self.facts.text_config.hidden_size
        self.device: torch.device = self.embed_weight.device
        self.dtype: torch.dtype = self.model.dtype
        self.max_length = self.facts.max_length
        self._tree_masks: Callable[[Tensor, Tensor, Tensor, int], Any] | None = None
        self._probe()

    def __init_subclass__(cls, **options: Any) -> None:
        """A subclass is run through its own methods, unless it sets `replaceable`: it may do other things in them."""
        super().__init_subclass__(**options)
        cls.replaceable = cls.__dict__.get("replaceable", False)

    def tapping(self, layer_ids: Sequence[int]) -> Target:
        """This model behind a target that listens to these layers."""
        return Target(self.model, layer_ids)

    @classmethod
    def from_pretrained(
        cls,
        path_or_id: str | Path,
        *,
        layer_ids: Sequence[int] = (),
        device: str | torch.device | None = None,
        dtype: str | torch.dtype | None = None,
        **kwargs: Any,
    ) -> Target:
        """Load a model from a folder or a hub id; "smollm2" is the demo's.

        device: cuda, else xpu, else cpu where not given; leave it out when `device_map` is among `kwargs`.
        dtype: the checkpoint's own where not given. kwargs: passed on to transformers' `from_pretrained`; code that
        comes with a checkpoint is run with `trust_remote_code=True` only, and nothing asks for it.
        An image-text model is loaded where there is no text-only class, and used for text.
        """
        return cls(load_model(path_or_id, device, dtype, **kwargs), layer_ids)

    @property
    def generation_config(self) -> Any:
        """The model's own, as it is now, or None."""
        return getattr(self.model, "generation_config", None)

    def new_cache(self, batch: int, capacity: int) -> TargetCache:
        """An empty cache. batch: must be 1. capacity: positions to allocate for; the cache grows where it is passed."""
        from .cache import TargetCache

        if batch != 1:
            raise ValueError(f"new_cache: batch must be 1 (a generic target runs one sequence at a time), got {batch}")
        if capacity < 1:
            raise ValueError(f"new_cache: capacity must be at least 1 position, got {capacity}")
        return TargetCache(self.facts.text_config, self.facts.layer_kinds, batch, capacity)

    def prefill(self, ids: Tensor, cache: TargetCache) -> TargetOutput:
        """Run the next tokens of the sequence and commit them; may be called again to append more.

        ids: [1, P] integers, P >= 1. Returns logits [1, 1, V] of the last position and features [1, P, F * H].
        """
        self._check_tokens("prefill", ids, cache)
        output = self._forward(ids, cache, last_only=True)
        cache.advance(ids.shape[1])
        return output

    def verify(self, tokens: Tensor, cache: TargetCache, tree: Tree | None = None) -> TargetOutput:
        """Run a block after the committed positions without committing it; `commit` must follow.

        tokens: [1, S] integers, the anchor first. Row i predicts the token after slot i.
        tree: who follows whom, for a target whose `check_trees` passed; None is a chain.
        Returns logits [1, S, V] and features [1, S, F * H].
        """
        from .cache import VerifiedBlock

        self._check_tokens("verify", tokens, cache, None if tree is None else int(tree.depths.max()) + 1)
        snapshot = cache.snapshot() if cache.recurrent and tokens.shape[1] > 1 else []
        if tree is not None and self._tree_masks is None:
            raise ValueError("verify: tree must come after check_trees() has passed, got one before")
        output = self._run_block(tokens, cache) if tree is None else self._forward(tokens, cache, tree=tree)
        cache.block = VerifiedBlock(tokens, snapshot, tree is not None)
        return output

    def commit(self, cache: TargetCache, index: Tensor, num_accepted: Tensor) -> None:
        """Keep the anchor and the accepted drafts of the verified block, and forget the rest.

        index: [1, S] accepted slots in order, anchor first, padded with -1; 0, 1, 2, ... where the block is a chain.
        num_accepted: [1] accepted drafts. Neither is read for a block of one slot, so plain decoding never syncs.
        Recurrent layers are put back and the kept tokens run once more.
        """
        block = cache.block
        if block is None:
            raise ValueError("commit: cache must hold a block from verify, got none")
        size = block.tokens.shape[1]
        if index.shape != (1, size) or num_accepted.shape != (1,):
            raise ValueError(
                f"commit: index must be [1, {size}] (the block's slots) and num_accepted [1], "
                f"got {list(index.shape)} and {list(num_accepted.shape)}"
            )
        slots = [0] if size == 1 else accepted_slots(index, num_accepted, block.is_tree)
        kept = len(slots)
        cache.block = None
        if slots != [*range(kept)]:
            cache.gather(slots)
        if kept < size and cache.recurrent:
            cache.restore(block.snapshot)
            self._run_block(block.tokens[:, :kept], cache, last_only=True, taps=False)
        cache.advance(kept)

    def encode(self, ids: Tensor, *, all_logits: bool = True) -> TargetOutput:
        """Run whole texts without a cache, as training does.

        ids: [B, P] integers, shorter texts filled up on the right (nothing before the filling sees it).
        Returns logits [B, P, V], or [B, 1, V] of the last column, and features [B, P, F * H].
        """
        short = not all_logits and self.facts.takes_logits_to_keep
        taken: dict[int, Tensor] = {}
        with torch.no_grad(), self.borrow(taken, self.layer_ids):
            arguments = {"logits_to_keep": 1} if short else {}
            logits = self.model(input_ids=ids, use_cache=False, **arguments).logits
        features = torch.cat([taken[i] for i in self.layer_ids], -1).to(self.dtype) if taken else None
        return TargetOutput(logits if all_logits else logits[:, -1:], features)

    def close(self) -> None:
        """End the use of this target. The model itself is left as it was given."""
        self.closed = True

    def __enter__(self) -> Target:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run_block(self, tokens: Tensor, cache: TargetCache, **how: Any) -> TargetOutput:
        """One forward, or two where the block reaches past the position at which the model changes its RoPE."""
        before = (self.facts.rope_switch or 0) - cache.length
        if not 0 < before < tokens.shape[1]:
            return self._forward(tokens, cache, **how)
        first = self._forward(tokens[:, :before], cache, **how)
        cache.advance(before)
        try:
            second = self._forward(tokens[:, before:], cache, **how)
        finally:
            cache.advance(-before)
        features = [x for x in (first.features, second.features) if x is not None]
        logits = torch.cat([first.logits, second.logits], 1)
        return TargetOutput(logits, torch.cat(features, 1) if features else None)

    def _forward(
        self,
        tokens: Tensor,
        cache: TargetCache,
        last_only: bool = False,
        taps: bool = True,
        tree: Tree | None = None,
    ) -> TargetOutput:
        arguments: dict[str, Any] = {self.facts.cache_argument: cache.model_cache}
        start = cache.length
        if tree is not None and self._tree_masks is not None:
            lengths, columns = torch.tensor([start], device=self.device), start + tokens.shape[1]
            arguments["position_ids"] = start + tree.depths.long()
            arguments["attention_mask"] = self._tree_masks(lengths, tree.depths, tree.visibility, columns)
        elif self.facts.takes_positions:
            arguments["position_ids"] = torch.arange(start, start + tokens.shape[1], device=self.device)[None]
        if last_only and self.facts.takes_logits_to_keep:
            arguments["logits_to_keep"] = 1
        taken: dict[int, Tensor] = {}
        try:
            with torch.no_grad(), self.borrow(taken, self.layer_ids if taps else ()):
                logits = self.model(input_ids=tokens, use_cache=True, **arguments).logits
        except BaseException:
            # Attention rows past the committed length are never read; a half-updated recurrent state would be.
            cache.usable = not cache.recurrent
            raise
        features = torch.cat([taken[i] for i in self.layer_ids], -1).to(self.dtype) if taken else None
        return TargetOutput(logits[:, -1:] if last_only else logits, features)

    @contextmanager
    def borrow(self, taken: dict[int, Tensor], layer_ids: Iterable[int]) -> Iterator[None]:
        """Hooks on the tapped layers and evaluation mode for the duration of one forward, undone whatever happens."""
        training = [module for module in self._all_modules if module.training]
        try:
            for module in training:
                module.training = False
            with self.tap(taken, layer_ids):
                yield
        finally:
            for module in training:
                module.training = True

    @contextmanager
    def tap(self, taken: dict[int, Tensor], layer_ids: Iterable[int]) -> Iterator[None]:
        """Hooks alone. They take what this thread's forward gives, in the model or in a `ModelView` of it."""
        handles, thread = [], threading.get_ident()
        try:
            for i in set(layer_ids):
                handles.append(self.layers[i].register_forward_hook(partial(_take, taken, i, thread)))
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _check_tokens(self, op: str, tokens: Tensor, cache: TargetCache, deep: int | None = None) -> None:
        if self.closed:
            raise ValueError(f"{op}: target must be open, got one after close()")
        if tokens.ndim != 2 or tokens.shape[0] != 1 or tokens.shape[1] == 0 or tokens.is_floating_point():
            raise ValueError(f"{op}: tokens must be [1, S] integers, S >= 1, got {list(tokens.shape)} {tokens.dtype}")
        end = cache.length + (tokens.shape[1] if deep is None else deep)
        if self.max_length is not None and end > self.max_length:
            raise ValueError(
                f"{op}: tokens must end within {self.max_length} positions (the model's max_position_embeddings), "
                f"got {tokens.shape[1]} after {cache.length}"
            )
        if cache.block is not None:
            raise ValueError(f"{op}: cache must have its verified block committed first, got an open block")
        if not cache.usable:
            raise ValueError(f"{op}: cache must be a fresh one after a forward that failed, got the same")

    def _refuse(self, expected: str, got: object) -> NoReturn:
        facts.refuse(self.model, expected, got)

    def _check_layer_ids(self, layer_ids: Sequence[int]) -> tuple[int, ...]:
        ids = tuple(int(i) for i in layer_ids)
        wrong = [i for i in ids if not 0 <= i < self.num_layers]
        if wrong:
            raise ValueError(
                f"Target: layer_ids must be in 0..{self.num_layers - 1} (the decoder layers of "
                f"{type(self.model).__name__}), got {wrong}"
            )
        return ids

    def _probe(self) -> None:
        """See on a few tokens what the model's own cache, logits and features look like; try a rollback if needed."""
        import transformers

        from .cache import plan_layers

        ids = self.trial_ids(24)
        output, shapes = self._tapped_forward(ids)
        self.vocab_size: int = output.logits.shape[-1]
        whole = [1, ids.shape[1], self.hidden_size]
        for i, shape in shapes.items():
            if shape != whole:
                self._refuse(f"layers that return hidden states [B, S, {self.hidden_size}]", f"{shape} from layer {i}")
        keeps = self.facts.takes_logits_to_keep
        if keeps:
            # A model may skip its last layers, and so their features, in rows whose logits are not asked for.
            keeps = all(shape == whole for shape in self._tapped_forward(ids, logits_to_keep=1)[1].values())
        try:
            kinds = plan_layers(getattr(output, self.facts.cache_argument, None))
        except ValueError as error:
            raise ValueError(f"Target: {type(self.model).__name__} {error}") from None
        changed = ids.clone()
        changed[0, -1] = ids[0, 0]
        mixes = mixing_fault(output.logits, self.try_forward(changed).logits)
        self.facts = replace(self.facts, takes_logits_to_keep=keeps, layer_kinds=kinds, mixes_rows=mixes)
        if "stateful" in self.facts.layer_kinds and (reason := rollback_fault(self, ids, output.logits)) is not None:
            self._refuse(
                "recurrent layers that continue and roll back exactly over several tokens",
                f"{reason}, transformers {transformers.__version__}",
            )

    def trial_ids(self, count: int) -> Tensor:
        """Ids [1, at most `count`] to try the model on."""
        # Ids from the middle of the vocabulary: special tokens, those of images among them, sit at its ends.
        vocab = len(self.embed_weight)
        return (torch.arange(min(count, self.max_length or count), device=self.device)[None] + vocab // 2) % vocab

    def try_forward(self, ids: Tensor) -> Any:
        """The model's own output for ids [1, P], with its own new cache."""
        return self._tapped_forward(ids)[0]

    def _tapped_forward(self, ids: Tensor, **arguments: int) -> tuple[Any, dict[int, list[int]]]:
        taken: dict[int, Tensor] = {}
        with torch.no_grad(), self.borrow(taken, self.layer_ids):
            output = self.model(input_ids=ids, use_cache=True, **arguments)
        return output, {i: list(taken[i].shape) if i in taken else [] for i in self.layer_ids}

    def check_trees(self) -> None:
        """Try a small tree; raise ValueError, naming the model's class and the reason, where trees are not exact."""
        fault = "layers whose state follows one path" if "stateful" in self.facts.layer_kinds else None
        fault = fault or ("RoPE that changes with the length" if self.facts.rope_switch is not None else None)
        fault = fault or (None if self.facts.takes_positions else "a forward without `position_ids`")
        if (self.max_length or PROBE_TOKENS) < PROBE_TOKENS:
            fault = fault or f"a context of {self.max_length} positions, too short to try a tree"
        if fault is None:
            from .tree_masks import TreeMasks

            try:
                self._tree_masks = TreeMasks(self.facts.text_config, self.dtype).build
                fault = tree_fault(self, self.trial_ids(PROBE_TOKENS))
            except ValueError as error:
                fault = str(error)
        if fault is not None:
            self._refuse("attention that takes a tree of slots exactly (path='tree')", fault)


def _take(taken: dict[int, Tensor], i: int, thread: int, module: nn.Module, args: Any, output: Any) -> None:
    if threading.get_ident() == thread:
        taken[i] = output if isinstance(output, Tensor) else output[0]
