"""Rounds on the device: batches, streams and buffers give the text, counts and proposals of the host's loop."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from device_pairs import LAYERS, NOBODY, assert_same, counts, know, moved, pair, prompts_of
from fakes import byte_tokenizer
from grids import slow
from pairs import VOCAB, build_drafter
from tiny_models import TINY

from pydflash import Speculator
from pydflash.rounds import device as device_loop
from pydflash.rounds.device import DeviceLoop, bucket
from pydflash.rounds.device_round import DeviceRounds, derived_of
from pydflash.target import own as target_own


@pytest.fixture(params=[1, 2], ids=["one round at a time", "ahead"])
def ahead(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Rounds that are launched before the first is read: a GPU takes two, and here a CPU may, too."""
    init = DeviceLoop.__init__

    def patched(self: DeviceLoop, *args: Any, **options: Any) -> None:
        init(self, *args, **options)
        self.ahead = request.param

    monkeypatch.setattr(DeviceLoop, "__init__", patched)
    return request.param


PATHS = ("generic", "fused")
OPTIONS: dict[str, dict[str, Any]] = {
    "walk": {},
    "block of 2": {"block_size": 2},
    "walk without q": {"draft_sampling": False},
    "q for all": {"draft_sampling": True},
    "viterbi": {"path": "viterbi"},
    "tree of 1": {"path": "tree", "num_nodes": 1},
    "tree of 7": {"path": "tree", "num_nodes": 7},
    "tree of 63": {"path": "tree", "num_nodes": 63},
    "tree without q": {"path": "tree", "num_nodes": 9, "draft_sampling": False},
}


@pytest.mark.grid(2)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("version", [1, 2])
def test_batches_are_the_hosts_rows(version: int, options: str, device: torch.device) -> None:
    """Text, counts and proposals, at T = 0 and above, each row under its own seed, in a batch and alone."""
    model, drafter = pair(version, device.type)
    host, fast = (Speculator(model, drafter, target_path=p, **OPTIONS[options]) for p in PATHS)
    fast.loop.ahead = version  # type: ignore[attr-defined]
    prompts, kept, exact = prompts_of(3), 0, "63" not in options  # the last of many nodes are all but equal
    for sampling in ({"temperature": 0.0}, {"temperature": 0.3, "top_k": 40, "top_p": 0.97}):
        common: dict[str, Any] = {"stop_token_ids": NOBODY, "return_proposals": True, **sampling}
        many = fast.generate(prompts, 10, seed=[11, 12, 13], **common)
        for i, prompt in enumerate(prompts):
            want = host.generate(prompt, 10, seed=11 + i, **common)
            assert_same(many[i], want, exact)
            kept += sum(want.stats.num_accepted)
        assert_same(fast.generate(prompts[1], 10, seed=12, **common), many[1], exact)
    assert kept > 0
    assert many[0].stats.backends["target"] == "fused layers" + ("" if device.type != "cpu" else ", packed weights")
    assert many[0].stats.backends["round"] == ("graph" if device.type == "cuda" else "eager")
    assert 0 < many[0].stats.prefill_seconds < 60
    assert 0 < many[0].stats.decode_seconds < 60


@pytest.mark.parametrize("family", ["gemma3", "gpt2", slow("mistral")])
def test_other_families(family: str, device: torch.device) -> None:
    """Windows, learned positions, and layers of the model's own, under chains and trees."""
    changes = {"layer_types": ["sliding_attention", "full_attention"] * 3} if family == "gemma3" else {}
    model, drafter = moved(TINY[family](num_hidden_layers=LAYERS, **changes), device), build_drafter(2).to(device)
    in_place = "fused" if family == "mistral" else "own"
    for options in ({}, {"path": "tree", "num_nodes": 12}):
        host, fast = (Speculator(model, drafter, target_path=p, **options) for p in ("generic", in_place))
        for temperature in (0.0, 1.0):
            common: dict[str, Any] = {"temperature": temperature, "seed": 3, "stop_token_ids": NOBODY}
            for got, prompt in zip(fast.generate(prompts_of(8)[5:], 12, **common), prompts_of(8)[5:], strict=True):
                assert_same(got, host.generate(prompt, 12, **common))


