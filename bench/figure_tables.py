"""The tables of figures.py: each function reads bench/results and returns Markdown."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

_RESULTS = Path(__file__).parent / "results"
_SETS = ("gsm8k", "humaneval", "mbpp", "mt_bench", "vicuna")
_DRAFTER = "smollm2-135m-instruct-dflash2"


def _read(name: str) -> Any:
    return json.loads((_RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    lines = [list(head), *map(list, rows)]
    lines.insert(1, ["---"] * len(lines[0]))
    return "\n".join(f"| {' | '.join(line)} |".replace("|  |", "| |").replace("|  |", "| |") for line in lines)


def _caption(file: str, script: str, machine: dict[str, Any], *more: str) -> str:
    """Where a table comes from: the machine, versions, the script and the file."""
    device = machine.get("gpu") or machine.get("device") or machine.get("cpu")
    threads = machine.get("threads")
    words = [str(device).replace("(R)", "")]
    if "NVIDIA" not in words[0] and threads:
        words.append(f"{threads} thread{'s' if threads > 1 else ''}")
    words.append(f"torch {str(machine['torch']).partition('+')[0]}")
    if machine.get("date"):
        words.append(machine["date"])
    return f"\n\n{', '.join([*words, *more])}; `{script}`, `bench/results/{file}.json`."


def _speed(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def _by(rows: list[dict[str, Any]], **where: Any) -> dict[str, Any]:
    """The one row with these values."""
    (row,) = [row for row in rows if all(row.get(key) == value for key, value in where.items())]
    return row


def results() -> str:
    """README: whole answers on a GPU and on a CPU."""
    gpu, cpu = _read("gpu_bench"), _read("cpu")
    at_all = {row["method"]: row["tokens_per_second"] for row in gpu["rows"] if row["prompts"] == "all"}
    by_method = {row["method"]: row["tokens_per_second"] for row in cpu["rows"]}

    def row(name: str, plain: float, walk: float, tree: float, other: str) -> list[str]:
        return [name, _speed(plain), _speed(walk), _speed(tree), f"{tree / plain:.1f}x", other]

    threads = cpu["machine"]["threads"]
    rows = [
        row("H200, bfloat16", at_all["plain"], at_all[_DRAFTER], at_all[f"{_DRAFTER} tree 31"], ""),
        row(
            f"CPU, {threads} cores with AMX, bfloat16",
            *(by_method[name] for name in ("plain", "walk", "tree")),
            _speed(by_method["transformers generate"]),
        ),
        row("the same, 8-bit weights", *(by_method[f"int8, {name}"] for name in ("plain", "walk", "tree")), ""),
    ]
    return _table(("tokens/s", "plain", "walk", "tree", "tree over plain", "transformers"), rows)


def gpu_round() -> str:
    """A round at the shapes of Qwen3-8B, batch 1."""
    found = _read("gpu_round")
    rows = []
    for name, drafter, slots in (
        ("plain token", "none", 1),
        ("DFlash, block 16", "v1 b16", 16),
        ("DFlash 2, block 8", "v2 b8", 8),
        ("DFlash 2, tree of 31", "v2 b8", 32),
        ("DFlash 2, tree of 63", "v2 b8", 64),
    ):
        for row in found["rows"]:
            if (row["shape"], row["batch"], row["drafter"], row["slots"]) == ("8b", 1, drafter, slots):
                parts = [
                    f"{row[key]:.2f}" if key in row and drafter != "none" else "" for key in ("draft_ms", "verify_ms")
                ]
                official = f"{row['official_ms']:.1f}" if "official_ms" in row else ""
                rows.append(
                    [name, f"{row['context']:,}", f"{row['round_ms']:.2f}", *parts, f"{row['floor_ms']:.2f}", official]
                )
    head = ("ms", "context", "round", "draft", "verify", "floor", "official loop")
    note = f"copy {found['copy_gb_s_gpu']:,.0f} GB/s"
    return _table(head, rows) + _caption(
        "gpu_round", "bench/gpu_round.py", found["machine"], "bfloat16, random weights, batch 1", note
    )


def gpu_batches() -> str:
    """Rounds of batches beside their linear layers and the bytes of their keys and values."""
    found = _read("gpu_round")
    rows = []
    for row in found["rows"]:
        if row["batch"] > 1:
            name = {"none": "plain token", "v1 b16": "DFlash, block 16", "v2 b8": "DFlash 2, block 8"}[row["drafter"]]
            rows.append(
                [
                    name,
                    str(row["batch"]),
                    f"{row['context']:,}",
                    f"{row['round_ms']:.2f}",
                    f"{row['linears_ms']:.2f}",
                    f"{row['times_linears']:.2f}x",
                ]
            )
    head = ("ms", "batch", "context", "round", "linear layers alone", "round over linear layers and K/V bytes")
    return _table(head, rows) + _caption("gpu_round", "bench/gpu_round.py", found["machine"], "the same shapes")


def gpu_laws() -> str:
    """What penalties and log-probabilities add to a round."""
    found = _read("gpu_laws")
    names = {"v1 b16 walk": "DFlash, block 16", "v2 b8 walk": "DFlash 2, block 8", "v2 b8 tree": "DFlash 2, tree of 31"}
    rows = [
        [names[f"{row['drafter']} {row['path']}"], f"{row['round_ms']:.2f}"]
        + [f"{100 * (row[f'{way}_ratio'] - 1):.1f} %" for way in ("penalties", "logprobs", "both")]
        for row in found["rows"]
    ]
    head = ("ms", "a round", "penalties and biases", "5 log-probabilities a token", "both")
    return _table(head, rows) + _caption("gpu_laws", "bench/gpu_laws.py", found["machine"], "context 512, batch 1")


def gpu_answers() -> str:
    """Whole answers on a GPU."""
    found = _read("gpu_bench")
    rows = []
    for method, name in (("", "walk"), (" tree 31", "tree of 31"), (" tree 63", "tree of 63")):
        row = _by(found["rows"], method=_DRAFTER + method, prompts="all")
        ratio = _by(found["speed"], method=_DRAFTER + method, prompts="all", against="plain")
        low, high = ratio["interval"]
        rows.append([name, f"{row['acceptance_length']:.2f}", f"{ratio['ratio']:.2f} ({low:.2f}-{high:.2f})"])
    settings = found["settings"]
    return _table(("", "acceptance length", "x plain (95 %)"), rows) + _caption(
        "gpu_bench",
        "pydflash bench",
        found["machine"],
        f"bfloat16, greedy, {settings['num_prompts']} prompts of each of {len(settings['prompts'])} sets, "
        f"{settings['max_new_tokens']} new tokens, prompt and graph capture included",
    )


def _gpu_ops(part: str) -> Any:
    return _read("gpu_ops")[part]


def gpu_linear() -> str:
    """Linear layers of few rows beside cuBLAS, all of a forward in a row."""
    found = _gpu_ops("linear")
    rows = [
        [
            str(row["rows"]),
            f"{row['ours_us'] / 1000:.2f}",
            f"{row['cublas_us'] / 1000:.2f}",
            f"{row['floor_us'] / 1000:.2f}",
        ]
        for row in found["results"]
        if row["linear"] == "chain"
    ]
    return _table(("rows", "`skinny_linear`, ms", "cuBLAS, ms", "floor, ms"), rows) + _caption(
        "gpu_ops", "bench/gpu_ops.py", found["setup"], "all linear layers of Qwen3-8B"
    )


def gpu_sampling() -> str:
    """Acceptance and the choice of drafts beside torch."""
    found = _gpu_ops("sampling")
    rows = [
        [row["case"], f"{row['median_us']['pydflash']:.1f}", f"{row['median_us']['torch']:.1f}"]
        for row in found["results"]
        if "torch" in row["median_us"] and " 1 x " in row["case"]
    ]
    return _table(("case", "pydflash, us", "torch, us"), rows) + _caption(
        "gpu_ops", "bench/gpu_ops.py", found["setup"], f"vocabulary of {found['setup']['vocab']:,}"
    )


def cpu() -> str:
    """Whole texts on a CPU."""
    found = _read("cpu")
    ratios = {(row["method"], row["over"]): row for row in found["ratios"]}
    rows = []
    for row in found["rows"]:
        name, accepted = row["method"], row["acceptance_length"]
        base = next((over for over in ("plain", "int8, plain") if (name, over) in ratios), None)
        over = ratios.get((name, base or ""))
        rows.append(
            [
                name,
                _speed(row["tokens_per_second"]),
                "" if accepted is None else f"{accepted:.2f}",
                f"{over['median']:.1f} ({over['p10']:.1f}-{over['p90']:.1f})" if over else "",
                f"{row['same_as_plain']} of {found['prompts']}",
            ]
        )
    head = ("", "tokens/s", "acceptance length", "x plain, median (10-90 %)", "texts like plain's")
    note = f"greedy, {found['prompts']} prompts of five sets, {found['max_new_tokens']} new tokens"
    copy = f"copy {found['machine']['copy_gb_s']} GB/s"
    return _table(head, rows) + _caption("cpu", "bench/cpu.py", found["machine"], note, copy)


def cpu_hybrid() -> str:
    """Rounds of a Gated DeltaNet hybrid with random weights."""
    found = _read("cpu_hybrid")
    times, kept = found["ms"], found["block"]
    names = {
        "transformers": "transformers, a token",
        "plain": "plain, a token",
        "walk": f"walk of {kept} slots",
        "tree": f"tree of {found['nodes']} nodes",
    }
    rows = []
    for side, name in names.items():
        tokens = kept if side in ("walk", "tree") else 1
        ratios = [f"{times[against] * tokens / times[side]:.1f}" for against in ("transformers", "plain")]
        rows.append([name, f"{times[side]:.1f}", str(tokens), *ratios])
    head = ("", "ms", "tokens", "x transformers", "x plain")
    note = f"bfloat16, perfect drafts, {found['weight_bytes'] / 1e9:.1f} GB of weights"
    copy = f"copy {found['machine']['copy_gb_s']} GB/s"
    return _table(head, rows) + _caption("cpu_hybrid", "bench/cpu_hybrid.py", found["machine"], note, copy)


def cpu_linear() -> str:
    """Packed linear layers of a whole model beside torch's and oneDNN's."""
    found = _read("cpu_linear")
    kinds = ("torch", "oneDNN", "packed", "int8")
    rows = [[row["model"], str(row["rows"]), *(f"{row['ms'][kind]:.1f}" for kind in kinds)] for row in found["rows"]]
    head = ("model", "rows", "torch, ms", "packed by oneDNN, ms", "packed, ms", "8 bits, ms")
    copy = f"copy {found['machine']['copy_gb_s']} GB/s"
    return _table(head, rows) + _caption("cpu_linear", "bench/cpu_linear.py", found["machine"], "bfloat16", copy)


def cpu_attention() -> str:
    """`block_attention` beside torch's SDPA: how many times faster, over both models and both masks."""
    found = _read("attention")
    rows = []
    for dtype in ("float32", "bfloat16"):
        for context in (256, 2048, 8192):
            plain, folded = [], []
            for row in found["results"]:
                if row["dtype"] == dtype and f"ctx {context} " in row["case"]:
                    ours = row["median_us"]
                    plain.append(min(ours["expanded"], ours["gqa"]) / ours["pydflash"])
                    folded.append(ours["folded"] / ours["pydflash"])
            spans = [f"{min(ratio):.1f}-{max(ratio):.1f}x" for ratio in (plain, folded)]
            rows.append([dtype, f"{context:,}", *spans])
    head = ("dtype", "context", "over SDPA at its best", "over SDPA with query heads folded by hand")
    note = "blocks of 8 and 16, heads of SmolLM2 and Qwen3-8B"
    return _table(head, rows) + _caption("attention", "bench/attention.py", found["setup"], note)


