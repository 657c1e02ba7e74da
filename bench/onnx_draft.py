"""A drafter step on ONNX Runtime beside the official package's, in one process, interleaved, on one thread.

    python bench/onnx_draft.py --json bench/results/onnx_draft.json

Needs the official `dflash` 0.1.0. SmolLM2's shapes with random weights: hidden 576, 5 layers, 9 / 3 heads, 5 features,
vocabulary 49152, tied head; 4 new context rows a step. "body" is the forward up to the hidden states, "full" with head
and tokens; the same weights in all rows. The ratio is official / row, both at their 10th percentile. "drafter" is
`OnnxDrafter.propose` as the loop calls it, with all that the host does.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import numpy as np
import onnx_ir
import onnxruntime
import torch
from machine import machine
from rich.console import Console
from rich.table import Table
from safetensors.torch import save_file

from pydflash import Drafter, DrafterConfig
from pydflash.export import OnnxDrafter, export_drafter

HIDDEN, VOCAB, LAYERS, CONTEXT_ROWS = 576, 49152, 5, 4
CASES = ((8, 256), (16, 256), (8, 2048), (16, 2048))  # block, context
Step = Callable[[], Any]


def config(version: int, block: int) -> dict[str, Any]:
    raw: dict[str, Any] = {
        "architectures": ["DFlashDraftModel" if version == 1 else "DFlash2DraftModel"],
        "model_type": "qwen3",
        "hidden_size": HIDDEN,
        "intermediate_size": 1536,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "vocab_size": VOCAB,
        "max_position_embeddings": 8192,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
        "layer_types": ["full_attention"] * LAYERS,
        "sliding_window": None,
        "use_sliding_window": False,
        "num_target_layers": 30,
    }
    nested: dict[str, Any] = {"block_size": block, "mask_token_id": 16, "target_layer_ids": [1, 8, 14, 20, 27]}
    if version == 2:
        nested |= {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 64, "selector_top_k": 16}
    return raw | {"dflash_config": nested}


def random_drafter(version: int) -> Drafter:
    torch.manual_seed(version)
    drafter = Drafter(DrafterConfig.from_dict(config(version, 16)), backend="reference")
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            if "norm" not in name and "base_kernel" not in name:
                parameter.normal_(0, 0.05)
    return drafter.eval()


def official_steps(drafter: Drafter, table: torch.Tensor, slots: int, past: int) -> tuple[Step, Step]:
    """The official forward over a cache that is cropped after each step: the body alone, and with the tokens."""
    import dflash.model as official
    from transformers import DynamicCache, Qwen3Config

    version = drafter.config.version
    model = (official.DFlashDraftModel if version == 1 else official.DFlash2DraftModel)(
        Qwen3Config(**config(version, 16))
    )
    state = drafter.canonical()
    for name in ("predecessor_codebook", "successor_codebook"):
        if (tensor := state.pop(f"candidate_selector.{name}", None)) is not None:
            state[f"candidate_selector.{name}.weight"] = tensor
    model.load_state_dict(state)
    model.eval()
    head = torch.nn.Linear(HIDDEN, VOCAB, bias=False)
    head.weight = torch.nn.Parameter(table)
    cache = DynamicCache(config=model.config)
    cache.activate_past_recording()
    ids = torch.full((1, slots), 16)

    def body(rows: int = CONTEXT_ROWS) -> torch.Tensor:
        length = cache.get_seq_length()
        out: torch.Tensor = model(
            target_hidden=torch.randn(1, rows, drafter.fc.in_features),
            noise_embedding=torch.nn.functional.embedding(ids, table),
            position_ids=torch.arange(length, length + rows + slots)[None],
            past_key_values=cache,
            use_cache=True,
        )[:, 1 - slots :]
        cache.crop(length - cache.get_seq_length() if rows == CONTEXT_ROWS else past - cache.get_seq_length())
        return out

    def full() -> Any:
        hidden = body()
        if version == 2:
            return model.propose(hidden, ids[:, 0], head, 0.0)
        return model.compute_logits(hidden, head).argmax(-1)

    body(past)
    return body, full


def cut(folder: Path, outputs: list[str]) -> Path:
    """The part of a graph that its caches and `outputs` need, beside it."""
    path = folder / f"{outputs[0]}.onnx"
    if not path.exists():
        model = onnx_ir.load(folder / "draft.onnx")
        wanted = {*outputs, *(v.name for v in model.graph.outputs if str(v.name).startswith("present."))}
        part = onnx_ir.convenience.extract(model.graph, [v.name for v in model.graph.inputs], sorted(wanted))
        part.inputs[:] = [v for v in part.inputs if v.uses()]
        onnx_ir.save(onnx_ir.Model(part, ir_version=11), path, external_data=f"{path.name}.data")
    return path


class GraphSteps:
    """The graph itself at a fixed context, every input and output bound; `outputs` are what it computes."""

    def __init__(self, folder: Path, slots: int, past: int, outputs: list[str], part: bool = False) -> None:
        drafter = OnnxDrafter(folder, threads=1)
        self.session = drafter.session
        if part:
            options = onnxruntime.SessionOptions()
            options.intra_op_num_threads = 1
            providers = ["CPUExecutionProvider"]
            self.session = onnxruntime.InferenceSession(str(cut(folder, outputs)), options, providers=providers)
        self.binding = self.session.io_binding()
        rng = np.random.default_rng(0)
        ids = np.full((1, slots), 16)
        arrays: dict[str, Any] = {
            "input_ids": ids,
            "target_hidden": rng.standard_normal((1, CONTEXT_ROWS, 5 * HIDDEN), np.float32),
        }
        if drafter.config.version == 1:
            arrays["temperature"] = np.zeros(1, np.float32)
        if drafter.inplace:
            arrays["past_len"] = np.array([past])
        else:
            arrays["pos_ctx"] = np.arange(past, past + CONTEXT_ROWS)[None]
            arrays["pos_block"] = past + CONTEXT_ROWS + np.arange(slots)[None]
        rows = -(-(past + CONTEXT_ROWS + slots) // 128) * 128 if drafter.inplace else past
        self.kept = []
        for name in {i.name for i in self.session.get_inputs()} & arrays.keys():
            array = arrays[name]
            self.binding.bind_cpu_input(name, array)
            self.kept.append(array)
        for name in outputs:
            self.binding.bind_output(name)
        for name in (f"{layer}.{kind}" for layer in range(LAYERS) for kind in "kv"):
            value = onnxruntime.OrtValue.ortvalue_from_numpy(rng.standard_normal((1, 3, rows, 64), np.float32))
            self.kept.append(value)
            self.binding.bind_ortvalue_input(f"past.{name}", value)
            if drafter.inplace:
                self.binding.bind_ortvalue_output(f"present.{name}", value)
            else:
                self.binding.bind_output(f"present.{name}")

    def __call__(self) -> None:
        self.session.run_with_iobinding(self.binding)


class DrafterSteps:
    """`append_context` and `propose` of `OnnxDrafter`, always from the same context."""

    def __init__(self, folder: Path, slots: int, past: int) -> None:
        self.drafter, self.slots = OnnxDrafter(folder, threads=1), slots
        rng = np.random.default_rng(0)
        self.rows = rng.standard_normal((1, CONTEXT_ROWS, 5 * HIDDEN), np.float32)
        self.cache = self.drafter.new_cache(1, past + 64)
        self.drafter.append_context(rng.standard_normal((1, past, 5 * HIDDEN), np.float32), self.cache)
        self.anchor = np.array([7])
        self.drafter.propose(self.anchor, self.cache, block_size=slots)  # the buffers have their size now

    def __call__(self) -> None:
        cache = copy.copy(self.cache)
        self.drafter.append_context(self.rows, cache)
        self.drafter.propose(self.anchor, cache, block_size=self.slots)


def export_all(work: Path, version: int, drafter: Drafter, table: torch.Tensor) -> dict[str, Path]:
    """A folder for each kind of file."""
    target = work / "target"
    target.mkdir(exist_ok=True)
    save_file({"model.embed_tokens.weight": table}, target / "model.safetensors", metadata={"format": "pt"})
    sizes = {"hidden_size": HIDDEN, "num_hidden_layers": 30, "vocab_size": VOCAB, "tie_word_embeddings": True}
    (target / "config.json").write_text(json.dumps(sizes))
    drafter.save_pretrained(work / f"drafter{version}")
    kinds: dict[str, dict[str, Any]] = {
        f"{kind}, {profile}": {"quantize": None if kind == "float32" else kind, "profile": profile}
        for kind in ("float32", "8bit", "4bit", "int8")
        for profile in ("portable", "inplace")
    }
    kinds["debug"] = {"debug_outputs": True}
    folders = {}
    for name, options in kinds.items():
        folders[name] = work / f"{version}, {name}"
        report = export_drafter(work / f"drafter{version}", target, folders[name], **options)
        print("\n".join(report.lines()), flush=True)
    return folders


def interleaved(steps: dict[str, Step], samples: int) -> dict[str, dict[str, float]]:
    """Milliseconds of each step, taken in turns: p10 and median."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    with torch.inference_mode():
        for sample in range(samples + 2):
            for name, step in steps.items():
                begin = time.perf_counter()
                step()
                if sample >= 2:
                    times[name].append(1e3 * (time.perf_counter() - begin))
    return {
        name: {"p10": round(float(np.percentile(t, 10)), 3), "median": round(float(np.median(t)), 3)}
        for name, t in times.items()
    }


