"""A drafter's layers in few launches: the numbers of the module's own forward, whatever the config and the cache."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from decoder_cases import KINDS, RAGGED, WINDOWS, appended, both, features_of, stored
from matching import assert_matches
from pairs import HIDDEN, VOCAB, build_drafter, unbounded
from torch import Tensor, nn

from pydflash import Drafter
from pydflash.decoder.block import block_masks
from pydflash.decoder.linear import Projection
from pydflash.drafter.decoder import DrafterDecoder, decoder_of
from pydflash.ops import backends


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_same_numbers_as_the_module(kind: str, interleaved: bool, device: torch.device) -> None:
    """Context rows of ragged batches, block hidden states of every size, candidates and their scores."""
    version, changes = KINDS[kind]
    pair = both(version, device, rope_interleaved=interleaved, **changes)
    caches = [appended(drafter, RAGGED) for drafter in pair]
    assert caches[0].lengths.tolist() == caches[1].lengths.tolist() == [15, 13, 12]
    for got, want in zip(*map(stored, caches), strict=True):
        assert_matches(got, want)
    table = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(7)).to(device)
    head = nn.Linear(HIDDEN, VOCAB, bias=False).to(device)
    anchors = torch.tensor([3, 4, 5], device=device)
    with torch.inference_mode():
        for size in (1, 2, 8):
            got, want = (d.hidden(anchors, c, table, size) for d, c in zip(pair, caches, strict=True))
            assert got.shape == (3, size, HIDDEN)
            assert_matches(got, want, 4e-6)
        found = [d.propose(anchors, c, embed=table, head=head) for d, c in zip(pair, caches, strict=True)]
    assert torch.equal(found[0].tokens, found[1].tokens)
    assert_matches(found[0].scores, found[1].scores, 1e-5)


def test_every_part_of_the_config_matters(device: torch.device) -> None:
    """The pairs above would agree on anything that neither looks at: here the kinds differ from one another."""
    seen: list[Tensor] = []
    anchors, table = torch.tensor([3, 4, 5], device=device), torch.randn(VOCAB, HIDDEN).to(device)
    for kind in ("dflash", "dflash 2", "causal", "bias", "all windows", "causal windows", "one window", "yarn"):
        version, changes = KINDS[kind]
        for interleaved in (False, True):
            fused, _ = both(version, device, rope_interleaved=interleaved, **changes)
            with torch.inference_mode():
                seen.append(fused.hidden(anchors, appended(fused, RAGGED), table, 8))
    for i, one in enumerate(seen):
        assert all((one - other).norm() > 1e-3 * one.norm() for other in seen[:i])


@pytest.mark.parametrize("rows", [1, 4, 5, 6, 17])
def test_rings_take_any_number_of_rows(rows: int, device: torch.device) -> None:
    """A ring of 5: fewer, as many and more rows than it holds, and a cache that keeps everything beside it."""
    fused, module = both(2, device, **WINDOWS)
    assert fused.new_cache(1, 64).rows == 5
    for counts in ([None, None, None], [None, [rows, 1, 0], None]):
        caches = [appended(d, counts, rows) for d in (fused, module)]
        assert torch.equal(caches[0].lengths, caches[1].lengths)
        for got, want in zip(*map(stored, caches), strict=True):
            assert_matches(got, want)
        whole = copy.copy(module)
        object.__setattr__(whole, "new_cache", lambda batch, capacity: unbounded(module, batch, capacity))
        anchors, table = torch.tensor([3, 4, 5], device=device), torch.randn(VOCAB, HIDDEN).to(device)
        with torch.inference_mode():
            got = fused.hidden(anchors, caches[0], table, 8)
            want = whole.hidden(anchors, appended(whole, counts, rows), table, 8)
        assert_matches(got, want, 4e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("version", [1, 2])
def test_half_precision_is_near_float32(version: int, dtype: torch.dtype, device: torch.device) -> None:
    """No further away than the module in the same dtype."""
    wide = both(version, device)[1]
    fused, module = both(version, device, dtype)
    with torch.no_grad():
        for mine, theirs in zip(wide.parameters(), module.parameters(), strict=True):
            mine.copy_(theirs.float())
        table, anchors = torch.randn(VOCAB, HIDDEN).to(device, dtype), torch.tensor([3, 4, 5], device=device)
        outs = [d.hidden(anchors, appended(d, RAGGED), table.to(d.dtype), 8).float() for d in (wide, fused, module)]
    assert outs[1].isfinite().all()
    assert (outs[1] - outs[0]).norm() <= 1.5 * (outs[2] - outs[0]).norm()


def test_full_caches_are_refused(device: torch.device) -> None:
    """On a device the lengths cannot be read: there it is the caller who counts."""
    fused, _ = both(1, device)
    cache = fused.new_cache(1, 6)
    with torch.inference_mode():
        fused.append_context(features_of(fused, 1, 4, 0), cache)
        if backends.name_for(device.type) == "cpu":
            with pytest.raises(ValueError, match="capacity must be at least 8 positions, got 6"):
                fused.append_context(features_of(fused, 1, 4, 0), cache)
        fused.append_context(features_of(fused, 1, 4, 0), cache, torch.tensor([2], device=device))
    assert cache.lengths.tolist() == [6]


def test_masks_of_a_block() -> None:
    for size in (1, 3, 63, 64):
        depths, bidirectional, causal = block_masks(size, torch.device("cpu"))
        assert depths.tolist() == [list(range(size))]
        bits = [[(value >> j) & 1 for j in range(size)] for value in bidirectional[0].tolist()]
        assert bits == [[1] * size] * size
        if size > 1:
            bits = [[(value >> j) & 1 for j in range(size)] for value in causal[0].tolist()]
            assert bits == [[int(j <= i) for j in range(size)] for i in range(size)]


def test_projections_side_by_side_and_gated(device: torch.device) -> None:
    x, a, b, bias = (torch.randn(*shape, device=device) for shape in ((3, 64), (16, 64), (16, 64), (16,)))
    assert_matches(Projection((a, b), (bias, None))(x), torch.cat([x @ a.T + bias, x @ b.T], 1))
    assert_matches(Projection((a,), (bias,))(x), x @ a.T + bias)
    first = x @ a.T + bias
    assert_matches(Projection((a, b), (bias, None), gated=True)(x), first * first.sigmoid() * (x @ b.T))


# --- when there is one ----------------------------------------------------------------------------------------


@pytest.fixture
def plain(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> Drafter:
    """A drafter that makes decoders; on a CPU it is made to believe that it is elsewhere."""
    drafter = build_drafter(2).to(device)
    if device.type == "cpu":
        monkeypatch.setattr(Drafter, "device", SimpleNamespace(type="elsewhere"))
    return drafter


def test_decoders_are_kept_until_parameters_move(plain: Drafter) -> None:
    assert plain.decoder() is None, "gradients are on"
    with torch.no_grad():
        first = plain.decoder()
        assert isinstance(first, DrafterDecoder)
        assert plain.decoder() is first
        plain.norm.weight.mul_(2)  # in place: it holds views
        assert plain.decoder() is first
        assert torch.equal(first.decoder.final_norm.weight, plain.norm.weight)
        plain.to(torch.bfloat16)
        second = plain.decoder()
        assert second is not first
        assert second is not None
        assert second.decoder.layers[1].around_mlp.convolution is not None
        assert {t.dtype for t in second.decoder.layers[1].mixer.weights()} == {torch.bfloat16}
        plain.layers[1].mlp_conv.kernel_projection.weight = nn.Parameter(torch.zeros(32, HIDDEN, dtype=torch.bfloat16))
        third = plain.decoder()
        assert third is not second
        plain.backend = "reference"
        assert plain.decoder() is None


def test_what_is_derived_tells_of_every_change(plain: Drafter) -> None:
    def same(a: tuple[object, object], b: tuple[object, object]) -> bool:
        return all(x is y for x, y in zip(a, b, strict=True))

    with torch.no_grad():
        first = plain.derived()
        plain.stack[0].down_proj.weight.mul_(2)
        assert same(plain.derived(), first)
        for tensor in (plain.stack[1].qkv_proj.weight, plain.stack[0].k_norm.weight):
            before = plain.derived()
            tensor.mul_(2)  # its copy in the context's projection is an old one
            assert not same(plain.derived(), before)
        before = plain.derived()
        plain.load_canonical({name: tensor.clone() for name, tensor in plain.canonical().items()})
        assert not same(plain.derived(), before)


class Twice(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class Packed(Tensor):
    """What quantising libraries put in the place of a weight."""

    def __tensor_flatten__(self) -> Any:
        raise NotImplementedError


@pytest.mark.parametrize("where", ["fc", "qkv_proj", "o_proj", "gate_up_proj", "down_proj", "kernel_projection"])
@pytest.mark.parametrize("how", ["wrapped", "subclass", "packed"])
def test_linears_of_other_kinds_have_none(where: str, how: str, plain: Drafter) -> None:
    parents = {"fc": plain, "kernel_projection": plain.stack[1].mlp_conv}
    parent: Any = parents.get(where, plain.stack[1])
    linear = getattr(parent, where)
    if how == "wrapped":
        setattr(parent, where, nn.Sequential(linear))
    elif how == "subclass":
        linear.__class__ = Twice
    else:
        weight = linear.weight.data.as_subclass(Packed)
        linear._parameters["weight"] = weight
    with torch.no_grad():
        assert decoder_of(plain.config, plain.stack, plain.norm.weight, plain.fc) is None
        if how != "packed" and (where, how) != ("fc", "wrapped"):  # whose weight tells device and dtype
            assert plain.decoder() is None
