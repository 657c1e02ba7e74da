"""Every key of a transformers `GenerationConfig`: honoured or refused, never passed over where it changes the text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any, NamedTuple

import torch

from ..messages import shown
from ..sampling import SamplingParams
from .values import checked, token_ids


class Key(NamedTuple):
    """What becomes of one key of a generation config.

    Attributes:
        how: "sampling", "length" or "stop" (part of a request), "processor" (transformers' own, at every position),
            "no effect" (on the text of one sequence without beams), "refused".
        off: Values with which the key does nothing; None always is one.
        note: For people, in the table of the docs.
    """

    how: str
    off: tuple[Any, ...] = ()
    note: str = ""


_BEAMS = "beams are not offered"
_DRAFTS = "another way of drafting"
_STORAGE = "how the model's own `generate` computes"
_RESULT = "what the model's own `generate` returns"
KEYS: dict[str, Key] = {
    "do_sample": Key("sampling", (), "False, and None, decode greedily"),
    "temperature": Key("sampling"),
    "top_k": Key("sampling", (), "transformers' own 50, where nobody names a number, is not taken over"),
    "top_p": Key("sampling"),
    "min_p": Key("sampling"),
    "max_new_tokens": Key("length"),
    "max_length": Key("length", (), "the prompt counts; `max_new_tokens` goes first"),
    "max_time": Key("stop", (), "in seconds, looked at after every token"),
    "eos_token_id": Key("stop"),
    "stop_strings": Key("stop"),
    "num_return_sequences": Key("refused", (1,), "the argument `n`"),
    "sequence_bias": Key("processor"),
    "encoder_repetition_penalty": Key("processor", (1.0,), "over the prompt"),
    "repetition_penalty": Key("processor", (1.0,), "the argument of this name runs on the device"),
    "no_repeat_ngram_size": Key("processor", (0,)),
    "encoder_no_repeat_ngram_size": Key("processor", (0,), "over the prompt"),
    "bad_words_ids": Key("processor"),
    "min_length": Key("processor", (0,)),
    "min_new_tokens": Key("processor", (0,)),
    "forced_bos_token_id": Key("processor"),
    "forced_eos_token_id": Key("processor", (), "at the last token that the request may have"),
    "remove_invalid_values": Key("processor", (False,)),
    "exponential_decay_length_penalty": Key("processor"),
    "suppress_tokens": Key("processor"),
    "begin_suppress_tokens": Key("processor"),
    "watermarking_config": Key("processor"),
    "top_h": Key("processor", (), "when sampling"),
    "typical_p": Key("processor", (1.0,), "when sampling"),
    "epsilon_cutoff": Key("processor", (0.0,), "when sampling"),
    "eta_cutoff": Key("processor", (0.0,), "when sampling"),
    "num_beams": Key("refused", (1,), _BEAMS),
    "num_beam_groups": Key("refused", (1,), _BEAMS),
    "diversity_penalty": Key("refused", (0.0,), _BEAMS),
    "constraints": Key("refused", (), _BEAMS),
    "force_words_ids": Key("refused", (), _BEAMS),
    "penalty_alpha": Key("refused", (0.0,), "contrastive search is not offered"),
    "dola_layers": Key("refused"),
    "guidance_scale": Key("refused", (1.0,), "a second forward without the prompt"),
    "token_healing": Key("refused", (False,)),
    "forced_decoder_ids": Key("refused"),
    "length_penalty": Key("no effect", (), "of beams"),
    "early_stopping": Key("no effect", (), "of beams"),
    "renormalize_logits": Key("no effect", (), "probabilities are the same"),
    **{
        name: Key("no effect", (), _DRAFTS)
        for name in (
            "use_mtp",
            "is_assistant",
            "num_assistant_tokens",
            "num_assistant_tokens_schedule",
            "assistant_confidence_threshold",
            "assistant_early_exit",
            "assistant_lookbehind",
            "target_lookbehind",
            "assistant_ensemble_weight",
            "prompt_lookup_num_tokens",
            "max_matching_ngram_size",
            "speculation_type",
        )
    },
    **{
        name: Key("no effect", (), _STORAGE)
        for name in (
            "use_cache",
            "cache_implementation",
            "cache_config",
            "max_cache_len",
            "return_legacy_cache",
            "compile_config",
            "disable_compile",
            "continuous_batching_config",
            "low_memory",
            "prefill_chunk_size",
        )
    },
    **{
        name: Key("no effect", (), _RESULT)
        for name in (
            "output_attentions",
            "output_hidden_states",
            "output_scores",
            "output_logits",
            "return_dict_in_generate",
        )
    },
    "pad_token_id": Key("no effect", (), "there is no padding"),
    "bos_token_id": Key("no effect", (), "the tokenizer's matter"),
    "decoder_start_token_id": Key("no effect", (), "of encoder-decoder models"),
    "transformers_version": Key("no effect"),
    "generation_kwargs": Key("no effect", (), "read by nothing"),
}
_LATE = ("top_h", "typical_p", "epsilon_cutoff", "eta_cutoff")  # filters that act behind temperature and top-k


class GenerationDefaults:
    """What a transformers `GenerationConfig` asks of a request.

    Attributes:
        sampling: do_sample, temperature, top_k, top_p and min_p, as far as the config sets them explicitly.
        stop_token_ids: Its end-of-sequence tokens.
        stop_strings: Its stop strings.

    Raises: ValueError naming a key that is not honoured here, or whose value is none that it can have.
    """

    def __init__(
        self,
        generation_config: Any,
        given: Any = None,
        keys: Mapping[str, Any] | None = None,
        vocab_size: int | None = None,
    ) -> None:
        """given: a request's own `GenerationConfig`, whose settings go before those of the target's.
        keys: single settings by name, which go before both. vocab_size: token ids are below it, where it is given;
        the target's own stop tokens beyond it can never come, and are left out.
        """
        # Only what differs from the library's own defaults was meant by the model's authors.
        self._set = {} if generation_config is None else dict(generation_config.to_diff_dict())
        if given is not None:
            if not hasattr(given, "to_diff_dict"):
                raise ValueError(f"generation_config: must be a GenerationConfig, got {type(given).__name__}")
            self._set |= given.to_diff_dict()
        self._set |= keys or {}
        for name, value in self._set.items():
            _check(name, value)
            self._set[name] = checked(name, value, vocab_size)
        names = ("do_sample", "temperature", "top_k", "top_p", "min_p")
        self.sampling = {name: self._set[name] for name in names if name in self._set}
        asked = (keys or {}).get("eos_token_id", getattr(given, "eos_token_id", None))
        own = getattr(generation_config, "eos_token_id", None)
        if asked is not None:
            self.stop_token_ids = token_ids("eos_token_id", asked, vocab_size)
        else:
            ids = [] if own is None else token_ids("eos_token_id", own)
            self.stop_token_ids = [i for i in ids if vocab_size is None or 0 <= i < vocab_size]
        self.stop_strings: str | list[str] = self._set.get("stop_strings") or []
        self.max_time: float | None = self._set.get("max_time")

    def _value(self, name: str) -> Any:
        """What the config asks for, or None where it is off."""
        value = self._set.get(name)
        return None if value is None or _is_off(name, value) else value

    @property
    def processor_keys(self) -> list[str]:
        """The keys that are set and change logits at every position."""
        return [name for name, key in KEYS.items() if key.how == "processor" and self._value(name) is not None]

    def take_repetition_penalty(self, given: float | None) -> float:
        """The penalty that runs with the sampling; what is left to transformers' processors has 1 here."""
        if given is not None:
            self._set.pop("repetition_penalty", None)
            return given
        # Processors that act before it keep their place.
        if any(self._value(name) is not None for name in ("sequence_bias", "encoder_repetition_penalty")):
            return 1.0
        penalty = self._set.pop("repetition_penalty", None)
        return 1.0 if penalty is None else penalty

    def most_tokens(self, prompt_length: int) -> int | None:
        """New tokens that the config allows, or None where it says nothing.

        Raises: ValueError where its max_length leaves no room behind the prompt.
        """
        if (count := self._set.get("max_new_tokens")) is not None:
            return count
        if (length := self._set.get("max_length")) is None:
            return None
        if length <= prompt_length:
            raise ValueError(
                f"prompt: must be shorter than generation_config.max_length = {length}, got {prompt_length} tokens; "
                "max_new_tokens sets another limit"
            )
        return length - prompt_length

    def processors(self, ids: Sequence[int], stops: Sequence[int], limit: int, device: torch.device) -> list[Any]:
        """The logits processors that the config asks for, in transformers' order.

        ids: the prompt. stops: the request's stop tokens. limit: the most tokens that it may have.
        """
        if not self.processor_keys:
            return []
        from transformers import generation as g

        value, length, ends = self._value, len(ids), list(stops)
        place: Any = {"device": str(device)}
        prompt: Any = torch.tensor([list(ids)], device=device)
        found: list[Any] = []

        def add(name: str, make: Any, *needed: Any) -> None:
            if value(name) is not None and all(needed):
                try:
                    found.append(make(value(name)))
                except (ValueError, TypeError) as error:
                    got = shown(value(name))
                    raise ValueError(f"{name}: must be what transformers takes for it ({error}), got {got}") from error

        add("sequence_bias", lambda x: g.SequenceBiasLogitsProcessor(x))
        add("encoder_repetition_penalty", lambda x: g.EncoderRepetitionPenaltyLogitsProcessor(x, prompt))
        add("repetition_penalty", lambda x: g.RepetitionPenaltyLogitsProcessor(x))
        add("no_repeat_ngram_size", lambda x: g.NoRepeatNGramLogitsProcessor(x))
        add("encoder_no_repeat_ngram_size", lambda x: g.EncoderNoRepeatNGramLogitsProcessor(min(x, length + 1), prompt))
        add("bad_words_ids", lambda x: g.NoBadWordsLogitsProcessor(x, ends or None))
        add("min_length", lambda x: g.MinLengthLogitsProcessor(x, ends, **place), ends)
        add("min_new_tokens", lambda x: g.MinNewTokensLengthLogitsProcessor(length, x, ends, **place), ends)
        add("forced_bos_token_id", lambda x: g.ForcedBOSTokenLogitsProcessor(x))
        add("forced_eos_token_id", lambda x: g.ForcedEOSTokenLogitsProcessor(length + limit, x, **place))
        add("remove_invalid_values", lambda _: g.InfNanRemoveLogitsProcessor())
        add("exponential_decay_length_penalty", lambda x: g.ExponentialDecayLengthPenalty(x, ends, length), ends)
        add("suppress_tokens", lambda x: g.SuppressTokensLogitsProcessor(x, **place))
        # As in transformers: a first token that is forced comes before the beginning.
        begin = length if length > 1 or value("forced_bos_token_id") is None else length + 1
        add("begin_suppress_tokens", lambda x: g.SuppressTokensAtBeginLogitsProcessor(x, begin, **place))
        return found

    def late_filters(self, params: SamplingParams, vocab_size: int, device: torch.device) -> list[Any]:
        """All filters of a sampled request as processors, where some of them act behind those of `SamplingParams`.

        Empty where none does: then the filters of `params` run in the sampling op.
        """
        late = [name for name in _LATE if self._value(name) is not None]
        watermark = self._value("watermarking_config")
        if params.greedy or not (late or watermark is not None):
            return [] if watermark is None else [_watermark(watermark, vocab_size, device)]
        from transformers import generation as g

        found: list[Any] = []
        if params.temperature != 1.0:
            found.append(g.TemperatureLogitsWarper(params.temperature))
        if "top_h" in late:
            found.append(g.TopHLogitsWarper(top_h=self._value("top_h")))
        if params.top_k:
            found.append(g.TopKLogitsWarper(top_k=params.top_k))
        if params.top_p < 1:
            found.append(g.TopPLogitsWarper(top_p=params.top_p))
        if params.min_p > 0:
            found.append(g.MinPLogitsWarper(min_p=params.min_p))
        if "typical_p" in late:
            found.append(g.TypicalLogitsWarper(mass=self._value("typical_p")))
        if "epsilon_cutoff" in late:
            found.append(g.EpsilonLogitsWarper(epsilon=self._value("epsilon_cutoff")))
        if "eta_cutoff" in late:
            found.append(g.EtaLogitsWarper(epsilon=self._value("eta_cutoff"), device=str(device)))
        if watermark is not None:
            found.append(_watermark(watermark, vocab_size, device))
        return found


def _is_off(name: str, value: Any) -> bool:
    key = KEYS.get(name)
    return key is not None and isinstance(value, (Real, str)) and value in key.off


def _check(name: str, value: Any) -> None:
    """Refuse a key that would change the text and is not honoured."""
    key = KEYS.get(name)
    if key is None and value is not None and not name.startswith("_"):
        from transformers import GenerationConfig

        # Authors leave notes of their own in these files; what transformers knows and this table does not may act.
        key = Key("refused") if name in vars(GenerationConfig()) else None
    if key is not None and key.how == "refused" and value is not None and not _is_off(name, value):
        why = f" ({key.note})" if key.note else ""
        raise ValueError(
            f"Speculator: generation_config.{name} is not honoured here{why}; set it to None, got {shown(value)}"
        )


def _watermark(config: Any, vocab_size: int, device: torch.device) -> Any:
    """A config keeps it as a dictionary or as an object."""
    from transformers import generation as g

    try:
        made = g.WatermarkingConfig(**config) if isinstance(config, dict) else config
    except TypeError as error:
        raise ValueError(
            f"watermarking_config: must hold the keys of a WatermarkingConfig, got {shown(config)}"
        ) from error
    if not hasattr(made, "construct_processor"):
        raise ValueError(f"watermarking_config: must be a WatermarkingConfig or a dictionary, got {shown(config)}")
    return made.construct_processor(vocab_size, device)
