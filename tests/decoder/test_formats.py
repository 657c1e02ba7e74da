"""Packed weights: their numbers, who shares them, when they are refused, and whole texts of a target with them."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from device_pairs import pair
from pairs import VOCAB, build_drafter, fitted_prompts
from tiny_models import TINY
from torch import Tensor
from torch.nn import functional as F

from pydflash import Speculator, Target
from pydflash.decoder import formats
from pydflash.decoder.formats import PackedLinear, WeightFormat, choose
from pydflash.drafter.packed import PackedDrafter
from pydflash.ops import backends
from pydflash.target.fused import FusedTarget
from pydflash.tree import tree_of

DTYPES = (torch.float32, torch.bfloat16)
CPU = torch.device("cpu")
CLOSE = {torch.float32: 1e-5, torch.bfloat16: 5e-3}


def weight_of(rows: int, width: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)).to(dtype)


def off(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 2, 8, 33])
@pytest.mark.parametrize("biased", [False, True])
def test_numbers(biased: bool, rows: int, dtype: torch.dtype) -> None:
    weights = weight_of(40, 96, dtype), weight_of(24, 96, dtype, 1)
    bias = weight_of(1, 24, dtype, 2)[0] if biased else None
    x = weight_of(rows, 96, dtype, 3)
    held = [None, bias]
    parts = [
        F.linear(x.double(), w.double(), None if b is None else b.double()) for w, b in zip(weights, held, strict=True)
    ]
    want = torch.cat(parts, 1)
    for quantize, close in ((None, CLOSE[dtype]), ("int8", 0.02)):
        format = choose(weights, quantize, CPU)
        assert isinstance(format, WeightFormat)
        got = format.pack(weights, (None, bias))(x)
        assert got.dtype == dtype
        assert off(got, want) < close


def test_rows_of_int8_do_not_see_each_other() -> None:
    x, linear = weight_of(9, 96, torch.bfloat16), formats.of("int8").linear(weight_of(40, 96, torch.bfloat16, 1), None)
    x[4] *= 100
    x[5] = 0
    whole = linear(x)
    assert not whole[5].any()
    for i in range(9):
        assert torch.equal(linear(x[i : i + 1])[0], whole[i])


def test_x_is_left_alone() -> None:
    x = weight_of(3, 96, torch.float32)
    held = x.clone()
    formats.of("int8").linear(weight_of(40, 96, torch.float32), None)(x)
    assert torch.equal(x, held)


def pack(weights: tuple[Tensor, ...], biases: tuple[Tensor | None, ...]) -> PackedLinear:
    return formats.of("float32").pack(weights, biases)


def test_equal_tensors_are_packed_once_and_changed_ones_anew() -> None:
    weight = weight_of(16, 16, torch.float32)
    first = pack((weight,), (None,))
    assert pack((weight,), (None,)) is first
    assert formats.of("int8").pack((weight,), (None,)) is not first
    assert pack((weight[:8], weight[8:]), (None, None)) is not first
    assert copy.deepcopy(first) is first
    weight.mul_(2)
    second = pack((weight,), (None,))
    assert second is not first
    x = weight_of(2, 16, torch.float32, 1)
    torch.testing.assert_close(second(x), 2 * first(x))
    weight.data.mul_(2)  # which no version counts
    torch.testing.assert_close(pack((weight,), (None,))(x), 4 * first(x))
    with torch.inference_mode():
        made = weight_of(16, 16, torch.float32)
        before = pack((made,), (None,))
        assert pack((made,), (None,)) is before
        made.mul_(2)
        assert pack((made,), (None,)) is not before
    formats.forget_shared()
    assert pack((weight,), (None,)) is not second


def test_layers_of_the_same_weight_that_differ_elsewhere_are_not_shared() -> None:
    """In their bias, also where that alone was changed in place, and in how the weight lies in memory."""
    weight, bias, x = (weight_of(rows, 16, torch.float32, rows) for rows in (16, 1, 2))
    first = pack((weight,), (bias[0],))
    assert pack((weight,), (bias[0],)) is first
    other = pack((weight,), (bias[0].clone() + 1,))
    torch.testing.assert_close(other(x), first(x) + 1)
    turned = pack((weight.t(),), (bias[0],))
    torch.testing.assert_close(turned(x), F.linear(x, weight.t(), bias[0]))
    bias.add_(2)
    again = pack((weight,), (bias[0],))
    torch.testing.assert_close(again(x), F.linear(x, weight, bias[0]))


def test_what_is_not_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    def weights(gigabytes: float, dtype: torch.dtype = torch.float32, width: int = 1000) -> list[Tensor]:
        rows = int(gigabytes * 1e9) // (2 * width * dtype.itemsize)
        return [torch.empty(rows, width, dtype=dtype, device="meta") for _ in range(2)]

    monkeypatch.setattr(formats, "_free_memory", lambda: 10 * 10**9)
    assert choose(weights(4), None, CPU) is formats.of("float32")
    assert choose(weights(4, torch.float16), "int8", CPU) is formats.of("int8")
    assert choose(weights(1, torch.float64), None, CPU) == "float64 has no packed form"
    assert choose(weights(1, torch.float64), "int8", CPU) == "float64 weights are not packed as int8"
    assert choose(weights(1, width=133001), "int8", CPU) == "int8 takes at most 133000 inputs, got 133001"
    mixed = [*weights(1), *weights(1, torch.bfloat16)]
    assert choose(mixed, None, CPU) == "bfloat16 weights are not packed as float32"
    with backends.running("sycl"):  # its kernels on tensors of the CPU
        assert choose(weights(1), None, CPU) == "the sycl backend has no packed layers"
    assert choose(weights(6), None, CPU) == "a copy of the weights takes 6.0 GB, and 10.0 GB are free"
    model = TINY["llama"]()
    monkeypatch.setattr(formats, "_free_memory", lambda: 1000)
    spec = Speculator(model, None)
    out = spec.generate([1, 2, 3], 4, temperature=0.0)
    assert "fused layers, weights not packed: a copy" in out.stats.backends["target"]
    with pytest.raises(ValueError, match=r"weights that quantize='int8' can pack, got a copy of the weights takes"):
        Speculator(model, None, quantize="int8")


@pytest.mark.grid(3)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("quantize", [None, "int8"])
@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("path", ["walk", "tree"])
def test_drafted_text_is_the_targets_own(path: str, version: int, quantize: str | None, dtype: torch.dtype) -> None:
    """Also in bfloat16, where near ties would show a row whose bits depend on the others of its forward."""
    model, drafter = (copy.deepcopy(module).to(dtype) for module in pair(version, "cpu"))
    generic = Speculator(model, None, target_path="generic")
    plain = Speculator(model, None, quantize=quantize)
    spec = Speculator(model, drafter, quantize=quantize, path=path)
    word = "packed" if quantize is None else "int8"
    accepted = 0
    for ids in fitted_prompts()[:3]:
        options: dict[str, Any] = {"max_new_tokens": 40, "temperature": 0.0, "stop_token_ids": []}
        want, out = plain.generate(ids, **options), spec.generate(ids, **options)
        assert out.token_ids == want.token_ids
        assert out.stats.backends["target"] == f"fused layers, {word} weights"
        accepted += sum(out.stats.num_accepted)
        if quantize is None and dtype == torch.float32:
            assert want.token_ids == generic.generate(ids, **options).token_ids
    assert accepted > 5


@pytest.mark.parametrize("quantize", [None, "int8"])
def test_rows_of_a_forward_are_alone_to_the_last_bit(quantize: str | None) -> None:
    """Logits and features of a chain and of a tree's branch are those of tokens that went through one by one."""
    target = Target(copy.deepcopy(TINY["llama"]()).to(torch.bfloat16), (0, 1))
    fast = FusedTarget(target, quantize)
    prompt, ids = torch.arange(1, 90)[None], torch.tensor([[5, 9, 3, 7, 2, 8, 4, 6]])
    first = torch.zeros(1, 1, dtype=torch.int32)
    caches = [fast.new_cache(1, 128) for _ in range(3)]
    for cache in caches:
        fast.prefill(prompt, cache)
    alone = []
    for token in ids[0]:
        alone.append(fast.verify(token.view(1, 1), caches[0]))
        fast.commit(caches[0], first, torch.zeros(1, dtype=torch.int32))
    chain = fast.verify(ids, caches[1])
    # Behind every node of the branch stands a sibling of the next one.
    order, slots, parents = [0], [0], [-1]
    for i in range(1, 8):
        parents += [slots[-1], len(order)]
        slots.append(len(order))
        order += [i, 0]
    branched = fast.verify(ids[:, order], caches[2], tree_of(parents))
    for name in ("logits", "features"):
        one = torch.cat([getattr(out, name) for out in alone], 1)
        assert torch.equal(getattr(chain, name), one)
        assert torch.equal(getattr(branched, name)[:, slots], one)