def cpu_sampling() -> str:
    """Acceptance and the choice of drafts on a CPU."""
    found = _read("sampling")
    rows = [
        [row["case"], *(f"{row['median_ms'][kind]:.2f}" if kind in row["median_ms"] else "" for kind in kinds)]
        for kinds in [("pydflash", "torch", "transformers")]
        for row in found["results"]
    ]
    head = ("case", "pydflash, ms", "torch, ms", "transformers' warpers, ms")
    note = f"{found['machine']['slots']} rows, vocabulary of {found['machine']['vocab']:,}"
    return _table(head, rows) + _caption("sampling", "bench/sampling.py", found["machine"], note)


def tree_sampling() -> str:
    """Rules for trees at T = 1."""
    found = _read("tree_sampling")
    lengths = {row["method"]: row["acceptance_length"] for row in found["rows"]}
    rows = [["7", f"{lengths['walk']:.2f}", "", "", ""]]
    for nodes in (15, 31, 63):
        trunk = _by(found["rows"], method=f"trunk {nodes}")
        low, high = trunk["minus_tree_interval"]
        rows.append(
            [
                str(nodes),
                "",
                f"{lengths[f'tree {nodes}']:.2f}",
                f"{lengths[f'trunk {nodes}']:.2f}",
                f"{trunk['minus_tree']:+.2f} ({low:.2f} to {high:.2f})",
            ]
        )
    head = ("drafts", "sampled walk alone", "tree by rule 1", "walk as the trunk, rule 2", "difference (95 %)")
    note = f"mean of five sets of {found['settings']['num_prompts']} prompts"
    return _table(head, rows) + _caption("tree_sampling", "bench/tree_sampling.py", found["machine"], note)


