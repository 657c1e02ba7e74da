"""Training: masks, anchors, losses, the loop and its resume, and evaluation by replay."""

from __future__ import annotations

import copy
import functools
import json
import math
import operator
from pathlib import Path
from typing import Any

import pytest
import torch
from pairs import HIDDEN, VOCAB, build_drafter, fitted, fitted_prompts
from tiny_models import TINY
from torch.nn import functional as F

from pydflash import Drafter, Speculator, Target
from pydflash.training.build import InputConditionedDrafter, drafter_config, initialise, spread_layers, warm_start
from pydflash.training.evaluate import acceptance_length, bootstrap, replay, sampled_rounds
from pydflash.training.features import FeatureSource, pad_records
from pydflash.training.masks import dense_mask, flex_mask, mask_rule
from pydflash.training.objective import Batch, Objective, ObjectiveConfig, block_hidden, sample_anchors
from pydflash.training.trainer import TrainConfig, Trainer, plan


def random_batch(drafter: Drafter, rows: int = 2, length: int = 20, seed: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCAB - 1, (rows, length), generator=generator)
    supervised = torch.zeros(rows, length, dtype=torch.bool)
    supervised[0, 4:] = True
    supervised[1:, 6:15] = True
    return Batch(ids, supervised, torch.randn(rows, length, drafter.fc.in_features, generator=generator), None)


@pytest.mark.parametrize(("window", "causal"), [(0, False), (0, True), (4, False), (5, True)])
def test_mask_says_what_inference_sees(window: int, causal: bool) -> None:
    anchors, length, size = torch.tensor([[3, 7, -1], [0, 5, 9]]), 12, 3
    mask = dense_mask(mask_rule(anchors, length, size, window, causal), anchors, length, size)
    assert mask.shape == (2, 1, 9, length + 9)
    near = window or 99
    for b in range(2):
        for row in range(9):
            block, slot = divmod(row, size)
            anchor = int(anchors[b, block])
            for key in range(length + 9):
                if key < length:
                    want = key < anchor and anchor + slot - key < near
                else:
                    other, other_slot = divmod(key - length, size)
                    want = other == block and (not causal or other_slot <= slot) and abs(slot - other_slot) < near
                assert bool(mask[b, 0, row, key]) == want, (b, row, key)


def test_flex_attention_equals_the_dense_mask() -> None:
    from torch.nn.attention.flex_attention import flex_attention

    torch.manual_seed(0)
    anchors, length, size = torch.tensor([[3, 70, -1], [0, 5, 99]]), 128, 8
    rule = mask_rule(anchors, length, size, 20, False)
    q = torch.randn(2, 4, 24, 16)
    k, v = torch.randn(2, 2, 2, length + 24, 16)
    want = F.scaled_dot_product_attention(q, k, v, dense_mask(rule, anchors, length, size), enable_gqa=True)
    got = flex_attention(q, k, v, block_mask=flex_mask(rule, anchors, length, size), enable_gqa=True)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-5)


def test_anchors_are_supervised_sorted_and_differ() -> None:
    supervised = torch.zeros(3, 30, dtype=torch.bool)
    supervised[0, 5:20] = True
    supervised[1, 28:] = True
    anchors = sample_anchors(supervised, 6, torch.Generator().manual_seed(1))
    assert anchors.shape == (3, 6)
    first = anchors[0].tolist()
    assert first == sorted(set(first))
    assert min(first) >= 5
    assert max(first) <= 18
    assert sorted(anchors[1].tolist()) == [-1] * 5 + [28]
    assert anchors[2].tolist() == [-1] * 6
    seen = {a for s in range(200) for a in sample_anchors(supervised, 2, torch.Generator().manual_seed(s))[0].tolist()}
    assert seen == set(range(5, 19))


