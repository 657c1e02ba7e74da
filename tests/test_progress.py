"""Bars on stderr: what is counted, when they are shown, and that they are gone afterwards."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import FakeTarget, scripted
from pairs import Scripted
from tiny_drafters import nested, tiny_2
from tiny_models import TINY
from tiny_tokenizer import MASK, VOCAB, save_tokenizer

from pydflash import Drafter, DrafterConfig, Speculator, progress
from pydflash.rounds import device, host

TEXT = list(range(3, 90))


class Recorder:
    """In place of rich's display: what was opened, counted and closed."""

    def __init__(self) -> None:
        self.events: list[tuple[Any, ...]] = []
        self.texts: list[str] = []
        self.displays = 0

    def display(self) -> Recorder:
        self.displays += 1
        return self

    def add_task(self, text: str, total: int | None) -> int:
        assert total is None
        self.texts.append(text)
        self.events.append(("add", text))
        return len(self.texts) - 1

    def update(self, task: int, total: int, advance: int) -> None:
        self.events.append((self.texts[task], total, advance))

    def remove_task(self, task: int) -> None:
        self.events.append(("remove", self.texts[task]))

    def __enter__(self) -> None:
        self.events.append(("open",))

    def __exit__(self, *_: object) -> None:
        self.events.append(("close",))

    def counted(self, text: str) -> list[int]:
        return [event[2] for event in self.events if event[0] == text and event[2]]


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    recorder = Recorder()
    monkeypatch.setattr(progress, "_display", recorder.display)
    return recorder


def terminal(monkeypatch: pytest.MonkeyPatch, there: bool = True) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: there, raising=False)


def fake() -> Speculator:
    return Speculator(FakeTarget(scripted(TEXT), (0, 2)), Scripted(TEXT, 4))


def test_a_list_counts_its_texts(seen: Recorder) -> None:
    wanted = fake().generate([[3, 4], [3], [3, 4, 5]], 6)
    assert fake().generate([[3, 4], [3], [3, 4, 5]], 6, progress=True)[2].token_ids == wanted[2].token_ids
    assert (seen.events[:2], seen.events[-2:]) == ([("add", "texts"), ("open",)], [("close",), ("remove", "texts")])
    assert seen.counted("texts") == [1, 1, 1]
    assert {event[1] for event in seen.events if event[0] == "texts"} == {3}


def test_a_batch_counts_each_text_when_it_ends(seen: Recorder) -> None:
    spec = Speculator(TINY["llama"](), None, target_path="fused")
    spec.generate([[1, 2], [3], [4]], [3, 9, 9], progress=True, temperature=0.0, stop_token_ids=[])
    assert seen.counted("texts") == [1, 2]


