"""Every op that a CPU has, with arguments that fit but for up to three: a result or an error, and never a crash.

Run under AddressSanitizer (.ci/sanitize) it also finds what is read or written outside. `--full` runs 20,000 cases.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from pydflash import ops
from pydflash.ops import registry

CASES, FULL = 700, 20_000
REFUSALS = (ValueError, RuntimeError, TypeError, OverflowError, IndexError, AttributeError)
NUMBERS = (-(2**63), -(2**31) - 1, -4, -1, 0, 1, 2, 3, 5, 63, 64, 65, 2**31 - 1, 2**31, 2**32 + 5, 2**63 - 1, 2**70)
REALS = (0.0, -1.0, 1e-6, 0.5, 3.0, 1e30, float("inf"), float("nan"))
DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
)
LIKELY = DTYPES[:3]


class Base:
    """Arguments of each op that fit, of sizes drawn anew."""

    def __init__(self, rng: random.Random) -> None:
        self.rng, self.dtype = rng, rng.choice(LIKELY)
        self.batch, self.slots, self.heads, self.dim = rng.randint(1, 3), rng.randint(1, 6), rng.randint(1, 2), 8
        self.capacity, self.layers, self.width = rng.randint(1, 9), rng.randint(1, 2), rng.randint(1, 20)

    def floats(self, *shape: int) -> Tensor:
        return torch.randn(shape).to(self.dtype)

    def int32(self, most: int, *shape: int) -> Tensor:
        return torch.randint(0, most + 1, shape, dtype=torch.int32)

    def tables(self) -> list[Tensor]:
        return [torch.randn(7, self.dim // 2) for _ in range(2)]

    def block_attention(self) -> list[Any]:
        b, s, h, d, n = self.batch, self.slots, self.heads, self.dim, self.capacity
        blocks = [self.floats(b, h, rows, d) for rows in (n, n, s, s)]
        ints = [self.int32(12, b), torch.randint(0, 2**s, (b, s)), self.int32(s, 1, s)]
        return [self.floats(b, 2 * h, s, d), *blocks, *ints, self.rng.choice([0, 3]), 0.3]

    def cache_append(self) -> list[Any]:
        y, b, h, d = self.layers, self.batch, self.heads, self.dim
        blocks = [self.floats(y, b, h, rows, d) for rows in (self.capacity, self.capacity, self.slots, self.slots)]
        return [*blocks, self.int32(self.slots, b, 4) - 1, self.int32(12, b)]

    def context_append(self) -> list[Any]:
        y, b, h, d, c = self.layers, self.batch, self.heads, self.dim, self.slots
        caches = [self.floats(y, b, h, self.capacity, d) for _ in range(2)]
        kv, numbers = self.floats(b, c, y * 2 * h * d), [self.int32(12, b), self.int32(c, b)]
        return [kv, self.floats(y, d), 1e-6, *self.tables(), *caches, *numbers, d, False, 0.0, True]

    def round_commit(self) -> list[Any]:
        b, s, f = self.batch, self.slots, self.width
        accepted, index = self.int32(s - 1, b), self.int32(s - 1, b, s)
        features = [self.floats(b, s, f) for _ in range(2)]
        state = [torch.randint(0, 9, (b,)), *(self.int32(9, b) for _ in range(3)), torch.zeros(b, s + 1).long()]
        return [
            torch.randint(0, 9, (b, s)),
            index,
            accepted,
            torch.randint(0, 9, (b,)),
            self.int32(1, b),
            *features,
            *state,
        ]

    def block_conv(self) -> list[Any]:
        taps, groups = self.rng.randint(1, 8), self.rng.randint(1, 3)
        channels = groups * self.width
        x = self.floats(self.batch, self.slots, channels)
        return [x, self.floats(taps, channels), self.floats(self.batch, self.slots, taps, groups)]

    def lattice(self, candidates: int) -> list[Tensor]:
        shape = (self.batch, self.slots, candidates)
        square = (candidates,) if self.rng.random() < 0.5 else ()
        return [torch.randint(0, 50, shape), torch.randn(*shape, *square)]

    def path_select(self) -> list[Any]:
        b, s, v, r = self.batch, self.slots, 20 + self.width, self.rng.randint(1, 9)
        books = [self.floats(v, r) for _ in range(2)]
        selector: list[Any] = [self.floats(b, s, r), *books] if self.rng.random() < 0.5 else [None] * 3
        temperature = self.rng.choice([None, 0.0, 0.7, torch.rand(b)])
        numbers = [torch.randint(0, 2**62, (b,)), self.int32(2**31 - 1, b)]
        return [
            self.floats(b, s, v),
            *selector,
            torch.randint(0, v, (b,)),
            temperature,
            *numbers,
            self.rng.randint(1, 9),
            v,
        ]

    def path_tree(self) -> list[Any]:
        candidates, scores = self.lattice(self.rng.randint(2, 6))
        return [
            torch.randint(0, 50, (self.batch,)),
            candidates,
            scores,
            self.rng.randint(1, 2),
            None,
            candidates[:, :1, 0],
        ]

    def path_viterbi(self) -> list[Any]:
        return [*self.lattice(self.rng.randint(1, 6)), None]

    def reject_sample(self) -> list[Any]:
        b, s, v = self.batch, self.slots, 20 + self.width
        q: Any = None if s < 2 else torch.rand(b, s - 1, v)
        if q is not None and self.rng.random() < 0.5:
            q = (torch.randint(0, v, (b, s - 1, 3)), torch.rand(b, s - 1, 3))
        parents = (
            (torch.arange(s, dtype=torch.int32) - 1).expand(b, s).contiguous() if self.rng.random() < 0.5 else None
        )
        law = [self.rng.choice([0.0, 0.8]), self.rng.choice([0, 3]), 0.9, 0.05]
        numbers = [torch.randint(0, 2**62, (b,)), self.int32(2**31 - 1, b)]
        return [self.floats(b, s, v), torch.randint(0, v, (b, s)), parents, q, *law, *numbers, v]

    def apply_penalties(self) -> list[Any]:
        b, s, v = self.batch, self.slots, 20 + self.width
        tables = [self.int32(1, b, v), self.int32(3, b, v), torch.randn(b, v)]
        return [self.floats(b, s, v), torch.randint(-1, v, (b, s)), torch.randint(0, 2**s, (b, s)), *tables,
                *(torch.rand(b) for _ in range(3))]  # fmt: skip

    def add_rms_norm(self) -> list[Any]:
        x = self.floats(self.slots, self.width)
        return [x, self.rng.choice([None, x.clone()]), self.floats(self.width), 1e-6, 0.0, True]

    def delta(self) -> tuple[list[Tensor], list[Tensor], Tensor]:
        """Inputs of a block, buffers of three tensors, and a state."""
        b, s, hk, hv = self.batch, self.slots, self.heads, 2 * self.heads
        inputs = [self.floats(b, s, 2 * hk * 16 + hv * 32), self.floats(b, s, hv), self.floats(b, s, hv)]
        buffer = [torch.randn(b, s, hk, 16), torch.randn(b, s, hv, 32), torch.randn(b, s, hv)]
        return [*inputs, torch.randn(hv), torch.randn(hv)], buffer, torch.randn(b, hv, 16, 32)

    def delta_rule(self) -> list[Any]:
        inputs, buffer, state = self.delta()
        seen = torch.randint(0, 2**self.slots, (self.batch, self.slots))
        block = [t.clone() for t in buffer]
        return [*inputs, state, *buffer, self.int32(self.slots, self.batch), seen, *block, self.rng.random() < 0.5]

    def delta_prompt(self) -> list[Any]:
        inputs, _, state = self.delta()
        return [*inputs, state, self.heads]

    def delta_commit(self) -> list[Any]:
        _, buffer, _ = self.delta()
        block = [t[None].expand(self.layers, *t.shape).clone() for t in buffer]
        inputs, tail = (self.floats(self.layers, self.batch, n, self.width) for n in (self.slots, 3))
        index = self.int32(self.slots, self.batch, self.slots) - 1
        return [*block, inputs, index, *(t.clone() for t in block), self.int32(3, self.batch), tail]

    def short_conv(self) -> list[Any]:
        b, s, c, taps = self.batch, self.slots, self.width, self.rng.randint(2, 8)
        seen = self.rng.choice([None, torch.randint(0, 2**s, (b, s))])
        bias = self.rng.choice([None, self.floats(c)])
        block = self.rng.choice([None, self.floats(b, s, c)])
        return [self.floats(b, s, c), self.floats(taps, c), bias, self.floats(b, taps - 1, c), seen, block]

    def gated_rms_norm(self) -> list[Any]:
        m, h, d = self.batch, self.heads, self.width
        return [self.floats(m, h, d), self.floats(m, h * d), self.floats(d), 1e-6]

    def apply_gate(self) -> list[Any]:
        x = self.floats(self.slots, self.width)
        return [x, x.clone(), self.rng.choice(["gelu_tanh", "sigmoid"])]

    def soft_cap(self) -> list[Any]:
        return [self.floats(self.slots, self.width), 3.0]

    def swiglu(self) -> list[Any]:
        return [self.floats(self.slots, 2 * self.width)]

    def head_norm_rope(self) -> list[Any]:
        b, s, h, d = self.batch, self.slots, self.heads, self.dim
        numbers = [self.int32(12, b), self.int32(s, 1, s)]
        blocks = [self.floats(b, h, s, d) for _ in range(2)]
        weights = [self.floats(d), self.floats(d)]
        return [
            self.floats(b, s, 4 * h * d),
            *weights,
            1e-6,
            *self.tables(),
            *numbers,
            *blocks,
            2 * h,
            d,
            False,
            0.0,
            True,
        ]


def bent_tensor(x: Tensor, rng: random.Random) -> Any:
    """A tensor like x that may not fit."""
    size = rng.randrange(x.dim()) if x.dim() else 0
    ways: list[Callable[[], Any]] = [
        lambda: x[()].sum() if x.is_floating_point() else x.flatten()[:1].sum(),  # no dimensions
        lambda: x[None],
        lambda: x[:0],
        lambda: x.narrow(size, 0, 0) if x.dim() else x,
        lambda: torch.cat([x, x], size) if x.dim() else x,
        lambda: x.to(rng.choice(DTYPES)),
        lambda: x.transpose(0, -1) if x.dim() > 1 else x,
        lambda: x.expand(2, *x.shape),
        lambda: torch.complex(x.float(), x.float()).conj().imag,
        lambda: x.to("meta"),
        lambda: x.flip(0) if x.dim() else x,
        lambda: x.clone().fill_(rng.choice(REALS if x.is_floating_point() else [n for n in NUMBERS if fits(n, x)])),
        lambda: None,
    ]
    return rng.choice(ways)()


def fits(number: int, x: Tensor) -> bool:
    if x.dtype == torch.bool:
        return number in (0, 1)
    limits = torch.iinfo(x.dtype)
    return limits.min <= number <= limits.max


def bent(value: Any, rng: random.Random) -> Any:
    if isinstance(value, Tensor):
        return bent_tensor(value, rng)
    if isinstance(value, tuple):
        return tuple(bent(part, rng) for part in value)
    return rng.choice([*NUMBERS, *REALS, None]) if not isinstance(value, bool) else rng.choice([True, False, None])


def tensors_of(value: Any) -> list[Tensor]:
    return [value] if isinstance(value, Tensor) else [t for t in value or () if isinstance(t, Tensor)]


def run(name: str, seed: int) -> bool:
    """One case; whether it gave a result."""
    rng = random.Random(f"{name} {seed}")
    torch.manual_seed(seed)
    arguments = getattr(Base(rng), name)()
    for _ in range(rng.choice([0, 1, 1, 1, 2, 3])):
        at = rng.randrange(len(arguments))
        try:
            arguments[at] = bent(arguments[at], rng)
        except REFUSALS:
            continue  # torch has no such tensor
    # Results as large as a size that was bent by mistake are not made.
    if any(isinstance(a, int) and 2**20 < a < 2**63 for a in arguments) and name in ("path_select", "head_norm_rope"):
        return False
    with rng.choice([torch.no_grad, torch.inference_mode])():
        try:
            out = getattr(ops, name)(*arguments)
        except REFUSALS:
            return False
    for tensor in [t for part in (out if isinstance(out, tuple) else (out,)) for t in tensors_of(part)]:
        if not tensor.is_meta:
            tensor.sum()  # is read in full
    return True


ON_ALL = sorted(registry.ops(backend="sycl"))


def test_the_fuzz_has_every_op_of_all_backends() -> None:
    assert set(ON_ALL) <= {name for name in dir(Base) if not name.startswith("_")}


@pytest.mark.parametrize("name", ON_ALL)
def test_no_input_crashes(name: str, pytestconfig: pytest.Config) -> None:
    count = (FULL if pytestconfig.getoption("--full") else CASES) // len(ON_ALL)
    results = sum(run(name, seed) for seed in range(count))
    assert 0.05 * count < results < count, "cases must both fit and not fit"
