"""Checks and times `pydflash train data` on one GPU: flash against dense attention, graphs against eager, tokens/s.

    python bench/train_data_gpu.py TARGET --prompts FILE... [--batches 2048,4096] [--seconds 15] [--json OUT]

The first part stops with an error where two ways that must agree do not; the second prints one line per setting.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from functools import partial
from pathlib import Path

import torch

from pydflash.sampling import SamplingParams
from pydflash.target.batch import BatchForward
from pydflash.target.defaults import GenerationDefaults
from pydflash.target.generic import Target
from pydflash.target.loading import load_tokenizer
from pydflash.training.data import collect_prompts
from pydflash.training.generate import BatchGenerator, BatchRequest, draw
from pydflash.training.prompts import Chat


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target")
    parser.add_argument("--prompts", nargs="+", required=True)
    parser.add_argument("--batches", default="2048,4096")
    parser.add_argument("--attention", default="flash,dense")
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--max-new-tokens", type=int, default=512)
    parser.add_argument("--profile", action="store_true", help="print the kernels of a few steps")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    target = Target.from_pretrained(arguments.target, device="cuda", dtype=torch.bfloat16)
    chat = Chat(load_tokenizer(arguments.target))
    usable = collect_prompts(arguments.prompts, [])
    ids = [x for x in chat.encode([(prompt, ()) for prompt in usable.prompts]) if len(x) <= 320]
    stops = GenerationDefaults(target.generation_config).stop_token_ids
    check_sampling()
    check_attention(target)
    check_graphs(target, ids[:96], stops)
    rows = []
    for attention in arguments.attention.split(","):
        for batch in map(int, arguments.batches.split(",")):
            rows.append(measure(target, ids, stops, batch, attention, arguments))
            print(rows[-1], flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps({"device": torch.cuda.get_device_name(), "rows": rows}, indent=2) + "\n")


def check_sampling() -> None:
    """The same draws as on the CPU, up to rounding at an edge."""
    random = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(512, 49152, generator=random).bfloat16()
    temperature, u = torch.rand(512, generator=random) * 1.5, torch.rand(512, generator=random)
    for law in (SamplingParams(1.0, 0, 1.0, 0.03), SamplingParams(1.0, 0, 0.95), SamplingParams(1.0, 50)):
        want = draw(logits.float(), temperature, u, law)
        got = draw(logits.float().cuda(), temperature.cuda(), u.cuda(), law).cpu()
        different = int((got != want).sum())
        print(f"draw {law}: {different} of 512 differ from the CPU's")
        if different > 8:
            raise SystemExit("draw: must agree with the CPU up to rounding")


def check_attention(target: Target) -> None:
    """Ragged rows, a long one among them: flash and dense logits, relative to their norm."""
    ids = torch.randint(100, 20000, (64, 500), device="cuda", generator=torch.Generator("cuda").manual_seed(0))
    lengths = torch.arange(64, device="cuda") * 7 + 50
    logits = {}
    for attention in ("flash", "dense"):
        forward = BatchForward(target, 64, 520, attention)
        forward.prefill(ids, torch.arange(64, device="cuda"))
        logits[attention] = forward.step(ids.gather(1, lengths[:, None])[:, 0], lengths, 512).float()
    own = torch.stack([target.prefill(row[None, : n + 1], target.new_cache(1, 512)).logits[0, 0] for row, n in
                       zip(ids[:8], lengths[:8].tolist(), strict=True)]).float()  # fmt: skip
    for name, got, want in (
        ("flash against dense", logits["flash"], logits["dense"]),
        ("flash against the model's own", logits["flash"][:8], own),
    ):
        distance = ((got - want).norm(dim=-1) / want.norm(dim=-1)).max().item()
        print(f"{name}: logits differ by {distance:.1e} of their norm")
        if not distance < 0.05:
            raise SystemExit("attention: the difference must stay below 0.05 in bfloat16")


def check_graphs(target: Target, prompts: list[list[int]], stops: list[int]) -> None:
    """Graphs and eager steps run the same kernels at the same shapes, so the texts are equal."""
    texts = []
    for graphs in (True, False):
        found = {}
        generator = BatchGenerator(
            target,
            batch_size=64,
            capacity=400,
            max_new_tokens=64,
            stop_token_ids=stops,
            sampling=SamplingParams(1.0, 0, 1.0, 0.03),
            graphs=graphs,
        )
        waiting = [BatchRequest(i, x, (0.0, 0.8, 1.0)[i % 3], i) for i, x in enumerate(prompts)]
        for responses in generator.run(partial(pop, waiting)):
            found.update({r.request.key: r.ids.tolist() for r in responses})
        texts.append(found)
    equal = sum(texts[0][i] == texts[1][i] for i in texts[0])
    print(f"graphs against eager: {equal} of {len(prompts)} texts equal")
    if equal < 0.9 * len(prompts):
        raise SystemExit("graphs: nine of ten texts at least must be those of eager steps")


def pop(waiting: list[BatchRequest], n: int) -> list[BatchRequest]:
    return [waiting.pop() for _ in range(min(n, len(waiting)))]


def measure(
    target: Target,
    prompts: list[list[int]],
    stops: list[int],
    batch: int,
    attention: str,
    arguments: argparse.Namespace,
) -> dict[str, object]:
    """Useful tokens per second once the batch is mixed: the first third of the time is not counted."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    generator = BatchGenerator(
        target,
        batch_size=batch,
        capacity=320 + arguments.max_new_tokens,
        max_new_tokens=arguments.max_new_tokens,
        stop_token_ids=stops,
        sampling=SamplingParams(1.0, 0, 1.0, 0.03),
        attention=attention,
    )
    count = 0

    def take(n: int) -> list[BatchRequest]:
        nonlocal count
        first, count = count, count + n
        return [BatchRequest(i, prompts[i % len(prompts)], (0.0, 0.8, 1.0)[i % 3], i) for i in range(first, first + n)]

    begun = time.perf_counter()
    marks: list[tuple[float, int, int]] = []
    for looks, _ in enumerate(generator.run(take)):
        now = time.perf_counter() - begun
        if now > arguments.seconds / 3:
            marks.append((now, generator.new_tokens, looks))
        if now > arguments.seconds and len(marks) > 1:
            break
    (t0, n0, k0), (t1, n1, k1) = marks[0], marks[-1]
    if arguments.profile:
        profile(generator)
    return {
        "attention": attention,
        "batch": batch,
        "tokens_per_second": round((n1 - n0) / (t1 - t0)),
        "ms_per_step_with_all": round(1e3 * (t1 - t0) / (k1 - k0) / generator.sync_every, 2),
        "response_length": round(n1 / max(1, count - batch), 1),
        "peak_gb": round(torch.cuda.max_memory_allocated() / 1e9, 1),
    }


def profile(generator: BatchGenerator) -> None:
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        generator._advance()
        torch.cuda.synchronize()
    print(profiler.key_averages().table(sort_by="cuda_time_total", row_limit=25))


if __name__ == "__main__":
    main()
