"""The speculative loop: rounds of propose, verify, accept and commit around a target model."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from .assemble import assemble, check_drafter, exported_pair, fitted_drafter, shared_turns, target_of
from .checkpoints.sources import check_onnx_keywords, split_keywords, target_source
from .messages import shown as value_shown
from .ops import backends
from .options import DEFAULT_TOKENS, MOST_TEXTS, LogitsProcessor, MoreOptions, Options, resolve
from .progress import advance, shown, step
from .protocols import DrafterLike, ModelTarget, Refreshable, TargetLike, offers
from .request import Request, Stream, generation, run
from .rounds.paths import PATHS, Paths
from .rounds.round import Parts
from .sampling import SamplingTensors, is_integer, row_seeds
from .settings import check_fits, read_settings
from .stats import Stats
from .target.defaults import GenerationDefaults
from .target.loading import tokenizer_or_none
from .text import Prompt, encode, split_prompts

if TYPE_CHECKING:
    from typing_extensions import Unpack


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
            most probable nodes, verified in one forward; for targets with attention, and fused hybrids).
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
            a round of one sequence at a time, but lists on a CPU together where that is faster:
            `stats.backends["lists"]` says so.
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
        GenerationDefaults(target.generation_config)  # refuses what it asks for in vain
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
        if not (is_integer(self.block_size) and 1 <= self.block_size <= config.block_size):
            raise ValueError(
                f"Speculator: block_size must be 1 to {config.block_size} (as the drafter was trained), "
                f"got {block_size!r}"
            )
        self.block_size = int(self.block_size)
        paths = self._choose_paths(path, num_nodes, draft_sampling)
        self.drafter, line = fitted_drafter(drafter, target, self._backend, self.block_size)
        self._backends["drafter"] = line or backend_name
        self._set_loop(paths, target_path, quantize)

    @classmethod
    @shown(None)
    def from_pretrained(
        cls,
        target: str | Path,
        drafter: str | Path | None = None,
        *,
        device: str | torch.device | None = None,
        dtype: str | torch.dtype | None = None,
        settings: str | Path | None = None,
        **options: Any,
    ) -> Speculator:
        """Load a target with its tokenizer, and a drafter, each from a folder or a hub id, or "smollm2".

        A drafter's folder may be one that `pydflash export` wrote; it then runs on ONNX Runtime. `device` defaults to
        cuda, xpu or cpu, whichever is there first; `dtype` to the target's own, which a torch drafter takes over.
        `options` are the keywords of `Speculator`, and what transformers' `from_pretrained` takes for the target:
        `revision`, `token`, `cache_dir`, `local_files_only`, `trust_remote_code` (False), `device_map`,
        `quantization_config`, `gguf_file` and so on. `token` and the two after it serve the drafter too, whose own are
        `drafter_revision`, `drafter_token` and so on. A target without a tokenizer takes token ids.

        settings: a file that `pydflash calibrate` wrote for this pair, in place of block_size, path and num_nodes.

        Raises: TypeError for an unknown keyword, before anything is loaded.
        """
        if settings is not None:
            found, wanted = read_settings(settings)
            if both := sorted(found.keys() & options.keys()):
                raise ValueError(f"settings: must not stand beside {', '.join(both)}, which it has, got {settings!r}")
            spec = cls.from_pretrained(target, drafter, device=device, dtype=dtype, **found, **options)
            check_fits(settings, wanted, spec)
            return spec
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
        mixes = cast("ModelTarget", self.target).facts.mixes_rows if offers(self.target, ModelTarget) else ""
        if mixes and self.drafter is not None:
            self._backends["exact"] = f"no: {mixes}"
            warnings.warn(
                f"Speculator: the target has {mixes} (dynamically quantised activations do this), so drafts may change "
                "the text, as another prompt length may",
                UserWarning,
                stacklevel=4,
            )
        if (line := paths.description) is not None:
            self._backends["tree"] = line

    def refresh(self) -> None:
        """Forget every copy that was computed from weights; the next request computes them anew.

        For weights that were changed in a way that cannot be noticed. Not while a request runs.
        """
        held = (self.target, self.drafter, self.loop.parts.target, self.loop.parts.drafter, self.loop)
        for part in {id(part): part for part in held}.values():
            if offers(part, Refreshable):
                cast("Refreshable", part).refresh()

    def __repr__(self) -> str:
        kind = type(getattr(self.target, "model", self.target)).__name__
        path = self.loop.parts.paths
        drafts = (
            "plain"
            if self.drafter is None
            else f"{type(self.drafter).__name__}, {path.path}, block of {self.block_size}"
        )
        lines = ", ".join(f"{name}: {line}" for name, line in self._backends.items())
        return f"Speculator({kind} on {self.target.device}, {drafts}; {lines})"

    def close(self) -> None:
        """End the use of the target; the model itself is left as it was given."""
        self.target.close()

    if not TYPE_CHECKING:  # a type checker would take any name then

        def __getattr__(self, name: str) -> Any:
            """Only for what is not there: transformers looks for these on what it takes for a model of its own."""
            said = f"{type(self).__name__!r} object has no attribute {name!r}"
            if name in ("config", "generation_config", "device", "can_generate"):
                said += "; it is no model for transformers' pipeline or assistant_model: call its generate or stream"
            raise AttributeError(said, name=name, obj=self)

    def __enter__(self) -> Speculator:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- generation -----------------------------------------------------------------------------------------

    def generate(
        self,
        prompt: Prompt,
        max_new_tokens: int | None = DEFAULT_TOKENS,
        temperature: float | None = None,
        top_p: float | None = None,
        top_k: int | None = None,
        min_p: float | None = None,
        seed: int | Sequence[int] | None = None,
        stop_token_ids: Sequence[int] | None = None,
        stop_strings: str | Sequence[str] | None = None,
        logits_processor: LogitsProcessor | Sequence[LogitsProcessor | Sequence[LogitsProcessor] | None] | None = None,
        return_proposals: bool = False,
        *,
        n: int = 1,
        streamer: Any = None,
        return_errors: bool = False,
        progress: bool | None = False,
        **options: Unpack[MoreOptions],
    ) -> Any:
        """Generate for one prompt, or for each of a list.

        Args:
            prompt: Text, chat messages, token ids (list, [P] tensor), or a list of these ([B, P] tensor).
            max_new_tokens: What the target's generation config says where not given, else 256; None is up to the
                target's context limit. A `GenerationConfig` may stand here too.
            temperature, top_p, top_k, min_p: None takes what the target's generation config sets (greedy where it
                does not sample). Each may be a list with one entry for each prompt, max_new_tokens too.
            seed: Number for all prompts, one number each, or None for fresh draws. At temperature > 0 without
                `draft_sampling` the text for a seed does not depend on the drafter.
            stop_token_ids: None takes the target's end-of-sequence tokens; [] none.
            stop_strings: The text ends with the first of them that appears. None takes the target's; [] none.
            logits_processor: `processor(input_ids [1, n], scores [1, V]) -> scores`, as in transformers, called once
                for every emitted position, in order. It may keep a state: each text of a list, or of n > 1, has a copy,
                made by `copy.deepcopy`. A list of lists gives each prompt its own, uncopied where n is 1.
            return_proposals: Keep each round's block in `stats.proposals`.
            n: Texts for each prompt, the i-th with seed + i; then the result is a list for each prompt.
            streamer: With transformers' `put` and `end`, for one prompt: gets the prompt's ids, then new ones.
            return_errors: For a list: a prompt that cannot run gives its ValueError instead of ending the call.
            progress: Whether a bar on stderr counts a list's texts that are done, and a long prompt's tokens; None
                does so where stderr is a terminal.
            options: See `pydflash.options.Options`; keys of a `GenerationConfig` too.

        Returns: a `Generation`, or a list of them for a list of prompts.

        Raises: ValueError naming the argument, what is allowed and what came; TypeError for an unknown one.
        """
        given = Options.of_call("generate", locals())
        prompts, many = split_prompts(prompt, return_errors)
        if not is_integer(n) or not 1 <= n <= MOST_TEXTS:
            raise ValueError(f"n: must be an integer of 1 to {MOST_TEXTS}, got {value_shown(n)}")
        if streamer is not None and (many or n > 1):
            raise ValueError(f"streamer: must be None for several texts, got one for {len(prompts)} x {n}")
        rows = given.texts(len(prompts), int(n), several=many or n > 1)
        requests: list[Request | ValueError] = []
        for single, row_seed in zip(prompts, row_seeds(seed, len(prompts)), strict=True):
            for i in range(int(n)):
                try:
                    requests.append(self._request(single, _shifted(row_seed, i), rows[len(requests)]))
                except ValueError as error:
                    if not (many and return_errors):
                        raise
                    requests.append(error)
        with shown(progress):
            self._run([request for request in requests if isinstance(request, Request)], streamer)
        found = [request if isinstance(request, ValueError) else generation(request) for request in requests]
        results = found if n == 1 else [found[i : i + n] for i in range(0, len(found), n)]
        return results if many else results[0]

    def stream(
        self,
        prompt: Prompt,
        max_new_tokens: int | None = DEFAULT_TOKENS,
        temperature: float | None = None,
        top_p: float | None = None,
        top_k: int | None = None,
        min_p: float | None = None,
        seed: int | None = None,
        stop_token_ids: Sequence[int] | None = None,
        stop_strings: str | Sequence[str] | None = None,
        logits_processor: LogitsProcessor | Sequence[LogitsProcessor] | None = None,
        return_proposals: bool = False,
        **options: Unpack[MoreOptions],
    ) -> Stream:
        """As `generate`, for one prompt, as an iterator of a `Chunk` per round; `stream.output` is the `Generation`.

        `async for` takes the same stream, whose rounds then run in a thread.
        """
        given = Options.of_call("stream", locals())
        prompts, many = split_prompts(prompt)
        if many:
            raise ValueError(f"stream: prompt must be a single one, got a list of {len(prompts)}")
        (row_seed,) = row_seeds(seed, 1)
        return Stream(self._request(prompts[0], row_seed, *given.rows(1)), self.loop)

    def _run(self, requests: Sequence[Request], streamer: Any) -> None:
        size = self.loop.most_rows
        if streamer is not None:
            streamer.put(torch.tensor([requests[0].ids]))
        with step("texts", len(requests), least=2):
            for i in range(0, len(requests), size):
                rows, done = requests[i : i + size], 0
                for chunks in run(self.loop, rows):
                    done, before = sum(request.finished for request in rows), done
                    advance("texts", done - before)
                    if streamer is not None:
                        streamer.put(torch.tensor(chunks[0].token_ids))
        if streamer is not None:
            streamer.end()

    def _request(self, prompt: Prompt, seed: int, options: Options) -> Request:
        """A checked request, with the target's own settings where none are given."""
        if isinstance(prompt, ValueError):
            raise prompt
        target = self.target
        ids = encode(
            prompt,
            self.tokenizer,
            options.chat_template,
            target.embed_weight.shape[0],
            tools=options.tools,
            chat_template_kwargs=options.chat_template_kwargs,
            continue_final_message=options.continue_final_message,
        )
        found = resolve(
            options,
            ids,
            target_config=target.generation_config,
            tokenizer=self.tokenizer,
            max_length=target.max_length,
            vocab_size=target.vocab_size,
            device=target.device,
        )
        return Request(
            ids=ids,
            params=found.params,
            sampling=SamplingTensors.of(found.params, seed, target.device),
            processors=found.processors,
            output=found.output,
            stats=Stats(len(ids), backends=dict(self._backends), proposals=[] if options.return_proposals else None),
            logit_bias=found.logit_bias,
            logprobs=found.logprobs,
        )


def _shifted(seed: int, i: int) -> int:
    """seed + i in 64 signed bits."""
    return (seed + i + 2**63) % 2**64 - 2**63
