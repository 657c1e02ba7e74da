"""Tiny random models of many Hugging Face families: 4 layers, hidden 64, 97 tokens, fp32, evaluation mode.

`TINY[name](**changes)` builds one, with `changes` applied to its config. A family that the installed transformers
does not have raises `MissingFamily`. No model has an end token, so that a generation has the length asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

VOCAB = 97
HIDDEN = 64
LAYERS = 4
WINDOW = 8
SLIDING_MIX = ["sliding_attention", "full_attention"] * 2
LINEAR_MIX = ["linear_attention", "full_attention"] * 2


class MissingFamily(Exception):
    """The installed transformers has no such family."""


COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 128,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LOCAL_EXPERTS: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}
DELTA_NET: dict[str, Any] = {
    "layer_types": LINEAR_MIX,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
MAMBA: dict[str, Any] = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 16,
}
GEMMA: dict[str, Any] = {
    "sliding_window": WINDOW,
    "layer_types": SLIDING_MIX,
    "query_pre_attn_scalar": 16,
    "tie_word_embeddings": False,
}
LATENT: dict[str, Any] = {
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 24,
    "head_dim": 16,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}


def randomise(model: torch.nn.Module, seed: int) -> None:
    """Seeded weights with enough spread that the best logit is far from the next, and no two positions look alike."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, weight in sorted(model.named_parameters()):
            noise = torch.randn(weight.shape, generator=generator)
            if weight.ndim >= 2:
                weight.copy_(0.3 * noise)
            else:
                weight.add_(0.1 * noise)


def _family(prefix: str, suffix: str = "ForCausalLM", config: str = "Config", **family: Any) -> Callable[..., Any]:
    def build(*, seed: int = 0, attention: str | None = None, **changes: Any) -> Any:
        import transformers

        config_class = getattr(transformers, prefix + config, None)
        model_class = getattr(transformers, prefix + suffix, None)
        if config_class is None or model_class is None:
            raise MissingFamily(f"{prefix} is not in transformers {transformers.__version__}")
        settings = config_class(**{**COMMON, **family, **changes})
        if attention is not None:
            settings._attn_implementation = attention
        torch.manual_seed(seed)  # parameters that are not redrawn below, such as state decays
        model = model_class(settings).float().eval()
        randomise(model, seed)
        return model

    return build


def _nested(prefix: str, text: dict[str, Any], **outer: Any) -> Callable[..., Any]:
    """A multimodal wrapper whose language model is tiny; its vision tower exists and is never run."""
    vision = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": LAYERS,
        "depth": LAYERS,
        "num_attention_heads": 2,
        "num_heads": 2,
        "embed_dim": 32,
        "image_size": 16,
        "patch_size": 8,
        "out_hidden_size": HIDDEN,
    }

    def build(*, seed: int = 0, attention: str | None = None, **changes: Any) -> Any:
        return _family(
            prefix,
            "ForConditionalGeneration",
            text_config={**COMMON, "tie_word_embeddings": False, **text, **changes},
            vision_config=vision,
            tie_word_embeddings=False,
            **outer,
        )(seed=seed, attention=attention)

    return build


_PARTIAL_M_ROPE = {
    "rope_type": "default",
    "mrope_section": [1, 1, 0],
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.25,
}
_M_ROPE = {"rope_type": "default", "type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0}

TINY: dict[str, Callable[..., Any]] = {
    "llama": _family("Llama"),
    "llama_tied": _family("Llama", tie_word_embeddings=True),
    "qwen2": _family("Qwen2"),
    "qwen3": _family("Qwen3"),
    "qwen3_moe": _family("Qwen3Moe", **EXPERTS),
    "mistral": _family("Mistral", sliding_window=WINDOW),
    "mixtral": _family("Mixtral", sliding_window=WINDOW, **LOCAL_EXPERTS),
    "gemma2": _family("Gemma2", **GEMMA),
    "gemma3": _family(
        "Gemma3",
        config="TextConfig",
        sliding_window=WINDOW,
        layer_types=SLIDING_MIX,
        query_pre_attn_scalar=16,
        tie_word_embeddings=False,
    ),
    "phi3": _family("Phi3"),
    "gpt_neox": _family("GPTNeoX", rotary_pct=0.5),
    "gpt2": _family("GPT2", suffix="LMHeadModel", tie_word_embeddings=False),
    "gpt_oss": _family("GptOss", sliding_window=WINDOW, layer_types=SLIDING_MIX, **LOCAL_EXPERTS),
    "olmo2": _family("Olmo2"),
    "olmo3": _family("Olmo3", sliding_window=WINDOW, layer_types=SLIDING_MIX),
    "granite": _family("Granite"),
    "stablelm": _family("StableLm"),
    "glm4": _family("Glm4"),
    "cohere": _family("Cohere", logit_scale=1.0),
    "cohere2": _family("Cohere2", sliding_window=WINDOW, layer_types=SLIDING_MIX),
    "starcoder2": _family("Starcoder2", sliding_window=WINDOW),
    "smollm3": _family("SmolLM3"),
    "opt": _family("OPT", ffn_dim=128, word_embed_proj_dim=HIDDEN),
    "deepseek_v3": _family("DeepseekV3", **LATENT),
    "llama4": _family(
        "Llama4",
        config="TextConfig",
        attention_chunk_size=WINDOW,
        intermediate_size_mlp=128,
        no_rope_layers=[1, 1, 1, 0],
        **LOCAL_EXPERTS,
    ),
    "gemma4": _family(
        "Gemma4",
        config="TextConfig",
        num_kv_shared_layers=2,
        hidden_size_per_layer_input=16,
        vocab_size_per_layer_input=VOCAB,
        global_head_dim=16,
        **GEMMA,
    ),
    "gemma3_nested": _nested(
        "Gemma3",
        GEMMA,
        mm_tokens_per_image=4,
    ),
    "qwen2_5_vl": _nested("Qwen2_5_VL", {"rope_scaling": _M_ROPE, "rope_parameters": _M_ROPE}),
    "qwen3_next": _family("Qwen3Next", shared_expert_intermediate_size=32, **EXPERTS, **DELTA_NET),
    "qwen3_5": _family("Qwen3_5", config="TextConfig", **DELTA_NET),
    "qwen3_5_moe": _family(
        "Qwen3_5Moe", config="TextConfig", shared_expert_intermediate_size=32, **EXPERTS, **DELTA_NET
    ),
    "qwen3_5_nested": _nested("Qwen3_5", DELTA_NET | {"rope_parameters": _PARTIAL_M_ROPE}),
    "lfm2": _family("Lfm2", layer_types=["conv", "full_attention"] * 2, block_ff_dim=128),
    "mamba2": _family("Mamba2", num_heads=8, head_dim=16, state_size=16, n_groups=1, expand=2, chunk_size=16),
    "bamba": _family("Bamba", attn_layer_indices=[1, 3], mamba_expand=2, **MAMBA),
    "falcon_h1": _family("FalconH1", mamba_d_ssm=128, mamba_expand=2, **MAMBA),
}
