"""Where a key of a drafter's config.json is found, which keys are read, and which are refused.

Z-Lab: a Qwen3 config with the DFlash keys beside it, or nested in `dflash_config` (the nested key wins).
speculators: the Qwen3 part nested in `transformer_layer_config`, the DFlash keys at the root.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any, NoReturn

_ARCHITECTURES = {
    "DFlashDraftModel": 1,
    "DFlashSpeculator": 1,
    "MuseGlimmerAssistantModel": 1,
    "DFlash2DraftModel": 2,
}
_SPECULATORS_TYPES = {"dflash": 1, "dflash2": 2}
VERSION_2_KEYS = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
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

# Keys of sibling algorithms and variants: any other value means other maths than this package computes.
_ONLY: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "mlp_bias": (False,),
    "attention_sink_bias": (False,),
    "add_swa_attention_sink_bias": (False,),
    "add_full_attention_sink_bias": (False,),
    "attention_value_scale": (1,),
    "partial_rotary_factor": (1,),
    "use_qk_norm": (True,),
    "sample_from_anchor": (False,),
    "use_aux_hidden_state": (True,),
    "projector_type": ("dflash",),
    "shift_label": (False,),
    "attention_mode": ("gqa", "mha"),
    "draft_ffn_type": ("dense",),
    "conv_type": ("grouped_dynamic_depthwise",),
}
_NESTED = {
    *VERSION_2_KEYS,
    *("block_size", "target_layer_ids", "mask_token_id", "mask_token", "num_target_layers"),
    *("causal", "use_swa", "swa_window_size", "input_embedding_scale", "output_multiplier"),
    *("final_logit_softcapping",),
}
_READ = {
    *_QWEN3_DEFAULTS,
    *_NESTED,
    *("rms_norm_eps", "attention_bias", "rope_scaling", "rope_parameters"),
    *("original_max_position_embeddings", "layer_types", "sliding_window", "sliding_window_pattern"),
    *("use_sliding_window", "max_window_layers", "is_causal", "sliding_window_non_causal"),
    *("is_neox_style", "rope_is_neox_style", "logit_scale", "aux_hidden_state_layer_ids"),
    *("eagle_aux_hidden_state_layer_ids", "draft_vocab_size", "target_hidden_size"),
}
# A key in no list that holds one of these words may change the forward pass, so it is refused.
_MATHS_WORDS = (
    *("attention", "attn", "bias", "causal", "conv", "expert", "gate", "gating", "logit", "lora"),
    *("markov", "multiplier", "norm", "qk_", "residual", "rope", "rotary", "scal", "selector"),
    *("sink", "softcap", "swa", "window", "fusion", "activation"),
)
_HARMLESS = {
    *("attention_dropout", "attn_implementation", "_attn_implementation"),
    *("_attn_implementation_autoset", "_attn_implementation_internal", "attention_backend"),
    *("output_attentions", "add_cross_attention", "cross_attention_hidden_size"),
    *("renormalize_logits", "num_experts", "num_experts_per_tok", "shared_expert_intermediate_size"),
    *("moe_experts_implementation", "normalize_loss", "loss_scale"),
    # Training and serving notes that trainers leave inside dflash_config.
    *("num_anchors", "max_anchors", "runtime_block_size", "loss_type", "loss_decay_gamma"),
    *("emb_dim", "gru_hidden_dim", "pure_draft_prefix_len", "lambda_base_start"),
    *("lambda_base_decay_ratio", "auf"),
}


def fail(key: str, expected: str, got: object) -> NoReturn:
    """Raise the ValueError of a wrong config value: the key, what it must be, what it is."""
    raise ValueError(f"DrafterConfig: {key} must be {expected}, got {got!r}")


class Keys:
    """The places of one config in the order in which a key is looked up: the first place that has it wins."""

    def __init__(self, raw: Mapping[str, Any]) -> None:
        if not isinstance(raw, Mapping):
            fail("config", "a mapping (the content of config.json)", raw)
        self.version = drafter_version(raw)
        self.speculators = raw.get("speculators_model_type") is not None
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
                warn(f"{found[0][0]} = {found[0][1]!r} is used, {label} = {value!r} is not")
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
            where = "dflash_config." if name in _NESTED and not self.speculators else ""
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
        fail("architectures", f"a list of one of {', '.join(_ARCHITECTURES)}", names)
    version = _ARCHITECTURES[name]
    if kind is not None and _SPECULATORS_TYPES[kind] != version:
        fail("architectures", f"one for speculators_model_type {kind!r}", names)
    return version


def refuse_other_maths(keys: Keys) -> None:
    """Raise ValueError for a key, known or not, that asks for a forward pass we do not compute."""
    absent = "absent; remove it if it has no effect at inference"
    for place, values in keys.places:
        for name, value in values.items():
            if value is None or value in ([], {}):
                continue
            if name in ("quantization_config", "compression_config"):
                fail(place + name, "absent (quantised drafters are not read)", value)
            if name in _ONLY:
                if value not in _ONLY[name]:
                    fail(place + name, " or ".join(map(repr, _ONLY[name])), value)
            elif name in _HARMLESS or name in (_NESTED if place == "dflash_config." else _READ):
                continue
            elif place == "dflash_config.":
                fail(place + name, "at the top level" if name in _READ else absent, value)
            elif any(word in name.lower() for word in _MATHS_WORDS):
                fail(place + name, absent, value)
    if keys.version == 1:
        for name in VERSION_2_KEYS:
            if (value := keys.get(name)) not in (None, 0):
                fail(keys.label(name), "0 or absent in a DFlash 1 config (DFlash2DraftModel has it)", value)


def section(raw: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A nested mapping of the config, empty where the key is absent or null."""
    content = raw.get(name)
    if content is not None and not isinstance(content, Mapping):
        fail(name, "a mapping", content)
    return content or {}


def at_least_one(label: str, value: Any) -> int:
    """The value, checked to be an integer of at least 1 (a bool is none)."""
    if type(value) is not int or value < 1:
        fail(label, "a positive integer", value)
    return value


def positive(label: str, value: Any) -> float:
    """The value as a float, checked to be finite and above 0."""
    if type(value) not in (int, float) or not 0 < value < float("inf"):
        fail(label, "a positive number", value)
    return float(value)


def boolean(label: str, value: Any) -> bool:
    """The value, checked to be true or false."""
    if type(value) is not bool:
        fail(label, "true or false", value)
    return bool(value)


def warn(message: str) -> None:
    """Warn that something in the config is overruled or guessed."""
    warnings.warn(f"DrafterConfig: {message}", stacklevel=2)
