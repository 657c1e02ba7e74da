"""add_rms_norm, swiglu, head_norm_rope: values by hand, every dtype against float64, where they round, and strides."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fused_cases import DTYPES, EPS, NARROW, agreement, normal, tables
from matching import assert_matches
from torch import Tensor
from torch.nn import functional as F

from pydflash import ops
from pydflash.ops import reference

# --- add_rms_norm ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_by_hand(dtype: torch.dtype, device: torch.device) -> None:
    """[1, 7] + [0, 0] has mean square 25; weights 1 + [1, 3]."""
    x, weight = torch.tensor([[1.0, 7.0]], dtype=dtype, device=device), torch.tensor([1.0, 3.0])
    out, total = ops.add_rms_norm(x, torch.zeros_like(x), weight.to(device, dtype), 0.0, 1.0, False)
    assert_matches(out, torch.tensor([[0.4, 5.6]]))
    assert torch.equal(total, x)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 7, 8, 100, 576, 2048, 4096, 5120, 20000])
@pytest.mark.parametrize("adds", [False, True])
def test_norm_of_a_sum(adds: bool, size: int, dtype: torch.dtype, device: torch.device) -> None:
    for rows, first, offset in ((1, True, 0.0), (5, False, 1.0), (150, True, 0.0)):
        x, delta, weight = normal(rows, size), normal(rows, size, seed=1), normal(size, seed=2)
        x[-1] *= 32
        want, _ = reference.add_rms_norm(x + delta if adds else x, None, weight, EPS, offset)
        moved: list[Any] = [t.to(device, dtype) for t in (x, delta, weight)]
        held = moved[0].clone()
        out, total = ops.add_rms_norm(moved[0], moved[1] if adds else None, moved[2], EPS, offset, first)
        assert_matches(out, want)
        assert torch.equal(moved[0], held), "x must stay"
        assert torch.equal(total, held + moved[1]) if adds else total is moved[0]


@pytest.mark.parametrize("dtype", NARROW)
def test_norm_rounds_where_it_says(dtype: torch.dtype, device: torch.device) -> None:
    x, delta, weight = ((1.1 * normal(*n, seed=i)).to(dtype) for i, n in enumerate(((8, 512), (8, 512), (512,))))
    for first in (True, False):
        got, _ = ops.add_rms_norm(*[t.to(device) for t in (x, delta, weight)], EPS, 0.25, first)
        assert agreement(got, reference.add_rms_norm(x, delta, weight, EPS, 0.25, first)[0]) > 0.99
        assert agreement(got, reference.add_rms_norm(x, delta, weight, EPS, 0.25, not first)[0]) < 0.9


@pytest.mark.parametrize("offset", [0, 3, 8])
@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_of_strided_rows(dtype: torch.dtype, offset: int, device: torch.device) -> None:
    wide = normal(6, 2 * 64 + 16).to(device, dtype)
    x, delta = wide[::2, offset : offset + 64], wide[1::2, offset + 64 : offset + 128]
    weight = normal(64 + 16, seed=1).to(device, dtype)[offset : offset + 64]
    got = ops.add_rms_norm(x, delta, weight, EPS)
    dense = ops.add_rms_norm(x.contiguous(), delta.contiguous(), weight.clone(), EPS)
    assert agreement(got[0], dense[0].cpu()) > 0.99
    assert torch.equal(got[1], dense[1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_keeps_rows_apart(dtype: torch.dtype, device: torch.device) -> None:
    x, weight = normal(4, 96).to(device, dtype), torch.ones(96, dtype=dtype, device=device)
    x[1], x[2, 5] = 0, torch.nan
    out, _ = ops.add_rms_norm(x, None, weight, EPS)
    assert torch.equal(out[1], torch.zeros_like(out[1]))
    assert out[2].isnan().all()
    alone = ops.add_rms_norm(x[3:], None, weight, EPS)[0]
    assert torch.equal(out[3:], alone)
    assert out[0].isfinite().all()


# --- swiglu ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 7, 8, 100, 1536, 12288])
def test_swiglu(size: int, dtype: torch.dtype, device: torch.device) -> None:
    """Gates of 0 and of both ends by hand, others by the definition; the rows of a wider tensor alike."""
    for rows in (1, 5, 70):
        x = normal(rows, 2 * size).to(dtype)
        x[0, 0] = 0
        want = F.silu(x[:, :size].double()).to(dtype).double() * x[:, size:].double()
        got = ops.swiglu(x.to(device))
        assert_matches(got, want)
        assert got[0, 0] == 0
        wide = torch.full((rows, 2 * size + 3), torch.nan, dtype=dtype, device=device)
        wide[:, 3:] = x.to(device)
        assert torch.equal(ops.swiglu(wide[:, 3:]), got)
    ends = torch.tensor([[-100.0, 100.0, torch.nan, 3.0, 3.0, 3.0]], dtype=dtype, device=device)
    low, high, neither = ops.swiglu(ends)[0].tolist()
    assert (low, high) == (0, 300)
    assert neither != neither


@pytest.mark.parametrize("dtype", NARROW)
def test_swiglu_rounds_its_factors(dtype: torch.dtype, device: torch.device) -> None:
    x = (1.1 * normal(8, 512)).to(dtype)
    gate, factor = x.float().chunk(2, 1)
    got = ops.swiglu(x.to(device))
    assert agreement(got, (F.silu(gate).to(dtype).float() * factor).to(dtype)) > 0.99
    assert agreement(got, (F.silu(gate) * factor).to(dtype)) < 0.9


# --- head_norm_rope -------------------------------------------------------------------------------------------

# head_dim, rotary_dim, interleaved
HEADS = [
    (128, 128, False),
    (128, 128, True),
    (64, 64, False),
    (80, 80, False),
    (96, 48, False),
    (256, 256, False),
    (256, 64, True),
    (40, 20, False),
    (24, 10, False),
    (24, 10, True),
    (72, 72, False),
    (8, 8, False),
    (16, 0, False),
]


class Heads:
    """Arguments of head_norm_rope in float64, and what must come out."""

    def __init__(self, dim: int, rotary: int, interleaved: bool, *, batch: int = 2, slots: int = 5) -> None:
        self.heads, self.kv_heads, self.dim, self.slots = 6, 2, dim, slots
        self.qkv = normal(batch, slots, (self.heads + 2 * self.kv_heads) * dim)
        self.weights: list[Any] = [normal(dim, seed=1), normal(dim, seed=2)]
        self.tables = tables(40, rotary)
        self.lengths = torch.tensor([7, 0])[:batch].int()
        self.depths = torch.tensor([[0, 1, 1, 2, 30]])[:, :slots].int()
        self.last: tuple[Any, ...] = (self.heads, rotary, interleaved)
        self.block = torch.empty(batch, self.kv_heads, slots, dim, dtype=torch.float64)

    def want(self, *rounding: Any) -> list[Tensor]:
        k, v = self.block.clone(), self.block.clone()
        numbers: tuple[Any, ...] = (*self.tables, self.lengths, self.depths)
        q = reference.head_norm_rope(self.qkv, *self.weights, EPS, *numbers, k, v, *self.last, *rounding)
        return [q, k, v]

    def got(self, dtype: torch.dtype, device: torch.device, *rounding: Any, qkv: Tensor | None = None) -> list[Tensor]:
        k, v = (torch.full_like(self.block, torch.nan, dtype=dtype, device=device) for _ in range(2))
        qkv = self.qkv.to(device, dtype) if qkv is None else qkv
        weights: list[Any] = [None if w is None else w.to(device, dtype) for w in self.weights]
        numbers: list[Any] = [t.to(device) for t in (*self.tables, self.lengths, self.depths)]
        return [ops.head_norm_rope(qkv, *weights, EPS, *numbers, k, v, *self.last, *rounding), k, v]


@pytest.mark.parametrize("dtype", DTYPES)
def test_heads_by_hand(dtype: torch.dtype, device: torch.device) -> None:
    """A quarter turn at position 3: (a, b) becomes (-b, a); rotary_dim 4 of 8 channels."""
    row = torch.arange(1.0, 25.0).reshape(1, 1, 24).to(device, dtype)
    cos, sin = torch.ones(4, 2, device=device), torch.zeros(4, 2, device=device)
    cos[3], sin[3] = 0, 1
    k, v = (torch.zeros(1, 1, 1, 8, dtype=dtype, device=device) for _ in range(2))
    lengths, depths = (torch.tensor(x, dtype=torch.int32, device=device) for x in ([1], [[2]]))
    for interleaved, turned in ((False, [-3.0, -4, 1, 2, 5, 6, 7, 8]), (True, [-2.0, 1, -4, 3, 5, 6, 7, 8])):
        q = ops.head_norm_rope(row, None, None, EPS, cos, sin, lengths, depths, k, v, 1, 4, interleaved)
        want = torch.tensor(turned)
        assert q.flatten().tolist() == turned
        assert k.flatten().tolist() == torch.where(torch.arange(8) < 4, want + 8 * want.sign(), want + 8).tolist()
        assert torch.equal(v.flatten(), row.flatten()[16:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("dim", "rotary", "interleaved"), HEADS)
@pytest.mark.parametrize("normed", ["", "q", "k", "qk"])
def test_heads(normed: str, dim: int, rotary: int, interleaved: bool, dtype: torch.dtype, device: torch.device) -> None:
    case = Heads(dim, rotary, interleaved)
    case.weights = [w if name in normed else None for name, w in zip("qk", case.weights, strict=True)]
    for got, want in zip(case.got(dtype, device, 0.5, False), case.want(0.5, False), strict=True):
        assert_matches(got, want)
    assert torch.equal(case.got(dtype, device)[2].cpu().double(), case.want()[2]), "v is copied"


@pytest.mark.parametrize("dtype", NARROW)
def test_heads_round_after_the_norm_and_after_the_rotation(dtype: torch.dtype, device: torch.device) -> None:
    case = Heads(128, 128, False, slots=4)
    case.qkv, wide = 1.1 * case.qkv, Heads(128, 128, False, slots=4)
    wide.qkv = case.qkv
    case.qkv, case.weights, case.block = case.qkv.to(dtype), [w.to(dtype) for w in case.weights], case.block.to(dtype)
    for first in (True, False):
        for got, same, other in zip(
            case.got(dtype, device, 0.25, first)[:2], case.want(0.25, first), case.want(0.25, not first), strict=False
        ):
            assert agreement(got, same) > 0.99
            assert agreement(got, other) < 0.9
    assert agreement(case.got(dtype, device, 0.25, False)[0], wide.want(0.25, False)[0].to(dtype)) < 0.9


def test_heads_at_clamped_and_shared_positions(device: torch.device) -> None:
    case = Heads(64, 64, False)
    case.lengths = torch.tensor([38, 2**31 - 2], dtype=torch.int32)  # beyond the 40 rows of the tables
    case.depths = torch.tensor([[0, 1, 2, 3, 60]], dtype=torch.int32)
    got = case.got(torch.float32, device)
    case.lengths, case.depths = torch.tensor([0, 0]).int(), torch.tensor([[38, 39, 39, 39, 39], [39] * 5]).int()
    for a, want in zip(got, case.want(), strict=True):
        assert_matches(a, want)
    for a, b in zip(got, case.got(torch.float32, device), strict=True):
        assert torch.equal(a, b), "depths of one row or of each sequence"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("skip", [0, 3, 8])
@pytest.mark.parametrize("dim", [24, 128])
def test_heads_of_a_strided_projection(dim: int, skip: int, dtype: torch.dtype, device: torch.device) -> None:
    case = Heads(dim, dim, False)
    wide = torch.randn(5, 2, case.qkv.shape[2] + 16).to(device, dtype)
    wide[..., skip : skip + case.qkv.shape[2]] = case.qkv.transpose(0, 1).to(device, dtype)
    view = wide[..., skip : skip + case.qkv.shape[2]].transpose(0, 1)
    for a, b in zip(case.got(dtype, device, qkv=view), case.got(dtype, device), strict=True):
        assert torch.equal(a, b)
    # Blocks whose rows lie beside others, as [B, S, 2, Hkv, D].
    both = torch.full((2, 5, 2, case.kv_heads, dim + 8), 7.0, dtype=dtype, device=device)
    k, v = (both[:, :, i, :, skip // 3 : skip // 3 + dim].transpose(1, 2) for i in range(2))
    numbers: list[Any] = [t.to(device) for t in (*case.tables, case.lengths, case.depths)]
    weights: list[Any] = [w.to(device, dtype) for w in case.weights if w is not None]
    ops.head_norm_rope(view, *weights, EPS, *numbers, k, v, *case.last)
    _, want_k, want_v = case.got(dtype, device)
    assert torch.equal(k, want_k)
    assert torch.equal(v, want_v)
    k.fill_(7), v.fill_(7)
    assert (both == 7).all(), "nothing else may be written"


def test_heads_of_many_slots(device: torch.device) -> None:
    """So many that a group of lanes takes several heads in turn."""
    case = Heads(128, 128, False, batch=1, slots=1)
    slots = 3000
    case.qkv, case.block = normal(1, slots, case.qkv.shape[2]), case.block.expand(1, -1, slots, -1).contiguous()
    case.depths = torch.arange(slots)[None].int() % 41
    for got, want in zip(case.got(torch.bfloat16, device), case.want(), strict=True):
        assert_matches(got, want)


# --- graphs and registration ----------------------------------------------------------------------------------


def test_positions_are_read_when_a_graph_is_replayed(device: torch.device) -> None:
    if device.type != "cuda":
        pytest.skip("graphs are captured on a CUDA device")
    case, dtype = Heads(128, 128, False), torch.bfloat16
    k, v = (torch.zeros_like(case.block, dtype=dtype, device=device) for _ in range(2))
    qkv, cos, sin, lengths, depths = (
        t.to(device) for t in (case.qkv.to(dtype), *case.tables, case.lengths, case.depths)
    )
    weights: list[Any] = [w.to(device, dtype) for w in case.weights if w is not None]
    flat, ones = qkv.flatten(0, 1), torch.ones(qkv.shape[-1], dtype=dtype, device=device)

    def step() -> Tensor:  # two launches that depend on each other, both on a value in memory
        normed, _ = ops.add_rms_norm(flat, flat, ones, EPS)
        return ops.head_norm_rope(normed.view_as(qkv), *weights, EPS, cos, sin, lengths, depths, k, v, *case.last[:2])

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        q = step()
    for shift in (0, 3, 11):
        lengths.copy_(case.lengths + shift)
        qkv.copy_(normal(*qkv.shape, seed=shift))
        want = step().clone(), k.clone(), v.clone()
        for x in (q, k, v):
            x.fill_(torch.nan)
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip((q, k, v), want, strict=True))


def test_opcheck(device: torch.device) -> None:
    case = Heads(16, 8, False)
    x, weight = normal(3, 16).to(device, torch.float32), torch.ones(16, device=device)
    for delta in (x + 1, None):
        torch.library.opcheck(torch.ops.pydflash.add_rms_norm.default, (x, delta, weight, EPS, 0.0, True))
    torch.library.opcheck(torch.ops.pydflash.swiglu.default, (x,))
    numbers: list[Any] = [t.to(device) for t in (*case.tables, case.lengths, case.depths)]
    qkv, k, v = (t.to(device, torch.float32) for t in (case.qkv, case.block.zero_(), case.block))
    arguments = (qkv, weight, weight, EPS, *numbers, k, v.clone(), *case.last, 0.0, True)
    torch.library.opcheck(torch.ops.pydflash.head_norm_rope.default, arguments)
