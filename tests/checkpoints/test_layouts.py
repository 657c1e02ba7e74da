"""The layouts of config.json: what each dialect means, which key wins, what is written."""

from __future__ import annotations

import warnings

import pytest
from tiny_drafters import nested, refused, speculators, tiny_1, tiny_2, without

from pydflash.checkpoints.config import DrafterConfig
from pydflash.checkpoints.layouts import default_layer_ids

SLIDING, FULL = "sliding_attention", "full_attention"
read = DrafterConfig.from_dict


@pytest.fixture(autouse=True)
def no_unexpected_warning():
    """A warning that a test does not ask for fails it."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@pytest.mark.parametrize("raw", [tiny_1(), tiny_2()], ids=["dflash", "dflash2"])
def test_three_dialects_of_one_drafter_are_equal(raw):
    section = raw["dflash_config"]
    flat = without(raw, "dflash_config") | section
    inside = nested(raw, block_size=4, num_target_layers=8)
    inside = without(inside, "block_size", "num_target_layers")
    assert read(flat) == read(inside) == read(raw)
    other = read(speculators(raw, num_target_layers=8))
    assert other == read(raw)
    assert (other.target_name, other.target_architectures) == ("a/b", ("C",))


@pytest.mark.parametrize(
    ("top", "inner"),
    [({"block_size": 8}, {"block_size": 4}), ({"mask_token_id": 7}, {}), ({"target_layer_ids": [1, 2]}, {})],
)
def test_the_nested_key_wins_and_the_conflict_is_told(top, inner):
    (name, loser) = next(iter(top.items()))
    raw = nested(tiny_1(), **inner) | top
    winner = raw["dflash_config"][name]
    with pytest.warns(UserWarning, match=name) as caught:
        config = read(raw)
    assert config == read(tiny_1())
    (message,) = {str(w.message) for w in caught}
    assert f"dflash_config.{name} = {winner!r} is used" in message
    assert f"{name} = {loser!r} is not" in message


def test_mask_token_id():
    assert read(nested(tiny_1(), mask_token_id=0)).mask_token_id == 0
    assert read(nested(tiny_1(), mask_token_id=None) | {"mask_token_id": 0}).mask_token_id == 0
    refused(nested(tiny_1(), mask_token_id=None), "dflash_config.mask_token_id", "got None")
    refused(nested(tiny_1(), mask_token_id=None, mask_token="<|MASK|>"), "'<|MASK|>'", "tokenizer")
    refused(nested(tiny_1(), mask_token_id=256), "mask_token_id", "255", "got 256")
    refused(nested(tiny_1(), mask_token_id=True), "mask_token_id", "got True")


def test_missing_target_layer_ids_follow_the_rule_or_are_refused():
    missing = nested(tiny_1(), target_layer_ids=None)
    with pytest.warns(UserWarning, match=r"target_layer_ids is not given, \[1, 5\] is taken"):
        assert read(missing) == read(tiny_1())
    second = nested(tiny_2(), target_layer_ids=None)
    with pytest.warns(UserWarning, match=r"\[1, 5\] is taken, the Z-Lab layout's default for num_target_layers 8$"):
        assert read(second) == read(tiny_2())
    refused(missing | {"num_target_layers": None}, "dflash_config.target_layer_ids")
    refused(missing | {"num_target_layers": 3}, "num_target_layers", "at least 4", "got 3")
    # Another package's drafter: what it takes by default is not known.
    refused(missing | {"architectures": ["MuseGlimmerAssistantModel"]}, "dflash_config.target_layer_ids", "got None")
    refused(speculators(tiny_1(), aux_hidden_state_layer_ids=None, num_target_layers=8), "aux_hidden_state_layer_ids")
    assert default_layer_ids(36, 5) == (1, 9, 17, 25, 33)
    assert default_layer_ids(64, 5) == (1, 16, 31, 46, 61)
    assert default_layer_ids(7, 3) == (1, 2, 4)  # 2.5 rounds to even
    assert default_layer_ids(9, 1) == (4,)


def test_aux_layer_ids_are_one_more():
    raw = nested(tiny_1(), target_layer_ids=None)
    assert read(raw | {"eagle_aux_hidden_state_layer_ids": [2, 6]}).target_layer_ids == (1, 5)
    refused(raw | {"eagle_aux_hidden_state_layer_ids": [0, 6]}, "eagle_aux_hidden_state_layer_ids", "[0, 6]")
    refused(tiny_1(eagle_aux_hidden_state_layer_ids=[1, 5]), "eagle_aux", "(1, 5), (0, 4)")
    for wrong in ([], [1, 1], [1, 8], [-1, 2], [1.0, 2], "15", [True, 2]):
        refused(nested(tiny_1(), target_layer_ids=wrong), "target_layer_ids")


def test_four_spellings_of_a_rope_are_one():
    default = {"rope_type": "default", "rope_theta": 10000}
    bare = without(tiny_1(), "rope_theta", "rope_scaling")
    for keys in (
        {"rope_theta": 10000, "rope_scaling": None},
        {"rope_theta": 10000, "rope_scaling": {"type": "default"}},
        {"rope_parameters": default},
        {"rope_parameters": {FULL: default, SLIDING: default}},
        {"rope_theta": 10000, "rope_parameters": {"rope_type": "default"}},
        {"rope_parameters": {"rope_type": "mrope", "mrope_section": [4, 2, 2], "rope_theta": 1e4}},
        {"rope_theta": 10000, "rope_scaling": {"rope_type": "default"}, "rope_parameters": default},
    ):
        assert read(bare | keys) == read(tiny_1())
    yarn = {"factor": 4, "original_max_position_embeddings": 128, "beta_fast": 32}
    full = {"rope_type": "yarn", "rope_theta": 5e4, "factor": 4.0, "beta_fast": 32.0}
    full["original_max_position_embeddings"] = 128
    for keys in (
        {"rope_theta": 5e4, "rope_scaling": {"type": "yarn", **yarn}},
        {"rope_parameters": {"rope_type": "yarn", "type": "yarn", "rope_theta": 50000, **yarn}},
        {"rope_parameters": {SLIDING: {"rope_type": "yarn", "rope_theta": 5e4, **yarn}, FULL: None}},
        {"rope_theta": 5e4, "rope_scaling": {"rope_type": "yarn", "mscale_all_dim": 0, **yarn}},
    ):
        assert read(bare | keys).rope == full
    short = {"rope_type": "yarn", "rope_theta": 5e4, "factor": 4}
    assert read(bare | {"rope_parameters": short}).rope["original_max_position_embeddings"] == 512
    short["original_max_position_embeddings"] = 128
    assert read(bare | {"rope_parameters": short, "original_max_position_embeddings": 128}).rope["factor"] == 4
    refused(bare | {"rope_parameters": short, "original_max_position_embeddings": 64}, "128", "got 64")


def test_ropes_that_disagree_warn_and_the_newer_key_wins():
    newer = {"rope_type": "default", "rope_theta": 1e6}
    with pytest.warns(UserWarning, match=r"rope_theta = 1000000.0 is used, rope_theta = 10000.0 is not"):
        assert read(tiny_1(rope_parameters=newer)).rope["rope_theta"] == 1e6
    older = {"rope_type": "linear", "factor": 2}
    with pytest.warns(UserWarning, match="rope_scaling = .*linear.* is not"):
        config = read(without(tiny_1(rope_parameters=newer, rope_scaling=older), "rope_theta"))
    assert config.rope == newer
    mixed = {SLIDING: newer, FULL: {"rope_type": "default", "rope_theta": 5e5}}
    with pytest.warns(UserWarning, match=r"rope_parameters.sliding_attention = .* is used, .*500000"):
        assert read(without(tiny_1(rope_parameters=mixed), "rope_theta")).rope == newer


@pytest.mark.parametrize(
    ("rope", "fragment"),
    [
        ({"rope_type": "longrope", "short_factor": [1], "long_factor": [2]}, "rope_type"),
        ({"rope_type": "dynamic", "factor": 2}, "'dynamic'"),
        ({"rope_type": []}, "rope_type"),
        ({"rope_type": "linear", "type": "yarn", "factor": 2}, "rope_parameters.type"),
        ({"rope_type": "yarn"}, "rope_parameters.factor"),
        ({"rope_type": "linear", "factor": -1}, "rope_parameters.factor"),
        ({"rope_type": "linear", "factor": float("nan")}, "rope_parameters.factor"),
        ({"rope_type": "default", "partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_type": "default", "beta_fast": 1}, "beta_fast"),
        ({"rope_type": "default", "rope_theta": "1e4"}, "rope_theta"),
        ({"rope_type": "yarn", "factor": 2, "truncate": 1}, "truncate"),
        ({"rope_type": "llama3", "factor": 8, "low_freq_factor": 1}, "high_freq_factor"),
        ({FULL: {"rope_theta": 1e4}, "other": {}}, "rope_parameters.other"),
        ([1], "rope_parameters"),
    ],
)
def test_ropes_that_cannot_be_computed_are_refused(rope, fragment):
    refused(tiny_1(rope_parameters=rope), fragment)


@pytest.mark.parametrize(
    ("keys", "types"),
    [
        ({"layer_types": [SLIDING, FULL, SLIDING, FULL]}, (SLIDING, FULL, SLIDING, FULL)),
        ({"sliding_window_pattern": 2}, (SLIDING, FULL, SLIDING, FULL)),
        ({"sliding_window_pattern": 1}, (FULL,) * 4),
        ({"sliding_window_pattern": [True, False, True, False]}, (SLIDING, FULL, SLIDING, FULL)),
        ({"sliding_window_pattern": 2, "layer_types": [SLIDING, FULL] * 2}, (SLIDING, FULL, SLIDING, FULL)),
        ({"layer_types": None}, (FULL,) * 4),
    ],
)
def test_window_patterns(keys, types):
    config = read(without(tiny_1(num_hidden_layers=4, sliding_window=8), "layer_types") | keys)
    assert config.layer_types == types
    assert [config.window(i) for i in range(4)] == [8 * (kind == SLIDING) for kind in types]
    assert config.sliding_window == (8 if SLIDING in types else None)
    assert config.causal == tuple(kind == SLIDING for kind in types)


def test_window_patterns_that_do_not_fit_are_refused():
    four = tiny_1(num_hidden_layers=4, sliding_window=8)
    refused(four, "layer_types", "4 entries", "2 entries")
    refused(
        without(four, "layer_types") | {"sliding_window_pattern": [True]}, "sliding_window_pattern", "4", "1 entries"
    )
    refused(without(four, "layer_types") | {"sliding_window_pattern": 0}, "sliding_window_pattern", "got 0")
    refused(without(four, "layer_types") | {"sliding_window_pattern": [1, 0, 1, 0]}, "true or false", "got 1")
    refused(tiny_1(sliding_window_pattern=2, sliding_window=8), "layer_types", "got 2")
    refused(tiny_1(layer_types=[FULL, "chunked_attention"]), "layer_types[1]", "'chunked_attention'")
    refused(tiny_1(layer_types=[SLIDING, FULL]), "sliding_window", "got None")
    refused(tiny_1(layer_types=[SLIDING, FULL], sliding_window=0), "sliding_window", "got 0")
    leftover = without(tiny_1(sliding_window=8, use_sliding_window=True), "layer_types")
    assert read(leftover) == read(tiny_1())
    refused(leftover | {"max_window_layers": 1}, "layer_types")


def test_use_swa_makes_every_layer_a_bidirectional_sliding_one():
    config = read(nested(tiny_1(sliding_window=4096), use_swa=True, swa_window_size=16))
    assert (config.layer_types, config.sliding_window, config.causal) == ((SLIDING,) * 2, 16, (False, False))
    assert read(nested(tiny_1(sliding_window=24), use_swa=True)).sliding_window == 24
    assert read(nested(tiny_1(), use_swa=True, swa_window_size=16, causal=True)).causal == (True, True)
    mixed = tiny_1(layer_types=[SLIDING, FULL], sliding_window=8)
    assert read(nested(mixed, use_swa=True, swa_window_size=8)).causal == (True, False)
    refused(nested(mixed, use_swa=True, swa_window_size=16), "swa_window_size", "(8)", "got 16")
    assert read(nested(tiny_1(), use_swa=False, swa_window_size=16)) == read(tiny_1())


@pytest.mark.parametrize(
    ("keys", "causal"),
    [
        ({}, (True, False)),
        ({"is_causal": None}, (True, False)),
        ({"is_causal": True}, (True, True)),
        ({"is_causal": False}, (False, False)),
        ({"sliding_window_non_causal": True}, (False, False)),
        ({"sliding_window_non_causal": False}, (True, False)),
    ],
)
def test_causality(keys, causal):
    mixed = tiny_1(layer_types=[SLIDING, FULL], sliding_window=8)
    assert read(mixed | keys).causal == causal
    for value in (True, False):
        assert read(nested(mixed, causal=value)).causal == (value, value)


def test_causality_in_conflict_and_in_speculators():
    mixed = tiny_1(layer_types=[SLIDING, FULL], sliding_window=8)
    with pytest.warns(UserWarning, match=r"is_causal = True is used, dflash_config.causal = False is not"):
        assert read(nested(mixed, causal=False) | {"is_causal": True}).causal == (True, True)
    assert read(speculators(mixed)).causal == (True, False)
    with pytest.warns(UserWarning, match=r"is_causal = False is used, sliding_window_non_causal = False is not"):
        assert read(speculators(mixed, is_causal=False)).causal == (False, False)
    assert read(speculators(mixed, is_causal=True)).causal == (True, True)
    assert read(speculators(mixed, sliding_window_non_causal=True)).causal == (False, False)
    assert read(without(speculators(tiny_2()), "sliding_window_non_causal")).causal == (False, False)
    with pytest.warns(UserWarning, match="sliding_window_non_causal is not given"):
        assert read(without(speculators(mixed), "sliding_window_non_causal")).causal == (True, False)
    refused(tiny_1(is_causal=0), "is_causal", "got 0")
    refused(nested(tiny_1(), is_causal=True), "dflash_config.is_causal", "top level")


def test_interleaved_rope():
    for keys in ({"is_neox_style": False}, {"rope_is_neox_style": False}):
        assert read(tiny_1(**keys)).rope_interleaved
    assert not read(tiny_1(is_neox_style=True)).rope_interleaved
    refused(tiny_1(is_neox_style=True, rope_is_neox_style=False), "is_neox_style and rope_is_neox_style")


def test_logit_keys():
    config = read(nested(tiny_1(logit_scale=0.5), output_multiplier=3, input_embedding_scale=8))
    assert (config.output_multiplier, config.input_embedding_scale) == (1.5, 8.0)
    assert read(tiny_1(logit_scale=1.0, final_logit_softcapping=30)).final_logit_softcapping == 30.0
    assert read(tiny_1(final_logit_softcapping=0)).final_logit_softcapping is None
    refused(tiny_1(logit_scale=0.5, final_logit_softcapping=30.0), "logit_scale", "got 0.5")


def test_speculators_defaults():
    """Such a config leaves out what equals the defaults of Qwen3Config and of its own class."""
    raw = {"speculators_model_type": "dflash2", "aux_hidden_state_layer_ids": [2], "mask_token_id": 0}
    raw["transformer_layer_config"] = {"model_type": "qwen3", "num_hidden_layers": 1}
    config = read(raw)
    assert (config.hidden_size, config.head_dim, config.vocab_size) == (4096, 128, 151936)
    assert (config.intermediate_size, config.num_heads, config.num_kv_heads) == (22016, 32, 32)
    assert (config.rope["rope_theta"], config.max_position_embeddings) == (10000.0, 32768)
    sizes = (config.block_size, config.conv_kernel_size, config.conv_group_size)
    assert (*sizes, config.selector_rank, config.selector_top_k) == (8, 2, 16, 256, 16)
    assert config.draft_vocab_size == 151936
    assert read(raw | {"speculators_model_type": "dflash"}).draft_vocab_size == 32000
    refused(raw | {"transformer_layer_config": {"model_type": "llama", "num_hidden_layers": 1}}, "hidden_size")


def test_what_is_written():
    one, two = read(tiny_1()).to_dict(), read(tiny_2()).to_dict()
    assert {name: one[name] for name in tiny_1()} == tiny_1()
    assert {name: two[name] for name in tiny_2()} == tiny_2()
    assert two["use_sliding_window"] is True  # or Qwen3Config forgets the window
    spec = read(nested(tiny_2(), output_multiplier=0.5)).to_dict("speculators")
    assert spec["aux_hidden_state_layer_ids"] == [2, 6]
    assert spec["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 3
    assert (spec["speculators_model_type"], spec["sliding_window_non_causal"]) == ("dflash2", True)
    assert [spec[name] for name in ("conv_kernel_size", "selector_top_k", "block_size", "mask_token_id")] == [
        2,
        4,
        4,
        255,
    ]
    assert spec["transformer_layer_config"]["output_multiplier"] == 0.5
    with pytest.raises(ValueError, match="layout must be 'zlab' or 'speculators', got 'gguf'"):
        read(tiny_1()).to_dict("gguf")
