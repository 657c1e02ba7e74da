"""Batched plain decoding: greedy rows against the model's own generate, sampled rows against the target's law."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from scipy import stats
from tiny_models import TINY, VOCAB, MissingFamily

from pydflash.ops.reference import filtered_weights
from pydflash.sampling import SamplingParams
from pydflash.target import batch as target_batch
from pydflash.target.batch import BatchForward
from pydflash.target.generic import Target
from pydflash.training import generate
from pydflash.training.generate import BatchGenerator, BatchRequest, Response, draw, has_loop


def tiny_target(name: str = "llama", **changes: Any) -> Target:
    try:
        return Target(TINY[name](**changes))
    except MissingFamily as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def target() -> Target:
    """A model whose law is flat enough to end a text now and then."""
    model = TINY["llama"](num_hidden_layers=2)
    with torch.no_grad():
        model.lm_head.weight *= 0.05
    return Target(model)


def make_requests(count: int, seed: int = 0, temperature: float = 0.0, longest: int = 30) -> list[BatchRequest]:
    random = torch.Generator().manual_seed(seed)
    sizes = torch.randint(1, longest, (count,), generator=random).tolist()
    texts = [torch.randint(0, VOCAB, (size,), generator=random).tolist() for size in sizes]
    return [BatchRequest(i, ids, temperature, 1000 + i) for i, ids in enumerate(texts)]


def answers(target: Target, requests: list[BatchRequest], **settings: Any) -> dict[int, Response]:
    settings = {"batch_size": 4, "capacity": 50, "max_new_tokens": 14, "sync_every": 3} | settings
    waiting = list(requests)

    def take(n: int) -> list[BatchRequest]:
        taken = waiting[:n]
        del waiting[:n]
        return taken

    responses = [r for some in BatchGenerator(target, **settings).run(take) for r in some]
    found = {response.request.key: response for response in responses}
    assert len(found) == len(responses) == len(requests)
    return found


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt_oss"])
def test_greedy_is_generate(name: str) -> None:
    target = tiny_target(name)
    stops = [3, 9, 17, 40, 41, 42]
    requests = make_requests(8)
    got = answers(target, requests, stop_token_ids=stops)
    for request in requests:
        ids = torch.tensor([request.ids])
        settings = {"do_sample": False, "max_new_tokens": 14, "eos_token_id": stops, "pad_token_id": 0}
        want = target.model.generate(ids, attention_mask=torch.ones_like(ids), **settings)[0].tolist()
        response = got[request.key]
        assert response.ids.tolist() == want
        assert response.finish_reason == ("stop" if want[-1] in stops else "length")
    assert {r.finish_reason for r in got.values()} == {"stop", "length"}


def test_a_response_does_not_depend_on_the_batch(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = [r._replace(temperature=(0.0, 0.9, 1.3)[r.key % 3]) for r in make_requests(14)]
    settings = {"stop_token_ids": list(range(12)), "sampling": SamplingParams(1.0, 0, 0.95, 0.01)}
    one = answers(target, requests, batch_size=1, sync_every=1, **settings)
    monkeypatch.setattr(generate, "_SMALLEST", 1)  # rows are moved together again and again
    monkeypatch.setattr(generate, "_PREFILL_TOKENS", 40)
    moved = []
    move = BatchForward.move
    monkeypatch.setattr(BatchForward, "move", lambda self, *both: (moved.append(both), move(self, *both))[1])
    many = answers(target, requests[::-1], batch_size=9, sync_every=2, **settings)
    assert moved
    assert [many[i].ids.tolist() for i in range(14)] == [one[i].ids.tolist() for i in range(14)]


def test_capacity_cuts_and_long_prompts_are_refused(target: Target) -> None:
    request = BatchRequest(0, [1] * 48, 0.0, 0)
    assert len(answers(target, [request])[0].ids) == 50
    with pytest.raises(ValueError, match="prompts must have 1 to 49 tokens"):
        answers(target, [request._replace(ids=[1] * 50)])


def test_sampled_rows_follow_the_target_law(target: Target) -> None:
    """Two tokens in a row, all pairs; the greedy rows among them stay greedy."""
    ids, count = [5, 7, 9], 4000
    requests = [BatchRequest(i, ids, 0.0 if i % 2 else 0.8, i) for i in range(count)]
    got = answers(target, requests, batch_size=500, max_new_tokens=1, capacity=4, sync_every=1)
    logits = target.model(torch.tensor([ids])).logits[0, -1].detach()
    greedy = Counter(int(got[i].ids[-1]) for i in range(1, count, 2))
    assert greedy == {int(logits.argmax()): count // 2}
    law = (logits / 0.8).double().softmax(-1).numpy()
    seen = np.bincount([got[i].ids[-1] for i in range(0, count, 2)], minlength=VOCAB)
    assert stats.chisquare(seen, law / law.sum() * seen.sum()).pvalue > 1e-3


@pytest.mark.parametrize(("k", "p", "m"), [(0, 1.0, 0.0), (7, 1.0, 0.0), (0, 0.7, 0.0), (20, 0.8, 0.1), (0, 1.0, 0.3)])
def test_draw_is_the_inverse_cdf_of_the_filtered_law(k: int, p: float, m: float) -> None:
    random = torch.Generator().manual_seed(1)
    n, vocab = 300, 300
    logits = 2 * torch.randn(n, vocab, generator=random)
    temperature, u = 0.5 + torch.rand(n, generator=random), torch.rand(n, generator=random)
    full = torch.ones(n)
    weights = filtered_weights(logits, temperature, (k * full).long(), p * full, m * full).double()
    want = (weights.cumsum(-1) <= u[:, None].double() * weights.sum(-1, keepdim=True)).sum(-1)
    got = draw(logits, temperature, u, SamplingParams(1.0, k, p, m))
    assert (got != want).sum() <= 1  # a threshold may be met in another rounding
    assert weights.gather(1, got[:, None]).min() > 0
    assert torch.equal(draw(logits, 0 * temperature, u, SamplingParams(1.0, k, p, m)), logits.argmax(-1))
    assert draw(logits, temperature, torch.full((n,), 1 - 2.0**-24), SamplingParams(1.0, k, p, m)).max() < vocab


def test_flash_attention_gets_each_row_its_own_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel itself needs a GPU; a plain stand-in with its arguments must give the dense result."""
    calls = []

    def stand_in(q, k, v, cu_q, cu_k, max_q, max_k, dropout, causal, debug, *, scale, **kw):  # type: ignore[no-untyped-def]
        calls.append(kw["window_size_left"])
        assert cu_q.dtype == cu_k.dtype == kw["seqused_k"].dtype == torch.int32
        assert (max_q, dropout, causal) == (1, 0.0, False)
        rows = []
        for row in range(len(q)):
            end = int(cu_k[row] + kw["seqused_k"][row])
            left = kw["window_size_left"]
            begin = int(cu_k[row]) if left is None else max(int(cu_k[row]), end - 1 - left)
            assert end - cu_k[row] <= max_k
            groups = q.shape[1] // k.shape[1]
            keys, values = (x[begin:end].repeat_interleave(groups, 1) for x in (k, v))
            scores = torch.einsum("hd,lhd->hl", q[int(cu_q[row])], keys) * scale
            rows.append(torch.einsum("hl,lhd->hd", scores.softmax(-1), values))
        return torch.stack(rows), None, None, None, None

    target = tiny_target("gemma3")
    dense = answers(target, make_requests(7))
    monkeypatch.setattr(target_batch, "_no_flash", lambda *_: set())
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", stand_in)
    flash = answers(target, make_requests(7))
    assert set(calls) == {None, 7}
    assert {k: r.ids.tolist() for k, r in flash.items()} == {k: r.ids.tolist() for k, r in dense.items()}


