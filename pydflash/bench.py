"""`pydflash bench`: acceptance and speed of drafters over prompt sets, beside plain decoding and other methods."""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

LOOP_TOKENS = 20
LONGEST_PERIOD = 16


def longest_loop(ids: Sequence[int]) -> int:
    """The longest run in which the text repeats what it said 1 to 16 tokens before, in repeated tokens.

    >>> longest_loop([5, 7, 7, 7, 7])
    3
    """
    longest = 0
    for period in range(1, min(LONGEST_PERIOD, len(ids) - 1) + 1):
        run = 0
        for i in range(period, len(ids)):
            run = run + 1 if ids[i] == ids[i - period] else 0
            longest = max(longest, run)
    return longest


@dataclass(slots=True)
class Cell:
    """One method on one prompt set at one temperature.

    Attributes:
        lengths: Acceptance length of each request (1 without drafts).
        accepted, rounds: Pooled over requests.
        slots: Per slot, rounds that kept it and rounds that drafted it.
        loops: Requests whose text degenerates; they count in the speed, and apart in the acceptance.
    """

    method: str
    prompts: str
    temperature: float
    lengths: list[float] = field(default_factory=list)
    looping: list[float] = field(default_factory=list)
    accepted: int = 0
    rounds: int = 0
    slots: list[list[int]] = field(default_factory=list)
    tokens: int = 0
    seconds: float = 0.0

    def add(self, ids: Sequence[int], accepted: Sequence[int], drafted: Sequence[int], seconds: float) -> None:
        if accepted:
            length = sum(accepted) / len(accepted) + 1
            (self.looping if longest_loop(ids) >= LOOP_TOKENS else self.lengths).append(length)
        self.accepted += sum(accepted)
        self.rounds += len(accepted)
        for n, count in zip(accepted, drafted, strict=True):
            while len(self.slots) < count:
                self.slots.append([0, 0])
            for slot in range(count):
                self.slots[slot][1] += 1
                self.slots[slot][0] += slot < n
        self.tokens += len(ids)
        self.seconds += seconds

    def report(self) -> dict[str, Any]:
        """The figures of this cell, with a 95 % bootstrap interval of the per-request mean."""
        from .training.evaluate import bootstrap

        mean = sum(self.lengths) / len(self.lengths) if self.lengths else math.nan
        return {
            "method": self.method,
            "prompts": self.prompts,
            "temperature": self.temperature,
            "requests": len(self.lengths),
            "loops": len(self.looping),
            "acceptance_length": mean,
            "interval": bootstrap(self.lengths),
            "pooled_acceptance_length": 1 + self.accepted / self.rounds if self.rounds else math.nan,
            "slot_acceptance": [kept / drafted for kept, drafted in self.slots],
            "tokens_per_second": self.tokens / self.seconds if self.seconds else math.nan,
            "per_request": self.lengths,
        }


Run = Callable[[list[int], float, int], tuple[list[int], list[int], list[int]]]


def speculator_run(spec: Any, max_new_tokens: int) -> Run:
    """A method that answers token ids with a `Speculator`: new tokens, accepted and drafted counts of each round."""

    def run(ids: list[int], temperature: float, seed: int) -> tuple[list[int], list[int], list[int]]:
        out = spec.generate(ids, max_new_tokens, temperature=temperature, seed=seed)
        return out.token_ids, out.stats.num_accepted, out.stats.num_drafted

    return run


def lookup_run(spec: Any, max_new_tokens: int, draft_tokens: int) -> Run:
    """transformers' prompt-lookup decoding on the same weights; it reports no rounds."""
    import torch

    def run(ids: list[int], temperature: float, seed: int) -> tuple[list[int], list[int], list[int]]:
        torch.manual_seed(seed)
        model = spec.target.model
        options: dict[str, Any] = {"temperature": temperature} if temperature > 0 else {}
        out = model.generate(
            torch.tensor([ids], device=model.device),
            max_new_tokens=max_new_tokens,
            do_sample=temperature > 0,
            prompt_lookup_num_tokens=draft_tokens,
            **options,
        )
        return out[0, len(ids) :].tolist(), [], []

    return run