def test_auto_settles_on_one_size(device: torch.device) -> None:
    model, drafter = pair(2, device.type)
    spec = Speculator(model, drafter, path="tree", target_path="fused")
    assert spec.loop.parts.paths.num_nodes in (3, 15, 31, 63)
    assert all(0 < seconds < 10 for seconds in spec.loop.parts.paths.seconds.values())
    out = spec.generate(prompts_of(3), 12, stop_token_ids=NOBODY)
    plain = Speculator(model, None, target_path="fused").generate(prompts_of(3), 12, stop_token_ids=NOBODY)
    assert [o.token_ids for o in out] == [o.token_ids for o in plain]
    assert set(out[0].stats.num_verified) == {spec.loop.parts.paths.num_nodes}


@pytest.mark.parametrize("drafting", ["none", "block of 1", "block of 1, viterbi"])
def test_without_drafts(drafting: str, ahead: int, device: torch.device) -> None:
    model, drafter = pair(2, device.type)
    options: dict[str, Any] = {} if drafting == "none" else {"block_size": 1}
    options |= {"path": "viterbi"} if "viterbi" in drafting else {}
    used = None if drafting == "none" else drafter
    host, fast = (Speculator(model, used, target_path=p, **options) for p in PATHS)
    for sampling in ({}, {"temperature": 1.0, "seed": 4}):
        common = {"stop_token_ids": NOBODY, "return_proposals": True, **sampling}
        assert_same(
            fast.generate([prompts_of(2)[1]], 12, **common)[0], host.generate([prompts_of(2)[1]], 12, **common)[0]
        )


# --- ends -----------------------------------------------------------------------------------------------------


def test_rows_end_at_any_place(ahead: int, device: torch.device) -> None:
    """Stop tokens as first token, in every slot and as bonus; the others go on and are not disturbed."""
    model, drafter = pair("knowing", device.type)
    host, fast = (Speculator(model, drafter, target_path=p) for p in PATHS)
    prompts = prompts_of(8)
    texts = know(drafter, prompts)
    whole = fast.generate(prompts, 40, stop_token_ids=NOBODY)
    assert [o.token_ids for o in whole] == [text[:40] for text in texts]
    assert {n for o in whole for n in o.stats.num_accepted} == {0, 1, 2, 3}
    for token in {text[n] for n, text in enumerate(texts[:7])}:
        for out, text in zip(fast.generate(prompts, 40, stop_token_ids=[token]), texts, strict=True):
            end = text.index(token) + 1 if token in text[:40] else 40
            assert out.token_ids == text[:end]
            assert out.finish_reason == ("stop" if token in text[:40] else "length")
            assert sum(n + 1 for n in out.stats.num_accepted) + 1 == end
    know(drafter, prompts[3:4])
    stop = texts[3][9]
    common: dict[str, Any] = {"stop_token_ids": [stop], "return_proposals": True}
    assert_same(fast.generate(prompts[3], 40, **common), host.generate(prompts[3], 40, **common))


@pytest.mark.parametrize("count", [0, 1, 2, 4, 5, 6, 17])
def test_max_new_tokens_is_exact(count: int, ahead: int, device: torch.device) -> None:
    model, drafter = pair("knowing", device.type)
    fast = Speculator(model, drafter, target_path="fused")
    texts = know(drafter, prompts_of(3))
    for out, text in zip(fast.generate(prompts_of(3), count, stop_token_ids=NOBODY), texts, strict=True):
        assert (out.token_ids, out.finish_reason) == (text[:count], "length")


