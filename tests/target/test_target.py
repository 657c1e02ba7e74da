"""The generic target: its own greedy text under any drafter, its features, and what it refuses."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from greedy_texts import EXACT_RECURRENT, NEW_TOKENS, RECURRENT, chain, greedy, model_of, prompt_of, target_of
from grids import slow
from tiny_models import LAYERS, TINY, VOCAB
from torch import nn

from pydflash import Speculator
from pydflash.target.generic import Target

transformers = pytest.importorskip("transformers")

BLOCK = 5
SLIDING = ("mistral", "gemma3", "gpt_oss", "llama4")

Drafter = Callable[[list[int], int], list[int]]


def perfect(text: list[int], at: int) -> list[int]:
    return text[at : at + BLOCK - 1]


def always_wrong(text: list[int], at: int) -> list[int]:
    return [(token + 1) % VOCAB for token in text[at : at + BLOCK - 1]]


def at_random(text: list[int], at: int) -> list[int]:
    draw = random.Random(1000 * text[0] + at)
    right = draw.randrange(BLOCK)
    return perfect(text, at)[:right] + [draw.randrange(VOCAB) for _ in range(BLOCK - 1 - right)]


def no_drafts(text: list[int], at: int) -> list[int]:
    return []


def decode(
    target: Target, ids: torch.Tensor, draft: Drafter, text: list[int], capacity: int = 64
) -> tuple[list[int], list[int]]:
    """The speculative loop by hand. Returns the tokens and the number of drafts accepted in each round."""
    cache = target.new_cache(1, capacity)
    new = [int(target.prefill(ids, cache).logits[0, -1].argmax())]
    accepted = []
    while len(new) < len(text):
        block = [new[-1], *draft(text, len(new))]
        best = target.verify(torch.tensor([block]), cache).logits[0].argmax(-1).tolist()
        count = 0
        while count < len(block) - 1 and block[count + 1] == best[count]:
            count += 1
        target.commit(cache, *chain(count + 1, len(block)))
        new += [*block[1 : count + 1], best[count]]
        accepted.append(count)
    assert cache.length == ids.shape[1] + len(new) - 1
    return new[: len(text)], accepted


def check_loop(name: str, attention: str | None, length: int, drafters: Sequence[Drafter]) -> None:
    target = target_of(name, attention)
    text = greedy(name, attention, length)
    for draft in drafters:
        got, accepted = decode(target, prompt_of(length), draft, text)
        assert got == text, draft.__name__
        if draft is always_wrong:
            assert sum(accepted) == 0
        if draft is perfect:
            assert set(accepted[:-1]) == {BLOCK - 1}


@pytest.mark.parametrize("draft", [at_random, *map(slow, (perfect, always_wrong))])
@pytest.mark.parametrize("name", TINY)
def test_greedy_text_under_any_drafter(name: str, draft: Drafter) -> None:
    check_loop(name, None, 8, (draft,))


@pytest.mark.parametrize("name", ["llama", *RECURRENT])
def test_greedy_text_without_drafts(name: str) -> None:
    check_loop(name, None, 8, (no_drafts,))


@pytest.mark.grid(5)
@pytest.mark.parametrize("length", [6, 7, 9])
@pytest.mark.parametrize("name", SLIDING)
def test_greedy_text_across_the_window_edge(name: str, length: int) -> None:
    check_loop(name, None, length, (at_random, always_wrong))


@pytest.mark.parametrize(("name", "length"), [("llama", 8), ("mistral", 6), ("mistral", 9), ("gemma3", 7)])
def test_greedy_text_with_eager_attention(name: str, length: int) -> None:
    check_loop(name, "eager", length, (at_random, always_wrong))


def test_random_drafter_accepts_every_number() -> None:
    seen: set[int] = set()
    for length in (6, 7, 8, 9):
        seen |= set(decode(target_of("llama"), prompt_of(length), at_random, greedy("llama", None, length))[1])
    assert seen == set(range(BLOCK))


@pytest.mark.parametrize("name", TINY)
def test_features_are_hidden_states(name: str) -> None:
    target = target_of(name)
    ids = prompt_of(13)
    with torch.no_grad():
        states = target.model(ids, output_hidden_states=True, use_cache=False).hidden_states
    first = 0 if name == "mamba2" else 1  # Mamba-2 lists the outputs of its layers without the embeddings before them
    expected = torch.cat([states[first + 2], states[first]], -1)
    cache = target.new_cache(1, 13)
    prefill = target.prefill(ids[:, :8], cache)
    block = target.verify(ids[:, 8:], cache)
    assert prefill.logits.shape == (1, 1, VOCAB)
    assert block.logits.shape == (1, 5, VOCAB)
    limit = (1e-4 if name in RECURRENT else 1e-5) * expected.abs().max()
    for got, want in ((prefill.features, expected[:, :8]), (block.features, expected[:, 8:])):
        assert got is not None
        assert got.shape == want.shape
        assert (got - want).abs().max() <= limit


def test_feature_of_the_last_layer_is_not_normed() -> None:
    target = target_of("llama", None, (LAYERS - 1,))
    ids = prompt_of(8)
    features = target.prefill(ids, target.new_cache(1, 8)).features
    with torch.no_grad():
        normed = target.model(ids, output_hidden_states=True).hidden_states[-1]
        again = target.model.model.norm(features)
    torch.testing.assert_close(again, normed, atol=1e-5, rtol=1e-5)
    assert (features - normed).abs().max() > 0.1


def test_same_layer_twice_and_no_layer() -> None:
    ids = prompt_of(8)
    twice = target_of("llama", None, (1, 1))
    features = twice.prefill(ids, twice.new_cache(1, 8)).features
    assert torch.equal(features[..., : twice.hidden_size], features[..., twice.hidden_size :])
    none = target_of("llama", None, ())
    assert none.prefill(ids, none.new_cache(1, 8)).features is None


def test_prefill_makes_one_row_of_logits() -> None:
    target = target_of("llama")
    rows = []
    handle = target.head.register_forward_hook(lambda module, args, output: rows.append(output.shape[1]))
    try:
        target.prefill(prompt_of(30), target.new_cache(1, 30))
    finally:
        handle.remove()
    assert rows == [1]


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3_next"])
def test_prefill_in_pieces(name: str) -> None:
    target = target_of(name)
    ids = prompt_of(20)
    whole = target.prefill(ids, target.new_cache(1, 20))
    cache = target.new_cache(1, 20)
    pieces = [target.prefill(piece, cache) for piece in ids.split([7, 1, 12], 1)]
    assert cache.length == 20
    torch.testing.assert_close(pieces[-1].logits, whole.logits, atol=1e-3, rtol=1e-4)
    features = torch.cat([piece.features for piece in pieces], 1)
    torch.testing.assert_close(features, whole.features, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("name", ["gemma3", "qwen3_next"])
def test_one_target_serves_request_after_request(name: str) -> None:
    target = target_of(name)
    for length in (9, 6, 9):
        text = greedy(name, None, length)
        assert decode(target, prompt_of(length), at_random, text)[0] == text


def test_two_caches_do_not_meet() -> None:
    target = target_of("qwen3_next")
    alone = target.new_cache(1, 20)
    target.prefill(prompt_of(8), alone)
    want = target.verify(prompt_of(4), alone).logits
    first, second = target.new_cache(1, 20), target.new_cache(1, 20)
    target.prefill(prompt_of(8), first)
    target.prefill(prompt_of(9), second)
    target.verify(prompt_of(5), second)
    assert torch.equal(target.verify(prompt_of(4), first).logits, want)


def test_cache_stays_in_place_and_grows_past_its_capacity() -> None:
    target = target_of("mistral")
    text = greedy("mistral", None, 8)
    cache = target.new_cache(1, 64)
    target.prefill(prompt_of(8), cache)
    before = [layer.keys.data_ptr() for layer in cache.model_cache.layers]
    for at in range(10):
        target.verify(torch.tensor([text[at : at + 4]]), cache)
        target.commit(cache, *chain(2, 4))
    assert [layer.keys.data_ptr() for layer in cache.model_cache.layers] == before
    assert decode(target, prompt_of(8), at_random, text, capacity=3)[0] == text


@pytest.mark.parametrize("name", ["llama", "qwen3_next"])
def test_plain_decoding_reads_and_copies_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target = target_of(name)
    cache = target.new_cache(1, 12)
    target.prefill(prompt_of(8), cache)
    monkeypatch.setattr(type(cache), "snapshot", lambda self: pytest.fail("snapshot for a block of one"))
    monkeypatch.setattr(type(cache), "restore", lambda self, snapshot: pytest.fail("restore for a block of one"))
    index, num_accepted = (x.to("meta") for x in chain(1, 1))  # a tensor without data cannot be read
    for length in (9, 10):
        target.verify(prompt_of(1), cache)
        target.commit(cache, index, num_accepted)
        assert cache.length == length


@pytest.mark.parametrize("name", ["qwen3_next", "mamba2"])
def test_rounding_is_not_taken_for_a_lost_state(name: str) -> None:
    target_of(name)
    assert Target(TINY[name]().to(torch.bfloat16), (0,)).dtype == torch.bfloat16


def test_usable_in_and_out_of_inference_mode() -> None:
    target = target_of("llama")
    cache = target.new_cache(1, 16)
    with torch.inference_mode():
        target.prefill(prompt_of(8), cache)
    block = target.verify(prompt_of(3), cache)
    assert block.features is not None
    assert not block.features.is_inference()
    assert not block.logits.requires_grad


def state_of(model: nn.Module) -> list[tuple[set[str], bool, int, int]]:
    return [(set(vars(m)), m.training, len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]


@pytest.mark.parametrize("name", ["llama", "qwen3_next"])
def test_nothing_is_left_on_the_model(name: str) -> None:
    target_of(name)
    model = TINY[name]()
    model.generate(prompt_of(3), max_new_tokens=2, do_sample=False)  # what transformers itself keeps is not ours
    before = state_of(model)
    with Target(model, (0, 3)) as target:
        text = decode(target, prompt_of(8), at_random, greedy(name, None, 8))[0]
        assert text == greedy(name, None, 8)
    assert state_of(model) == before
    with pytest.raises(ValueError, match=r"verify: target must be open"):
        target.verify(prompt_of(3), target.new_cache(1, 8))


@pytest.mark.parametrize("name", ["llama", "qwen3_next"])
def test_failure_inside_a_forward(name: str) -> None:
    target = target_of(name)
    text = greedy(name, None, 8)
    before = state_of(target.model)
    cache = target.new_cache(1, 32)
    target.prefill(prompt_of(8), cache)

    def fail(module: nn.Module, args: Any, output: Any) -> None:
        raise KeyboardInterrupt

    handle = target.layers[2].register_forward_hook(fail)
    with pytest.raises(KeyboardInterrupt):
        target.verify(torch.tensor([text[:4]]), cache)
    handle.remove()
    assert state_of(target.model) == before
    if name == "qwen3_next":
        with pytest.raises(ValueError, match=r"verify: cache must be a fresh one after a forward that failed"):
            target.verify(torch.tensor([text[:4]]), cache)
    else:
        assert target.verify(torch.tensor([text[:4]]), cache).logits[0].argmax(-1).tolist() == text[1:5]


def test_dropout_never_runs_and_training_mode_comes_back() -> None:
    model = TINY["llama"](attention_dropout=0.9)
    text = greedy("llama", None, 8)
    model.train()
    model.model.layers[1].eval()
    before = state_of(model)
    assert decode(Target(model, (1,)), prompt_of(8), at_random, text)[0] == text
    assert state_of(model) == before


def test_no_warning_escapes() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        decode(Target(model_of("gemma3"), (1,)), prompt_of(8), at_random, [1] * 6)


@pytest.mark.parametrize("name", ["llama", "llama_tied", "gemma3_nested", "gpt_neox"])
def test_embedding_and_head_are_the_models_own(name: str) -> None:
    target = target_of(name)
    assert target.embed_weight.data_ptr() == target.model.get_input_embeddings().weight.data_ptr()
    assert target.embed_weight.shape == (VOCAB, target.hidden_size)
    assert target.head is target.model.get_output_embeddings()
    assert (target.head.weight.data_ptr() == target.embed_weight.data_ptr()) == (name == "llama_tied")


def test_attributes() -> None:
    target = target_of("qwen3")
    assert (target.vocab_size, target.hidden_size, target.num_layers, target.max_length) == (97, 64, 4, 512)
    assert (target.layer_ids, target.device.type, target.dtype) == ((2, 0), "cpu", torch.float32)
    assert target.generation_config is target.model.generation_config


def test_longrope_block_across_the_switch() -> None:
    rope = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [3.0] * 8, "factor": 4.0}
    rope = {**rope, "rope_theta": 10000.0, "original_max_position_embeddings": 20}
    field = "rope_parameters" if EXACT_RECURRENT else "rope_scaling"
    model = TINY["llama"](original_max_position_embeddings=20, **{field: rope})
    ids = prompt_of(8)
    text = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=False)
    text = text[0, 8:].tolist()
    assert text != greedy("llama", None, 8)
    for draft in (perfect, always_wrong, at_random):
        assert decode(Target(model, (1,)), ids, draft, text)[0] == text


def test_yarn_reaches_beyond_the_length_before() -> None:
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 10000.0}
    model = TINY["qwen3"](max_position_embeddings=40, rope_parameters=rope)
    target = Target(model)
    assert target.max_length == 128
    ids = torch.arange(1, 60)[None]
    want = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=10, do_sample=False, pad_token_id=0)
    for path in ("generic", "fused"):
        out = Speculator(target, None, target_path=path).generate(ids[0], 10, temperature=0.0, stop_token_ids=[])
        assert out.token_ids == want[0, 59:].tolist()
