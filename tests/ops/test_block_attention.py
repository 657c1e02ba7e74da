"""block_attention: every shape, dtype, visibility and instruction-set level against float64, and its limits.

Every case is poisoned: keys and values that no slot may see are NaN, in the cache and in the block.
"""

from __future__ import annotations

import mmap
import random
from dataclasses import replace

import pytest
import torch
from attention_cases import assert_rows, bidirectional, bits_of, causal, chain, check, make_case, tree
from cpu_levels import over_levels
from devices import unusable
from torch import Tensor

from pydflash import ops
from pydflash.ops import reference

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SLOTS = (1, 2, 3, 7, 8, 16, 17, 33, 64)
DIMS = (8, 16, 64, 80, 96, 128, 256)
GROUPS = (1, 3, 4, 7)
# Around the key tiles (96, 256; 32, 64 on a GPU), the sub-tiles (32), and the chunks of a split context (512, 1024).
LENGTHS = (0, 1, 31, 32, 33, 63, 64, 65, 95, 96, 97, 191, 193, 255, 256, 257, 300, 511, 513, 1023, 1025, 1290)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("slots", SLOTS)
def test_shapes(slots: int, dim: int, dtype: torch.dtype, device: torch.device) -> None:
    rng = random.Random(slots * 1000 + dim)
    group = rng.choice([g for g in GROUPS if g * slots <= 200])
    lengths = rng.sample(LENGTHS if slots * dim <= 4096 else LENGTHS[:16], 3)
    visibility, depths = rng.choice(
        [(bidirectional(slots), chain(slots)), (causal(slots), chain(slots)), tree(slots, rng)]
    )
    window = rng.choice([0, 0, 1, 40, 600])
    check(make_case(slots, dim, group, lengths, visibility, depths, window), dtype, device)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("slots", SLOTS)
def test_shapes_wide(slots: int, dim: int, group: int, dtype: torch.dtype, device: torch.device) -> None:
    rng = random.Random(slots * 1000 + dim * 10 + group)
    for visibility, depths in ((bidirectional(slots), chain(slots)), (causal(slots), chain(slots)), tree(slots, rng)):
        for window in (0, rng.choice([1, 40, 600])):
            case = make_case(slots, dim, group, rng.sample(LENGTHS, 4), visibility, depths, window, kv_heads=1)
            check(case, dtype, device)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", LENGTHS)
def test_context_lengths(length: int, dtype: torch.dtype, device: torch.device) -> None:
    check(make_case(8, 64, 3, [length, 5], causal(8)), dtype, device)


@pytest.mark.parametrize("dtype", DTYPES)
def test_long_context_is_split_and_merged(dtype: torch.dtype, device: torch.device) -> None:
    case = make_case(16, 64, 3, [5000, 17], causal(16), kv_heads=1)
    # One key in the first chunk outweighs all others: a merge that forgot a chunk, or its maximum, shows.
    case.k_cache[0, 0, 3] = case.q[0, 1, 5] * 4
    check(case, dtype, device)


def test_chunks_of_a_very_long_context(device: torch.device) -> None:
    """A CPU's chunks grow with the position: at 16384, 32768, 65536."""
    check(make_case(2, 16, 1, [70000, 16385, 32700], causal(2), kv_heads=1), torch.float32, device)


