"""What Python does for an Intel GPU, with stand-ins for torch.xpu: no such device is needed, and none was there."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from device_pairs import NOBODY, pair, prompts_of
from fakes import FakeTarget
from pairs import build_drafter

from pydflash import Speculator
from pydflash.ops import backends, native
from pydflash.target.loading import _default_device


@pytest.mark.parametrize(
    ("there", "chosen"), [((), "cpu"), (("xpu",), "xpu"), (("cuda",), "cuda"), (("cuda", "xpu"), "cuda")]
)
def test_the_best_device_is_chosen(there: tuple[str, ...], chosen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in ("cuda", "xpu"):
        monkeypatch.setattr(getattr(torch, kind), "is_available", lambda kind=kind: kind in there)
    assert _default_device() == chosen


def test_ops_get_the_queue_of_torchs_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def current_stream(device: torch.device) -> Any:
        asked.append(device)
        return SimpleNamespace(sycl_queue=0x1230)

    monkeypatch.setattr(torch.xpu, "current_stream", current_stream)
    assert native.stream_of(torch.device("xpu", 1)) == 0x1230
    assert asked == [torch.device("xpu", 1)]
    assert native.stream_of(torch.device("cpu")) == 0


def test_the_ops_of_an_xpu_are_those_of_sycl(monkeypatch: pytest.MonkeyPatch) -> None:
    assert backends.name_for("xpu") == "sycl"
    monkeypatch.setattr(backends, "load", lambda name: backends.Backend(name, None, f"no {name} here"))
    with pytest.raises(RuntimeError, match=r"no native ops for xpu \(no sycl here\); backend='reference' runs"):
        backends.choose("auto", "xpu")
    for kind, module in (("cuda", torch.cuda), ("xpu", torch.xpu), ("cpu", None), ("meta", None)):
        assert backends.accelerator(torch.device(kind)) is module


def test_a_drafter_elsewhere_is_refused() -> None:
    target = FakeTarget(lambda position, token: torch.zeros(97), (0, 2))
    drafter = build_drafter(2).to("meta")
    with pytest.raises(ValueError, match="the drafter must be on cpu, got meta"):
        Speculator(target, drafter)


class Streams:
    """Events and one stream that write down what is asked of them."""

    def __init__(self) -> None:
        self.log: list[str] = []
        log = self.log

        class Event:
            def record(self) -> None:
                log.append("record")

            def synchronize(self) -> None:
                log.append("synchronize")

        self.Event = Event
        self.stream = SimpleNamespace(record_event=Event, wait_event=lambda event: log.append("wait"))

    def current_stream(self, device: torch.device) -> Any:
        return self.stream

    def device(self, device: torch.device) -> Any:
        return nullcontext()

    def synchronize(self, device: torch.device) -> None:
        self.log.append("synchronize all")

    def max_memory_allocated(self, device: torch.device) -> int:
        return 123


def test_rounds_run_ahead_without_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on an Intel GPU: the fast path by itself, eager, two rounds ahead, read behind an event."""
    model, drafter = pair(2, "cpu")
    prompts, common = prompts_of(3), {"seed": [1, 2, 3], "temperature": 0.8, "stop_token_ids": NOBODY}
    want = Speculator(model, drafter).generate(prompts, 12, **common)
    assert want[0].stats.backends["target"] == "fused layers, packed weights"

    streams = Streams()
    empty_like = torch.empty_like
    monkeypatch.setattr(backends, "accelerator", lambda device: streams)
    monkeypatch.setattr(torch, "empty_like", lambda x, pin_memory=False, **options: empty_like(x, **options))
    spec = Speculator(model, drafter)
    for waited in (0, 1):  # the second batch takes the first one's buffers, once they are free
        streams.log.clear()
        got = spec.generate(prompts, 12, **common)
        assert [out.token_ids for out in got] == [out.token_ids for out in want]
        assert got[0].stats.backends["target"] == "fused layers, packed weights"
        assert got[0].stats.backends["round"] == "eager"
        assert got[0].stats.peak_bytes == 123
        assert streams.log.count("wait") == waited
        rounds = [entry for entry in streams.log if entry != "wait"]
        assert rounds[:3] == ["record", "record", "synchronize"]
        assert 0 <= rounds.count("record") - rounds.count("synchronize") <= 2


def test_trees_are_timed_behind_all_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = Streams()
    monkeypatch.setattr(backends, "accelerator", lambda device: streams)
    model, drafter = pair(2, "cpu")
    spec = Speculator(model, drafter, path="tree", target_path="fused")
    assert spec.loop.parts.paths.num_nodes in (3, 15, 31, 63)
    assert streams.log == ["synchronize all"] * (
        2 * (1 + len(spec.loop.parts.paths.seconds))
    )  # drafting, and each size


def test_a_speculator_on_an_accelerator_is_deep_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "accelerator", lambda device: torch.xpu)  # a module, which copy cannot take
    model, drafter = pair(2, "cpu")
    other = copy.deepcopy(Speculator(model, drafter, target_path="fused"))
    assert other.loop.ahead == 2  # type: ignore[attr-defined]
