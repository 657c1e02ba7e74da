"""What may slow down the threads of this process, in lines for people."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

_RUNTIME = re.compile(r"/((?:libgomp|libiomp|libomp)[^/]*\.so[^/]*)$")


def openmp_runtimes(maps: str | None = None) -> list[str]:
    """File names of the OpenMP runtimes in this process, from Linux's list of its mappings; else []."""
    if maps is None:
        path = Path("/proc/self/maps")
        maps = path.read_text() if path.exists() else ""
    return sorted({found[1] for line in maps.splitlines() if (found := _RUNTIME.search(line))})


def thread_advice(
    threads: int, cores: int | None = None, runtimes: list[str] | None = None, environ: Mapping[str, str] = os.environ
) -> list[str]:
    """A line for each thing that is known to cost speed, with what to do; [] where there is none."""
    if cores is None:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    runtimes = openmp_runtimes() if runtimes is None else runtimes
    passive = environ.get("OMP_WAIT_POLICY", "").upper() == "PASSIVE"
    lines = []
    if threads > cores:
        lines.append(f"{threads} threads on {cores} cores wait for one another: set OMP_NUM_THREADS={cores} or less")
    if not passive:
        policy = environ.get("OMP_WAIT_POLICY") or "not set"
        lines.append(
            f"OMP_WAIT_POLICY is {policy}, so idle threads may spin and take the cores of others: set it to PASSIVE "
            "before Python starts, above all where other programs share the machine"
        )
    if len(runtimes) > 1:
        remedy = "OMP_WAIT_POLICY=PASSIVE keeps idle ones quiet" if passive else "set OMP_WAIT_POLICY=PASSIVE"
        names = ", ".join(runtimes)
        lines.append(f"{len(runtimes)} OpenMP runtimes are loaded ({names}), each with threads of its own: {remedy}")
    return lines
