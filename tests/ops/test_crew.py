"""The threads of the CPU kernels: forks, several callers at once, and how they behave where cores are short."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest
import torch
from fused_cases import normal

from pydflash.decoder import formats

SHARED = """
import os, torch
from pydflash.decoder import formats
torch.set_num_threads(3)
layer = formats.of("bfloat16").linear(torch.randn(2000, 500).bfloat16(), None)
x = torch.randn(8, 500).bfloat16()
"""


@pytest.fixture
def threads() -> object:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def test_callers_at_once_get_their_own_results(threads: object) -> None:
    layers = [formats.of("bfloat16").linear(normal(1500, 400, seed=i).bfloat16(), None) for i in range(4)]
    x = normal(5, 400, seed=9).bfloat16()
    want = [layer(x) for layer in layers]
    wrong: list[int] = []

    def call(i: int) -> None:
        for _ in range(200):
            if not torch.equal(layers[i](x), want[i]):
                wrong.append(i)

    callers = [threading.Thread(target=call, args=(i,)) for i in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(60)
        assert not caller.is_alive()
    assert not wrong


def run(text: str) -> str:
    # Elsewhere: in the root of the tree Python would take the sources, which have no compiled ops, for the package.
    command = [sys.executable, "-c", SHARED + text]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=os.sep)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.skipif(not hasattr(os, "fork"), reason="fork is of Unix")
def test_a_child_of_fork_has_threads_of_its_own() -> None:
    """Forked after the parent's threads began, while they wait or sleep; both go on."""
    out = run(
        "import faulthandler\n"
        "bits = lambda: layer(x).view(torch.int16).tolist()\n"  # no work for torch's own threads, which do not fork
        "want = bits()\n"
        "child = os.fork()\n"
        "faulthandler.dump_traceback_later(60, exit=True)\n"
        "same = all(bits() == want for _ in range(20))\n"
        "if child == 0: os._exit(0 if same else 1)\n"
        "print(same, os.waitpid(child, 0)[1])\n"
    )
    assert out.split() == ["True", "0"]


def test_threads_sleep_when_idle() -> None:
    """After a call the process takes no time of a core: 0.3 s of waiting cost less than 0.1 s."""
    out = run(
        "import time\n"
        "for _ in range(20): layer(x)\n"
        "time.sleep(0.05)\n"
        "begin = time.process_time(); time.sleep(0.3); print(time.process_time() - begin)\n"
    )
    assert float(out) < 0.1


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="counts what each thread does, as Linux tells it")
def test_threads_of_an_earlier_call_sleep_through_smaller_ones() -> None:
    """40 were had once; the calls of 2 threads after that do not wake the others."""
    out = run(
        "import time\n"
        "def switches():\n"
        "    held = {}\n"
        "    for task in os.listdir('/proc/self/task'):\n"
        "        lines = open(f'/proc/self/task/{task}/status').read().splitlines()\n"
        "        held[task] = next(int(x.split()[1]) for x in lines if x.startswith('voluntary'))\n"
        "    return held\n"
        "torch.set_num_threads(40); layer(x)\n"
        "torch.set_num_threads(2)\n"
        "for _ in range(20): layer(x); time.sleep(0.005)\n"
        "before = switches()\n"
        "for _ in range(50): layer(x); time.sleep(0.005)\n"
        "print(len(before), sum(count > before[task] + 10 for task, count in switches().items()))\n"
    )
    threads, woken = map(int, out.split())
    assert threads >= 40
    assert woken < 10
