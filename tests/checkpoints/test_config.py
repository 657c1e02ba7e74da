"""DrafterConfig: its fields, what is refused or ignored, round trips, the fit to a target."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import warnings
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_drafters import nested, refused, speculators, tiny_1, tiny_2, without

from pydflash.checkpoints.config import DrafterConfig, check_target

SLIDING, FULL = "sliding_attention", "full_attention"
read = DrafterConfig.from_dict


@pytest.fixture(autouse=True)
def no_unexpected_warning():
    """A warning that a test does not ask for fails it."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def test_the_tiny_configs_read_as_written():
    one, two = read(tiny_1()), read(tiny_2())
    assert dataclasses.asdict(one) == {
        "version": 1, "hidden_size": 64, "intermediate_size": 128, "num_layers": 2, "num_heads": 4,
        "num_kv_heads": 2, "head_dim": 16, "vocab_size": 256, "max_position_embeddings": 512,
        "rope": {"rope_type": "default", "rope_theta": 10000.0}, "target_layer_ids": (1, 5),
        "mask_token_id": 255, "block_size": 4, "rms_norm_eps": 1e-6, "attention_bias": False,
        "rope_interleaved": False, "layer_types": (FULL, FULL), "sliding_window": None,
        "causal": (False, False), "draft_vocab_size": 256, "target_hidden_size": 64, "num_target_layers": 8,
        "input_embedding_scale": 1.0, "output_multiplier": 1.0, "final_logit_softcapping": None,
        "conv_kernel_size": 0, "conv_group_size": 0, "selector_rank": 0, "selector_top_k": 0,
        "target_name": None, "target_architectures": (),
    }  # fmt: skip
    assert two == dataclasses.replace(
        one, version=2, layer_types=(SLIDING, SLIDING), sliding_window=32, causal=(False, False),
        conv_kernel_size=2, conv_group_size=16, selector_rank=8, selector_top_k=4,
    )  # fmt: skip
    assert [one.window(0), two.window(1)] == [0, 32]
    assert hash(one) != hash(two)


@pytest.mark.parametrize(
    "name",
    [
        *("architectures", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
        *("num_key_value_heads", "vocab_size", "max_position_embeddings", "rope_theta"),
    ],
)
@pytest.mark.parametrize("null", [False, True])
def test_missing_keys_are_named(name, null):
    refused(tiny_1(**{name: None}) if null else without(tiny_1(), name), name, "got None")


@pytest.mark.parametrize(
    ("raw", "fragments"),
    [
        (tiny_1(hidden_size="64"), ("hidden_size", "got '64'")),
        (tiny_1(hidden_size=64.0), ("hidden_size", "got 64.0")),
        (tiny_1(num_hidden_layers=0), ("num_hidden_layers", "got 0")),
        (tiny_1(num_key_value_heads=3), ("num_key_value_heads", "divisor", "4", "got 3")),
        (tiny_1(head_dim=15), ("head_dim", "got 15")),
        (without(tiny_1(num_attention_heads=5), "head_dim"), ("head_dim", "got None")),
        (tiny_1(rms_norm_eps=0), ("rms_norm_eps", "got 0")),
        (tiny_1(attention_bias=0), ("attention_bias", "got 0")),
        (tiny_1(block_size=0), ("block_size", "got 0")),
        (tiny_1(block_size=True), ("block_size", "got True")),
        (tiny_1(num_target_layers=5), ("target_layer_ids", "0 to 4", "[1, 5]")),
        (tiny_1(draft_vocab_size=300), ("draft_vocab_size", "256", "got 300")),
        (tiny_1(draft_vocab_size=0), ("draft_vocab_size", "got 0")),
        (tiny_2(draft_vocab_size=128), ("draft_vocab_size", "256", "got 128")),
        (nested(tiny_2(), conv_group_size=24), ("conv_group_size", "64", "got 24")),
        (nested(tiny_2(), conv_kernel_size=5), ("conv_kernel_size", "block_size 4", "got 5")),
        (nested(tiny_2(), conv_kernel_size=0), ("conv_kernel_size", "got 0")),
        (nested(tiny_2(), selector_top_k=257), ("selector_top_k", "256", "got 257")),
        (nested(tiny_2(), selector_rank=None), ("dflash_config.selector_rank", "got None")),
        (nested(tiny_1(), selector_rank=8), ("dflash_config.selector_rank", "got 8")),
        (nested(tiny_1(), output_multiplier=0), ("output_multiplier", "got 0")),
        (nested(tiny_1(), final_logit_softcapping=-1), ("final_logit_softcapping", "got -1")),
        (nested(tiny_1(), input_embedding_scale=float("inf")), ("input_embedding_scale", "got inf")),
        (tiny_1(dflash_config=[1]), ("dflash_config", "mapping")),
        ([1], ("config", "mapping")),
    ],
)
def test_wrong_values_are_refused_by_name(raw, fragments):
    refused(raw, *fragments)


def test_the_limits_themselves_are_accepted():
    assert read(nested(tiny_2(), selector_top_k=256, conv_kernel_size=4)).selector_top_k == 256
    assert read(nested(tiny_2(), selector_top_k=1, conv_kernel_size=1, conv_group_size=64)).conv_group_size == 64
    assert read(tiny_1(block_size=1)).block_size == 1
    assert read(without(tiny_1(), "block_size")).block_size == 16
    assert read(without(tiny_1(), "head_dim")).head_dim == 16


@pytest.mark.parametrize(
    ("keys", "fragment"),
    [
        *(
            ({"architectures": [name]}, name)
            for name in ("DFlashLagunaForCausalLM", "DSparkDraftModel", "MiMoV2DFlash", "LlamaForCausalLMEagle3")
        ),
        ({"architectures": ["DFlashDraftModel", "X"]}, "architectures"),
        ({"architectures": "DFlashDraftModel"}, "architectures"),
        ({"speculators_model_type": "eagle3"}, "'eagle3'"),
        ({"speculators_model_type": "dflash2"}, "architectures"),
        ({"transformer_layer_config": {"hidden_size": 64}}, "speculators_model_type"),
    ],
)
def test_other_models_are_refused(keys, fragment):
    refused(tiny_1(**keys), fragment)


def test_speculators_algorithm_and_type_must_agree():
    refused(
        speculators(tiny_1(), speculators_config={"algorithm": "eagle3"}), "speculators_config.algorithm", "'eagle3'"
    )


@pytest.mark.parametrize(
    ("keys", "fragment"),
    [
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({"compression_config": {"format": "int"}}, "compression_config"),
        ({"attention_sink_bias": True}, "attention_sink_bias"),
        ({"add_swa_attention_sink_bias": True}, "add_swa_attention_sink_bias"),
        ({"attention_value_scale": 0.5}, "attention_value_scale"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"hidden_act": "gelu"}, "'silu'"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"sample_from_anchor": True}, "sample_from_anchor"),
        ({"use_aux_hidden_state": False}, "use_aux_hidden_state"),
        ({"projector_type": "domino"}, "projector_type"),
        ({"draft_ffn_type": "moe"}, "draft_ffn_type"),
        ({"attention_mode": "mla"}, "attention_mode"),
        ({"gating": "per-head"}, "gating"),
        ({"query_pre_attn_scalar": 256}, "query_pre_attn_scalar"),
        ({"markov_rank": 256}, "markov_rank"),
        ({"norm_type": "layernorm"}, "norm_type"),
    ],
)
def test_other_maths_is_refused_wherever_it_is_asked_for(keys, fragment):
    refused(tiny_1(**keys), fragment)
    refused(nested(tiny_1(), **keys), "dflash_config." + next(iter(keys)))
    refused(speculators(tiny_1(**keys)), next(iter(keys)))