def transformers_run(spec: Any, max_new_tokens: int) -> Run:
    """transformers' own generate on the same weights."""
    import torch

    def run(ids: list[int], temperature: float, seed: int) -> tuple[list[int], list[int], list[int]]:
        torch.manual_seed(seed)
        model = spec.target.model
        options: dict[str, Any] = {"temperature": temperature} if temperature > 0 else {}
        prompt = torch.tensor([ids], device=model.device)
        out = model.generate(prompt, max_new_tokens=max_new_tokens, do_sample=temperature > 0, **options)
        return out[0, len(ids) :].tolist(), [], []

    return run


def measure(
    methods: dict[str, Run], sets: dict[str, list[list[int]]], temperatures: Sequence[float], progress: Any = None
) -> list[Cell]:
    """Run every method on every prompt, methods interleaved prompt by prompt so that drift hits all alike."""
    cells: list[Cell] = []
    for temperature in temperatures:
        for name, prompts in sets.items():
            row = {method: Cell(method, name, temperature) for method in methods}
            for number, ids in enumerate(prompts):
                for method, run in methods.items():
                    begin = time.perf_counter()
                    tokens, accepted, drafted = run(ids, temperature, number)
                    row[method].add(tokens, accepted, drafted, time.perf_counter() - begin)
                    if progress is not None:
                        progress()
            cells += row.values()
    return cells


def write_json(report: dict[str, Any], path: Path) -> None:
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(report, indent=1) + "\n")
    os.replace(part, path)


def print_table(rows: Sequence[dict[str, Any]], baseline: str) -> None:
    """Acceptance and speed, one row per method, set and temperature; the ratio is to `baseline` in the same run."""
    from rich.console import Console
    from rich.table import Table

    table = Table("T", "prompts", "method", "acceptance", "95 %", "pooled", "loops", "tok/s", f"x {baseline}")
    speed = {(r["prompts"], r["temperature"]): r["tokens_per_second"] for r in rows if r["method"] == baseline}
    for row in rows:
        low, high = row["interval"]
        known = not math.isnan(row["acceptance_length"])
        base = speed.get((row["prompts"], row["temperature"]), math.nan)
        table.add_row(
            f"{row['temperature']:g}",
            row["prompts"],
            row["method"],
            f"{row['acceptance_length']:.2f}" if known else "-",
            f"{low:.2f}-{high:.2f}" if known else "-",
            f"{row['pooled_acceptance_length']:.2f}" if known else "-",
            str(row["loops"]),
            f"{row['tokens_per_second']:.1f}",
            f"{row['tokens_per_second'] / base:.2f}",
        )
    Console(width=120).print(table)


