"""What is in the folder after an export that failed, was ended, was killed, or ran beside another one."""

from __future__ import annotations

import fcntl
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from exported import write_target
from pairs import build_drafter
from tiny_models import TINY

from pydflash.cli.commands import main

pytest.importorskip("onnx_ir", reason="onnx_ir is not installed")
pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")

from pydflash.export import OnnxDrafter, OnnxTarget, export_drafter
from pydflash.export.command import ended_by_sigterm

FILES = ["draft.json", "draft.onnx", "draft.onnx.data"]


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """A folder with a tiny drafter and the two tables of its target."""
    write_target(tmp_path / "target")
    build_drafter(2).save_pretrained(tmp_path / "drafter")
    return tmp_path


@pytest.fixture
def pair(tmp_path: Path) -> Path:
    """A folder with a tiny drafter and its whole target."""
    TINY["llama"]().save_pretrained(tmp_path / "target")
    build_drafter(2, num_target_layers=4).save_pretrained(tmp_path / "drafter")
    return tmp_path


def command(work: Path, *more: str) -> list[str]:
    return ["export", str(work / "drafter"), "--target", str(work / "target"), "-o", str(work / "out"), *more]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


# --- drafter and target together ---------------------------------------------------------------------------------


def test_a_target_that_is_refused_leaves_no_drafter(pair: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = pair / "target" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"hidden_act": "gelu"}))
    assert main(command(pair, "--with-target")) == 2
    assert "hidden_act must be 'silu', got 'gelu'" in capsys.readouterr().err
    assert not (pair / "out").exists()


def test_a_target_that_differs_leaves_the_earlier_pair(
    pair: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(command(pair, "--with-target")) == 0
    before = contents(pair / "out")
    assert {"draft.json", "target.json", "config.json", "generation_config.json"} <= before.keys()
    build_drafter(2, seed=1, num_target_layers=4).save_pretrained(pair / "drafter")
    monkeypatch.setattr("pydflash.export.write_target._compare", lambda *_: (0.5, 0.0))
    assert main(command(pair, "--with-target")) == 2
    assert "it differs by 5.0e-01" in capsys.readouterr().err
    assert contents(pair / "out") == before
    OnnxDrafter(pair / "out"), OnnxTarget(pair / "out")


def test_a_full_disk_is_named_and_leaves_the_earlier_export(work: Path) -> None:
    export_drafter(work / "drafter", work / "target", work / "out")
    before = contents(work / "out")
    half = len(before["draft.onnx.data"]) // 2
    resource.setrlimit(resource.RLIMIT_FSIZE, (half, resource.RLIM_INFINITY))
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        with pytest.raises(OSError, match=r"out: draft\.onnx\.data cannot be written, is the disk full\?"):
            export_drafter(work / "drafter", work / "target", work / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        signal.signal(signal.SIGXFSZ, ignored)
    assert contents(work / "out") == before


def test_what_is_in_the_way_is_refused(work: Path) -> None:
    (work / "file").write_text("")
    for place in (work / "file", ""):
        with pytest.raises(ValueError, match="directory must be a folder, got"):
            export_drafter(work / "drafter", work / "target", place)
    export_drafter(work / "drafter", work / "target", work / "out")
    (work / "out" / "draft.onnx").unlink()
    (work / "out" / "draft.onnx").mkdir()
    with pytest.raises(ValueError, match=r"directory must not hold a folder draft\.onnx"):
        export_drafter(work / "drafter", work / "target", work / "out")
    names = sorted(path.name for path in (work / "out").iterdir())
    assert names == FILES


# --- exports that are ended --------------------------------------------------------------------------------------

SLOW = """
import signal, sys, time
from pydflash.cli import main
from pydflash.export import write
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have had it ignored
def wait(*_):
    print("comparing", flush=True)
    time.sleep(120)
write.compare = wait
sys.exit(main(sys.argv[1:]))
"""


def slow(work: Path) -> subprocess.Popen[str]:
    """An export in another process that has written all and is comparing."""
    run = subprocess.Popen([sys.executable, "-c", SLOW, *command(work)], stdout=subprocess.PIPE, text=True, cwd=work)
    assert run.stdout is not None
    assert run.stdout.readline() == "comparing\n"
    return run


@pytest.mark.grid(2)
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_an_export_that_is_ended_takes_its_files_along(work: Path, number: signal.Signals, code: int) -> None:
    with slow(work) as run:
        (part,) = (work / "out").iterdir()
        assert (part / "draft.onnx.data").stat().st_size > 100_000
        run.send_signal(number)
        assert run.wait(60) == code
    assert list((work / "out").iterdir()) == []


def test_what_a_killed_export_left_goes_with_the_next(work: Path) -> None:
    with slow(work) as run:
        run.kill()
    (left,) = (work / "out").iterdir()
    assert (left / "draft.onnx.data").is_file()
    (work / "out" / f".export.{os.getpid()}.part").mkdir()
    export_drafter(work / "drafter", work / "target", work / "out")
    assert sorted(contents(work / "out")) == FILES


def test_a_hosts_own_handler_of_sigterm_stays() -> None:
    def own(number: int, frame: Any) -> None:
        raise AssertionError

    def wait() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)

    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    with pytest.raises(SystemExit, match="143"), ended_by_sigterm():
        wait()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    signal.signal(signal.SIGTERM, own)
    try:
        with ended_by_sigterm():
            assert signal.getsignal(signal.SIGTERM) is own
        assert signal.getsignal(signal.SIGTERM) is own
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    thread = threading.Thread(target=lambda: ended_by_sigterm().__enter__())
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


# --- two at once -------------------------------------------------------------------------------------------------


def test_an_export_waits_for_another_into_its_folder(work: Path) -> None:
    (work / "out" / ".export.theirs.part").mkdir(parents=True)
    handle = os.open(work / "out", os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    said: list[str] = []
    options = {"progress": lambda text, *_: said.append(text)}
    thread = threading.Thread(
        target=export_drafter, args=(work / "drafter", work / "target", work / "out"), kwargs=options
    )
    thread.start()
    deadline = time.monotonic() + 60
    while not (said and said[-1].startswith("waiting for another export into")) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert [path.name for path in (work / "out").iterdir()] == [".export.theirs.part"]
    os.close(handle)
    thread.join(60)
    assert sorted(contents(work / "out")) == FILES


def test_two_exports_at_once_leave_one_of_both(work: Path) -> None:
    build_drafter(2, seed=1).save_pretrained(work / "second")
    threads = [
        threading.Thread(target=export_drafter, args=(work / name, work / "target", work / "out"))
        for name in ("drafter", "second")
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert sorted(contents(work / "out")) == FILES
    cache = (onnx := OnnxDrafter(work / "out")).new_cache(1, 8)
    assert onnx.propose(np.array([3]), cache).tokens.shape == (1, 3)
