"""Keys that ask for another forward pass: refused wherever they stand, while notes pass."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
from tiny_drafters import nested, refused, speculators, tiny_1, tiny_2

from pydflash.checkpoints.config import DrafterConfig
from pydflash.checkpoints.keys import is_drafter

read = DrafterConfig.from_dict


def places(key: str, value: Any) -> dict[str, dict[str, Any]]:
    """A tiny config with the key in each place where a config may have it."""
    layer = speculators(tiny_1())
    layer["transformer_layer_config"][key] = value
    notes = speculators(tiny_1())
    notes["speculators_config"][key] = value
    return {
        key: tiny_1(**{key: value}),
        f"dflash_config.{key}": nested(tiny_1(), **{key: value}),
        f"transformer_layer_config.{key}": layer,
        f"speculators_config.{key}": notes,
        f"text_config.{key}": tiny_1(text_config={key: value}),
        f"draft_config.inner.{key}": tiny_1(draft_config={"inner": {key: value}}),
    }


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("query_zero_predicts_next", True),
        ("sample_from_anchor", True),
        ("anchor_first", True),
        ("prediction_shift", 1),
        ("use_aux_hidden_state", False),
        ("hidden_act", "gelu"),
        ("layer_ids", [1, 5]),
        ("markov_rank", 256),
        ("first_slot_offset", 1),
        ("quantization_config", {"quant_method": "gptq"}),
    ],
)
def test_a_key_that_changes_the_meaning_is_refused_in_every_place(key, value):
    for label, raw in places(key, value).items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            refused(raw, label)


@pytest.mark.parametrize(
    "key", ["query_zero_predicts_next", "sample_from_anchor", "anchor_first", "attention_sink_bias"]
)
@pytest.mark.parametrize("value", [False, None])
def test_and_passes_where_it_is_off(key, value):
    for label, raw in places(key, value).items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert read(raw).version == 1, label


def test_unknown_notes_are_told_once_and_pass():
    """Outside dflash_config only: whatever is in there is about the drafter."""
    raw = tiny_1(my_note="x", text_config={"hidden_size": 3}, training={"window": 5}, off=False, none=None, zero=0)
    with pytest.warns(UserWarning, match="not read") as caught:
        assert read(raw) == read(tiny_1())
    (message,) = [str(w.message) for w in caught]
    assert message == "DrafterConfig: not read, and taken to be notes: my_note, text_config, training"
    refused(nested(tiny_1(), my_note="x"), "dflash_config.my_note", "'x'")
    assert read(nested(tiny_1(), my_note=False)) == read(tiny_1())


def test_published_layouts_raise_no_word():
    """The keys that the layouts of published drafters have, by the specification."""
    notes = {
        "auto_map": {"AutoModel": "modeling.DFlash2DraftModel"}, "torch_dtype": "bfloat16", "dtype": "bfloat16",
        "transformers_version": "5.15.0", "use_cache": True, "tie_word_embeddings": False, "initializer_range": 0.02,
        "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": [2, 3], "pad_token_id": 0, "return_dict": True,
        "use_sliding_window": True, "max_window_layers": 5, "mlp_bias": False, "id2label": {"0": "LABEL_0"},
        "label2id": {"LABEL_0": 0}, "chunk_size_feed_forward": 0, "problem_type": None, "quantization_config": None,
        "_name_or_path": "somewhere", "is_encoder_decoder": False, "logit_scale": 1.0,
    }  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for raw in (tiny_1(), tiny_2()):
            assert read(raw | notes) == read(raw)
            assert read(nested(raw, projector_type="dflash", sample_from_anchor=False, use_swa=False)) == read(raw)
            spec = speculators(raw, num_target_layers=8)
            spec["speculators_config"] |= {
                "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
                "default_proposal_method": "greedy",
            }
            spec["transformer_layer_config"] |= notes
            assert read(spec) == read(raw)


def test_as_many_drafts_as_slots_would_be_the_anchors_too():
    for drafts, fits in ((2, True), (3, True), (4, False)):
        raw = speculators(tiny_1())
        raw["speculators_config"]["proposal_methods"] = [{"speculative_tokens": drafts}]
        if fits:
            assert read(raw).block_size == 4
        else:
            refused(raw, "proposal_methods.speculative_tokens", "below block_size 4", "got 4")
    raw["speculators_config"]["proposal_methods"] = {"a": 1}
    refused(raw, "proposal_methods", "list")


def test_keys_that_are_no_names_are_refused():
    refused(tiny_1() | {3: 4}, "a string, as every key", "got 3")


def test_drafters_are_told_from_targets():
    for raw in (tiny_1(), tiny_2(), speculators(tiny_1()), {"architectures": ["DFlashLagunaForCausalLM"]}):
        assert is_drafter(raw)
    for raw in ({"architectures": ["Qwen3ForCausalLM"]}, {}, {"architectures": None}, {"dflash_config": None}):
        assert not is_drafter(raw)
    refused({"architectures": ["Qwen3ForCausalLM"]}, "this is a language model: give it as the target")


@pytest.mark.parametrize(
    "name", ["sliding_window", "vocab_size", "hidden_size", "block_size", "max_position_embeddings"]
)
@pytest.mark.parametrize("value", [2**31, 2**32 + 5, 10**23, 10**5000], ids=["2^31", "2^32", "1e23", "1e5000"])
def test_integers_that_would_narrow_are_refused(name, value):
    raw = tiny_1(layer_types=["sliding_attention"] * 2, sliding_window=8)
    raw["mask_token_id"] = 1
    refused(raw | {name: value}, name, "at most 2147483647")


def test_the_other_integers_have_a_range_too():
    refused(nested(tiny_1(num_target_layers=None), target_layer_ids=[1, 2**40]), "target_layer_ids")
    refused(nested(tiny_1(), use_swa=True, swa_window_size=2**40), "sliding_window", "at most")
    refused(tiny_1(num_hidden_layers=10**9), "num_hidden_layers", "at most 4096", "got 1000000000")
    refused(tiny_1(sliding_window_pattern=2, num_hidden_layers=10**6, layer_types=None), "at most 4096")
    rope = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 2**40}
    refused(tiny_1(rope_scaling=rope), "original_max_position_embeddings", "at most")
    refused(nested(tiny_2(), selector_rank=2**33), "selector_rank", "at most")
    for huge in (10**400, 1e39):
        refused(tiny_1(rope_theta=huge), "rope_theta", "a positive number")
    assert read(tiny_1(max_position_embeddings=2**31 - 1)).max_position_embeddings == 2**31 - 1


def test_long_values_are_cut_in_messages():
    long = "x" * 5_000_000
    deep: Any = []
    for _ in range(100_000):
        deep = [deep]
    for raw in (
        tiny_1(hidden_size=long),
        tiny_1(hidden_size=deep),
        tiny_1(architectures=[long]),
        tiny_1(layer_types=["full_attention", long]),
        tiny_1(rope_scaling={"type": long}),
        tiny_1(rope_parameters={long: {}, "a": {}}),
        tiny_1(**{"attention" + long: 1}),
        nested(tiny_1(), target_layer_ids=[0.5] * 1_000_000),
    ):
        with pytest.raises(ValueError) as caught:
            read(raw)
        assert len(str(caught.value)) < 1500
    with pytest.warns(UserWarning, match="not read") as warned:
        read(tiny_1(**{long: 1}))
    assert len(str(warned[0].message)) < 500
