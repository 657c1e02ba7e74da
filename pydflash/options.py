"""The options of one request: names checked, ranges checked, filled in from the target's own generation config."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from numbers import Integral
from typing import Any, TypedDict

import torch

from .messages import shown
from .sampling import SamplingParams, is_integer
from .target.defaults import KEYS, GenerationDefaults
from .target.values import token_biases, token_ids
from .text import Output

LogitsProcessor = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
StoppingCriterion = Callable[[torch.Tensor, Any], Any]


class _NotGiven(int):
    """A default that can be told from the same number given by a user."""

    def __repr__(self) -> str:
        return str(int(self))


DEFAULT_TOKENS = _NotGiven(256)
MOST_LOGPROBS = 20
MOST_TEXTS = 1024  # for one prompt
MOST_TOKENS = 2**31 - 1  # positions are counted in 32 bits

_NAMED = (  # parameters of `Speculator.generate` and `stream`
    *("max_new_tokens", "temperature", "top_p", "top_k", "min_p", "stop_token_ids", "stop_strings"),
    *("logits_processor", "return_proposals"),
)
# Names that people bring along, and what to write here.
HINTS = {
    "max_tokens": "max_new_tokens",
    "max_completion_tokens": "max_new_tokens",
    "max_length": "max_new_tokens (the prompt does not count)",
    "do_sample": "temperature (0 is greedy)",
    "greedy": "temperature=0",
    "num_return_sequences": "n",
    "best_of": "n",
    "stop": "stop_strings",
    "stop_sequences": "stop_strings",
    "eos_token_id": "stop_token_ids",
    "ignore_eos": "stop_token_ids=[]",
    "min_tokens": "min_new_tokens",
    "input_ids": "prompt",
    "inputs": "prompt",
    "prompts": "prompt (a list of prompts)",
    "messages": "prompt (a list of messages)",
    "prompt_token_ids": "prompt (a list of token ids)",
    "attention_mask": "prompt={'input_ids': ..., 'attention_mask': ...}",
    "top_logprobs": "logprobs (the number of tokens to list at each position)",
    "output_scores": "logprobs",
    "output_logits": "logprobs",
    "output_logprobs": "logprobs",
    "enable_thinking": "chat_template_kwargs={'enable_thinking': ...}",
    "add_generation_prompt": "continue_final_message",
    "sampling_params": "the options themselves, or generation_config",
    "logits_processors": "logits_processor",
    "num_beams": "nothing: beams are not offered",
    "penalty_alpha": "nothing: contrastive search is not offered",
    "assistant_model": "Speculator(model, drafter)",
    "prompt_lookup_num_tokens": "Speculator(model, drafter)",
    "n": "generate(..., n=...)",
    "streamer": "generate(..., streamer=...)",
    "return_errors": "generate(..., return_errors=...)",
    "stream": "Speculator.stream(...)",
    "progress": "generate(..., progress=...), or `with pydflash.progress.shown()` around a stream",
    "use_tqdm": "generate(..., progress=...)",
}


@dataclass(frozen=True, slots=True)
class Options:
    """What `Speculator.generate` and `stream` take beside the prompt; None takes what the target's config says.

    Attributes:
        max_new_tokens: The most new tokens; None is up to the target's context limit.
        temperature, top_p, top_k, min_p: How the target is sampled; temperature 0 is greedy.
        stop_token_ids: They end the output and are part of it. None takes the target's; [] none.
        stop_strings: The text ends with the first of them that appears. None takes the target's; [] none.
        logits_processor: `processor(input_ids [1, n], scores [1, V]) -> scores`, called once for every emitted
            position, in order, as plain decoding calls it; it may keep a state: of several texts each has a copy.
        stopping_criteria: `criterion(input_ids [1, n], scores=None) -> bool`, called after every new token, copied as
            processors are.
        generation_config: A transformers `GenerationConfig` whose settings go before the target's own.
        repetition_penalty: Logits of tokens in prompt or text are divided by it, multiplied where they are negative.
        presence_penalty, frequency_penalty: Taken off the logits of tokens of the new text, once or by their count.
        logit_bias: {token id: number} added to the logits, after the penalties.
        logprobs: How many of the target's most probable tokens to list at each new one, 0 to 20, beside its own
            log-probability; None for none. They are of the logits as the model gives them.
        return_proposals: Keep each round's block in `stats.proposals`.
        chat_template: None wraps text with the tokenizer's template where it has one; False never; a string is the
            template.
        chat_template_kwargs, tools: Further variables of the template, such as `enable_thinking`.
        continue_final_message: Whether the last message stays open; None does so where it is the assistant's.
        config_keys: Other keys of a `GenerationConfig`, given by name.
    """

    max_new_tokens: int | None = DEFAULT_TOKENS
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    stop_token_ids: Sequence[int] | None = None
    stop_strings: str | Sequence[str] | None = None
    logits_processor: LogitsProcessor | Sequence[LogitsProcessor | Sequence[LogitsProcessor] | None] | None = None
    stopping_criteria: StoppingCriterion | Sequence[StoppingCriterion | Sequence[StoppingCriterion] | None] | None = (
        None
    )
    generation_config: Any = None
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    logprobs: int | None = None
    return_proposals: bool = False
    chat_template: str | bool | None = None
    chat_template_kwargs: Mapping[str, Any] | None = None
    tools: Sequence[Any] | None = None
    continue_final_message: bool | None = None
    config_keys: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, where: str, **given: Any) -> Options:
        """Options by name; keys of a `GenerationConfig` that are honoured are names too.

        where: the method that was called, for messages.
        Raises: TypeError for a name that is none, with what to write instead where that is known.
        """
        names = {f.name for f in fields(cls)} - {"config_keys"}
        keys = {name: value for name, value in given.items() if name not in names}
        for name in keys:
            if name in HINTS or name not in KEYS or KEYS[name].how in ("refused", "no effect"):
                hint = f"; use {HINTS[name]}" if name in HINTS else ""
                raise TypeError(f"{where}() got an unexpected keyword argument {name!r}{hint}")
        for name, (kinds, what) in _FORMS.items():
            if (value := given.get(name)) is not None and not isinstance(value, kinds):
                raise ValueError(f"{name}: must be {what}, got {shown(value)}")
        return cls(**{name: value for name, value in given.items() if name in names}, config_keys=keys)

    @classmethod
    def of_call(cls, method: str, given: Mapping[str, Any]) -> Options:
        """Options among the arguments of a `Speculator`'s method; `options` has those that it does not name."""
        values = {name: given[name] for name in _NAMED if name in given} | given["options"]
        if hasattr(values["max_new_tokens"], "to_diff_dict"):  # transformers' second argument
            values["generation_config"], values["max_new_tokens"] = values["max_new_tokens"], DEFAULT_TOKENS
        return cls.of(method, **values)

    def rows(self, count: int) -> list[Options]:
        """The options of each of `count` prompts: numbers and configs may be lists of one for each prompt, functions
        lists of lists.

        Raises: ValueError for a list of another length.
        """
        spread = {}
        for name in (*_PER_PROMPT, *_FUNCTIONS):
            value = getattr(self, name)
            if isinstance(value, (list, tuple)) and (name not in _FUNCTIONS or _for_each_prompt(value)):
                if len(value) != count:
                    raise ValueError(f"{name}: a list must have {count} entries (one per prompt), got {len(value)}")
                spread[name] = value
        return [replace(self, **{name: value[i] for name, value in spread.items()}) for i in range(count)]

    def texts(self, prompts: int, n: int, *, several: bool) -> list[Options]:
        """The options of each of `prompts` x `n` texts: where there are `several`, logits processors and stopping
        criteria, which may keep a state of their text, are copies for each text but where each prompt has its own.

        Raises: ValueError for a list of another length, and for a function that cannot be copied.
        """
        rows = self.rows(prompts)
        if not several:
            return rows
        shared = {name: getattr(self, name) for name in _FUNCTIONS if getattr(self, name) is not None}
        if n == 1:
            shared = {name: value for name, value in shared.items() if getattr(rows[0], name) is value}
        return [
            replace(row, **_copies({name: getattr(row, name) for name in shared})) for row in rows for _ in range(n)
        ]


