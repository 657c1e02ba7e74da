"""The SYCL backend around its ops: whole texts, queues, errors, what is missing, and processes that end."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from device_pairs import NOBODY, pair, prompts_of
from devices import unusable

from pydflash import Generation, Speculator, ops
from pydflash.ops import backends, native
from pydflash.ops import sycl_runtime as _sycl_runtime

needs_sycl = pytest.mark.skipif(bool(unusable("sycl")), reason=f"sycl: {unusable('sycl')}")
ROOT = Path(__file__).resolve().parents[2]


def texts(model: Any, drafter: Any, sampling: dict[str, Any], options: dict[str, Any]) -> list[Generation]:
    spec = Speculator(model, drafter, **options)
    return spec.generate(prompts_of(3), 12, seed=[1, 2, 3], stop_token_ids=NOBODY, return_proposals=True, **sampling)


@needs_sycl
@pytest.mark.parametrize("target_path", ["generic", "fused"])
@pytest.mark.parametrize("path", ["walk", "viterbi", "tree"])
@pytest.mark.parametrize("version", [1, 2])
def test_texts_and_drafts_are_the_cpus(version: int, path: str, target_path: str) -> None:
    model, drafter = pair(version, "cpu")
    options = {"path": path, "target_path": target_path} | ({"num_nodes": 7} if path == "tree" else {})
    kept = 0
    for sampling in ({"temperature": 0.0}, {"temperature": 0.8, "top_k": 40, "top_p": 0.95}):
        want = texts(model, drafter, sampling, options)
        with backends.running("sycl"):
            got = texts(model, drafter, sampling, options)
        for a, b in zip(got, want, strict=True):
            assert a.token_ids == b.token_ids
            assert a.stats.num_accepted == b.stats.num_accepted
            assert a.stats.proposals == b.stats.proposals
            kept += sum(a.stats.num_accepted)
            assert a.stats.backends["ops"].startswith("sycl (")
            assert b.stats.backends["ops"].startswith("cpu (")
    assert kept > 0


def test_only_backends_of_the_cpu_can_be_asked_for() -> None:
    with pytest.raises(ValueError, match=r"^running: backend must be 'cpu' or 'sycl' .* got 'cuda'$"):
        backends.running("cuda").__enter__()
    before = backends.name_for("cpu")
    with backends.running("sycl"):
        assert backends.name_for("cpu") == "sycl"
    assert backends.name_for("cpu") == before


# --- queues and errors ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """sycl_queue.cpp, compiled against the runtime that is loaded."""
    assert backends.load("sycl").usable
    prefix = Path(_sycl_runtime.loaded_runtimes()[0]).parents[1]
    built = tmp_path_factory.mktemp("sycl") / "libsycl_queue.so"
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None or not (prefix / "include/sycl/sycl.hpp").exists():
        absent = pytest.fail if "sycl" in os.environ.get("PYDFLASH_REQUIRE_BACKENDS", "") else pytest.skip
        absent(f"needs a C++ compiler and the headers of intel-sycl-rt in {prefix / 'include'}")
    sources = [ROOT / "tests/helpers/sycl_queue.cpp", ROOT / "csrc/sycl/device.cpp"]
    flags = ["-std=c++17", "-shared", "-fPIC", "-DPYDFLASH_SYCL_AOT=0", "-DSYCL_DISABLE_FSYCL_SYCLHPP_WARNING"]
    paths = [f"-I{ROOT / 'csrc'}", f"-isystem{prefix / 'include'}", f"-L{prefix / 'lib'}"]
    subprocess.run([compiler, *flags, *paths, *map(str, sources), "-lsycl", "-o", str(built)], check=True)
    loaded = ctypes.CDLL(str(built))
    loaded.make_queue.restype = ctypes.c_void_p
    for name in ("hold", "wait"):
        getattr(loaded, name).argtypes = [ctypes.c_void_p]
    loaded.check_memory.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_size_t]
    return loaded


@pytest.fixture
def queue(library: ctypes.CDLL) -> int:
    made = library.make_queue()
    assert made
    return made


@pytest.fixture
def watchdog(library: ctypes.CDLL) -> Iterator[None]:
    """Lets a queue go on that a failing test would wait for."""
    timer = threading.Timer(20, library.release)
    timer.start()
    yield
    library.release()
    timer.cancel()


@needs_sycl
@pytest.mark.usefixtures("watchdog")
def test_a_borrowed_queue_is_not_waited_on(library: ctypes.CDLL, queue: int, monkeypatch: pytest.MonkeyPatch) -> None:
    caches = [torch.zeros(1, 1, 1, 4, 8) for _ in range(2)]
    blocks = [torch.randn(1, 1, 1, 2, 8) for _ in range(2)]
    index, lengths = torch.tensor([[0, 1]], dtype=torch.int32), torch.tensor([1], dtype=torch.int32)
    with backends.running("sycl"):
        ops.cache_append(*(x.clone() for x in (*caches, *blocks)), index, lengths)  # compiles
        module = native.module_for("cache_append", index)[0]
        monkeypatch.setattr("pydflash.ops.caches.module_for", lambda op, *tensors: (module, queue, 0))
        library.hold(queue)
        ops.cache_append(*caches, *blocks, index, lengths)
    assert library.is_held()
    assert not caches[0].any()
    library.release()
    library.wait(queue)
    for cache, block in zip(caches, blocks, strict=True):
        assert torch.equal(cache[..., 1:3, :], block)
        assert not cache[..., [0, 3], :].any()


@needs_sycl
def test_asynchronous_errors_are_exceptions(library: ctypes.CDLL) -> None:
    message = ctypes.create_string_buffer(200)
    assert library.asynchronous_error(message, 200)
    assert message.value == b"went wrong"


@needs_sycl
def test_memory_of_another_context_is_refused(library: ctypes.CDLL, queue: int) -> None:
    message = ctypes.create_string_buffer(200)
    assert not library.check_memory(queue, b"own", message, 200), message.value
    for kind in (b"other", b"none"):
        assert library.check_memory(queue, kind, message, 200), kind
        assert message.value == b"an op: a tensor's memory does not belong to the queue's context"


# --- the scan -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kernel", "old", "new", "found"),
    [
        ("add_rms_norm", "#pragma once", "#pragma once", ""),
        ("add_rms_norm", "eps", "eps + 1e-9", "a constant of type double: .*1e-9"),
        ("lattice", "float", "double", "a double"),
        (
            "team",
            "int thread() const {",
            "int thread() const { const int lane = 0; return lane % 32;",
            "sub-group size",
        ),
        ("block_attention", "PYDFLASH_SUB_GROUP_OF_16", "", "an assumed sub-group size: sub-groups are used"),
        (
            "block_attention_shape",
            "reqd_sub_group_size(16)",
            "reqd_sub_group_size(32)",
            "sub-groups of 32 are required",
        ),
    ],
)
def test_the_scan_finds_what_only_a_gpu_would_refuse(
    kernel: str, old: str, new: str, found: str, tmp_path: Path
) -> None:
    script = ROOT / ".ci/check_sycl.py"
    if not script.exists():
        pytest.skip("the scan is not part of an sdist")
    shutil.copytree(ROOT / "csrc", tmp_path / "csrc")
    header = tmp_path / f"csrc/sycl/kernels/{kernel}.hpp"
    text = header.read_text()
    assert old in text
    header.write_text(text.replace(old, new))
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "csrc/sycl")], capture_output=True, text=True, check=False
    )
    assert done.returncode == bool(found)
    assert re.search(found, done.stdout)


# --- the runtime ----------------------------------------------------------------------------------------------


def test_a_second_runtime_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    two = ["/a/libsycl.so.9", "/b/libsycl.so.9"]
    advice = "keep one on the loader's path"
    monkeypatch.setattr(_sycl_runtime, "loaded_runtimes", lambda: two)
    assert _sycl_runtime.prepare() == f"refused: this process has two SYCL runtimes, {' and '.join(two)}: {advice}"
    monkeypatch.setattr(_sycl_runtime, "loaded_runtimes", lambda: ["/a/libsycl.so.8.0.0"])
    assert "already has /a/libsycl.so.8.0.0, and pydflash was built for libsycl.so.9" in _sycl_runtime.prepare()
    monkeypatch.setattr(_sycl_runtime, "loaded_runtimes", lambda: two[:1])
    assert _sycl_runtime.prepare() == ""


def test_what_is_missing_is_named_in_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def nothing(name: str, mode: int = 0) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(_sycl_runtime, "loaded_runtimes", list)
    monkeypatch.setattr(_sycl_runtime.ctypes, "CDLL", nothing)
    monkeypatch.setattr(_sycl_runtime, "_folders", lambda: [tmp_path])
    reason = _sycl_runtime.prepare()
    assert reason == (
        f"built, but libsycl.so.9 is not in {tmp_path} nor on the loader's path: "
        'pip install "intel-sycl-rt>=2026.0,<2027"'
    )
    (tmp_path / "libsycl.so.9").touch()
    assert _sycl_runtime.prepare().startswith(f"built, but {tmp_path / 'libsycl.so.9'} does not load: ")


FIRST_KERNEL = """
import torch
from pydflash import ops
from pydflash.ops import backends
cache, block = torch.zeros(1, 1, 1, 4, 8), torch.ones(1, 1, 1, 1, 8)
with backends.running("sycl"):
    ops.cache_append(cache, cache.clone(), block, block, torch.zeros(1, 1).int(), torch.ones(1).int())
print(int(cache.sum()), flush=True)
"""


@needs_sycl
def test_a_process_ends_and_leaves_its_kernels_to_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Import, first kernel and exit within a minute, with a reader that goes away."""
    monkeypatch.setenv("SYCL_CACHE_DIR", str(tmp_path / "cache"))
    kept = []
    # A later runtime keys what it has just compiled and what it finds by other names, and needs a process more.
    for _ in range(2 if version("intel-sycl-rt").startswith("2026.0.") else 3):
        process = subprocess.Popen([sys.executable, "-c", FIRST_KERNEL], cwd=tmp_path, stdout=subprocess.PIPE)
        stdout = process.stdout
        assert stdout is not None
        assert stdout.readline() == b"8\n"
        stdout.close()
        assert process.wait(60) == 0
        kept.append(set((tmp_path / "cache").rglob("*.bin")))
    assert kept[-2] == kept[-1]
    assert len(kept[0]) > 2