@pytest.mark.parametrize("quantize", [None, "int8"])
def test_a_pickled_speculator_decodes_the_same(quantize: str | None) -> None:
    model, drafter = pair(1, "cpu")
    spec = Speculator(model, drafter, quantize=quantize)
    options: dict[str, Any] = {"max_new_tokens": 20, "temperature": 0.0, "stop_token_ids": []}
    want, got = (one.generate([1, 2, 3], **options) for one in (spec, pickle.loads(pickle.dumps(spec))))
    assert got.token_ids == want.token_ids
    assert got.stats.num_accepted == want.stats.num_accepted


def test_a_context_of_more_rows_than_one_call_takes() -> None:
    drafter = build_drafter(1, num_hidden_layers=1, layer_types=["full_attention"]).float()
    one = PackedDrafter.of(drafter)
    assert one is not None
    features = weight_of(66000, drafter.fc.in_features, torch.float32)[None]
    with torch.inference_mode():
        caches = [module.new_cache(1, features.shape[1]) for module in (drafter, one)]
        for module, cache in zip((drafter, one), caches, strict=True):
            module.append_context(features, cache)
    assert caches[1].lengths.tolist() == [66000]
    for name in ("k", "v"):
        torch.testing.assert_close(getattr(caches[1], name), getattr(caches[0], name), rtol=1e-3, atol=1e-3)