@pytest.mark.parametrize(
    ("visibility", "depths", "window"),
    [
        (bidirectional(5), chain(5), 0),
        (causal(5), chain(5), 0),
        (causal(5), chain(5), 3),
        (bidirectional(5), chain(5), 2),
        (bits_of([[0], [0, 1], [0, 2], [0, 1, 3], [0, 2, 4]]), torch.tensor([[0, 1, 1, 2, 2]]), 2),
    ],
)
def test_against_explicit_lists_of_keys(visibility: Tensor, depths: Tensor, window: int, device: torch.device) -> None:
    """Softmax over the keys of each slot, written out: independent of the reference."""
    case = make_case(5, 16, 3, [0, 4, 11], visibility, depths, window)
    want = torch.zeros_like(case.q)
    for b in range(3):
        for h in range(6):
            for i, (context, block) in enumerate(case.keys_of(b)):
                keys = torch.cat([case.k_cache[b, h // 3, context], case.k_block[b, h // 3, block]])
                values = torch.cat([case.v_cache[b, h // 3, context], case.v_block[b, h // 3, block]])
                want[b, h, i] = torch.softmax(keys @ case.q[b, h, i] / 4, 0) @ values
    torch.testing.assert_close(reference.block_attention(*case.arguments()), want)
    cast = case.cast(torch.float32, device)
    for level in over_levels(device):
        assert_rows(ops.block_attention(*cast.arguments()), want, level)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [1, 2, 17, 64, 300])
@pytest.mark.parametrize("extra", [0, 5])
def test_ring_cache(window: int, extra: int, dtype: torch.dtype, device: torch.device) -> None:
    """A ring of window - 1 rows or more holds all that a window sees, however often it wrapped."""
    capacity = max(window - 1, 1) + extra
    lengths = [0, 1, capacity - 1, capacity, capacity + 1, 3 * capacity + 7, 10 * capacity + 2]
    check(make_case(8, 64, 3, lengths, causal(8), window=window, capacity=capacity), dtype, device)


@pytest.mark.parametrize("window", [0, 500])
def test_positions_the_ring_has_lost_are_not_seen(window: int, device: torch.device) -> None:
    """Past its capacity a cache holds the newest rows only, each once, whatever the window allows."""
    check(make_case(8, 64, 3, [39, 40, 41, 133, 410], causal(8), window=window, capacity=40), torch.float32, device)


def test_ring_equals_linear_cache(device: torch.device) -> None:
    window, length = 40, 333
    linear = make_case(8, 64, 3, [length], causal(8), window=window)
    ring_k, ring_v = (torch.full_like(linear.k_cache[:, :, :50], torch.nan) for _ in range(2))
    for s in range(length - window + 1, length):
        ring_k[:, :, s % 50], ring_v[:, :, s % 50] = linear.k_cache[:, :, s], linear.v_cache[:, :, s]
    ring = replace(linear, k_cache=ring_k, v_cache=ring_v).cast(torch.float32, device)
    want = ops.block_attention(*linear.cast(torch.float32, device).arguments())
    torch.testing.assert_close(ops.block_attention(*ring.arguments()), want, rtol=1e-5, atol=1e-6)


def test_per_sequence_visibility_and_depths(device: torch.device) -> None:
    rng = random.Random(3)
    trees = [tree(17, rng) for _ in range(3)]
    visibility, depths = (torch.cat(parts) for parts in zip(*trees, strict=True))
    check(make_case(17, 64, 3, [0, 40, 130], visibility, depths, window=60), torch.float32, device)


def test_window_bounds_are_exact(device: torch.device) -> None:
    """Position p sees p - window + 1 .. p and nothing else, in the context and in the block, to both sides."""
    slots, window, length = 4, 3, 6
    eye = torch.eye(16, dtype=torch.float64)
    zeros = torch.zeros(1, 1, slots, 16)
    for level in over_levels(device):
        out = ops.block_attention(
            zeros.to(device),
            torch.zeros(1, 1, length, 16, device=device),
            eye[:length].float()[None, None].to(device),
            zeros.to(device),
            eye[length : length + slots].float()[None, None].to(device),
            torch.tensor([length], device=device),
            bidirectional(slots).to(device),
            chain(slots).to(device),
            window,
        )
        seen = [torch.nonzero(row).flatten().tolist() for row in out[0, 0].cpu()]
        assert seen == [[4, 5, 6, 7, 8], [5, 6, 7, 8, 9], [6, 7, 8, 9], [7, 8, 9]], level


@pytest.mark.parametrize("dtype", DTYPES)
def test_slot_without_keys_gives_zeros(dtype: torch.dtype, device: torch.device) -> None:
    """Slots 2 and 5 see nothing (empty context, no bits): zeros, and their neighbours are as without them."""
    rows = [[0], [0, 1], [], [0, 1, 3], [0, 1, 3, 4], [], [6]]
    case = make_case(7, 64, 3, [0, 0], bits_of(rows))
    check(case, dtype, device)
    out = ops.block_attention(*case.cast(dtype, device).arguments())
    assert out[:, :, [2, 5]].abs().sum() == 0
    everything = replace(case, visibility=bits_of([list(range(i + 1)) for i in range(7)]))
    assert everything.k_block[:, :, 2].isnan().all()  # the poison is really there


@pytest.mark.parametrize("value", [0.0, 0.3, -0.5])
@pytest.mark.parametrize("dtype", DTYPES)
def test_scale(value: float, dtype: torch.dtype, device: torch.device) -> None:
    check(replace(make_case(8, 64, 3, [200], causal(8)), scale=value), dtype, device)


@pytest.mark.parametrize("dtype", DTYPES)
def test_large_scores_do_not_overflow(dtype: torch.dtype, device: torch.device) -> None:
    case = make_case(8, 64, 3, [700], causal(8))
    # A score of 1000 is rounded to 6e-5 in float32, which is what its weight is then off by, and more.
    check(replace(case, scale=30.0), dtype, device, slack=300 if dtype == torch.float32 else 1)


@pytest.mark.parametrize("dtype", DTYPES)
def test_strided_inputs_equal_contiguous_ones(dtype: torch.dtype, device: torch.device) -> None:
    batch, kv_heads, group, slots, dim, rows = 2, 2, 3, 8, 64, 300
    generator = torch.Generator().manual_seed(1)
    fused = torch.randn(batch, slots, (group + 2) * kv_heads * dim + 5, generator=generator).to(device, dtype)
    cache = torch.randn(batch, rows, 2, kv_heads, dim + 1, generator=generator).to(device, dtype)
    heads = fused[..., 5:].unflatten(-1, (-1, dim)).transpose(1, 2)
    q, k_block, v_block = heads.split([group * kv_heads, kv_heads, kv_heads], 1)
    k_cache, v_cache = (cache[:, :, i, :, 1:].transpose(1, 2) for i in range(2))  # odd strides, odd offset
    ints = (torch.tensor([290, 77]), causal(slots), chain(slots))
    ints = tuple(x.to(device) for x in ints)
    strided = (q, k_cache, v_cache, k_block, v_block)
    for level in over_levels(device):
        want = ops.block_attention(*(x.contiguous() for x in strided), *ints)
        assert torch.equal(ops.block_attention(*strided, *ints), want), level
        turned = [x.transpose(-1, -2).contiguous().transpose(-1, -2) for x in strided]
        assert torch.equal(ops.block_attention(*turned, *ints), want), level


def untouched(bytes: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory that a CPU never really takes; a GPU has to have it."""
    if device.type == "cpu":
        private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
        return torch.frombuffer(mmap.mmap(-1, bytes, flags=private), dtype=dtype)
    if torch.cuda.mem_get_info()[0] < 3 * bytes:
        pytest.skip(f"needs {3 * bytes >> 30} GiB on the GPU")
    return torch.empty(bytes // dtype.itemsize, dtype=dtype, device=device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_offsets_beyond_32_bits(dtype: torch.dtype, device: torch.device) -> None:
    """A row stride of 2^21 + 8 over 1025 rows: offsets pass 2^31 elements."""
    rows, stride, dim = 1025, 2**21 + 8, 64
    buffers = [untouched(((rows - 1) * stride + dim) * dtype.itemsize, dtype, device) for _ in range(2)]
    k_cache, v_cache = (x.as_strided((1, 1, rows, dim), (1, 1, stride, 1)) for x in buffers)
    case = make_case(8, dim, 3, [rows], causal(8), capacity=rows, kv_heads=1).cast(dtype, device)
    k_cache.copy_(case.k_cache)
    v_cache.copy_(case.v_cache)
    far = replace(case, k_cache=k_cache, v_cache=v_cache)
    for level in over_levels(device):
        got, want = ops.block_attention(*far.arguments()), ops.block_attention(*case.arguments())
        assert torch.equal(got, want), level


@pytest.mark.parametrize("dtype", DTYPES)
def test_bitwise_the_same_for_any_thread_count_and_batch(dtype: torch.dtype) -> None:
    device = torch.device("cpu")
    case = make_case(16, 64, 3, [3000, 40, 1500], causal(16)).cast(dtype, device)
    alone = replace(
        case,
        **{name: getattr(case, name)[:1] for name in ("q", "k_cache", "v_cache", "k_block", "v_block", "lengths")},
    )
    threads = torch.get_num_threads()
    try:
        for level in over_levels(device):
            outs = []
            for count in (1, 2, 3, 5, 1):
                torch.set_num_threads(count)
                outs.append(ops.block_attention(*case.arguments()))
            assert all(torch.equal(outs[0], out) for out in outs), level
            assert torch.equal(ops.block_attention(*alone.arguments()), outs[0][:1]), level
    finally:
        torch.set_num_threads(threads)


on_cuda = pytest.mark.skipif(bool(unusable("cuda")), reason="needs the cuda backend")


@on_cuda
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [0, 300])
@pytest.mark.parametrize("slots", [1, 16, 64])
def test_one_captured_launch_serves_every_length(slots: int, window: int, dtype: torch.dtype) -> None:
    """Replays over changed inputs, on a side stream, equal eager calls bit for bit, time after time."""
    device, rng = torch.device("cuda"), random.Random(slots)
    lengths = [(0, 5), (1, 700), (64, 65), (1500, 0), (1499, 1023), (1500, 1500)]
    cases = [
        make_case(slots, 128, 4, list(pair), *tree(slots, rng), window, capacity=1500, seed=seed)
        for seed, pair in enumerate(lengths)
    ]
    held = cases[0].cast(dtype, device)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        out = ops.block_attention(*held.arguments())
    for case in cases:
        cast = case.cast(dtype, device)
        for into, x in zip(held.arguments(), cast.arguments(), strict=True):
            if isinstance(into, Tensor):
                into.copy_(x)
        want = ops.block_attention(*cast.arguments())
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                out.fill_(torch.nan)
                graph.replay()
                assert torch.equal(out, want)
        torch.cuda.current_stream().wait_stream(side)
        assert_rows(out, reference.block_attention(*case.arguments()), str(case.lengths))


@on_cuda
@pytest.mark.parametrize("batch", [1, 3, 9, 40])
@pytest.mark.parametrize("slots", [1, 16, 40])
def test_every_number_of_splits(slots: int, batch: int) -> None:
    """The more work there is, the fewer blocks of threads share a context: 16, ..., 1."""
    rng = random.Random(batch)
    lengths = [rng.randrange(2000) for _ in range(batch)]
    check(
        make_case(slots, 128, 4, lengths, causal(slots), kv_heads=8, capacity=2000),
        torch.bfloat16,
        torch.device("cuda"),
    )


@on_cuda
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_second_gpu() -> None:
    case = make_case(16, 128, 4, [700, 3], causal(16))
    first, second = (
        ops.block_attention(*case.cast(torch.bfloat16, torch.device("cuda", i)).arguments()).cpu() for i in range(2)
    )
    assert torch.equal(first, second)


def test_output_is_laid_out_for_the_projection(device: torch.device) -> None:
    case = make_case(8, 64, 3, [30], causal(8)).cast(torch.float32, device)
    out = ops.block_attention(*case.arguments())
    assert out.shape == (1, 6, 8, 64)
    assert out.transpose(1, 2).is_contiguous()


def test_empty_batch(device: torch.device) -> None:
    case = make_case(8, 64, 3, [30], causal(8)).cast(torch.float32, device)
    arguments = [x[:0] if isinstance(x, Tensor) and x.shape[0] == 1 else x for x in case.arguments()]
    arguments[6:8] = case.visibility, case.depths
    assert ops.block_attention(*arguments).shape == (0, 6, 8, 64)


def test_no_context_rows_at_all(device: torch.device) -> None:
    check(make_case(8, 64, 3, [0, 0], causal(8), capacity=0), torch.float32, device)


F32 = torch.float32


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(2, 6, 8, 64, dtype=torch.float64)}, "q must be float32, bfloat16 or float16, got float64"),
        ({"q": torch.zeros(2, 6, 8, 64, dtype=torch.int32)}, "q must be float32, bfloat16 or float16, got int32"),
        ({"k_cache": torch.zeros(2, 2, 9, 64).bfloat16()}, "k_cache must be float32, as q, got bfloat16"),
        ({"v_block": torch.zeros(2, 2, 8, 64).half()}, "v_block must be float32, as q, got float16"),
        ({"q": torch.zeros(2, 6, 64)}, r"q must be of shape \[B, Hq, S, D\] = \[\?, \?, \?, \?\], got \[2, 6, 64\]"),
        (
            {"k_cache": torch.zeros(2, 2, 9, 32)},
            r"k_cache must be of shape \[B, Hkv, L, D\] = \[2, \?, \?, 64\], got \[2, 2, 9, 32\]",
        ),
        (
            {"v_cache": torch.zeros(2, 2, 8, 64)},
            r"v_cache must be of shape \[B, Hkv, L, D\] = \[2, 2, 9, 64\], got \[2, 2, 8, 64\]",
        ),
        (
            {"k_block": torch.zeros(2, 3, 8, 64)},
            r"k_block must be of shape \[B, Hkv, S, D\] = \[2, 2, 8, 64\], got \[2, 3, 8, 64\]",
        ),
        ({"lengths": torch.zeros(3, dtype=torch.int32)}, r"lengths must be of shape \[B\] = \[2\], got \[3\]"),
        (
            {"visibility": torch.zeros(3, 8, dtype=torch.int64)},
            r"visibility must be of shape \[B or 1, S\] = \[2, 8\], got \[3, 8\]",
        ),
        (
            {"depths": torch.zeros(1, 7, dtype=torch.int32)},
            r"depths must be of shape \[B or 1, S\] = \[1, 8\], got \[1, 7\]",
        ),
        ({"q": torch.zeros(2, 5, 8, 64)}, "Hq must be a multiple of Hkv = 2, got 5"),
        ({"window": -1}, r"window must be >= 0 \(0 = none\) and below 2\^31, got -1"),
    ],
)
def test_wrong_arguments_are_named(change: dict, message: str, device: torch.device) -> None:
    case = make_case(8, 64, 3, [5, 9], causal(8), capacity=9).cast(F32, device)
    moved = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in change.items()}
    with pytest.raises(ValueError, match=f"^block_attention: {message}$"):
        ops.block_attention(*replace(case, **moved).arguments())


def test_mixed_devices_are_refused(device: torch.device) -> None:
    if device.type == "cpu":
        pytest.skip("needs a second device")
    case = make_case(8, 64, 3, [5], causal(8)).cast(F32, device)
    with pytest.raises(ValueError, match=r"^block_attention: all tensors must be on cuda:0, got one on cpu$"):
        ops.block_attention(*replace(case, k_cache=case.k_cache.cpu()).arguments())


@pytest.mark.parametrize(
    ("slots", "dim", "message"),
    [
        (65, 64, r"slots S must be 1 to 64, got 65"),
        (8, 12, r"head_dim D must be a multiple of 8 from 8 to 256, got 12"),
        (8, 264, r"head_dim D must be a multiple of 8 from 8 to 256, got 264"),
        (8, 512, r"head_dim D must be a multiple of 8 from 8 to 256, got 512"),
    ],
)
def test_sizes_beyond_the_limits_are_refused(slots: int, dim: int, message: str, device: torch.device) -> None:
    case = make_case(slots, dim, 1, [5], bidirectional(slots)).cast(F32, device)
    with pytest.raises(ValueError, match=f"^block_attention: {message}$"):
        ops.block_attention(*case.arguments())


def test_opcheck(device: torch.device) -> None:
    case = make_case(8, 64, 3, [5, 9], causal(8)).cast(F32, device)
    arguments = (*case.arguments()[:-1], 0.125)
    torch.library.opcheck(torch.ops.pydflash.block_attention.default, arguments)