def test_models_that_cannot_run_this_way_are_refused() -> None:
    with pytest.raises(ValueError, match="describe fully"):
        BatchForward(tiny_target("llama4"), 2, 40)
    if transformers.__version__ >= "5":
        with pytest.raises(ValueError, match="attention layers only"):
            BatchForward(tiny_target("qwen3_5"), 2, 40)
    target = tiny_target()
    with pytest.raises(ValueError, match=r"attention must be dense here .*torch.float32 is not half"):
        BatchForward(target, 2, 40, "flash")
    with pytest.raises(ValueError, match="at most 512 positions"):
        BatchForward(target, 2, 513)
    before = target.model.config._attn_implementation
    BatchForward(target, 2, 40)
    assert target.model.config._attn_implementation == before


def test_loops() -> None:
    plain = list(range(60))
    texts = {
        "plain": (plain, False),
        "run of 19": ([*plain[:30], *[7] * 19, *plain[:11]], False),
        "run of 20": ([*plain[:30], *[7] * 20, *plain[:10]], True),
        "3-gram 7 times": ([*plain[:20], *[1, 2, 3] * 7, *plain[:19]], True),
        "20-gram twice": ([*plain[:20], *plain[:20], *plain[20:40]], False),
        "20-gram 3 times": (plain[:20] * 3, True),
        "run of the prompt": ([*[7] * 30, *plain[:30]], False),
        "run behind the end": ([*plain[:40], *[7] * 20], False),
    }
    text = torch.tensor([ids for ids, _ in texts.values()])
    starts = torch.tensor([12 if name == "run of the prompt" else 0 for name in texts])
    ends = torch.tensor([58 if name == "run behind the end" else 60 for name in texts])
    assert dict(zip(texts, has_loop(text, starts, ends).tolist(), strict=True)) == {k: v for k, (_, v) in texts.items()}
