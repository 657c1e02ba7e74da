"""Keys of a config.json that ask for another forward pass than ours: refused wherever they stand.

A key that is not known is refused where its name speaks of the maths, and inside `dflash_config`, whose keys all do;
elsewhere one warning names those that are not read. Null, empty and (but for names of the maths) false say nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ..messages import cut, shown
from .keys import NESTED, READ, VERSION_2_KEYS, Keys
from .values import fail, warn

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
    "query_zero_predicts_next": (False,),
    "use_aux_hidden_state": (True,),
    "projector_type": ("dflash",),
    "shift_label": (False,),
    "attention_mode": ("gqa", "mha"),
    "draft_ffn_type": ("dense",),
    "conv_type": ("grouped_dynamic_depthwise",),
}
# A key in no list that holds one of these words may change the forward pass, so it is refused.
_MATHS_WORDS = (
    *("attention", "attn", "bias", "causal", "conv", "expert", "gate", "gating", "logit", "lora"),
    *("markov", "multiplier", "norm", "qk_", "residual", "rope", "rotary", "scal", "selector"),
    *("sink", "softcap", "swa", "window", "fusion", "activation"),
)
# And with one of these, what a slot predicts, or which target layers are read; false and 0 are "as usual" here.
_MEANING_WORDS = (
    *("anchor", "predict", "shift", "query", "slot", "layer_ids", "aux_hidden", "noise", "timestep"),
    *("denois", "dspark", "domino", "eagle", "medusa"),
)
# What transformers writes into every config, and what trainers leave there.
_HARMLESS = {
    *("architectures", "auto_map", "model_type", "transformers_version", "torch_dtype", "dtype"),
    *("_name_or_path", "name_or_path", "_commit_hash", "base_model_tp_plan", "base_model_pp_plan"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "decoder_start_token_id"),
    *("initializer_range", "use_cache", "tie_word_embeddings", "tie_encoder_decoder", "is_decoder"),
    *("is_encoder_decoder", "is_composition", "chunk_size_feed_forward", "pruned_heads", "torchscript"),
    *("return_dict", "return_dict_in_generate", "output_hidden_states", "output_scores", "output_attentions"),
    *("id2label", "label2id", "num_labels", "problem_type", "task_specific_params", "finetuning_task"),
    *("tokenizer_class", "prefix", "tf_legacy_loss", "use_bfloat16", "pretraining_tp", "unsloth_version"),
    *("max_length", "min_length", "do_sample", "early_stopping", "num_beams", "num_beam_groups"),
    *("diversity_penalty", "temperature", "top_k", "top_p", "typical_p", "repetition_penalty"),
    *("length_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "bad_words_ids"),
    *("num_return_sequences", "forced_bos_token_id", "forced_eos_token_id", "remove_invalid_values"),
    *("exponential_decay_length_penalty", "suppress_tokens", "begin_suppress_tokens"),
    *("attention_dropout", "attn_implementation", "_attn_implementation"),
    *("_attn_implementation_autoset", "_attn_implementation_internal", "attention_backend"),
    *("add_cross_attention", "cross_attention_hidden_size", "renormalize_logits"),
    *("num_experts", "num_experts_per_tok", "shared_expert_intermediate_size", "moe_experts_implementation"),
    *("num_nextn_predict_layers", "mtp_num_hidden_layers", "normalize_loss", "loss_scale"),
    *("num_anchors", "max_anchors", "runtime_block_size", "loss_type", "loss_decay_gamma"),
    *("emb_dim", "gru_hidden_dim", "pure_draft_prefix_len", "lambda_base_start"),
    *("lambda_base_decay_ratio", "auf"),
}
_SECTIONS = {"dflash_config", "transformer_layer_config", "speculators_config"}
_SPECULATORS = {"speculators_model_type", "speculators_version", "algorithm", "proposal_methods"}
_SPECULATORS |= {"default_proposal_method", "verifier"}
_NOTES = ("train", "optim", "loss", "data")  # in the name of a section about how the drafter was made
_DEEPEST = 8


def refuse_other_maths(keys: Keys) -> None:
    """Raise ValueError for a key, known or not, that asks for a forward pass we do not compute."""
    unread: list[str] = []
    for place, values in keys.places:
        read = NESTED if place == "dflash_config." else READ
        for name, value in _given(place, values):
            if place == "dflash_config." and _is_unknown(name, read) and value is not False:
                expected = "at the top level" if name in READ else "absent; remove it if it has no effect at inference"
                fail(place + name, expected, value)
            _check(place, name, value, read, unread)
    _check_proposals(keys)
    if unread:
        warn(f"not read, and taken to be notes: {cut(', '.join(unread))}")
    if keys.version == 1:
        for name in VERSION_2_KEYS:
            if (value := keys.get(name)) not in (None, 0):
                fail(keys.label(name), "0 or absent in a DFlash 1 config (DFlash2DraftModel has it)", value)


def _check(place: str, name: str, value: Any, read: set[str], unread: list[str], depth: int = 0) -> None:
    """One key; what nobody reads and has a section of its own is looked into, since keys may hide there."""
    absent = "absent; remove it if it has no effect at inference"
    if name in ("quantization_config", "compression_config"):
        fail(place + name, "absent (quantised drafters are not read)", value)
    if name in _ONLY:
        if value not in _ONLY[name]:
            fail(place + name, " or ".join(map(repr, _ONLY[name])), value)
        return
    if not _is_unknown(name, read):
        return
    spoken = name.lower()
    if any(word in spoken for word in _MATHS_WORDS):
        fail(place + name, absent, value)
    if value in (False, 0):
        return
    if any(word in spoken for word in _MEANING_WORDS):
        fail(place + name, absent, value)
    if depth == 0:
        unread.append(place + name)
    if isinstance(value, Mapping) and depth < _DEEPEST and not any(word in spoken for word in _NOTES):
        inside = f"{place}{name}."
        for inner, content in _given(inside, value):
            _check(inside, inner, content, READ, unread, depth + 1)


def _given(place: str, values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The keys that say something; ValueError for one that is no name."""
    for name, value in values.items():
        if not isinstance(name, str):
            fail(f"{place}{shown(name)}", "a string, as every key", name)
        if not (value is None or value == [] or value == {}):
            yield name, value


def _is_unknown(name: str, read: set[str]) -> bool:
    return name not in _ONLY and name not in _HARMLESS and name not in read | _SECTIONS | _SPECULATORS


def _check_proposals(keys: Keys) -> None:
    """A block drafts one token less than it has slots; more would mean that the anchor's slot drafts too."""
    place = "speculators_config."
    config = keys.places[1][1].get("speculators_config") or {}
    for name, value in _given(place, config):
        _check(place, name, value, READ, [])
    methods = config.get("proposal_methods") or []
    if not isinstance(methods, list | tuple) or not all(isinstance(method, Mapping) for method in methods):
        fail(f"{place}proposal_methods", "a list of mappings", methods)
    for method in methods:
        drafts, slots = method.get("speculative_tokens"), keys.get("block_size")
        if type(drafts) is int and type(slots) is int and drafts >= slots:
            expected = f"below block_size {slots} (the anchor's slot drafts nothing)"
            fail(f"{place}proposal_methods.speculative_tokens", expected, drafts)
