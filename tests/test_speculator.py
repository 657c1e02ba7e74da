"""The loop is lossless: text, counts and seeds under any drafter, block size, limit and backend."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import tiny_models
import torch
from fakes import FakeTarget, scripted
from pairs import MASK, VOCAB, Scripted, build_drafter, unbounded
from tiny_models import TINY

from pydflash import Drafter, Speculator, Target
from pydflash.target.defaults import GenerationDefaults

TAPS = (0, 2)  # what the drafters of `pairs` listen to
PROMPT = [3, 1, 4]
# By heart: no token twice in the first 60, the drafters' mask token among them.
TEXT = [*PROMPT, 50, MASK, *[t for t in range(5, 90) if t != 50]]


@functools.cache
def model_of(name: str) -> Any:
    try:
        return TINY[name](**({"num_hidden_layers": 3} if name in ("qwen3", "llama") else {}))
    except tiny_models.MissingFamily as missing:
        pytest.skip(str(missing))


@functools.cache
def target_of(name: str) -> Target:
    try:
        return Target(model_of(name), TAPS)
    except ValueError as refused:
        pytest.skip(str(refused))


@functools.cache
def own_text(name: str, length: int, count: int = 14) -> list[int]:
    """Prompt and greedy continuation by the model's own generate."""
    ids = torch.randint(0, VOCAB, (1, length), generator=torch.Generator().manual_seed(length))
    mask = torch.ones_like(ids)
    return model_of(name).generate(ids, attention_mask=mask, max_new_tokens=count, do_sample=False)[0].tolist()


def drafter_for(target: Target, version: int, **changes: Any) -> Drafter:
    return build_drafter(version, num_target_layers=target.num_layers, **changes)


@pytest.mark.grid(5)
@pytest.mark.parametrize("block_size", [1, 2, 3, 8])
@pytest.mark.parametrize("kind", ["perfect", "wrong", 1, 2])
@pytest.mark.parametrize("name", ["qwen3", "gemma3", "qwen3_next"])
def test_greedy_is_the_models_own_text(name: str, kind: Any, block_size: int) -> None:
    target = target_of(name)
    for length in (1, 9):
        text = own_text(name, length)
        if kind in (1, 2):
            drafter: Any = drafter_for(target, kind, block_size=8)
        else:
            drafter = Scripted(text, 8, wrong=kind == "wrong")
        out = Speculator(target, drafter, block_size=block_size).generate(text[:length], 14)
        assert out.token_ids == text[length:]
        assert out.finish_reason == "length"
        if kind == "perfect":
            assert set(out.stats.num_accepted[:-1]) <= {block_size - 1}
        if kind == "wrong":
            assert set(out.stats.num_accepted) == {0}


def test_plain_decoding_is_the_models_own_text() -> None:
    for name in ("llama", "qwen3", "gemma3"):
        text = own_text(name, 9)
        out = Speculator(model_of(name), None).generate(text[:9], 14)
        assert out.token_ids == text[9:]
        assert out.stats.num_accepted == [0] * 13
        assert out.stats.num_drafted == [0] * 13


@pytest.mark.parametrize("block_size", [2, 3, 8])
def test_perfect_drafts_give_a_block_a_round(block_size: int) -> None:
    target = FakeTarget(scripted(TEXT), TAPS)
    spec = Speculator(target, Scripted(TEXT, block_size))
    out = spec.generate(PROMPT, 1 + 6 * block_size)
    assert out.token_ids == TEXT[3 : 4 + 6 * block_size]
    assert out.stats.num_accepted == [block_size - 1] * 6
    assert out.stats.acceptance_length == block_size


@pytest.mark.parametrize("count", [0, 1, 2, 7, 8, 9, 10, 16, 17])
@pytest.mark.parametrize("wrong", [False, True])
def test_max_new_tokens_is_exact(count: int, wrong: bool) -> None:
    target = FakeTarget(scripted(TEXT), TAPS)
    out = Speculator(target, Scripted(TEXT, 8, wrong=wrong)).generate(PROMPT, count)
    assert out.token_ids == TEXT[3 : 3 + count]
    assert out.finish_reason == "length"
    if count:
        assert sum(n + 1 for n in out.stats.num_accepted) + 1 == count
    else:
        assert target.caches == []  # nothing was run


