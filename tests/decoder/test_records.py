"""Records and stores: what stands around a record, kinds that have no compiled form, and stores of several kinds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from matching import assert_matches
from tiny_models import TINY
from torch import Tensor

from pydflash import Target
from pydflash.decoder import formats
from pydflash.decoder.block import BlockView, Forward, block_masks
from pydflash.decoder.linear import Projection
from pydflash.decoder.records import (
    Attention,
    Convolution,
    GatedMLP,
    Layer,
    LayerNorm,
    Norm,
    NormKind,
    Record,
    Residual,
)
from pydflash.decoder.stack import Decoder
from pydflash.decoder.stores import KVShape
from pydflash.target.fused import FusedTarget

HIDDEN, SLOTS, BATCH = 16, 3, 2
FP32: dict[str, Any] = {"dtype": torch.float32, "device": torch.device("cpu")}


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def linear(rows: int, width: int, seed: int) -> Projection:
    return Projection((randn(rows, width, seed=seed) / width**0.5,), (None,))


def norm(seed: int, **kind: Any) -> Norm:
    return Norm(1 + 0.1 * randn(HIDDEN, seed=seed), NormKind(1e-5, **kind))


def attention(seed: int, **changes: Any) -> Attention:
    record = Attention(linear(32, HIDDEN, seed), linear(HIDDEN, 16, seed + 1), 2, 1, 8, 8, False, 8**-0.5)
    return replace(record, **changes)


def mlp(seed: int) -> GatedMLP:
    weights = randn(24, HIDDEN, seed=seed), randn(24, HIDDEN, seed=seed + 1)
    return GatedMLP(Projection(weights, (None, None), gated=True), linear(HIDDEN, 24, seed + 2))


def layers(**around: Any) -> list[Layer]:
    return [
        Layer(
            attention(10 * i),
            mlp(10 * i + 3),
            Residual(norm(10 * i + 6), **around),
            Residual(norm(10 * i + 7), **around),
        )
        for i in range(3)
    ]


def tables(count: int = 1) -> tuple[tuple[Tensor, Tensor], ...]:
    angles = torch.arange(32)[:, None] * torch.tensor([1.0, 0.5, 0.2, 0.1])
    return tuple(((angles * (i + 1)).cos(), (angles * (i + 1)).sin()) for i in range(count))


def run(decoder: Decoder, count: int = 1, taps: tuple[int, ...] = (0, 2)) -> tuple[Tensor, dict[int, Tensor]]:
    """A block behind five committed positions."""
    cache = decoder.new_cache(BATCH, 16, **FP32)
    depths, _, causal = block_masks(5, torch.device("cpu"))
    cache.open(5)
    decoder(randn(BATCH, 5, HIDDEN, seed=90), cache, tables(count), BlockView(causal, depths))
    cache.commit(torch.arange(5, dtype=torch.int32).expand(BATCH, -1).contiguous())
    assert not cache.is_open
    cache.lengths += 5
    depths, _, causal = block_masks(SLOTS, torch.device("cpu"))
    cache.open(SLOTS)
    return decoder(randn(BATCH, SLOTS, HIDDEN, seed=91), cache, tables(count), BlockView(causal, depths), taps)


def test_compiled_and_record_by_record_are_the_same() -> None:
    plain, packed = (Decoder(layers(), norm(99)) for _ in range(2))
    packed.pack(formats.of("float32"))
    assert packed.program is not None
    assert packed.uncompiled == ""
    (got, taken), (want, wanted) = run(packed), run(plain)
    assert_matches(got, want, 1e-5)
    assert taken.keys() == wanted.keys() == {0, 2}
    for i in taken:
        assert_matches(taken[i], wanted[i], 1e-5)


class Doubling(Record):
    """A mixer of another kind, which keeps how often each sequence committed a slot."""

    @dataclass(frozen=True)
    class Shape:
        def new(self, layers: int, batch: int, rows: int, dtype: torch.dtype, device: torch.device) -> Any:
            return Counts(torch.zeros(layers, batch, dtype=torch.int32))

    store = Shape()

    def weights(self) -> tuple[Tensor, ...]:
        return ()

    def pack(self, format: formats.WeightFormat) -> Doubling:
        return self

    def __call__(self, u: Tensor, part: Tensor, forward: Forward) -> Tensor:
        assert part.shape == (forward.batch,)
        return 2 * u


class Counts:
    def __init__(self, counts: Tensor) -> None:
        self.counts, self.slots = counts, 0

    @property
    def nbytes(self) -> int:
        return self.counts.nbytes

    @property
    def is_open(self) -> bool:
        return self.slots > 0

    def part(self, i: int) -> Tensor:
        return self.counts[i]

    def open(self, slots: int) -> None:
        self.slots = slots

    def commit(self, index: Tensor, lengths: Tensor) -> None:
        self.counts += (index >= 0).sum(1, dtype=torch.int32)
        self.discard()

    def discard(self) -> None:
        self.slots = 0

    def row(self, b: int) -> Counts:
        return Counts(self.counts[:, b : b + 1])


def test_a_record_of_another_kind_runs_beside_attention_with_a_store_of_its_own() -> None:
    held = layers()
    held[1] = replace(held[1], mixer=Doubling())
    decoder = Decoder(held, norm(99))
    cache = decoder.new_cache(BATCH, 16, **FP32)
    assert [type(store).__name__ for store in cache.stores] == ["KVStore", "Counts"]
    assert cache.stores[0].k.shape == (2, BATCH, 1, 16, 8)
    assert cache.nbytes == 2 * cache.stores[0].k.nbytes + BATCH * 4
    cache.open(SLOTS)
    cache.stores[0].block[0][1].fill_(7)
    assert torch.equal(cache.part(2).block_k, torch.full((BATCH, 1, SLOTS, 8), 7.0)), "the second attention layer"
    cache.commit(torch.tensor([[0, 2, -1], [1, -1, -1]], dtype=torch.int32))
    assert cache.part(1).tolist() == [2, 1]
    assert cache.row(1).part(1).tolist() == [1]
    assert cache.row(1).part(2).k[0, 0, :, 0].tolist() == [7.0] + [0.0] * 15
    want, _ = run(decoder)
    decoder.pack(formats.of("float32"))
    assert decoder.program is None
    assert decoder.uncompiled == "layers with stores of their own have no compiled form"
    assert_matches(run(decoder)[0], want, 1e-5)
    alone = Decoder([replace(layer, mixer=Doubling()) for layer in layers()], norm(99))
    alone.pack(formats.of("float32"))
    assert alone.uncompiled == "Doubling has no compiled form"


def test_norms_after_and_scales_are_what_they_say() -> None:
    """By hand, with the records of one layer alone."""
    around = {"after": norm(50), "scale": 0.25}
    layer = layers(**around)[0]
    layer = replace(layer, around_mlp=replace(layer.around_mlp, before=None))
    decoder = Decoder([layer], norm(99))
    cache = decoder.new_cache(1, 8, **FP32)
    depths, _, causal = block_masks(SLOTS, torch.device("cpu"))
    view, x = BlockView(causal, depths), randn(1, SLOTS, HIDDEN, seed=5)
    cache.open(SLOTS)
    forward = Forward(1, SLOTS, cache.lengths, view, tables())
    y = x[0] + 0.25 * norm(50)(layer.mixer(norm(6)(x[0])[0], cache.part(0), forward))[0]
    y = y + 0.25 * norm(50)(layer.mlp(y))[0]
    got, taken = decoder(x, cache, tables(), view, (0,))
    assert_matches(taken[0][0], y, 1e-6)
    assert_matches(got[0], norm(99)(y)[0], 1e-6)
    decoder.pack(formats.of("float32"))
    assert decoder.program is not None
    cache.open(SLOTS)
    assert_matches(decoder(x, cache, tables(), view)[0], got, 1e-5)


def of_heads(heads: int) -> Norm:
    return Norm(1 + 0.3 * randn(8 * heads, seed=heads), NormKind(1e-6))


def gelu(its: Any) -> GatedMLP:
    return replace(its, gate_up=replace(its.gate_up, gated=False), activation="gelu_tanh")


LAYER_NORM = LayerNorm(randn(HIDDEN, seed=77), randn(HIDDEN, seed=78), 1e-5)
STORES = "layers with stores of their own have no compiled form"
CHANGES: dict[str, tuple[Callable[[Any], Layer], str]] = {
    "a table": (lambda its: replace(its, mixer=replace(its.mixer, table=1)), ""),
    "no rotation": (lambda its: replace(its, mixer=replace(its.mixer, rotary_dim=0, table=1)), ""),
    "norms of all heads": (
        lambda its: replace(its, mixer=replace(its.mixer, q_norm=of_heads(2), k_norm=of_heads(1))),
        "",
    ),
    "a GELU": (lambda its: replace(its, mlp=gelu(its.mlp)), ""),
    "a scale": (lambda its: replace(its, around_mlp=replace(its.around_mlp, scale=0.3)), ""),
    "a norm behind": (lambda its: replace(its, around_mixer=replace(its.around_mixer, after=norm(3))), ""),
    "no norm": (lambda its: replace(its, around_mixer=Residual(None)), ""),
    "beside each other": (lambda its: replace(its, around_mlp=Residual(None, norm(4), 0.5), parallel=True), ""),
    "KV heads": (lambda its: replace(its, mixer=attention(10, num_kv_heads=2, qkv=linear(48, HIDDEN, 1))), STORES),
    "a mean": (lambda its: replace(its, around_mlp=Residual(LAYER_NORM, LAYER_NORM)), ""),
}


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("change", CHANGES)
def test_layers_that_differ(change: str, place: int) -> None:
    """Compiled or record by record, they are what they were."""
    alter, message = CHANGES[change]
    held = layers()
    held[place] = alter(held[place])
    decoder = Decoder(held, norm(99))
    want, wanted = run(decoder, 2, (0, 1, 2))
    decoder.pack(formats.of("float32"))
    assert ((decoder.program is None), decoder.uncompiled) == (bool(message), message)
    got, taken = run(decoder, 2, (0, 1, 2))
    assert_matches(got, want, 1e-5)
    for i in taken:
        assert_matches(taken[i], wanted[i], 1e-5)
    same = Decoder(layers(), norm(99))
    assert (run(same, 2)[0] - want).norm() > 1e-3 * want.norm(), "the change is seen"


def test_norms_of_two_kinds_are_compiled() -> None:
    held = layers()
    held[1] = replace(held[1], around_mlp=Residual(norm(17, weight_offset=1.0, round_first=False)))
    held[2] = replace(held[2], mixer=attention(20, num_heads=1, qkv=linear(24, HIDDEN, 1), output=linear(HIDDEN, 8, 2)))
    decoder = Decoder(held, norm(99))
    want, _ = run(decoder)
    decoder.pack(formats.of("float32"))
    assert decoder.program is not None
    assert_matches(run(decoder)[0], want, 1e-5)


def test_a_target_says_that_it_runs_record_by_record(monkeypatch: pytest.MonkeyPatch) -> None:
    target = Target(TINY["llama"](), (0,))
    whole = FusedTarget(target)
    monkeypatch.setattr(GatedMLP, "arguments", Record.arguments)
    fast = FusedTarget(target)
    assert fast.weights == "packed weights, record by record: GatedMLP has no compiled form"
    ids, outputs = torch.arange(1, 9)[None], []
    for one in (whole, fast):
        cache = one.new_cache(1, 16)
        one.prefill(ids, cache)
        outputs.append(one.verify(ids[:, :4], cache))
    assert torch.equal(outputs[0].logits, outputs[1].logits)
    assert outputs[0].features is not None
    assert torch.equal(outputs[0].features, outputs[1].features)  # type: ignore[arg-type]


def test_records_inside_records_are_packed_with_them() -> None:
    conv = Convolution(randn(2, HIDDEN), randn(2, HIDDEN), linear(8, HIDDEN, 3))
    around = Residual(norm(1), convolution=conv)
    assert [w is conv.deltas.weights[0] for w in around.weights()] == [True]
    packed = around.pack(formats.of("int8")).convolution
    assert packed is not None
    assert packed.deltas.packed is not None
    assert packed.deltas.packed.format is formats.of("float32"), "small weights stay as they are"
    assert len(layers()[0].weights()) == 5


def test_stores_need_an_open_block() -> None:
    store = KVShape(1, 8).new(1, 1, 4, torch.float32, torch.device("cpu"))
    index = torch.zeros(1, 1, dtype=torch.int32)
    with pytest.raises(ValueError, match="commit: the store must hold an open block, got none"):
        store.commit(index, torch.zeros(1, dtype=torch.int32))
    decoder = Decoder(layers(), norm(99))
    decoder.pack(formats.of("float32"))
    depths, _, causal = block_masks(SLOTS, torch.device("cpu"))
    cache = decoder.new_cache(BATCH, 16, **FP32)
    with pytest.raises(ValueError, match="decoder: cache must hold an open block, got none"):
        decoder(randn(BATCH, SLOTS, HIDDEN), cache, tables(), BlockView(causal, depths))
    with pytest.raises(ValueError, match="Cache: batch and capacity must be integers >= 1, got 0 and 4"):
        decoder.new_cache(0, 4, **FP32)
