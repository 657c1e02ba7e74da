"""`pydflash train fit`: a drafter from records made by `pydflash train data`."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ..drafter.module import Drafter
from ..target.generic import Target
from ..target.loading import load_tokenizer
from .build import InputConditionedDrafter, drafter_config, initialise, warm_start
from .objective import ObjectiveConfig
from .shards import ShardReader
from .trainer import TrainConfig, Trainer


class JoinedRecords:
    """Several folders of records as one list."""

    def __init__(self, folders: Sequence[str | Path]) -> None:
        self._readers = [ShardReader(folder) for folder in folders]
        self._where = [(reader, i) for reader in self._readers for i in range(len(reader))]

    def __len__(self) -> int:
        return len(self._where)

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        reader, i = self._where[index]
        return tuple(reader[i])

    def where(self, index: int) -> str:
        """The file of a record, and its number in there."""
        reader, i = self._where[index]
        return reader.where(i)


def unused_token(tokenizer: Any) -> int:
    """A token that text never contains, to mark masked slots: the mask token, else a reserved special token.

    Raises: ValueError where the tokenizer has none to spare; then `--mask-token-id` must name one.
    """
    if getattr(tokenizer, "mask_token_id", None) is not None:
        return int(tokenizer.mask_token_id)
    template = str(getattr(tokenizer, "chat_template", None) or "")
    taken = {tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id}
    spare = [
        i
        for i, token in tokenizer.added_tokens_decoder.items()
        if token.special and i not in taken and str(token.content) not in template
    ]
    if not spare:
        raise ValueError("train fit: --mask-token-id must name an unused token: the tokenizer has none to spare")
    return max(spare)


def build_drafter(arguments: argparse.Namespace, target: Target) -> Drafter:
    """The drafter to train: fresh, or with the weights of `--warm-start`."""
    mask = arguments.mask_token_id
    config = drafter_config(
        target,
        unused_token(load_tokenizer(arguments.target)) if mask is None else mask,
        version=arguments.drafter_version,
        num_layers=arguments.layers,
        block_size=arguments.block_size,
        intermediate_size=arguments.intermediate_size,
        target_layer_ids=arguments.target_layer_ids,
        selector_rank=arguments.selector_rank,
        window=arguments.window,
    )
    kind = InputConditionedDrafter if arguments.conditioning == "input" else Drafter
    drafter = initialise(kind(config), arguments.seed)
    if arguments.warm_start is not None:
        warm_start(drafter, Drafter.from_pretrained(arguments.warm_start).float())
    return drafter


_LOOP_HELP = {
    "epochs": "passes over the records",
    "lr": "peak learning rate",
    "warmup": "share of the run in which the rate rises",
    "weight_decay": "on matrices",
    "clip": "largest gradient norm",
    "cache_gb": "gigabytes of target features kept on the device for later passes",
    "time_limit": "end after SECONDS, the schedule shortened to fit; 0 is no limit",
    "batch_size": "sequences per device and micro-step",
    "accumulation": "micro-steps of a step",
    "max_length": "longer records are cut on the right",
    "max_steps": "end after N steps; 0 is no limit",
    "save_every": "steps between checkpoints",
    "log_every": "steps between log lines",
    "seed": "of weights, order and anchors",
}
_LOSS_HELP = {
    "num_anchors": "blocks per sequence and step",
    "distillation": "share of the target's distribution in the loss, 0 to 1; the rest is the next token",
    "selector_weight": "factor of the selector's loss",
    "selector_share": "share of the blocks the selector learns from",
    "chunk_rows": "rows whose logits exist at once; lower it if memory runs out",
}
_EPILOG = """example, with records made by `pydflash train data`; on two GPUs with torchrun --nproc-per-node 2 -m:
  pydflash train fit Qwen/Qwen3-4B --data records --out drafter --optimizer muon --lr 1e-3 --distillation 0.5
