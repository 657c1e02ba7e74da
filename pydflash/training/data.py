"""`pydflash train data`: prompts answered by the target itself, as records to train a drafter on."""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from ..target.batch import ATTENTION
from ..target.defaults import GenerationDefaults
from ..target.generic import Target
from ..target.loading import load_tokenizer
from .generate import BatchGenerator
from .jobs import DataSettings, Jobs, number_of
from .progress import Progress
from .prompts import Chat, Exclusion, PromptSet, read_prompts, read_texts
from .self_prompts import SelfPrompts
from .shards import ShardWriter

_FLUSH_SECONDS = 120.0
_SELF_SHARE = 0.4  # of the time limit, for self-written prompts


def make_data(
    target: Target, tokenizer: Any, out: str | Path, usable: PromptSet, settings: DataSettings, name: str = ""
) -> dict[str, Any]:
    """Answer prompts and write the records to the folder `out`; goes on with what is there already.

    target: as it will be served. tokenizer: its tokenizer, with the chat template. usable: the prompts; the
    self-written ones are added. name: what the manifest calls the target.

    Returns: the manifest.
    Raises: ValueError for a folder with other data, and for what cannot be done with this target.
    """
    deadline = time.monotonic() + (float("inf") if settings.time_limit is None else settings.time_limit)
    chat = Chat(tokenizer)
    defaults = GenerationDefaults(target.generation_config)
    stops = defaults.stop_token_ids or [i for i in [tokenizer.eos_token_id] if i is not None]
    identity = {
        "target": {
            "class": type(target.model).__name__,
            "vocab_size": target.vocab_size,
            "weights_sha256": weights_sha256(target.model),
        },
        "template": {"sha256": chat.template_sha256},
        "sampling": {
            "temperatures": list(settings.temperatures),
            "top_k": settings.top_k,
            "top_p": settings.top_p,
            "min_p": settings.min_p,
            "max_new_tokens": settings.max_new_tokens,
            "stop_token_ids": sorted(stops),
            "seed": settings.seed,
            "dtype": str(target.dtype).removeprefix("torch."),
            "drop_capped": settings.drop_capped,
            "drop_loops": settings.drop_loops,
        },
    }
    with ShardWriter(out, identity, settings.shard_tokens) as writer, Progress() as progress:
        writer.info["target_name"] = name
        writer.info["config_sha256"] = _config_sha256(target.model)
        skipped = defaults.processor_keys
        writer.info["not_applied"] = skipped
        if skipped:
            progress.say(f"warning: the generation_config's {', '.join(skipped)} are not applied to training data")
        if settings.self_prompts:
            _write_self_prompts(target, chat, writer.folder, usable, settings, deadline, progress)
        jobs = Jobs(chat, writer, usable, settings, target)
        writer.info["prompts"] = dict(sorted(usable.counts.items()))
        writer.write_manifest()
        begun = time.monotonic()
        if jobs.left:
            generator = BatchGenerator(
                target,
                batch_size=min(settings.rows(target.device), max(jobs.left, 1)),
                capacity=jobs.capacity,
                max_new_tokens=settings.max_new_tokens,
                stop_token_ids=stops,
                sampling=settings.sampling,
                attention=settings.attention,
                graphs=settings.graphs,
                sync_every=settings.sync_every,
            )
            _answer(generator, jobs, writer, deadline, progress)
            seconds = time.monotonic() - begun
            writer.info["last_run"] = {
                "device": torch.cuda.get_device_name(target.device) if target.device.type == "cuda" else "cpu",
                "attention": generator.forward.attention,
                "batch_size": generator.forward.rows,
                "seconds": round(seconds, 1),
                "new_tokens_per_second": round(generator.new_tokens / seconds, 1),
                "prompts_left": jobs.left,
            }
        writer.flush()
        writer.write_manifest()
        return writer.manifest