# --- limits ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["perfect", "wrong", 1, None])
@pytest.mark.parametrize("length", [50, 59, 60, 63])
def test_context_limit(kind: Any, length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model of 64 positions, block 8: the text fills the context, and no row runs at position 64 or later."""
    text = [(7 * i) % 90 for i in range(80)]
    target = FakeTarget(scripted(text), () if kind is None else TAPS, max_length=64)
    if kind is None:
        drafter: Any = None
    elif kind == 1:
        drafter = build_drafter(1, block_size=8)
    else:
        drafter = Scripted(text, 8, wrong=kind == "wrong")
    for count in (None, 1000, 64 - length):
        out = Speculator(target, drafter).generate(text[:length], count)
        assert out.token_ids == text[length:64]
        assert out.finish_reason == "length"
        assert max(position for position, _ in target.caches[-1].rows) < 64


def test_context_limit_of_a_real_model(monkeypatch: pytest.MonkeyPatch) -> None:
    model = TINY["llama"](num_hidden_layers=3, max_position_embeddings=64)
    ids = torch.arange(60)[None]
    text = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=False)[0].tolist()
    assert Speculator(model, Scripted(text, 8)).generate(ids[0], None).token_ids == text[60:]
    spec = Speculator(model, Scripted(text, 8), target_path="generic")
    ends: list[int] = []
    forward = model.forward

    @functools.wraps(forward)
    def spy(*args: Any, **kwargs: Any) -> Any:
        ends.append(int(kwargs["position_ids"].max()))
        return forward(*args, **kwargs)

    monkeypatch.setattr(model, "forward", spy)
    out = spec.generate(ids[0], None)
    assert out.token_ids == text[60:]
    assert max(ends) == 62  # the last token is never run
    assert spec.generate(torch.arange(64), 5).token_ids == []
    with pytest.raises(ValueError, match=r"prompt: must fit the target's 64 positions, got 65"):
        spec.generate(torch.arange(65), 5)


@pytest.mark.parametrize("wrong", [False, True])
@pytest.mark.parametrize("at", range(11))
def test_stop_id_at_every_slot(at: int, wrong: bool) -> None:
    """As the first token, in every slot of a block of 4, and as the bonus after it."""
    target = FakeTarget(scripted(TEXT), TAPS)
    spec = Speculator(target, Scripted(TEXT, 4, wrong=wrong))
    out = spec.generate(PROMPT, 40, stop_token_ids=[TEXT[3 + at], 2])
    assert out.token_ids == TEXT[3 : 4 + at]
    assert out.finish_reason == "stop"
    assert sum(n + 1 for n in out.stats.num_accepted) == at


def test_stop_ids_in_the_prompt_or_in_rejected_drafts_do_not_stop() -> None:
    drafts = list(TEXT)
    drafts[5:30] = [2] * 25
    out = Speculator(FakeTarget(scripted(TEXT), TAPS), Scripted(drafts, 4)).generate(PROMPT, 20, stop_token_ids=[1, 2])
    assert out.token_ids == TEXT[3:23]
    assert out.finish_reason == "length"


def test_stop_ids_come_from_the_generation_config_unless_given() -> None:
    from transformers import GenerationConfig

    for eos, expected in ((TEXT[7], 5), ([TEXT[20], TEXT[5]], 3), (None, 30)):
        target = FakeTarget(scripted(TEXT), TAPS, generation_config=GenerationConfig(eos_token_id=eos))
        spec = Speculator(target, Scripted(TEXT, 4))
        assert len(spec.generate(PROMPT, 30).token_ids) == expected
        assert len(spec.generate(PROMPT, 30, stop_token_ids=[]).token_ids) == 30
        assert len(spec.generate(PROMPT, 30, stop_token_ids=[TEXT[4]]).token_ids) == 2


def test_stop_ids_fall_back_to_the_tokenizer() -> None:
    class Ending:
        eos_token_id = TEXT[6]

        def decode(self, ids: list[int], **_: Any) -> str:
            return "".join(map(chr, ids))

    assert GenerationDefaults(None).stop_token_ids == []
    out = Speculator(FakeTarget(scripted(TEXT)), None, Ending()).generate(PROMPT, 30)
    assert out.token_ids == TEXT[3:7]


@pytest.mark.parametrize("version", [1, 2])
def test_the_mask_token_is_a_token_like_others(version: int) -> None:
    """The target may say the drafter's mask token: it is kept, and serves as an anchor."""
    text = [*PROMPT, MASK, MASK, 5, MASK, 7, 8, MASK, *range(10, 40)]
    spec = Speculator(FakeTarget(scripted(text), TAPS), build_drafter(version))
    assert spec.generate(PROMPT, 20).token_ids == text[3:23]


# --- the drafter's context ------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [1, 2])
def test_drafter_knows_exactly_the_committed_positions(version: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each round's drafts are those of a fresh drafter that is fed the accepted text and nothing else."""
    target = target_of("qwen3")
    text = own_text("qwen3", 9, 40)
    drafter = drafter_for(target, version, block_size=6)
    propose = drafter.propose
    rounds: list[tuple[int, list[int]]] = []

    def guided(anchors: torch.Tensor, cache: Any, **options: Any) -> Any:
        """Right drafts for a changing number of slots, so that rounds of every length occur."""
        own = propose(anchors, cache, **options)
        at = int(cache.lengths)
        rounds.append((at, own.tokens[0].tolist()))
        right = len(rounds) % 6
        drafts = [*text[at + 1 : at + 1 + right], *own.tokens[0, right:].tolist()]
        return own._replace(tokens=torch.tensor([drafts[:5]]))

    monkeypatch.setattr(drafter, "propose", guided)
    out = Speculator(target, drafter).generate(text[:9], 30)
    assert out.token_ids == text[9:39]
    assert set(out.stats.num_accepted[:-1]) == set(range(6))
    starts = 9
    for (at, drafts), accepted in zip(rounds, out.stats.num_accepted, strict=True):
        assert at == starts
        features = target.prefill(torch.tensor([text[:at]]), target.new_cache(1, at)).features
        fresh = drafter.new_cache(1, at)
        with torch.inference_mode():
            drafter.append_context(features, fresh)
            again = propose(torch.tensor([text[at]]), fresh, embed=target.embed_weight, head=target.head)
        assert again.tokens[0].tolist() == drafts
        starts += accepted + 1


def test_windowed_drafter_keeps_a_ring_through_the_loop() -> None:
    """A window far shorter than the text: drafts equal those of a drafter that keeps everything."""
    target = FakeTarget(scripted(TEXT), TAPS)
    changes = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 5}
    drafter = build_drafter(2, block_size=4, **changes)
    whole = build_drafter(2, block_size=4, **changes)
    assert drafter.new_cache(1, 100).rows == 4
    whole.new_cache = lambda batch, capacity: unbounded(whole, batch, capacity)
    out, same = (Speculator(target, d).generate(PROMPT, 40, return_proposals=True) for d in (drafter, whole))
    assert out.token_ids == same.token_ids == TEXT[3:43]
    assert out.stats.proposals == same.stats.proposals


# --- many prompts, backends -----------------------------------------------------------------------------------


@pytest.mark.parametrize("block_size", [2, 3, 16])
@pytest.mark.parametrize("options", [{}, {"temperature": 1.0, "seed": [5, 6, 7]}], ids=["greedy", "sampled"])
def test_a_list_of_prompts_is_each_prompt_alone(options: dict[str, Any], block_size: int) -> None:
    torch.manual_seed(0)
    target = FakeTarget(lambda position, token: LOGITS[token], TAPS)
    spec = Speculator(target, build_drafter(2, block_size=block_size))
    prompts = [[5], [3, 1, 4, 1, 5], [9, 2]]
    many = spec.generate(prompts, 12, **options)
    for i, prompt in enumerate(prompts):
        alone = dict(options, seed=5 + i) if options else {}
        assert many[i].token_ids == spec.generate(prompt, 12, **alone).token_ids
    one = spec.generate([prompts[1]], 12, **(dict(options, seed=[6]) if options else {}))
    assert isinstance(one, list)
    assert one[0].token_ids == many[1].token_ids


LOGITS = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(1)) * 3


