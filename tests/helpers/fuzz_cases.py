"""What the tests that fuzz the public API share: tiny pairs, what an error looks like, what an answer holds."""

from __future__ import annotations

import functools
import math
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fakes import byte_tokenizer
from hypothesis import HealthCheck, settings
from pairs import build_drafter
from requests_at_random import TEMPLATE, Made, fresh
from tiny_models import TINY
from torch import Tensor

from pydflash import Drafter, Generation, Speculator
from pydflash.protocols import Proposal

VOCAB, LENGTH = 257, 64
HOUSE = re.compile(r"^[\w.]+(\[\d+\])?: .*\b(must|needs?|is not honoured|does not take)\b.*, got ", re.DOTALL)
# The second is what `int` says as a processor: a caller's own error is told as it is.
UNEXPECTED = re.compile(r"^(generate|stream)\(\) got an unexpected keyword argument '\w+'|^only integer tensors of a")
# Drafts by the rule without q: a text for a seed is the one of plain decoding.
FORMS: dict[str, dict[str, Any]] = {
    "walk": {},
    "generic": {"target_path": "generic"},
    "device": {"target_path": "fused"},
    "viterbi": {"path": "viterbi"},
    "tree": {"path": "tree", "num_nodes": 9},
    "device tree": {"target_path": "fused", "path": "tree", "num_nodes": 7},
    "reference": {"backend": "reference"},
}


class TableDrafter(Drafter):
    """Drafts by what the target says after a token alone, which is often right; some drafts are wrong on purpose."""

    table: Tensor  # logits [V, V]

    def propose(self, anchors: Tensor, cache: Any, **options: Any) -> Proposal:
        """See `Drafter.propose`."""
        last, candidates, scores, tokens = anchors, [], [], []
        for slot in range(options["block_size"] - 1):
            best = self.table[last].topk(self.config.num_candidates)
            taken = ((cache.lengths.long() + slot) % 5 == 3).long()  # now and then the second best
            last = best.indices.gather(1, taken[:, None])[:, 0]
            candidates.append(best.indices)
            scores.append(best.values)
            tokens.append(last)
        normalizers = None
        if (temperature := options.get("node_temperature")) is not None:
            at = torch.stack([anchors, *tokens[:-1]], 1)
            normalizers = (self.table[at] / temperature[:, None, None]).logsumexp(-1)
        return Proposal(torch.stack(tokens, 1), torch.stack(candidates, 1), None, torch.stack(scores, 1), normalizers)


@functools.cache
def model_of() -> Any:
    """A model whose next token depends on the last one most, and on those before it too."""
    model = TINY["llama"](num_hidden_layers=3, vocab_size=VOCAB, max_position_embeddings=LENGTH)
    with torch.no_grad():
        for layer in model.model.layers:
            for part in (layer.self_attn.o_proj, layer.mlp.down_proj):
                part.weight *= 0.01
    model.generation_config.eos_token_id = 256
    return model


@functools.cache
def pair(form: str | None) -> Speculator:
    """A tiny model of 64 positions over bytes, with a drafter or, where `form` is None, without.

    form: of `FORMS`, or "sampled" for drafts that are drawn from the drafter's law.
    """
    tokenizer = byte_tokenizer(TEMPLATE)
    if form is None:
        return Speculator(model_of(), None, tokenizer)
    version = 2 if form == "sampled" else 1
    drafter = build_drafter(version, vocab_size=VOCAB, num_target_layers=3, block_size=5, mask_token_id=255)
    if form != "sampled":
        drafter.__class__ = TableDrafter
        drafter.table = model_of()(torch.arange(VOCAB)[:, None]).logits[:, 0].detach()
    return Speculator(model_of(), drafter, tokenizer, **FORMS.get(form, {}))


def fuzz(count: int) -> Any:
    """`count` examples of the profile that conftest.py sets."""
    return settings(max_examples=count, deadline=None, suppress_health_check=list(HealthCheck))


def cases(some: int, every: int) -> Callable[[Any], Any]:
    """`count` examples of a test in a default run, and with --full."""
    values = [pytest.param(some, id="some"), pytest.param(every, id="all", marks=pytest.mark.slow)]
    return pytest.mark.parametrize("count", values)


def attempt(call: Any, *arguments: Any, **named: Any) -> Any:
    """The result, or a documented error as its text; everything else fails the test."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return call(*fresh(arguments), **fresh(named))
        except ValueError as error:
            text, form = str(error), HOUSE
        except TypeError as error:
            text, form = str(error), UNEXPECTED
    assert form.match(text), text
    assert len(text) < 1200
    return told(text)


def told(error: object) -> str:
    """A message without the addresses of objects, which others like them do not have."""
    return re.sub(r"\b0x[0-9a-f]+", "0x", str(error))


def check(out: Generation, asked: dict[str, Any]) -> None:
    """What every answer holds."""
    ids, stats = out.token_ids, out.stats
    assert all(0 <= token < VOCAB for token in ids)
    assert out.finish_reason in ("stop", "length")
    limit = asked.get("max_new_tokens")
    if isinstance(limit, int):
        assert len(ids) <= limit
    assert stats.prompt_tokens + len(ids) <= LENGTH
    assert len(ids) == (stats.new_tokens + 1 if ids else 0)
    assert len(stats.num_accepted) == len(stats.num_drafted) == len(stats.num_verified)
    for kept, drafted, verified in zip(stats.num_accepted, stats.num_drafted, stats.num_verified, strict=True):
        assert 0 <= kept <= drafted <= verified <= 9
    assert pair(None).tokenizer.decode(ids, skip_special_tokens=True).startswith(out.text.rstrip("�"))
    check_stops(out, asked)
    if (wanted := asked.get("logprobs")) is not None and wanted is not False:
        assert out.logprobs is not None
        assert [listed.token_id for listed in out.logprobs] == ids
        for listed in out.logprobs:
            assert listed.logprob <= 1e-5
            assert not math.isnan(listed.logprob)
            assert len(listed.top) == (0 if asked["logprobs"] is True else int(asked["logprobs"]))
            assert sorted((-x, i) for i, x in listed.top) == [(-x, i) for i, x in listed.top]
    else:
        assert out.logprobs is None
    if asked.get("return_proposals"):
        assert len(stats.proposals or []) == stats.rounds


def check_stops(out: Generation, asked: dict[str, Any]) -> None:
    """Nothing stands behind a stop."""
    stops = asked.get("stop_token_ids")
    if stops is not None and not isinstance(stops, Made):  # what that held is gone
        stops = torch.as_tensor(list(stops) if isinstance(stops, set) else stops).flatten().tolist()
        assert not set(out.token_ids[:-1]) & set(stops)
        if out.token_ids and out.token_ids[-1] in stops:
            assert out.finish_reason == "stop"
            assert len(out.token_ids) > min(asked.get("min_new_tokens", 0), LENGTH)
    strings = asked.get("stop_strings")
    for text in [strings] if isinstance(strings, str) else strings or []:
        if text in out.text:
            assert out.text.index(text) + len(text) == len(out.text)
            assert out.finish_reason == "stop"


def texts(found: Any) -> Any:
    """Token ids, text and reasons, of lists too."""
    return [texts(x) for x in found] if isinstance(found, list) else (found.token_ids, found.text, found.finish_reason)
