"""`pydflash export`: its arguments, progress and report."""

from __future__ import annotations

import argparse
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("drafter", metavar="DRAFTER", help="folder or hub id of the drafter")
    parser.add_argument("--target", metavar="TARGET", help="its target, for embedding table and head; or smollm2")
    parser.add_argument("-o", "--output", required=True, metavar="DIR", help="folder for draft.onnx and its data")
    parser.add_argument(
        "--profile",
        choices=("portable", "inplace"),
        default="portable",
        help="portable: opset 23, for ONNX Runtime and OpenVINO (default); inplace: opset 24, caches written in place, "
        "for ONNX Runtime",
    )
    parser.add_argument("--dtype", default="float32", metavar="TYPE", help="float32 (default), or float16 for GPUs")
    parser.add_argument(
        "--quantize",
        choices=("8bit", "4bit", "int8"),
        help="8bit, 4bit: weights in blocks of 32; int8: weights and activations, fastest where the CPU has VNNI",
    )
    parser.add_argument("--no-embed", action="store_true", help="take embedding rows as an input, instead of ids")
    parser.add_argument(
        "--with-target",
        action="store_true",
        help="also write the target (Llama, Mistral, Qwen2, Qwen3), for text without torch forwards",
    )
    parser.add_argument(
        "--target-quantize", choices=("8bit", "4bit", "int8"), help="few bits for the target too: another model then"
    )
    parser.add_argument("--debug-outputs", action="store_true", help="also return hidden states")
    parser.add_argument("--cross-check", action="store_true", help="export through torch.onnx too, and compare")


def run(arguments: argparse.Namespace, encode: Callable[[str, Sequence[int]], Any]) -> int:
    """encode: Gives the target itself, by its folder and the layers to tap; what an exported target must agree with."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from .metadata import DRAFT, TARGET
    from .staging import staged
    from .write import plan_drafter
    from .write_target import check_place, plan_target

    if arguments.with_target:
        if arguments.target is None:
            raise ValueError("export: --target must be given with --with-target")
        if arguments.no_embed:
            raise ValueError("export: --no-embed must not be given with --with-target, whose table is in its graph")
        check_place(arguments.target, arguments.output)
    elif arguments.target_quantize is not None:
        raise ValueError("export: --with-target must be given with --target-quantize")

    columns: tuple[Any, ...] = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with ended_by_sigterm(), Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("")

        def say(text: str, done: int, total: int) -> None:
            bar.update(task, description=text, completed=done, total=total)

        kinds, source, output = [DRAFT], arguments.target, arguments.output
        draft = plan_drafter(
            arguments.drafter,
            source,
            output,
            profile=arguments.profile,
            dtype=arguments.dtype,
            quantize=arguments.quantize,
            embed=not arguments.no_embed,
            debug_outputs=arguments.debug_outputs,
            cross_check=arguments.cross_check,
            say=say,
        )
        layer_ids = draft.metadata["target_layer_ids"]
        if arguments.with_target:
            kinds.append(TARGET)
            write_target = plan_target(source, layer_ids, output, quantize=arguments.target_quantize, say=say)
        with staged(output, *kinds, say=say) as part:
            lines = draft.write(part).lines()
            if arguments.with_target:
                lines += write_target(part, encode(source, layer_ids))
    print("\n".join(lines))
    return 0


@contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """SIGTERM raises here, as Ctrl-C does, so that what is half written goes; a host's own handler is left alone."""
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return

    def end(number: int, frame: Any) -> None:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
