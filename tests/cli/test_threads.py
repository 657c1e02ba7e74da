"""What `pydflash info` says of threads."""

from __future__ import annotations

from pydflash.cli.threads import openmp_runtimes, thread_advice

MAPS = """\
7f0 r-xp 0 0 1 /usr/lib/x86_64-linux-gnu/libgomp.so.1.0.0
7f1 r--p 0 0 1 /usr/lib/x86_64-linux-gnu/libgomp.so.1.0.0
7f2 r-xp 0 0 1 /x/torch/lib/libgomp-a34b3233.so.1
7f3 r-xp 0 0 1 /x/libcompose.so
7f4 rw-p 0 0 0 [heap]
"""
PASSIVE = {"OMP_WAIT_POLICY": "passive"}


def test_runtimes_are_named_once() -> None:
    assert openmp_runtimes(MAPS) == ["libgomp-a34b3233.so.1", "libgomp.so.1.0.0"]
    assert openmp_runtimes("") == []


def test_nothing_to_say() -> None:
    assert thread_advice(2, 2, ["libgomp.so.1"], PASSIVE) == []


def test_each_pitfall_has_its_line() -> None:
    (line,) = thread_advice(4, 2, [], PASSIVE)
    assert line == "4 threads on 2 cores wait for one another: set OMP_NUM_THREADS=2 or less"
    (line,) = thread_advice(2, 2, [], {"OMP_WAIT_POLICY": "ACTIVE"})
    assert line.startswith("OMP_WAIT_POLICY is ACTIVE, so idle threads may spin")
    assert "is not set" in thread_advice(1, 2, [], {})[0]
    (line,) = thread_advice(1, 2, ["libgomp.so.1", "libiomp5.so"], PASSIVE)
    assert line.startswith("2 OpenMP runtimes are loaded (libgomp.so.1, libiomp5.so)")
