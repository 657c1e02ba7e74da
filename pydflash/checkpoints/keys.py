"""Where a key of a drafter's config.json is found, and which keys are read.

Z-Lab: a Qwen3 config with the DFlash keys beside it, or nested in `dflash_config` (the nested key wins).
speculators: the Qwen3 part nested in `transformer_layer_config`, the DFlash keys at the root.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..messages import shown
from .values import at_least_one, fail, section, warn

_ARCHITECTURES = {
    "DFlashDraftModel": 1,
    "DFlashSpeculator": 1,
    "MuseGlimmerAssistantModel": 1,
    "DFlash2DraftModel": 2,
}
_OFFICIAL = ("DFlashDraftModel", "DFlash2DraftModel")  # whose package has a default for target_layer_ids
_OF_TARGETS = ("ForCausalLM", "ForConditionalGeneration", "LMHeadModel")
_SPECULATORS_TYPES = {"dflash": 1, "dflash2": 2}
VERSION_2_KEYS = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
MOST_LAYERS = 4096  # of a drafter; published ones have 8 at most
LAYER_TYPES = ("full_attention", "sliding_attention")

# speculators leaves out what equals a default of Qwen3Config or of its own config classes.
_QWEN3_DEFAULTS = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "head_dim": 128,
    "max_position_embeddings": 32768,
    "rope_theta": 10000.0,
}
_SPECULATORS_1_DEFAULTS = {"block_size": 8, "draft_vocab_size": 32000}
_SPECULATORS_2_DEFAULTS = {"block_size": 8, **dict(zip(VERSION_2_KEYS, (2, 16, 256, 16), strict=True))}

NESTED = {
    *VERSION_2_KEYS,
    *("block_size", "target_layer_ids", "mask_token_id", "mask_token", "num_target_layers"),
    *("causal", "use_swa", "swa_window_size", "input_embedding_scale", "output_multiplier"),
    *("final_logit_softcapping",),
}
READ = {
    *_QWEN3_DEFAULTS,
    *NESTED,
    *("rms_norm_eps", "attention_bias", "rope_scaling", "rope_parameters"),
    *("original_max_position_embeddings", "layer_types", "sliding_window", "sliding_window_pattern"),
    *("use_sliding_window", "max_window_layers", "is_causal", "sliding_window_non_causal"),
    *("is_neox_style", "rope_is_neox_style", "logit_scale", "aux_hidden_state_layer_ids"),
    *("eagle_aux_hidden_state_layer_ids", "draft_vocab_size", "target_hidden_size"),
}


class Keys:
    """The places of one config in the order in which a key is looked up: the first place that has it wins."""

    def __init__(self, raw: Mapping[str, Any]) -> None:
        if not isinstance(raw, Mapping):
            fail("config", "a mapping (the content of config.json)", raw)
        self.version = drafter_version(raw)
        self.speculators = raw.get("speculators_model_type") is not None
        self.zlab = not self.speculators and raw["architectures"][0] in _OFFICIAL
        self.places = [("dflash_config.", section(raw, "dflash_config")), ("", raw)]
        self._defaults: dict[str, Any] = {}
        self._warned: set[str] = set()
        if self.speculators:
            layer = section(raw, "transformer_layer_config")
            self.places.append(("transformer_layer_config.", layer))
            self._defaults |= _SPECULATORS_1_DEFAULTS if self.version == 1 else _SPECULATORS_2_DEFAULTS
            if layer.get("model_type", "qwen3") == "qwen3":
                self._defaults |= _QWEN3_DEFAULTS
        elif raw.get("transformer_layer_config") is not None:
            fail("speculators_model_type", "'dflash' or 'dflash2' (transformer_layer_config is given)", None)

    def get(self, name: str, default: Any = None) -> Any:
        """The value of `name`, else the dialect's default, else `default`; null counts as not given."""
        found = [(place + name, values[name]) for place, values in self.places if name in values]
        for label, value in found[1:]:
            if value != found[0][1] and name not in self._warned:
                self._warned.add(name)
                warn(f"{found[0][0]} = {shown(found[0][1])} is used, {label} = {shown(value)} is not")
        if found and found[0][1] is not None:
            return found[0][1]
        return self._defaults.get(name, default)

    def in_file(self, name: str) -> bool:
        """Whether the file itself gives the key, rather than a default of its dialect."""
        return any(values.get(name) is not None for _, values in self.places)

    def label(self, name: str) -> str:
        """The key as the user finds it in the file, with the section that holds it."""
        return next((place + name for place, values in self.places if name in values), name)

    def require(self, name: str, meaning: str) -> Any:
        """The value of a key without a default; `meaning` says in the error what is asked for."""
        value = self.get(name)
        if value is None:
            where = "dflash_config." if name in NESTED and not self.speculators else ""
            fail(where + name, f"given ({meaning})", None)
        return value

    def integer(self, name: str, meaning: str) -> int:
        """The value of a key that must be a positive integer."""
        return at_least_one(self.label(name), self.require(name, meaning))


def drafter_version(raw: Mapping[str, Any]) -> int:
    """1 (DFlash) or 2 (DFlash 2), by the architecture or the speculators type; ValueError for another."""
    kind, names = raw.get("speculators_model_type"), raw.get("architectures")
    if kind is not None and (not isinstance(kind, str) or kind not in _SPECULATORS_TYPES):
        fail("speculators_model_type", "'dflash' or 'dflash2'", kind)
    algorithm = section(raw, "speculators_config").get("algorithm")
    if kind is not None and algorithm not in (None, kind):
        fail("speculators_config.algorithm", f"{kind!r} (speculators_model_type)", algorithm)
    if names is None and kind is not None:
        return _SPECULATORS_TYPES[kind]
    name = names[0] if isinstance(names, list | tuple) and len(names) == 1 else None
    if not isinstance(name, str) or name not in _ARCHITECTURES:
        expected = f"a list of one of {', '.join(_ARCHITECTURES)}"
        if isinstance(name, str) and name.endswith(_OF_TARGETS) and raw.get("dflash_config") is None:
            expected += " (this is a language model: give it as the target, and a drafter made for it as the drafter)"
        fail("architectures", expected, names)
    version = _ARCHITECTURES[name]
    if kind is not None and _SPECULATORS_TYPES[kind] != version:
        fail("architectures", f"one for speculators_model_type {kind!r}", names)
    return version


def is_drafter(raw: Mapping[str, Any]) -> bool:
    """Whether the content of a config.json says that it is of a DFlash drafter, ours or a sibling's."""
    names = raw.get("architectures")
    named = isinstance(names, list | tuple) and any("DFlash" in str(name) or name in _ARCHITECTURES for name in names)
    return bool(named or raw.get("dflash_config") or raw.get("speculators_model_type"))