class MoreOptions(TypedDict, total=False):
    """Keywords of `Speculator.generate` and `stream` beside the named ones, as in `Options`, for type checkers."""

    stopping_criteria: StoppingCriterion | Sequence[StoppingCriterion | Sequence[StoppingCriterion] | None] | None
    generation_config: Any
    repetition_penalty: float | None
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float] | None
    logprobs: int | None
    chat_template: str | bool | None
    chat_template_kwargs: Mapping[str, Any] | None
    tools: Sequence[Any] | None
    continue_final_message: bool | None
    min_new_tokens: int
    min_length: int
    no_repeat_ngram_size: int
    bad_words_ids: list[list[int]]
    suppress_tokens: list[int]
    begin_suppress_tokens: list[int]
    sequence_bias: Any
    forced_bos_token_id: int
    forced_eos_token_id: int | list[int]
    exponential_decay_length_penalty: tuple[int, float]
    encoder_repetition_penalty: float
    encoder_no_repeat_ngram_size: int
    remove_invalid_values: bool
    watermarking_config: Any
    typical_p: float
    top_h: float
    epsilon_cutoff: float
    eta_cutoff: float
    max_time: float


_FORMS: dict[str, tuple[tuple[type, ...], str]] = {
    "stop_strings": ((str, list, tuple, set, frozenset), "text or a list of texts"),
    "chat_template": ((str, bool), "text, True or False"),
    "chat_template_kwargs": ((Mapping,), "a mapping of names to values"),
    "tools": ((list, tuple), "a list of functions or JSON schemas"),
    "continue_final_message": ((bool,), "True or False"),
    "return_proposals": ((bool,), "True or False"),
}
_PER_PROMPT = (
    "max_new_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "generation_config",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
)


