"""skinny_linear against float64: rows, shapes, gates, biases, strides; the same bits for any number of rows; graphs."""

from __future__ import annotations

import pytest
import torch
from devices import unusable
from matching import assert_matches
from torch import Tensor
from torch.nn import functional as F

from pydflash import ops
from pydflash.ops import backends, reference
from pydflash.ops.native import capsule

DTYPES = (torch.bfloat16, torch.float16)
# in_features and out_features: a small model's layers, edges of every tile, and enough columns to split them
SHAPES = [
    (576, (576, 192, 192)),
    (1536, (576,)),
    (8, (5,)),
    (200, (1, 2, 3)),
    (1032, (333, 77, 1001)),
    (4096, (64, 16)),
    (4096, (1024, 264)),
]
on_cuda = pytest.mark.skipif(bool(unusable("cuda")), reason="needs the cuda backend")


def skinny_linear(
    x: Tensor, weights: list[Tensor], biases: list[Tensor | None] | None = None, gated: bool = False
) -> Tensor:
    """The op where its kernel is; elsewhere the definition, which the same tests hold for."""
    return (ops if x.is_cuda else reference).skinny_linear(x, weights, biases, gated)


def test_without_its_kernel_it_is_refused() -> None:
    x, weights, biases = inputs(3, 64, (16,), torch.bfloat16, torch.device("cpu"))
    for mode in (torch.no_grad, torch.inference_mode):
        with mode(), pytest.raises(RuntimeError, match=r"^skinny_linear: the cpu backend does not have it, only cuda$"):
            ops.skinny_linear(x, weights, biases)


