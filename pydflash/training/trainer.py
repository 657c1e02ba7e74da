"""The training loop: accelerate for devices and precision, everything random derived from (seed, step)."""

from __future__ import annotations

import gc
import hashlib
import json
import math
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from ..checkpoints.files import read_json, write_file
from ..drafter.module import Drafter
from ..target.generic import Target
from .data import weights_sha256
from .features import FeatureSource, compiled_layers, pad_records, record_lengths, to_device
from .objective import Objective, ObjectiveConfig, sample_anchors, summarise
from .shards import lock_folder

_RESULTS = ("config.json", "model.safetensors", "input_conditioned.json")


class Records(Protocol):
    """Training records: `records[i]` begins with (ids [n], prompt_length), as `ShardReader` gives them."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> tuple[Any, ...]: ...


@dataclass(frozen=True, slots=True)
class TrainConfig:
    """How long, how fast, and where to.

    Attributes:
        out: Folder for checkpoints, log.jsonl, TensorBoard events, curves.png, and the drafter at the end.
        epochs: Passes over the data; `max_steps` > 0 ends earlier, `time_limit` seconds too (the schedule follows
            whichever comes first, so a timed run still anneals).
        batch_size: Sequences per device and micro-step; `accumulation` micro-steps make a step.
        max_length: Longer records are cut, on the right.
        optimizer: "adamw" with betas (0.9, 0.95), or "muon": orthogonalised updates for the matrices of the layers,
            scaled to the size of AdamW's so that one `lr` serves both, and AdamW for the rest.
        lr, warmup, weight_decay, clip: Linear warm-up over that share of the steps, cosine to zero, gradient norm
            clipped.
        precision: "bf16" autocast with float32 master weights, or "no".
        cache_gb: Memory for the target's features, see `FeatureSource`.
        save_every, keep: Steps between checkpoints, and how many stay.
    """

    out: Path
    epochs: float = 3.0
    max_steps: int = 0
    time_limit: float = 0.0
    batch_size: int = 64
    accumulation: int = 1
    max_length: int = 2048
    optimizer: str = "adamw"
    lr: float = 6e-4
    warmup: float = 0.04
    weight_decay: float = 0.01
    clip: float = 1.0
    precision: str = "bf16"
    cache_gb: float = 0.0
    log_every: int = 20
    save_every: int = 500
    keep: int = 2
    seed: int = 0

    def __post_init__(self) -> None:
        positive = (
            "epochs",
            "batch_size",
            "accumulation",
            "max_length",
            "lr",
            "clip",
            "log_every",
            "save_every",
            "keep",
        )
        for name in (*positive, "max_steps", "time_limit", "weight_decay", "cache_gb", "warmup", "seed"):
            value = getattr(self, name)
            if not math.isfinite(value) or value < 0 or (name in positive and value == 0):
                least = "above 0" if name in positive else "0 or more"
                raise ValueError(f"training: {name} must be a finite number {least}, got {value}")
        if self.warmup >= 1 or self.seed >= 2**31:
            raise ValueError(f"training: warmup must be below 1 and seed below 2^31, got {self.warmup} and {self.seed}")
        if self.optimizer not in ("adamw", "muon"):
            raise ValueError(f"training: optimizer must be 'adamw' or 'muon', got {self.optimizer!r}")
        if self.precision not in ("bf16", "no"):
            raise ValueError(f"training: precision must be 'bf16' or 'no', got {self.precision!r}")


def plan(lengths: Sequence[int], batch: int, epoch: int, seed: int) -> list[list[int]]:
    """The batches of one epoch: shuffled, of similar lengths inside a batch, the remainder left out."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    order = torch.randperm(len(lengths), generator=generator).tolist()
    window = 32 * batch
    batches = []
    for start in range(0, len(order), window):
        part = sorted(order[start : start + window], key=lambda i: lengths[i])
        batches += [part[i : i + batch] for i in range(0, len(part) - batch + 1, batch)]
    shuffled = torch.randperm(len(batches), generator=generator).tolist()
    return [batches[i] for i in shuffled]