def trees() -> str:
    """Acceptance length by path and number of nodes."""
    found = _read("trees")["rows"]

    def mean(method: str, temperature: float) -> float:
        rows = [row for row in found if (row["method"], row["temperature"]) == (method, temperature)]
        return statistics.fmean(row["acceptance_length"] for row in rows)

    walk, oracle = mean("walk", 0.0), mean("oracle", 0.0)
    rows = []
    for method in (
        "walk",
        "viterbi",
        *(f"{kind} {n}" for kind, ns in (("tree", (7, 15, 31, 63)), ("slots", (15, 31, 63))) for n in ns),
        "oracle",
    ):
        cells = [
            f"{_by(found, method=method, temperature=0.0, prompts=name)['acceptance_length']:.2f}" for name in _SETS
        ]
        gain = (mean(method, 0.0) - walk) / (oracle - walk)
        rows.append([method, *cells, f"{mean(method, 0.0):.2f}", f"{gain:.2f}", f"{mean(method, 1.0):.2f}"])
    rows.append(["sampled walk", "", "", "", "", "", "", "", f"{mean('sampled', 1.0):.2f}"])
    head = ("", *_SETS, "mean", "of the oracle's gain", "mean at T = 1")
    whole = _read("trees")
    note = (
        f"bfloat16, {whole['settings']['num_prompts']} prompts a set, {whole['settings']['max_new_tokens']} new tokens"
    )
    return _table(head, rows) + _caption("trees", "bench/trees.py", whole["machine"], note)


