"""Hybrids of Gated DeltaNet and attention in the fused path: texts, states, batches, trees, and what is refused."""

from __future__ import annotations

import functools
import random
from typing import Any

import pytest
import torch
from device_pairs import Knowing
from greedy_texts import EXACT_RECURRENT, prompt_of
from matching import assert_matches
from pairs import build_drafter
from tiny_models import LAYERS, LINEAR_MIX, TINY, VOCAB
from tree_cases import random_parents

from pydflash import Speculator, Target
from pydflash.decoder.delta import GatedDelta
from pydflash.decoder.delta_store import DeltaStore
from pydflash.protocols import Proposal
from pydflash.target.fused import FusedTarget
from pydflash.target.modules import UnknownForm
from pydflash.tree import tree_of

pytestmark = pytest.mark.skipif(not EXACT_RECURRENT, reason="states that cannot be continued in this transformers")

SHAPES: dict[str, dict[str, Any]] = {
    "grouped": {},
    "equal heads": {"linear_num_value_heads": 2},
    "wide": {"linear_key_head_dim": 32, "linear_value_head_dim": 48, "head_dim": 32},
    "two taps": {"linear_conv_kernel_dim": 2},
    "recurrent first and last": {"layer_types": [LINEAR_MIX[0], *LINEAR_MIX[:2], LINEAR_MIX[0]]},
}
FORMS: dict[str, dict[str, Any]] = {
    "walk": {},
    "tree": {"path": "tree", "num_nodes": 11},
    "device": {"target_path": "fused"},
    "device tree": {"target_path": "fused", "path": "tree", "num_nodes": 9},
}


@functools.cache
def model_of(shape: str) -> Any:
    return TINY["qwen3_5"](**SHAPES[shape])


@functools.cache
def text_of(shape: str, length: int, count: int) -> list[int]:
    ids = prompt_of(length)
    out = model_of(shape).generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False)
    return out[0, length:].tolist()


def fused(shape: str = "grouped", layer_ids: tuple[int, ...] = ()) -> FusedTarget:
    return FusedTarget(Target(model_of(shape), layer_ids))


class Bushy(Knowing):
    """Has other candidates beside each token that it knows, so that trees branch."""

    def propose(self, anchors: torch.Tensor, cache: Any, *, block_size: int, **options: Any) -> Proposal:  # type: ignore[override]
        known = super().propose(anchors, cache, block_size=block_size).tokens
        choices = torch.arange(self.config.num_candidates)
        candidates, scores = (known[..., None] + choices) % VOCAB, -choices.float().expand(*known.shape, -1)
        return Proposal(known, candidates, None, scores, torch.full(known.shape, 1.0))


def knowing(shape: str, lengths: list[int], count: int) -> Bushy:
    """A drafter that has the texts behind these prompts by heart, wrong now and then."""
    drafter = Bushy(build_drafter(1, num_target_layers=LAYERS, block_size=5).config).eval()
    for row, length in enumerate(lengths):
        text = [*prompt_of(length)[0].tolist(), *text_of(shape, length, count)]
        drafter.texts[row, : len(text)] = torch.tensor(text)
    return drafter


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", SHAPES)
def test_texts_are_the_models_own(shape: str, form: str) -> None:
    """Under drafts that are mostly right, from prompts of one token on, alone and together."""
    lengths = [1, 2, 7, 70]
    for length in lengths:
        spec = Speculator(model_of(shape), knowing(shape, [length], 30), **FORMS[form])
        assert "fused layers" in spec.generate(prompt_of(length)[0], 1).stats.backends["target"]
        out = spec.generate(prompt_of(length)[0], 30)
        assert out.token_ids == text_of(shape, length, 30)
        if "tree" not in form:
            assert out.stats.acceptance_length > 2.5
    spec = Speculator(model_of(shape), knowing(shape, lengths, 30), **FORMS[form])
    outs = spec.generate([prompt_of(length)[0] for length in lengths], 30)
    assert [out.token_ids for out in outs] == [text_of(shape, length, 30) for length in lengths]


