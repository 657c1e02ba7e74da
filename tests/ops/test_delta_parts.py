"""What stands around the delta rule: short_conv, gated_rms_norm, delta_commit."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from cpu_levels import over_levels
from delta_cases import CPU, Delta, chain, path_to, tree
from fused_cases import DTYPES
from torch import Tensor, nn
from torch.nn import functional as F

from pydflash import ops
from pydflash.ops import reference, registry


@pytest.fixture(autouse=True)
def _has_the_ops(request: pytest.FixtureRequest) -> None:
    device = request.getfixturevalue("device") if "device" in request.fixturenames else CPU
    if not registry.has("delta_rule", device):
        pytest.skip(f"{device.type} has no kernels of these ops")


NEAR = {torch.float32: (1e-5, 1e-5), torch.bfloat16: (1.6e-2, 2e-2), torch.float16: (2e-3, 2e-3)}


def conv_of(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """torch's own, in float64, over rows [T - 1 + S, C] of which the first are the tail."""
    kernel = weight.double().flip(0).t()[:, None]
    out = F.conv1d(rows.double().t()[None], kernel, None if bias is None else bias.double(), groups=len(kernel))
    return F.silu(out)[0].t()


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("taps", [2, 4, 8])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_convolution_along_each_path(dtype: torch.dtype, taps: int, bias: bool, device: torch.device) -> None:
    for slots, channels, shape in ((1, 5, "chain"), (7, 40, "chain"), (13, 64, "tree"), (64, 33, "tree")):
        case = Delta(2, dtype=dtype, device=device, seed=slots)
        x, weight, tail = (
            case.floats(2, slots, channels),
            case.floats(taps, channels),
            case.floats(2, taps - 1, channels),
        )
        add = case.floats(channels) if bias else None
        parents = [list(range(-1, slots - 1))] * 2
        seen = chain(slots)
        if shape == "tree":
            seen, parents = tree(slots, 2, case.generator)
        wide = torch.full((2, slots, channels + 3), torch.nan, dtype=dtype, device=device)
        wide[..., 2:-1] = x
        for _ in over_levels(device):
            copy = torch.zeros(2, 3, slots, channels, dtype=dtype, device=device)[:, 1]
            out = ops.short_conv(x, weight, add, tail, seen.to(device), copy)
            assert torch.equal(copy, x)
            assert torch.equal(ops.short_conv(wide[..., 2:-1], weight, add, tail, seen.to(device)), out)
            if shape == "chain":
                assert torch.equal(ops.short_conv(x, weight, add, tail), out)
            for row in range(2):
                for slot in range(slots):
                    path = path_to(parents[row], slot)
                    want = conv_of(
                        torch.cat([tail[row], x[row, path]]).cpu(), weight.cpu(), None if add is None else add.cpu()
                    )
                    got = out[row, slot].cpu().double()
                    torch.testing.assert_close(got, want[-1], rtol=NEAR[dtype][0], atol=NEAR[dtype][1])


def test_a_long_chain(device: torch.device) -> None:
    case = Delta(1, device=device)
    x, weight, tail = case.floats(1, 300, 24), case.floats(4, 24), case.floats(1, 3, 24)
    want = conv_of(torch.cat([tail[0], x[0]]).cpu(), weight.cpu(), None)
    torch.testing.assert_close(ops.short_conv(x, weight, None, tail)[0].cpu().double(), want, rtol=1e-5, atol=1e-5)


def test_it_rounds_before_silu(device: torch.device) -> None:
    x = torch.linspace(-4, 4, 999).bfloat16().view(1, 1, -1).to(device)
    weight = torch.tensor([[1.0078125], [0.0]]).bfloat16().expand(2, 999).contiguous().to(device)
    product = x.float() * weight[0].float()
    got, rounded = ops.short_conv(x, weight, None, torch.zeros_like(x)), F.silu(product.bfloat16().float()).bfloat16()
    assert float((got != rounded).float().mean()) < 0.01
    assert float((got != F.silu(product).bfloat16()).float().mean()) > 0.1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1, 16), (3, 4, 128), (2, 3, 33)], ids=str)