def inputs(
    rows: int, in_features: int, out_features: tuple[int, ...], dtype: torch.dtype, device: torch.device, seed: int = 0
) -> tuple[Tensor, list[Tensor], list[Tensor | None]]:
    """x, the weights and a bias for every other weight."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, in_features, generator=generator).to(device, dtype)
    weights = [torch.randn(n, in_features, generator=generator).div(in_features**0.5) for n in out_features]
    biases = [torch.randn(n, generator=generator).to(device, dtype) for n in out_features]
    held = [None if i % 2 else bias for i, bias in enumerate(biases)]
    return x, [weight.to(device, dtype) for weight in weights], held


def definition(x: Tensor, weights: list[Tensor], biases: list[Tensor | None], gated: bool = False) -> Tensor:
    parts = [
        x.double() @ weight.double().t() + (0 if bias is None else bias.double())
        for weight, bias in zip(weights, biases, strict=True)
    ]
    if not gated:
        return torch.cat(parts, -1)
    gate, up = (part.to(x.dtype) for part in parts)
    return (F.silu(gate) * up).double()


def poison(rows: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
    """The allocator hands the next tensor of this size the memory of this one."""
    torch.full((rows, width), float("nan"), dtype=dtype, device=device)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("in_features", "out_features"), SHAPES)
@pytest.mark.parametrize("rows", [1, 7, 8, 9, 15, 16])
def test_rows_and_shapes(
    rows: int, in_features: int, out_features: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> None:
    x, weights, biases = inputs(rows, in_features, out_features, dtype, device)
    poison(rows, sum(out_features), dtype, device)
    got = skinny_linear(x, weights, biases)
    assert got.shape == (rows, sum(out_features))
    assert_matches(got, definition(x, weights, biases))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("in_features", "width"), [(576, 1536), (200, 101), (4096, 1032), (4096, 8)])
@pytest.mark.parametrize("rows", [1, 8, 16])
def test_gated(rows: int, in_features: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
    """Factors are rounded before they are used, so a sum that rounds differently may move a factor by one step."""
    x, weights, biases = inputs(rows, in_features, (width, width), dtype, device)
    poison(rows, width, dtype, device)
    got = skinny_linear(x, weights, biases, gated=True)
    assert got.shape == (rows, width)
    assert_matches(got, definition(x, weights, biases, gated=True))


@pytest.mark.parametrize("rows", [3, 16])
def test_strided_rows(rows: int, device: torch.device) -> None:
    x, weights, biases = inputs(rows, 1024, (264, 48), torch.bfloat16, device)
    wide = torch.full((rows, 1056), float("nan"), dtype=x.dtype, device=device)
    wide[:, 16:1040] = x
    got = skinny_linear(wide[:, 16:1040], weights, biases)
    assert torch.equal(got, skinny_linear(x, weights, biases))


def test_rows_do_not_touch_each_other(device: torch.device) -> None:
    x, weights, biases = inputs(13, 4096, (264,), torch.bfloat16, device)
    want = skinny_linear(x, weights, biases)
    x[5, 77] = float("nan")
    got = skinny_linear(x, weights, biases)
    assert got[5].isnan().all()
    others = [i for i in range(13) if i != 5]
    assert torch.equal(got[others], want[others])


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(
    ("in_features", "out_features"), [(576, (960, 960)), (4096, (1024, 1024)), (12288, (4096, 4096))]
)
def test_a_row_is_the_same_beside_any_number_of_others(
    in_features: int, out_features: tuple[int, ...], gated: bool, device: torch.device
) -> None:
    """To the last bit, so that a verified block and plain decoding see the same numbers."""
    if device.type == "cpu":
        pytest.skip("the definition is torch's product, which promises nothing of the kind")
    x, weights, biases = inputs(16, in_features, out_features, torch.bfloat16, device)
    want = skinny_linear(x, weights, biases, gated)
    assert_matches(want, definition(x, weights, biases, gated))
    for rows in range(1, 16):
        assert torch.equal(skinny_linear(x[:rows], weights, biases, gated), want[:rows])
    for _ in range(20):
        assert torch.equal(skinny_linear(x, weights, biases, gated), want)


@on_cuda
@pytest.mark.parametrize("width", [264, 77])
@pytest.mark.parametrize("gated", [False, True])
def test_strided_out(width: int, gated: bool) -> None:
    device = torch.device("cuda")
    x, weights, biases = inputs(9, 4096, (width, width), torch.bfloat16, device)
    columns = width if gated else 2 * width
    out = torch.full((10, columns + 5), float("nan"), dtype=x.dtype, device=device)
    module = backends.load("cuda").module
    assert module is not None
    given = [capsule(weight) for weight in weights], [capsule(bias) for bias in biases]
    view = out[:9, 3 : columns + 3]
    module.skinny_linear(capsule(x), *given, gated, capsule(view), torch.cuda.current_stream().cuda_stream, 0)
    assert torch.equal(view, skinny_linear(x, weights, biases, gated))
    view.fill_(float("nan"))
    assert out.isnan().all()


@on_cuda
def test_what_does_not_fit_is_refused() -> None:
    x, weights, _ = inputs(16, 64, (24, 24), torch.bfloat16, torch.device("cuda"))
    cases = [
        (x.float(), [w.float() for w in weights], False, "bfloat16 or float16"),
        (x.repeat(2, 1)[:17], weights, False, "at most 16 rows"),
        (x[:, :60], [w[:, :60].contiguous() for w in weights], False, "multiple of 8"),
        (torch.zeros(4, 68, dtype=x.dtype, device="cuda")[:, 4:], weights, False, "16 bytes"),
        (x, [*weights, *weights], False, "1 to 3"),
        (x, weights[:1], True, "two weights of one size"),
        (x, [weights[0], weights[1][:, :32].contiguous()], False, "weights"),
    ]
    for rows, held, gated, message in cases:
        with pytest.raises(ValueError, match=message):
            skinny_linear(rows, held, None, gated)


@on_cuda
def test_where_it_is_taken() -> None:
    """Qwen3-8B's layers and small ones are; an uneven share for the multiprocessors, float32 and 17 rows are not."""
    x = torch.zeros(16, 4096, dtype=torch.bfloat16, device="cuda")
    wide = torch.zeros(24576, 4096, dtype=torch.bfloat16, device="cuda")
    capable = torch.cuda.get_device_capability() >= (9, 0)
    assert ops.takes_skinny(x[:, :64], [torch.zeros(96, 64, dtype=x.dtype, device="cuda")] * 3) is capable
    assert not ops.takes_skinny(x.repeat(2, 1)[:17], [wide])
    assert not ops.takes_skinny(x.float(), [wide.float()])
    assert not ops.takes_skinny(torch.zeros(8, 68, dtype=x.dtype, device="cuda")[:, 4:], [wide[:, :64].contiguous()])
    if torch.cuda.get_device_properties(0).multi_processor_count == 132 and capable:
        assert ops.takes_skinny(x, [wide[:4096], wide[4096:5120], wide[5120:6144]])
        assert ops.takes_skinny(x, [wide[:12288], wide[12288:]])
        assert not ops.takes_skinny(x, [wide[:10240]])


@on_cuda
def test_chains_in_a_graph() -> None:
    """Each launch may begin while the one before it still runs; none may read what that has not written yet."""
    device = torch.device("cuda")
    layers = [inputs(16, 2048, (2048,), torch.bfloat16, device, seed)[1] for seed in range(24)]
    x = torch.randn(16, 2048, device=device).bfloat16()

    def chain(eager: bool) -> Tensor:
        y = x
        for weights in layers:
            y = skinny_linear(y, weights)
            if eager:
                torch.cuda.synchronize()
        return y

    with torch.inference_mode():
        chain(eager=False)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = chain(eager=False)
        for _ in range(20):
            x.normal_()
            graph.replay()
            assert torch.equal(got, chain(eager=True))
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            on_side = chain(eager=False)
        side.synchronize()
        assert torch.equal(on_side, got)


def test_opcheck(device: torch.device) -> None:
    if device.type != "cuda":
        pytest.skip("needs the kernel")
    x, weights, biases = inputs(3, 64, (16, 16), torch.bfloat16, device)
    for gated in (False, True):
        torch.library.opcheck(torch.ops.pydflash.skinny_linear.default, (x, weights, biases, gated))
