"""The block-diffusion drafter, DFlash and DFlash 2: one module for inference and training."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .. import ops
from ..checkpoints import checkpoint
from ..checkpoints.config import DrafterConfig, check_target
from ..decoder.block import block_masks
from ..decoder.fingerprints import Fingerprint
from ..decoder.linear import Projection
from ..decoder.stores import KVCache
from ..messages import shown
from ..ops import reference
from ..protocols import Proposal
from .arguments import check_features, check_room, seeds_of, size_of_block, temperature_of
from .decoder import DrafterDecoder, decoder_of
from .layers import CandidateSelector, Convolve, DrafterLayer, check_context, stack_context
from .names import CanonicalNames
from .rope import RotaryTable


def _exact_dtypes(method: Callable[..., Any]) -> Callable[..., Any]:
    """Keep a surrounding autocast out: the cache and the ops take the drafter's own dtype."""

    @wraps(method)
    def run(self: Drafter, tensor: Tensor, *args: Any, **options: Any) -> Any:
        if not isinstance(tensor, Tensor):
            raise ValueError(f"{method.__name__}: the first argument must be a tensor, got {shown(tensor)}")
        with torch.autocast(tensor.device.type, enabled=False):
            return method(self, tensor, *args, **options)

    return run


class Drafter(CanonicalNames):
    """A DFlash or DFlash 2 drafter.

    Args:
        config: What to build. Parameters are freshly initialised: convolutions the identity, successors zero.
        backend: "native" for the compiled ops, "reference" for plain torch on any device.

    Source: spec of the published checkpoints; a DFlash 2 drafter with identity convolutions and zero successors
    proposes what the DFlash drafter of the same backbone does.
    """

    replaceable: ClassVar[bool] = True
    d2t: Tensor | None
    mask_embedding: Tensor | None

    def __init_subclass__(cls, **options: Any) -> None:
        """A subclass is run through its own methods, unless it sets `replaceable`: it may do other things in them."""
        super().__init_subclass__(**options)
        cls.replaceable = cls.__dict__.get("replaceable", False)

    def __init__(self, config: DrafterConfig, *, backend: str = "native") -> None:
        super().__init__()
        if backend not in ("native", "reference"):
            raise ValueError(f"Drafter: backend must be 'native' or 'reference', got {backend!r}")
        self.config = config
        self.backend = backend
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.fc = nn.Linear(len(config.target_layer_ids) * config.target_hidden_size, hidden, bias=False)
        self.hidden_norm = nn.RMSNorm(hidden, eps)
        self.layers = nn.ModuleList(DrafterLayer(config) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(hidden, eps)
        self.candidate_selector = CandidateSelector(config) if config.selector_rank else None
        self.embed_tokens: nn.Embedding | None = None
        self.lm_head: nn.Linear | None = None
        self.register_buffer("d2t", None)  # target id = draft id + d2t[draft id]
        self.register_buffer("mask_embedding", None)  # [H], replaces the embedding row of the mask token
        self._rotary = RotaryTable(
            config.rope, config.head_dim, config.max_position_embeddings, interleaved=config.rope_interleaved
        )
        self._context_weights: tuple[Fingerprint, tuple[Projection, Tensor]] | None = None
        self._decoder: tuple[tuple[int, ...], DrafterDecoder | None] | None = None

    # --- loading and saving ---------------------------------------------------------------------------------

    @classmethod
    def from_pretrained(
        cls,
        path_or_id: str | Path,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        revision: str | None = None,
        backend: str = "native",
        **hub: Any,
    ) -> Drafter:
        """Load a checkpoint in any layout `pydflash.load_checkpoint` reads, from a folder or a hub id.

        `dtype` None keeps the checkpoint's own. `hub`: `token`, `cache_dir`, `local_files_only`, `force_download`.
        Raises: ValueError or OSError naming what does not fit.
        """
        config, tensors = checkpoint.load_checkpoint(path_or_id, revision=revision, **hub)
        with torch.device("meta"):
            drafter = cls(config, backend=backend)
        drafter.load_canonical(tensors)
        return drafter.to(device=device, dtype=dtype).eval()

    def save_pretrained(self, directory: str | Path, *, layout: str = "zlab") -> None:
        """Write config.json and model.safetensors, in the "zlab" or the "speculators" layout, atomically."""
        checkpoint.save_checkpoint(directory, self.config, self.canonical(), layout=layout)

    def check_target(self, *, hidden_size: int, num_layers: int, vocab_size: int, embedding_rows: int) -> None:
        """Raise ValueError, naming the key, where this drafter was not made for such a target."""
        check_target(
            self.config,
            hidden_size=hidden_size,
            num_layers=num_layers,
            vocab_size=vocab_size,
            embedding_rows=embedding_rows,
        )

    @property
    def needs_tables(self) -> bool:
        """Whether it takes the target's embedding table or head, having none of its own."""
        return self.embed_tokens is None or self.lm_head is None

    def with_backend(self, backend: str) -> Drafter:
        """The same weights on the compiled ops ("native") or on plain torch ("reference")."""
        if backend == self.backend:
            return self
        other = copy.copy(self)  # whoever holds this one keeps its backend
        other.backend = backend
        return other

    @property
    def ops(self) -> ModuleType:
        """The module whose functions run: the compiled ops, or their definitions in plain torch."""
        return ops if self.backend == "native" else reference

    @property
    def device(self) -> torch.device:
        return self.fc.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.fc.weight.dtype

    def reserve(self, positions: int) -> None:
        """Make `forward` and `context_keys` ready for positions below this number, on the drafter's device."""
        self._rotary.reserve(positions, self.device)

    def tables(self) -> tuple[Tensor, Tensor]:
        """cos and sin [positions, head_dim / 2] float32 of the positions reserved so far."""
        return self._rotary.tables(self.device)

    # --- context --------------------------------------------------------------------------------------------

    def new_cache(self, batch: int, capacity: int) -> KVCache:
        """An empty context cache for `batch` sequences of up to `capacity` positions.

        A drafter in which every layer has a window keeps a ring of the window's size instead.
        """
        check_room(batch, capacity)
        config = self.config
        windows = [config.window(layer) for layer in range(config.num_layers)]
        self._renew()
        cache = KVCache(
            config.num_layers,
            batch,
            config.num_kv_heads,
            config.head_dim,
            capacity,
            ring=max(windows) - 1 if all(windows) else None,
            dtype=self.dtype,
            device=self.device,
        )
        self.reserve(capacity + config.block_size)
        return cache

    @_exact_dtypes
    def append_context(self, features: Tensor, cache: KVCache, counts: Tensor | None = None) -> None:
        """Take in the target's features of committed positions, in every layer's keys and values.

        Args:
            features: [B, C, F * target_hidden_size], the positions from `cache.lengths` on.
            cache: From `new_cache`; its lengths grow by `counts`.
            counts: [B] valid rows of each sequence, the first ones; None for all C.

        Raises: ValueError if the features' width is wrong or the cache is full.
        """
        held = cache.lengths.shape[0]
        check_features(features, counts, held, self.fc.in_features)
        batch, rows, _ = features.shape
        self.reserve(cache.capacity + self.config.block_size)  # the cache may come from another instance
        skipped = max(0, rows - cache.rows) if counts is None else 0  # a ring would overwrite them at once
        features = features[:, skipped:].to(self.dtype)
        if (decoder := self.decoder()) is not None:
            cache.check_room(rows if counts is None else counts)
            if skipped:
                cache.lengths += skipped
            valid = torch.full_like(cache.lengths, rows - skipped) if counts is None else counts.to(torch.int32)
            self._append(decoder, features, cache, valid)
            cache.lengths += valid
            return
        slots = torch.arange(rows - skipped, device=features.device, dtype=torch.int32)
        positions = cache.lengths[:, None] + (slots + skipped)
        k, v = self.context_keys(self.fuse(features), positions)
        if counts is None:
            index = slots.expand(batch, -1)
            counts = torch.full_like(cache.lengths, rows - skipped)
        else:
            counts = counts.to(torch.int32)
            index = torch.where(slots < counts[:, None], slots, -1)
        cache.append(self.ops, k, v, index, counts, skipped)

    def _append(self, decoder: DrafterDecoder, features: Tensor, cache: KVCache, counts: Tensor) -> None:
        config = self.config
        projection, norms = self._context_projection()
        both = projection(decoder.fuse(features, self.hidden_norm.weight))
        ops.context_append(
            both.unflatten(0, features.shape[:2]),
            norms,
            config.rms_norm_eps,
            *self.tables(),
            cache.k,
            cache.v,
            cache.lengths,
            counts,
            config.head_dim,
            config.rope_interleaved,
            round_first=False,
        )

    def decoder(self) -> DrafterDecoder | None:
        """The layers in few launches, on a device with compiled ops and without gradients; else None."""
        if self.device.type == "cpu" or self.backend != "native" or torch.is_grad_enabled():
            return None
        pointers = tuple(parameter.data_ptr() for parameter in self.parameters())
        if self._decoder is None or self._decoder[0] != pointers:
            self._decoder = (pointers, decoder_of(self.config, self.stack, self.norm.weight, self.fc))
        return self._decoder[1]

    def derived(self) -> tuple[object, object]:
        """What is made of the parameters and kept: other objects once these have moved, or k and v projections changed.

        For the beginning of a request: on a device it waits for samples of the weights.
        """
        with torch.no_grad():
            self._renew()
            return self.decoder(), self._context_projection()

    def refresh(self) -> None:
        """Drop every copy of weights, whether they seem to have changed or not: for edits that no sample shows."""
        self._context_weights = self._decoder = None

    def _renew(self) -> None:
        """Drop copies of weights that have changed since; at the beginning of a request."""
        if self._context_weights is not None and self._context_weights[0].changed(self._context_parameters()):
            self._context_weights = None

    def fuse(self, features: Tensor) -> Tensor:
        """hidden_norm(fc(features)): [B, C, F * target_hidden_size] to [B, C, H], the same for every layer."""
        return self.hidden_norm(self.fc(features.to(self.dtype)))

    def context_keys(self, fused: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [layers, B, Hkv, C, D] of all layers, in one GEMM, from fused features [B, C, H]."""
        config = self.config
        projection, norms = self._context_projection()
        both = F.linear(fused, projection.weights[0], projection.biases[0])
        both = both.unflatten(-1, (config.num_layers, 2, config.num_kv_heads, config.head_dim))
        k, v = both.permute(3, 2, 0, 4, 1, 5)  # [2, layers, B, Hkv, C, D]
        k = F.rms_norm(k, (config.head_dim,), None, config.rms_norm_eps) * norms[:, None, None, None]
        cos, sin = self._rotary.lookup(positions.long())
        return self._rotary.rotate(k, cos[:, None], sin[:, None]), v

    def _context_projection(self) -> tuple[Projection, Tensor]:
        """The k and v rows of every layer's qkv projection as one weight, and the norms of k [layers, D].

        A copy, kept until one of them changes; with gradients made each time, so that the weights are seen.
        """
        check_context(self.stack)
        if torch.is_grad_enabled():
            return stack_context(self.stack)
        parameters = self._context_parameters()
        if self._context_weights is None or self._context_weights[0].moved(parameters):
            self._context_weights = Fingerprint(parameters), stack_context(self.stack)
        return self._context_weights[1]

    def _context_parameters(self) -> list[Tensor]:
        modules = [*(layer.qkv_proj for layer in self.stack), *(layer.k_norm for layer in self.stack)]
        return [parameter for module in modules for parameter in module.parameters()]

    # --- the block ------------------------------------------------------------------------------------------

    def embed(self, ids: Tensor, table: Tensor | nn.Module | None) -> Tensor:
        """Scaled embedding rows [..., H] of `ids`, from the drafter's own table where it has one."""
        source = table if self.embed_tokens is None else self.embed_tokens
        weight = source if isinstance(source, Tensor) else getattr(source, "weight", None)
        if weight is None:
            raise ValueError("embed: the target's embedding table must be given: this drafter has none of its own")
        rows = F.embedding(ids, weight).to(self.dtype)
        if self.mask_embedding is not None:
            rows = torch.where((ids == self.config.mask_token_id)[..., None], self.mask_embedding.to(rows), rows)
        scale = self.config.input_embedding_scale
        return rows if scale == 1 else rows * scale

    def forward(
        self,
        embeddings: Tensor,
        positions: Tensor,
        attend: Callable[[int, Tensor, Tensor, Tensor], Tensor],
        convolve: Convolve = reference.block_conv,
    ) -> Tensor:
        """Final-normed hidden states of block rows.

        Args:
            embeddings: [B, S, H] from `embed`.
            positions: [B, S] absolute position of each row.
            attend: `attend(layer, q [B, Hq, S, D], k, v [B, Hkv, S, D]) -> [B, Hq, S, D]`: attention of the rows
                over what that layer may see, their own keys and values among it.
            convolve: the block convolution of DFlash 2; the compiled one has no gradient.

        Returns: [B, S, H].
        """
        cos, sin = (table[:, :, None] for table in self._rotary.lookup(positions.long()))
        x = embeddings
        for i, layer in enumerate(self.stack):
            q, k, v, after = layer.before_attention(x, self._rotary, cos, sin, convolve)
            x = layer.after_attention(x, attend(i, q, k, v), after, convolve)
        return self.norm(x)

    def hidden(self, anchors: Tensor, cache: KVCache, table: Tensor | nn.Module | None, block_size: int) -> Tensor:
        """Hidden states [B, S, H] of the block [anchor, mask, mask, ...] over the cached context, in one forward."""
        config, device = self.config, anchors.device
        ids = torch.full((anchors.shape[0], block_size), config.mask_token_id, device=device)
        ids[:, 0] = anchors
        embeddings = self.embed(ids, table)
        if (decoder := self.decoder()) is not None:
            return decoder.hidden(embeddings, cache, self.tables())
        depths, bidirectional, causal = block_masks(block_size, device)
        lengths = cache.lengths

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            visible = causal if config.causal[layer] else bidirectional
            k_cache, v_cache = cache.k[layer], cache.v[layer]
            return self.ops.block_attention(q, k_cache, v_cache, k, v, lengths, visible, depths, config.window(layer))

        return self(embeddings, lengths[:, None] + depths, attend, self.ops.block_conv)

    def logits(self, hidden: Tensor, head: nn.Module | None) -> Tensor:
        """Draft logits [..., V or draft vocabulary] of hidden states, multiplier and soft cap applied."""
        head = self.lm_head if self.lm_head is not None else head
        if head is None:
            raise ValueError("logits: the target's head must be given: this drafter has none of its own")
        weight = getattr(head, "weight", None)
        if isinstance(weight, Tensor) and weight.is_floating_point() and weight.itemsize > 1:  # else quantised
            hidden = hidden.to(weight.dtype)
        return self.scale_logits(head(hidden))

    def scale_logits(self, logits: Tensor) -> Tensor:
        """The head's output with the config's multiplier and soft cap applied, element by element."""
        if self.config.output_multiplier != 1:
            logits = logits * self.config.output_multiplier
        cap = self.config.final_logit_softcapping
        return torch.tanh(logits / cap) * cap if cap else logits

    @_exact_dtypes
    def propose(
        self,
        anchors: Tensor,
        cache: KVCache,
        *,
        embed: Tensor | nn.Module | None = None,
        head: nn.Module | None = None,
        block_size: int | None = None,
        temperature: Tensor | float | None = None,
        seeds: Tensor | Sequence[int] | int = 0,
        node_temperature: Tensor | float | None = None,
    ) -> Proposal:
        """Draft one block after each anchor, in one forward pass.

        Args:
            anchors: [B] the newest token of each sequence, at position `cache.lengths`.
            cache: Its context must be complete: the features of every position before the anchor.
            embed: The target's raw embedding table [V, H], or the module that holds it.
            head: The target's output head, called as a module.
            block_size: S, at most the trained block size (the default); S - 1 tokens are drafted.
            temperature: [B] or a number: the path is drawn from softmax(score / T). None: the best edges.
            seeds: [B] or a number, the key of the draws.
            node_temperature: Also fill `log_normalizers` at this temperature, a number above 0 or [B]: what
                probabilities of independent slots need.

        Returns: a `Proposal`.

        Raises: ValueError if block_size is not 1 .. the trained size.
        """
        config = self.config
        size = size_of_block(anchors, block_size, cache.lengths.shape[0], config.block_size)
        self.reserve(cache.capacity + config.block_size)
        try:
            hidden = self.hidden(anchors, cache, embed, size)[:, 1:]
        except IndexError as error:  # torch looks at ids on a CPU
            raise ValueError(f"propose: anchors must be ids of the embedding table, got {shown(anchors)}") from error
        selector = self.candidate_selector
        projected = None if selector is None else selector.hidden_projection(hidden)
        seeds = seeds_of(seeds, anchors.device)
        logits = self.logits(hidden, head)
        tokens, candidates, probs, scores = self.ops.path_select(
            logits,
            projected,
            None if selector is None else selector.predecessor_codebook,
            None if selector is None else selector.successor_codebook,
            anchors,
            temperature_of(temperature),
            seeds,
            cache.lengths,
            config.num_candidates,
            config.draft_vocab_size,
        )
        if self.d2t is not None:
            tokens, candidates = tokens + self.d2t[tokens], candidates + self.d2t[candidates]
        log_normalizers = None
        if node_temperature is not None and selector is None:
            divisor = node_temperature[:, None, None] if isinstance(node_temperature, Tensor) else node_temperature
            log_normalizers = (logits[..., : config.draft_vocab_size].float() / divisor).logsumexp(-1)
        return Proposal(tokens, candidates, probs, scores, log_normalizers)
