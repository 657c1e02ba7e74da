"""The config.json layouts of DFlash drafters, read into the fields of `DrafterConfig` and written from it.

Z-Lab: a Qwen3 config with the DFlash keys beside it, or nested in `dflash_config` (the nested key wins).
speculators: the Qwen3 part nested in `transformer_layer_config`, the DFlash keys at the root, layer ids
shifted by one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..messages import shown
from .foreign import refuse_other_maths
from .keys import LAYER_TYPES, MOST_LAYERS, VERSION_2_KEYS, Keys
from .rope import read_rope
from .values import at_least_one, boolean, fail, plain, positive, section, warn

if TYPE_CHECKING:
    from .config import DrafterConfig


def read_config(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword arguments of `DrafterConfig` from the content of a config.json of any dialect.

    Raises ValueError that names the key, expected and got; warns where two places of a config disagree.
    """
    raw = plain(raw)
    keys = Keys(raw)
    refuse_other_maths(keys)
    num_layers = keys.integer("num_hidden_layers", "the number of drafter layers")
    at_least_one(keys.label("num_hidden_layers"), num_layers, MOST_LAYERS)  # before a list has an entry for each
    hidden_size = keys.integer("hidden_size", "the width of the drafter")
    num_heads = keys.integer("num_attention_heads", "the number of query heads")
    head_dim = keys.get("head_dim")
    if head_dim is None:
        if hidden_size % num_heads:
            fail("head_dim", "given (hidden_size is not a multiple of num_attention_heads)", None)
        head_dim = hidden_size // num_heads
    layer_types, window, all_windowed = _read_windows(keys, num_layers)
    softcap = keys.get("final_logit_softcapping")
    verifier = section(section(raw, "speculators_config"), "verifier")
    fields = {
        "version": keys.version,
        "hidden_size": hidden_size,
        "intermediate_size": keys.require("intermediate_size", "the width of the MLP"),
        "num_layers": num_layers,
        "num_heads": num_heads,
        "num_kv_heads": keys.require("num_key_value_heads", "the number of key/value heads"),
        "head_dim": head_dim,
        "rms_norm_eps": keys.get("rms_norm_eps", 1e-6),
        "attention_bias": keys.get("attention_bias", False),
        "vocab_size": keys.require("vocab_size", "the target's vocabulary size"),
        "max_position_embeddings": keys.require("max_position_embeddings", "the longest position"),
        "rope": read_rope(keys, layer_types),
        "rope_interleaved": not _read_neox_style(keys),
        "layer_types": layer_types,
        "sliding_window": window,
        "causal": _read_causal(keys, layer_types, all_windowed),
        "block_size": keys.get("block_size", 16),
        "num_target_layers": keys.get("num_target_layers"),
        "mask_token_id": _read_mask_token_id(keys),
        "input_embedding_scale": keys.get("input_embedding_scale", 1.0),
        "output_multiplier": _read_output_multiplier(keys, softcap),
        "final_logit_softcapping": None if softcap == 0 else softcap,
        "target_name": verifier.get("name_or_path"),
        "target_architectures": verifier.get("architectures") or (),
    }
    fields["target_layer_ids"] = _read_layer_ids(keys, num_layers, fields["num_target_layers"])
    for name in ("draft_vocab_size", "target_hidden_size"):
        if (value := keys.get(name)) is not None:
            fields[name] = at_least_one(keys.label(name), value)
    for name in VERSION_2_KEYS:
        fields[name] = keys.require(name, "a positive integer") if keys.version == 2 else keys.get(name, 0)
    return fields


def _read_windows(keys: Keys, num_layers: int) -> tuple[tuple[str, ...], Any, bool]:
    """Layer types, the window, and whether `use_swa` made every layer a (bidirectional) sliding one."""
    types = keys.get("layer_types")
    pattern = keys.get("sliding_window_pattern")
    window = keys.get("sliding_window")
    if types is not None:
        types = _per_layer(keys.label("layer_types"), types, num_layers)
        for index, kind in enumerate(types):
            if kind not in LAYER_TYPES:
                fail(f"{keys.label('layer_types')}[{index}]", " or ".join(map(repr, LAYER_TYPES)), kind)
    if pattern is not None:
        named = _expand_pattern(keys.label("sliding_window_pattern"), pattern, num_layers)
        if types is not None and types != named:
            fail(keys.label("sliding_window_pattern"), f"what layer_types says ({list(types)})", pattern)
        types = named
    use_swa = boolean(keys.label("use_swa"), keys.get("use_swa", False))
    size = keys.get("swa_window_size")
    if use_swa and "sliding_attention" not in (types or ()):
        return (LAYER_TYPES[1],) * num_layers, window if size is None else size, True
    if use_swa and size not in (None, window):
        fail(keys.label("swa_window_size"), f"the sliding_window of the sliding layers ({window})", size)
    if types is None:
        first = keys.get("max_window_layers", 28)
        windowed = keys.get("use_sliding_window") and window is not None
        if windowed and isinstance(first, int) and first < num_layers:
            fail("layer_types", "given where use_sliding_window is true", None)
        types = (LAYER_TYPES[0],) * num_layers
    return types, window if "sliding_attention" in types else None, False