def tree_speed() -> str:
    """Speed of trees of several sizes on a CPU."""
    found = _read("bench")
    rows = []
    for row in found["rows"]:
        if row["prompts"] != "all":
            continue
        method, accepted = row["method"], row["acceptance_length"]
        cells = []
        for key, against in (("speed", "plain"), ("walk_speed", "walk")):
            ratio = [r for r in found[key] if (r["method"], r["prompts"], r["against"]) == (method, "all", against)]
            cells.append("{:.2f} ({:.2f}-{:.2f})".format(ratio[0]["ratio"], *ratio[0]["interval"]) if ratio else "")
        name = method.removeprefix("walk ")
        if name == "tree auto":
            name += f" ({row['num_verified']:.0f} nodes on average)"
        length = "" if accepted is None else f"{accepted:.2f}"
        rows.append([name, length, f"{row['tokens_per_second']:.1f}", *cells])
    settings = found["settings"]
    note = f"bfloat16, greedy, {settings['num_prompts']} prompts a set, {settings['max_new_tokens']} new tokens"
    return _table(("", "acceptance", "tokens/s", "x plain (95 %)", "x walk (95 %)"), rows) + _caption(
        "bench", "pydflash bench", found["machine"], note, "other work at times"
    )


def onnx_acceptance() -> str:
    """What few bits cost in acceptance."""
    found = _read("onnx_acceptance")
    rows = [
        [row["drafter"], f"{row['acceptance_length']:.3f}", f"{100 * row['loss']:.1f} %" if row["loss"] else ""]
        for row in found["rows"]
    ]
    note = f"greedy, block 8, {found['prompts']} prompts of five sets"
    return _table(("drafter", "acceptance length", "loss"), rows) + _caption(
        "onnx_acceptance", "bench/onnx_acceptance.py", found["machine"], note
    )