_FUNCTIONS = ("logits_processor", "stopping_criteria")


@dataclass(frozen=True, slots=True)
class Resolved:
    """Options with nothing left open.

    Attributes:
        params: How the target's law is filtered and drawn from.
        logit_bias: {token id: number}.
        processors: The config's, then the user's own, then filters that act behind those of `params`.
        output: Takes the new tokens and ends them.
    """

    params: SamplingParams
    logit_bias: dict[int, float]
    processors: list[LogitsProcessor]
    output: Output
    logprobs: int | None


def resolve(
    options: Options,
    ids: Sequence[int],
    *,
    target_config: Any,
    tokenizer: Any,
    max_length: int | None,
    vocab_size: int,
    device: torch.device,
) -> Resolved:
    """Check the options of a request for the prompt `ids` and fill in what they leave open.

    target_config: the target's own `GenerationConfig` or None. max_length: positions of the target, None for no limit.

    Raises: ValueError naming the option, what is allowed and what came.
    """
    given = options.generation_config
    keys = {name: value for name, value in options.config_keys.items() if value is not None}
    defaults = GenerationDefaults(target_config, given, keys, vocab_size)
    params = _params(options, defaults)
    stops = _stops(options, defaults, tokenizer, vocab_size)
    limit = _limit(options.max_new_tokens, defaults, len(ids), max_length)
    strings = defaults.stop_strings if options.stop_strings is None else options.stop_strings
    criteria = _callables("stopping_criteria", options.stopping_criteria)
    output = Output(
        tokenizer,
        limit,
        stops,
        [strings] if isinstance(strings, str) else strings,
        criteria=criteria,
        max_time=defaults.max_time,
        prompt=ids,
    )
    late = defaults.late_filters(params, vocab_size, device)
    if late and not params.greedy:
        params = replace(params, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
    own = defaults.processors(ids, stops, limit, device)
    return Resolved(
        params,
        token_biases("logit_bias", options.logit_bias, vocab_size),
        [*own, *_callables("logits_processor", options.logits_processor), *late],
        output,
        _count(options.logprobs),
    )


def _params(options: Options, defaults: GenerationDefaults) -> SamplingParams:
    filters = (options.top_k, options.top_p, options.min_p)
    params = SamplingParams.resolve(
        defaults.sampling,
        options.temperature,
        *filters,
        repetition_penalty=defaults.take_repetition_penalty(options.repetition_penalty),
        presence_penalty=options.presence_penalty,
        frequency_penalty=options.frequency_penalty,
    )
    if params.greedy and options.temperature is None and any(x is not None for x in filters):
        warnings.warn(
            "top_p, top_k and min_p change nothing here: the target's generation config does not sample; give a "
            "temperature above 0",
            UserWarning,
            stacklevel=5,
        )
    return params


def _stops(options: Options, defaults: GenerationDefaults, tokenizer: Any, vocab_size: int) -> list[int]:
    if options.stop_token_ids is not None:
        return token_ids("stop_token_ids", options.stop_token_ids, vocab_size)
    if defaults.stop_token_ids:
        return defaults.stop_token_ids
    end = getattr(tokenizer, "eos_token_id", None)
    return [] if end is None or not 0 <= end < vocab_size else [end]


def _limit(count: Any, defaults: GenerationDefaults, prompt_length: int, max_length: int | None) -> int:
    """The most new tokens of a request."""
    if max_length is not None and prompt_length > max_length:
        raise ValueError(f"prompt: must fit the target's {max_length} positions, got {prompt_length} tokens")
    room = None if max_length is None else max_length - prompt_length
    if isinstance(count, _NotGiven) and (asked := defaults.most_tokens(prompt_length)) is not None:
        count = asked
    if count is None:
        if room is None:
            raise ValueError("max_new_tokens: must be a number: the target states no context limit, got None")
        return room
    if not is_integer(count) or count < 0:
        raise ValueError(f"max_new_tokens: must be an integer >= 0, got {shown(count)}")
    if room is None and count > MOST_TOKENS:
        raise ValueError(
            f"max_new_tokens: must be at most {MOST_TOKENS} where the target states no context limit, "
            f"got {shown(count)}"
        )
    return int(count) if room is None else min(int(count), room)


def _count(logprobs: Any) -> int | None:
    if logprobs is None or logprobs is False:
        return None
    count = 0 if logprobs is True else logprobs
    if not isinstance(count, Integral) or not 0 <= int(count) <= MOST_LOGPROBS:
        raise ValueError(f"logprobs: must be None or 0 to {MOST_LOGPROBS}, got {shown(logprobs)}")
    return int(count)


def _callables(name: str, value: Any) -> list[Any]:
    """One function or several, as a list."""
    if value is None:
        return []
    if callable(value) and not isinstance(value, list):
        return [value]
    found = list(value) if isinstance(value, (list, tuple)) else [value]
    if wrong := [item for item in found if not callable(item)]:
        raise ValueError(f"{name}: must be functions, got {type(wrong[0]).__name__}")
    return found


def _for_each_prompt(functions: Sequence[Any]) -> bool:
    """Whether it is a list of lists of functions; transformers' lists of processors are functions themselves."""
    lists = [isinstance(item, (list, tuple)) and not callable(item) for item in functions]
    return any(lists) and all(its or item is None for its, item in zip(lists, functions, strict=True))


def _copies(functions: dict[str, Any]) -> dict[str, Any]:
    """Of all together: a processor and a criterion may share a state."""
    try:
        return copy.deepcopy(functions)
    except Exception as error:
        raise ValueError(
            f"{' and '.join(functions)}: must be what copy.deepcopy can copy, since each of several texts has its own, "
            "or a list of lists with those of each prompt, where n is 1; "
            f"got {type(error).__name__}: {str(error)[:200]}"
        ) from error