"""


def _numbers(group: Any, helps: dict[str, str], defaults: Any) -> None:
    """An option for each number of `defaults`, with its help and its default."""
    for name, text in helps.items():
        default = getattr(defaults, name)
        kind, metavar = (int, "N") if isinstance(default, int) else (float, "X")
        option, text = f"--{name.replace('_', '-')}", f"{text}; default: {default:g}"
        group.add_argument(option, type=kind, default=default, metavar=metavar, help=text)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `pydflash train fit`."""
    parser.epilog, parser.formatter_class = _EPILOG, argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("target", metavar="TARGET", help="folder or hub id of the model the records were made with")
    add("--data", nargs="+", required=True, metavar="DIR", help="folders written by `pydflash train data`")
    add(
        "--out", type=Path, required=True, metavar="DIR", help="checkpoints, curves and the drafter; goes on if stopped"
    )
    shape = parser.add_argument_group("the drafter")
    shape.add_argument("--drafter-version", type=int, choices=(1, 2), default=2, help="DFlash or DFlash 2; default: 2")
    shape.add_argument("--layers", type=int, default=5, metavar="N", help="decoder layers of the drafter; default: 5")
    shape.add_argument("--block-size", type=int, default=8, metavar="N", help="anchor and drafts; default: 8")
    shape.add_argument("--intermediate-size", type=int, metavar="N", help="width of the MLP; default: the target's")
    shape.add_argument(
        "--target-layer-ids",
        type=_integers,
        metavar="I,I,..",
        help="target layers to read, from 0; default: as many as --layers, evenly spread",
    )
    shape.add_argument(
        "--selector-rank", type=int, default=64, metavar="N", help="rank of the DFlash 2 selector; default: 64"
    )
    shape.add_argument("--window", type=int, metavar="N", help="sliding window of every layer; default: whole context")
    shape.add_argument(
        "--mask-token-id", type=int, metavar="ID", help="a token text never contains; default: an unused special one"
    )
    shape.add_argument(
        "--warm-start", metavar="DRAFTER", help="a drafter of the same shape to start from; DFlash may start DFlash 2"
    )
    shape.add_argument(
        "--conditioning",
        choices=("kv", "input"),
        default="kv",
        help="kv: target features in every layer; input: at the input only, an ablation with files of its own",
    )
    defaults = TrainConfig(out=Path())
    loop = parser.add_argument_group("the loop")
    _numbers(loop, _LOOP_HELP, defaults)
    loop.add_argument(
        "--optimizer",
        choices=("adamw", "muon"),
        default=defaults.optimizer,
        help=f"muon needs torch 2.9 and gets further in as many steps; default: {defaults.optimizer}",
    )
    loop.add_argument("--precision", choices=("bf16", "no"), help="default: bf16 on a GPU, no on a CPU")
    loop.add_argument("--device", help="default: cuda, else xpu, else cpu")
    loss = parser.add_argument_group("the objective")
    objective = ObjectiveConfig()
    _numbers(loss, _LOSS_HELP, objective)
    loss.add_argument(
        "--gamma",
        type=float,
        metavar="X",
        help="decay of the slot weights; default: 4, from block size 10 5, from 16 7",
    )
    loss.add_argument(
        "--weighting",
        choices=("decay", "dpace"),
        default=objective.weighting,
        help="of the slots: decay, or dpace by the chance that a block survives to the slot; default: decay",
    )
    loss.add_argument(
        "--missing-gold",
        choices=("drop", "inject"),
        default=objective.missing_gold,
        help="a next token outside the candidates is left out of the selector's loss, or put among them; default: drop",
    )
    loss.add_argument(
        "--attention",
        choices=("auto", "dense", "flex"),
        default=objective.attention,
        help="dense mask or FlexAttention; auto takes flex on CUDA beyond 4,096 keys",
    )


def run(arguments: argparse.Namespace) -> int:
    """Run `pydflash train fit`."""
    records = JoinedRecords(arguments.data)
    device = arguments.device
    if device is None and "LOCAL_RANK" in os.environ and torch.cuda.is_available():
        device = f"cuda:{os.environ['LOCAL_RANK']}"  # started by torchrun: a GPU for each process
        torch.cuda.set_device(device)
    target = Target.from_pretrained(arguments.target, device=device)
    if target.device.type != "cpu" and target.dtype == torch.float32:
        target = Target(target.model.to(torch.bfloat16))  # as `train data` runs it
    precision = arguments.precision or ("no" if target.device.type == "cpu" else "bf16")
    drafter = build_drafter(arguments, target).to(target.device)
    target = Target(target.model, drafter.config.target_layer_ids)
    settings = {name: getattr(arguments, name) for name in TrainConfig.__dataclass_fields__ if hasattr(arguments, name)}
    objective = {name: getattr(arguments, name) for name in ObjectiveConfig.__dataclass_fields__}
    trainer = Trainer(
        drafter, target, records, TrainConfig(**settings | {"precision": precision}), ObjectiveConfig(**objective)
    )
    parameters = sum(p.numel() for p in drafter.parameters())
    say = trainer.accelerator.print  # on the first of several processes
    say(f"{len(records):,} records, {parameters / 1e6:.1f} M parameters, up to {trainer.total:,} steps")
    trainer.fit()
    say(f"wrote the drafter, log.jsonl and curves.png to {arguments.out}")
    trainer.close()
    return 0


def _integers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]