def test_int8_is_what_decodes() -> None:
    """Weights that 8 bits cannot tell apart from others give the text of those."""
    model = TINY["llama"]()
    target = Target(model)
    fast, exact = FusedTarget(target, "int8"), FusedTarget(target)
    ids = torch.arange(1, 9)[None]
    outputs = []
    for one in (fast, exact):
        cache = one.new_cache(1, 32)
        one.prefill(ids, cache)
        outputs.append(one.verify(ids[:, :4], cache).logits)
    assert 1e-4 < off(*outputs) < 0.1
    assert fast.head(torch.zeros(1, 2, target.hidden_size)).shape == (1, 2, target.vocab_size)


@pytest.mark.parametrize("version", [1, 2])
def test_a_packed_drafter_proposes_what_the_drafter_does(version: int) -> None:
    drafter = build_drafter(version).float()
    one = PackedDrafter.of(drafter)
    assert one is not None
    features = weight_of(5, drafter.fc.in_features, torch.float32)[None]
    head = torch.nn.Linear(drafter.config.hidden_size, VOCAB, bias=False)
    table = weight_of(VOCAB, drafter.config.hidden_size, torch.float32)
    found = []
    with torch.inference_mode():
        for module in (drafter, one):
            cache = module.new_cache(1, 32)
            module.append_context(features, cache)
            found.append(module.propose(torch.tensor([3]), cache, embed=table, head=head))
    assert torch.equal(found[0].candidates, found[1].candidates)
    torch.testing.assert_close(found[0].scores, found[1].scores, rtol=1e-4, atol=1e-4)


def _biases(model: Any) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.add_(weight_of(1, len(parameter), parameter.dtype)[0])


def _assigned(model: Any) -> None:
    held = {name: value + weight_of(1, value.shape[-1], value.dtype)[0] for name, value in model.state_dict().items()}
    model.load_state_dict(held, assign=True)


def _data(model: Any) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data + 0.3 * weight_of(1, parameter.shape[-1], parameter.dtype)[0]


@pytest.mark.parametrize("quantize", [None, "int8"])
@pytest.mark.parametrize("change", [_biases, _assigned, _data])
def test_a_changed_model_is_noticed_by_the_next_request(change: Any, quantize: str | None) -> None:
    """Biases alone, and tensors that take the place of others; a copy of a Speculator notices for itself."""
    options: dict[str, Any] = {"max_new_tokens": 24, "temperature": 0.0, "stop_token_ids": []}
    first = Speculator(TINY["qwen2"](), None, quantize=quantize)
    before = first.generate([1, 2, 3], **options).token_ids
    for spec in (copy.deepcopy(first), first):
        assert spec.generate([1, 2, 3], **options).token_ids == before
        change(spec.target.model)
        anew = Speculator(copy.deepcopy(spec.target.model), None, quantize=quantize)
        want = anew.generate([1, 2, 3], **options).token_ids
        assert want != before
        assert spec.generate([1, 2, 3], **options).token_ids == want


def test_a_model_that_became_another_is_refused() -> None:
    model = TINY["llama"]()
    spec = Speculator(model, None)
    model.to(torch.bfloat16)
    with pytest.raises(ValueError, match=r"parameters of torch.float32, as when it was taken, got torch.bfloat16"):
        spec.generate([1, 2], 2)
    model.float()
    assert len(spec.generate([1, 2], 2, stop_token_ids=[]).token_ids) == 2
    model.model.layers[1].mlp.down_proj = torch.nn.Sequential(model.model.layers[1].mlp.down_proj)
    with pytest.raises(ValueError, match=r"as when it was taken, got others: they need plain linear layers"):
        spec.generate([1, 2], 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"quantize": "int4"}, r"quantize must be 'int8' or None, got 'int4'"),
        ({"quantize": "int8", "backend": "reference"}, r"quantize must be None with backend='reference', got 'int8'"),
        ({"quantize": "int8", "target_path": "generic"}, r"quantize must be None with target_path='generic'"),
    ],
)
def test_refusals(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Speculator(TINY["llama"](), None, **options)


def test_models_of_another_form_stay_generic_and_are_refused() -> None:
    model = TINY["lfm2"]()
    assert Speculator(model, None).generate([1, 2], 2, temperature=0.0).stats.backends["target"].startswith("generic (")
    with pytest.raises(ValueError, match=r"Lfm2ForCausalLM must have"):
        Speculator(model, None, quantize="int8")