def _expand_pattern(label: str, pattern: Any, num_layers: int) -> tuple[str, ...]:
    """An integer n makes every n-th layer a full one; a list says per layer whether it is a sliding one."""
    if isinstance(pattern, list | tuple):
        flags = [boolean(label, flag) for flag in _per_layer(label, pattern, num_layers)]
    else:
        period = at_least_one(label, pattern)
        flags = [(index + 1) % period != 0 for index in range(num_layers)]
    return tuple(LAYER_TYPES[flag] for flag in flags)


def _per_layer(label: str, values: Any, num_layers: int) -> tuple[Any, ...]:
    if not isinstance(values, list | tuple):
        fail(label, "a list with one entry per layer", values)
    if len(values) != num_layers:
        fail(label, f"a list of {num_layers} entries (num_hidden_layers)", f"{len(values)} entries")
    return tuple(values)


def _read_causal(keys: Keys, layer_types: tuple[str, ...], all_windowed: bool) -> tuple[bool, ...]:
    """Per layer: is_causal, else dflash_config.causal, else only the sliding layers are causal."""
    sliding = tuple(kind == "sliding_attention" for kind in layer_types)
    forced = [(keys.label(name), keys.get(name)) for name in ("is_causal", "causal") if keys.in_file(name)]
    forced = [(label, boolean(label, value)) for label, value in forced]
    name = "sliding_window_non_causal"
    non_causal = boolean(keys.label(name), keys.get(name)) if keys.in_file(name) else None
    if forced:
        label, causal = forced[0]
        for other, value in forced[1:]:
            if value != causal:
                warn(f"{label} = {causal} is used, {other} = {value} is not")
        if any(sliding) and non_causal == causal:  # it speaks of the sliding layers only
            warn(f"{label} = {causal} is used, {keys.label(name)} = {non_causal} is not")
        return (causal,) * len(sliding)
    if non_causal is not None:
        return tuple(flag and not non_causal for flag in sliding)
    if all_windowed or (keys.speculators and keys.version == 2):
        return (False,) * len(sliding)
    if keys.speculators and any(sliding):
        warn(f"{name} is not given, False (causal sliding layers) is taken")
    return sliding


def _read_neox_style(keys: Keys) -> bool:
    values = {
        keys.label(name): boolean(keys.label(name), keys.get(name))
        for name in ("is_neox_style", "rope_is_neox_style")
        if keys.get(name) is not None
    }
    if len(set(values.values())) == 2:
        fail(" and ".join(values), "equal", values)
    return all(values.values())


def _read_layer_ids(keys: Keys, num_layers: int, num_target_layers: Any) -> tuple[int, ...]:
    """0-based ids of the captured target layers; aux ids count the embedding too, so they are one more."""
    given: dict[str, tuple[int, ...]] = {}
    for name in ("target_layer_ids", "aux_hidden_state_layer_ids", "eagle_aux_hidden_state_layer_ids"):
        if (ids := keys.get(name)) is None:
            continue
        label, shift = keys.label(name), int(name != "target_layer_ids")
        if not isinstance(ids, list | tuple) or not ids or any(type(i) is not int or i < shift for i in ids):
            fail(label, f"a list of at least one integer, each at least {shift}", ids)
        given[label] = tuple(i - shift for i in ids)
    if len(set(given.values())) > 1:
        fail(" and ".join(given), "the same layers (aux ids are target_layer_ids + 1)", list(given.values()))
    if given:
        return next(iter(given.values()))
    if keys.speculators:
        fail("aux_hidden_state_layer_ids", "given (the captured target layers, counted from 1)", None)
    if num_target_layers is None or not keys.zlab:
        fail("dflash_config.target_layer_ids", "given (the captured target layers, counted from 0)", None)
    if type(num_target_layers) is not int or num_target_layers < 4:
        fail(keys.label("num_target_layers"), "an integer of at least 4", num_target_layers)
    ids = default_layer_ids(num_target_layers, num_layers)
    source = f"the Z-Lab layout's default for num_target_layers {num_target_layers}"
    warn(f"dflash_config.target_layer_ids is not given, {list(ids)} is taken, {source}")
    return ids


