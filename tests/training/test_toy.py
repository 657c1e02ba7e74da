"""`pydflash train toy` in a small setting: all its steps, going on after a stop, and the language it teaches."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import re
import shlex
from pathlib import Path
from typing import NamedTuple

import pytest

from pydflash import Speculator
from pydflash.cli import commands as cli
from pydflash.target.loading import load_tokenizer
from pydflash.training import data, toy
from pydflash.training.shards import ShardReader
from pydflash.training.toy import ToySettings, make_toy
from pydflash.training.toy_target import lessons, prompts

SMALL = ToySettings(
    hidden_size=64, lesson_steps=80, lesson_batch=8, prompts=100, held_out=6, samples=1, epochs=9, batch_size=8
)


class Made(NamedTuple):
    out: Path
    rows: list[dict]
    printed: str


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """A toy that was stopped once after its target was there, and then went on; its bench had been stopped too."""
    out = tmp_path_factory.mktemp("toy") / "new folder"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data, "run", lambda arguments: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            make_toy(out, SMALL)
    weights = out / "target" / "model.safetensors"
    before = weights.stat().st_mtime_ns
    (out / "bench.json").write_text(json.dumps({"complete": False, "rows": []}))
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        rows = make_toy(out, SMALL)
    assert weights.stat().st_mtime_ns == before
    return Made(out, rows, printed.getvalue())


@pytest.mark.slow
def test_the_drafter_is_accepted(made: Made) -> None:
    assert [row["temperature"] for row in made.rows] == [0, 1]
    assert [row["requests"] + row["loops"] for row in made.rows] == [6, 6]
    assert made.rows[1]["acceptance_length"] > 1.4
    assert max(row["acceptance_length"] for row in made.rows) > 1.5
    assert f"temperature 1: {made.rows[1]['acceptance_length']:.2f}" in made.printed


@pytest.mark.slow
def test_held_out_prompts_are_in_no_record(made: Made) -> None:
    tokenizer, reader = load_tokenizer(made.out / "target"), ShardReader(made.out / "records")
    asked = set()
    for ids, prompt_length in (reader[i] for i in range(len(reader))):
        text = tokenizer.decode(ids[:prompt_length])
        asked.add(re.fullmatch(r"<\|im_start\|>user\n(.*)<\|im_end\|>\n<\|im_start\|>assistant\n", text)[1])  # type: ignore[index]
    held_out = (made.out / "heldout.txt").read_text().splitlines()
    assert len(set(held_out)) == 6
    assert asked <= set((made.out / "prompts.txt").read_text().splitlines())
    assert len(asked) == len(reader) > 50
    assert not asked & set(held_out)


@pytest.mark.slow
def test_a_second_call_makes_nothing(made: Made, capsys: pytest.CaptureFixture[str]) -> None:
    before = {path: path.stat().st_mtime_ns for path in made.out.glob("*/*.safetensors")}
    assert len(before) == 3
    rows = make_toy(made.out, SMALL)
    assert json.dumps(rows) == json.dumps(made.rows)
    assert {path: path.stat().st_mtime_ns for path in made.out.glob("*/*.safetensors")} == before
    assert capsys.readouterr().out.count("Done already.") == 4


@pytest.mark.slow
def test_the_printed_command_answers(made: Made, capsys: pytest.CaptureFixture[str]) -> None:
    command = shlex.split(made.printed.rpartition("\n$ ")[2].replace("\\\n", ""))
    assert command[0] == "pydflash"
    assert cli.main(command[1:]) == 0
    plain = Speculator.from_pretrained(made.out / "target", None, device="cpu").generate(command[-1], 256)
    assert capsys.readouterr().out == plain.text + "\n"
    assert len(set(plain.token_ids)) > 8


@pytest.mark.slow
def test_every_step_prints_a_command_that_is_one(made: Made, capsys: pytest.CaptureFixture[str]) -> None:
    shown = [shlex.split(part.replace("\\\n", "")) for part in re.findall(r"^\$ ((?:.*\\\n)*.*)", made.printed, re.M)]
    assert [" ".join(command[1:3]) for command in shown[:2]] == ["train data", "train fit"]
    assert [command[1] for command in shown[2:]] == ["bench", "generate"]
    for command in shown:
        arguments = cli._parser(command[1:]).parse_args(command[1:])
        assert arguments.target == str(made.out / "target")


@pytest.mark.slow
def test_foreign_folders_are_refused(made: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.txt").write_text("keep")
    assert cli.main(["train", "toy", "--out", str(tmp_path)]) == 2
    assert f"train toy: --out must be a new or empty folder, or one of an earlier run, got {tmp_path}" in (
        capsys.readouterr().err
    )
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]
    with pytest.raises(ValueError, match=r"must be a folder made with hidden_size 96, got .* with 64"):
        make_toy(made.out)


def test_missing_packages_are_named_before_anything_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toy.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match="train toy: needs accelerate"):
        make_toy(tmp_path / "x", SMALL)
    assert not (tmp_path / "x").exists()


def test_the_language_is_what_it_says() -> None:
    found = list(itertools.islice(lessons(3), 400))
    assert len({lesson.answer for lesson in found}) > 350
    sums = [part for lesson in found for part in re.findall(r"(\d+) \+ (\d+) = (\d+)", lesson.answer)]
    assert len(sums) > 300
    assert all(int(a) + int(b) == int(c) for a, b, c in sums)
    counts = [re.findall(r"\d+", lesson.answer) for lesson in found[::4]]
    for first, last, *numbers in counts:
        step = 1 if int(last) > int(first) else -1
        assert [int(n) for n in numbers] == list(range(int(first), int(last) + step, step))


def test_prompts_differ_and_leave_out_what_they_should() -> None:
    some = prompts(40, 1)
    assert len(set(some)) == 40
    assert prompts(40, 1) == some
    other = prompts(40, 1, some[:20])
    assert not set(other) & set(some[:20])
    assert not {lesson.prompt for lesson in itertools.islice(lessons(1, some), 400)} & set(some)
