"""`pydflash bench`: acceptance and speed of drafters over prompt sets, beside plain decoding and other methods."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from .checks import PEERS, check_numbers, check_outputs, named, parse_peers, parse_temperatures, parse_trees, read_sets
from .figures import ALL, LOOP_TOKENS, Answered, Cell, comparisons, longest_loop, with_totals

if TYPE_CHECKING:
    from ..target.generic import Target
    from ..training.prompts import Prompt
    from .methods import DraftPath, Method

__all__ = ["LOOP_TOKENS", "add_arguments", "first_turn", "longest_loop", "measure", "run"]

PLAIN = "plain"
_WARM_UP = 8  # tokens
_EXAMPLE = """examples:
  pydflash bench smollm2 --drafter ./my-drafter --prompts gsm8k.jsonl --num-prompts 20
  pydflash bench Qwen/Qwen3-8B --drafter new=./my-drafter --drafter z-lab/Qwen3-8B-DFlash-b16 \\
      --prompts gsm8k.jsonl chat=mt_bench.jsonl --temperatures 0,0.7 --peers --json bench.json --png bench.png
  pydflash bench smollm2 --drafter ./my-drafter --prompts gsm8k.jsonl --trees 15,31,63,auto --png trees.png

Every method answers every prompt in turn, on the same target weights. Numbers in brackets are 95 % intervals over
prompts. Answers that loop are counted apart. Ctrl-C shows and writes what there is so far."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the command's options on `parser`."""
    parser.epilog = _EXAMPLE
    parser.add_argument("target", metavar="TARGET", help="folder or hub id of the target, or smollm2 (the demo's)")
    parser.add_argument(
        "--drafter",
        action="append",
        required=True,
        metavar="[NAME=]D",
        help="folder or hub id of a drafter; may be repeated, the others are then compared with the first",
    )
    parser.add_argument(
        "--prompts",
        nargs="+",
        required=True,
        metavar="[NAME=]FILE",
        help="prompt sets: .txt, .jsonl, .json or .parquet, as for `train data`; the first turn of each is asked",
    )
    parser.add_argument("--num-prompts", type=int, default=40, metavar="N", help="first N of each file (%(default)s)")
    parser.add_argument(
        "--max-new-tokens", type=int, default=192, metavar="N", help="longest answer in tokens (%(default)s)"
    )
    parser.add_argument(
        "--temperatures", default="0,1", metavar="T,...", help="0 is greedy; no top-k, top-p and min-p (%(default)s)"
    )
    parser.add_argument("--block-size", type=int, metavar="B", help="anchor + drafts; default: each drafter's own")
    parser.add_argument(
        "--draft-sampling",
        choices=("auto", "on", "off"),
        default="auto",
        help="at T > 0, sample the drafts and accept them with the drafter's law (on), or take the best ones (off); "
        "auto samples those of DFlash 2",
    )
    parser.add_argument(
        "--trees",
        metavar="N,...",
        help="also each drafter with trees of N drafts, its most probable ones, verified in one forward: numbers from "
        "1 to 63, and auto, which chooses the number in every round",
    )
    parser.add_argument(
        "--viterbi", action="store_true", help="also each drafter with its most probable path instead of the walk"
    )
    parser.add_argument(
        "--argmax",
        action="store_true",
        help="also each DFlash 2 drafter without its selector: the best token of every slot; with --trees, also trees "
        "over its independent slots",
    )
    parser.add_argument(
        "--peers",
        nargs="?",
        const="all",
        metavar="LIST",
        help=f"also other methods on the same weights: {', '.join(PEERS)} (comma-separated; an error where one is "
        "missing), or without LIST all that are there",
    )
    parser.add_argument("--device", metavar="DEV", help="cpu, cuda, cuda:1, xpu; default: the best there is")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="default: the target's own")
    parser.add_argument(
        "--backend",
        choices=("auto", "native", "reference"),
        default="auto",
        help="compiled ops, or plain torch (%(default)s)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures here, those of each answer too")
    parser.add_argument("--png", type=Path, metavar="FILE", help="draw a picture here (needs matplotlib)")


