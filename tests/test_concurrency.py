"""Threads: on one Speculator, on several over one model, and the model's own generate beside them."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from device_pairs import NOBODY
from pairs import build_drafter
from tiny_models import TINY

from pydflash import Speculator
from pydflash.rounds.turns import Turns, turns_of
from pydflash.target.view import ModelView

THREADS = 8
PATHS = ("auto", "fused", "own", "generic")


def prompt_of(i: int) -> list[int]:
    return [(7 * i + j) % 97 for j in range(20 + 13 * i)]


def together(calls: list[Callable[[], Any]]) -> list[Any]:
    """All at once, from a common start."""
    barrier = threading.Barrier(len(calls))

    def run(call: Callable[[], Any]) -> Any:
        barrier.wait()
        return call()

    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result() for future in [pool.submit(run, call) for call in calls]]


def own_text(model: Any, i: int) -> list[int]:
    ids = torch.tensor([prompt_of(i)], device=model.device)
    found = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False, eos_token_id=None
    )
    return found[0, ids.shape[1] :].tolist()


@pytest.mark.parametrize("target_path", [*PATHS, "several"])
def test_threads_take_turns(target_path: str, device: torch.device) -> None:
    """Forty requests of eight threads equal to alone, acceptance too, while the model generates by itself.

    Forty where several Speculators share the model; two rounds of eight for each kind of target.
    """
    model = TINY["qwen3"](num_hidden_layers=6).to(device)
    drafter = build_drafter(2).to(device)
    paths = PATHS if target_path == "several" else (target_path,)
    specs = [Speculator(model, drafter, target_path=path) for path in paths]
    options: dict[str, Any] = {"temperature": 0.0, "stop_token_ids": NOBODY}
    wants = [[spec.generate(prompt_of(i), 24, **options) for i in range(THREADS)] for spec in specs]
    wants_own = [own_text(model, i) for i in range(2)]
    before = model.config._attn_implementation, sorted(vars(model.config))
    for turn in range(5 if target_path == "several" else 2):
        which = [(i, (i + turn) % len(specs)) for i in range(THREADS)]
        calls = [lambda i=i, s=s: specs[s].generate(prompt_of(i), 24, **options) for i, s in which]
        found = together([*calls, *(lambda i=i: own_text(model, i) for i in range(2))])
        for (i, s), got in zip(which, found[:THREADS], strict=True):
            assert got.token_ids == wants[s][i].token_ids
            assert got.stats.num_accepted == wants[s][i].stats.num_accepted
        assert found[THREADS:] == wants_own
    assert (model.config._attn_implementation, sorted(vars(model.config))) == before
    assert own_text(model, 0) == wants_own[0]


def test_streams_that_are_open_hold_nobody_up() -> None:
    spec = Speculator(TINY["qwen3"](num_hidden_layers=6), build_drafter(2))
    want = spec.generate(prompt_of(0), 10, temperature=0.0, stop_token_ids=NOBODY).token_ids
    stream = spec.stream(prompt_of(1), 30, temperature=0.0)
    next(stream)
    calls = [lambda: spec.generate(prompt_of(0), 10, temperature=0.0, stop_token_ids=NOBODY).token_ids] * 3
    assert together(calls) == [want] * 3
    next(stream)


def test_turns_come_in_the_order_of_asking() -> None:
    turns, order = Turns(), []

    def ask(i: int) -> None:
        with turns, turns:  # a thread that has its turn may ask again
            order.append(i)

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(6)]
    with turns:
        for i, thread in enumerate(threads):
            thread.start()
            while len(turns._line) <= i:
                time.sleep(0.001)
    for thread in threads:
        thread.join()
    assert order == [0, 1, 2, 3, 4, 5]
    with turns:
        pass


def test_a_turn_is_passed_on_after_an_error() -> None:
    turns = Turns()
    with pytest.raises(KeyError), turns:
        raise KeyError
    assert together([lambda: turns.__enter__() and turns.__exit__(None, None, None) for _ in range(4)]) == [None] * 4


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs timers")
def test_an_interrupt_between_any_two_lines_leaves_the_turn_free() -> None:
    """Also within `__enter__` and `__exit__`, whose lines are most of what runs here."""
    turns, rng = Turns(), random.Random(0)

    def take_turns_for(seconds: float) -> None:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        while True:
            with turns:
                pass

    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        for _ in range(500):
            with pytest.raises(KeyboardInterrupt):
                take_turns_for(rng.uniform(1e-5, 3e-4))
            assert not turns._is_owned()
            assert not turns._line
    finally:
        signal.signal(signal.SIGALRM, before)
    assert together([lambda: turns.__enter__() and turns.__exit__(None, None, None)] * 2) == [None] * 2


def test_turns_belong_to_the_model() -> None:
    model = TINY["qwen3"]()
    one, other = Speculator(model, None), Speculator(model, None, target_path="own")
    assert one.loop.parts.turns is other.loop.parts.turns is turns_of(model)
    assert turns_of(TINY["qwen3"]()) is not turns_of(model)
    assert turns_of([]) is not turns_of([])


@pytest.mark.parametrize("name", ["qwen3", "gemma3_nested"])
def test_a_view_shares_all_but_attention_and_mode(name: str) -> None:
    model = TINY[name]()
    spec = Speculator(model, None, target_path="fused" if name == "qwen3" else "own")
    view = spec.loop.parts.target._view  # type: ignore[attr-defined]
    assert isinstance(view, ModelView)
    model.train()
    first = view.current()
    assert first is view.current()
    assert [p.data_ptr() for p in first.parameters()] == [p.data_ptr() for p in model.parameters()]
    assert not any(module.training for module in first.modules())
    assert all(module.training for module in model.modules())
    text = model.config.get_text_config()
    assert first.config.get_text_config()._attn_implementation == "pydflash_own"
    assert text._attn_implementation == model.config.get_text_config()._attn_implementation != "pydflash_own"
    text.something = 5  # what its user sets later is seen
    assert view.current().config.get_text_config().something == 5
    child = next(name for name, _ in model.named_children())
    setattr(model, child, getattr(model, child))
    assert view.current() is first
    model.add_module("another", torch.nn.Linear(1, 1))
    assert view.current() is not first
    assert "another" in dict(view.current().named_children())
    assert not any(module.training for module in view.current().modules())