def default_layer_ids(num_target_layers: int, num_layers: int) -> tuple[int, ...]:
    """Layers spread evenly from 1 to `num_target_layers - 3`, one per drafter layer; halves round to even."""
    if num_layers == 1:
        return (num_target_layers // 2,)
    return tuple(round(1 + i * (num_target_layers - 4) / (num_layers - 1)) for i in range(num_layers))


def _read_mask_token_id(keys: Keys) -> Any:
    if keys.get("mask_token_id") is None and (token := keys.get("mask_token")) is not None:
        expected = f"given: look up mask_token {shown(token)} in the target's tokenizer and write its id here"
        fail("dflash_config.mask_token_id", expected, None)
    return keys.require("mask_token_id", "the id embedded at the slots to draft")


def _read_output_multiplier(keys: Keys, softcap: Any) -> Any:
    """`logit_scale` is one more factor on the logits; beside a soft cap its place is not defined."""
    multiplier = keys.get("output_multiplier", 1.0)
    scale = keys.get("logit_scale", 1.0)
    if scale == 1:
        return multiplier
    if softcap:
        fail(keys.label("logit_scale"), "1 beside final_logit_softcapping (use output_multiplier)", scale)
    return positive(keys.label("output_multiplier"), multiplier) * positive(keys.label("logit_scale"), scale)


def write_zlab(config: DrafterConfig) -> dict[str, Any]:
    """The content of config.json in the Z-Lab layout, as the official package reads it."""
    raw: dict[str, Any] = {"architectures": ["DFlashDraftModel" if config.version == 1 else "DFlash2DraftModel"]}
    raw |= _backbone_keys(config)
    raw["is_causal"] = None if config.causal == _sliding(config) else config.causal[0]
    if config.draft_vocab_size != config.vocab_size:
        raw["draft_vocab_size"] = config.draft_vocab_size
    if config.target_hidden_size != config.hidden_size:
        raw["target_hidden_size"] = config.target_hidden_size
    nested = {"mask_token_id": config.mask_token_id, "target_layer_ids": list(config.target_layer_ids)}
    # block_size stands where the published checkpoints of each version have it.
    (raw if config.version == 1 else nested)["block_size"] = config.block_size
    raw["dflash_config"] = nested | _logit_keys(config) | _version_2_keys(config)
    return raw


def write_speculators(config: DrafterConfig) -> dict[str, Any]:
    """The content of config.json in the speculators layout; keys it does not know go with the Qwen3 part."""
    layer = _backbone_keys(config) | _logit_keys(config)
    sliding = _sliding(config)
    non_causal = not any(config.causal) if any(sliding) else config.version == 2
    if config.causal != tuple(flag and not non_causal for flag in sliding):
        layer["is_causal"] = config.causal[0]
    kind = "dflash" if config.version == 1 else "dflash2"
    own_width = config.target_hidden_size == config.hidden_size
    target = {"name_or_path": config.target_name, "architectures": list(config.target_architectures)}
    return {
        "architectures": ["DFlashSpeculator" if config.version == 1 else "DFlash2DraftModel"],
        "speculators_model_type": kind,
        "speculators_config": {
            "algorithm": kind,
            # A block holds the anchor too, so it drafts one token less than it has slots.
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": config.block_size - 1}],
            "default_proposal_method": "greedy",
            "verifier": target,
        },
        "transformer_layer_config": layer,
        "draft_vocab_size": config.draft_vocab_size,
        "block_size": config.block_size,
        "target_hidden_size": None if own_width else config.target_hidden_size,
        "aux_hidden_state_layer_ids": [i + 1 for i in config.target_layer_ids],
        "mask_token_id": config.mask_token_id,
        "sliding_window_non_causal": non_causal,
        "sample_from_anchor": False,
        **_version_2_keys(config),
    }


def _backbone_keys(config: DrafterConfig) -> dict[str, Any]:
    """The keys of a Qwen3 config, with the spelling of rope that transformers 4 and 5 both read."""
    rope = {key: value for key, value in config.rope.items() if key != "rope_theta"}
    raw = {
        "model_type": "qwen3",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "attention_bias": config.attention_bias,
        "attention_dropout": 0.0,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_position_embeddings,
        "rope_theta": config.rope["rope_theta"],
        "rope_scaling": None if config.rope["rope_type"] == "default" else rope,
        "layer_types": list(config.layer_types),
        # Qwen3Config drops sliding_window unless use_sliding_window is true.
        "use_sliding_window": config.sliding_window is not None,
        "max_window_layers": config.num_layers,
        "sliding_window": config.sliding_window,
        "tie_word_embeddings": False,
    }
    if config.rope_interleaved:
        raw |= {"is_neox_style": False, "rope_is_neox_style": False}
    if config.num_target_layers is not None:
        raw["num_target_layers"] = config.num_target_layers
    return raw


def _logit_keys(config: DrafterConfig) -> dict[str, Any]:
    neutral = {"input_embedding_scale": 1.0, "output_multiplier": 1.0, "final_logit_softcapping": None}
    return {name: getattr(config, name) for name, off in neutral.items() if getattr(config, name) != off}


def _version_2_keys(config: DrafterConfig) -> dict[str, Any]:
    return {name: getattr(config, name) for name in VERSION_2_KEYS} if config.version == 2 else {}


def _sliding(config: DrafterConfig) -> tuple[bool, ...]:
    """Per layer: a sliding one. Also the causality that a config has where no key says otherwise."""
    return tuple(kind == "sliding_attention" for kind in config.layer_types)
