"""packed_linear: values by hand, every dtype and level against float64, whose rows are alone, and its boundaries."""

from __future__ import annotations

import pytest
import torch
from cpu_levels import over_levels
from fused_cases import DTYPES, normal
from matching import assert_matches
from torch import Tensor

from pydflash import ops
from pydflash.decoder import formats
from pydflash.decoder.formats import PackedLinear, panels_of
from pydflash.ops import reference

CPU = torch.device("cpu")
OWN = (torch.float32, torch.bfloat16)
# Outputs and inputs: of one panel and step, of several, and of neither.
SHAPES = ((32, 64), (40, 96), (33, 70), (1, 1), (2, 3), (96, 576), (65, 129))
ROWS = (1, 2, 3, 8, 15, 16, 17, 31, 32, 33, 40, 64, 65)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return ops.packed_linear(x, panels_of(weight), None, bias, len(weight), str(weight.dtype).removeprefix("torch."))


def layer_of(quantize: str | None, weight: Tensor, bias: Tensor | None = None) -> PackedLinear:
    format = formats.as_it_is(weight.dtype) if quantize is None else formats.of(quantize)
    assert format is not None
    return format.linear(weight, bias)


def arguments_of(layer: PackedLinear) -> tuple[Tensor, Tensor | None, Tensor | None, int, str]:
    return layer.weight, layer.scales, layer.bias, layer.out_features, layer.format.name


@pytest.mark.parametrize("dtype", OWN)
def test_by_hand(dtype: torch.dtype) -> None:
    weight = torch.tensor([[1.0, 2.0, 3.0], [0.5, -1.0, 4.0]], dtype=dtype)
    x = torch.tensor([[1.0, 10.0, 100.0], [2.0, 0.0, -1.0]], dtype=dtype)
    bias = torch.tensor([1.0, -2.0], dtype=dtype)
    for _ in over_levels(CPU):
        assert linear(x, weight, bias).float().tolist() == [[322.0, 388.5 if dtype == OWN[0] else 388.0], [0.0, -5.0]]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", OWN)