def plot(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Acceptance length by prompt set and per-slot acceptance, as a PNG; needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    drafting = [r for r in rows if r["slot_acceptance"] and max(r["slot_acceptance"]) > 0]
    names = list(dict.fromkeys(r["prompts"] for r in drafting))
    series = list(dict.fromkeys((r["method"], r["temperature"]) for r in drafting))
    figure, (bars, slots) = plt.subplots(1, 2, figsize=(12, 4.5), constrained_layout=True)
    width = 0.8 / max(len(series), 1)
    for i, (method, temperature) in enumerate(series):
        found = {r["prompts"]: r for r in drafting if (r["method"], r["temperature"]) == (method, temperature)}
        heights = [found[n]["acceptance_length"] if n in found else math.nan for n in names]
        label = f"{method}, T = {temperature:g}"
        bars.bar([x + i * width for x in range(len(names))], heights, width, label=label)
        columns = [r["slot_acceptance"] for r in found.values()]
        means = [sum(c) / len(c) for c in zip(*columns, strict=False)]
        slots.plot(range(1, len(means) + 1), means, marker="o", label=label)
    bars.set_xticks([x + 0.4 - width / 2 for x in range(len(names))], names)
    bars.set(title="acceptance length (mean over requests)", ylabel="tokens per round")
    slots.set(title="share of rounds that keep a slot", xlabel="slot", ylim=(0, 1))
    for axis in (bars, slots):
        axis.grid(alpha=0.3, axis="y")
        axis.legend(fontsize=8)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def first_turn(prompt: Any) -> Any:
    """The first question of a prompt, with its system message where it has one."""
    if prompt.system is None:
        return prompt.turns[0]
    return [{"role": "system", "content": prompt.system}, {"role": "user", "content": prompt.turns[0]}]


def _machine(target: Any) -> dict[str, Any]:
    import platform
    from importlib.metadata import version

    import torch

    cpu = next((x.split(":")[1].strip() for x in _cpuinfo() if x.startswith("model name")), platform.processor())
    gpu = torch.cuda.get_device_name(target.device) if target.device.type == "cuda" else None
    return {
        "device": gpu or cpu,
        "dtype": str(target.dtype),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "date": time.strftime("%Y-%m-%d"),
    }


def _cpuinfo() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("target", help="folder or hub id of the target, or 'smollm2'")
    parser.add_argument("--drafter", action="append", required=True, metavar="[NAME=]DRAFTER", help="may be repeated")
    parser.add_argument("--prompts", nargs="+", required=True, metavar="[NAME=]FILE")
    parser.add_argument("--num-prompts", type=int, default=40, help="first N of each file (40)")
    parser.add_argument("--max-new-tokens", type=int, default=192)
    parser.add_argument("--temperatures", default="0,1", help="comma-separated (0,1)")
    parser.add_argument("--block-size", type=int)
    parser.add_argument("--peers", action="store_true", help="also transformers' generate and prompt-lookup decoding")
    parser.add_argument("--device")
    parser.add_argument("--dtype")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--json", type=Path, help="write all figures here")
    parser.add_argument("--png", type=Path, help="draw a picture here")


def run(arguments: argparse.Namespace) -> int:
    """The command: prints the table, warns of degenerate text, writes JSON and picture."""
    from rich.progress import Progress

    from . import Drafter, Speculator
    from .smollm2 import ensure_smollm2
    from .text import encode
    from .training.prompts import read_prompts

    target = ensure_smollm2() if arguments.target == "smollm2" else arguments.target
    plain = Speculator.from_pretrained(
        target, device=arguments.device, dtype=arguments.dtype, backend=arguments.backend
    )
    device, dtype, limit = plain.target.device, plain.target.dtype, arguments.max_new_tokens
    methods: dict[str, Run] = {"plain": speculator_run(plain, limit)}
    for given in arguments.drafter:
        name, _, folder = given.rpartition("=")
        drafter = Drafter.from_pretrained(folder, device=device, dtype=dtype)
        spec = Speculator(
            plain.target, drafter, plain.tokenizer, block_size=arguments.block_size, backend=arguments.backend
        )
        methods[name or Path(folder).name] = speculator_run(spec, limit)
    if arguments.peers:
        methods["transformers"] = transformers_run(plain, limit)
        methods["prompt lookup"] = lookup_run(plain, limit, 10)
    sets = {}
    for given in arguments.prompts:
        name, _, file = given.rpartition("=")
        sets[name or Path(file).stem] = [
            encode(first_turn(prompt), plain.tokenizer, None, plain.target.vocab_size)
            for prompt in read_prompts(file)[: arguments.num_prompts]
        ]
    temperatures = [float(t) for t in arguments.temperatures.split(",")]
    total = len(methods) * len(temperatures) * sum(map(len, sets.values()))
    for warm_up in methods.values():
        warm_up(next(iter(sets.values()))[0], 0.0, 0)
    with Progress(transient=True) as bar:
        task = bar.add_task("answering", total=total)
        cells = measure(methods, sets, temperatures, lambda: bar.advance(task))
    rows = [cell.report() for cell in cells]
    print_table(rows, "plain")
    if loops := sum(row["loops"] for row in rows if row["method"] == "plain"):
        print(f"warning: {loops} plain answers loop (a run of {LOOP_TOKENS} repeated tokens); they are counted apart")
    settings = {k: str(v) if isinstance(v, Path) else v for k, v in vars(arguments).items() if not callable(v)}
    if arguments.json:
        write_json({"machine": _machine(plain.target), "settings": settings, "rows": rows}, arguments.json)
    if arguments.png:
        plot(rows, arguments.png)
    return 0
