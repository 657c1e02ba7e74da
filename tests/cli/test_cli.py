"""The command line, called in this process on a tiny saved pair, and once as `python -m pydflash`."""

from __future__ import annotations

import argparse
import copy
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cli_cases import run, tiny_drafter_config
from rich.console import Console
from tiny_tokenizer import VOCAB

import pydflash
from pydflash.cli import commands as cli
from pydflash.cli import demo
from pydflash.drafter.module import Drafter
from pydflash.request import Generation
from pydflash.speculator import Speculator
from pydflash.stats import Stats
from pydflash.target.generic import Target


def expected(target: Path, prompt: Any, **options: Any) -> Generation:
    return Speculator.from_pretrained(target, None, device="cpu").generate(prompt, **options)


def test_generate_prints_the_text_and_a_line_of_numbers(
    pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    target, drafter = pair
    argv = ("generate", target, "--drafter", drafter, "hello", "--max-new-tokens", 12, "--device", "cpu")
    code, out, err = run(capsys, *argv)
    want = expected(target, "hello", max_new_tokens=12)
    assert code == 0
    assert out == want.text + "\n"
    line = err.strip().splitlines()[-1]
    assert line.startswith("12 tokens in ")
    assert "acceptance length" in line
    assert line.endswith("end: length")


def test_generate_plain_has_no_acceptance(pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "generate", pair[0], "--plain", "hello", "--max-new-tokens", 5, "--device", "cpu")
    assert (code, out) == (0, expected(pair[0], "hello", max_new_tokens=5).text + "\n")
    assert "4 rounds" in err
    assert "acceptance" not in err


def test_system_raw_and_stdin_reach_the_prompt(
    pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    target = pair[0]
    seen: list[tuple[object, object]] = []

    def encode(prompt: object, tokenizer: object, chat_template: object, vocab_size: int, **_: object) -> list[int]:
        seen.append((prompt, chat_template))
        return [1, 2]

    monkeypatch.setattr("pydflash.speculator.encode", encode)
    base = ("generate", target, "--plain", "--max-new-tokens", 1, "--device", "cpu")
    run(capsys, *base, "hello")
    run(capsys, *base, "hello", "--raw")
    run(capsys, *base, "hello", "--no-chat-template")
    run(capsys, *base, "hello", "--system", "be brief")
    monkeypatch.setattr(sys, "stdin", io.StringIO("from stdin"))
    run(capsys, *base, "-")
    chat = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
    assert seen == [("hello", None), ("hello", False), ("hello", False), (chat, None), ("from stdin", None)]


def test_every_sampling_option_reaches_the_stream(
    pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    class Fake:
        output = SimpleNamespace(stats=Stats(), finish_reason="stop")

        def stream(self, prompt: object, **options: object) -> Fake:
            calls.append(options)
            return self

        def __iter__(self) -> object:
            return iter(())

    made: list[tuple[object, object]] = []

    def load(*arguments: object, **options: object) -> Fake:
        made.append((arguments, options))
        return Fake()

    monkeypatch.setattr(Speculator, "from_pretrained", load)
    argv = "generate t --drafter d p --max-new-tokens 7 --temperature 0.5 --top-p 0.9 --top-k 40 --min-p 0.1 --seed 3"
    argv += " --stop X --stop Y --block-size 5 --device cpu --dtype float16 --target-path generic"
    assert run(capsys, *argv.split())[0] == 0
    loop = {"device": "cpu", "dtype": torch.float16, "block_size": 5, "backend": "auto", "path": "walk"}
    loop |= {"num_nodes": None, "target_path": "generic", "quantize": None}
    assert made == [(("t", "d"), loop)]
    assert calls == [
        {
            "max_new_tokens": 7,
            "temperature": 0.5,
            "top_p": 0.9,
            "top_k": 40,
            "min_p": 0.1,
            "seed": 3,
            "stop_strings": ["X", "Y"],
            "chat_template": None,
            "return_proposals": False,
        }
    ]
    run(capsys, "generate", "t", "--plain", "p")
    assert made[1] == (("t", None), dict.fromkeys(loop) | {"path": "walk", "backend": "auto", "target_path": "auto"})
    assert {name for name, value in calls[1].items() if value} == {"max_new_tokens"}
    for options, path, nodes in (
        ("--num-nodes 7", "tree", 7),
        ("--num-nodes auto", "tree", "auto"),
        ("--path viterbi", "viterbi", None),
    ):
        run(capsys, "generate", "t", "--drafter", "d", "p", *options.split())
        assert (made[-1][1]["path"], made[-1][1]["num_nodes"]) == (path, nodes)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--block-size", "9"], "block_size must be 1 to 4"),
        (["--top-p", "2"], "top_p must be a number from 0 to 1, got 2"),
        (["--max-new-tokens", "-1"], "max_new_tokens: must be an integer >= 0, got -1"),
    ],
)
def test_errors_are_one_line(
    pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str], extra: list[str], message: str
) -> None:
    argv = ("generate", pair[0], "--drafter", pair[1], "hi", "--device", "cpu", *extra)
    code, out, err = run(capsys, *argv)
    assert code == 2
    assert out == ""
    lines = [line for line in err.splitlines() if line.startswith("pydflash")]
    assert len(lines) == 1
    assert lines[0].startswith("pydflash: error: ")
    assert message in lines[0]
    assert "Traceback" not in err
    with pytest.raises(ValueError, match="must be"):
        cli.main([str(part) for part in (*argv, "--debug")])


