"""`pydflash train toy`: all steps from prompts to bench on a target that is made on the spot, in two minutes on a CPU.

Each step calls the function behind the public command that it prints, so the output is a tutorial.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..bench import run as bench
from ..checkpoints.files import write_file
from . import data, fit
from .progress import Progress
from .toy_target import make_target, prompts

_SETTINGS = "toy.json"
_WIDTH = 100


@dataclass(frozen=True, slots=True)
class ToySettings:
    """How large the toy is.

    Attributes:
        hidden_size, num_layers: Of the target; its MLP is twice as wide.
        lesson_steps, lesson_batch, lesson_lr: How the target learns the language.
        prompts: Training prompts. held_out: Prompts that neither the target's lessons nor the records contain.
        samples: Answers to each training prompt.
        epochs, batch_size, anchors, lr: How the drafter is trained.
        seed: Of everything.
    """

    hidden_size: int = 96
    num_layers: int = 4
    lesson_steps: int = 400
    lesson_batch: int = 12
    lesson_lr: float = 4e-3
    prompts: int = 600
    held_out: int = 24
    samples: int = 2
    epochs: int = 6
    batch_size: int = 16
    anchors: int = 8
    lr: float = 4e-3
    seed: int = 0


def make_toy(out: str | Path, settings: ToySettings | None = None) -> list[dict[str, Any]]:
    """Make a target, records and a drafter in the folder `out`, and measure the drafter on held-out prompts.

    A second call goes on where the first one stopped; what is there is not made again.

    Returns: the bench's figures of the drafter, one row per temperature.
    Raises: ValueError for a folder with anything else in it, or made with other settings.
    """
    out, settings = Path(out), settings or ToySettings()
    for package in ("accelerate", "matplotlib"):
        if importlib.util.find_spec(package) is None:
            raise ImportError(f"train toy: needs {package}: pip install 'pydflash[train]'")
    _claim(out, settings)
    target, records, drafter, report = out / "target", out / "records", out / "drafter", out / "bench.json"
    held_out = _prompt_files(out, settings)
    _step(1, "a target that speaks a small language; with a model of your own this step falls away", target.is_dir())
    if not target.is_dir():
        with Progress() as progress:
            loss = make_target(
                target,
                held_out,
                hidden_size=settings.hidden_size,
                num_layers=settings.num_layers,
                steps=settings.lesson_steps,
                batch_size=settings.lesson_batch,
                lr=settings.lesson_lr,
                seed=settings.seed,
                progress=progress,
            )
        print(f"wrote {target}: loss {loss:.2f} nats per token of its answers")
    done = (drafter / "curves.png").is_file()
    _step(2, "records: the target answers the training prompts, greedily and sampled", done)
    command = ["--prompts", out / "prompts.txt", "--exclude", out / "heldout.txt", "--out", records]
    command += ["--samples-per-prompt", settings.samples, "--max-new-tokens", 96, "--drop-loops"]
    _call("train data", data, [target, *command, "--batch-size", 64, "--seed", settings.seed, "--device", "cpu"], done)
    _step(3, "fit: a DFlash 2 drafter of two layers learns to draft those answers", done)
    command = ["--data", records, "--out", drafter, "--layers", 2, "--target-layer-ids", "1,2,3", "--selector-rank", 16]
    command += ["--epochs", settings.epochs, "--batch-size", settings.batch_size, "--num-anchors", settings.anchors]
    command += ["--lr", settings.lr, "--cache-gb", 0.2, "--save-every", 100, "--seed", settings.seed, "--device", "cpu"]
    _call("train fit", fit, [target, *command], done)
    done = report.is_file() and json.loads(report.read_text())["complete"]  # a bench that is stopped leaves a part
    _step(4, "bench: the drafter on prompts that were in no record", done)
    command = ["--drafter", drafter, "--prompts", out / "heldout.txt", "--temperatures", "0,1"]
    command += ["--max-new-tokens", 96, "--device", "cpu", "--json", report]
    _call("bench", bench, [target, *command], done)
    rows = [
        row
        for row in json.loads(report.read_text())["rows"]
        if (row["method"], row["prompts"]) == (drafter.name, "heldout")
    ]
    _closing(out, rows, held_out[3])
    return rows


def _claim(out: Path, settings: ToySettings) -> None:
    """Make the folder this toy's own, or find that it is."""
    wanted = asdict(settings)
    path = out / _SETTINGS
    if not path.is_file():
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise ValueError(f"train toy: --out must be a new or empty folder, or one of an earlier run, got {out}")
        out.mkdir(parents=True, exist_ok=True)
        write_file(path, lambda part: part.write_text(json.dumps(wanted, indent=1) + "\n"))
        return
    found = json.loads(path.read_text())
    if different := [name for name in {**wanted, **found} if wanted.get(name) != found.get(name)]:
        raise ValueError(
            f"train toy: --out must be a folder made with {different[0]} {wanted.get(different[0])}, got {out} with "
            f"{found.get(different[0])}; choose another folder"
        )


