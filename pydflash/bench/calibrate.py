"""`pydflash calibrate`: what a block costs by its size, what it brings on given prompts, and which size to take."""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..settings import SETTINGS, made_for
from .formulas import break_even, speed_up

if TYPE_CHECKING:
    from ..speculator import Speculator

_EXAMPLE = """example:
  pydflash calibrate smollm2 --drafter ./my-drafter --prompts gsm8k.jsonl -o calibration.json --png calibration.png

Then: pydflash generate smollm2 --drafter ./my-drafter --settings calibration.json "..."
or:   Speculator.from_pretrained(target, drafter, settings="calibration.json")"""


@dataclass(frozen=True, slots=True)
class Row:
    """One way of drafting.

    Attributes:
        slots: Of a round's verified block, the anchor included; the mean where rounds differ.
        round_seconds: Median over prompts of the time of a round.
        acceptance_length: Tokens a round, measured.
        predicted: Speed-up over plain decoding by the formulas, from the full block's acceptance by slot and the
            measured time of a round; None for trees, whose acceptance is not the walk's.
        measured: Tokens per second over plain decoding's, both medians over prompts.
    """

    path: str
    block_size: int
    num_nodes: int | str | None
    slots: float
    round_seconds: float
    acceptance_length: float
    predicted: float | None
    measured: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the command's options on `parser`."""
    parser.epilog = _EXAMPLE
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("target", metavar="TARGET", help="folder or hub id of the target, or smollm2 (the demo's)")
    parser.add_argument("--drafter", required=True, metavar="D", help="folder or hub id of the drafter")
    parser.add_argument("--prompts", nargs="+", required=True, metavar="FILE", help="prompt sets, as for `bench`")
    parser.add_argument("--num-prompts", type=int, default=8, metavar="N", help="first N of each file (%(default)s)")
    parser.add_argument("--max-new-tokens", type=int, default=96, metavar="N", help="of each answer (%(default)s)")
    parser.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy (%(default)s)")
    parser.add_argument("--trees", default="auto,15,31", metavar="N,...", help="sizes of trees, or none (%(default)s)")
    parser.add_argument("--device", help="default: cuda, xpu or cpu, whichever is there first")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="default: the model's own")
    parser.add_argument("-o", "--out", type=Path, default=Path("calibration.json"), metavar="FILE", help="%(default)s")
    parser.add_argument("--png", type=Path, metavar="FILE", help="draw the table; needs matplotlib")


