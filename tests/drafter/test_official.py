"""Against the official `dflash` 0.1.0 as an oracle: the same weights give the same hidden states, drafts and rounds."""

from __future__ import annotations

import copy
import inspect
import time
from typing import Any

import pytest
import torch
from pairs import CONFIGS, HIDDEN, VOCAB, build_drafter, fit, fitted_prompts, official_drafter
from tiny_models import TINY
from torch import nn

from pydflash import Drafter, Speculator


@pytest.fixture(params=CONFIGS, scope="module")
def pair(request: pytest.FixtureRequest) -> tuple[Drafter, nn.Module]:
    version, changes = CONFIGS[request.param]
    drafter = build_drafter(version, seed=len(request.param), **changes)
    return drafter, official_drafter(drafter, **changes)


def official_hidden(model: nn.Module, rows: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
    positions = torch.arange(features.shape[1] + rows.shape[1])[None]
    return model(target_hidden=features, noise_embedding=rows, position_ids=positions)


@torch.inference_mode()
@pytest.mark.parametrize("pieces", [[1], [23], [1, 7, 9, 18, 3]])
def test_hidden_states_and_path_match(pair: tuple[Drafter, nn.Module], pieces: list[int]) -> None:
    drafter, official = pair
    torch.manual_seed(len(pieces))
    table, head = torch.randn(VOCAB, HIDDEN) * 0.4, nn.Linear(HIDDEN, VOCAB, bias=False)
    features = torch.randn(1, sum(pieces), drafter.fc.in_features)
    anchor = torch.tensor([11])
    cache = drafter.new_cache(1, sum(pieces))
    for piece in features.split(pieces, 1):
        drafter.append_context(piece, cache)
    size = drafter.config.block_size
    ids = torch.tensor([[11] + [drafter.config.mask_token_id] * (size - 1)])
    rows = table[ids] * drafter.config.input_embedding_scale
    want = official_hidden(official, rows, features)
    # In float32 both are up to 1e-5 away from float64, each in its own direction.
    torch.testing.assert_close(drafter.hidden(anchor, cache, table, size), want, rtol=0, atol=2e-5)

    proposal = drafter.propose(anchor, cache, embed=table, head=head)
    if drafter.config.version == 1:
        logits = official.compute_logits(want[:, 1:], head)
        assert proposal.tokens.tolist() == logits.argmax(-1).tolist()
        k = proposal.candidates.shape[-1]
        torch.testing.assert_close(proposal.scores, logits.topk(k).values, rtol=0, atol=2e-5)
    else:
        tokens, candidates, _ = official.propose(want[:, 1:], anchor, head, 0.0)
        assert proposal.tokens.tolist() == tokens.tolist()
        assert proposal.candidates.sort().values.tolist() == candidates.sort().values.tolist()


@pytest.mark.grid(7)
@pytest.mark.parametrize("fitted", [False, True])
def test_rounds_match(
    pair: tuple[Drafter, nn.Module], fitted: bool, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """Every proposed block and every accepted length equal the official loop's, as long as that drafts full blocks."""
    import dflash.model
    from transformers import DynamicCache

    if not hasattr(DynamicCache, "activate_past_recording"):
        pytest.skip("the official loop needs transformers 5")
    drafter, official = pair
    target = TINY["qwen3"](num_hidden_layers=6)
    if fitted:
        drafter = fit(copy.deepcopy(drafter), target)
        official = official_drafter(drafter, **CONFIGS[request.node.callspec.params["pair"]][1])
    forward = target.forward
    blocks: list[list[int]] = []
    lengths: list[int] = []

    def spy(*args: Any, past_key_values: Any = None, **kwargs: Any) -> Any:
        if args[0].shape[1] <= drafter.config.block_size and "logits_to_keep" not in kwargs:
            blocks.append(args[0][0].tolist())
        return forward(*args, **{cache_name: past_key_values}, **kwargs)

    cache_name = "cache" if "cache" in inspect.signature(type(target).forward).parameters else "past_key_values"
    spec = Speculator(target, drafter)
    for seed in range(3):
        torch.manual_seed(seed)
        prompt = fitted_prompts()[seed : seed + 1] if fitted else torch.randint(0, VOCAB - 1, (1, 5 + 6 * seed))
        ours = spec.generate(prompt[0], 48, stop_token_ids=[], return_proposals=True)
        blocks.clear()
        monkeypatch.setattr(target, "forward", spy)
        monkeypatch.setattr(dflash.model, "_cuda_time", time.perf_counter)
        theirs = dflash.model.dflash_generate(
            official, target, prompt, 48, None, block_size=drafter.config.block_size, return_stats=True
        )
        monkeypatch.undo()
        full = [block for block in blocks if len(block) == drafter.config.block_size]
        assert ours.token_ids == theirs.output_ids[0, prompt.shape[1] :].tolist()
        assert ours.stats.proposals is not None
        assert ours.stats.proposals[: len(full)] == full
        accepted = [n + 1 for n in ours.stats.num_accepted[: len(full) - 1]]
        assert accepted == theirs.acceptance_lengths[: len(full) - 1]
        lengths += accepted
    assert len(lengths) >= 20
    if fitted:
        assert max(lengths) >= min(4, drafter.config.block_size)
