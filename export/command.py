"""`pydflash export`: its arguments, progress and report."""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

_NEEDED = ("onnx_ir", "onnxruntime")


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
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ImportError(f"export: needs {', '.join(missing)}: pip install 'pydflash[onnx]'")
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from .write import export_drafter
    from .write_target import export_target

    if arguments.with_target and arguments.target is None:
        raise ValueError("export: --target must be given with --with-target")

    columns: tuple[Any, ...] = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("")

        def progress(text: str, done: int, total: int) -> None:
            bar.update(task, description=text, completed=done, total=total)

        report = export_drafter(
            arguments.drafter,
            arguments.target,
            arguments.output,
            profile=arguments.profile,
            dtype=arguments.dtype,
            quantize=arguments.quantize,
            embed=not arguments.no_embed,
            debug_outputs=arguments.debug_outputs,
            cross_check=arguments.cross_check,
            progress=progress,
        )
        lines = report.lines()
        if arguments.with_target:
            layer_ids = report.metadata["target_layer_ids"]
            lines += export_target(
                arguments.target,
                layer_ids,
                arguments.output,
                quantize=arguments.target_quantize,
                reference=encode(arguments.target, layer_ids),
                progress=progress,
            )
    print("\n".join(lines))
    return 0
