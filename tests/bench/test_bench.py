"""The `pydflash bench` command, on a tiny saved pair."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from pairs import build_drafter
from tiny_models import TINY
from tiny_tokenizer import VOCAB, save_tokenizer

from pydflash.bench import checks as bench_checks
from pydflash.bench import methods as bench_methods
from pydflash.bench import report as bench_report
from pydflash.bench import run as bench
from pydflash.bench.methods import Answer
from pydflash.checkpoints.config import DrafterConfig
from pydflash.cli import commands as cli
from pydflash.drafter.module import Drafter


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Folders of a random target (one token per byte, fp32) and of a random DFlash 2 drafter for it."""
    root = tmp_path_factory.mktemp("pair")
    target, drafter = root / "target", root / "drafter"
    torch.manual_seed(3)
    TINY["llama"](vocab_size=VOCAB).save_pretrained(target)
    save_tokenizer(target)
    config = build_drafter(2).config.to_dict()
    config |= {"vocab_size": VOCAB, "num_target_layers": 4}
    config["dflash_config"]["mask_token_id"] = 257
    Drafter(DrafterConfig.from_dict(config)).save_pretrained(drafter)
    for name in ("one", "two"):
        (root / f"{name}.txt").write_text(f"{name}: hello\n{name}: what is a mill?\n{name}: never asked\n")
    return target, drafter


def run(pair: tuple[Path, Path], *argv: object, prompts: Sequence[str] = ("one", "two")) -> int:
    files = [pair[0].parent / f"{name}.txt" for name in prompts]
    base = ("bench", pair[0], "--drafter", f"d={pair[1]}", "--device", "cpu", "--prompts", *files)
    base = (*base, "--num-prompts", 2, "--max-new-tokens", 12)
    return cli.main([str(part) for part in (*base, *argv)])


