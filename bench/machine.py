"""What a benchmark ran on, for the JSON beside its numbers."""

from __future__ import annotations

import platform
import time
from pathlib import Path
from typing import Any

import torch


def machine() -> dict[str, Any]:
    """Device, versions and thread settings; the measured copy bandwidth in GB/s (read plus written)."""
    import transformers

    import pydflash

    cpu = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line),
        "",
    )
    found: dict[str, Any] = {
        "cpu": cpu or platform.processor(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "pydflash": pydflash.__version__,
        "backend": pydflash.backends()["cpu"].module.description() if pydflash.backends()["cpu"].usable else None,
        "copy_gb_s": round(copy_bandwidth(), 1),
        "date": time.strftime("%Y-%m-%d"),
    }
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
    return found


def copy_bandwidth(megabytes: int = 256) -> float:
    """GB/s of a large copy in this process, bytes read and written both counted; best of several."""
    source = torch.ones(megabytes << 18)
    target = torch.empty_like(source)
    best = 0.0
    for _ in range(5):
        begin = time.perf_counter()
        target.copy_(source)
        best = max(best, 2 * source.nbytes / (time.perf_counter() - begin) / 1e9)
    return best