@pytest.mark.grid(3)
@pytest.mark.parametrize("family", ["qwen3", "gpt2"])
@pytest.mark.parametrize("drafting", ["knowing", "tree", "none"])
def test_the_context_limit_is_reached_exactly(family: str, drafting: str, ahead: int, device: torch.device) -> None:
    """All rooms from none on in one batch; a row may have no room at all."""
    model = moved(TINY[family](num_hidden_layers=LAYERS, max_position_embeddings=32), device)
    drafter = {"none": None, "knowing": pair("knowing", device.type)[1], "tree": pair(2, device.type)[1]}[drafting]
    options: dict[str, Any] = {"path": "tree", "num_nodes": 40} if drafting == "tree" else {}
    spec = Speculator(model, drafter, target_path="own" if family == "gpt2" else "fused", **options)
    host = Speculator(model, None, target_path="generic")
    text = [5, *host.generate([5], None, stop_token_ids=NOBODY).token_ids]
    assert len(text) == 32
    if drafting == "knowing":
        drafter.texts.zero_()
        drafter.texts[:, :32] = torch.tensor(text)
    for length in (25, 29, 31, 32):
        outs = spec.generate([text[:length], text[: length - 9]], None, stop_token_ids=NOBODY)
        assert [out.token_ids for out in outs] == [text[length:], text[length - 9 :]]
        assert {out.finish_reason for out in outs} == {"length"}


