"""The speculative loop: rounds of propose, verify, accept and commit around a target model."""

from __future__ import annotations

import copy
import importlib
import inspect
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from .checkpoints.sources import check_onnx_keywords, split_keywords, target_source
from .drafter.module import Drafter, Proposal
from .ops import backends
from .request import LogitsProcessor, Request, Stream, generation, run
from .rounds.choose import choose_loop
from .rounds.paths import PATHS, Paths
from .sampling import SamplingParams, row_seeds
from .stats import Stats
from .target.defaults import GenerationDefaults
from .target.generic import Target
from .target.loading import tokenizer_or_none
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
        model: A transformers causal LM, a `Target`, or a `pydflash.export.OnnxTarget`.
        drafter: A `Drafter`, anything with its three methods (a `pydflash.export.OnnxDrafter`), or None.
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
        target_path: "fast" runs whole rounds on the device, batches too, in one CUDA graph where there is CUDA, for
            targets of standard attention; "generic" runs any target through its own cache, a sequence at a time.
            "auto" is fast on a GPU where the target can, else generic, on a CPU with packed copies of the weights where
            layers are of the common form; `stats.backends` says which, and why.
        quantize: "int8" packs the weights of target and drafter into 8 bits, on a CPU. The text is then that of the
            quantised target: what it would decode by itself, token for token, but not what the model would.
        optimize: "ipex" runs a copy of the target that intel-extension-for-pytorch has changed, on an Intel CPU.

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
        target_path: str = "auto",
        quantize: str | None = None,
        optimize: str | None = None,
    ) -> None:
        if drafter is not None and not all(hasattr(drafter, name) for name in ("config", "new_cache", "propose")):
            raise ValueError(
                f"Speculator: drafter must be a Drafter or None, got {drafter!r}; a folder or hub id loads "
                "with Drafter.from_pretrained"
            )
        layer_ids = () if drafter is None else drafter.config.target_layer_ids
        target: Any
        if isinstance(model, Target):
            target = model if tuple(model.layer_ids) == tuple(layer_ids) else Target(model.model, layer_ids)
        elif hasattr(model, "verify"):
            target = self._check_foreign(model, drafter)
        else:
            target = Target(model, layer_ids)
        if optimize is not None:
            target = _optimized(target, optimize)
        self.target, self.drafter, self.tokenizer = target, drafter, tokenizer
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
            self._paths = Paths(path, num_nodes, 0, 1)
            self._set_loop(target_path, quantize)
            return
        config = drafter.config
        self.block_size = config.block_size if block_size is None else block_size
        if type(self.block_size) is not int or not 1 <= self.block_size <= config.block_size:
            raise ValueError(
                f"Speculator: block_size must be 1 to {config.block_size} (as the drafter was trained), "
                f"got {block_size!r}"
            )
        self._paths = self._choose_paths(path, num_nodes, draft_sampling)
        if (check := getattr(drafter, "check_target", None)) is not None:
            check(
                hidden_size=target.hidden_size,
                num_layers=target.num_layers,
                vocab_size=target.vocab_size,
                embedding_rows=target.embed_weight.shape[0],
            )
        if isinstance(drafter, Drafter):
            if drafter.device != target.device:
                raise ValueError(f"Speculator: the drafter must be on {target.device}, got {drafter.device}")
            if self._backend == "native":
                backends.check_native(config, self.block_size)
            if drafter.backend != self._backend:
                self.drafter = copy.copy(drafter)  # shares the weights; another Speculator may hold the original
                self.drafter.backend = self._backend
            self._backends["drafter"] = backend_name
        else:
            self._backends["drafter"] = getattr(drafter, "description", type(drafter).__name__)
        self._set_loop(target_path, quantize)

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
            models = _on_onnx_runtime(target, drafter, device, dtype)
            return cls(*models, tokenizer_or_none(target), **keywords.options)
        exported = drafter is not None and (Path(drafter) / "draft.json").is_file()
        loaded: Any = None
        if exported:
            from .export import OnnxDrafter

            loaded = OnnxDrafter(str(drafter), threads=torch.get_num_threads())
        elif drafter is not None:
            loaded = Drafter.from_pretrained(drafter, **keywords.drafter)
        layer_ids = () if loaded is None else loaded.config.target_layer_ids
        model = Target.from_pretrained(target, layer_ids=layer_ids, device=device, dtype=dtype, **keywords.target)
        if isinstance(loaded, Drafter):
            loaded = loaded.to(device=model.device, dtype=model.dtype)
        return cls(model, loaded, tokenizer_or_none(target, **keywords.tokenizer), **keywords.options)

    @staticmethod
    def _check_foreign(target: Any, drafter: DrafterLike | None) -> Any:
        """A target with the methods of `Target` that is none: one on ONNX Runtime, whose tables are in its graph."""
        if isinstance(drafter, Drafter):
            raise ValueError(
                f"Speculator: drafter must be an exported one beside a {type(target).__name__}, got a Drafter"
            )
        wanted = () if drafter is None else tuple(drafter.config.target_layer_ids)
        if drafter is not None and tuple(target.layer_ids) != wanted:
            raise ValueError(
                f"Speculator: the target must give the features of layers {list(wanted)} (target_layer_ids), "
                f"got {list(target.layer_ids)}"
            )
        return target

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

    def _set_loop(self, target_path: str, quantize: str | None) -> None:
        options = (self._backend, self._paths, self.block_size, self.draft_sampling)
        self._loop, found = choose_loop(self.target, self.drafter, *options, target_path=target_path, quantize=quantize)
        self._backends |= found

    def _defaults(self) -> GenerationDefaults:
        """What the target's generation config asks for now; users change it between requests."""
        return GenerationDefaults(self.target.generation_config)

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
        size = self._loop.most_rows
        for i in range(0, len(requests), size):
            for _ in run(self._loop, requests[i : i + size]):
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
        return Stream(request, self._loop)

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
        own = defaults.processors(len(ids), stops, self.target.device)
        return Request(
            ids=ids,
            params=params,
            seeds=torch.tensor([seed], device=self.target.device),
            processors=[*own, *(logits_processor or ())],
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


def _on_onnx_runtime(target: Any, drafter: Any, device: Any, dtype: Any) -> tuple[Any, Any]:
    """An exported target and drafter, which may lie in one folder."""
    from .export import OnnxDrafter, OnnxTarget

    for name, value, allowed in (("device", device, (None, "cpu")), ("dtype", dtype, (None, "float32", torch.float32))):
        if value not in allowed:
            raise ValueError(f"Speculator: {name} must be None for a target on ONNX Runtime, got {value!r}")
    threads = torch.get_num_threads()
    loaded = None if drafter is None else OnnxDrafter(drafter, threads=threads)
    return OnnxTarget(target, threads=threads), loaded


def _tokenizer_stops(tokenizer: Any) -> list[int]:
    eos = getattr(tokenizer, "eos_token_id", None)
    return [] if eos is None else [eos]


def _optimized(target: Target, optimize: str) -> Target:
    """The target on a copy of its model that intel-extension-for-pytorch has changed; its own stays as it is."""
    if optimize != "ipex":
        raise ValueError(f"Speculator: optimize must be 'ipex' or None, got {optimize!r}")
    try:
        ipex = importlib.import_module("intel_extension_for_pytorch")
    except ImportError as error:
        raise RuntimeError(
            f"Speculator: optimize='ipex' needs intel-extension-for-pytorch (pip install 'pydflash[ipex]'): {error}"
        ) from error
    narrow = {} if target.dtype == torch.float32 else {"dtype": target.dtype}
    return Target(ipex.optimize(copy.deepcopy(target.model).eval(), inplace=True, **narrow), target.layer_ids)
