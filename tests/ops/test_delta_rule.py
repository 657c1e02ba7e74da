"""delta_rule and delta_prompt against a chain in float64, trees, to the last bit whatever is in a block, commits."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from cpu_levels import over_levels
from delta_cases import CPU, Delta, chain, path_to, tree
from fused_cases import DTYPES
from torch import Tensor

from pydflash import ops
from pydflash.ops import reference, registry


@pytest.fixture(autouse=True)
def _has_the_ops(request: pytest.FixtureRequest) -> None:
    device = request.getfixturevalue("device") if "device" in request.fixturenames else CPU
    if not registry.has("delta_rule", device):
        pytest.skip(f"{device.type} has no kernels of these ops")


SIZES = (  # key heads, value heads, key dim, value dim
    (1, 1, 16, 16),
    (2, 4, 64, 64),
    (1, 3, 48, 80),
    (2, 2, 128, 128),
    (1, 2, 256, 256),
)


def by_tokens(case: Delta, x: Tensor, a: Tensor, b: Tensor, heads: Any, state: Tensor, path: list[int]) -> Tensor:
    """Outputs of the slots of a path, one after the other, in float64; the state goes along."""
    wide = [t[:, path].double() for t in (x, a, b)]
    return reference.delta_prompt(*wide, *(t.double() for t in heads), state, case.key_heads)


def test_the_reference_is_transformers() -> None:
    module = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    case = Delta(dtype=torch.float64, key_dim=32)
    x, a, b = case.slots(7)
    a_log, dt_bias = case.heads()
    state = case.state()
    sizes = [case.key_heads * case.key_dim] * 2 + [case.value_heads * case.value_dim]
    dims = (case.key_dim, case.key_dim, case.value_dim)
    q, k, v = (t.float().unflatten(-1, (-1, d)) for t, d in zip(x.split(sizes, -1), dims, strict=True))
    group = case.value_heads // case.key_heads
    g = -a_log.exp() * torch.nn.functional.softplus(a + dt_bias)
    want, last = module.torch_recurrent_gated_delta_rule(
        q.repeat_interleave(group, 2),
        k.repeat_interleave(group, 2),
        v,
        g=g.float(),
        beta=b.sigmoid().float(),
        initial_state=state.float(),
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    got = reference.delta_prompt(x, a, b, a_log, dt_bias, state, case.key_heads)
    torch.testing.assert_close(got.float(), want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(state.float(), last.float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", ["chain", "tree"])
def test_the_system_is_the_walk(shape: str) -> None:
    case = Delta(dtype=torch.float64, batch=3)
    for slots in (1, 2, 7, 40, 64):
        x, a, b = case.slots(slots)
        seen = chain(slots) if shape == "chain" else tree(slots, 3, case.generator)[0]
        heads, state, found = case.heads(), case.state(), []
        for in_order in (True, False):
            block = case.buffers(slots)
            out = reference.delta_rule(x, a, b, *heads, state.clone(), *case.nothing(), seen, *block, in_order)
            found.append((out, *block))
        for got, want in zip(*found, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-11)


@pytest.mark.grid(4)
@pytest.mark.parametrize("in_order", [True, False], ids=["in order", "at once"])
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_values(dtype: torch.dtype, size: tuple[int, int, int, int], in_order: bool, device: torch.device) -> None:
    """Every slot of a chain and of a tree is what its path alone gives, and the last round's slots are in the state."""
    near = {torch.float32: (2e-5, 2e-5), torch.bfloat16: (2e-2, 2e-2), torch.float16: (3e-3, 3e-3)}[dtype]
    for slots, shape in ((1, "chain"), (8, "chain"), (17, "tree"), (64, "tree")):
        case = Delta(2, *size, dtype=dtype, seed=slots)
        heads, state, before = case.heads(), case.state(), case.slots(5)
        x, a, b = case.slots(slots)
        parents = [list(range(-1, slots - 1))] * 2
        seen = chain(slots)
        if shape == "tree":
            seen, parents = tree(slots, 2, case.generator)
        moved = lambda *tensors: [t.to(device) for t in tensors]  # noqa: E731
        for _ in over_levels(device):
            kept, block, s = moved(*case.nothing()), moved(*case.buffers(5)), state.clone().to(device)
            ops.delta_rule(*moved(*before, *heads), s, *kept, chain(5).to(device), *block, in_order)
            assert torch.equal(s.cpu(), state)  # a block leaves it as it was
            index = torch.tensor([[0, 1, 2, -1, -1], [0, -1, -1, -1, -1]], device=device)
            layer = [t[None] for t in block], [t[None] for t in kept[:3]]
            inputs = before[0].to(device)[None]
            ops.delta_commit(*layer[0], inputs, index, *layer[1], kept[3], inputs[:, :, :3].clone())
            assert kept[3].tolist() == [3, 1]
            block = moved(*case.buffers(slots))
            out = ops.delta_rule(*moved(x, a, b, *heads), s, *kept, seen.to(device), *block, in_order)
            for row, count in enumerate((3, 1)):
                one = slice(row, row + 1)
                start = state[one].double()
                by_tokens(case, *(t[one] for t in before), heads, start, list(range(count)))
                torch.testing.assert_close(s[one].cpu().double(), start, rtol=near[0], atol=near[1])
                for slot in range(slots):
                    path = path_to(parents[row], slot)
                    want = by_tokens(case, *(t[one] for t in (x, a, b)), heads, start.clone(), path)[:, -1]
                    torch.testing.assert_close(out[one, slot].cpu().double(), want, rtol=near[0], atol=near[1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_prompt(dtype: torch.dtype, device: torch.device) -> None:
    """Of any length, in one call or in several."""
    near = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 4e-3}[dtype]
    for size in SIZES[:4]:
        case = Delta(2, *size, dtype=dtype)
        x, a, b = case.slots(150)
        heads, state = case.heads(), case.state()
        want_state = state.double()
        want = by_tokens(case, x, a, b, heads, want_state, list(range(150)))
        for pieces in ((150,), (1, 2, 60, 87)):
            s, outs = state.clone().to(device), []
            for part in zip(*(t.to(device).split(pieces, 1) for t in (x, a, b)), strict=True):
                outs.append(ops.delta_prompt(*part, *(h.to(device) for h in heads), s, case.key_heads))
            torch.testing.assert_close(torch.cat(outs, 1).cpu().double(), want, rtol=near, atol=near)
            torch.testing.assert_close(s.cpu().double(), want_state, rtol=near, atol=near)


@pytest.mark.parametrize("dtype", DTYPES)
def test_in_order_a_slot_depends_on_its_path_alone(dtype: torch.dtype, device: torch.device) -> None:
    """To the last bit: tokens one by one, in chains of any size, with wrong drafts behind, as a branch of a tree."""
    case = Delta(1, 2, 4, 64, 48, dtype=dtype, device=device)
    x, a, b = case.slots(24)
    heads, first = case.heads(), case.state()

    def rounds(sizes: list[int], wrong: int, branches: bool) -> tuple[Tensor, Tensor]:
        """Outputs and the state at the end: blocks of `sizes` right slots, among `wrong` others."""
        state, kept, outs, at = first.clone(), case.nothing(), [], 0
        for size in sizes:
            slots = size + wrong
            path = list(range(0, 2 * size, 2)) if branches and wrong >= size else list(range(size))
            order = torch.zeros(slots, dtype=torch.long)
            order[[s for s in range(slots) if s not in path]] = torch.arange(slots - size) % 24
            order[path] = torch.arange(at, at + size)
            seen = chain(slots) if not branches else _off_the_path(slots, path)
            block = case.buffers(slots)
            out = ops.delta_rule(*(t[:, order] for t in (x, a, b)), *heads, state, *kept, seen.to(device), *block)
            outs.append(out[:, path])
            index = torch.full((1, 8), -1, dtype=torch.int32, device=device)
            index[0, :size] = torch.tensor(path)
            layers = [t[None] for t in block], [t[None] for t in kept[:3]]
            inputs = x[:, order][None]
            ops.delta_commit(*layers[0], inputs, index, *layers[1], kept[3], inputs[:, :, :1].clone())
            at += size
        ops.delta_rule(x[:, :0], a[:, :0], b[:, :0], *heads, state, *kept, chain(0).to(device), *case.buffers(0))
        return torch.cat(outs, 1), state

    for _ in over_levels(device):
        want = rounds([1] * 24, 0, False)
        for sizes, wrong, branches in (([8] * 3, 0, False), ([1, 5, 8, 2, 8], 3, False), ([4] * 6, 5, True)):
            for got, exact in zip(rounds(sizes, wrong, branches), want, strict=True):
                assert torch.equal(got, exact)


def _off_the_path(slots: int, path: list[int]) -> Tensor:
    """Slots of the path go on from each other; every other one is a child of the slot of the path before it."""
    seen = torch.zeros(1, slots, dtype=torch.int64)
    for i in range(slots):
        before = [s for s in path if s < i]
        seen[0, i] = (1 << i) | (int(seen[0, before[-1]]) if before else 0)
    return seen


def test_a_row_does_not_see_the_others(device: torch.device) -> None:
    case = Delta(3, device=device)
    x, a, b = case.slots(6)
    heads, state = case.heads(), case.state()
    block = case.buffers(6)
    together = state.clone()
    out = ops.delta_rule(x, a, b, *heads, together, *case.nothing(), chain(6).to(device), *block)
    one = Delta(1, device=device)
    for row in range(3):
        its, block = slice(row, row + 1), one.buffers(6)
        alone = ops.delta_rule(
            *(t[its] for t in (x, a, b)), *heads, state[its].clone(), *one.nothing(), chain(6).to(device), *block
        )
        assert torch.equal(alone, out[its])


def test_strided_inputs(device: torch.device) -> None:
    """x, a and b are columns of one projection; states, kept entries and blocks are layers of larger buffers."""
    case = Delta(2, device=device)
    x, a, b = case.slots(5)
    wide = torch.full((2, 5, case.channels + 20), torch.nan, device=device)
    views = wide[..., 3 : case.channels + 3], wide[..., case.channels + 5 :][..., :4], wide[..., -5:-1]
    for view, values in zip(views, (x, a, b), strict=True):
        view.copy_(values)
    heads, state = case.heads(), case.state()
    plain, strided = state.clone(), torch.zeros(2, 3, *state.shape[1:], device=device)[:, 1].copy_(state)
    blocks = case.buffers(5), tuple(torch.zeros(2, 3, *t.shape[1:], device=device)[:, 1] for t in case.buffers(5))
    outs = [
        ops.delta_rule(*inputs, *heads, s, *case.nothing(), chain(5).to(device), *block)
        for inputs, s, block in (((x, a, b), plain, blocks[0]), (views, strided, blocks[1]))
    ]
    assert torch.equal(*outs)
    for got, want in zip(*blocks, strict=True):
        assert torch.equal(got, want)


def test_three_hundred_tokens_and_a_thousand_rounds(device: torch.device) -> None:
    """The state after rounds that keep part of their slots is that of plain decoding of the kept tokens."""
    case = Delta(1, 1, 2, 32, 32, device=device)
    heads, state, kept = case.heads(), case.state(), case.nothing()
    want = state.double()
    draw = torch.Generator().manual_seed(1)
    for number in range(1000):
        x, a, b = case.slots(6)
        seen, parents = tree(6, 1, draw)
        path = path_to(parents[0], int(torch.randint(0, 6, (), generator=draw)))
        block = case.buffers(6)
        ops.delta_rule(x, a, b, *heads, state, *kept, seen.to(device), *block, number % 2 == 0)
        index = torch.full((1, 6), -1, dtype=torch.int32, device=device)
        index[0, : len(path)] = torch.tensor(path)
        layers = [t[None] for t in block], [t[None] for t in kept[:3]]
        ops.delta_commit(*layers[0], x[None], index, *layers[1], kept[3], x[None, :, :3].clone())
        by_tokens(case, *(t.cpu() for t in (x, a, b)), [h.cpu() for h in heads], want, path)
    ops.delta_rule(x[:, :0], a[:, :0], b[:, :0], *heads, state, *kept, chain(0).to(device), *case.buffers(0))
    assert float((state.cpu().double() - want).norm() / want.norm()) < 1e-5


def _arguments(case: Delta, slots: int = 4) -> dict[str, Any]:
    x, a, b = case.slots(slots)
    a_log, dt_bias = case.heads()
    kept_k, kept_u, kept_g, kept_count = case.nothing()
    block_k, block_u, block_g = case.buffers(slots)
    return {
        "x": x, "a": a, "b": b, "a_log": a_log, "dt_bias": dt_bias, "state": case.state(), "kept_k": kept_k,
        "kept_u": kept_u, "kept_g": kept_g, "kept_count": kept_count, "visibility": chain(slots), "block_k": block_k,
        "block_u": block_u, "block_g": block_g,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": torch.zeros(2, 4, 100)}, "x must be of shape [B, S, 2 Hk Dk + Hv Dv] = [2, ?, 192], got [2, 4, 100]"),
        ({"a": torch.zeros(2, 4, 3)}, "a must be of shape [B, S, Hv] = [2, 4, 4], got [2, 4, 3]"),
        ({"b": torch.zeros(2, 4, 4).half()}, "b must be float32, as x, got float16"),
        ({"a_log": torch.zeros(3)}, "a_log must be of shape [Hv] = [4], got [3]"),
        ({"dt_bias": torch.zeros(4).double()}, "dt_bias must be float32, got float64"),
        ({"state": torch.zeros(2, 4, 16, 32).bfloat16()}, "state must be float32, got bfloat16"),
        ({"state": torch.zeros(2, 4, 17, 32)}, "Dk and Dv of state must be multiples of 16 up to 256, got 17"),
        ({"state": torch.zeros(2, 3, 16, 32)}, "key heads Hk must divide Hv = 3, got 2"),
        ({"kept_u": torch.zeros(2, 8, 4, 16)}, "kept_u must be of shape [B, N, Hv, Dv] = [2, 8, 4, 32]"),
        ({"kept_count": torch.tensor([9, 0])}, "kept_count[0] must be >= 0 and at most 8, got 9"),
        ({"visibility": torch.ones(3, 4, dtype=torch.long)}, "visibility must be of shape [B or 1, S] = [2, 4]"),
        ({"visibility": torch.ones(1, 4)}, "visibility must be int32 or int64, got torch.float32"),
        ({"block_g": torch.zeros(2, 5, 4)}, "block_g must be of shape [B, N, Hv] = [2, 4, 4], got [2, 5, 4]"),
    ],
    ids=str,
)
def test_refusals(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"delta_rule: {message}")):
        ops.delta_rule(**_arguments(Delta()) | changes)


def test_more_slots_than_bits() -> None:
    arguments = _arguments(Delta(), 65)
    with pytest.raises(ValueError, match=re.escape("delta_rule: x must be of at most 64 slots, got 65")):
        ops.delta_rule(**arguments)


def test_opcheck() -> None:
    arguments = list(_arguments(Delta()).values())
    torch.library.opcheck(torch.ops.pydflash.delta_rule.default, tuple(torch.nan_to_num(t) for t in arguments))
    x, a, b, a_log, dt_bias, state = arguments[:6]
    torch.library.opcheck(torch.ops.pydflash.delta_prompt.default, (x, a, b, a_log, dt_bias, state, 2))


def test_nothing_to_do() -> None:
    """No slots, no rows, an empty prompt."""
    case = Delta(dtype=torch.float32)
    state = case.state()
    before = state.clone()
    x, a, b = case.slots(0)
    out = ops.delta_rule(x, a, b, *case.heads(), state, *case.nothing(), chain(0), *case.buffers(0))
    assert out.shape == (2, 0, 4, 32)
    assert ops.delta_prompt(x, a, b, *case.heads(), state, 2).shape == (2, 0, 4, 32)
    assert torch.equal(state, before)
    assert state.device == CPU