def weights_sha256(model: torch.nn.Module) -> str:
    """Names a model's weights by 8 values of every parameter; the same in any dtype that holds them exactly."""
    sample = [p.detach().flatten()[:: max(1, p.numel() // 8)][:8].float() for _, p in sorted(model.named_parameters())]
    return hashlib.sha256(torch.cat(sample).cpu().numpy().tobytes()).hexdigest()


def _config_sha256(model: Any) -> str:
    config = {k: v for k, v in model.config.to_dict().items() if not k.startswith("_")}
    content = json.dumps(config, sort_keys=True, default=str)
    return hashlib.sha256(content.encode()).hexdigest()


def _write_self_prompts(
    target: Target,
    chat: Chat,
    folder: Path,
    usable: PromptSet,
    settings: DataSettings,
    deadline: float,
    progress: Progress,
) -> None:
    own = SelfPrompts(folder, chat, usable)
    if own.kept >= settings.self_prompts:
        return
    generator = BatchGenerator(
        target,
        batch_size=min(settings.rows(target.device), 2 * settings.self_prompts + 8),
        capacity=len(own.opening) + settings.self_prompt_tokens,
        max_new_tokens=settings.self_prompt_tokens,
        stop_token_ids=own.stop_token_ids,
        sampling=settings.sampling,
        attention=settings.attention,
        graphs=settings.graphs,
        sync_every=settings.sync_every,
    )
    if settings.time_limit is not None:
        deadline -= (1 - _SELF_SHARE) * settings.time_limit
    progress.start("writing prompts", settings.self_prompts, own.kept)

    def report(kept: int) -> bool:
        progress.update(kept, generator.new_tokens)
        return time.monotonic() > deadline

    own.write(
        generator,
        settings.self_prompts,
        settings.self_temperature,
        lambda i: number_of(settings.seed, "self", i),
        report,
    )


def _answer(generator: BatchGenerator, jobs: Jobs, writer: ShardWriter, deadline: float, progress: Progress) -> None:
    total, written = jobs.left, time.monotonic()
    progress.start("answering", total, 0)
    for responses in generator.run(jobs.take):
        for response in responses:
            jobs.receive(response)
        progress.update(total - jobs.left, generator.new_tokens)
        now = time.monotonic()
        if now - written > _FLUSH_SECONDS:
            writer.flush()
            written = now
        if now > deadline:
            progress.say(f"time is up: {jobs.left:,} of {total:,} responses are left for the next run")
            return


def collect_prompts(prompt_files: Iterable[str | Path], exclude_files: Iterable[str | Path]) -> PromptSet:
    """The usable prompts of files, without copies of what stands in `exclude_files`."""
    usable = PromptSet(Exclusion(text for path in exclude_files for text in read_texts(path)))
    for path in prompt_files:
        for prompt in read_prompts(path):
            usable.add(prompt)
    return usable


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `pydflash train data`."""
    settings = DataSettings()
    add = parser.add_argument
    add("target", metavar="TARGET", help="folder or hub id of the model that the drafter is for")
    add("--out", required=True, metavar="DIR", help="where the records go; a run that was stopped goes on there")
    add("--prompts", nargs="+", default=[], metavar="FILE", help="prompt files: .txt, .jsonl, .json or .parquet")
    add(
        "--self-prompts",
        type=int,
        default=0,
        metavar="N",
        help="prompts the target writes itself; it must have a chat template",
    )
    add(
        "--exclude",
        nargs="+",
        default=[],
        metavar="FILE",
        help="evaluation files: prompts with their words are left out",
    )
    add(
        "--samples-per-prompt",
        type=int,
        default=1,
        metavar="K",
        help="responses to each prompt, one of them greedy at most; default: 1",
    )
    number = (
        ("max-new-tokens", "longest response"),
        ("max-prompt-tokens", "longer prompts are left out, the template counted in"),
        ("self-prompt-tokens", "longest self-written prompt"),
        ("sync-every", "steps until finished rows get new prompts"),
        ("shard-tokens", "tokens of a shard"),
        ("top-k", "filter at T > 0; 0 is off"),
        ("seed", "seed of all random streams"),
    )
    for name, text in number:
        default = getattr(settings, name.replace("-", "_"))
        add(f"--{name}", type=int, default=default, metavar="N", help=f"{text}; default: {default}")
    add(
        "--self-temperature",
        type=float,
        default=settings.self_temperature,
        metavar="T",
        help="temperature of self-written prompts; default: 1",
    )
    add("--top-p", type=float, default=settings.top_p, metavar="P", help="filter at T > 0; default: 1 (off)")
    add("--min-p", type=float, default=settings.min_p, metavar="P", help=f"filter at T > 0; default: {settings.min_p}")
    add(
        "--temperatures",
        type=_floats,
        default=settings.temperatures,
        metavar="T,T,...",
        help="shared out over the prompts, repeat one to give it a greater share; default: 0,0.8,1.0",
    )
    add(
        "--batch-size",
        type=int,
        metavar="N",
        help="responses in flight, lower it if memory runs out; default: 2048 on a GPU, else 16",
    )
    add("--time-limit", type=float, metavar="SECONDS", help="stop then; the same command goes on later")
    add("--drop-capped", action="store_true", help="leave out responses that reach --max-new-tokens")
    add("--drop-loops", action="store_true", help="leave out responses that repeat 20 tokens and more in a loop")
    add("--device", help="default: cuda, else xpu, else cpu")
    add("--dtype", choices=("float32", "bfloat16", "float16"), help="default: bfloat16 on a GPU, else the model's own")
    add(
        "--attention",
        choices=ATTENTION,
        default=settings.attention,
        help="kernel of the decoding steps; default: auto, flash where it runs",
    )
    add("--no-graphs", dest="graphs", action="store_false", help="run without CUDA graphs")


def run(arguments: argparse.Namespace) -> int:
    """Run `pydflash train data`; 0, also where the time limit has ended it."""
    begun = time.monotonic()
    if not arguments.prompts and not arguments.self_prompts:
        raise ValueError("train data: prompts must come from --prompts or --self-prompts, got neither")
    settings = DataSettings(**{name: getattr(arguments, name) for name in DataSettings.__dataclass_fields__})
    usable = collect_prompts(arguments.prompts, arguments.exclude)
    if not usable.prompts and not arguments.self_prompts:
        raise ValueError("train data: prompts must hold a usable one, got none (empty, or all of them excluded)")
    dtype = None if arguments.dtype is None else getattr(torch, arguments.dtype)
    target = Target.from_pretrained(arguments.target, device=arguments.device, dtype=dtype)
    if dtype is None and target.device.type != "cpu" and target.dtype == torch.float32:
        target = Target(target.model.to(torch.bfloat16))
    tokenizer = load_tokenizer(arguments.target)
    if settings.time_limit is not None:
        left = max(settings.time_limit - (time.monotonic() - begun), 0.0)
        settings = dataclasses.replace(settings, time_limit=left)
    manifest = make_data(target, tokenizer, arguments.out, usable, settings, str(arguments.target))
    for line in _summary(manifest):
        print(line, file=sys.stderr)
    return 0


def _floats(text: str) -> tuple[float, ...]:
    return tuple(float(part) for part in text.split(","))


def _summary(manifest: dict[str, Any]) -> list[str]:
    totals, last = manifest["totals"], manifest.get("last_run")
    lines = [
        "prompts: " + ", ".join(f"{count:,} {name}" for name, count in manifest["prompts"].items()),
        f"records: {totals['records']:,} of {totals['prompts']:,} prompts, {totals['response_tokens']:,} new tokens",
        "answers: " + (", ".join(f"{count:,} {name}" for name, count in totals["counts"].items()) or "nothing dropped"),
    ]
    if last is not None:
        lines.append(
            f"this run: {last['seconds']:,} s, {last['new_tokens_per_second']:,} tokens/s, {last['prompts_left']:,} "
            f"answers left ({last['attention']} attention, batch {last['batch_size']:,}, {last['device']})"
        )
    return lines