def test_bench_end_to_end(pair: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out_json, png = tmp_path / "b.json", tmp_path / "b.png"
    second = ("--drafter", f"e={pair[1]}", "--argmax", "--peers", "--temperatures", "0,1")
    assert run(pair, *second, "--json", out_json, "--png", png) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= bench_report.WIDTH or "warning" in out
    report = json.loads(out_json.read_text(), parse_constant=lambda name: pytest.fail(name))
    assert report["complete"] is True
    assert report["machine"]["torch"] == torch.__version__
    methods = ["plain", "d", "e", "d, argmax", "e, argmax", "transformers", "prompt lookup"]
    for name in ("official dflash, d", "official dflash, e"):
        if name in report["missing"]:
            assert f"not measured: {name}: {report['missing'][name]}" in out
        else:
            methods.append(name)
    places = [(t, p) for t in (0, 1) for p in ("one", "two", "all")]
    rows = {(r["temperature"], r["prompts"], r["method"]): r for r in report["rows"]}
    assert list(rows) == [(t, p, m) for t, p in places for m in methods]
    for (_, prompts, method), row in rows.items():
        assert row["requests"] + row["loops"] == (4 if prompts == "all" else 2)
        assert len(row["per_request"]) == row["requests"] + row["loops"]
        assert all(r["tokens"] <= 12 and r["seconds"] > 0 for r in row["per_request"])
        if method == "plain" and row["requests"]:
            assert row["acceptance_length"] == 1.0
            assert row["slot_acceptance"] == []
        if method == "transformers":
            assert row["acceptance_length"] is None
    # Greedy texts of one target are one text, whatever drafts it.
    for method in methods:
        texts = [
            [(r["tokens"], r["longest_loop"]) for r in rows[0, "all", m]["per_request"]] for m in ("plain", method)
        ]
        assert texts[0] == texts[1], method
    assert {(c["method"], c["against"]) for c in report["acceptance"]} == {
        (m, "d") for m in methods if m not in ("plain", "d", "transformers")
    }
    same = [c for c in report["acceptance"] if c["method"] == "e"]
    assert all(c["difference"] in (0.0, None) for c in same)
    assert {c["method"] for c in report["speed"]} == set(methods) - {"plain"}
    assert png.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert int.from_bytes(png.read_bytes()[16:20], "big") == 1200
    assert sorted(p.name for p in tmp_path.iterdir()) == ["b.json", "b.png"]
    assert re.search(r"e, argmax", out)
    assert "prompt by prompt" in out


def test_trees_end_to_end(pair: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out_json, png = tmp_path / "b.json", tmp_path / "b.png"
    asked = ("--trees", "2, 9,auto", "--viterbi", "--argmax", "--draft-sampling", "off", "--temperatures", "0,1")
    asked += ("--num-prompts", "1", "--max-new-tokens", "6")
    assert run(pair, *asked, "--json", out_json, "--png", png) == 0
    out = capsys.readouterr().out
    report = json.loads(out_json.read_text())
    names = ["", " viterbi", " tree 2", " tree 9", " tree auto"]
    ways = [("walk", None), ("viterbi", None), ("tree", 2), ("tree", 9), ("tree", "auto")]
    ours = {d + name: (d, *way) for d in ("d", "d, argmax") for name, way in zip(names, ways, strict=True)}
    rows = {(r["temperature"], r["prompts"], r["method"]): r for r in report["rows"]}
    places = [(t, p) for t in (0, 1) for p in ("one", "two", "all")]
    assert list(rows) == [(t, p, m) for t, p in places for m in ("plain", *ours)]
    for (t, p, method), row in rows.items():
        drafter, path, nodes = ours.get(method, (None, None, None))
        assert (row["drafter"], row["path"], row["num_nodes"]) == (drafter, path, nodes)
        # Drafts are chosen, not sampled: a seed has one text, whatever is verified.
        texts = [[(a["tokens"], a["longest_loop"]) for a in r["per_request"]] for r in (row, rows[t, p, "plain"])]
        assert texts[0] == texts[1]
        if row["requests"] and method != "plain":
            assert 3 <= row["num_verified"] <= 63 if nodes == "auto" else row["num_verified"] == (nodes or 3)
            assert len(row["slot_acceptance"]) <= 3
    want = [(t, p, m, d) for t, p in places for m, (d, path, _) in ours.items() if path != "walk"]
    for key in ("walk_acceptance", "walk_speed"):
        assert [(c["temperature"], c["prompts"], c["method"], c["against"]) for c in report[key]] == want
    assert {c["method"] for c in report["acceptance"]} <= {"d, argmax"}
    assert {c["method"] for c in report["speed"]} == set(ours)
    assert "drafts" in out
    assert "against the walk of the same drafter, prompt by prompt" in out
    assert max(map(len, out.split("warning")[0].splitlines())) <= bench_report.WIDTH
    assert int.from_bytes(png.read_bytes()[16:20], "big") == 1200


def test_a_target_that_refuses_trees_ends_the_run_at_once(
    pair: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    TINY["lfm2"](vocab_size=VOCAB).save_pretrained(tmp_path / "target")
    save_tokenizer(tmp_path / "target")
    (tmp_path / "one.txt").write_text("hello\n")
    argv = ("--drafter", f"f={pair[1]}", "--max-new-tokens", 2, "--temperatures", "0")
    assert run((tmp_path / "target", pair[1]), *argv, "--viterbi", prompts=["one"]) == 0
    monkeypatch.setattr(bench, "measure", lambda *_: pytest.fail("measured"))
    assert run((tmp_path / "target", pair[1]), *argv, "--trees", "auto", prompts=["one"]) == 2
    err = capsys.readouterr().err
    assert "Target: Lfm2ForCausalLM must have attention that takes a tree of slots exactly (path='tree'), got" in err


def test_options_reach_the_speculators(pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[Any, ...]] = []
    real = bench_methods.Speculator

    class Spy(real):  # type: ignore[misc, valid-type]
        def __init__(self, *given: Any, **options: Any) -> None:
            super().__init__(*given, **options)
            selector = self.drafter.candidate_selector is not None  # type: ignore[union-attr]
            paths = (self.loop.parts.paths.path, self.loop.parts.paths.num_nodes)
            made.append((selector, self.draft_sampling, self._backend == "reference", self.block_size, *paths))

    monkeypatch.setattr(bench_methods, "Speculator", Spy)
    quick = ("--temperatures", "0", "--num-prompts", 1, "--max-new-tokens", 2)
    for extra in (
        (),
        ("--draft-sampling", "off", "--block-size", "2"),
        ("--draft-sampling", "on", "--argmax", "--backend", "reference"),
        ("--argmax",),
        ("--draft-sampling", "on", "--viterbi", "--trees", "5"),
    ):
        assert run(pair, *quick, *extra, prompts=["one"]) == 0
    assert made == [
        (True, True, False, 4, "walk", 0),
        (True, False, False, 2, "walk", 0),
        (True, True, True, 4, "walk", 0),
        (False, True, True, 4, "walk", 0),
        (True, True, False, 4, "walk", 0),
        (False, False, False, 4, "walk", 0),
        (True, True, False, 4, "walk", 0),
        (True, False, False, 4, "viterbi", 0),
        (True, True, False, 4, "tree", 5),
    ]


@pytest.mark.parametrize("broken", [KeyboardInterrupt, RuntimeError("out of memory")])
def test_a_broken_off_run_keeps_its_answers(
    pair: tuple[Path, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    broken: Any,
) -> None:
    real, count = bench_methods.transformers_method, [0]

    def breaking(*given: Any) -> bench_methods.Method:
        method = real(*given)

        def answer(ids: Sequence[int], temperature: float, seed: int, limit: int) -> Answer:
            count[0] += 1
            if count[0] == 4:  # after the trial, the warm-up and one answer
                raise broken
            return method(ids, temperature, seed, limit)

        return answer

    monkeypatch.setattr(bench_methods, "transformers_method", breaking)
    code = run(pair, "--peers", "transformers", "--json", tmp_path / "b.json", "--png", tmp_path / "b.png")
    captured = capsys.readouterr()
    assert code == (130 if broken is KeyboardInterrupt else 2)
    assert ("out of memory" in captured.err) == (code == 2)
    assert "INCOMPLETE" in captured.out
    report = json.loads((tmp_path / "b.json").read_text())
    assert report["complete"] is False
    assert {r["method"]: len(r["per_request"]) for r in report["rows"]} == {"plain": 2, "d": 2, "transformers": 1}
    assert (tmp_path / "b.png").exists()


def test_interrupted_at_once(
    pair: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(bench, "measure", interrupt)
    assert run(pair, "--json", tmp_path / "b.json") == 130
    assert "nothing was measured" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--prompts", "none.jsonl"], "--prompts must be files that exist, got 'none.jsonl'"),
        (["--prompts", "{empty}"], "--prompts must have a prompt in each file, got none in"),
        (["--prompts", "{one}", "{one}"], "--prompts must have names of their own (NAME=...)"),
        (["--prompts", "all={one}"], "'all' is the name of another row"),
        (["--prompts", "={one}"], "--prompts must be SOURCE or NAME=SOURCE"),
        (["--drafter", "d={drafter}"], "'d' also stands for"),
        (["--drafter", "plain={drafter}"], "'plain' is the name of another row"),
        (["--drafter", "d2={drafter}/none"], "drafter d2 must be an existing folder or a hub id"),
        (["--num-prompts", "-1"], "--num-prompts must be at least 1, got -1"),
        (["--max-new-tokens", "0"], "--max-new-tokens must be at least 2, got 0"),
        (["--block-size", "-4"], "--block-size must be at least 1, got -4"),
        (["--block-size", "9"], "block_size must be 1 to 4"),
        (["--temperatures", "0,-1"], "--temperatures must be different numbers >= 0, separated by commas, got '0,-1'"),
        (["--temperatures", "nan"], "--temperatures must be"),
        (["--temperatures", "0,0.0"], "--temperatures must be"),
        (["--temperatures", "warm"], "--temperatures must be"),
        (["--peers", "eagle"], "--peers must be among transformers, lookup, dflash, each once, got 'eagle'"),
        (["--peers", "lookup,lookup"], "--peers must be among"),
        (["--trees", "0"], "--trees must be different numbers of drafts from 1 to 63, or auto, separated by commas"),
        (["--trees", "64"], "--trees must be"),
        (["--trees", "15,31,15"], "or auto, separated by commas, got '15,31,15'"),
        (["--trees", "auto,auto"], "--trees must be"),
        (["--trees", "all"], "--trees must be"),
        (["--trees", "7.5"], "--trees must be"),
        (["--trees", "-3"], "--trees must be"),
        (["--trees", ""], "--trees must be"),
        (["--trees", "7,"], "--trees must be"),
        (["--trees", "5", "--block-size", "2"], "num_nodes must be 'auto' or 1 to 4 (1 slots of 4 candidates), got 5"),
        (["--trees", "auto", "--block-size", "1"], "--block-size must be at least 2 with --trees or --viterbi, got 1"),
        (["--viterbi", "--block-size", "1"], "--block-size must be at least 2 with --trees or --viterbi, got 1"),
        (["--trees", "5", "--drafter", "d tree 5={drafter}"], "names of their own, got 'd tree 5' for two rows"),
        (["--viterbi", "--drafter", "d viterbi={drafter}"], "names of their own, got 'd viterbi' for two rows"),
        (["--json", "none/b.json"], "--json must be in a folder that exists, got 'none/b.json'"),
        (["--json", "{folder}"], "--json must be a file, got the folder"),
        (["--png", "b.pdf"], "--png must end in .png, got 'b.pdf'"),
        (["--png", "none/b.png"], "--png must be in a folder that exists"),
        (["--max-new-tokens", "600"], "--max-new-tokens must fit the target's 512 positions, got 6"),
    ],
)
def test_errors_come_before_the_measurement(
    pair: tuple[Path, Path],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    extra: list[str],
    message: str,
) -> None:
    root = pair[0].parent
    (root / "empty.txt").write_text("\n")
    monkeypatch.setattr(bench, "measure", lambda *_: pytest.fail("measured"))
    places = {"one": root / "one.txt", "empty": root / "empty.txt", "drafter": pair[1], "folder": root}
    assert run(pair, *[text.format(**places) for text in extra]) == 2
    assert message in capsys.readouterr().err


def test_argmax_needs_a_selector(pair: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = json.loads((pair[1] / "config.json").read_text())
    config["architectures"] = ["DFlashDraftModel"]
    for name in ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"):
        config["dflash_config"].pop(name, None)
    Drafter(DrafterConfig.from_dict(config)).save_pretrained(tmp_path / "first")
    argv = ["bench", str(pair[0]), "--drafter", str(tmp_path / "first"), "--argmax", "--device", "cpu"]
    assert cli.main([*argv, "--prompts", str(pair[0].parent / "one.txt"), "--max-new-tokens", "4"]) == 2
    assert "--argmax must have a DFlash 2 drafter, got none" in capsys.readouterr().err


def test_names_of_sources(tmp_path: Path) -> None:
    (tmp_path / "a=b.txt").touch()
    odd = str(tmp_path / "a=b.txt")
    got = bench_checks.named("--prompts", ["x=f.txt", "z-lab/f.jsonl", odd], lambda path: path.stem, ())
    assert got == {"x": "f.txt", "f": "z-lab/f.jsonl", "a=b": odd}


def test_png_needs_matplotlib(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match="--png needs matplotlib"):
        bench_checks.check_outputs(None, tmp_path / "b.png")


def test_help_describes_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["bench", "--help"])
    out = capsys.readouterr().out
    assert "examples:\n  pydflash bench smollm2 " in out
    parser = cli._parser(["bench"])
    commands = next(a for a in parser._actions if hasattr(a, "choices") and a.choices)
    assert all(action.help for action in commands.choices["bench"]._actions)  # type: ignore[union-attr]
