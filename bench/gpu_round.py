"""What a round takes on a GPU, against the bytes it must read and against the official loop.

    python bench/gpu_round.py --json bench/results/gpu_round.json

Random weights at the shapes of Qwen3-8B and 32B with DFlash (block 16) and DFlash 2 (block 8) drafters, bfloat16. The
context is filled with random keys and values: what a round takes does not depend on what is in them. All figures
are medians over graph replays, in one process; "floor" is the bytes of weights and context over the bandwidth of a
large copy in the same process. "linears" are the round's linear layers alone, replayed with the same number of rows.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from gpu_time import copy_bandwidth, graph_ms, replay_ms
from machine import machine
from rich.console import Console
from rich.table import Table

from pydflash import Drafter, DrafterConfig, Target
from pydflash.bench.methods import Ends, official_method
from pydflash.decoder.linear import Projection
from pydflash.rounds import round as steps
from pydflash.rounds.device_round import DeviceRounds
from pydflash.rounds.paths import Paths
from pydflash.rounds.round import Parts
from pydflash.target.fused import FusedTarget


class Shape(NamedTuple):
    hidden: int
    intermediate: int
    layers: int
    heads: int
    taps: tuple[int, ...]


SHAPES = {
    "8b": Shape(4096, 12288, 36, 32, (1, 9, 17, 25, 33)),
    "32b": Shape(5120, 25600, 64, 64, (1, 16, 31, 46, 61)),
}
VOCAB, KV_HEADS, HEAD_DIM = 151936, 8, 128
BLOCK = {1: 16, 2: 8}


def build_target(shape: Shape) -> Target:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        max_position_embeddings=40960,
        tie_word_embeddings=False,
        dtype=torch.bfloat16,
    )
    config.eos_token_id = config.bos_token_id = None
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = Qwen3ForCausalLM(config).eval()
    torch.set_default_dtype(torch.float32)
    return Target(model, shape.taps)


def build_drafter(shape: Shape, version: int) -> Drafter:
    nested: dict[str, Any] = {
        "block_size": BLOCK[version],
        "mask_token_id": VOCAB - 1,
        "target_layer_ids": list(shape.taps),
    }
    if version == 2:
        nested |= {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 256, "selector_top_k": 16}
    raw = {
        "architectures": ["DFlashDraftModel" if version == 1 else "DFlash2DraftModel"],
        "model_type": "qwen3",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": 5,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "vocab_size": VOCAB,
        "max_position_embeddings": 40960,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        "layer_types": ["full_attention"] * 5,
        "sliding_window": None,
        "use_sliding_window": False,
        "num_target_layers": shape.layers,
        "dflash_config": nested,
    }
    with torch.device("cuda"):
        drafter = Drafter(DrafterConfig.from_dict(raw)).to(torch.bfloat16).eval()
    if drafter.candidate_selector is not None:
        torch.nn.init.normal_(drafter.candidate_selector.successor_codebook, 0, 0.02)
    return drafter


def fill(rounds: DeviceRounds, context: int) -> None:
    rows = rounds.rows
    for cache in (rows.cache, rows.context):
        if cache is not None:
            with torch.inference_mode():
                for store in cache.stores:
                    for layer in (*store.k, *store.v):
                        layer.normal_()
                cache.lengths.fill_(context)
    with torch.inference_mode():
        rows.starts.fill_(context)
        rows.active.fill_(1)
        rows.sampling.seeds.copy_(torch.arange(rounds.batch))


def linears_of(fast: FusedTarget, drafter: Drafter | None, rows: int) -> Callable[[], Any]:
    """All linear layers of a round on `rows` rows, the head included."""
    groups: list[Projection] = []

    def add(decoder: Any) -> None:
        for layer in decoder.layers:
            convs = [a.convolution for a in (layer.around_mixer, layer.around_mlp)]
            attention, mlp = layer.mixer, layer.mlp
            groups.extend((attention.qkv, attention.output, mlp.gate_up, mlp.down))
            groups.extend(conv.deltas for conv in convs if conv is not None)

    head = Projection((fast.target.head.weight,), (None,))
    add(fast.recognised.decoder)
    groups.append(head)
    if drafter is not None:
        with torch.no_grad():
            own = drafter.decoder()
        assert own is not None
        add(own.decoder)
        groups += [own.features, head]
    widths = {projection.weights[0].shape[1] for projection in groups}
    inputs = {width: torch.randn(rows, width, dtype=torch.bfloat16, device="cuda") for width in widths}
    return lambda: [projection(inputs[projection.weights[0].shape[1]]) for projection in groups]


def nbytes(*modules: torch.nn.Module) -> int:
    return sum(p.nbytes for module in modules for p in module.parameters())


def measure(
    fast: FusedTarget, drafter: Drafter | None, paths: Paths, batch: int, context: int, bandwidth: float, **options: Any
) -> dict[str, Any]:
    size = options["block_size"]
    parts = Parts(fast, drafter, paths, size if drafter is not None else 1, draft_sampling=False)
    rounds = DeviceRounds(parts, batch, context + 512)
    fill(rounds, context)
    slots = paths.rows if drafter is not None else 1
    whole = replay_ms(rounds.program[0])
    fill(rounds, context)
    model, cache = fast.target.model, rounds.rows.cache
    kept = cache.stores[0].k[:, :, :, :context].numel() * 2 * 2
    read = nbytes(model) - model.get_input_embeddings().weight.nbytes + kept
    found = {
        "batch": batch,
        "context": context,
        "slots": slots,
        "path": paths.path if drafter is not None else "plain",
        "drafter": "none" if drafter is None else f"v{drafter.config.version} b{size}",
        "how": rounds.how,
        "target": fast.form,
        "round_ms": whole,
    }
    tokens = torch.ones(batch, slots, dtype=torch.int64, device="cuda")
    found["verify_ms"] = graph_ms(lambda: fast.verify(tokens, cache))
    if drafter is not None:
        found["draft_ms"] = graph_ms(partial(steps.draft, parts, rounds.rows, size))
        fill(rounds, context)
        read += nbytes(drafter) + model.get_output_embeddings().weight.nbytes
        if drafter.candidate_selector is not None:  # of the codebooks only some rows are read
            selector = drafter.candidate_selector
            read -= selector.predecessor_codebook.nbytes + selector.successor_codebook.nbytes
        own = rounds.rows.context
        assert own is not None
        kept += own.stores[0].k[:, :, :, :context].numel() * 2 * 2
        read += own.stores[0].k[:, :, :, :context].numel() * 2 * 2
    found["rest_ms"] = whole - found["verify_ms"] - found.get("draft_ms", 0.0)
    found["bytes"] = read
    found["floor_ms"] = read / bandwidth / 1e6
    found["linears_ms"] = graph_ms(linears_of(fast, drafter, batch * slots))
    found["times_floor"] = whole / found["floor_ms"]
    found["times_linears"] = whole / (found["linears_ms"] + kept / bandwidth / 1e6)
    del rounds
    gc.collect()
    torch.cuda.empty_cache()
    return found


def official_ms(target: Target, drafter: Drafter, context: int) -> float | str:
    """Milliseconds of a round of the official package's loop on the same weights, or why it cannot run."""
    try:
        answer = official_method(target, drafter, Ends([], [], None))
    except (ImportError, ValueError) as error:
        return str(error)
    ids = torch.randint(0, VOCAB - 1, (context,)).tolist()
    torch.backends.cuda.enable_cudnn_sdp(False)  # it plans anew for every length, which would cost 100 ms a round
    spent = []
    for limit in (8, 8, 40):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        rounds = len(answer(ids, 0.0, 0, limit).accepted)
        torch.cuda.synchronize()
        spent.append((rounds, time.perf_counter() - begin))
    (few, short), (many, long) = spent[1:]
    return (long - short) / (many - few) * 1e3


