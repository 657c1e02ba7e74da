"""What a target's generation config asks for: sampling, stop tokens, logits processors. Honoured or refused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

# Options that would change the output and are not offered here, each with the value that switches it off.
_NOT_HONOURED: dict[str, tuple[Any, ...]] = {
    "num_beams": (1,),
    "num_beam_groups": (1,),
    "num_return_sequences": (1,),
    "penalty_alpha": (0.0,),
    "typical_p": (1.0,),
    "epsilon_cutoff": (0.0,),
    "eta_cutoff": (0.0,),
    "top_h": (),
    "diversity_penalty": (0.0,),
    "encoder_repetition_penalty": (1.0,),
    "encoder_no_repeat_ngram_size": (0,),
    "guidance_scale": (1.0,),
    "exponential_decay_length_penalty": (),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "sequence_bias": (),
    "begin_suppress_tokens": (),
    "forced_decoder_ids": (),
    "constraints": (),
    "force_words_ids": (),
    "watermarking_config": (),
    "dola_layers": (),
    "max_time": (),
    "token_healing": (False,),
}


class GenerationDefaults:
    """The parts of a transformers `GenerationConfig` that a request starts from.

    Attributes:
        sampling: do_sample, temperature, top_k, top_p and min_p, as far as the config sets them explicitly.
        stop_token_ids: Its end-of-sequence tokens.
        stop_strings: Its stop strings.

    Raises: ValueError naming an option the config sets that is not honoured here.
    """

    def __init__(self, generation_config: Any) -> None:
        config = generation_config
        for name, off in _NOT_HONOURED.items():
            value = getattr(config, name, None)
            if value is not None and value not in off:
                raise ValueError(
                    f"Speculator: the target's generation_config.{name} is not honoured here; set it to None, "
                    f"got {value!r}"
                )
        # Only what differs from the library's own defaults was meant by the model's authors.
        explicit = {} if config is None else config.to_diff_dict()
        names = ("do_sample", "temperature", "top_k", "top_p", "min_p")
        self.sampling = {name: explicit[name] for name in names if name in explicit}
        eos = getattr(config, "eos_token_id", None)
        self.stop_token_ids: list[int] = [] if eos is None else [eos] if isinstance(eos, int) else list(eos)
        self.stop_strings: str | list[str] = getattr(config, "stop_strings", None) or []
        self._config = config

    def processors(self, prompt_length: int, stop_token_ids: Sequence[int], device: torch.device) -> list[Any]:
        """The logits processors the config asks for, in transformers' order."""
        config = self._config
        if config is None:
            return []
        from transformers import generation

        found: list[Any] = []
        penalty = getattr(config, "repetition_penalty", None)
        if penalty is not None and penalty != 1.0:
            found.append(generation.RepetitionPenaltyLogitsProcessor(penalty))
        if ngram := getattr(config, "no_repeat_ngram_size", None):
            found.append(generation.NoRepeatNGramLogitsProcessor(ngram))
        if words := getattr(config, "bad_words_ids", None):
            found.append(generation.NoBadWordsLogitsProcessor(words, list(stop_token_ids)))
        stops = list(stop_token_ids)
        if stops and (length := getattr(config, "min_length", None)):
            found.append(generation.MinLengthLogitsProcessor(length, stops, device=str(device)))
        if stops and (count := getattr(config, "min_new_tokens", None)):
            found.append(generation.MinNewTokensLengthLogitsProcessor(prompt_length, count, stops, device=str(device)))
        if suppressed := getattr(config, "suppress_tokens", None):
            found.append(generation.SuppressTokensLogitsProcessor(suppressed, device=str(device)))
        return found