@pytest.mark.parametrize(
    ("version", "changes"),
    [
        (1, {}),
        (2, {"block_size": 6, "conv_kernel_size": 3}),
        (2, {"layer_types": ["sliding_attention"] * 2, "sliding_window": 7, "is_causal": False}),
        (1, {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5}),
    ],
)
def test_one_anchor_is_the_inference_forward(version: int, changes: dict[str, Any]) -> None:
    """To 1e-5 of the norm with the compiled ops, and to rounding in float64 with their definitions."""
    drafter = build_drafter(version, **changes)
    generator = torch.Generator().manual_seed(1)
    batch, table = random_batch(drafter), torch.randn(VOCAB, HIDDEN, generator=generator) * 0.4
    wide = Drafter(drafter.config, backend="reference").double().eval()
    wide.load_state_dict(drafter.double().state_dict())
    drafter.float()
    anchors = torch.tensor([[6, 11, 17], [9, 10, -1]])
    for module, limit in ((drafter, 1e-5), (wide, 1e-7)):
        features, rows = batch.features.to(module.dtype), table.to(module.dtype)
        with torch.no_grad():
            got = block_hidden(module, rows, batch._replace(features=features), anchors)
            for row, column in ((0, 0), (0, 1), (0, 2), (1, 0), (1, 1)):
                at = int(anchors[row, column])
                cache = module.new_cache(1, at)
                module.append_context(features[row : row + 1, :at], cache)
                want = module.hidden(batch.ids[row, at : at + 1], cache, rows, module.config.block_size)[0]
                assert (got[row, column] - want).norm() < limit * want.norm()


def objective_of(drafter: Drafter, **options: Any) -> Objective:
    torch.manual_seed(0)
    return Objective(
        drafter, torch.randn(VOCAB, HIDDEN), torch.nn.Linear(HIDDEN, VOCAB, False), ObjectiveConfig(**options)
    )