def test_processors_and_stop_strings(device: torch.device) -> None:
    """Logits are changed on the host between two pieces of a round, each row's by its own text."""

    def never_again(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.index_fill(1, ids[0], -torch.inf)

    def breaks(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if ids.shape[1] > 9:
            raise RuntimeError("broken")
        return scores

    model, drafter = pair(2, device.type)
    tree, drawn = {"path": "tree", "num_nodes": 12}, {"temperature": 1.0, "seed": [5, 6, 7]}
    cases: list[tuple[dict[str, Any], dict[str, Any]]] = [({}, {}), ({}, drawn), (tree, drawn)]
    for options, sampling in cases:
        host, fast = (Speculator(model, drafter, byte_tokenizer(), target_path=p, **options) for p in PATHS)
        common = {"return_proposals": True, "stop_token_ids": [9, 50], **sampling}
        with pytest.raises(RuntimeError, match="broken"):
            fast.generate(prompts_of(3), 20, logits_processor=[breaks], **common)
        many, wants = (s.generate(prompts_of(3), 12, logits_processor=[never_again], **common) for s in (fast, host))
        for got, want in zip(many, wants, strict=True):  # in the buffers of what broke
            assert_same(got, want)
            assert len(set(got.token_ids)) == len(got.token_ids)
        assert "in pieces" in many[0].stats.backends["round"]
        common["stop_token_ids"] = NOBODY
        text = host.generate(prompts_of(3), 20, **common)[0].text
        common["stop_strings"] = [text[7:9], text[11:14]]
        many, wants = (s.generate(prompts_of(3), 20, **common) for s in (fast, host))
        assert many[0].finish_reason == "stop"
        for got, want in zip(many, wants, strict=True):
            assert_same(got, want)


# --- buffers --------------------------------------------------------------------------------------------------


def test_streams_beside_one_another(ahead: int, device: torch.device) -> None:
    """Two at once, a third abandoned, batches between them: nobody sees the others, and buffers serve again."""
    model, drafter = pair(2, device.type)
    fast, options = Speculator(model, drafter, target_path="fused"), {"temperature": 0.9, "stop_token_ids": NOBODY}
    prompts = prompts_of(4)
    wants = [fast.generate(p, 20, seed=i, **options) for i, p in enumerate(prompts)]
    loop = fast.loop
    assert isinstance(loop, DeviceLoop)
    (kept,) = loop.free
    one, two, gone = (fast.stream(p, 20, seed=i, **options) for i, p in enumerate(prompts[:3]))
    chunks: dict[int, list[int]] = {0: [], 1: []}
    for _ in range(3):
        for i, stream in enumerate((one, two)):
            chunks[i] += next(stream).token_ids
        next(gone)
    assert loop.free == []
    del gone
    (left,) = loop.free
    assert int(left.rows.active.max()) == left.under_way == 0
    many = fast.generate(prompts, 20, seed=[0, 1, 2, 3], **options)
    assert [o.token_ids for o in many] == [w.token_ids for w in wants]
    for i, stream in enumerate((one, two)):
        chunks[i] += [token for chunk in stream for token in chunk.token_ids]
        assert chunks[i] == stream.output.token_ids == wants[i].token_ids
        assert counts(stream.output.stats) == counts(wants[i].stats)
    assert len(loop.free) == device_loop._KEPT
    assert fast.generate(prompts[3], 20, seed=3, **options).token_ids == wants[3].token_ids
    assert kept in loop.free


def test_what_buffers_held_before_does_not_matter(device: torch.device) -> None:
    model, drafter = pair(2, device.type)
    fast = Speculator(model, drafter, path="tree", num_nodes=7, target_path="fused")
    options: dict[str, Any] = {"temperature": 0.8, "seed": [1, 2, 3], "stop_token_ids": NOBODY}
    want = [o.token_ids for o in fast.generate(prompts_of(3), 20, **options)]
    (rounds,) = fast.loop.free  # type: ignore[attr-defined]
    with torch.inference_mode():
        rows = rounds.rows
        for cache in (rows.cache, rows.context):
            for buffer in (cache.stores[0].k, cache.stores[0].v):
                buffer.fill_(torch.nan)
            cache.lengths.fill_(cache.capacity)
        for tensor in (rows.anchors, rows.starts, rows.counts, rows.active):
            tensor.fill_(1)
        rows.record.fill_(5)
        rows.features.fill_(torch.nan)
    assert [o.token_ids for o in fast.generate(prompts_of(3), 20, **options)] == want
    assert fast.loop.free == [rounds]  # type: ignore[attr-defined]


def test_no_row_grows_beyond_its_capacity(ahead: int, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """With not one position to spare: rows that go on while others are finished, and rounds behind the last."""
    monkeypatch.setattr(device_loop, "bucket", lambda positions: positions)
    model, drafter = pair("knowing", device.type)
    fast = Speculator(model, drafter, target_path="fused")
    prompts = prompts_of(8)
    texts = know(drafter, prompts)
    for count in (1, 2, 7, 30):
        assert [o.token_ids for o in fast.generate(prompts, count, stop_token_ids=NOBODY)] == [t[:count] for t in texts]
        rounds = fast.loop.free[-1]  # type: ignore[attr-defined]
        assert rounds.capacity == 40 + count + 9
        assert int(rounds.rows.cache.lengths.max()) <= rounds.capacity
        assert int(rounds.rows.context.lengths.max()) <= rounds.capacity
        assert int(rounds.rows.active.max()) == 0
    outs = fast.generate(prompts, 50, stop_token_ids=[texts[0][0]])  # the first row ends before it has begun
    rounds = fast.loop.free[-1]  # type: ignore[attr-defined]
    assert len(outs[0].token_ids) == 1 < len(outs[7].token_ids)
    assert int(rounds.rows.cache.lengths[0]) == int(rounds.rows.context.lengths[0]) == 0


def test_buckets_are_few_and_not_much_larger() -> None:
    sizes = [bucket(positions) for positions in range(1, 20000)]
    assert all(size >= positions for positions, size in enumerate(sizes, 1))
    assert sorted(set(sizes[:4096])) == [512, 1024, 2048, 4096]
    assert all(size <= 1.25 * positions for positions, size in list(enumerate(sizes, 1))[4096:])
    assert len(set(sizes)) < 30


def test_which_requests_share_buffers(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_loop, "bucket", lambda positions: -(-positions // 64) * 64)
    model, drafter = pair(2, device.type)
    fast = Speculator(model, drafter, target_path="fused")

    def used(prompt: Any, count: int = 4, **options: Any) -> DeviceRounds:
        fast.generate(prompt, count, stop_token_ids=range(VOCAB), **options)
        return fast.loop.free[-1]  # type: ignore[attr-defined,no-any-return]

    first = used([1, 2])
    assert used([3] * 10, 30) is first
    assert used([[1, 2]]) is first
    assert used([1, 2], temperature=1.0) is not first
    assert used([1, 2]) is first
    assert used([[1, 2], [3]]) is not first
    assert used([1, 2], logits_processor=[lambda ids, scores: scores]) is not first
    assert used([1, 2], 4) is not first  # two sets are kept, and it was the third
    large = used([1, 2], 450)
    assert used([1, 2], 4) is not large


def test_more_rows_than_a_batch_holds(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    monkeypatch.setattr(DeviceLoop, "most_rows", 3)
    model, drafter = pair(2, device.type)
    fast = Speculator(model, drafter, target_path="fused")
    options: dict[str, Any] = {"temperature": 0.9, "stop_token_ids": NOBODY}
    many = fast.generate(prompts_of(7), 10, seed=list(range(7)), **options)
    for i, prompt in enumerate(prompts_of(7)):
        assert_same(many[i], fast.generate(prompt, 10, seed=i, **options))
    assert {r.batch for r in fast.loop.free} == {3, 1}  # type: ignore[attr-defined]


def test_prompts_in_chunks_and_drafters_with_rings(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    """Every chunk's features reach the drafter, also where its context is a ring of 4 that they overrun."""
    monkeypatch.setattr(target_own, "_PREFILL_ROWS_WIDE", 7)
    model = pair(2, device.type)[0]
    changes: dict[str, Any] = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 5}
    for drafter in (pair(2, device.type)[1], build_drafter(2, **changes).to(device)):
        host, fast = (Speculator(model, drafter, target_path=p) for p in PATHS)
        many = fast.generate(prompts_of(8), 16, stop_token_ids=NOBODY, return_proposals=True)
        for got, prompt in zip(many, prompts_of(8), strict=True):
            assert_same(got, host.generate(prompt, 16, stop_token_ids=NOBODY, return_proposals=True))


@pytest.mark.parametrize("seed", [0, 2**63 - 1, 2**64 - 1])
def test_seeds(seed: int, device: torch.device) -> None:
    model, drafter = pair(2, device.type)
    host, fast = (Speculator(model, drafter, target_path=p) for p in PATHS)
    common: dict[str, Any] = {"temperature": 1.0, "stop_token_ids": NOBODY, "return_proposals": True, "seed": seed}
    try:
        want = host.generate([1, 2, 3], 12, **common)
    except ValueError:
        return
    assert_same(fast.generate([1, 2, 3], 12, **common), want)


def test_weights_that_change_between_requests(device: torch.device) -> None:
    """As in training: the next request drafts with the weights as they are then."""
    model, drafter = (copy.deepcopy(part) for part in pair(2, device.type))
    host, fast = (Speculator(model, drafter, target_path=p) for p in PATHS)
    common: dict[str, Any] = {"stop_token_ids": NOBODY, "return_proposals": True}
    seen = []
    for _ in range(3):
        got = fast.generate([1, 2, 3], 12, **common)
        assert_same(got, host.generate([1, 2, 3], 12, **common))
        seen.append(got.stats.proposals)
        (rounds,) = fast.loop.free  # type: ignore[attr-defined]
        assert rounds.reads(derived_of(rounds.target, rounds.drafter))
        with torch.no_grad():
            for parameter in [*drafter.parameters(), *model.parameters()]:
                parameter.mul_(1 + 0.1 * torch.randn_like(parameter))
        assert not rounds.reads(derived_of(rounds.target, rounds.drafter))  # a captured graph would read the old ones
    assert seen[0] != seen[1] != seen[2]