def test_norms_with_a_gate(shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> None:
    rows, heads, size = shape
    case = Delta(dtype=dtype, device=device)
    x, weight = case.floats(*shape), case.floats(size)
    wide = case.floats(rows, heads * size + 8)
    gate = wide[:, 4:-4]
    want = reference.gated_rms_norm(x, gate, weight, 1e-6)
    exact = reference.gated_rms_norm(x.double(), gate.double(), weight.double(), 1e-6)
    for _ in over_levels(device):
        got = ops.gated_rms_norm(x, gate, weight, 1e-6)
        torch.testing.assert_close(got.double(), exact.to(device), rtol=NEAR[dtype][0], atol=NEAR[dtype][1])
        assert float((got != want).float().mean()) < (0.02 if dtype is not torch.float32 else 1)


def test_the_norm_is_transformers() -> None:
    module = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    norm = module.Qwen3NextRMSNormGated(32, eps=1e-5)
    case = Delta()
    nn.init.normal_(norm.weight)
    x, gate = case.floats(6, 32), case.floats(6, 32)
    with torch.no_grad():
        want = norm(x, gate)
    got = ops.gated_rms_norm(x.view(2, 3, 32), gate.view(2, 96), norm.weight.detach(), 1e-5)
    torch.testing.assert_close(got.view(6, 32), want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_commits(dtype: torch.dtype, device: torch.device) -> None:
    """Entries in order, tails that move by fewer or more than they hold, rows that keep nothing, and all else stays."""
    layers, batch, slots, taps = 3, 4, 7, 4
    case = Delta(batch, dtype=dtype, device=device)
    shapes = ((2, 16), (4, 32), (4,))
    blocks = [case.floats(layers, batch, slots, *shape, dtype=torch.float32) for shape in shapes]
    inputs, tail = case.floats(layers, batch, slots, 10), case.floats(layers, batch, taps - 1, 10)
    index = torch.tensor([[0, 2, 3, 6, -1], [-1, 5, 1, -1, -1], [4, -1, 3, -1, -1], [0, 1, -1, -1, -1]], device=device)
    for _ in over_levels(device):
        kept = [torch.full((layers, batch, 9, *shape), 7.0, device=device) for shape in shapes]
        count, moved = torch.full((batch,), 3, dtype=torch.int32, device=device), tail.clone()
        ops.delta_commit(*blocks, inputs, index, *kept, count, moved)
        assert count.tolist() == [4, 0, 1, 2]
        for row, slots_of in enumerate(([0, 2, 3, 6], [], [4], [0, 1])):
            for got, block in zip(kept, blocks, strict=True):
                assert torch.equal(got[:, row, : len(slots_of)], block[:, row, slots_of])
                assert bool((got[:, row, len(slots_of) :] == 7).all())
            want = torch.cat([tail[:, row], inputs[:, row, slots_of]], 1)[:, -3:]
            assert torch.equal(moved[:, row], want)


def _conv(**changes: Any) -> dict[str, Any]:
    return {
        "x": torch.zeros(2, 3, 8),
        "weight": torch.zeros(4, 8),
        "bias": None,
        "tail": torch.zeros(2, 3, 8),
    } | changes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weight": torch.zeros(9, 8)}, "taps T of weight must be 2 to 8, got 9"),
        ({"weight": torch.zeros(4, 7)}, "weight must be of shape [T, C] = [?, 8], got [4, 7]"),
        ({"tail": torch.zeros(2, 4, 8)}, "tail must be of shape [B, T - 1, C] = [2, 3, 8], got [2, 4, 8]"),
        ({"bias": torch.zeros(3)}, "bias must be of shape [C] = [8], got [3]"),
        ({"tail": torch.zeros(2, 3, 8).half()}, "tail must be float32, as x, got float16"),
        ({"block_x": torch.zeros(2, 4, 8)}, "block_x must be of shape [B, S, C] = [2, 3, 8], got [2, 4, 8]"),
        ({"visibility": chain(4)}, "visibility must be of shape [B or 1, S] = [1, 3], got [1, 4]"),
        (
            {"x": torch.zeros(2, 65, 8), "visibility": chain(65)},
            "x must be of at most 64 slots where there is a visibility, got 65",
        ),
    ],
    ids=str,
)
def test_refusals_of_convolutions(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"short_conv: {message}")):
        ops.short_conv(**_conv(**changes))


def test_refusals_of_norms_and_commits() -> None:
    x = torch.zeros(2, 3, 16)
    for gate, weight, message in (
        (torch.zeros(2, 47), torch.zeros(16), "gate must be of shape [M, H * D] = [2, 48], got [2, 47]"),
        (torch.zeros(2, 48), torch.zeros(15), "weight must be of shape [D] = [16], got [15]"),
    ):
        with pytest.raises(ValueError, match=re.escape(f"gated_rms_norm: {message}")):
            ops.gated_rms_norm(x, gate, weight, 1e-6)
    arguments = _commit()
    for place, value, message in (
        (4, torch.tensor([[0, 3]]), "index must hold slots of the block, at most 2, got 3"),
        (5, torch.zeros(1, 1, 1, 1, 16), "kept_k must have room for N = 2 entries, got 1"),
        (9, torch.zeros(1, 1, 3, 4), "tail must be of shape [layers, B, T - 1, C] = [1, 1, ?, 5], got [1, 1, 3, 4]"),
    ):
        with pytest.raises(ValueError, match=re.escape(f"delta_commit: {message}")):
            ops.delta_commit(*arguments[:place], value, *arguments[place + 1 :])


def _commit() -> list[Tensor]:
    block = [torch.zeros(1, 1, 3, 1, 16), torch.zeros(1, 1, 3, 2, 16), torch.zeros(1, 1, 3, 2), torch.zeros(1, 1, 3, 5)]
    kept = [torch.zeros(1, 1, 2, 1, 16), torch.zeros(1, 1, 2, 2, 16), torch.zeros(1, 1, 2, 2)]
    return [*block, torch.tensor([[0, -1]]), *kept, torch.zeros(1, dtype=torch.int32), torch.zeros(1, 1, 3, 5)]


def test_opcheck() -> None:
    own = torch.ops.pydflash
    conv = _conv(visibility=chain(3), block_x=torch.zeros(2, 3, 8))
    torch.library.opcheck(own.short_conv.default, tuple(conv.values()))
    torch.library.opcheck(
        own.gated_rms_norm.default, (torch.randn(2, 3, 16), torch.randn(2, 48), torch.randn(16), 1e-6)
    )
    torch.library.opcheck(own.delta_commit.default, tuple(_commit()))
