"""The speculative loop: rounds of propose, verify, accept and commit around a target model."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from .assemble import assemble, check_drafter, exported_pair, fitted_drafter, shared_turns, target_of
from .checkpoints.sources import check_onnx_keywords, split_keywords, target_source
from .ops import backends
from .protocols import DrafterLike, Refreshable, TargetLike, offers
from .request import LogitsProcessor, Request, Stream, generation, run
from .rounds.paths import PATHS, Paths
from .rounds.round import Parts
from .sampling import SamplingParams, SamplingTensors, row_seeds
from .stats import Stats
from .target.defaults import GenerationDefaults
from .target.loading import tokenizer_or_none
from .text import Output, Prompt, encode, split_prompts, token_ids_of


class Speculator:
    """Lossless speculative decoding of a target with a drafter; plain decoding where the drafter is None.

    Args:
        model: A transformers causal LM, or what offers `pydflash.protocols.TargetLike`: a `Target`, a
            `pydflash.export.OnnxTarget`, your own.
        drafter: What offers `pydflash.protocols.DrafterLike`: a `Drafter`, a `pydflash.export.OnnxDrafter`, your own;
            or None.
        tokenizer: Needed for text in and text out; token ids work without.
        block_size: Slots per block, anchor included, at most the trained size (the default).
        path: How drafts are chosen from the lattice: "walk", "viterbi" (its most probable path), or "tree" (its
            most probable nodes, verified in one forward; for targets with attention only).
        num_nodes: Drafts in a tree, 1 to 63, or "auto" (the default): of a few sizes the one with the most expected
            tokens per second, by what a round of each takes here. The host's loop chooses in every round, by that
            round's probabilities; the device's once, by what trees typically bring. `stats.backends["tree"]` says.
        draft_sampling: At temperature > 0, whether drafts are sampled and accepted with the drafter's law q, or
            are the best ones and accepted where the target draws the same token. Default: sampled for DFlash 2,
            whose walk is coherent; not for DFlash, whose slots know nothing of each other. A tree has the sampled
            walk as its trunk.
        backend: "native" runs the compiled ops, and is refused where there are none for the device. "reference" runs
            their definitions in plain torch, on any device. "auto" is "native".
        target_path: Which code runs the target's blocks. "fused": our decoder, for layers of the common form. "own":
            the model's own layers, with attention in place. "generic": the model's own layers through its own cache.
            "auto": the first of these that can, on a CPU fused or generic; `stats.backends["target"]` says which, and
            why. Fused and own targets run whole rounds on the device, lists of prompts as one batch, on a GPU (in one
            CUDA graph where there is CUDA), and on a CPU where they are asked for by name; the host runs all others,
            a round of one sequence at a time.
        quantize: "int8" packs the weights of target and drafter into 8 bits, on a CPU. The text is then that of the
            quantised target: what it would decode by itself, token for token, but not what the model would.
        optimize: "ipex" runs a copy of the target that intel-extension-for-pytorch has changed, on an Intel CPU.

    A Speculator keeps nothing between requests: streams may be abandoned, and several may run at once. So may threads,
    over one Speculator or several of one model: they take turns, round by round, in the order of asking. Nothing is
    set on the model or its config meanwhile, so its own `generate` may run beside them.

    Raises: ValueError or RuntimeError where target, drafter and options do not go together, naming both sides.
    """

    def __init__(
        self,
        model: nn.Module | TargetLike,
        drafter: DrafterLike | None,
        tokenizer: Any = None,
        *,
        block_size: int | None = None,
        path: str = "walk",
        num_nodes: int | str | None = None,
        draft_sampling: bool | None = None,
        backend: str = "auto",
        target_path: str = "auto",
        quantize: str | None = None,
        optimize: str | None = None,
    ) -> None:
        if drafter is not None:
            check_drafter(drafter)
        target = target_of(model, drafter, optimize)
        self.target: TargetLike = target
        self.drafter, self.tokenizer = drafter, tokenizer
        self._backend = "reference" if backend == "reference" else "native"
        self._defaults()  # refuses what a generation config asks for in vain
        backend_name = backends.choose(backend, target.device.type)
        if self._backend == "native" and target.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise ValueError(
                f"Speculator: the target must be float32, bfloat16 or float16 for the native ops, got {target.dtype}; "
                "backend='reference' takes it"
            )
        self._backends = {"ops": backend_name}
        self.block_size = 1
        self.draft_sampling = False
        if drafter is None:
            if path in PATHS[1:]:
                raise ValueError(f"Speculator: path must be 'walk' where drafter is None, got {path!r}")
            self._set_loop(Paths(path, num_nodes, 0, 1), target_path, quantize)
            return
        config = drafter.config
        self.block_size = config.block_size if block_size is None else block_size
        if type(self.block_size) is not int or not 1 <= self.block_size <= config.block_size:
            raise ValueError(
                f"Speculator: block_size must be 1 to {config.block_size} (as the drafter was trained), "
                f"got {block_size!r}"
            )
        paths = self._choose_paths(path, num_nodes, draft_sampling)
        self.drafter, line = fitted_drafter(drafter, target, self._backend, self.block_size)
        self._backends["drafter"] = line or backend_name
        self._set_loop(paths, target_path, quantize)

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
        """Load a target with its tokenizer, and a drafter, each from a folder or a hub id, or "smollm2".

        A drafter's folder may be one that `pydflash export` wrote; it then runs on ONNX Runtime. `device` defaults to
        cuda, xpu or cpu, whichever is there first; `dtype` to the target's own, which a torch drafter takes over.
        `options` are the keywords of `Speculator`, and what transformers' `from_pretrained` takes for the target:
        `revision`, `token`, `cache_dir`, `local_files_only`, `trust_remote_code` (False), `device_map`,
        `quantization_config`, `gguf_file` and so on. `token` and the two after it serve the drafter too, whose own are
        `drafter_revision`, `drafter_token` and so on. A target without a tokenizer takes token ids.

        Raises: TypeError for an unknown keyword, before anything is loaded.
        """
        keywords = split_keywords(options, inspect.signature(cls).parameters, device=device, drafter=drafter)
        target = target_source(target, "Speculator")
        if (Path(target) / "target.json").is_file():
            check_onnx_keywords(keywords)
            models = exported_pair(target, drafter, device, dtype)
            return cls(*models, tokenizer_or_none(target), **keywords.options)
        from .drafter.module import Drafter
        from .target.generic import Target

        loaded: DrafterLike | None = None
        module: Drafter | None = None
        if drafter is not None and (Path(drafter) / "draft.json").is_file():
            from .export import OnnxDrafter

            loaded = OnnxDrafter(str(drafter), threads=torch.get_num_threads())
        elif drafter is not None:
            loaded = module = Drafter.from_pretrained(drafter, **keywords.drafter)
        layer_ids = () if loaded is None else loaded.config.target_layer_ids
        model = Target.from_pretrained(target, layer_ids=layer_ids, device=device, dtype=dtype, **keywords.target)
        if module is not None:
            loaded = module.to(device=model.device, dtype=model.dtype)
        return cls(model, loaded, tokenizer_or_none(target, **keywords.tokenizer), **keywords.options)

    def _choose_paths(self, path: str, num_nodes: int | str | None, draft_sampling: bool | None) -> Paths:
        config = self.drafter.config if self.drafter is not None else None
        paths = Paths(path, num_nodes, self.block_size - 1, config.num_candidates if config else 1)
        if draft_sampling not in (None, True, False):
            raise ValueError(f"Speculator: draft_sampling must be True, False or None, got {draft_sampling!r}")
        if path == "viterbi" and draft_sampling:
            raise ValueError(f"Speculator: draft_sampling must be off where path is {path!r}, got {draft_sampling!r}")
        walks = path != "viterbi" and config is not None and config.version == 2
        self.draft_sampling = walks if draft_sampling is None else draft_sampling
        return paths

    def _set_loop(self, paths: Paths, target_path: str, quantize: str | None) -> None:
        options = (paths, self.block_size, self.draft_sampling, self._backend)
        parts = Parts(self.target, self.drafter, *options, shared_turns(self.target))
        with parts.turns:
            self.loop, lines = assemble(self.target, self.drafter, parts, target_path, quantize)
        self._backends |= lines
        if (line := paths.description) is not None:
            self._backends["tree"] = line

    def _defaults(self) -> GenerationDefaults:
        """What the target's generation config asks for now; users change it between requests."""
        return GenerationDefaults(self.target.generation_config)

    def refresh(self) -> None:
        """Forget every copy that was computed from weights; the next request computes them anew.

        For weights that were changed in a way that cannot be noticed. Not while a request runs.
        """
        held = (self.target, self.drafter, self.loop.parts.target, self.loop.parts.drafter, self.loop)
        for part in {id(part): part for part in held}.values():
            if offers(part, Refreshable):
                cast("Refreshable", part).refresh()

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
        sampling = (temperature, top_p, top_k, min_p)
        ends = (stop_token_ids, stop_strings, logits_processor)
        requests = [
            self._request(single, max_new_tokens, sampling, row_seed, ends, return_proposals, chat_template)
            for single, row_seed in zip(prompts, row_seeds(seed, len(prompts)), strict=True)
        ]
        size = self.loop.most_rows
        for i in range(0, len(requests), size):
            for _ in run(self.loop, requests[i : i + size]):
                pass
        results = [generation(request) for request in requests]
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
        sampling = (temperature, top_p, top_k, min_p)
        ends = (stop_token_ids, stop_strings, logits_processor)
        (row_seed,) = row_seeds(seed, 1)
        request = self._request(prompts[0], max_new_tokens, sampling, row_seed, ends, return_proposals, chat_template)
        return Stream(request, self.loop)

    def _request(
        self,
        prompt: Prompt,
        max_new_tokens: int | None,
        sampling: tuple[float | None, float | None, int | None, float | None],
        seed: int,
        ends: tuple[Any, Any, Any],
        return_proposals: bool,
        chat_template: str | bool | None,
    ) -> Request:
        """A checked request, with the target's own settings where none are given."""
        temperature, top_p, top_k, min_p = sampling
        stop_token_ids, stop_strings, logits_processor = ends
        defaults = self._defaults()
        params = SamplingParams.resolve(defaults.sampling, temperature, top_k, top_p, min_p)
        ids = encode(prompt, self.tokenizer, chat_template, self.target.embed_weight.shape[0])
        if params.greedy and temperature is None and any(x is not None for x in (top_p, top_k, min_p)):
            warnings.warn(
                "top_p, top_k and min_p change nothing here: the target's generation config does not sample; give a "
                "temperature above 0",
                UserWarning,
                stacklevel=3,
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
        processors = defaults.processors(len(ids), stops, self.target.device)
        return Request(
            ids=ids,
            params=params,
            sampling=SamplingTensors.of(params, seed, self.target.device),
            processors=[*processors, *(logits_processor or ())],
            output=Output(self.tokenizer, limit, stops, stop_strings),
            stats=Stats(len(ids), backends=dict(self._backends), proposals=[] if return_proposals else None),
        )

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


def _tokenizer_stops(tokenizer: Any) -> list[int]:
    eos = getattr(tokenizer, "eos_token_id", None)
    return [] if eos is None else [eos]