def test_unknown_keys_in_dflash_config_are_refused():
    refused(nested(tiny_1(), layer_ids=[1, 5]), "dflash_config.layer_ids")
    refused(nested(tiny_1(), hidden_size=64), "dflash_config.hidden_size", "top level")


def test_harmless_keys_are_ignored():
    from transformers import Qwen3Config

    left_by_transformers = {
        name: value
        for name, value in Qwen3Config().to_dict().items()
        if name not in tiny_1() and name != "rope_parameters"
    }
    noise: dict[str, Any] = {
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"}, "torch_dtype": "bfloat16", "dtype": "bfloat16",
        "bos_token_id": 1, "eos_token_id": [2, 3], "pad_token_id": 0, "initializer_range": 0.02,
        "use_cache": True, "tie_word_embeddings": True, "attention_dropout": 0.1, "max_window_layers": 2,
        "use_sliding_window": False, "transformers_version": "5.15.0", "_attn_implementation": "sdpa",
        "quantization_config": None, "attention_value_scale": None, "partial_rotary_factor": 1.0,
        "attention_sink_bias": False, "mlp_bias": False, "sample_from_anchor": False, "query_zero_predicts_next": False,
        "unknown_norm": None, "num_experts": 8, "conv_kernel_size": 0,
    }  # fmt: skip
    assert read(tiny_1() | left_by_transformers | noise) == read(tiny_1())
    inner = {"projector_type": "dflash", "emb_dim": 256, "gru_hidden_dim": 1024, "shift_label": False}
    inner |= {"pure_draft_prefix_len": 1, "num_anchors": 512, "runtime_block_size": 4}
    assert read(nested(tiny_1(), **inner)) == read(tiny_1())
    assert read(speculators(tiny_1(), num_target_layers=8, **inner)) == read(tiny_1())