class Rows(list[dict[str, Any]]):
    """Rows that are printed as they come."""

    def append(self, row: dict[str, Any]) -> None:
        super().append(row)
        cells = {key: round(value, 3) if isinstance(value, float) else value for key, value in row.items()}
        print({key: value for key, value in cells.items() if key not in ("target", "bytes")}, flush=True)


def run(name: str, args: argparse.Namespace, bandwidth: float) -> Rows:
    shape, rows = SHAPES[name], Rows()
    began = time.perf_counter()
    target = build_target(shape)
    fast = FusedTarget(target)
    built = time.perf_counter() - began
    cases = [(1, 512), (1, 4096), (1, 32768), (8, 512), (8, 4096), (8, 32768), (32, 512), (32, 4096)]
    cases = [case for case in cases if case[0] in args.batch and case[1] in args.context]
    for batch, context in cases:
        plain = measure(fast, None, Paths("walk", None, 0, 1), batch, context, bandwidth, block_size=1)
        rows.append({"shape": name} | plain)
    for version in args.version:
        drafter = build_drafter(shape, version)
        size = BLOCK[version]
        for batch, context in cases:
            paths = Paths("walk", None, size - 1, drafter.config.num_candidates)
            before = time.perf_counter()
            row = measure(fast, drafter, paths, batch, context, bandwidth, block_size=size)
            row["measure_seconds"] = time.perf_counter() - before
            if (batch, context) == (1, 512) and args.official:
                row["official_ms"] = official_ms(target, drafter, context)
            rows.append({"shape": name, "start_seconds": built} | row)
        if version == 2 and 1 in args.batch and 512 in args.context:
            for nodes in (31, 63):
                paths = Paths("tree", nodes, size - 1, drafter.config.num_candidates)
                rows.append({"shape": name} | measure(fast, drafter, paths, 1, 512, bandwidth, block_size=size))
        del drafter
        gc.collect()
        torch.cuda.empty_cache()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--version", nargs="+", type=int, default=[1, 2], help="of the drafter (default: both)")
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--context", nargs="+", type=int, default=[512, 4096, 32768])
    parser.add_argument("--no-official", dest="official", action="store_false")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    bandwidth = copy_bandwidth()
    rows: list[dict[str, Any]] = []
    for name in args.shape:
        rows += run(name, args, bandwidth)
        gc.collect()
        torch.cuda.empty_cache()
    columns = ("shape", "drafter", "path", "slots", "batch", "context", "round_ms", "draft_ms", "verify_ms", "rest_ms")
    columns += ("linears_ms", "floor_ms", "times_floor", "times_linears", "official_ms")
    table = Table(*columns, title=f"copy bandwidth {bandwidth:.0f} GB/s")
    for row in rows:
        cells = [row.get(column, "") for column in columns]
        table.add_row(*[f"{cell:.3f}" if isinstance(cell, float) else str(cell) for cell in cells])
    Console(width=200).print(table)
    if args.json:
        report = {"machine": machine(), "copy_gb_s_gpu": bandwidth, "dtype": "bfloat16", "rows": rows}
        args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
