"""What the generic target refuses, at construction and per call, and how it is loaded."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from pairs import build_drafter
from tiny_models import LAYERS, TINY, VOCAB
from torch import nn

from pydflash import Speculator
from pydflash.target.generic import Target
from pydflash.target.loading import load_tokenizer

transformers = pytest.importorskip("transformers")


def tokens(length: int) -> torch.Tensor:
    return torch.arange(length)[None] + 5


def chain(kept: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    index = torch.tensor([[*range(kept), *[-1] * (size - kept)]], dtype=torch.int32)
    return index, torch.tensor([kept - 1], dtype=torch.int32)


class Wrapper(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner


def compiled_layer(model: Any) -> Any:
    model.model.layers[1].compile()
    return model


def static_cache(model: Any) -> Any:
    model.generation_config.cache_implementation = "static"
    return model


def split(model: Any) -> Any:
    model.model.layers[1].to("meta")
    return model


def sharded(model: Any) -> Any:
    model.lm_head.weight.placements = ("Shard(0)",)
    return model


def quantised(model: Any) -> Any:
    table = model.get_input_embeddings()
    table.weight = nn.Parameter(table.weight.detach().to(torch.int8), requires_grad=False)
    return model


def two_lists(model: Any) -> Any:
    model.model.shadow = nn.ModuleList(nn.Identity() for _ in range(LAYERS))
    return model


def no_list(model: Any) -> Any:
    model.config.num_hidden_layers = 3
    return model


REFUSED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "wrapper": (Wrapper, r"without a wrapper \(merge PEFT adapters.*got Wrapper"),
    "compiled": (torch.compile, r"the model from before torch.compile.*got OptimizedModule"),
    "compiled layer": (
        compiled_layer,
        r"must have no compiled module .* got compiled 'model.layers.1'",
    ),
    "static cache": (static_cache, r"must have a dynamic cache .*, got 'static'"),
    "two devices": (split, r"must have all its parameters on one device, got cpu, meta"),
    "sharded": (sharded, r"must have plain parameters, got the sharded \(DTensor\) 'lm_head.weight'"),
    "quantised": (quantised, r"must have an unquantised input embedding weight .*int8"),
    "no head": (lambda model: model.model, r"LlamaModel must have an output embedding module .*got None"),
    "two lists": (two_lists, r"must have one list of 4 decoder layers .*got model.layers and model.shadow"),
    "no list": (no_list, r"must have one list of 3 decoder layers .*got none"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_at_construction(case: str) -> None:
    spoil, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        Target(spoil(TINY["llama"]()), (1,))


def test_encoder_decoder_is_refused() -> None:
    config = transformers.T5Config(vocab_size=VOCAB, d_model=64, d_kv=16, d_ff=64, num_layers=1, num_heads=4)
    with pytest.raises(ValueError, match=r"T5ForConditionalGeneration must have a decoder only"):
        Target(transformers.T5ForConditionalGeneration(config))


def test_model_without_cache_argument_is_refused() -> None:
    config = transformers.RwkvConfig(vocab_size=VOCAB, hidden_size=64, num_hidden_layers=2)
    with pytest.raises(ValueError, match=r"RwkvForCausalLM must have a forward that takes `cache` or "):
        Target(transformers.RwkvForCausalLM(config))


def test_unknown_cache_class_is_refused() -> None:
    class OtherCache(transformers.DynamicCache):
        pass

    class Odd(transformers.LlamaForCausalLM):
        @functools.wraps(transformers.LlamaForCausalLM.forward)
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            output = super().forward(*args, **kwargs)
            for name in {"cache", "past_key_values"} & set(output):
                output[name] = OtherCache()
            return output

    model = TINY["llama"]()
    model.__class__ = Odd
    with pytest.raises(ValueError, match=r"Odd must use transformers' DynamicCache .*got OtherCache from its forward"):
        Target(model)


def test_inexact_recurrent_layers_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    if not hasattr(transformers.cache_utils, "LinearAttentionCacheLayerMixin"):
        pytest.skip("these transformers keep the recurrent state in a cache of the model's own, refused as such")
    from pydflash.target.cache import TargetCache

    monkeypatch.setattr(TargetCache, "restore", lambda self, snapshot: None)
    with pytest.raises(ValueError, match=r"Qwen3NextForCausalLM must have recurrent layers .*logits off by"):
        Target(TINY["qwen3_next"]())


@pytest.mark.parametrize("ids", [[-1], [LAYERS], [0, 9]])
def test_layer_ids_out_of_range(ids: list[int]) -> None:
    with pytest.raises(ValueError, match=r"layer_ids must be in 0\.\.3 \(the decoder layers of LlamaForC.*got"):
        Target(TINY["llama"](), ids)


def test_arguments_are_checked() -> None:
    target = Target(TINY["llama"](), (2, 0))
    with pytest.raises(ValueError, match=r"new_cache: batch must be 1 .*, got 2"):
        target.new_cache(2, 8)
    with pytest.raises(ValueError, match=r"new_cache: capacity must be at least 1"):
        target.new_cache(1, 0)
    cache = target.new_cache(1, 8)
    for wrong in (tokens(8)[0], tokens(8).expand(2, 8), tokens(8).float(), tokens(8)[:, :0]):
        with pytest.raises(ValueError, match=r"prefill: tokens must be \[1, S\] integers"):
            target.prefill(wrong, cache)
    with pytest.raises(ValueError, match=r"commit: cache must hold a block from verify, got none"):
        target.commit(cache, *chain(1, 1))
    target.verify(tokens(3), cache)
    with pytest.raises(ValueError, match=r"verify: cache must have its verified block committed first"):
        target.verify(tokens(3), cache)
    with pytest.raises(ValueError, match=r"commit: index must be \[1, 3\] .*got \[1, 4\] and \[1\]"):
        target.commit(cache, *chain(1, 4))
    tree = torch.tensor([[0, 2, -1]], dtype=torch.int32)
    with pytest.raises(ValueError, match=r"commit: index must be the chain .*got \[0, 2, -1\] with num_accepted 1"):
        target.commit(cache, tree, torch.tensor([1], dtype=torch.int32))
    target.commit(cache, *chain(2, 3))
    assert cache.length == 2


def test_context_limit() -> None:
    target = Target(TINY["gpt2"](max_position_embeddings=16), (1,))
    assert target.max_length == 16
    cache = target.new_cache(1, 16)
    target.prefill(tokens(12), cache)
    with pytest.raises(ValueError, match=r"verify: tokens must end within 16 positions .*got 5 after 12"):
        target.verify(tokens(5), cache)
    assert target.verify(tokens(4), cache).logits.shape == (1, 4, VOCAB)


@pytest.mark.parametrize("name", ["llama", "qwen2_5_vl"])
def test_from_pretrained(name: str, tmp_path: Any) -> None:
    model = TINY[name]().to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    target = Target.from_pretrained(tmp_path, layer_ids=[1], device="cpu")
    assert type(target.model) is type(model)
    assert (target.dtype, target.layer_ids, target.model.training) == (torch.bfloat16, (1,), False)
    assert Target.from_pretrained(str(tmp_path), dtype="float32", device="cpu").dtype == torch.float32
    with pytest.raises(ValueError, match=r"device must be left out when device_map is given, got 'cpu'"):
        Target.from_pretrained(tmp_path, device="cpu", device_map="auto")


def test_load_tokenizer(tmp_path: Any) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(tmp_path)
    assert load_tokenizer(tmp_path)("b a b").input_ids == [1, 0, 1]


def test_rows_that_depend_on_each_other_are_found_and_named() -> None:
    """Dynamic quantisation takes one scale for the activations of all rows: drafts would change the text."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = torch.ao.quantization.quantize_dynamic(TINY["llama"](), {torch.nn.Linear}, dtype=torch.qint8)
    assert Target(TINY["llama"]()).facts.mixes_rows == ""
    assert Target(TINY["llama"]().bfloat16()).facts.mixes_rows == ""
    target = Target(model, (0, 2))
    assert target.facts.mixes_rows.startswith("rows that depend on each other: one token changed the logits before it")
    with pytest.warns(UserWarning, match="has rows that depend on each other"):
        spec = Speculator(target, build_drafter(2, num_target_layers=target.num_layers))
    out = spec.generate([1, 2, 3], 4, temperature=0.0)
    assert out.stats.backends["exact"].startswith("no: rows that depend")
    assert "rows that depend on each other" in out.stats.backends["target"]
    assert "exact" not in Speculator(target, None).generate([1, 2, 3], 2).stats.backends
    with pytest.raises(ValueError, match="target_path must be 'generic' or 'auto' with rows that depend"):
        Speculator(target, None, target_path="own")