def measure(version: int, folders: dict[str, Path], drafter: Drafter, table: torch.Tensor, samples: int) -> list[Any]:
    rows = []
    drafts = ["draft_ids", "cand_ids", "edge_scores" if version == 2 else "cand_scores"]
    for slots, past in CASES:
        body, full = official_steps(drafter, table, slots, past)
        steps: dict[str, Step] = {"official, body": body, "official, full": full}
        steps["float32, portable, body"] = GraphSteps(folders["debug"], slots, past, ["hidden"], True)
        if version == 2:
            steps["float32, portable, without selector"] = GraphSteps(
                folders["float32, portable"], slots, past, ["cand_ids", "cand_scores"], True
            )
        for name, folder in folders.items():
            if name != "debug":
                steps[f"{name}, full"] = GraphSteps(folder, slots, past, drafts)
        steps["float32, portable, drafter"] = DrafterSteps(folders["float32, portable"], slots, past)
        steps["float32, inplace, drafter"] = DrafterSteps(folders["float32, inplace"], slots, past)
        found = interleaved(steps, samples)
        for name, times in found.items():
            base = found["official, body" if name.endswith("body") else "official, full"]
            ratio = round(base["p10"] / times["p10"], 2)
            row = {"version": version, "slots": slots, "context": past, "step": name, **times, "ratio": ratio}
            rows.append(row)
            print(f"DFlash {version} S{slots} P{past}: {name:40} {times['p10']:8.2f} ms  {ratio:.2f}x", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=24)
    parser.add_argument("--versions", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[Any] = []
    torch.manual_seed(0)
    table = torch.randn(VOCAB, HIDDEN) * 0.05
    with tempfile.TemporaryDirectory() as work:
        for version in args.versions:
            drafter = random_drafter(version)
            folders = export_all(Path(work), version, drafter, table)
            rows += measure(version, folders, drafter, table, args.samples)
    versions = {"onnxruntime": onnxruntime.__version__, "dflash": "0.1.0"}
    if args.json is not None:
        content = {"machine": machine() | versions, "context_rows": CONTEXT_ROWS, "samples": args.samples, "rows": rows}
        args.json.write_text(json.dumps(content, indent=1) + "\n")
    show(rows)


def show(rows: list[Any]) -> None:
    console = Console(width=110)
    for version in sorted({row["version"] for row in rows}):
        table = Table(f"DFlash {version}: p10 ms (times official)", *(f"S{slots} P{past}" for slots, past in CASES))
        names = list(dict.fromkeys(row["step"] for row in rows if row["version"] == version))
        for name in names:
            found = [row for row in rows if (row["version"], row["step"]) == (version, name)]
            table.add_row(name, *(f"{row['p10']:.1f} ({row['ratio']:.2f})" for row in found))
        console.print(table)


if __name__ == "__main__":
    main()