def test_a_missing_folder_is_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    none = tmp_path / "none"
    for argv in (("generate", none, "--plain", "hi"), ("demo", "--drafter", none)):
        code, _, err = run(capsys, *argv)
        name = "TARGET" if argv[0] == "generate" else "drafter"
        want = f"pydflash: error: {name} must be an existing folder or a hub id (owner/name), got '{none}'\n"
        assert (code, err) == (2, want)


def test_loading_bars_stay_for_what_is_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_HUB_DISABLE_PROGRESS_BARS", raising=False)
    cli.check_sources(TARGET=str(tmp_path), drafter="z-lab/Qwen3-8B-DFlash-b16")
    assert "HF_HUB_DISABLE_PROGRESS_BARS" not in os.environ
    cli.check_sources(TARGET=str(tmp_path), drafter=None)
    assert os.environ.pop("HF_HUB_DISABLE_PROGRESS_BARS") == "1"


def test_usage_errors(capsys: pytest.CaptureFixture[str]) -> None:
    for argv in ([], ["generate", "t", "p"], ["generate", "t", "p", "--drafter", "d", "--plain"], ["nonsense"]):
        with pytest.raises(SystemExit) as exit_:
            cli.main(argv)
        assert exit_.value.code == 2
    capsys.readouterr()


@pytest.mark.parametrize("command", ["generate", "demo", "info"])
def test_help_has_an_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        cli.main([command, "--help"])
    assert exit_.value.code == 0
    assert f"example:\n  pydflash {command}" in capsys.readouterr().out


def test_interruption_is_quiet(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt(arguments: argparse.Namespace) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "show_info", interrupt)
    assert run(capsys, "info") == (130, "", "")


def test_info_json(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "info", "--json")
    report = json.loads(out)
    assert code == 0
    assert report["pydflash"] == pydflash.__version__
    assert report["versions"]["torch"] == torch.__version__
    assert set(report["backends"]) == {"cpu", "cuda", "sycl"}
    for name, backend in report["backends"].items():
        assert backend["usable"] == pydflash.backends()[name].usable
        assert (backend["reason"] is None) == backend["usable"]
        assert (backend["description"] is not None) == backend["usable"]
        assert backend["built"] or not backend["usable"]
    assert report["devices"][0].startswith("cpu: ")
    assert report["openmp"]["threads"] == torch.get_num_threads()
    assert report["openmp"]["OMP_WAIT_POLICY"] == os.environ["OMP_WAIT_POLICY"]


def test_info_table_names_every_backend_and_reason(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "info")
    words = " ".join(out.replace("│", " ").split())
    assert code == 0
    for name, backend in pydflash.backends().items():
        assert f"backend {name}" in words
        if not backend.usable:
            assert backend.reason.split()[0] in words
    assert torch.__version__ in words


def test_help_is_quick_and_loads_nothing_heavy() -> None:
    script = (
        "import sys, pydflash.cli as c\n"
        "try: c.main(['--help'])\n"
        "except SystemExit: pass\n"
        "print([m for m in ('torch', 'transformers', 'rich', 'numpy') if m in sys.modules], file=sys.stderr)"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(pydflash.__file__).parent.parent)}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert done.stderr.strip() == "[]"
    assert "usage: pydflash" in done.stdout


