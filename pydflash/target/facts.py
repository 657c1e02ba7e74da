"""What is known of a transformers model before its layers run: found by structure, never by a model's name."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any, NoReturn

from torch import Tensor, nn

# Values of `generation_config.cache_implementation` that only describe how window layers are stored.
_DYNAMIC_CACHES = (None, "dynamic", "dynamic_full", "hybrid", "hybrid_chunked", "sliding_window")


@dataclass(frozen=True, slots=True)
class TargetFacts:
    """How a model is called, and what its positions and layers are like.

    Attributes:
        text_config: The part of its config that describes the language model.
        cache_argument: Name under which its forward takes a cache.
        takes_positions: Whether it takes `position_ids`.
        takes_logits_to_keep: Whether it takes `logits_to_keep` and gives the features of all rows none the less.
        layer_kinds: Of each layer's cache: "attention", "stateful" (recurrent) or "empty".
        rope_switch: Last context length with the short factors of a "longrope" model, or None.
        max_length: Its context limit, or None where it states none.
        mixes_rows: How a row's logits depend on rows that it does not see, as where activations are quantised by one
            scale for all rows; "" where they do not. Then drafts may change the text.
    """

    text_config: Any
    cache_argument: str
    takes_positions: bool
    takes_logits_to_keep: bool
    layer_kinds: tuple[str, ...]
    rope_switch: int | None
    max_length: int | None
    mixes_rows: str = ""

    @property
    def rope(self) -> dict[str, Any]:
        """The config's description of its rotary positions; empty where it has none."""
        return _rope_of(self.text_config)


def refuse(model: Any, expected: str, got: object) -> NoReturn:
    """Raise the ValueError of a model that cannot be a target."""
    raise ValueError(f"Target: {type(model).__name__} must have {expected}, got {got}")


def facts_of(model: Any) -> TargetFacts:
    """Facts of a model that `check_model` let pass; what only a forward can tell is left open.

    Raises: ValueError for a forward that takes no cache.
    """
    config = model.config.get_text_config(decoder=True)
    parameters = inspect.signature(type(model).forward).parameters
    cache_argument = next((name for name in ("cache", "past_key_values") if name in parameters), None)
    if cache_argument is None:
        refuse(model, "a forward that takes `cache` or `past_key_values`", ", ".join(parameters))
    max_length = _context_limit(config)
    takes_positions, takes_logits_to_keep = ("position_ids" in parameters, "logits_to_keep" in parameters)
    switch = _rope_switch(config, max_length)
    return TargetFacts(config, cache_argument, takes_positions, takes_logits_to_keep, (), switch, max_length)


def _context_limit(config: Any) -> int | None:
    """Positions that a model takes. RoPE that YaRN stretches by a factor reaches beyond `max_position_embeddings` where
    that still is the length before it.
    """
    limit = getattr(config, "max_position_embeddings", None)
    if not isinstance(limit, int) or limit <= 0:
        return None
    rope = _rope_of(config)
    original, factor = rope.get("original_max_position_embeddings"), rope.get("factor")
    if rope.get("rope_type", rope.get("type")) != "yarn" or not original or not factor:
        return limit
    return max(limit, int(original * factor))


def check_model(model: Any) -> None:
    """Refuse wrapped, compiled, split, sharded and encoder-decoder models."""
    import transformers

    if not isinstance(model, transformers.PreTrainedModel):
        raise ValueError(
            "Target: model must be a transformers PreTrainedModel itself, without a wrapper (merge PEFT adapters, "
            f"pass the model from before torch.compile or DataParallel), got {type(model).__name__}"
        )
    if getattr(model.config, "is_encoder_decoder", False):
        refuse(model, "a decoder only", "an encoder-decoder")
    compiled = next((name for name, m in model.named_modules() if m._compiled_call_impl is not None), None)
    if compiled is not None:
        refuse(model, "no compiled module (compiled code skips hooks)", f"compiled {compiled or 'model'!r}")
    parameters = list(model.named_parameters())
    sharded = next((name for name, p in parameters if hasattr(p, "placements")), None)
    if sharded is not None:
        refuse(model, "plain parameters", f"the sharded (DTensor) {sharded!r}")
    devices = sorted({str(p.device) for _, p in parameters})
    if len(devices) != 1 or devices == ["meta"]:
        refuse(model, "all its parameters on one device", ", ".join(devices) or "no parameter")
    cache = getattr(getattr(model, "generation_config", None), "cache_implementation", None)
    if cache not in _DYNAMIC_CACHES:
        refuse(model, "a dynamic cache (generation_config.cache_implementation None)", repr(cache))


def find_head(model: Any) -> nn.Module:
    """The output embedding module."""
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Module):
        refuse(model, "an output embedding module (get_output_embeddings())", repr(head))
    return head


def find_embed_weight(model: Any) -> Tensor:
    """The input embedding table [V, H]."""
    weight = getattr(model.get_input_embeddings(), "weight", None)
    if not isinstance(weight, Tensor) or weight.ndim != 2 or not weight.is_floating_point():
        got = type(weight).__name__ if not isinstance(weight, Tensor) else f"{list(weight.shape)} {weight.dtype}"
        refuse(model, "an unquantised input embedding weight [V, H]", got)
    return weight.detach()


def find_layers(model: Any, count: int) -> nn.ModuleList:
    """The decoder layers: the one list of `count` (num_hidden_layers) modules nearest to the input embeddings."""
    names = {module: name for name, module in model.named_modules()}
    backbone = names[model.get_input_embeddings()]
    lists = {n: m for m, n in names.items() if isinstance(m, nn.ModuleList) and len(m) == count}
    nearest: list[str] = []
    while backbone and not nearest:
        backbone = backbone.rpartition(".")[0]
        inside = [name for name in lists if not backbone or name.startswith(backbone + ".")]
        depth = min((name.count(".") for name in inside), default=0)
        nearest = [name for name in inside if name.count(".") == depth]
    if len(nearest) != 1:
        refuse(model, f"one list of {count} decoder layers (num_hidden_layers)", " and ".join(nearest) or "none")
    return lists[nearest[0]]


def _rope_of(config: Any) -> dict[str, Any]:
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)
    return rope if isinstance(rope, dict) else {}


def _rope_switch(config: Any, max_length: int | None) -> int | None:
    """transformers picks the factors of "longrope" by the last position of a forward, so a block across that length
    would rotate its first rows unlike plain decoding.
    """
    rope = _rope_of(config)
    if rope.get("rope_type", rope.get("type")) != "longrope":
        return None
    names = ("original_max_position_embeddings", "max_position_embeddings")
    return rope.get(names[0]) or getattr(config, names[0], None) or max_length
