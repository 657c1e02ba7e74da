"""Streams: the pieces are the whole, stop strings and half characters included; streams do not disturb each other."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
import torch
from fakes import FakeTarget, byte_tokenizer, markov, scripted
from pairs import Scripted, build_drafter
from tiny_models import TINY

from pydflash import Speculator

TAPS = (0, 2)
STORY = "Ein Bär saß im Café — 😀 und las. The end. Never said."
PROMPT = "?"


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return byte_tokenizer()


def story_teller(tokenizer: Any, drafter: str | int | None, block_size: int = 4) -> Speculator:
    """A Speculator that tells STORY byte by byte, with perfect, wrong, untrained or no drafts."""
    text = [*PROMPT.encode(), *STORY.encode(), *[256] * 20]
    if drafter is None:
        return Speculator(FakeTarget(scripted(text, 257), vocab_size=257), None, tokenizer)
    target = FakeTarget(scripted(text, 257), TAPS, vocab_size=257)
    if isinstance(drafter, int):
        return Speculator(target, build_drafter(drafter, vocab_size=257, block_size=block_size), tokenizer)
    return Speculator(target, Scripted(text, block_size, 257, wrong=drafter == "wrong"), tokenizer)


@pytest.mark.grid(3)
@pytest.mark.parametrize("drafter", ["perfect", "wrong", 1, 2, None])
@pytest.mark.parametrize("stop", [None, "Café", "ü", "saß i", "The end.", "😀", ["las", "Caf"], "."])
def test_streaming_is_the_whole_text(drafter: Any, stop: Any, tokenizer: Any) -> None:
    stops = [stop] if isinstance(stop, str) else stop or []
    ends = [STORY.index(s) + len(s) for s in stops if s in STORY]
    expected = STORY[: min(ends)] if ends else STORY
    for block_size in (2, 4, 7) if isinstance(drafter, str) else (4,):
        spec = story_teller(tokenizer, drafter, block_size)
        out = spec.generate(PROMPT, 100, stop_strings=stop)
        stream = spec.stream(PROMPT, 100, stop_strings=stop)
        chunks = list(stream)
        assert "".join(chunk.text for chunk in chunks) == out.text == stream.output.text == expected
        ids = list(expected.encode()) + ([] if ends else [256])
        assert [t for chunk in chunks for t in chunk.token_ids] == out.token_ids == stream.output.token_ids == ids
        assert out.finish_reason == stream.output.finish_reason == "stop"
        assert all(chunk.token_ids for chunk in chunks)
        assert not any("�" in chunk.text for chunk in chunks)
        assert sum(n + 1 for n in out.stats.num_accepted) + 1 == len(ids)
        if drafter == "perfect":
            assert max(len(chunk.token_ids) for chunk in chunks) == block_size


def test_stop_string_inside_a_block_and_across_its_border(tokenizer: Any) -> None:
    """Blocks of 4: the prefill gives "E", then come "in B", "\\xc3\\xa4r ", ...; text, ids and counts end together."""
    spec = story_teller(tokenizer, "perfect", 4)
    for stop, expected in (("n", "Ein"), ("n B", "Ein B"), (" Bä", "Ein Bä"), ("är s", "Ein Bär s")):
        out = spec.generate(PROMPT, 100, stop_strings=stop)
        assert out.text == expected
        assert out.token_ids == list(expected.encode())
        assert out.finish_reason == "stop"


def test_stop_strings_of_the_generation_config(tokenizer: Any) -> None:
    from transformers import GenerationConfig

    text = [*PROMPT.encode(), *STORY.encode()]
    config = GenerationConfig(stop_strings=["saß"])
    spec = Speculator(FakeTarget(scripted(text, 257), vocab_size=257, generation_config=config), None, tokenizer)
    assert spec.generate(PROMPT, 40).text == "Ein Bär saß"
    assert spec.generate(PROMPT, 40, stop_strings=["Bär"]).text == "Ein Bär"
    assert len(spec.generate(PROMPT, 40, stop_strings=[]).token_ids) == 40


def test_half_a_character_waits_for_its_other_half(tokenizer: Any) -> None:
    chunks = list(story_teller(tokenizer, None).stream(PROMPT, 100))
    assert [chunk.text for chunk in chunks[:8]] == ["E", "i", "n", " ", "B", "", "ä", "r"]
    # Cut inside a character by the limit: what there is of it comes out at the end.
    out = story_teller(tokenizer, None).generate(PROMPT, 6)
    assert out.text == "Ein B�"
    assert out.token_ids == list(STORY.encode()[:6])


def test_a_chunk_per_round_and_output_on_the_way(tokenizer: Any) -> None:
    spec = story_teller(tokenizer, "perfect", 4)
    stream = spec.stream(PROMPT, 10)
    assert stream.output.token_ids == []
    sizes = []
    for chunk in stream:
        sizes.append(len(chunk.token_ids))
        assert stream.output.token_ids == list(STORY.encode())[: sum(sizes)]
        assert stream.output.stats.rounds == len(sizes) - 1
    assert sizes == [1, 4, 4, 1]
    assert next(stream, None) is None
    assert list(spec.stream(PROMPT, 0)) == []


def test_an_abandoned_stream_disturbs_nobody() -> None:
    model = TINY["qwen3"](num_hidden_layers=3)
    spec = Speculator(model, build_drafter(2, num_target_layers=3))
    options: dict[str, Any] = {"temperature": 1.0, "seed": 3}
    expected = spec.generate([3, 1, 4], 20, **options).token_ids
    for steps in (0, 1, 3):
        stream = spec.stream([5, 6], 50, temperature=0.5, seed=1)
        for _ in range(steps):
            next(stream)
        if steps == 3:
            del stream
        assert spec.generate([3, 1, 4], 20, **options).token_ids == expected
    assert not any(module._forward_hooks for module in model.modules())


def test_a_cancelled_task_ends_its_stream_behind_the_round_that_runs() -> None:
    """As cancelled, not by an error about the generator that a thread is still in; then nothing is held."""
    spec = Speculator(TINY["qwen3"](), None)
    began, go_on = threading.Event(), threading.Event()

    def wait(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        began.set()
        assert go_on.wait(10)
        return scores

    stream = spec.stream([1, 2, 3], 9, temperature=0.0, logits_processor=wait)

    async def read() -> None:
        async for _ in stream:
            pass

    async def cancel() -> None:
        task = asyncio.create_task(read())
        await asyncio.to_thread(began.wait, 10)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        go_on.set()

    asyncio.run(cancel())
    assert list(stream) == []
    assert len(spec.generate([1, 2, 3], 4, temperature=0.0).token_ids) == 4


def test_two_streams_take_turns() -> None:
    table = torch.randn(97, 97, generator=torch.Generator().manual_seed(0)) * 3
    spec = Speculator(FakeTarget(markov(table), TAPS), build_drafter(2))
    requests: list[tuple[list[int], dict[str, Any]]] = [
        ([3, 1], {"temperature": 0.9, "seed": 1}),
        ([7, 7, 2], {"temperature": 1.1, "seed": 2}),
        ([7, 7, 2, 4], {}),
    ]
    alone = [spec.generate(prompt, 15 + i, **options).token_ids for i, (prompt, options) in enumerate(requests)]
    streams = [spec.stream(prompt, 15 + i, **options) for i, (prompt, options) in enumerate(requests)]
    pending = list(streams)
    while pending:
        pending = [stream for stream in pending if next(stream, None) is not None]
    assert [stream.output.token_ids for stream in streams] == alone


def test_requests_that_share_a_prefix_do_not_share_state() -> None:
    """Prompts with one beginning and different tails, then the first again: as in a fresh Speculator."""
    model = TINY["qwen3"](num_hidden_layers=3)
    prompts = [[3, 1, 4, 1, 5], [3, 1, 4, 9], [3, 1, 4, 1, 5]]
    shared = Speculator(model, build_drafter(1, num_target_layers=3))
    for prompt in prompts:
        fresh = Speculator(model, build_drafter(1, num_target_layers=3))
        one, two = (s.generate(prompt, 10, return_proposals=True) for s in (shared, fresh))
        assert one.token_ids == two.token_ids
        assert one.stats.proposals == two.stats.proposals


def test_a_failure_leaves_the_model_as_it_was() -> None:
    model = TINY["llama"](num_hidden_layers=3)
    spec = Speculator(model, build_drafter(1, num_target_layers=3))
    expected = spec.generate([3, 1, 4], 8).token_ids
    calls = 0

    def failing(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise KeyError("from the processor")
        return scores

    stream = spec.stream([3, 1, 4], 8, logits_processor=[failing])
    with pytest.raises(KeyError, match="from the processor"):
        list(stream)
    assert next(stream, None) is None
    broken = model.model.layers[1].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        spec.generate([3, 1, 4], 8)
    broken.remove()
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert not torch.is_inference_mode_enabled()
    assert spec.generate([3, 1, 4], 8).token_ids == expected


def test_close_ends_the_speculator_and_leaves_the_model() -> None:
    model = TINY["llama"](num_hidden_layers=3)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    with Speculator(model, build_drafter(1, num_target_layers=3)) as spec:
        expected = spec.generate([3, 1, 4], 8).token_ids
        running = spec.stream([3, 1, 4], 8)
        next(running)
    for call in (lambda: spec.generate([3, 1, 4], 8), lambda: list(running)):
        with pytest.raises(ValueError, match=r"target must be open, got one after close\(\)"):
            call()
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())
    assert not any(module._forward_hooks for module in model.modules())
    assert Speculator(model, None).generate([3, 1, 4], 8).token_ids == expected


def test_a_stream_is_for_one_prompt() -> None:
    spec = Speculator(FakeTarget(scripted([1])), None)
    with pytest.raises(ValueError, match="stream: prompt must be a single one, got a list of 2"):
        spec.stream([[1], [2]])
    with pytest.raises(ValueError, match="max_new_tokens"):
        spec.stream([1], -3)  # at the call, not at the first chunk


def test_modes_of_the_caller_are_kept() -> None:
    """Gradient and inference mode are the caller's between the chunks, and a stream may change between them."""
    spec = Speculator(TINY["llama"](num_hidden_layers=3), build_drafter(2, num_target_layers=3))
    expected = spec.generate([3, 1, 4], 12).token_ids
    stream = spec.stream([3, 1, 4], 12)
    with torch.inference_mode():
        next(stream)
        assert torch.is_inference_mode_enabled()
    assert torch.is_grad_enabled()
    for _ in stream:
        assert torch.is_grad_enabled()
        assert not torch.is_inference_mode_enabled()
    assert stream.output.token_ids == expected
    with torch.inference_mode():
        started = spec.stream([3, 1, 4], 12)
    assert [t for chunk in started for t in chunk.token_ids] == expected
