"""`pydflash train fit`: a drafter from records made by `pydflash train data`."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ..drafter import Drafter
from ..target import Target, load_tokenizer
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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `pydflash train fit`."""
    add = parser.add_argument
    add("target", metavar="TARGET", help="folder or hub id of the model the records were made with")
    add("--data", nargs="+", required=True, metavar="DIR", help="folders written by `pydflash train data`")
    add(
        "--out", type=Path, required=True, metavar="DIR", help="checkpoints, curves and the drafter; goes on if stopped"
    )
    shape = parser.add_argument_group("the drafter")
    shape.add_argument("--drafter-version", type=int, choices=(1, 2), default=2, help="DFlash or DFlash 2 (2)")
    shape.add_argument("--layers", type=int, default=5)
    shape.add_argument("--block-size", type=int, default=8, help="anchor and drafts (8)")
    shape.add_argument("--intermediate-size", type=int, help="width of the MLP; default: the target's")
    shape.add_argument("--target-layer-ids", type=_integers, metavar="I,I,..", help="default: evenly spread")
    shape.add_argument("--selector-rank", type=int, default=64)
    shape.add_argument("--window", type=int, help="sliding window of every layer; default: whole context")
    shape.add_argument("--mask-token-id", type=int, help="a token text never contains; default: an unused special one")
    shape.add_argument("--warm-start", metavar="DRAFTER", help="a DFlash drafter to start a DFlash 2 one from")
    shape.add_argument("--conditioning", choices=("kv", "input"), default="kv", help="'input' is an ablation")
    defaults = TrainConfig(out=Path())
    loop = parser.add_argument_group("the loop")
    for name in ("epochs", "lr", "warmup", "weight_decay", "clip", "cache_gb", "time_limit"):
        loop.add_argument(f"--{name.replace('_', '-')}", type=float, default=getattr(defaults, name))
    for name in ("batch_size", "accumulation", "max_length", "max_steps", "save_every", "log_every", "seed"):
        loop.add_argument(f"--{name.replace('_', '-')}", type=int, default=getattr(defaults, name))
    loop.add_argument("--optimizer", choices=("adamw", "muon"), default=defaults.optimizer)
    loop.add_argument("--precision", choices=("bf16", "no"), help="default: bf16 on a GPU")
    loop.add_argument("--device", help="default: cuda, else xpu, else cpu")
    loss = parser.add_argument_group("the objective")
    objective = ObjectiveConfig()
    loss.add_argument("--num-anchors", type=int, default=objective.num_anchors, help="blocks per sequence and step")
    loss.add_argument("--gamma", type=float, help="decay of slot weights; default: by block size")
    loss.add_argument("--weighting", choices=("decay", "dpace"), default=objective.weighting)
    for name in ("distillation", "selector_weight", "selector_share"):
        loss.add_argument(f"--{name.replace('_', '-')}", type=float, default=getattr(objective, name))
    loss.add_argument("--missing-gold", choices=("drop", "inject"), default=objective.missing_gold)
    loss.add_argument("--attention", choices=("auto", "dense", "flex"), default=objective.attention)
    loss.add_argument("--chunk-rows", type=int, default=objective.chunk_rows)


def run(arguments: argparse.Namespace) -> int:
    """Run `pydflash train fit`."""
    device = arguments.device
    if device is None and "LOCAL_RANK" in os.environ and torch.cuda.is_available():
        device = f"cuda:{os.environ['LOCAL_RANK']}"  # started by torchrun: a GPU for each process
        torch.cuda.set_device(device)
    target = Target.from_pretrained(arguments.target, device=device)
    precision = arguments.precision or ("no" if target.device.type == "cpu" else "bf16")
    drafter = build_drafter(arguments, target).to(target.device)
    target = Target(target.model, drafter.config.target_layer_ids)
    records = JoinedRecords(arguments.data)
    settings = {name: getattr(arguments, name) for name in TrainConfig.__dataclass_fields__ if hasattr(arguments, name)}
    objective = {name: getattr(arguments, name) for name in ObjectiveConfig.__dataclass_fields__}
    trainer = Trainer(
        drafter, target, records, TrainConfig(**settings | {"precision": precision}), ObjectiveConfig(**objective)
    )
    parameters = sum(p.numel() for p in drafter.parameters())
    print(f"{len(records):,} records, {parameters / 1e6:.1f} M parameters, up to {trainer.total:,} steps")
    trainer.fit()
    print(f"wrote the drafter, log.jsonl and curves.png to {arguments.out}")
    return 0


def _integers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]