@st.composite
def configs(draw: st.DrawFn) -> DrafterConfig:
    version = draw(st.sampled_from([1, 2]))
    layers, group = draw(st.integers(1, 5)), draw(st.sampled_from([1, 4, 16]))
    heads = draw(st.integers(1, 3))
    vocab = draw(st.integers(20, 400))
    types = tuple(draw(st.lists(st.sampled_from([FULL, SLIDING]), min_size=layers, max_size=layers)))
    positive = st.floats(1e-3, 1e3)
    ids = tuple(draw(st.lists(st.integers(0, 60), min_size=1, max_size=6, unique=True)))
    rope: dict[str, Any] = {"rope_theta": draw(st.floats(1e3, 1e7))}
    kind = draw(st.sampled_from(["default", "linear", "yarn", "llama3"]))
    rope |= {"rope_type": kind} | ({} if kind == "default" else {"factor": draw(positive)})
    if kind == "yarn":
        rope |= {"original_max_position_embeddings": draw(st.integers(1, 999)), "truncate": draw(st.booleans())}
    if kind == "llama3":
        rope |= {"low_freq_factor": 1.0, "high_freq_factor": draw(positive)}
    block = draw(st.integers(1, 16))
    extra = {}
    if version == 2:
        extra = {"conv_kernel_size": draw(st.integers(1, block)), "conv_group_size": group}
        extra |= {"selector_rank": draw(st.integers(1, 9)), "selector_top_k": draw(st.integers(1, vocab))}
    return DrafterConfig(
        version=version, hidden_size=16 * draw(st.integers(1, 4)), intermediate_size=draw(st.integers(1, 99)),
        num_layers=layers, num_heads=heads * draw(st.integers(1, 3)), num_kv_heads=heads,
        head_dim=2 * draw(st.integers(1, 40)), vocab_size=vocab, rope=rope, target_layer_ids=ids,
        max_position_embeddings=draw(st.integers(1, 9999)), mask_token_id=draw(st.integers(0, vocab - 1)),
        block_size=block, rms_norm_eps=draw(positive), attention_bias=draw(st.booleans()),
        rope_interleaved=draw(st.booleans()), layer_types=types, sliding_window=draw(st.integers(1, 99)),
        causal=draw(st.sampled_from([(), (True,) * layers, (False,) * layers])),
        draft_vocab_size=draw(st.integers(1, vocab)) if version == 1 else 0,
        target_hidden_size=draw(st.sampled_from([0, 8])),
        num_target_layers=draw(st.sampled_from([None, 61, 64])), input_embedding_scale=draw(positive),
        output_multiplier=draw(positive), final_logit_softcapping=draw(st.none() | positive), **extra,
    )  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(configs(), st.sampled_from(["zlab", "speculators"]))
def test_round_trip(config, layout):
    written = json.loads(json.dumps(config.to_dict(layout)))
    again = read(written)
    assert again == config
    assert again.to_dict(layout) == written


def test_a_written_rope_is_the_one_transformers_computes():
    import torch
    from transformers import Qwen3Config
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    for raw in (tiny_1(), tiny_1(rope_theta=5e4, rope_scaling=yarn)):
        ours, theirs = (Qwen3RotaryEmbedding(Qwen3Config(**r)) for r in (read(raw).to_dict(), raw))
        torch.testing.assert_close(ours.inv_freq, theirs.inv_freq, rtol=0, atol=0)
        assert ours.attention_scaling == theirs.attention_scaling
        assert (ours.attention_scaling > 1) == (raw["rope_scaling"] is not None)


FIT = {"hidden_size": 64, "num_layers": 8, "vocab_size": 256, "embedding_rows": 256}


@pytest.mark.parametrize(
    ("change", "fragments"),
    [
        ({"hidden_size": 128}, ("hidden_size of the drafter", "128", "got 64")),
        ({"num_layers": 9}, ("num_target_layers", "9", "got 8")),
        ({"vocab_size": 257, "embedding_rows": 257}, ("vocab_size", "257", "got 256")),
        ({"vocab_size": 250, "embedding_rows": 320}, ("vocab_size", "250 or 320 (padded)", "got 256")),
        ({"embedding_rows": 255}, ("mask_token_id", "below 255", "got 255")),
    ],
)
def test_a_target_that_does_not_fit(change, fragments):
    config = read(tiny_1())
    check_target(config, **FIT)
    with pytest.raises(ValueError, match=r"^check_target: ") as caught:
        check_target(config, **(FIT | change))
    for fragment in fragments:
        assert fragment in str(caught.value)


def test_a_target_that_fits_with_padding_or_another_width():
    check_target(read(tiny_1()), **(FIT | {"vocab_size": 250}))
    check_target(read(tiny_1()), **(FIT | {"embedding_rows": 320}))
    wide = read(tiny_1(target_hidden_size=128))
    check_target(wide, **(FIT | {"hidden_size": 128}))
    with pytest.raises(ValueError, match="target_hidden_size of the drafter must be 64"):
        check_target(wide, **FIT)
    with pytest.raises(ValueError, match=r"target_layer_ids of the drafter must be below 5 .* got \[1, 5\]"):
        check_target(read(tiny_1(num_target_layers=None)), **(FIT | {"num_layers": 5}))


def test_config_needs_no_torch():
    code = "import sys, pydflash.checkpoints.config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
