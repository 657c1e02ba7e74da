"""A target and a drafter are what they offer: plain ones run in every loop, and what is missing is named."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fakes import FakeTarget
from pairs import Scripted, build_drafter
from plain_pair import PlainDrafter, PlainTarget
from tiny_models import TINY

from pydflash import Speculator, Target
from pydflash.protocols import (
    BlockTarget,
    ChoosesOps,
    DrafterLike,
    ModelTarget,
    ModuleDrafter,
    RowDrafter,
    RowTarget,
    TargetLike,
    missing,
    offers,
)
from pydflash.rounds.by_rows import LoopByRows
from pydflash.rounds.device import DeviceLoop
from pydflash.rounds.host import HostLoop
from pydflash.target.own import OwnTarget

PROMPTS = [[3, 1, 4], [1], [5, 9, 2, 6, 5, 3, 5]]
COUNT = 20
OPTIONS: dict[str, dict[str, Any]] = {
    "walk": {},
    "block of 3": {"block_size": 3},
    "viterbi": {"path": "viterbi"},
    "tree": {"path": "tree", "num_nodes": 9},
    "tree, auto": {"path": "tree"},
}


class OneSequence:
    """The same target without what rows on the device need."""

    def __init__(self) -> None:
        self._target = PlainTarget()

    def __getattr__(self, name: str) -> Any:
        if name in ("append", "prefill_chunks", "derived"):
            raise AttributeError(name)
        return getattr(self._target, name)


def by_hand(prompt: list[int]) -> list[int]:
    """Greedy decoding with the target alone."""
    target, ids = PlainTarget(), list(prompt)
    with torch.no_grad():
        for _ in range(COUNT):
            out = target.verify(torch.tensor([ids]), target.new_cache(1, 64))
            ids.append(int(out.logits[0, -1].argmax()))
    return ids[len(prompt) :]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("where", ["host", "device", "host alone"])
def test_plain_ones_run_in_every_loop(where: str, options: str) -> None:
    target: Any = OneSequence() if where == "host alone" else PlainTarget()
    path = "own" if where == "device" else "auto"
    spec = Speculator(target, PlainDrafter(), target_path=path, **OPTIONS[options])
    plain = Speculator(target, None, target_path=path)
    assert isinstance(spec.loop, {"device": DeviceLoop, "host": LoopByRows, "host alone": HostLoop}[where])
    outs = spec.generate(PROMPTS, COUNT, stop_token_ids=[])
    assert [out.token_ids for out in outs] == [by_hand(prompt) for prompt in PROMPTS]
    assert sum(sum(out.stats.num_accepted) for out in outs) > 6
    drawn: dict[str, Any] = {"temperature": 0.8, "seed": [1, 2, 3], "stop_token_ids": []}
    got, want = (s.generate(PROMPTS, COUNT, **drawn) for s in (spec, plain))
    assert [out.token_ids for out in got] == [out.token_ids for out in want]
    assert sum(sum(out.stats.num_accepted) for out in got) > 3
    if options == "tree, auto":
        how = "chosen once" if where == "device" else "chosen in every round"
        assert outs[0].stats.backends["tree"].endswith(how)


def test_what_the_package_has_is_what_it_says() -> None:
    model = TINY["qwen3"]()
    target, drafter = Target(model, (0, 2)), build_drafter(2)
    for value, protocol in (
        (target, ModelTarget),
        (OwnTarget(target), RowTarget),
        (drafter, ModuleDrafter),
        (drafter, ChoosesOps),
        (PlainTarget(), TargetLike),
        (PlainTarget(), RowTarget),
        (PlainDrafter(), RowDrafter),
        (OneSequence(), TargetLike),
        (FakeTarget(lambda position, token: torch.zeros(97)), TargetLike),
        (Scripted([1, 2], 4), DrafterLike),
    ):
        assert missing(value, protocol) == []
    assert not offers(OneSequence(), RowTarget)
    assert not offers(Scripted([1, 2], 4), RowDrafter)
    assert not offers(model, BlockTarget)
    assert not offers(FakeTarget(lambda position, token: torch.zeros(97)), ModelTarget)


def test_subclasses_run_through_their_own_methods() -> None:
    class Louder(Target):
        def verify(self, *args: Any) -> Any:
            return super().verify(*args)

    class Same(Target):
        replaceable = True

    model = TINY["qwen3"]()
    assert (
        Speculator(Louder(model), None).generate([1], 2).stats.backends["target"] == "generic (a target of type Louder)"
    )
    assert "fused layers" in Speculator(Same(model), None).generate([1], 2).stats.backends["target"]
    with pytest.raises(ValueError, match="target_path must be 'generic' or 'auto' with a target of type Louder"):
        Speculator(Louder(model), None, target_path="fused")


def test_what_is_missing_is_named() -> None:
    class Old(PlainDrafter):
        def propose(self, anchors: Any, cache: Any, *, embed: Any, head: Any, block_size: Any) -> Any: ...  # type: ignore[override]

    class Deaf(PlainDrafter):
        append_context = None  # type: ignore[assignment]

    class Half(OneSequence):
        def __getattr__(self, name: str) -> Any:
            if name in ("commit", "max_length"):
                raise AttributeError(name)
            return super().__getattr__(name)

    cases: list[tuple[Any, Any, str]] = [
        (
            PlainTarget(),
            object(),
            "drafter must be .* without config, new_cache, append_context, propose; a folder or hub",
        ),
        (
            PlainTarget(),
            Old(),
            r"drafter must be .* without propose \(got an unexpected keyword argument 'temperature'\)",
        ),
        (PlainTarget(), Deaf(), r"drafter must be .* without append_context \(not a method\)"),
        (Half(), None, "model must be a transformers model or a target, got Half without max_length, commit"),
    ]
    for target, drafter, message in cases:
        with pytest.raises(ValueError, match=message):
            Speculator(target, drafter)


def test_the_old_name_of_a_target_path_is_taken_for_a_release() -> None:
    model = TINY["gpt2"]()
    with pytest.warns(FutureWarning, match="target_path='fast' is now 'fused'") as caught:
        spec = Speculator(model, None, target_path="fast")
    assert caught[0].filename == __file__
    assert spec.generate([1], 2).stats.backends["target"].startswith("the model's own layers (fused ones need")
    with pytest.raises(
        ValueError, match=r"FusedTarget: GPT2LMHeadModel must have layers of the common form, got others"
    ):
        Speculator(model, None, target_path="fused")
    with pytest.raises(ValueError, match="target_path must be one of 'auto', 'fused', 'own', 'generic', got 'swift'"):
        Speculator(model, None, target_path="swift")
    assert (
        Speculator(model, None, target_path="own").generate([1], 2).stats.backends["target"] == "the model's own layers"
    )


def test_refresh_reaches_whatever_keeps_copies() -> None:
    class Keeping(PlainDrafter):
        asked = 0

        def refresh(self) -> None:
            self.asked += 1

    drafter = Keeping()
    spec = Speculator(PlainTarget(), drafter, target_path="own")
    spec.generate([1, 2], 3)
    assert len(spec.loop.free) == 1  # type: ignore[attr-defined]
    spec.refresh()
    assert drafter.asked == 1
    assert spec.loop.free == []  # type: ignore[attr-defined]
    assert len(spec.generate([1, 2], 3, stop_token_ids=[]).token_ids) == 3