@pytest.mark.parametrize("version", [1, 2])
def test_native_and_reference_ops_give_the_same_tokens(version: int) -> None:
    target = target_of("qwen3")
    drafter = drafter_for(target, version)
    for options in ({}, {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "seed": 3}):
        outs = []
        for backend in ("native", "reference"):
            spec = Speculator(target, drafter, backend=backend)
            outs.append(spec.generate([1, 2, 3], 20, return_proposals=True, **options))
            assert spec.loop.parts.ops.__name__.endswith("ops" if backend == "native" else "reference")
            assert (spec.drafter.backend, drafter.backend) == (backend, "native")
        assert outs[0].token_ids == outs[1].token_ids
        assert outs[0].stats.proposals == outs[1].stats.proposals
        assert outs[0].stats.backends["ops"].startswith("cpu")
        assert outs[1].stats.backends["ops"] == "reference (plain torch)"


def test_bfloat16_text_is_within_the_margin() -> None:
    """Half precision: the emitted token is the best one but for rounding, checked in one forward of the whole text."""
    import copy

    model = copy.deepcopy(model_of("qwen3")).bfloat16()
    drafter = drafter_for(target_of("qwen3"), 1).bfloat16()
    prompt = [3, 1, 4, 1, 5]
    tokens = Speculator(model, drafter).generate(prompt, 40).token_ids

    def worst(text: list[int]) -> float:
        with torch.no_grad():
            logits = model(torch.tensor([prompt + text])).logits[0, len(prompt) - 1 : -1].float()
        best = logits.amax(-1)
        ulp = 2.0 ** (best.abs().log2().floor() - 7)
        allowed = (2 * ulp).clamp_min(0.25)
        return float((best - logits[torch.arange(len(text)), torch.tensor(text)] - allowed).max())

    assert worst(tokens) <= 0
    assert worst([*tokens[:20], (tokens[20] + 1) % VOCAB, *tokens[21:]]) > 0