def test_three_hundred_tokens() -> None:
    """A state that drifts shows late."""
    spec = Speculator(model_of("grouped"), knowing("grouped", [9], 300))
    assert spec.generate(prompt_of(9)[0], 300).token_ids == text_of("grouped", 9, 300)


def test_seeds_give_the_text_of_plain_decoding() -> None:
    plain = Speculator(model_of("grouped"), None)
    for form in FORMS.values():
        spec = Speculator(model_of("grouped"), knowing("grouped", [5], 40), **form)
        for seed in range(3):
            options = {"max_new_tokens": 40, "temperature": 0.8, "top_p": 0.9, "seed": seed}
            assert (
                spec.generate(prompt_of(5)[0], **options).token_ids
                == plain.generate(prompt_of(5)[0], **options).token_ids
            )


def states_of(target: FusedTarget, cache: Any) -> list[torch.Tensor]:
    """States and tails of all rows, with no commit waiting."""
    cache.settle()
    stores = [store for store in cache.stores if isinstance(store, DeltaStore)]
    assert stores
    return [x.clone() for store in stores for x in (store.state, store.tail)]


@pytest.mark.parametrize("path", ["chain", "tree"])
def test_states_after_rounds_are_those_of_plain_decoding(path: str) -> None:
    """Two ragged rows, rounds that keep any part of a block, and blocks that are thrown away between them.

    To the last bit: the kernels of a CPU go slot by slot.
    """
    draw, target = random.Random(0), fused("wide")
    texts = [torch.randint(0, VOCAB, (1, 120), generator=torch.Generator().manual_seed(row)) for row in range(2)]
    starts, cache = (3, 20), target.new_cache(2, 160)
    for row, start in enumerate(starts):
        target.prefill(texts[row][:, :start], cache, row)
    at = list(starts)
    while max(at) < 110:
        slots = draw.randrange(1, 9)
        parents = random_parents(draw, slots - 1) if path == "tree" else list(range(-1, slots - 1))
        ends = [draw.randrange(slots) for _ in range(2)]
        tokens = torch.randint(0, VOCAB, (2, slots))
        index = torch.full((2, slots), -1, dtype=torch.int32)
        for row, end in enumerate(ends):
            kept = [end]
            while parents[kept[0]] >= 0:
                kept.insert(0, parents[kept[0]])
            tokens[row, kept] = texts[row][0, at[row] : at[row] + len(kept)]
            index[row, : len(kept)] = torch.tensor(kept)
        tree = tree_of([0, *parents[1:]], target.device) if path == "tree" else None
        if draw.random() < 0.3:  # and nothing of it is kept
            target.verify(tokens.flip(1), cache, tree)
            cache.discard()
        target.verify(tokens, cache, tree)
        target.commit(cache, index, (index >= 0).sum(1) - 1)
        at = [place + int(count) for place, count in zip(at, (index >= 0).sum(1), strict=True)]
    got = states_of(target, cache)
    for row, start in enumerate(starts):
        plain = target.new_cache(1, 160)
        target.prefill(texts[row][:, :start], plain)
        for place in range(start, at[row]):
            target.verify(texts[row][:, place : place + 1], plain)
            target.commit(plain, torch.zeros(1, 1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32))
        for x, want in zip(got, states_of(target, plain), strict=True):
            assert torch.equal(x[:, row : row + 1], want)


def test_a_prompt_in_pieces_and_behind_blocks() -> None:
    target = fused()
    ids = prompt_of(40)
    whole, pieces = target.new_cache(1, 64), target.new_cache(1, 64)
    want = target.prefill(ids, whole).logits
    target.prefill(ids[:, :11], pieces)
    target.verify(ids[:, 11:16], pieces)
    index = torch.tensor([[0, 1, 2, -1, -1]], dtype=torch.int32)
    target.commit(pieces, index, torch.tensor([2]))
    got = target.prefill(ids[:, 14:], pieces).logits
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    for x, y in zip(states_of(target, pieces), states_of(target, whole), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)


