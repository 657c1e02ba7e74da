"""A training step of a drafter beside the target's own forward over the same tokens: tokens/s and milliseconds.

    python bench/train_step.py random --attention dense flex --optimizer adamw muon --json bench/results/train_step.json

`random` is a Llama of SmolLM2-135M's shape with random weights; a folder or hub id is run as it is. Records are random
tokens of one length. A step is: target forward with taps (and logits, where its distribution is distilled), drafter
forward and backward over all blocks, clipping, optimizer. The ratio is step time over the time of the target's forward.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from machine import machine

from pydflash import Target
from pydflash.drafter.module import Drafter
from pydflash.training.build import drafter_config, initialise
from pydflash.training.features import compiled_layers
from pydflash.training.objective import ObjectiveConfig
from pydflash.training.trainer import TrainConfig, Trainer


def random_target(device: str, dtype: torch.dtype) -> Target:
    """A Llama of SmolLM2-135M's shape."""
    import transformers

    config = transformers.LlamaConfig(
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        vocab_size=49152,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    return Target(transformers.LlamaForCausalLM(config).to(device, dtype).eval())


def timed(run: Callable[[], object], warm: int, steps: int) -> float:
    """Median milliseconds of single runs, waited for one by one only at their ends."""
    cuda = torch.cuda.is_available()
    for _ in range(warm):
        run()
    times = []
    for _ in range(steps):
        if cuda:
            torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(4):
            run()
        if cuda:
            torch.cuda.synchronize()
        times.append((time.perf_counter() - begin) / 4e-3)
    return statistics.median(times)


def measure(target: Target, args: argparse.Namespace, attention: str, optimizer: str, compiled: bool) -> dict[str, Any]:
    drafter = initialise(Drafter(drafter_config(target, 16))).to(target.device)
    target = Target(target.model, drafter.config.target_layer_ids)
    size, length = args.batch_size, args.length
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(100, target.vocab_size, (size * 8, length), generator=generator)
    records = [(row, length // 5) for row in ids]
    with tempfile.TemporaryDirectory() as out:
        trainer = Trainer(
            drafter,
            target,
            records,
            TrainConfig(out=Path(out), batch_size=size, optimizer=optimizer, precision=args.precision),
            ObjectiveConfig(num_anchors=args.num_anchors, distillation=args.distillation, attention=attention),
        )
        padded = ids[:size].to(target.device)
        keys = list(range(size))
        begin = time.perf_counter()
        with compiled_layers(target.layers if compiled else []):
            trainer._train_step(keys)
            float(next(drafter.parameters()).detach().sum())
            first = time.perf_counter() - begin
            forward = timed(lambda: target.encode(padded, all_logits=False), 2, args.steps)
            step = timed(lambda: trainer._train_step(keys), 3, args.steps)
            if args.profile:
                profile(lambda: trainer._train_step(keys))
    tokens = size * length
    return {
        "attention": attention,
        "optimizer": optimizer,
        "compiled_target": compiled,
        "first_step_s": first,
        "target_forward_ms": forward,
        "step_ms": step,
        "ratio": step / forward,
        "state_tokens_per_second": tokens / step * 1e3,
        "target_tokens_per_second": tokens / forward * 1e3,
        "blocks_per_second": size * args.num_anchors / step * 1e3,
        "peak_gb": torch.cuda.max_memory_allocated() / 1e9 if torch.cuda.is_available() else None,
    }


def profile(run: Callable[[], object]) -> None:
    """Print the costliest kernels of three steps, and how much of the wall time the GPU was busy."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    with record(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        for _ in range(3):
            run()
        torch.cuda.synchronize()
    events = [e for e in found.key_averages() if e.self_device_time_total > 0 and e.device_type.name == "CUDA"]
    total = sum(e.self_device_time_total for e in events)
    print(f"GPU busy {total / 3e3:.1f} ms a step")
    for e in sorted(events, key=lambda e: -e.self_device_time_total)[:28]:
        print(f"{e.self_device_time_total / 3e3:8.2f} ms {e.count // 3:5d}x  {e.key[:110]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("target", help="'random', or a folder or hub id")
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--length", type=int, default=448)
    parser.add_argument("--num-anchors", type=int, default=64)
    parser.add_argument("--distillation", type=float, default=0.5)
    parser.add_argument("--attention", nargs="+", default=["dense"])
    parser.add_argument("--optimizer", nargs="+", default=["adamw"])
    parser.add_argument("--compiled", nargs="+", type=int, default=[1], help="1: target layers compiled, 0: not")
    parser.add_argument("--precision", default="bf16" if torch.cuda.is_available() else "no")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if args.precision == "bf16" else torch.float32
    target = (
        random_target(device, dtype)
        if args.target == "random"
        else Target.from_pretrained(args.target, device=device, dtype=dtype)
    )
    rows = []
    for attention in args.attention:
        for optimizer in args.optimizer:
            for compiled in args.compiled:
                rows.append(measure(target, args, attention, optimizer, bool(compiled)))
                print(json.dumps(rows[-1]), flush=True)
    if args.json:
        settings = {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items()}
        args.json.write_text(json.dumps({"machine": machine(), "settings": settings, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
