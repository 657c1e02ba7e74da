"""Which families the fast target runs and how, which it refuses, and settings that make a difference."""

from __future__ import annotations

from typing import Any

import transformers
from tiny_models import SLIDING_MIX, TINY, _family

# Families whose layers are of the common form; families that run in their own layers, and what these have otherwise.
FUSED = {"llama", "llama_tied", "qwen2", "qwen3", "mistral", "phi3", "granite", "gemma3", "gemma3_nested", "glm4"}
FUSED |= {"olmo2", "olmo3", "cohere", "cohere2", "stablelm", "smollm3"}
# Families whose ops or records CPUs alone have.
ON_CPU = {"qwen3_5", "qwen3_5_nested", "qwen3_5_moe", "qwen3_next", "qwen3_moe", "mixtral"}
OWN = {
    "qwen3_moe": "experts on a CPU",
    "mixtral": "experts on a CPU",
    "gpt_neox": "layers of a mixer, an MLP and norms around them",
    "gpt2": "layers of a mixer, an MLP and norms around them",
    "opt": "layers of a mixer, an MLP and norms around them",
    "starcoder2": "attention and MLP of the usual projections, got c_fc",
}
CAPS = "attention that positions and windows describe fully, got ValueError: attention must be without soft caps"
REFUSED = {
    "gemma2": CAPS,
    "gpt_oss": CAPS,
    "deepseek_v3": "keys and values of one shape in all layers",
    "llama4": "attention that does not depend on the place in the block",
    "gemma4": "",
    "qwen3_next": "attention layers only, got stateful",
    "qwen3_5": "attention layers only, got stateful",
    "qwen3_5_nested": "attention layers only, got stateful",
    "qwen3_5_moe": "attention layers only, got stateful",
    "lfm2": "attention layers only, got stateful",
    "mamba2": "a forward that takes position_ids, got none",
    "bamba": "attention layers only, got stateful",
    "falcon_h1": "attention layers only, got stateful",
}
OLDER = (
    "qwen3_next",
    "qwen3_5",
    "qwen3_5_nested",
    "qwen3_5_moe",
    "lfm2",
    "mamba2",
    "bamba",
    "falcon_h1",
)  # without exact state in older transformers
if int(transformers.__version__.partition(".")[0]) < 5:  # attention of its own
    REFUSED |= {"stablelm": "attention that positions and windows describe fully, got logits off by"}
    ON_CPU -= {"qwen3_moe", "mixtral"}
    OWN |= dict.fromkeys(("qwen3_moe", "mixtral"), "fused ones need")
    FUSED -= {"stablelm"}
EITHER = ("qwen2_5_vl",)  # older rotary tables have three axes
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
YARN = ROPE | {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
SCALED = ROPE | {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SCALED |= {"original_max_position_embeddings": 32}
WINDOWED = {"use_sliding_window": True, "max_window_layers": 2}
CASES: dict[str, tuple[Any, dict[str, Any], str]] = {
    "bias": (TINY["llama"], {"attention_bias": True, "mlp_bias": True}, "fused"),
    "partial rotary": (TINY["phi3"], {"rope_parameters": ROPE | {"partial_rotary_factor": 0.5}}, "fused"),
    "wide heads": (TINY["llama"], {"head_dim": 32}, "fused"),
    "odd heads": (TINY["qwen3"], {"head_dim": 24, "num_key_value_heads": 1}, "fused"),
    "yarn": (TINY["llama"], {"rope_parameters": YARN}, "fused"),
    "llama3": (TINY["llama"], {"rope_parameters": SCALED}, "fused"),
    "some windows": (TINY["qwen2"], WINDOWED | {"sliding_window": 8}, "fused"),
    "windows longer than the trial": (TINY["qwen3"], WINDOWED | {"sliding_window": 30}, "fused"),
    "all windows longer than the trial": (TINY["mistral"], {"sliding_window": 30}, "fused"),
    "a window of one": (TINY["mistral"], {"sliding_window": 1}, "fused"),
    "two tables and windows longer than the trial": (TINY["gemma3"], {"sliding_window": 30}, "fused"),
    "a window and no rotation": (TINY["cohere2"], {"sliding_window": 30}, "fused"),
    "own windows longer than the trial": (TINY["starcoder2"], {"sliding_window": 30}, "own"),
    "attention factor": (TINY["granite"], {"attention_multiplier": 0.3}, "fused"),
    "residual factor": (TINY["granite"], {"residual_multiplier": 0.31}, "fused"),
    "residual factor near 1": (TINY["granite"], {"residual_multiplier": 1.03}, "fused"),
    "embedding factor": (TINY["granite"], {"embedding_multiplier": 12.0}, "fused"),
    "logits divided": (TINY["granite"], {"logits_scaling": 1.03}, "fused"),
    "all factors": (
        TINY["granite"],
        {
            "residual_multiplier": 0.22,
            "embedding_multiplier": 12.0,
            "logits_scaling": 16.0,
            "attention_multiplier": 0.1,
        },
        "fused",
    ),
    "logits capped": (TINY["gemma2"], {"attn_logit_softcapping": None, "final_logit_softcapping": 3.0}, "fused"),
    "a quarter rotated": (TINY["glm4"], {"rope_parameters": ROPE | {"partial_rotary_factor": 0.25}}, "fused"),
    "logits multiplied": (TINY["cohere"], {"logit_scale": 0.0625}, "fused"),
    "beside each other": (TINY["stablelm"], {"use_parallel_residual": True}, "fused"),
    "biases of heads": (TINY["stablelm"], {"use_qkv_bias": True}, "fused"),
    "norms of heads by the mean": (TINY["cohere"], {"use_qk_norm": True}, "norms of q and k per head or over all"),
    "window unknown to attention": (TINY["llama"], {"sliding_window": 30}, "a sliding window (30) that its attention"),
    "dynamic": (TINY["llama"], {"rope_parameters": ROPE | {"rope_type": "dynamic", "factor": 4.0}}, "does not change"),
    "longrope": (
        TINY["phi3"],
        {
            "original_max_position_embeddings": 32,
            "rope_parameters": ROPE
            | {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [3.0] * 8, "factor": 16.0}
            | {"original_max_position_embeddings": 32},
        },
        "RoPE that does not change with the length",
    ),
    "small heads": (TINY["llama"], {"head_dim": 4}, "a head size that is a multiple of 8 up to 256, got 4"),
    "short context": (TINY["llama"], {"max_position_embeddings": 12}, "a context of at least 13 positions, got 12"),
    "mixed windows": (_family("Ministral", sliding_window=8), {"layer_types": SLIDING_MIX}, "fused"),
    "output bias": (_family("SeedOss"), {"attention_bias": True, "attention_out_bias": True}, "fused"),
    "queries scaled far out": (
        _family("Ministral3"),
        {"rope_parameters": ROPE | {"llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 32}},
        "plain queries in layer 0",
    ),
}
UNFIT = ("window unknown to attention", "dynamic", "longrope", "small heads", "short context")  # refused
if "stablelm" in REFUSED:
    CASES = {name: case for name, case in CASES.items() if case[0] is not TINY["stablelm"]}