def test_a_row_begins_anew() -> None:
    """A second request in a row sees nothing of the first, one that still waits for its commit included."""
    target, ids = fused(), prompt_of(12)
    cache = target.new_cache(2, 64)
    for row in range(2):
        target.prefill(prompt_of(9 + row), cache, row)
    target.verify(torch.ones(2, 4, dtype=torch.long), cache)
    target.commit(cache, torch.tensor([[0, 1, 2, 3]] * 2, dtype=torch.int32), torch.tensor([3, 3]))
    cache.lengths[1] = 0
    again = target.prefill(ids, cache, 1).logits
    assert torch.equal(again, target.prefill(ids, target.new_cache(1, 64)).logits)
    other = target.new_cache(1, 64)
    target.prefill(prompt_of(9), other)
    target.verify(torch.ones(1, 4, dtype=torch.long), other)
    target.commit(other, torch.tensor([[0, 1, 2, 3]], dtype=torch.int32), torch.tensor([3]))
    both = target.verify(torch.full((2, 3), 5), cache).logits
    assert torch.equal(both[:1], target.verify(torch.full((1, 3), 5), other).logits)


def test_features_of_layers_of_both_kinds() -> None:
    """Taps behind recurrent layers and behind attention, of a prompt and of blocks."""
    target, ids = fused(layer_ids=(0, 3, 2)), prompt_of(20)
    cache = target.new_cache(1, 64)
    first = target.prefill(ids[:, :13], cache).features
    second = target.verify(ids[:, 13:], cache).features
    want = Target(model_of("grouped"), (0, 3, 2)).encode(ids).features
    assert_matches(torch.cat([first, second], 1), want, 2e-5)


def test_memory_of_a_row_does_not_grow_with_its_length() -> None:
    target = fused()

    def bytes_of(batch: int, capacity: int) -> int:
        return sum(x.nbytes for x in target.new_cache(batch, capacity).stores if isinstance(x, DeltaStore))

    # Two layers: states [4, 16, 16] float32, tails [3, 128], and the count of what waits.
    assert bytes_of(1, 64) == bytes_of(1, 4096) == 2 * (4 * 16 * 16 * 4 + 3 * 128 * 4) + 4
    assert bytes_of(2, 64) == 2 * bytes_of(1, 64)
    assert target.new_cache(1, 4096).nbytes > 2 * 2 * 2 * 4096 * 16 * 4  # keys and values beside them


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("decay", "mixing in layer 0, off by"),
        ("conv", "mixing in layer 0, off by"),
        ("gate", "attention .*in layer 1"),
        ("heads", "multiples of 16 up to 256"),
    ],
)
def test_what_computes_otherwise_is_refused(change: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trial compares each module with the model's own, so a layer that only looks alike is found."""
    model = TINY["qwen3_5"](**({"linear_key_head_dim": 8} if change == "heads" else {}))
    layers = model.model.layers
    if change == "decay":  # the norm of q and k is left out
        module = __import__(type(layers[0].linear_attn).__module__, fromlist=["l2norm"])
        monkeypatch.setattr(module, "l2norm", lambda x, **_: x)
    if change == "conv":
        layers[0].linear_attn.activation = "relu"
    if change == "gate":
        inner = layers[1].self_attn.forward
        layers[1].self_attn.forward = lambda **inputs: (lambda out: (1.1 * out[0], *out[1:]))(inner(**inputs))
    with pytest.raises((UnknownForm, ValueError), match=message):
        FusedTarget(Target(model))


def test_the_record_copies_no_large_weight() -> None:
    """Projections of the hybrid are the model's own tensors but for gated attention, whose rows are sorted."""
    target = fused()
    for record, layer in zip(target.recognised.decoder.layers, target.target.layers, strict=True):
        if isinstance(record.mixer, GatedDelta):
            own = {weight.data_ptr() for weight in layer.parameters()}
            assert {weight.data_ptr() for weight in record.mixer.inputs.weights} <= own