def onnx_draft() -> str:
    """A step of an exported drafter beside the official one."""
    found = _read("onnx_draft")
    columns = [(version, slots, context) for version in (1, 2) for slots, context in ((8, 256), (16, 2048))]
    steps: dict[str, dict[tuple[int, int, int], dict[str, Any]]] = {}
    for row in found["rows"]:
        place = (row["version"], row["slots"], row["context"])
        if place in columns:
            steps.setdefault(row["step"], {})[place] = row
    rows = []
    for step, cells in steps.items():
        if set(cells) == set(columns) and step.endswith(", full"):
            rows.append(
                [step.removesuffix(", full"), *(f"{cells[c]['p10']:.1f} ({cells[c]['ratio']:.1f}x)" for c in columns)]
            )
    head = ("ms", *(f"DFlash{' 2' if v == 2 else ''}, {slots} slots, context {ctx:,}" for v, slots, ctx in columns))
    note = f"SmolLM2's shapes, random weights, {found['context_rows']} new context rows"
    return _table(head, rows) + _caption("onnx_draft", "bench/onnx_draft.py", found["machine"], note)


def training() -> str:
    """Records and steps of training."""
    data, step, torchrun = _read("train_data"), _read("train_step"), _read("train_torchrun")
    speeds = [row["new_tokens_per_second"] for row in data["rows"]]
    rows = [["records", "one H200, bfloat16", f"{min(speeds):,.0f}-{max(speeds):,.0f} new tokens/s"]]
    for row in step["rows"]:
        where = f"one H200, {row['batch_size']} sequences of {step['settings']['length']} tokens a step"
        name = {"adamw": "fit, AdamW", "muon": "fit, Muon"}[row["optimizer"]]
        rows.append([name, where, f"{row['state_tokens_per_second']:,.0f} state tokens/s"])
        rows[-1].append(f"{row['ratio']:.1f}x")
    rates = [row["tokens_per_second"] for row in torchrun["rows"][1:]]  # the first waits for compilation
    rows.append(
        [
            "fit, AdamW, `torchrun`",
            "two H200, 64 sequences a step each",
            f"{min(rates):,.0f}-{max(rates):,.0f} state tokens/s",
        ]
    )
    rows = [[*row, *[""] * (4 - len(row))] for row in rows]
    files = ", ".join(f"`bench/results/{name}.json`" for name in ("train_data", "train_step", "train_torchrun"))
    torch = step["machine"]["torch"].partition("+")[0]
    note = f"\n\nSmolLM2-135M, torch {torch}; `bench/train_data_gpu.py`, `bench/train_step.py`; {files}."
    return _table(("what", "machine", "speed", "over the target's own forward"), rows) + note


TABLES: dict[str, Callable[[], str]] = {
    "results": results,
    "gpu-round": gpu_round,
    "gpu-batches": gpu_batches,
    "gpu-laws": gpu_laws,
    "gpu-answers": gpu_answers,
    "gpu-linear": gpu_linear,
    "gpu-sampling": gpu_sampling,
    "cpu": cpu,
    "cpu-hybrid": cpu_hybrid,
    "cpu-linear": cpu_linear,
    "cpu-attention": cpu_attention,
    "cpu-sampling": cpu_sampling,
    "tree-sampling": tree_sampling,
    "trees": trees,
    "tree-speed": tree_speed,
    "onnx-acceptance": onnx_acceptance,
    "onnx-draft": onnx_draft,
    "training": training,
}
