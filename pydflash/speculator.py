"""The speculative loop: rounds of propose, verify, accept and commit around a target model."""

from __future__ import annotations

import copy
import statistics
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from . import _backends, ops, reference
from .drafter import Drafter, Proposal
from .paths import PATHS, Block, Paths
from .request import LogitsProcessor, Request, Round, Stream
from .sampling import SamplingParams, row_seeds
from .stats import Stats
from .target import Target, TargetOutput
from .target_defaults import GenerationDefaults
from .text import Output, Prompt, encode, split_prompts, token_ids_of


class DrafterLike(Protocol):
    """What the loop needs of a drafter; `pydflash.Drafter` and the ONNX Runtime drafter both are one."""

    config: Any

    def new_cache(self, batch: int, capacity: int) -> Any: ...
    def append_context(self, features: Tensor, cache: Any, counts: Tensor | None = None) -> None: ...
    def propose(
        self,
        anchors: Tensor,
        cache: Any,
        *,
        embed: Any = None,
        head: Any = None,
        block_size: int | None = None,
        temperature: Any = None,
        seeds: Any = 0,
    ) -> Proposal: ...


class Speculator:
    """Lossless speculative decoding of a target with a drafter; plain decoding where the drafter is None.

    Args:
        model: A transformers causal LM, or a `Target`.
        drafter: A `Drafter`, anything with its three methods, or None.
        tokenizer: Needed for text in and text out; token ids work without.
        block_size: Slots per block, anchor included, at most the trained size (the default).
        path: How drafts are chosen from the lattice: "walk", "viterbi" (its most probable path), or "tree" (its
            most probable nodes, verified in one forward; for targets with attention only).
        num_nodes: Drafts in a tree, 1 to 63, or "auto" (the default) to choose by what verifying them takes.
        draft_sampling: At temperature > 0, whether drafts are sampled and accepted with the drafter's law q, or
            are the best ones and accepted where the target draws the same token. Default: sampled for DFlash 2,
            whose walk is coherent; not for DFlash, whose slots know nothing of each other. A tree has the sampled
            walk as its trunk.
        backend: "auto" or "native" for the compiled ops, "reference" for plain torch on any device.

    A Speculator keeps nothing between requests: streams may be abandoned, and several may run at once.

    Raises: ValueError or RuntimeError where target, drafter and options do not go together, naming both sides.
    """

    def __init__(
        self,
        model: nn.Module | Target,
        drafter: DrafterLike | None,
        tokenizer: Any = None,
        *,
        block_size: int | None = None,
        path: str = "walk",
        num_nodes: int | str | None = None,
        draft_sampling: bool | None = None,
        backend: str = "auto",
        quantize: str | None = None,
        optimize: str | None = None,
    ) -> None:
        _refuse_unknown(quantize=quantize, optimize=optimize)
        if drafter is not None and not all(hasattr(drafter, name) for name in ("config", "new_cache", "propose")):
            raise ValueError(
                f"Speculator: drafter must be a Drafter or None, got {drafter!r}; a folder or hub id loads "
                "with Drafter.from_pretrained"
            )
        layer_ids = () if drafter is None else drafter.config.target_layer_ids
        if isinstance(model, Target):
            target = model if tuple(model.layer_ids) == tuple(layer_ids) else Target(model.model, layer_ids)
        else:
            target = Target(model, layer_ids)
        self.target, self.drafter, self.tokenizer = target, drafter, tokenizer
        self._backend = "reference" if backend == "reference" else "native"
        self._defaults()  # refuses what a generation config asks for in vain
        backend_name = _backends.choose(backend, target.device.type)
        if self._backend == "native" and target.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise ValueError(
                f"Speculator: the target must be float32, bfloat16 or float16 for the native ops, got {target.dtype}; "
                "backend='reference' takes it"
            )
        self._backends = {"ops": backend_name, "target": "generic"}
        self.block_size = 1
        self.draft_sampling = False
        if drafter is None:
            if path in PATHS[1:]:
                raise ValueError(f"Speculator: path must be 'walk' where drafter is None, got {path!r}")
            self._paths = Paths(path, num_nodes, 0, 1)
            return
        config = drafter.config
        self.block_size = config.block_size if block_size is None else block_size
        if type(self.block_size) is not int or not 1 <= self.block_size <= config.block_size:
            raise ValueError(
                f"Speculator: block_size must be 1 to {config.block_size} (as the drafter was trained), "
                f"got {block_size!r}"
            )
        self._paths = self._choose_paths(path, num_nodes, draft_sampling)
        if isinstance(drafter, Drafter):
            drafter.check_target(
                hidden_size=target.hidden_size,
                num_layers=target.num_layers,
                vocab_size=target.vocab_size,
                embedding_rows=target.embed_weight.shape[0],
            )
            if drafter.device != target.device:
                raise ValueError(f"Speculator: the drafter must be on {target.device}, got {drafter.device}")
            if self._backend == "native":
                _backends.check_native(config, self.block_size)
            if drafter.backend != self._backend:
                self.drafter = copy.copy(drafter)  # shares the weights; another Speculator may hold the original
                self.drafter.backend = self._backend
            self._backends["drafter"] = backend_name

    @classmethod
    def from_pretrained(
        cls,
        target: str | Path,
        drafter: str | Path | None = None,
        *,
        device: str | torch.device | None = None,
        dtype: str | torch.dtype | None = None,
        **options: Any,
    ) -> Speculator:
        """Load a target with its tokenizer, and a drafter, each from a folder or a hub id.

        `device` defaults to cuda, xpu or cpu, whichever is there first; `dtype` to the target's own, which the
        drafter takes over. `options` are the keywords of `Speculator`.
        """
        from .target import load_tokenizer

        loaded = None if drafter is None else Drafter.from_pretrained(drafter)
        layer_ids = () if loaded is None else loaded.config.target_layer_ids
        model = Target.from_pretrained(target, layer_ids=layer_ids, device=device, dtype=dtype)
        if loaded is not None:
            loaded = loaded.to(device=model.device, dtype=model.dtype)
        return cls(model, loaded, load_tokenizer(target), **options)

    def _choose_paths(self, path: str, num_nodes: int | str | None, draft_sampling: bool | None) -> Paths:
        config = self.drafter.config if self.drafter is not None else None
        paths = Paths(path, num_nodes, self.block_size - 1, config.num_candidates if config else 1)
        if path == "viterbi" and draft_sampling:
            raise ValueError(f"Speculator: draft_sampling must be off where path is {path!r}, got {draft_sampling!r}")
        if path == "tree":
            self.target.check_trees()
            if paths.auto:
                paths.measure(self.target, self._draft_seconds())
        walks = path != "viterbi" and config is not None and config.version == 2
        self.draft_sampling = walks if draft_sampling is None else draft_sampling
        return paths

    def _draft_seconds(self) -> float:
        """What a proposal takes; the median of three after one to warm up."""
        assert self.drafter is not None
        times = []
        for _ in range(4):
            cache = self.drafter.new_cache(1, 64 + self.block_size)
            config, target = self.drafter.config, self.target
            width = len(config.target_layer_ids) * target.hidden_size
            features = torch.zeros(1, 4, width, dtype=target.dtype, device=target.device)
            begin = time.perf_counter()
            with torch.inference_mode():
                self.drafter.append_context(features, cache)
                anchors = torch.ones(1, dtype=torch.long, device=target.device)
                tables = {"embed": target.embed_weight, "head": target.head}
                int(self.drafter.propose(anchors, cache, **tables, block_size=self.block_size).tokens.sum())
            times.append(time.perf_counter() - begin)
        return statistics.median(times[1:])

    def _defaults(self) -> GenerationDefaults:
        """What the target's generation config asks for now; users change it between requests."""
        return GenerationDefaults(self.target.generation_config)

    @property
    def ops(self) -> ModuleType:
        """The module whose functions run: the compiled ops, or their definitions in plain torch."""
        return reference if self._backend == "reference" else ops

    def close(self) -> None:
        """End the use of the target; the model itself is left as it was given."""
        self.target.close()

    def __enter__(self) -> Speculator:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- generation -----------------------------------------------------------------------------------------

    def generate(
        self,
        prompt: Prompt,
        max_new_tokens: int | None = 256,
        temperature: float | None = None,
        top_p: float | None = None,
        top_k: int | None = None,
        min_p: float | None = None,
        seed: int | Sequence[int] | None = None,
        stop_token_ids: Sequence[int] | None = None,
        stop_strings: str | Sequence[str] | None = None,
        logits_processor: Sequence[LogitsProcessor] | None = None,
        return_proposals: bool = False,
        *,
        chat_template: str | bool | None = None,
    ) -> Any:
        """Generate for one prompt, or for each of a list.

        Args:
            prompt: Text, chat messages, token ids (list, [P] tensor), or a list of these ([B, P] tensor).
            max_new_tokens: None is up to the target's context limit.
            temperature, top_p, top_k, min_p: None takes what the target's generation config sets (greedy where it
                does not sample).
            seed: Number for all prompts, one number each, or None for fresh draws. At temperature > 0 without
                `draft_sampling` the text for a seed does not depend on the drafter.
            stop_token_ids: None takes the target's end-of-sequence tokens; [] none.
            stop_strings: The text ends with the first of them that appears. None takes the target's; [] none.
            logits_processor: `processor(input_ids [1, n], scores [1, V]) -> scores`, as in transformers, applied
                at every position with the tokens before it.
            return_proposals: Keep each round's block in `stats.proposals`.
            chat_template: None wraps text with the tokenizer's template where it has one; False never; a string
                is the template.

        Returns: a `Generation`, or a list of them for a list of prompts.

        Raises: ValueError naming the argument, what is allowed and what came.
        """
        prompts, many = split_prompts(prompt)
        seeds = row_seeds(seed, len(prompts))
        results = []
        for single, row_seed in zip(prompts, seeds, strict=True):
            stream = self.stream(
                single,
                max_new_tokens,
                temperature,
                top_p,
                top_k,
                min_p,
                row_seed,
                stop_token_ids,
                stop_strings,
                logits_processor,
                return_proposals,
                chat_template=chat_template,
            )
            for _ in stream:
                pass
            results.append(stream.output)
        return results if many else results[0]

    def stream(
        self,
        prompt: Prompt,
        max_new_tokens: int | None = 256,
        temperature: float | None = None,
        top_p: float | None = None,
        top_k: int | None = None,
        min_p: float | None = None,
        seed: int | None = None,
        stop_token_ids: Sequence[int] | None = None,
        stop_strings: str | Sequence[str] | None = None,
        logits_processor: Sequence[LogitsProcessor] | None = None,
        return_proposals: bool = False,
        *,
        chat_template: str | bool | None = None,
    ) -> Stream:
        """As `generate`, for one prompt, as an iterator of a `Chunk` per round; `stream.output` is the `Generation`."""
        prompts, many = split_prompts(prompt)
        if many:
            raise ValueError(f"stream: prompt must be a single one, got a list of {len(prompts)}")
        defaults = self._defaults()
        params = SamplingParams.resolve(defaults.sampling, temperature, top_k, top_p, min_p)
        ids = encode(prompts[0], self.tokenizer, chat_template, self.target.embed_weight.shape[0])
        if params.greedy and temperature is None and any(x is not None for x in (top_p, top_k, min_p)):
            warnings.warn(
                "top_p, top_k and min_p change nothing here: the target's generation config does not sample; give a "
                "temperature above 0",
                UserWarning,
                stacklevel=2,
            )
        if stop_token_ids is None:
            stop_token_ids = defaults.stop_token_ids or _tokenizer_stops(self.tokenizer)
        stops = token_ids_of("stop_token_ids", stop_token_ids)
        if stop_strings is None:
            stop_strings = defaults.stop_strings
        if callable(logits_processor):
            logits_processor = [logits_processor]
        if isinstance(stop_strings, str):
            stop_strings = [stop_strings]
        limit = self._token_limit(len(ids), max_new_tokens)
        device = self.target.device
        own = defaults.processors(len(ids), stops, device)
        request = Request(
            ids=ids,
            params=params,
            seeds=torch.tensor(row_seeds(seed, 1), device=device),
            processors=[*own, *(logits_processor or ())],
            output=Output(self.tokenizer, limit, stops, stop_strings),
            stats=Stats(len(ids), backends=dict(self._backends), proposals=[] if return_proposals else None),
            starts=torch.full((1,), len(ids) - 1, dtype=torch.int32, device=device),
        )
        return Stream(request, self._prefill, self._round)

    def _token_limit(self, prompt_length: int, max_new_tokens: int | None) -> int:
        if max_new_tokens is not None and (type(max_new_tokens) is not int or max_new_tokens < 0):
            raise ValueError(f"max_new_tokens: must be an integer >= 0, got {max_new_tokens!r}")
        longest = self.target.max_length
        if longest is not None:
            if prompt_length > longest:
                raise ValueError(f"prompt: must fit the target's {longest} positions, got {prompt_length} tokens")
            room = longest - prompt_length
            return room if max_new_tokens is None else min(max_new_tokens, room)
        if max_new_tokens is None:
            raise ValueError("max_new_tokens: must be a number: the target states no context limit, got None")
        return max_new_tokens

    # --- the round ------------------------------------------------------------------------------------------

    def _prefill(self, request: Request) -> list[int]:
        """Run the prompt through the target and take the first token from its last row."""
        target, length = self.target, len(request.ids)
        capacity = length + request.output.limit + self._paths.rows
        request.target_cache = target.new_cache(1, capacity)
        prompt = torch.tensor([request.ids], device=target.device)
        out = target.prefill(prompt, request.target_cache)
        _, _, bonus = self._accept(request, out, Block(prompt[:, -1:], None, 0))
        request.starts += 1
        if self.block_size > 1 and self.drafter is not None:
            request.context = self.drafter.new_cache(1, length + request.output.limit + self.block_size)
            request.features = out.features
        return [int(bonus)]

    def _round(self, request: Request) -> Round:
        """Propose, verify, accept, commit."""
        target = self.target
        anchors = torch.tensor([request.ids[-1]], device=target.device)
        block = Block(anchors[:, None], None, 0)
        slots = self._useful_slots(request)
        if request.context is not None and slots > 1:
            proposal = self._propose(request, anchors)
            block = self._paths.block(self.ops, anchors, proposal, slots - 1, request.params.temperature or 1.0)
        out = target.verify(block.tokens, request.target_cache, block.tree)
        index, num_accepted, bonus = self._accept(request, out, block)
        target.commit(request.target_cache, index, num_accepted)
        kept = index[0, : int(num_accepted) + 1].long()
        if out.features is not None:
            request.features = out.features[:, kept] if block.tree is not None else out.features[:, : len(kept)]
        request.starts += len(kept)
        tokens = [*block.tokens[0, kept[1:]].tolist(), int(bonus)]
        parents = None if block.tree is None else block.tree.parents[0].tolist()
        return Round(block.tokens[0].tolist(), parents, block.deepest, tokens)

    def _useful_slots(self, request: Request) -> int:
        """A full block, but no position at or beyond the target's context limit."""
        longest = self.target.max_length
        if longest is None:
            return self.block_size
        return max(1, min(self.block_size, longest - len(request.ids)))

    def _propose(self, request: Request, anchors: Tensor) -> Proposal:
        if self.drafter is None or request.features is None:
            raise RuntimeError("Speculator: a round needs the features of the tokens committed before it")
        self.drafter.append_context(request.features, request.context)
        sampled = self.draft_sampling and not request.params.greedy
        return self.drafter.propose(
            anchors,
            request.context,
            embed=self.target.embed_weight,
            head=self.target.head,
            block_size=self.block_size,
            temperature=request.params.temperature if sampled else None,
            seeds=request.seeds,
            **({"normalizers": request.params.temperature or 1.0} if self._paths.path != "walk" else {}),
        )

    def _accept(self, request: Request, out: TargetOutput, block: Block) -> tuple[Tensor, Tensor, Tensor]:
        params = request.params
        parents = None if block.tree is None else block.tree.parents
        return self.ops.reject_sample(
            request.process(out.logits, block.tokens, parents),
            block.tokens,
            parents,
            block.q,
            params.temperature,
            params.top_k,
            params.top_p,
            params.min_p,
            request.seeds,
            request.starts,
        )


def _tokenizer_stops(tokenizer: Any) -> list[int]:
    eos = getattr(tokenizer, "eos_token_id", None)
    return [] if eos is None else [eos]


def _refuse_unknown(quantize: str | None = None, optimize: str | None = None) -> None:
    for name, value in (("quantize", quantize), ("optimize", optimize)):
        if value is not None:
            raise ValueError(f"Speculator: {name} must be None in this version, got {value!r}")