def plain_loss(objective: Objective, batch: Batch, anchors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cross-entropy and use of every row, written out without chunks."""
    size = objective.drafter.config.block_size
    hidden = block_hidden(objective.drafter, objective.table, batch, anchors)[:, :, 1:]
    logits = objective.drafter.logits(hidden, objective.head)
    ce, used = torch.zeros(logits.shape[:3]), torch.zeros(logits.shape[:3], dtype=torch.bool)
    for b in range(len(anchors)):
        for a, anchor in enumerate(anchors[b].tolist()):
            for i in range(1, size):
                at = anchor + i
                if anchor >= 0 and at < batch.ids.shape[1] and batch.supervised[b, anchor + 1 : at + 1].all():
                    used[b, a, i - 1] = True
                    ce[b, a, i - 1] = F.cross_entropy(logits[b, a, i - 1], batch.ids[b, at])
    return ce, used


@pytest.mark.parametrize("chunk", [3, 4096])
def test_decayed_loss_by_hand(chunk: int) -> None:
    objective = objective_of(build_drafter(1), chunk_rows=chunk, gamma=2.0)
    batch = random_batch(objective.drafter)
    anchors = torch.tensor([[4, 9, 18], [7, 12, -1]])
    loss, sums = objective(batch, anchors)
    ce, used = plain_loss(objective, batch, anchors)
    weight = used * torch.exp(-torch.arange(3) / 2.0)
    torch.testing.assert_close(loss, (ce * weight).sum() / weight.sum())
    assert sums["slots"].tolist() == used.sum((0, 1)).tolist()
    assert int(sums["blocks"]) == 5


def test_dpace_weights_by_hand() -> None:
    objective = objective_of(build_drafter(1), weighting="dpace")
    batch = random_batch(objective.drafter)
    anchors = torch.tensor([[4, 9, 18], [7, 12, -1]])
    loss, _ = objective(batch, anchors)
    ce, used = plain_loss(objective, batch, anchors)
    confidence = torch.where(used, 0.5 * torch.exp(-ce) + 0.5, torch.ones(())).detach()
    weight = torch.zeros_like(ce)
    for i in range(3):
        for m in range(i, 3):
            weight[..., i] += used[..., m] * confidence[..., : m + 1].prod(-1)
    weight *= used
    torch.testing.assert_close(loss, (ce * weight).sum() / weight.sum())


def test_distillation_reaches_zero_gradient_at_the_teacher() -> None:
    """With the drafter's own logits as the teacher's, the distillation loss is its entropy and has no gradient."""
    drafter = build_drafter(1)
    objective = objective_of(drafter, distillation=1.0)
    batch, anchors = random_batch(drafter), torch.tensor([[4], [7]])
    with torch.no_grad():
        hidden = block_hidden(drafter, objective.table, batch, anchors)
        own = drafter.logits(hidden, objective.head)
    teacher = torch.zeros(*batch.ids.shape, VOCAB)
    for b, anchor in enumerate((4, 7)):
        teacher[b, anchor : anchor + 3] = own[b, 0, 1:]
    loss, _ = objective(batch._replace(logits=teacher), anchors)
    loss.backward()
    p = torch.softmax(own[:, :, 1:], -1)
    entropy = -(p * p.log()).sum(-1)
    weight = objective.decay.expand_as(entropy)
    torch.testing.assert_close(loss, (entropy * weight).sum() / weight.sum())
    assert max(float(q.grad.abs().max()) for q in drafter.parameters() if q.grad is not None) < 1e-6


@pytest.mark.parametrize("missing", ["drop", "inject"])
def test_selector_loss_by_hand(missing: str) -> None:
    drafter = build_drafter(2, selector_top_k=40)
    objective = objective_of(drafter, selector_weight=1.0, selector_share=1.0, missing_gold=missing)
    batch, anchors = random_batch(drafter), torch.tensor([[4, 9], [7, 12]])
    loss, sums = objective(batch, anchors)
    unary_only = objective_of(drafter, selector_weight=0.0)(batch, anchors)[0]
    selector, hidden = drafter.candidate_selector, block_hidden(drafter, objective.table, batch, anchors)[:, :, 1:]
    logits, (_, used) = drafter.logits(hidden, objective.head), plain_loss(objective, batch, anchors)
    total, weight_sum, kept = torch.zeros(()), torch.zeros(()), 0
    for b, a, i in used.nonzero().tolist():
        at = int(anchors[b, a]) + i + 1
        gold, before = int(batch.ids[b, at]), int(batch.ids[b, at - 1])
        candidates = logits[b, a, i].topk(40).indices.tolist()
        if gold not in candidates:
            if missing == "drop":
                continue
            candidates[-1] = gold
        left = selector.predecessor_codebook[before] * selector.hidden_projection(hidden[b, a, i])
        edges = torch.stack([logits[b, a, i, c] + left @ selector.successor_codebook[c] for c in candidates])
        kept += 1
        total = total + objective.decay[i] * F.cross_entropy(edges[None], torch.tensor([candidates.index(gold)]))
        weight_sum = weight_sum + objective.decay[i]
    torch.testing.assert_close(loss - unary_only, total / weight_sum)
    assert int(sums["selector_slots"].sum()) == int(used.sum())
    assert int(sums["recall"].sum()) == kept
    assert 0 < kept < int(used.sum()) or missing == "inject"


def test_features_cached_and_padded_equal_fresh_ones() -> None:
    target = Target(TINY["qwen3"](num_hidden_layers=6), [0, 2])
    records = [(torch.arange(5, 5 + n), 2) for n in (9, 17, 4)]
    fresh, cached = FeatureSource(target), FeatureSource(target, cache_gb=0.001)
    want = fresh.batch([0, 1, 2], pad_records(records, 8))
    assert want.ids.shape == (3, 24)
    for _ in range(2):
        got = cached.batch([0, 1, 2], pad_records(records, 8))
        for row, (ids, _) in enumerate(records):
            torch.testing.assert_close(
                got.features[row, : len(ids)], want.features[row, : len(ids)], rtol=1e-4, atol=1e-4
            )
            alone = target.prefill(ids[None], target.new_cache(1, 32)).features
            torch.testing.assert_close(got.features[row, : len(ids)], alone[0], rtol=1e-4, atol=1e-4)
    assert cached.tokens == 30
    assert want.supervised[0].tolist() == [False] * 2 + [True] * 7 + [False] * 15


def test_new_drafters() -> None:
    assert spread_layers(30, 5) == (1, 8, 14, 20, 27)
    target = Target(TINY["llama"](num_hidden_layers=6))
    second = initialise(Drafter(drafter_config(target, 96, num_layers=2, selector_rank=8, selector_top_k=4)))
    first = initialise(Drafter(drafter_config(target, 96, version=1, num_layers=2)), seed=5)
    warm_start(second, first)
    model = target.model
    blocks = [
        Speculator(model, d.eval()).generate([3, 4, 5, 6], 24, return_proposals=True).stats.proposals
        for d in (first, second)
    ]
    assert blocks[0] == blocks[1]
    with pytest.raises(ValueError, match=r"warm_start: target_layer_ids must be that of .*, got \(1, 3\)"):
        warm_start(second, Drafter(drafter_config(target, 96, version=1, num_layers=3)))
    with pytest.raises(ValueError, match=r"warm_start: mask_token_id must be that of .* 95, got 96"):
        warm_start(second, Drafter(drafter_config(target, 95, version=1, num_layers=2)))
    with pytest.raises(ValueError, match=r"backbones must be equal, got different \['layers.0.down_proj"):
        warm_start(second, Drafter(drafter_config(target, 96, version=1, num_layers=2, intermediate_size=24)))


def records_of(model: torch.nn.Module, count: int = 24) -> list[tuple[torch.Tensor, int]]:
    spec = Speculator(model, None)
    prompts = torch.randint(0, VOCAB - 1, (count, 5), generator=torch.Generator().manual_seed(3))
    return [(torch.cat([p, torch.tensor(spec.generate(p, 24).token_ids)]), 5) for p in prompts]


def trained(out: Path, model: torch.nn.Module, records: Any, steps: int, **options: Any) -> Trainer:
    settings = {"batch_size": 4, "max_steps": 6, "epochs": 9, "precision": "no", "lr": 1e-2, "log_every": 2} | options
    drafter = build_drafter(2, block_size=4)
    trainer = Trainer(
        drafter,
        Target(model, drafter.config.target_layer_ids),
        records,
        TrainConfig(out=out, save_every=2, **settings),
        ObjectiveConfig(num_anchors=8, selector_share=1.0),
    )
    if steps < trainer.total:
        step = trainer._train_step

        def stop(indices: list[int]) -> Any:
            if trainer.step == steps:
                raise KeyboardInterrupt
            return step(indices)

        trainer._train_step = stop  # type: ignore[method-assign]
    return trainer


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_resumed_run_ends_bit_for_bit_where_an_uninterrupted_one_does(tmp_path: Path, accumulation: int) -> None:
    pytest.importorskip("accelerate")
    pytest.importorskip("matplotlib")
    model = TINY["qwen3"](num_hidden_layers=6)
    records = records_of(model)
    whole = trained(tmp_path / "whole", model, records, 99, accumulation=accumulation).fit(progress=False)
    with pytest.raises(KeyboardInterrupt):
        trained(tmp_path / "halves", model, records, 5, accumulation=accumulation).fit(progress=False)
    second = trained(tmp_path / "halves", model, records, 99, accumulation=accumulation)
    halves = second.fit(progress=False)
    assert second.history[0]["step"] == 2
    assert second.history[-1]["step"] == 6
    for name, tensor in whole.state_dict().items():
        assert torch.equal(tensor, halves.state_dict()[name]), name
    assert (tmp_path / "halves" / "curves.png").stat().st_size > 10_000
    rows = [json.loads(line) for line in (tmp_path / "whole" / "log.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [2, 4, 6]
    loaded = Drafter.from_pretrained(tmp_path / "whole")
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), whole.parameters(), strict=True))
    with pytest.raises(ValueError, match=r"other settings .*lr"):
        trained(tmp_path / "halves", model, records, 99, accumulation=accumulation, lr=1e-3).fit(progress=False)


def test_a_run_goes_on_only_with_what_it_began_with(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    pytest.importorskip("matplotlib")
    model = TINY["qwen3"](num_hidden_layers=6)
    records = records_of(model)
    with pytest.raises(KeyboardInterrupt):
        trained(tmp_path, model, records, 3).fit(progress=False)
    other = TINY["qwen3"](num_hidden_layers=6, seed=1)
    for changed, name in (
        (trained(tmp_path, other, records, 99), "target"),
        (trained(tmp_path, model, records_of(other), 99), "data"),
    ):
        with pytest.raises(ValueError, match=f"made with other settings .*{name}"):
            changed.fit(progress=False)
    trainer = trained(tmp_path, model, records, 99)
    trainer._identity["drafter"] |= {"sliding_window": 5}
    with pytest.raises(ValueError, match=r"made with other settings .*drafter"):
        trainer.fit(progress=False)
    trained(tmp_path, model, records, 99).fit(progress=False)
    finished = tmp_path / "finished"
    trained(finished, model, records, 99, max_steps=1).fit(progress=False)
    with pytest.raises(ValueError, match=r"out must be a new folder or one with checkpoints, got .* with "):
        trained(finished, model, records, 99, max_steps=1).fit(progress=False)


def test_clipping_and_accumulation_act(tmp_path: Path) -> None:
    """Micro-steps add up to the mean of their losses, and no gradient is longer than the clip allows."""
    pytest.importorskip("accelerate")
    model = TINY["qwen3"](num_hidden_layers=6)
    trainer = trained(tmp_path, model, records_of(model), 99, clip=1e-3, accumulation=2, batch_size=2)
    losses: list[float] = []
    added: list[float] = []
    norms: list[float] = []
    module, backward, clip = trainer.module, trainer.accelerator.backward, trainer.accelerator.clip_grad_norm_

    def forward(*args: Any) -> Any:
        loss, sums = module(*args)
        losses.append(float(loss.detach()))
        return loss, sums

    def clip_and_look(*args: Any) -> Any:
        found = clip(*args)
        gradients = [p.grad.flatten() for p in trainer.drafter.parameters() if p.grad is not None]
        norms.append(float(torch.cat(gradients).norm()))
        return found

    trainer.module = forward
    trainer.accelerator.backward = lambda loss: (added.append(float(loss.detach())), backward(loss))
    trainer.accelerator.clip_grad_norm_ = clip_and_look
    trainer._train_step(list(range(4)))
    assert added == [pytest.approx(x / 2) for x in losses]
    assert len(losses) == 2
    assert losses[0] != losses[1]
    assert norms == [pytest.approx(1e-3, rel=1e-3)]


def test_every_process_and_micro_step_has_its_own_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("accelerate")
    model = TINY["qwen3"](num_hidden_layers=6)
    trainer = trained(tmp_path, model, records_of(model), 99, accumulation=2, batch_size=2)
    seen: list[tuple[list[int], list[list[int]]]] = []

    def look(batch: Batch, anchors: torch.Tensor) -> Any:
        seen.append((keys[-1], anchors.tolist()))
        return torch.zeros((), requires_grad=True), {}

    keys: list[list[int]] = []
    batch = trainer.source.batch
    monkeypatch.setattr(trainer.source, "batch", lambda k, padded: keys.append(list(k)) or batch(k, padded))
    monkeypatch.setattr(trainer, "module", look)
    trainer.world = 2
    for rank in (0, 1):
        trainer.rank = rank
        trainer._train_step([3] * 8)  # one record everywhere: only the draws can differ
        trainer._train_step(list(range(8)))
    assert [k for k, _ in seen[2:4] + seen[6:8]] == [[0, 1], [4, 5], [2, 3], [6, 7]]
    same_record = [str(anchors) for k, anchors in seen if k == [3, 3]]
    assert len(set(same_record)) == 4


def test_padding_stays_inside_a_table_of_positions() -> None:
    target = Target(TINY["gpt2"](num_hidden_layers=4, max_position_embeddings=40), [0])
    records = [(torch.arange(5, 35), 4)]
    padded = pad_records(records, limit=target.max_length)
    assert padded.ids.shape == (1, 40)
    assert FeatureSource(target).batch([0], padded).features.shape[:2] == (1, 40)


def test_plan_uses_every_record_once_and_changes_by_epoch() -> None:
    lengths = [5 + i % 7 for i in range(64)]
    first, again, other = plan(lengths, 8, 0, 1), plan(lengths, 8, 0, 1), plan(lengths, 8, 1, 1)
    assert first == again != other
    assert sorted(functools.reduce(operator.iadd, first, [])) == list(range(64))
    assert max(max(lengths[i] for i in b) - min(lengths[i] for i in b) for b in first) <= 2


@pytest.mark.parametrize("version", [1, 2])
def test_replay_finds_the_rounds_of_the_loop(version: int) -> None:
    model, drafter = fitted(version)
    spec, target = Speculator(model, drafter), Target(model, drafter.config.target_layer_ids)
    for prompt in fitted_prompts()[:3]:
        out = spec.generate(prompt, 40)
        text = torch.cat([prompt, torch.tensor(out.token_ids)])
        assert replay(drafter, target, [(text, len(prompt))], anchors_at_once=7) == [out.stats.num_accepted]
    assert acceptance_length([3, 1, 2]) == 3.0


@pytest.mark.slow
def test_sampled_rounds_are_those_of_the_loop_in_law() -> None:
    """Mean rounds of 150 sampled requests against the expectation over 150 plain texts: within 4 standard errors."""
    temperature = 0.7
    model, drafter = fitted(2)
    target, prompt, tokens = Target(model, drafter.config.target_layer_ids), fitted_prompts()[0], 8
    spec, plain = Speculator(target, drafter), Speculator(model, None)
    options: dict[str, Any] = {"temperature": temperature, "stop_token_ids": []}
    looped = [float(spec.generate(prompt, tokens, seed=i, **options).stats.rounds) for i in range(150)]
    texts = [plain.generate(prompt, tokens, seed=1000 + i, **options).token_ids for i in range(150)]
    records = [(torch.cat([prompt, torch.tensor(text)]), len(prompt)) for text in texts]
    want, got = torch.tensor(looped), torch.tensor(sampled_rounds(drafter, target, records, temperature))
    error = (want.var() / 150 + got.var() / 150).sqrt()
    assert abs(want.mean() - got.mean()) < 4 * error
    assert want.mean() + 4 * error < tokens - 1  # so that drafts that are never kept would be seen


def test_input_conditioned_ablation_trains_as_it_drafts() -> None:
    drafter = InputConditionedDrafter(build_drafter(2).config)
    drafter.load_state_dict(build_drafter(2).state_dict())
    drafter.eval()
    batch, table = random_batch(drafter), torch.randn(VOCAB, HIDDEN) * 0.4
    with torch.no_grad():
        got = block_hidden(drafter, table, batch, torch.tensor([[9, 12], [8, 11]]))
        cache = drafter.new_cache(2, 30)
        drafter.append_context(batch.features[:, :6], cache, torch.tensor([6, 5]))
        drafter.append_context(batch.features[:, 6:9], cache, torch.tensor([3, 3]))
        cache.newest = drafter.fuse(torch.stack([batch.features[0, 8], batch.features[1, 7]]))
        want = drafter.hidden(batch.ids[[0, 1], [9, 8]], cache, table, 4)
    torch.testing.assert_close(got[:, 0], want, rtol=0, atol=3e-5)  # products of other shapes: 1.1e-5 was seen


def test_input_conditioned_ablation_is_never_taken_for_a_drafter(tmp_path: Path) -> None:
    drafter = InputConditionedDrafter(build_drafter(2).config)
    drafter.load_state_dict(build_drafter(2).state_dict())
    drafter.save_pretrained(tmp_path)
    loaded = InputConditionedDrafter.from_pretrained(tmp_path)
    assert loaded.config == drafter.config
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), drafter.parameters(), strict=True))
    with pytest.raises(FileNotFoundError):
        Drafter.from_pretrained(tmp_path)


def test_bootstrap_covers_the_mean() -> None:
    torch.manual_seed(0)
    inside = 0
    for _ in range(200):
        low, high = bootstrap((torch.randn(40) + 2).tolist(), 400)
        inside += low <= 2 <= high
    assert 180 <= inside <= 198


def test_settings_are_checked() -> None:
    with pytest.raises(ValueError, match="distillation must be 0 to 1, got 2"):
        ObjectiveConfig(distillation=2)
    for wrong in ({"lr": math.nan}, {"clip": math.inf}, {"warmup": 1.0}, {"max_steps": -1}, {"time_limit": -5.0}):
        with pytest.raises(ValueError, match=f"training: {next(iter(wrong))} must be"):
            TrainConfig(out=Path("x"), **wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="gamma must be above 0, got 0"):
        ObjectiveConfig(gamma=0)
    with pytest.raises(ValueError, match="precision must be 'bf16' or 'no', got 'fp8'"):
        TrainConfig(out=Path("x"), precision="fp8")


def test_deepcopy_of_an_objective_keeps_the_target_shared() -> None:
    objective = objective_of(build_drafter(1))
    assert {n.split(".")[0] for n, _ in objective.named_parameters()} == {"drafter"}
    assert copy.deepcopy(objective.drafter).config == objective.drafter.config
