"""Batches by row: requests come and go at any time, and each gives the text that it gives alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from device_pairs import NOBODY, pair, prompts_of

from pydflash import Speculator
from pydflash.request import Batch, Request

COUNTS = [9, 1, 14, 6, 11, 20, 3, 8]
OPTIONS: dict[str, dict[str, Any]] = {
    "walk": {},
    "tree": {"path": "tree", "num_nodes": 7},
    "viterbi": {"path": "viterbi"},
    "plain": {},
}
SAMPLED = [{}, {"temperature": 0.7}, {"temperature": 0.9, "top_k": 20}, {"temperature": 1.0, "top_p": 0.9}]


def never_again(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    return scores.index_fill(1, ids[0], -torch.inf)


def request_of(spec: Speculator, i: int, processors: bool) -> Request:
    """Request i: a prompt, a length, a temperature and a seed of its own."""
    wanted = {"max_new_tokens": COUNTS[i], "seed": 40 + i, "stop_token_ids": NOBODY, **SAMPLED[i % 4]}
    if processors and i % 2:
        wanted["logits_processor"] = [never_again]
    return spec.stream(prompts_of(8)[i], **wanted)._request


def run(batch: Batch, waiting: list[Request], rows: int) -> list[list[int]]:
    """Admit as rows become free: all at first, then one every other step; returns which ran beside each other."""
    held: dict[int, Request] = {}
    together, steps = [], 0
    while waiting or held:
        free = [row for row in range(rows) if row not in held]
        for row in free if not steps else free[: steps % 2]:
            if waiting:
                request = held[row] = waiting.pop(0)
                request.begin(batch.admit(row, request))
        together.append([held[row].params.greedy for row in sorted(held)])
        for row in [row for row, request in held.items() if request.finished]:
            batch.retire(row)
            del held[row]
        for row, found in batch.step().items():
            held[row].take(found)
            if held[row].finished:
                batch.retire(row)
                del held[row]
        steps += 1
    return together


@pytest.mark.parametrize("processors", [False, True])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("ahead", [0, 1, 2], ids=["host", "device", "device, ahead"])
def test_rows_come_and_go(ahead: int, options: str, processors: bool, device: torch.device) -> None:
    model, drafter = pair(2, device.type)
    drafter = None if options == "plain" else drafter
    spec = Speculator(model, drafter, target_path="fused" if ahead else "generic", **OPTIONS[options])
    if ahead:
        spec.loop.ahead = ahead  # type: ignore[attr-defined]
    host = Speculator(model, None, target_path="generic")
    requests = [request_of(spec, i, processors) for i in range(8)]
    batch = spec.loop.open(3, max(r.positions for r in requests), draws=True, processors=processors)
    together = run(batch, list(requests), 3)
    batch.close()
    assert max(map(len, together)) == 3
    for i, request in enumerate(requests):
        alone = request_of(spec, i, processors)
        single = spec.loop.open(1, alone.positions, draws=True, processors=processors)
        run(single, [alone], 1)
        single.close()
        assert request.output.token_ids == alone.output.token_ids
        assert request.stats.num_accepted == alone.stats.num_accepted
        assert len(request.output.token_ids) == COUNTS[i]
        wanted: dict[str, Any] = {"logits_processor": [never_again]} if processors and i % 2 else {}
        if i % 4 == 0 or options == "plain":  # the same whatever the batch was opened for
            wanted |= SAMPLED[i % 4] or {"temperature": 0.0}
            want = host.generate(prompts_of(8)[i], COUNTS[i], stop_token_ids=NOBODY, seed=40 + i, **wanted)
            assert request.output.token_ids == want.token_ids


@pytest.mark.parametrize("target_path", ["generic", "fused"])
def test_what_a_batch_was_not_opened_for_is_refused(target_path: str, device: torch.device) -> None:
    model, drafter = pair(2, device.type)
    spec = Speculator(model, drafter, target_path=target_path)
    greedy, drawn, changed = request_of(spec, 0, False), request_of(spec, 1, False), request_of(spec, 3, True)
    batch = spec.loop.open(2, greedy.positions)
    batch.admit(0, greedy)
    with pytest.raises(ValueError, match="admit: row must be a free one, got 0, which holds a request"):
        batch.admit(0, greedy)
    with pytest.raises(ValueError, match=f"admit: request must take at most {greedy.positions} positions, got"):
        batch.admit(1, request_of(spec, 5, False))
    if target_path == "fused":
        wide = spec.loop.open(2, 100)
        with pytest.raises(ValueError, match="admit: request must be greedy where the batch was opened without draws"):
            wide.admit(0, drawn)
        with pytest.raises(ValueError, match="admit: request must have no logits processors where"):
            wide.admit(0, changed)
    batch.retire(0)
    again = request_of(spec, 0, False)
    assert batch.admit(0, again) == spec.generate(prompts_of(1)[0], 1, temperature=0.0, stop_token_ids=NOBODY).token_ids