def _prompt_files(out: Path, settings: ToySettings) -> list[str]:
    """Write prompts.txt and heldout.txt, the same at every call; returns the held-out prompts."""
    held_out = prompts(settings.held_out, settings.seed + 1)
    _write_lines(out / "heldout.txt", held_out)
    _write_lines(out / "prompts.txt", prompts(settings.prompts, settings.seed + 2, held_out))
    return held_out


def _write_lines(path: Path, lines: Sequence[str]) -> None:
    write_file(path, lambda part: part.write_text("".join(line + "\n" for line in lines), encoding="utf-8"))


def _step(number: int, title: str, done: bool) -> None:
    print(f"\n{number}. {title[0].upper()}{title[1:]}.{' Done already.' if done else ''}", flush=True)


def _call(name: str, module: Any, words: Sequence[object], done: bool) -> None:
    """Print a command and run it in this process, unless it is done."""
    command = [str(word) for word in words]
    print(f"$ {_shown(['pydflash', *name.split(), *command])}", flush=True)
    if not done:
        parser = argparse.ArgumentParser(prog=f"pydflash {name}")
        module.add_arguments(parser)
        module.run(parser.parse_args(command))


def _shown(command: Sequence[str]) -> str:
    """The command as a shell reads it, cut before options where a line gets long."""
    lines = [""]
    for word in command:
        if word.startswith("--") and len(lines[-1]) > _WIDTH:
            lines.append("")
        lines[-1] += f" {shlex.quote(word)}"
    return " \\\n   ".join(lines).strip()


def _closing(out: Path, rows: Sequence[dict[str, Any]], prompt: str) -> None:
    print("\nAcceptance length on the held-out prompts (tokens per forward of the target; plain decoding has 1):")
    for row in rows:
        low, high = row["interval"]
        length = row["acceptance_length"]
        figure = "-" if math.isnan(length) else f"{length:.2f} (95 %: {low:.2f}-{high:.2f})"
        count = f"{row['requests']} answers, and {row['loops']} that loop"
        print(f"  temperature {row['temperature']:g}: {figure}, {count}")
    target, drafter = out / "target", out / "drafter"
    print(f"\n{target}: the target; {out / 'records'}: what it answered; {drafter}: the drafter, with log.jsonl")
    print(f"and curves.png; {out / 'bench.json'}: all figures. Try it:\n")
    command = ["pydflash", "generate", str(target), "--drafter", str(drafter), "--device", "cpu", prompt]
    print(f"$ {_shown(command)}")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `pydflash train toy`."""
    parser.add_argument(
        "--out", required=True, metavar="DIR", help="a new folder, or one of an earlier run, which then goes on"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="another target, other prompts; default: 0")


def run(arguments: argparse.Namespace) -> int:
    """Run `pydflash train toy`."""
    import transformers

    transformers.utils.logging.disable_progress_bar()  # its bars for files of a megabyte would hide the steps
    make_toy(arguments.out, ToySettings(seed=arguments.seed))
    return 0
