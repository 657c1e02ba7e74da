"""Finds and loads the SYCL runtime before the module that needs it, and says what is missing where that fails.

pip's packages leave their libraries in the prefix of the environment, where the loader does not look, and the list of
OpenCL devices with a path that is nobody's. Nothing here creates a device context.
"""

from __future__ import annotations

import ctypes
import os
import sys
import sysconfig
from pathlib import Path

RUNTIME = "libsycl.so.9"
_INSTALL = 'pip install "intel-sycl-rt>=2026.0,<2027"'
# What libOpenCL's CPU device and libsycl need of Intel's compiler, in the order of their dependence.
_COMPILER_LIBRARIES = ("libintlc.so.5", "libimf.so", "libirng.so", "libsvml.so")


def loaded_runtimes() -> list[str]:
    """The files of all copies of libsycl in this process."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return []
    paths = {line.split(maxsplit=5)[5] for line in lines if "/libsycl.so" in line}
    return sorted(paths)


def _folders() -> list[Path]:
    """Where libsycl may be: the prefix of the environment, then that of the interpreter."""
    prefixes = dict.fromkeys([sysconfig.get_paths()["data"], sys.prefix, sys.base_prefix])
    return [Path(prefix) / "lib" for prefix in prefixes]


def prepare() -> str:
    """Load libsycl; returns why the SYCL backend cannot be used, in one line, or nothing."""
    os.environ.setdefault("SYCL_CACHE_PERSISTENT", "1")  # kernels that are compiled when used are kept on disk
    if present := loaded_runtimes():
        return _refusal(present)
    folder = next((folder for folder in _folders() if (folder / RUNTIME).exists()), None)
    if folder is not None:
        icd = folder / "libintelocl.so"
        if icd.exists():  # the CPU device of OpenCL, if intel-opencl-rt is installed
            os.environ.setdefault("OCL_ICD_FILENAMES", str(icd))
        for name in _COMPILER_LIBRARIES:
            if (folder / name).exists():
                ctypes.CDLL(str(folder / name), mode=ctypes.RTLD_GLOBAL)
    try:
        ctypes.CDLL(RUNTIME if folder is None else str(folder / RUNTIME))
    except OSError as error:
        if folder is None:
            return f"built, but {RUNTIME} is not in {_folders()[0]} nor on the loader's path: {_INSTALL}"
        return f"built, but {folder / RUNTIME} does not load: {error}"
    return _refusal(loaded_runtimes())


def _refusal(present: list[str]) -> str:
    if len(present) > 1:
        return f"refused: this process has two SYCL runtimes, {' and '.join(present)}: keep one on the loader's path"
    if present and not Path(present[0]).name.startswith(RUNTIME):
        return f"refused: this process already has {present[0]}, and pydflash was built for {RUNTIME}"
    return ""