def test_python_dash_m_and_the_wait_policy() -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(pydflash.__file__).parent.parent)}
    del environment["OMP_WAIT_POLICY"]
    command = [sys.executable, "-m", "pydflash", "info", "--json"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["openmp"]["OMP_WAIT_POLICY"] == "PASSIVE"


# ---- demo -----------------------------------------------------------------------------------------------------


def run_demo(pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, *extra: object) -> int:
    monkeypatch.setattr(demo, "ensure_smollm2", lambda cache_dir, wheel: pair[0])
    monkeypatch.setattr(demo, "packaged_drafters", lambda: iter(()))
    argv = ["demo", "hello", "--max-new-tokens", "20", "--device", "cpu", "--debug", *map(str, extra)]
    return cli.main(argv)


def test_demo_shows_both_sides(
    pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_demo(pair, monkeypatch, "--dtype", "float32", "--drafter", pair[1]) == 0
    out = capsys.readouterr().out
    assert expected(pair[0], "hello", max_new_tokens=20).text in out
    assert str(pair[1]) in out.replace("\n", "")
    assert "both texts are equal" in out
    assert "exactness contract: held" in out
    assert out.count("accepted") == 3  # one bar for each of the 3 drafting slots
    rows = {line.rsplit(maxsplit=2)[0].strip(): line.split()[-2:] for line in out.splitlines() if len(line.split()) > 2}
    assert rows["new tokens"] == ["20", "20"]
    assert rows["rounds (target forwards)"][1] == "19"


def test_demo_says_that_an_untrained_drafter_is_one(
    pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "untrained_config", lambda target: tiny_drafter_config())
    assert run_demo(pair, monkeypatch) == 0
    assert "UNTRAINED" in capsys.readouterr().out


def test_demo_does_not_claim_a_check_of_sampled_text(
    pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_demo(pair, monkeypatch, "--temperature", 0.8, "--seed", 1, "--drafter", pair[1]) == 0
    out = capsys.readouterr().out
    assert "two texts cannot show" in " ".join(out.split())
    assert "contract" not in out


def test_packaged_drafter_is_taken_where_it_fits(
    pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other, fitting = tmp_path / "a_other", tmp_path / "b_fitting"
    Drafter(tiny_drafter_config(hidden_size=32, target_hidden_size=32)).save_pretrained(other)
    Drafter(tiny_drafter_config(block_size=3)).save_pretrained(fitting)
    monkeypatch.setattr(demo, "packaged_drafters", lambda: iter((other, fitting)))
    drafter, origin = demo.pick_drafter(None, Target.from_pretrained(pair[0], device="cpu"))
    assert drafter.config.block_size == 3
    assert origin == "b_fitting, from the package"


def test_untrained_config_fits_smollm2() -> None:
    sizes = {"hidden_size": 576, "num_layers": 30, "vocab_size": 49152, "max_length": 8192}
    config = demo.untrained_config(SimpleNamespace(**sizes))  # type: ignore[arg-type]
    assert (config.version, config.target_hidden_size, config.vocab_size) == (2, 576, 49152)
    assert config.num_heads * config.head_dim == 576
    assert max(config.target_layer_ids) < 30


@pytest.mark.parametrize("layers", [1, 2, 3, 4, 6, 7])
def test_untrained_config_fits_few_layers(layers: int) -> None:
    sizes = {"hidden_size": 32, "num_layers": layers, "vocab_size": 64, "max_length": 128}
    config = demo.untrained_config(SimpleNamespace(**sizes))  # type: ignore[arg-type]
    ids = config.target_layer_ids
    assert list(ids) == sorted(set(ids))
    assert 0 <= ids[0] <= ids[-1] < layers
    assert config.num_heads == 1


@pytest.fixture
def target(pair: tuple[Path, Path]) -> Target:
    return Target.from_pretrained(pair[0], device="cpu")


def test_margin_of_greedy_text_and_of_a_wrong_token(pair: tuple[Path, Path], target: Target) -> None:
    prompt = [1, 2, 3]
    tokens = expected(pair[0], prompt, max_new_tokens=8).token_ids
    with torch.inference_mode():
        logits = target.model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    assert demo.margin_excess(target, prompt, tokens) == pytest.approx(-0.25, abs=1e-5)
    worst = int(logits[5].argmin())
    wrong = [*tokens[:5], worst]
    gap = float(logits[5].max() - logits[5].min())
    assert demo.margin_excess(target, prompt, wrong) == pytest.approx(gap - 0.25, abs=1e-4)
    assert demo.margin_excess(target, [1], [*expected(pair[0], [1], max_new_tokens=2).token_ids]) <= 0


def test_report_contract_fails_a_wrong_text(pair: tuple[Path, Path], target: Target) -> None:
    console = Console(file=io.StringIO())
    tokens = expected(pair[0], [1, 2, 3], max_new_tokens=8).token_ids
    assert demo.report_contract(console, target, [1, 2, 3], tokens, tokens) == 0
    wrong = [*tokens[:5], (tokens[5] + 1) % VOCAB, *tokens[6:]]
    assert demo.report_contract(console, target, [1, 2, 3], wrong, tokens) == 1  # fp32: equality
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "held" in shown
    assert "the texts part at token 5" in shown
    assert "BROKEN" in shown


def test_texts_of_packed_weights_are_equal_or_broken(pair: tuple[Path, Path], target: Target) -> None:
    """In 16 bits too; how far the model's own forward is from the packed one says nothing of the drafts."""
    console = Console(file=io.StringIO())
    half = Target(copy.deepcopy(target.model).bfloat16())
    text, other = [5, 6, 7], [5, 6, 8]
    assert demo.report_contract(console, half, [1, 2, 3], text, text, alike=True) == 0
    assert demo.report_contract(console, half, [1, 2, 3], text, other, alike=True) == 1
    shown = " ".join(console.file.getvalue().split())  # type: ignore[attr-defined]
    assert "held (packed weights: drafts change no bit)" in shown
    assert "BROKEN (with packed weights the texts must be equal)" in shown


def test_report_contract_checks_equal_texts_against_the_target(pair: tuple[Path, Path], target: Target) -> None:
    console = Console(file=io.StringIO(), width=120)
    good = expected(pair[0], [1, 2, 3], max_new_tokens=8).token_ids
    with torch.inference_mode():
        worst = int(target.model(torch.tensor([[1, 2, 3, *good[:5]]])).logits[0, -1].argmin())
    wrong = [*good[:5], worst]
    assert demo.report_contract(console, target, [1, 2, 3], wrong, wrong) == 1
    assert "beyond the margin" in console.file.getvalue()  # type: ignore[attr-defined]


def test_only_16_bit_texts_may_part_within_the_margin(pair: tuple[Path, Path], target: Target) -> None:
    console = Console(file=io.StringIO(), width=120)
    half = Target.from_pretrained(pair[0], device="cpu", dtype=torch.bfloat16)
    good = expected(pair[0], [1, 2, 3], max_new_tokens=8).token_ids
    with torch.inference_mode():
        for model in (target.model, half.model):
            model.lm_head.weight.mul_(0.01)  # the same best tokens, with every logit close to them
        last = target.model(torch.tensor([[1, 2, 3, *good[:-1]]])).logits[0, -1]
    close = [*good[:-1], int(last.topk(2).indices[1])]
    assert demo.margin_excess(target, [1, 2, 3], close) < 0
    assert demo.report_contract(console, target, [1, 2, 3], close, good) == 1
    assert "in float32 the texts must be equal" in console.file.getvalue()  # type: ignore[attr-defined]
    assert demo.report_contract(console, half, [1, 2, 3], close, good) == 0


def test_an_interrupt_ends_the_line_and_says_how_far_it_came(
    pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from pydflash.request import Stream

    seen: list[object] = []

    def interrupted(self: Stream) -> object:
        if len(seen) == 2:
            raise KeyboardInterrupt
        seen.append(chunk := next(self._chunks))
        return chunk

    monkeypatch.setattr(Stream, "__next__", interrupted)
    code, out, err = run(capsys, "generate", pair[0], "--drafter", pair[1], "hi", "--device", "cpu")
    assert code == 130
    assert out.endswith("\n")
    assert err.rstrip().endswith("end: interrupted")