def run(arguments: argparse.Namespace) -> int:
    """The command: prints the tables, warns of degenerate text, writes JSON and picture.

    Returns: 0, or 130 where Ctrl-C ended the measurement; what was measured is shown and written all the same.

    Raises: ValueError for arguments, before anything is loaded where it can be seen then.
    """
    from rich.console import Console
    from rich.progress import Progress

    from ..cli.commands import check_sources

    temperatures = parse_temperatures(arguments.temperatures)
    peers, trees = parse_peers(arguments.peers), parse_trees(arguments.trees)
    sources = named("--drafter", arguments.drafter, lambda path: path.name, (PLAIN, "transformers", "prompt lookup"))
    files = named("--prompts", arguments.prompts, lambda path: path.stem, (ALL,))
    check_numbers(arguments)
    check_outputs(arguments.json, arguments.png)
    target_source = {} if arguments.target == "smollm2" else {"TARGET": arguments.target}
    check_sources(**target_source, **{f"drafter {name}": source for name, source in sources.items()})
    asked = read_sets(files, arguments.num_prompts)

    methods, paths, sets, missing, target = _prepare(arguments, sources, asked, peers, trees)
    for name, reason in missing.items():
        print(f"not measured: {name}: {reason}")
    cells: list[Cell] = []
    failure, code = None, 0
    total = len(methods) * len(temperatures) * sum(map(len, sets.values()))
    try:
        with Progress(console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task("answering", total=total)
            measure(methods, sets, temperatures, arguments.max_new_tokens, cells, lambda: bar.advance(task))
    except KeyboardInterrupt:
        code = 130
    except Exception as error:  # hours of answers must not be lost with it
        failure, code = error, 2
    report = {"machine": machine(target), "complete": code == 0, "missing": missing}
    _report(arguments, cells, next(iter(sources)), paths, report)
    if failure is not None:
        raise failure
    return code


def measure(
    methods: dict[str, Method],
    sets: dict[str, list[list[int]]],
    temperatures: Sequence[float],
    max_new_tokens: int,
    cells: list[Cell],
    progress: Callable[[], None] | None = None,
) -> None:
    """Run every method on every prompt into `cells`, which hold what there is so far when it is broken off.

    Methods are interleaved prompt by prompt, so that drift of the machine hits all alike. The seed is the prompt's
    number. sets: token ids by name. progress: called after each answer.
    """
    for temperature in temperatures:
        for name, prompts in sets.items():
            row = {method: Cell(method, name, temperature) for method in methods}
            cells += row.values()
            for number, ids in enumerate(prompts):
                for method, answer in methods.items():
                    begin = time.perf_counter()
                    out = answer(ids, temperature, number, max_new_tokens)
                    seconds = time.perf_counter() - begin
                    row[method].answers.append(
                        Answered(
                            (name, number),
                            len(out.ids),
                            seconds,
                            tuple(out.accepted),
                            tuple(out.drafted),
                            tuple(out.verified),
                            longest_loop(out.ids),
                        )
                    )
                    if progress is not None:
                        progress()


def first_turn(prompt: Prompt) -> Any:
    """The first question of a prompt, with its system message where it has one."""
    if prompt.system is None:
        return prompt.turns[0]
    return [{"role": "system", "content": prompt.system}, {"role": "user", "content": prompt.turns[0]}]


# --- the measurement --------------------------------------------------------------------------------------------------


def _prepare(
    arguments: argparse.Namespace,
    sources: dict[str, str],
    asked: dict[str, list[Prompt]],
    peers: list[str] | None,
    trees: Sequence[int | str],
) -> tuple[dict[str, Method], dict[str, DraftPath], dict[str, list[list[int]]], dict[str, str], Any]:
    """Load everything: methods by name, paths of those that are ours, token ids by set, missing peers, the target."""
    from ..checkpoints.smollm2 import ensure_smollm2
    from ..cli.commands import torch_dtype
    from ..drafter.module import Drafter
    from ..speculator import Speculator
    from ..text import encode
    from . import methods as ways

    folder = ensure_smollm2() if arguments.target == "smollm2" else arguments.target
    dtype = torch_dtype(arguments.dtype)
    loaded = Speculator.from_pretrained(folder, device=arguments.device, dtype=dtype, backend=arguments.backend)
    target, tokenizer = cast("Target", loaded.target), loaded.tokenizer
    sets = {
        name: [encode(first_turn(prompt), tokenizer, None, target.vocab_size) for prompt in prompts]
        for name, prompts in asked.items()
    }
    for name, prompts in sets.items():
        longest = max(map(len, prompts)) + arguments.max_new_tokens
        if target.max_length is not None and longest > target.max_length:
            raise ValueError(
                f"bench: prompt and --max-new-tokens must fit the target's {target.max_length} positions, "
                f"got {longest} in {name!r}"
            )
    drafters: dict[str, Drafter] = {}
    for name, source in sources.items():
        drafters[name] = Drafter.from_pretrained(source, device=target.device, dtype=target.dtype)
    official = dict(drafters)
    argmax = [f"{name}, argmax" for name in drafters if arguments.argmax and drafters[name].candidate_selector]
    if arguments.argmax and not argmax:
        raise ValueError(f"bench: --argmax must have a DFlash 2 drafter, got none among {', '.join(drafters)}")
    for name in argmax:
        drafters[name] = Drafter.from_pretrained(
            sources[name.removesuffix(", argmax")], device=target.device, dtype=target.dtype
        )
        drafters[name].candidate_selector = None
    paths = ways.draft_paths(list(drafters), trees, arguments.viterbi)
    ends = ways.Ends.of(target, tokenizer)
    plain = Speculator(target, None, ends.tokenizer, backend=arguments.backend)
    methods = {PLAIN: ways.speculator_method(plain, ends)}
    methods |= ways.drafter_methods(
        target,
        drafters,
        paths,
        ends,
        argmax=argmax,
        block_size=arguments.block_size,
        draft_sampling={"auto": None, "on": True, "off": False}[arguments.draft_sampling],
        backend=arguments.backend,
    )
    prompt = next(iter(sets.values()))[0]
    missing = ways.add_peers(methods, peers, target, official, ends, prompt, arguments.block_size)
    for method in methods.values():
        method(prompt, 0.0, 0, _WARM_UP)
    return methods, paths, sets, missing, target


def _report(
    arguments: argparse.Namespace, cells: list[Cell], first: str, paths: dict[str, DraftPath], report: dict[str, Any]
) -> None:
    """Show and write what was measured; `report` has what else the JSON says."""
    from .plots import plot
    from .report import print_report, write_json

    cells = with_totals([cell for cell in cells if cell.answers])
    if not cells:
        print("nothing was measured")
        return
    rows = [cell.report(paths.get(cell.method)) for cell in cells]
    compared = comparisons(cells, first, PLAIN, {name: path.drafter for name, path in paths.items()})
    print_report(rows, compared, PLAIN)
    if not report["complete"]:
        print("INCOMPLETE: the measurement was broken off; these are the answers until then")
    if arguments.json:
        settings = {k: str(v) if isinstance(v, Path) else v for k, v in vars(arguments).items() if not callable(v)}
        write_json(report | {"settings": settings, "rows": rows, **compared}, arguments.json)
    if arguments.png:
        plot(rows, arguments.png)


def machine(target: Any) -> dict[str, Any]:
    """What the figures were measured on."""
    import platform
    from importlib.metadata import version

    import torch

    from ..ops.backends import accelerator

    gpu = accelerator(target.device)
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    cpu = next((x.split(":")[1].strip() for x in lines if x.startswith("model name")), platform.processor())
    return {
        "device": cpu if gpu is None else gpu.get_device_name(target.device),
        "dtype": str(target.dtype),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "date": time.strftime("%Y-%m-%d"),
    }