def test_nothing_is_shown_unless_asked_for(seen: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal(monkeypatch)
    fake().generate([[3], [3, 4]], 4)  # a library is quiet
    fake().generate([3], 4, progress=True)  # one short prompt
    terminal(monkeypatch, there=False)
    fake().generate([[3], [3, 4]], 4, progress=None)
    with progress.shown(False):
        terminal(monkeypatch)
        fake().generate([[3], [3, 4]], 4, progress=None)
    assert seen.events == []
    fake().generate([[3], [3, 4]], 4, progress=None)
    assert seen.counted("texts") == [1, 1]


@pytest.mark.parametrize("path", ["auto", "fused", "generic"])
def test_a_long_prompt_counts_its_tokens(path: str, seen: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    for loop in (host, device):
        monkeypatch.setattr(loop, "LONG_PROMPT", 1000)
    spec = Speculator(TINY["llama"](max_position_embeddings=4096), None, target_path=path)
    long = [t % 90 for t in range(1200)]
    spec.generate([long, long[:999]], 3, progress=True, temperature=0.0, stop_token_ids=[])
    assert seen.events.count(("add", "prompt")) == 1 == seen.events.count(("open",)) == seen.displays
    assert seen.counted("prompt") == ([] if path == "generic" else [512, 512, 176])
    assert sum(seen.counted("texts")) == 2
    with progress.shown():
        begin = len(seen.events)
        list(spec.stream(long, 3))
    assert [event for event in seen.events[begin:] if len(event) < 3] == [
        ("add", "prompt"), ("open",), ("close",), ("remove", "prompt")
    ]  # fmt: skip


def test_a_device_is_waited_for_only_where_a_bar_counts(seen: Recorder) -> None:
    class Logits(torch.Tensor):
        read = 0

        def flatten(self) -> Any:
            self.read += 1
            return torch.ones(1)

    logits = Logits()
    progress.advance("prompt", 1, after=logits)
    with progress.shown(), progress.step("texts", 2):
        progress.advance("prompt", 1, after=logits)
        assert logits.read == 0
        with progress.step("prompt", 2):
            progress.advance("prompt", 1, after=logits)
    assert (logits.read, seen.counted("prompt"), seen.counted("texts")) == (1, [1], [])


def test_an_error_leaves_no_bar(seen: Recorder) -> None:
    spec = fake()
    spec.target.close()
    with pytest.raises(ValueError, match="must be open"):
        spec.generate([[3], [4]], 5, progress=True)
    assert seen.events[-2:] == [("close",), ("remove", "texts")]
    seen.events.clear()
    progress.advance("texts", 1)
    fake().generate([[3], [4]], 5)
    assert seen.events == []


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("pair")
    TINY["llama"](vocab_size=VOCAB).save_pretrained(root / "target")
    save_tokenizer(root / "target")
    raw = nested(tiny_2(vocab_size=VOCAB, num_target_layers=4), mask_token_id=MASK, target_layer_ids=[0, 2])
    torch.manual_seed(0)
    Drafter(DrafterConfig.from_dict(raw)).save_pretrained(root / "drafter")
    return root / "target", root / "drafter"


@pytest.mark.parametrize("theirs", [True, False])
def test_loading_is_shown_on_a_terminal(
    pair: tuple[Path, Path], theirs: bool, seen: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    import transformers

    monkeypatch.setattr(transformers.utils.logging, "is_progress_bar_enabled", lambda: theirs)
    terminal(monkeypatch, there=False)
    Speculator.from_pretrained(*pair, device="cpu")
    terminal(monkeypatch)
    with progress.shown(False):
        Speculator.from_pretrained(*pair, device="cpu")
    Speculator(Speculator.from_pretrained(pair[0], device="cpu").target, None)
    # transformers has a bar of its own for the target's weights.
    added = [] if theirs else ["loading the target"]
    assert seen.texts == [*added, "preparing the target"]
    seen.texts.clear()
    Speculator.from_pretrained(*pair, device="cpu")
    assert seen.texts == ["reading the drafter", *added, "preparing the target"]
    assert len(seen.counted("reading the drafter")) == len(Drafter.from_pretrained(pair[1]).canonical())


def test_on_a_real_terminal_bars_come_and_go(pair: tuple[Path, Path]) -> None:
    """Only stderr has them, and they are erased before the text and the line of numbers come."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-P", "-m", "pydflash", "generate", str(pair[0]), "hello", "--drafter", str(pair[1])]
    options = ["--max-new-tokens", "5", "--device", "cpu"]
    environment = os.environ | {"TERM": "xterm", "OMP_NUM_THREADS": "1"}
    environment.pop("NO_COLOR", None)
    with subprocess.Popen([*command, *options], stdout=subprocess.PIPE, stderr=theirs, env=environment) as process:
        os.close(theirs)
        shown = b""
        try:
            while found := os.read(ours, 4096):
                shown += found
        except OSError:  # the other end is closed
            pass
        assert process.stdout is not None
        out = process.stdout.read()
    os.close(ours)
    wanted = Speculator.from_pretrained(*pair, device="cpu").generate("hello", 5)
    assert (process.returncode, out.decode()) == (0, wanted.text + "\n")
    for text in (b"starting", b"reading the drafter", b"loading the target", b"preparing the target"):
        assert text in shown
    assert b"Loading weights" not in shown
    last = shown.decode().strip().splitlines()[-1]
    assert last.rpartition("\x1b[2K")[2].startswith("5 tokens in ")