def make_optimizers(drafter: Drafter, config: TrainConfig) -> list[torch.optim.Optimizer]:
    """The optimizers of a run: weight decay on matrices only, and Muon for those of the layers where it is chosen.

    Raises: ValueError for Muon with a torch that has none.
    """
    matrices: list[nn.Parameter] = []
    tables: list[nn.Parameter] = []
    rest: list[nn.Parameter] = []
    for name, parameter in ((n, p) for n, p in drafter.named_parameters() if p.requires_grad):
        table = "codebook" in name or name.startswith(("embed_tokens", "lm_head"))
        kind = rest if parameter.dim() != 2 else tables if table else matrices
        kind.append(parameter)
    groups = [{"params": rest + tables, "weight_decay": 0.0}]
    out: list[torch.optim.Optimizer] = []
    if config.optimizer == "muon":
        if not hasattr(torch.optim, "Muon"):
            raise ValueError(f"training: optimizer 'muon' needs torch 2.9 or newer, got {torch.__version__}")
        out.append(
            torch.optim.Muon(matrices, config.lr, weight_decay=config.weight_decay, adjust_lr_fn="match_rms_adamw")
        )
    else:
        groups.append({"params": matrices, "weight_decay": config.weight_decay})
    fused = drafter.device.type == "cuda"
    return [torch.optim.AdamW(groups, config.lr, betas=(0.9, 0.95), fused=fused), *out]


