"""`pydflash bench`: acceptance and speed of drafters over prompt sets, beside plain decoding and other methods."""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .bench_figures import ALL, LOOP_TOKENS, Answered, Cell, comparisons, longest_loop, with_totals

if TYPE_CHECKING:
    from .bench_methods import Method
    from .training.prompts import Prompt

__all__ = ["LOOP_TOKENS", "add_arguments", "first_turn", "longest_loop", "measure", "run"]

PLAIN = "plain"
PEERS = ("transformers", "lookup", "dflash")
_WARM_UP = 8  # tokens
_EXAMPLE = """examples:
  pydflash bench smollm2 --drafter ./my-drafter --prompts gsm8k.jsonl --num-prompts 20
  pydflash bench Qwen/Qwen3-8B --drafter new=./my-drafter --drafter z-lab/Qwen3-8B-DFlash-b16 \\
      --prompts gsm8k.jsonl chat=mt_bench.jsonl --temperatures 0,0.7 --peers --json bench.json --png bench.png

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
        "--argmax",
        action="store_true",
        help="also each DFlash 2 drafter without its selector: the best token of every slot",
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

    from .cli import check_sources

    temperatures = parse_temperatures(arguments.temperatures)
    peers = parse_peers(arguments.peers)
    sources = named("--drafter", arguments.drafter, lambda path: path.name, (PLAIN, "transformers", "prompt lookup"))
    files = named("--prompts", arguments.prompts, lambda path: path.stem, (ALL,))
    check_numbers(arguments)
    check_outputs(arguments.json, arguments.png)
    target_source = {} if arguments.target == "smollm2" else {"TARGET": arguments.target}
    check_sources(**target_source, **{f"drafter {name}": source for name, source in sources.items()})
    asked = read_sets(files, arguments.num_prompts)

    methods, sets, missing, target = _prepare(arguments, sources, asked, peers)
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
    _report(arguments, cells, next(iter(sources)), missing, {"machine": machine(target), "complete": code == 0})
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


# --- checks, before anything long begins ----------------------------------------------------------------------------


def parse_temperatures(given: str) -> list[float]:
    """The numbers of a comma-separated list, each at least 0 and none twice."""
    try:
        found = [float(part) for part in given.split(",")]
    except ValueError:
        found = []
    if not found or len(set(found)) < len(found) or not all(t >= 0 and math.isfinite(t) for t in found):
        raise ValueError(f"bench: --temperatures must be different numbers >= 0, separated by commas, got {given!r}")
    return found


def parse_peers(given: str | None) -> list[str] | None:
    """Peers that are asked for by name; None for all that are there."""
    import importlib.util

    if given == "all":
        return None
    found = [] if given is None else [part.strip() for part in given.split(",")]
    if not set(found) <= set(PEERS) or len(set(found)) < len(found):
        raise ValueError(f"bench: --peers must be among {', '.join(PEERS)}, each once, got {given!r}")
    if "dflash" in found and importlib.util.find_spec("dflash") is None:
        raise ValueError(
            "bench: --peers must be installed, got dflash without its package (pip install --no-deps dflash)"
        )
    return found


def named(option: str, given: Sequence[str], name_of: Callable[[Path], str], reserved: Sequence[str]) -> dict[str, str]:
    """[NAME=]SOURCE arguments as name -> source; without a name it is `name_of` the source.

    Raises: ValueError for names that come twice or are `reserved`.
    """
    found: dict[str, str] = {}
    for text in given:
        name, sign, source = text.partition("=")
        if not sign or Path(text).exists():
            name, source = name_of(Path(text)), text
        if not name or not source:
            raise ValueError(f"bench: {option} must be SOURCE or NAME=SOURCE, got {text!r}")
        if name in found or name in reserved:
            taken = "is the name of another row" if name in reserved else f"also stands for {found[name]!r}"
            raise ValueError(f"bench: {option} must have names of their own (NAME=...), got {text!r}: {name!r} {taken}")
        found[name] = source
    return found


def check_numbers(arguments: argparse.Namespace) -> None:
    """Refuse counts that leave nothing to measure."""
    for name, least in (("num_prompts", 1), ("max_new_tokens", 2), ("block_size", 1)):
        value = getattr(arguments, name)
        if value is not None and value < least:
            raise ValueError(f"bench: --{name.replace('_', '-')} must be at least {least}, got {value}")


def check_outputs(json_path: Path | None, png: Path | None) -> None:
    """Refuse files that could not be written once the measurement is done."""
    import importlib.util

    for option, path in (("--json", json_path), ("--png", png)):
        if path is None:
            continue
        if not path.parent.is_dir():
            raise ValueError(f"bench: {option} must be in a folder that exists, got {str(path)!r}")
        if path.is_dir():
            raise ValueError(f"bench: {option} must be a file, got the folder {str(path)!r}")
    if png is not None:
        if png.suffix.lower() != ".png":
            raise ValueError(f"bench: --png must end in .png, got {str(png)!r}")
        if importlib.util.find_spec("matplotlib") is None:
            raise ValueError("bench: --png needs matplotlib, which is not installed")


def read_sets(files: dict[str, str], count: int) -> dict[str, list[Prompt]]:
    """The first `count` prompts of each file. Raises ValueError naming a file that is missing, wrong or empty."""
    from .training.prompts import read_prompts

    sets = {}
    for name, file in files.items():
        if not Path(file).is_file():
            raise ValueError(f"bench: --prompts must be files that exist, got {file!r}")
        sets[name] = read_prompts(file)[:count]
        if not sets[name]:
            raise ValueError(f"bench: --prompts must have a prompt in each file, got none in {file!r}")
    return sets


# --- the measurement --------------------------------------------------------------------------------------------------


def _prepare(
    arguments: argparse.Namespace, sources: dict[str, str], asked: dict[str, list[Prompt]], peers: list[str] | None
) -> tuple[dict[str, Method], dict[str, list[list[int]]], dict[str, str], Any]:
    """Load everything: methods by name, token ids by set, missing peers, the target."""
    from . import bench_methods as ways
    from .cli import torch_dtype
    from .drafter import Drafter
    from .smollm2 import ensure_smollm2
    from .speculator import Speculator
    from .text import encode

    folder = ensure_smollm2() if arguments.target == "smollm2" else arguments.target
    dtype = torch_dtype(arguments.dtype)
    loaded = Speculator.from_pretrained(folder, device=arguments.device, dtype=dtype, backend=arguments.backend)
    target, tokenizer = loaded.target, loaded.tokenizer
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
    ends = ways.Ends.of(target, tokenizer)
    plain = Speculator(target, None, ends.tokenizer, backend=arguments.backend)
    methods = {PLAIN: ways.speculator_method(plain, ends)}
    methods |= ways.drafter_methods(
        target,
        drafters,
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
    return methods, sets, missing, target


def _report(
    arguments: argparse.Namespace, cells: list[Cell], first: str, missing: dict[str, str], report: dict[str, Any]
) -> None:
    """Show and write what was measured; `report` has what else the JSON says."""
    from .bench_report import plot, print_report, write_json

    cells = with_totals([cell for cell in cells if cell.answers])
    if not cells:
        print("nothing was measured")
        return
    rows = [cell.report() for cell in cells]
    compared = comparisons(cells, first, PLAIN)
    print_report(rows, compared, PLAIN)
    if not report["complete"]:
        print("INCOMPLETE: the measurement was broken off; these are the answers until then")
    if arguments.json:
        settings = {k: str(v) if isinstance(v, Path) else v for k, v in vars(arguments).items() if not callable(v)}
        write_json(report | {"settings": settings, "missing": missing, "rows": rows, **compared}, arguments.json)
    if arguments.png:
        plot(rows, arguments.png)


def machine(target: Any) -> dict[str, Any]:
    """What the figures were measured on."""
    import platform
    from importlib.metadata import version

    import torch

    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    cpu = next((x.split(":")[1].strip() for x in lines if x.startswith("model name")), platform.processor())
    return {
        "device": torch.cuda.get_device_name(target.device) if target.device.type == "cuda" else cpu,
        "dtype": str(target.dtype),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "date": time.strftime("%Y-%m-%d"),
    }