def test_every_level_against_float64(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    weight, bias = normal(*shape), normal(shape[0], seed=1)
    for rows in ROWS:
        x = normal(rows, shape[1], seed=2)
        want = x @ weight.t() + bias
        for _ in over_levels(CPU):
            assert_matches(linear(*(t.to(dtype) for t in (x, weight, bias))), want)
        assert_matches(linear(x.to(dtype), weight.to(dtype)), x @ weight.t())


def test_it_rounds_once() -> None:
    """1 + 2^-8 + 2^-8 is the next bfloat16 only where nothing was rounded on the way, not before a bias either."""
    x, weight = torch.tensor([[1.0, 2**-8, 2**-8]]).bfloat16(), torch.ones(1, 3).bfloat16()
    bias = torch.tensor([2**-8]).bfloat16()
    for _ in over_levels(CPU):
        assert linear(x, weight).item() == 1 + 2**-7
        assert linear(x[:, :2], weight[:, :2], bias).item() == 1 + 2**-7


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_int8_is_its_definition(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    layer = layer_of("int8", normal(*shape).to(dtype), normal(shape[0], seed=1).to(dtype))
    for rows in ROWS:
        x = (3 * normal(rows, shape[1], seed=2)).to(dtype)
        want = reference.packed_linear(x.double(), *arguments_of(layer))
        for _ in over_levels(CPU):
            assert_matches(layer(x), want)


def test_int8_by_hand() -> None:
    """Largest magnitudes of 127 make both sides whole: halves go to the even number."""
    weight, x = torch.tensor([[127.0, 2.0, -3.0]]), torch.tensor([[2.5, 3.5, -127.0], [0.0, 0.0, 0.0]])
    layer = layer_of("int8", weight, None)
    for _ in over_levels(CPU):
        assert layer(x).flatten().tolist() == [2 * 127 + 4 * 2 + 127 * 3, 0.0]


@pytest.mark.parametrize("dtype", OWN)
@pytest.mark.parametrize("quantize", [None, "int8"])
def test_rows_are_alone_to_the_last_bit(quantize: str | None, dtype: torch.dtype) -> None:
    layer, x = layer_of(quantize, normal(72, 200).to(dtype), None), normal(65, 200, seed=1).to(dtype)
    for _ in over_levels(CPU):
        each = torch.cat([layer(row[None]) for row in x])
        for rows in ROWS:
            assert torch.equal(layer(x[:rows]), each[:rows])


@pytest.mark.parametrize("quantize", [None, "int8"])
def test_threads_change_nothing(quantize: str | None) -> None:
    """Large enough to be shared out, and more threads than this machine may have cores."""
    before = torch.get_num_threads()
    layer, x = layer_of(quantize, normal(1030, 520).bfloat16(), None), normal(70, 520, seed=1).bfloat16()
    found = []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            found.append(layer(x))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("quantize", [None, "int8"])
def test_what_is_not_finite_stays_in_its_row(quantize: str | None, dtype: torch.dtype) -> None:
    if quantize is None and dtype not in OWN:
        return
    layer, x = layer_of(quantize, normal(33, 70).to(dtype), None), normal(20, 70, seed=1).to(dtype)
    x[3, 5], x[7, 69], x[9] = torch.nan, torch.inf, 0
    for _ in over_levels(CPU):
        out = layer(x)
        assert out[3].isnan().all()
        assert not out[7].isfinite().any()
        assert not out[9].any()
        rest = [i for i in range(20) if i not in (3, 7, 9)]
        assert torch.equal(out[rest], layer(x[rest]))


@pytest.mark.parametrize("largest", [1e-38, 1e-12, 1e30])
def test_int8_at_the_ends_of_the_range(largest: float) -> None:
    x, layer = torch.tensor([[largest, -largest / 2]]), layer_of("int8", torch.eye(2), None)
    want = x if largest > 1e-30 else torch.zeros_like(x)
    for _ in over_levels(CPU):
        assert_matches(layer(x), want.double(), 0.01)


@pytest.mark.parametrize("dtype", OWN)
@pytest.mark.parametrize("quantize", [None, "int8"])
def test_strided_rows(quantize: str | None, dtype: torch.dtype) -> None:
    layer, wide = layer_of(quantize, normal(33, 64).to(dtype), None), normal(40, 64 + 9, seed=1).to(dtype)
    for _ in over_levels(CPU):
        for x in (wide[::2, 3:67], wide[:32, 8:72], wide.t()[:64].t()):
            assert torch.equal(layer(x), layer(x.contiguous()))


def test_sizes_of_nothing() -> None:
    weight = panels_of(torch.zeros(40, 96).bfloat16())
    assert ops.packed_linear(torch.zeros(0, 96).bfloat16(), weight, None, None, 40, "bfloat16").shape == (0, 40)


def test_whole_sums_that_may_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="weight must be of at most 133000 inputs in int8, got 133001"):
        layer_of("int8", torch.ones(1, 133001), None)(torch.ones(1, 133001))
    assert layer_of("int8", torch.ones(1, 133000), None)(torch.ones(1, 133000)).item() == 133000


def test_panels_hold_every_weight_once() -> None:
    for dtype, inputs in ((torch.float32, 1), (torch.bfloat16, 2), (torch.int8, 4)):
        weight = torch.arange(1, 34 * 70 + 1).reshape(34, 70).remainder(127).to(dtype)
        panels = panels_of(weight)
        assert panels.shape == (2, -(-70 // (16 * inputs)), 2, 16, 16, inputs)
        assert panels[1, 0, 0, 2, 1, 0] == weight[33, 2 * inputs]
        assert panels.double().sum() == weight.double().sum()


def test_float64_is_the_definitions() -> None:
    x, weight = normal(3, 20), normal(5, 20, seed=1)
    padded = panels_of(weight.float()).double()
    torch.testing.assert_close(reference.packed_linear(x, padded, None, None, 5, "float32"), x @ weight.t())
    with pytest.raises(ValueError, match=r"^packed_linear: x must be float32, bfloat16 or float16, got float64$"):
        ops.packed_linear(x, padded, None, None, 5, "float32")


@pytest.mark.parametrize("quantize", [None, "int8"])
def test_opcheck(quantize: str | None) -> None:
    layer = layer_of(quantize, normal(34, 70).float(), normal(34, seed=1).float())
    torch.library.opcheck(torch.ops.pydflash.packed_linear.default, (normal(3, 70).float(), *arguments_of(layer)))


BAD = (
    ({"x": torch.zeros(2, 97).bfloat16()}, r"weight must be of as many steps of 32 inputs as K = 97 needs, got 3"),
    ({"x": torch.zeros(96).bfloat16()}, r"x must be of shape \[M, K\]"),
    ({"x": torch.zeros(2, 96)}, r"x must be bfloat16, as the weight's format"),
    ({"x": torch.zeros(2, 96).half()}, r"x must be bfloat16, as the weight's format"),
    ({"format": "float32"}, r"x must be float32, as the weight's format"),
    ({"format": "int4"}, r"format must be float32, bfloat16 or int8, got int4"),
    ({"format": "int8"}, r"scales must be given with int8, got None"),
    ({"format": "int8", "scales": torch.ones(40)}, r"weight must be int8, as its format"),
    ({"weight": panels_of(torch.zeros(40, 48))}, r"weight must be bfloat16, as x, got float32"),
    ({"out_features": 65}, r"weight must be of as many panels of 32 outputs as N = 65 needs, got 2"),
    ({"bias": torch.zeros(40)}, r"bias must be bfloat16, as x, got float32"),
    ({"bias": torch.zeros(41).bfloat16()}, r"bias must be of shape \[N\]"),
    ({"scales": torch.ones(40)}, r"scales must be None with bfloat16, got some"),
    ({"weight": torch.zeros(2, 3, 2, 16, 16, 4).bfloat16()}, r"weight must be of shape \[panels, steps"),
    ({"weight": torch.zeros(2, 3, 2, 16, 16, 4).bfloat16()[..., ::2]}, r"weight must be contiguous"),
)


@pytest.mark.parametrize(("changes", "message"), BAD)
def test_refusals(changes: dict[str, object], message: str) -> None:
    arguments: dict[str, object] = {
        "x": torch.zeros(2, 96).bfloat16(),
        "weight": panels_of(torch.zeros(40, 96).bfloat16()),
        "scales": None,
        "bias": None,
        "out_features": 40,
        "format": "bfloat16",
    }
    with pytest.raises(ValueError, match=f"packed_linear: {message}"):
        ops.packed_linear(**(arguments | changes))  # type: ignore[arg-type]