def run(arguments: argparse.Namespace) -> int:
    """The command: measure, show, write."""
    from rich.console import Console
    from rich.progress import Progress

    from ..cli.commands import torch_dtype
    from ..speculator import Speculator
    from ..text import encode
    from .checks import check_outputs, named, parse_trees, read_sets
    from .run import first_turn, machine

    trees = [] if arguments.trees == "none" else parse_trees(arguments.trees)
    for name in ("num_prompts", "max_new_tokens"):
        if getattr(arguments, name) < 1:
            raise ValueError(
                f"calibrate: --{name.replace('_', '-')} must be at least 1, got {getattr(arguments, name)}"
            )
    if not 0 <= arguments.temperature < float("inf"):
        raise ValueError(f"calibrate: --temperature must be a number >= 0, got {arguments.temperature}")
    check_outputs(arguments.out, arguments.png)
    asked = read_sets(named("--prompts", arguments.prompts, lambda path: path.stem, ()), arguments.num_prompts)
    spec = Speculator.from_pretrained(
        arguments.target, arguments.drafter, device=arguments.device, dtype=torch_dtype(arguments.dtype)
    )
    prompts = [
        encode(first_turn(prompt), spec.tokenizer, None, spec.target.vocab_size)
        for found in asked.values()
        for prompt in found
    ]
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("measuring", total=None)

        def advance(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        plain_seconds, rows, acceptance = calibrate(
            spec, prompts, trees, arguments.temperature, arguments.max_new_tokens, advance
        )
    best = max(rows, key=lambda row: row.measured)
    report = {
        "settings": {name: getattr(best, name) for name in SETTINGS} if best.measured > 1 else None,
        "made_for": made_for(spec),
        "machine": machine(spec.target),
        "temperature": arguments.temperature,
        "plain_seconds": plain_seconds,
        "slot_acceptance": acceptance,
        "rows": [asdict(row) for row in rows],
    }
    show(rows, plain_seconds, best)
    from ..checkpoints.files import write_file

    text = json.dumps(report, indent=1) + "\n"
    write_file(arguments.out, lambda part: part.write_text(text, encoding="utf-8"))
    print(f"settings: {arguments.out}")
    if arguments.png:
        draw(rows, acceptance, plain_seconds, arguments.png)
    return 0


def calibrate(
    spec: Speculator,
    prompts: Sequence[Sequence[int]],
    trees: Sequence[int | str],
    temperature: float,
    max_new_tokens: int,
    advance: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[float, list[Row], list[float]]:
    """(seconds of a plain token, a row for each way of drafting, acceptance of the full block's slots).

    Ways are interleaved prompt by prompt, so that drift of the machine hits all alike; times are medians over prompts.
    """
    from ..speculator import Speculator

    if spec.drafter is None:
        raise ValueError("calibrate: the Speculator must have a drafter, got None")
    full = spec.drafter.config.block_size
    sizes = sorted({size for size in (2, 3, 4, 6, 8, 12, 16, 24, 32) if size < full} | {full})
    ways: dict[tuple[str, int, int | str | None], Speculator] = {}
    for size in sizes:
        ways["walk", size, None] = Speculator(spec.target, spec.drafter, spec.tokenizer, block_size=size)
    for nodes in trees:
        ways["tree", full, nodes] = Speculator(spec.target, spec.drafter, spec.tokenizer, path="tree", num_nodes=nodes)
    plain = Speculator(spec.target, None, spec.tokenizer)
    everything: list[Any] = [plain, *ways.values()]
    for one in everything:  # buffers, graphs and caches of the processor
        one.generate(list(prompts[0]), min(8, max_new_tokens), temperature=temperature, seed=0)
    stats: list[list[Any]] = [[] for _ in everything]
    for number, prompt in enumerate(prompts):
        for i, one in enumerate(everything):
            begin = time.perf_counter()
            out = one.generate(list(prompt), max_new_tokens, temperature=temperature, seed=number)
            if out.stats.rounds:
                stats[i].append((out.stats, time.perf_counter() - begin))
            advance(number * len(everything) + i + 1, len(prompts) * len(everything))
    if not all(stats):
        raise ValueError("calibrate: answers must have more than one token, got shorter ones; take other prompts")
    plain_speed, plain_seconds = _speed(stats[0]), _round_seconds(stats[0])
    acceptance = _slot_acceptance(stats[sizes.index(full) + 1])
    rows = []
    for (path, size, num_nodes), found in zip(ways, stats[1:], strict=True):
        seconds = _round_seconds(found)
        rounds = sum(s.rounds for s, _ in found)
        length = sum(s.new_tokens for s, _ in found) / rounds
        expected = 1 + sum(acceptance[: size - 1])
        rows.append(
            Row(
                path,
                size,
                num_nodes,
                1 + sum(sum(s.num_verified) for s, _ in found) / rounds,
                seconds,
                length,
                None if path == "tree" else speed_up(expected, seconds, plain_seconds),
                _speed(found) / plain_speed,
            )
        )
    return plain_seconds, rows, acceptance


def show(rows: Sequence[Row], plain_seconds: float, best: Row) -> None:
    """The table, for people."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"plain decoding: {1e3 * plain_seconds:.2f} ms a token", title_justify="left")
    heads = ("drafts", "slots", "ms a round", "pays from", "tokens a round", "predicted", "measured")
    for head in heads:
        table.add_column(head, justify="left" if head == "drafts" else "right")
    for row in rows:
        table.add_row(
            f"block of {row.block_size}" if row.path == "walk" else f"tree, {row.num_nodes}",
            f"{row.slots:.1f}",
            f"{1e3 * row.round_seconds:.2f}",
            f"{break_even(row.round_seconds, plain_seconds):.2f}",
            f"{row.acceptance_length:.2f}",
            "" if row.predicted is None else f"{row.predicted:.2f}x",
            f"{row.measured:.2f}x",
            style="bold" if row is best else None,
        )
    Console().print(table)
    if best.measured <= 1:
        print("no way of drafting was faster than plain decoding on these prompts")


def draw(rows: Sequence[Row], acceptance: Sequence[float], plain_seconds: float, path: Path) -> None:
    """Cost of a round, acceptance by slot, and speed-up, beside each other; needs matplotlib. Written atomically."""
    from matplotlib.figure import Figure

    from ..checkpoints.files import write_file

    figure = Figure(figsize=(13, 4), dpi=100, layout="constrained")
    cost, slots, gain = figure.subplots(1, 3)
    walks, trees = ([row for row in rows if row.path == kind] for kind in ("walk", "tree"))
    for found, label, mark in ((walks, "walk", "o-"), (trees, "tree", "s")):
        if found:
            cost.plot([row.slots for row in found], [1e3 * row.round_seconds for row in found], mark, label=label)
            gain.plot([row.slots for row in found], [row.measured for row in found], mark, label=f"{label}, measured")
    gain.plot([row.slots for row in walks], [row.predicted for row in walks], "--", label="walk, predicted")
    cost.axhline(1e3 * plain_seconds, color="#444444", linestyle=":", label="plain token")
    gain.axhline(1, color="#444444", linestyle=":", label="plain decoding")
    slots.bar(range(1, len(acceptance) + 1), acceptance)
    cost.set(title="Cost of a round", xlabel="slots", ylabel="ms", ylim=(0, None))
    slots.set(title="Acceptance by slot", xlabel="slot", ylabel="share of rounds that keep it", ylim=(0, 1))
    gain.set(title="Speed-up", xlabel="slots", ylabel="over plain decoding", ylim=(0, None))
    for axes in (cost, gain):
        axes.legend()
    write_file(path, lambda part: figure.savefig(part, format="png"))


def _round_seconds(found: Sequence[tuple[Any, float]]) -> float:
    return statistics.median(stats.decode_seconds / stats.rounds for stats, _ in found)


def _speed(found: Sequence[tuple[Any, float]]) -> float:
    return statistics.median(stats.new_tokens / stats.decode_seconds for stats, _ in found)


def _slot_acceptance(found: Sequence[tuple[Any, float]]) -> list[float]:
    """For each drafting slot, the share of all rounds that drafted it in which it was kept."""
    pairs = [p for stats, _ in found for p in zip(stats.num_accepted, stats.num_drafted, strict=True)]
    deepest = max(drafted for _, drafted in pairs)
    kept = []
    for slot in range(1, deepest + 1):
        rounds = [accepted for accepted, drafted in pairs if drafted >= slot]
        kept.append(sum(accepted >= slot for accepted in rounds) / len(rounds))
    return kept