def _fingerprint(records: Records, lengths: Sequence[int]) -> str:
    """Names data by its lengths and 32 records from all over it."""
    found = hashlib.sha256(str(list(lengths)).encode())
    for i in range(0, len(lengths), max(1, len(lengths) // 32)):
        found.update(torch.as_tensor(records[i][0]).long().numpy().tobytes())
    return found.hexdigest()


class Trainer:
    """Trains a drafter for a frozen target on records; `fit` returns the trained drafter and writes it to `out`.

    A run that was stopped goes on from its last checkpoint when `fit` is called again with the same arguments, and
    ends with the same weights as one that never stopped (bit for bit on a CPU in float32).

    Raises: ValueError where the drafter does not fit the target, or a checkpoint was made with other settings.
    """

    def __init__(
        self,
        drafter: Drafter,
        target: Target,
        records: Records,
        config: TrainConfig,
        objective: ObjectiveConfig | None = None,
    ) -> None:
        from accelerate import Accelerator

        drafter.check_target(
            hidden_size=target.hidden_size,
            num_layers=target.num_layers,
            vocab_size=target.vocab_size,
            embedding_rows=target.embed_weight.shape[0],
        )
        self.config, self.objective_config = config, objective or ObjectiveConfig()
        if drafter.candidate_selector is not None and self.objective_config.selector_weight == 0:
            drafter.candidate_selector.requires_grad_(False)
        if self.objective_config.attention == "flex" and target.device.type == "cpu":
            raise ValueError("training: attention must be 'dense' or 'auto' on a CPU (no backward there), got 'flex'")
        self.target, self.records = target, records
        target.model.requires_grad_(False)
        if target.device.type == "cuda":
            for layer in drafter.stack:  # dozens of small operations each, which compilation fuses
                layer.before_attention = torch.compile(layer.before_attention)  # type: ignore[method-assign]
                layer.after_attention = torch.compile(layer.after_attention)  # type: ignore[method-assign]
        self.accelerator = Accelerator(
            mixed_precision=config.precision, cpu=target.device.type == "cpu", step_scheduler_with_optimizer=False
        )
        module = Objective(drafter.float().train(), target.embed_weight, target.head, self.objective_config)
        self.module = self.accelerator.prepare(module)
        self.optimizers = [self.accelerator.prepare(o) for o in make_optimizers(drafter, config)]
        self.drafter = drafter
        self.source = FeatureSource(target, distil=self.objective_config.distillation > 0, cache_gb=config.cache_gb)
        self.longest = min(config.max_length, target.max_length or config.max_length)
        self.lengths = record_lengths(records, self.longest, target.embed_weight.shape[0])
        self.world, self.rank = self.accelerator.num_processes, self.accelerator.process_index
        self.per_step = config.batch_size * config.accumulation * self.world
        self.steps_per_epoch = len(plan(self.lengths, self.per_step, 0, config.seed))
        if self.steps_per_epoch == 0:
            raise ValueError(f"training: must have at least {self.per_step} records for one step, got {len(records)}")
        self.total = math.ceil(config.epochs * self.steps_per_epoch)
        if config.max_steps:
            self.total = min(self.total, config.max_steps)
        # What a run is about besides its settings: going on with another drafter, target or data would be silent.
        self._identity = {
            "drafter": drafter.config.to_dict(),
            "conditioning": type(drafter).__name__,
            "target": weights_sha256(target.model),
            "data": _fingerprint(records, self.lengths),
        }
        self.step, self.seconds = 0, 0.0
        self.history: list[dict[str, Any]] = []

    # --- the loop -------------------------------------------------------------------------------------------

    def fit(self, progress: bool = True) -> Drafter:
        """Train from the last checkpoint, or the start, to the end; write the drafter and the curves."""
        self.config.out.mkdir(parents=True, exist_ok=True)
        with closing(lock_folder(self.config.out, "training")) if self.rank == 0 else nullcontext():
            self._resume()
            self._loop(progress)
            return self._finish()

    def _loop(self, progress: bool) -> None:
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )

        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        compiled = compiled_layers(list(self.target.layers) if self.target.device.type == "cuda" else [])
        began, before = time.perf_counter(), self.seconds
        sums: dict[str, Tensor] = {}
        mark = (time.perf_counter(), self.source.tokens)
        with compiled, Progress(*columns, disable=not (progress and self.rank == 0)) as bar:
            task = bar.add_task("training", total=self.total, completed=self.step)
            for batch in self._batches():
                self._set_rate()
                for name, value in self._train_step(batch).items():
                    sums[name] = sums.get(name, 0) + value
                self.step += 1
                self.seconds = self._same_on_all(before + time.perf_counter() - began)
                last = self.step >= self.total or self._time_is_up()
                if self.step % self.config.log_every == 0 or last:
                    rate = (self.source.tokens - mark[1]) / max(time.perf_counter() - mark[0], 1e-9)
                    text = self._log(sums, rate * self.world)
                    mark, sums = (time.perf_counter(), self.source.tokens), {}
                    bar.update(task, description=text)
                bar.update(task, completed=self.step, total=max(self.total, self.step))
                if self.step % self.config.save_every == 0 and not last:
                    self._checkpoint()
                if last:
                    break

    def _batches(self) -> Iterator[list[int]]:
        """Record indices of each step from the current one on, all ranks' together."""
        while True:
            epoch, inside = divmod(self.step, self.steps_per_epoch)
            yield from plan(self.lengths, self.per_step, epoch, self.config.seed)[inside:]

    def _train_step(self, indices: list[int]) -> dict[str, Tensor]:
        config = self.config
        sums: dict[str, Tensor] = {}
        for micro in range(config.accumulation):
            first = (micro * self.world + self.rank) * config.batch_size
            keys = indices[first : first + config.batch_size]
            padded = pad_records([self._record(key) for key in keys], limit=self.target.max_length)
            key = (self.config.seed * 1_000_003 + self.step) * 4099 + micro * self.world + self.rank
            generator = torch.Generator().manual_seed(key)
            anchors = sample_anchors(padded.supervised, self.objective_config.num_anchors, generator)
            batch = self.source.batch(keys, padded)
            with self.accelerator.autocast():
                loss, found = self.module(batch, to_device(anchors, self.target.device))
            self.accelerator.backward(loss / config.accumulation)
            for name, value in found.items():
                sums[name] = sums.get(name, 0) + value
        self.accelerator.clip_grad_norm_(self.drafter.parameters(), config.clip)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return sums

    def _record(self, index: int) -> tuple[Tensor, int]:
        ids, prompt_length, *_ = self.records[index]
        return torch.as_tensor(ids)[: self.longest].long(), prompt_length

    def _same_on_all(self, seconds: float) -> float:
        """The first process's clock on all of them where it steers the schedule: they must stay equal."""
        if self.world == 1 or not self.config.time_limit:
            return seconds
        shared = torch.tensor([seconds], dtype=torch.float64, device=self.target.device)
        torch.distributed.broadcast(shared, 0)
        return float(shared)

    def _progress(self) -> float:
        """Share of the run that is done: by steps or by time, whichever is further."""
        done = self.step / self.total
        return max(done, self.seconds / self.config.time_limit) if self.config.time_limit else done

    def _time_is_up(self) -> bool:
        return bool(self.config.time_limit) and self.seconds >= self.config.time_limit

    def _set_rate(self) -> None:
        done, warmup = min(self._progress(), 1.0), self.config.warmup
        ramp = min(1.0, (done + 1 / self.total) / warmup) if warmup else 1.0
        cosine = 0.5 * (1 + math.cos(math.pi * max(0.0, done - warmup) / (1 - warmup)))
        for group in (group for optimizer in self.optimizers for group in optimizer.param_groups):
            group["lr"] = self.config.lr * ramp * cosine

    # --- logs and checkpoints -------------------------------------------------------------------------------

    def _log(self, sums: dict[str, Tensor], rate: float) -> str:
        reduced = self.accelerator.reduce(sums, "sum") if self.world > 1 else sums
        row: dict[str, Any] = {"step": self.step, "epoch": self.step / self.steps_per_epoch, "seconds": self.seconds}
        if not math.isfinite(float(reduced["ce"])):
            raise RuntimeError(f"training: the loss is not finite at step {self.step}; lower lr, or look at the data")
        if float(reduced["blocks"]) == 0:
            raise ValueError("training: records must have responses of two tokens or more inside max_length, got none")
        row |= {"lr": self.optimizers[0].param_groups[0]["lr"], "tokens_per_second": rate} | summarise(reduced)
        self.history.append(row)
        if self.rank == 0:
            with (self.config.out / "log.jsonl").open("a") as log:
                log.write(json.dumps(row) + "\n")
            self._tensorboard([row])
        return f"ce {row['ce']:.3f}  accepted length {row['accepted_length']:.2f}"

    def _tensorboard(self, rows: Sequence[dict[str, Any]], anew: bool = False) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            return  # TensorBoard is optional; log.jsonl and the picture hold the same numbers
        folder = self.config.out / "tensorboard"
        if anew:
            shutil.rmtree(folder, ignore_errors=True)
        with SummaryWriter(str(folder)) as writer:
            for row in rows:
                for name, value in row.items():
                    items = (
                        {f"{name}/{i}": x for i, x in enumerate(value, 1)} if isinstance(value, list) else {name: value}
                    )
                    for tag, item in items.items():
                        writer.add_scalar(tag, item, row["step"])

    def _settings(self) -> dict[str, Any]:
        kept = asdict(self.config) | {"objective": asdict(self.objective_config)}
        for name in ("out", "log_every", "save_every", "keep", "cache_gb", "time_limit"):
            kept.pop(name)
        return kept | {"records": len(self.records), "world": self.world} | self._identity

    def _checkpoint(self) -> None:
        folder = self.config.out / f"step-{self.step:07d}"
        part = folder.with_suffix(".part")
        try:
            self.accelerator.save_state(str(part))
        except (OSError, RuntimeError, SafetensorError) as error:  # of torch and of safetensors, without a file's name
            raise OSError(f"training: {part} cannot be written, is the disk full? ({error})") from error
        self.accelerator.wait_for_everyone()  # every rank writes its own random state
        if self.rank == 0:
            state = {"step": self.step, "seconds": self.seconds, "settings": self._settings()}
            (part / "trainer.json").write_text(json.dumps(state | {"history": self.history}))
            for path in part.rglob("*.safetensors"):  # safetensors writes for the owner alone
                shutil.copymode(part / "trainer.json", path)
            os.replace(part, folder)
            for old in self._checkpoints()[: -self.config.keep]:
                shutil.rmtree(old)
        self.accelerator.wait_for_everyone()

    def _checkpoints(self) -> list[Path]:
        return sorted(p for p in self.config.out.glob("step-*") if p.suffix != ".part")

    def _resume(self) -> None:
        found = self._checkpoints()
        if not found:
            if self.rank == 0 and (here := [p.name for p in self.config.out.iterdir() if p.name in _RESULTS]):
                raise ValueError(
                    f"training: out must be a new folder or one with checkpoints, got {self.config.out} with {here[0]}"
                )
            if self.rank == 0:
                self._restore_logs()
            return
        state = read_json(found[-1] / "trainer.json", "training")
        if state["settings"] != json.loads(json.dumps(self._settings())):
            different = [
                k for k, v in self._settings().items() if state["settings"].get(k) != json.loads(json.dumps(v))
            ]
            raise ValueError(
                f"training: {found[-1]} was made with other settings ({', '.join(different)}); choose another folder"
            )
        self.accelerator.load_state(str(found[-1]))
        self.step, self.seconds, self.history = state["step"], state["seconds"], state["history"]
        if self.rank == 0:
            self._restore_logs()

    def _restore_logs(self) -> None:
        """The logs as they were at the checkpoint that the run goes on from: later rows are written again."""
        rows = "".join(json.dumps(row) + "\n" for row in self.history)
        write_file(self.config.out / "log.jsonl", lambda path: path.write_text(rows))
        if (self.config.out / "tensorboard").is_dir():
            self._tensorboard(self.history, anew=True)

    def _finish(self) -> Drafter:
        from .plots import plot_training

        drafter = self.drafter.eval()
        if self.rank == 0:
            drafter.to(torch.bfloat16 if self.config.precision == "bf16" else torch.float32)
            drafter.save_pretrained(self.config.out)
            plot_training(self.history, self.config.out / "curves.png")
        self.accelerator.wait_for_everyone()
        return drafter

    def close(self) -> None:
        """End the process group of several processes; nothing can be trained afterwards.

        What holds the group goes first: where torch's DDP lets go of it last, it waits for a thread that needs the GIL.
        """
        del self.module
        self.accelerator.free_memory()
        gc.collect()
        if self.world > 1:
            self.accelerator.end_training()
