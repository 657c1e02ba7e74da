"""``pydflash info``: backends, versions, devices and threads. It needs neither torch nor rich."""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import importlib.util
import json
import os
import platform
from typing import Any

from .. import __version__
from .threads import thread_advice

_PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "numpy", "onnx", "onnxruntime", "gguf")
_OPENMP_SETTINGS = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "OMP_PROC_BIND", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
_BACKENDS = ("cpu", "cuda", "sycl")


def collect_info() -> dict[str, Any]:
    """What ``pydflash info`` shows, as plain data: package, python, backends, versions, devices, openmp, advice."""
    versions: dict[str, str | None] = {}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    report: dict[str, Any] = {
        "pydflash": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "backends": {name: _without_torch(name) for name in _BACKENDS},
        "torch_cpu_level": None,
        "versions": versions,
        "devices": [f"cpu: {platform.processor() or platform.machine()}, {os.cpu_count()} cores"],
        "openmp": {"threads": None, **{name: os.environ.get(name) for name in _OPENMP_SETTINGS}},
        "thread_advice": [],
    }
    try:
        import torch
    except ModuleNotFoundError:
        return report
    from ..ops.backends import backends

    for name, backend in backends().items():
        description = backend.module.description() if backend.module else None
        state = {"usable": backend.usable, "description": description, "reason": backend.reason or None}
        report["backends"][name] = {"built": _is_built(name), **state}
    report["torch_cpu_level"] = torch.backends.cpu.get_cpu_capability()
    report["devices"] += [f"cuda:{i}: {torch.cuda.get_device_name(i)}" for i in range(torch.cuda.device_count())]
    if hasattr(torch, "xpu"):
        report["devices"] += [f"xpu:{i}: {torch.xpu.get_device_name(i)}" for i in range(torch.xpu.device_count())]
    report["openmp"]["threads"] = torch.get_num_threads()
    report["thread_advice"] = thread_advice(torch.get_num_threads())
    return report


def _is_built(name: str) -> bool:
    return importlib.util.find_spec(f"pydflash._{name}") is not None


def _without_torch(name: str) -> dict[str, Any]:
    if _is_built(name):
        reason = "needs torch: pip install torch"
    elif importlib.util.find_spec("pydflash._build_info") is None:
        reason = "this is a source tree, not the installed package"
    else:
        info = importlib.import_module("pydflash._build_info")
        reason = f"not built: {info.NOT_BUILT.get(name, 'unknown why')}"
    return {"built": _is_built(name), "usable": False, "description": None, "reason": reason}


def show_info(arguments: argparse.Namespace) -> int:
    """Print the report, as JSON or as a table; a plain list where rich is not installed."""
    report = collect_info()
    if arguments.json:
        print(json.dumps(report, indent=2))
        return 0
    groups = _groups(report)
    try:
        from rich.console import Console
        from rich.table import Table
    except ModuleNotFoundError:
        for name, value in (row for group in groups for row in group):
            print(f"{name}: {value}")
        return 0
    table = Table(title=f"pydflash {report['pydflash']}", show_header=False, title_justify="left")
    for group in groups:
        for name, value in group:
            table.add_row(name, value)
        table.add_section()
    Console(markup=False, highlight=False).print(table)
    return 0


def _groups(report: dict[str, Any]) -> list[list[tuple[str, str]]]:
    """The report's rows, in groups: a name and a text each."""
    backends = [
        (f"backend {name}", f"usable, {one['description']}" if one["usable"] else f"not usable: {one['reason']}")
        for name, one in report["backends"].items()
    ]
    versions = [(name, version or "not installed") for name, version in report["versions"].items()]
    versions.append(("torch's CPU level", report["torch_cpu_level"] or "unknown without torch"))
    devices = [(f"device {kind}", text) for kind, _, text in (one.partition(": ") for one in report["devices"])]
    threads = [(name, "not set" if value is None else str(value)) for name, value in report["openmp"].items()]
    threads += [("mind", line) for line in report["thread_advice"]]
    return [[("python", f"{report['python']}, {report['platform']}")], backends, versions, devices, threads]
