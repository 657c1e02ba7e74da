"""Trees of drafts: the target's own text over all families and any shape, sampling by seed, options and refusals."""

from __future__ import annotations

import dataclasses
import functools
import random
from typing import Any

import pytest
import torch
from greedy_texts import RECURRENT, chain, greedy, prompt_of, target_of
from grids import slow
from hypothesis import given, settings
from hypothesis import strategies as st
from pairs import VOCAB, fitted, fitted_prompts
from tiny_models import TINY
from tree_cases import Fill, filled, mixed, random_parents, right, wrong

from pydflash import Speculator, Target
from pydflash.rounds import timing
from pydflash.rounds.paths import Block, Paths, best_size, lattice_nodes, typical_tokens
from pydflash.tree import Tree, accepted_slots, tree_of


def decode(target: Target, ids: torch.Tensor, text: list[int], fill: Fill, seed: int) -> tuple[list[int], int]:
    """The loop by hand over random trees. Returns the tokens and how many drafts were kept."""
    draw, cache, kept_in_all = random.Random(seed), target.new_cache(1, 32), 0
    new = [int(target.prefill(ids, cache).logits[0, -1].argmax())]
    while len(new) < len(text):
        parents = random_parents(draw, draw.randrange(1, 12))
        tokens = filled(draw, parents, new[-1], text, len(new), fill)
        best = target.verify(torch.tensor([tokens]), cache, tree_of(parents)).logits[0].argmax(-1).tolist()
        path = [0]
        while children := [i for i, p in enumerate(parents) if p == path[-1] and tokens[i] == best[path[-1]]]:
            path.append(children[0])
        index = torch.tensor([[*path, *[-1] * (len(tokens) - len(path))]], dtype=torch.int32)
        target.commit(cache, index, torch.tensor([len(path) - 1], dtype=torch.int32))
        new += [*(tokens[i] for i in path[1:]), best[path[-1]]]
        kept_in_all += len(path) - 1
    assert cache.length == ids.shape[1] + len(new) - 1
    return new[: len(text)], kept_in_all


@pytest.mark.parametrize("fill", [mixed, *map(slow, (right, wrong))])
@pytest.mark.parametrize("name", TINY)
def test_greedy_text_under_any_tree(name: str, fill: Fill) -> None:
    target = target_of(name)
    if name in (*RECURRENT, *SLOTS_COUNT):
        with pytest.raises(ValueError, match=f"{type(target.model).__name__} must have attention that takes a tree"):
            target.check_trees()
        return
    target.check_trees()
    text = greedy(name, None, 9)
    got, kept = decode(target, prompt_of(9), text, fill, 7)
    assert got == text
    assert (kept == 0) == (fill is wrong)
    if fill is right:
        assert kept > 20


def logits_of(target: Target, ids: list[int]) -> torch.Tensor:
    return target.verify(torch.tensor([ids]), target.new_cache(1, len(ids))).logits[0]


SLOTS_COUNT = ("llama4",)  # attn_temperature_tuning in layers without RoPE counts slots of the block


@functools.cache
def windowed(name: str) -> Target:
    return Target(TINY["llama4"](attn_temperature_tuning=False) if name == "llama4" else TINY[name](), (2, 0))


@pytest.mark.parametrize("name", [slow("gemma2"), "llama4", "mistral"])
@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 10**6), nodes=st.integers(1, 40), context=st.integers(1, 30))
def test_every_slot_sees_its_own_path_only(name: str, seed: int, nodes: int, context: int) -> None:
    """Windows of 8 and chunks are crossed at every offset; rows equal plain forwards over each slot's path."""
    draw, target = random.Random(seed), windowed(name)
    target.check_trees()
    parents = random_parents(draw, nodes, 12)
    before = [draw.randrange(VOCAB) for _ in range(context)]
    tokens = [draw.randrange(VOCAB) for _ in parents]
    cache = target.new_cache(1, 8)
    target.prefill(torch.tensor([before]), cache)
    out = target.verify(torch.tensor([tokens]), cache, tree_of(parents))
    leaf, path = draw.randrange(len(parents)), []
    while leaf >= 0:
        path.insert(0, leaf)
        leaf = parents[leaf]
    want = logits_of(target, [*before, *(tokens[i] for i in path)])[len(before) :]
    torch.testing.assert_close(out.logits[0, path], want, rtol=1e-4, atol=1e-4)
    index = torch.tensor([[*path, *[-1] * (len(tokens) - len(path))]])
    target.commit(cache, index, torch.tensor([len(path) - 1]))
    after = target.verify(torch.tensor([[5, 6]]), cache).logits[0]
    want = logits_of(target, [*before, *(tokens[i] for i in path), 5, 6])[-2:]
    torch.testing.assert_close(after, want, rtol=1e-4, atol=1e-4)


class AnyTrees:
    """In the place of `Paths`: a tree of any shape, the drafter's candidates at some nodes and noise at others."""

    path, rows, auto = "tree", 64, False

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)

    def block(self, ops: Any, anchors: torch.Tensor, proposal: Any, slots: int, temperature: torch.Tensor) -> Block:
        parents = random_parents(self.draw, self.draw.randrange(1, 30), slots)
        tree = tree_of(parents)
        tokens = [int(anchors)]
        for slot, parent in enumerate(parents[1:], 1):
            choices = [*proposal.candidates[0, int(tree.depths[0, slot]) - 1].tolist(), self.draw.randrange(VOCAB)]
            taken = {tokens[i] for i in range(1, slot) if parents[i] == parent}
            left = [x for x in choices if x not in taken] or [x for x in range(VOCAB) if x not in taken]
            tokens.append(self.draw.choice(left[:4]))
        return Block(torch.tensor([tokens]), tree)


@pytest.mark.grid(3)
@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_text_for_a_seed_is_that_of_plain_decoding(version: int, temperature: float) -> None:
    model, drafter = fitted(version)
    plain = Speculator(model, None)
    options: dict[str, Any] = {"temperature": temperature, "seed": 3, "top_k": 40, "top_p": 0.98} if temperature else {}
    make = functools.partial(Speculator, model, drafter, path="tree", draft_sampling=False)
    trees = [make(num_nodes=n) for n in (1, 5, 12, 63)]
    trees.append(Speculator(model, drafter, path="viterbi"))
    for seed in range(3):
        trees.append(make(num_nodes=1))
        loop = trees[-1].loop
        loop.parts = dataclasses.replace(loop.parts, paths=AnyTrees(seed))
    texts = [plain.generate(prompt, 30, **options).token_ids for prompt in fitted_prompts()[:4]]
    means = []
    for spec in trees:
        accepted: list[int] = []
        for prompt, text in zip(fitted_prompts()[:4], texts, strict=True):
            out = spec.generate(prompt, 30, **options)
            assert out.token_ids == text
            accepted += out.stats.num_accepted
        means.append(sum(accepted) / len(accepted))
    assert means[0] < means[1] < means[3]  # more nodes, more drafts kept
    assert min(means) > 0


@pytest.mark.parametrize("nodes", [2, 9, slow(40)])
def test_sampled_drafts_are_the_trunk_of_the_tree(nodes: int) -> None:
    model, drafter = fitted(2)
    spec = Speculator(model, drafter, path="tree", num_nodes=nodes)
    walk = Speculator(model, drafter)
    assert spec.draft_sampling
    kept = {"walk": 0.0, "tree": 0.0}
    for seed in range(30):
        options: dict[str, Any] = {"temperature": 0.8, "seed": seed, "stop_token_ids": [], "return_proposals": True}
        one, other = (s.generate(fitted_prompts()[seed % 4], 20, **options).stats for s in (walk, spec))
        kept["walk"] += sum(one.num_accepted) / one.rounds
        kept["tree"] += sum(other.num_accepted) / other.rounds
        assert one.proposals is not None
        assert other.proposals is not None
        tokens, parents = other.proposals[0]
        trunk = min(3, nodes)
        assert tokens[: trunk + 1] == one.proposals[0][: trunk + 1]  # the same draws in the same place
        assert parents[: trunk + 1] == [-1, *range(trunk)]
        assert len(tokens) == nodes + 1
    if nodes > 3:
        assert kept["tree"] > 1.1 * kept["walk"]


def test_statistics_and_proposals_of_a_tree() -> None:
    model, drafter = fitted(2)
    out = Speculator(model, drafter, path="tree", num_nodes=12).generate(
        fitted_prompts()[0], 30, stop_token_ids=[], return_proposals=True
    )
    stats = out.stats
    assert set(stats.num_verified) == {12}
    assert stats.proposals is not None
    assert set(stats.num_drafted[:-1]) <= {1, 2, 3}
    assert sum(stats.num_accepted) + stats.rounds == 29
    text = [*fitted_prompts()[0].tolist(), *out.token_ids]
    at = len(fitted_prompts()[0])
    for (tokens, parents), kept in zip(stats.proposals, stats.num_accepted, strict=True):
        assert tokens[0] == text[at]
        assert parents[0] == -1
        paths = {0: ()}
        for slot in range(1, 13):
            paths[slot] = (*paths[parents[slot]], tokens[slot])
        assert tuple(text[at + 1 : at + 1 + kept]) in paths.values()
        assert kept == 3 or tuple(text[at + 1 : at + 2 + kept]) not in paths.values() or at + 1 + kept == len(text) - 1
        at += kept + 1


@pytest.mark.parametrize("version", [1, 2])
def test_every_round_drafts_from_the_committed_context(version: int) -> None:
    """The tree of each round is the one of a fresh drafter that was told the features of the text alone."""
    model, drafter = fitted(version)
    target = Target(model, drafter.config.target_layer_ids)
    prompt = fitted_prompts()[2]
    out = Speculator(target, drafter, path="tree", num_nodes=14).generate(
        prompt, 30, stop_token_ids=[], return_proposals=True
    )
    text = torch.cat([prompt, torch.tensor(out.token_ids)])
    assert out.stats.proposals is not None
    assert max(out.stats.num_accepted) >= 1
    at = len(prompt)
    for (tokens, parents), kept in zip(out.stats.proposals, out.stats.num_accepted, strict=True):
        features = target.prefill(text[None, :at], target.new_cache(1, 64)).features
        cache = drafter.new_cache(1, 64)
        with torch.no_grad():
            drafter.append_context(features, cache)
            found = drafter.propose(
                text[at : at + 1],
                cache,
                embed=target.embed_weight,
                head=target.head,
                block_size=4,
                node_temperature=1.0,
            )
        want = drafter.ops.path_tree(text[at : at + 1], found.candidates, found.scores, 14, found.log_normalizers)
        assert (tokens, parents) == (want[0][0].tolist(), want[1][0].tolist())
        at += kept + 1


def test_logits_processors_see_the_path_of_their_row() -> None:
    """A processor that forbids every token seen before gives the text of plain decoding under it."""

    def never_again(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.index_fill(1, ids[0], -torch.inf)

    model, drafter = fitted(2)
    want = Speculator(model, None).generate([3, 4, 5], 20, logits_processor=[never_again])
    got = Speculator(model, drafter, path="tree", num_nodes=20).generate([3, 4, 5], 20, logits_processor=[never_again])
    assert got.token_ids == want.token_ids


@pytest.mark.grid(2)
@pytest.mark.parametrize("room", range(1, 8))
def test_the_context_limit_cuts_the_tree(room: int) -> None:
    model = TINY["qwen3"](num_hidden_layers=6, max_position_embeddings=24)
    drafter = fitted(2)[1]
    prompt = fitted_prompts()[0].tolist() * 9
    prompt = prompt[: 24 - room]
    want = Speculator(model, None).generate(prompt, None, stop_token_ids=[])
    got = Speculator(model, drafter, path="tree", num_nodes=40).generate(prompt, None, stop_token_ids=[])
    assert got.token_ids == want.token_ids
    assert len(got.token_ids) == room


def test_auto_takes_the_size_with_most_tokens_per_second() -> None:
    paths = Paths("tree", "auto", 7, 16)
    assert paths.num_nodes == 63
    sure = torch.tensor([0.0, *[-0.05] * 7, *[-20.0] * 56])
    flat = torch.tensor([0.0, *[-2.5] * 63])
    paths.settle({7: 1.0, 15: 1.1, 31: 1.3, 63: 2.0}, by_round=True)
    assert paths.description == "7, 15, 31, 63 nodes, chosen in every round"
    assert paths._size_of(sure) == 7  # nothing to gain behind the seventh
    assert paths._size_of(flat) == 63  # 1 + 63 * 0.08 tokens at twice the time
    paths.settle({7: 1.0, 15: 2.0, 31: 4.0, 63: 8.0}, by_round=True)
    assert paths._size_of(flat) == 7
    assert paths._size_of(flat[:6]) == 5  # near the context limit the tree itself is smaller


def test_auto_chooses_once_by_the_same_rule_where_rounds_have_one_shape() -> None:
    assert best_size([1.0, 1.26, 1.36], {7: 1.0, 15: 1.2, 31: 1.4}) == 15
    assert [typical_tokens(n) for n in (3, 14, 15, 20, 31, 63)] == [1.0, 1.0, 1.26, 1.26, 1.36, 1.44]
    for seconds, size in (({7: 1.0, 15: 1.2, 31: 1.4, 63: 1.6}, 15), ({7: 1.0, 15: 1.3, 31: 1.4, 63: 1.5}, 7)):
        paths = Paths("tree", "auto", 7, 16)
        paths.settle(seconds, by_round=False)
        assert (paths.num_nodes, paths.by_round) == (size, False)
        assert paths.description == f"{size} nodes, chosen once"
    assert Paths("tree", 5, 7, 16).description == "5 nodes"
    assert Paths("walk", None, 7, 16).description is None


def test_auto_is_the_default_and_exact() -> None:
    model, drafter = fitted(2)
    spec = Speculator(model, drafter, path="tree")
    assert sorted(spec.loop.parts.paths.seconds) == [3, 15, 31, 63]
    assert all(0 < seconds < 10 for seconds in spec.loop.parts.paths.seconds.values())
    out = spec.generate(fitted_prompts()[1], 30)
    assert out.token_ids == Speculator(model, None).generate(fitted_prompts()[1], 30).token_ids
    assert set(out.stats.num_verified) <= {3, 15, 31, 63}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"path": "beam"}, "path must be one of 'walk', 'viterbi', 'tree', got 'beam'"),
        ({"num_nodes": 7}, "num_nodes must be None where path is 'walk', got 7"),
        ({"path": "viterbi", "num_nodes": 7}, "num_nodes must be None where path is 'viterbi', got 7"),
        ({"path": "tree", "num_nodes": 0}, r"num_nodes must be 'auto' or 1 to 63 \(3 slots of 4 candidates\), got 0"),
        ({"path": "tree", "num_nodes": 64}, "num_nodes must be 'auto' or 1 to 63 .* got 64"),
        ({"path": "tree", "num_nodes": True}, "num_nodes must be 'auto' or 1 to 63 .* got True"),
        ({"path": "tree", "num_nodes": 3, "block_size": 1}, "num_nodes must be 'auto' or 1 to 0"),
        ({"path": "viterbi", "draft_sampling": True}, "draft_sampling must be off where path is 'viterbi', got True"),
        ({"draft_sampling": "x"}, "draft_sampling must be True, False or None, got 'x'"),
    ],
)
def test_what_does_not_go_together(options: dict[str, Any], message: str) -> None:
    model, drafter = fitted(2)
    with pytest.raises(ValueError, match=message):
        Speculator(model, drafter, **options)
    if "path" in options and options["path"] != "beam":
        with pytest.raises(ValueError, match=r"where drafter is None|must be None|must be .auto."):
            Speculator(model, None, **options)


def test_what_the_trial_cannot_see_is_refused() -> None:
    with pytest.raises(ValueError, match="depends on the place in the block"):
        Target(TINY["llama4"]()).check_trees()
    with pytest.raises(ValueError, match="a context of 12 positions, too short to try a tree"):
        Target(TINY["qwen3"](max_position_embeddings=12)).check_trees()
    target = Target(TINY["qwen3"]())
    cache = target.new_cache(1, 8)
    with pytest.raises(ValueError, match=r"verify: tree must come after check_trees\(\) has passed"):
        target.verify(torch.tensor([[1, 2]]), cache, tree_of([-1, 0]))


def test_measured_seconds_hold_the_drafter_and_leave_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    paths, target = Paths("tree", "auto", 3, 4), target_of("qwen3")
    target.check_trees()
    caches = []
    monkeypatch.setattr(target, "new_cache", lambda *a: caches.append(Target.new_cache(target, *a)) or caches[-1])
    monkeypatch.setattr(timing, "_draft_seconds", lambda *a: 5.0)
    seconds = timing.host_seconds(target, fitted(2)[1], paths, 4)
    assert sorted(seconds) == paths.sizes()
    assert all(5 < spent < 15 for spent in seconds.values())
    assert caches[0].length == 64  # what was verified is not kept


def test_lattices_hold_so_many_nodes() -> None:
    assert [lattice_nodes(s, k) for s, k in ((1, 16), (2, 2), (3, 2), (7, 1), (0, 16), (2, 16))] == [
        16,
        6,
        14,
        7,
        0,
        63,
    ]


def test_commit_takes_paths_of_trees_and_chains_of_chains() -> None:
    tree = torch.tensor([[0, 2, 5, -1, -1, -1]]), torch.tensor([2])
    assert accepted_slots(*tree, is_tree=True) == [0, 2, 5]
    for index, accepted, is_tree in (
        (tree[0], tree[1], False),
        (torch.tensor([[0, 5, 2, -1, -1, -1]]), torch.tensor([2]), True),
        (torch.tensor([[1, 2, 5, -1, -1, -1]]), torch.tensor([2]), True),
        (torch.tensor([[0, 2, 5, 4, -1, -1]]), torch.tensor([2]), True),
        (torch.tensor([[0, 2]]), torch.tensor([2]), True),
    ):
        with pytest.raises(ValueError, match="commit: index must be"):
            accepted_slots(index, accepted, is_tree)
    assert accepted_slots(*chain(3, 5), is_tree=False) == [0, 1, 2]


def test_trees_are_built_from_parents() -> None:
    tree = tree_of([-1, 0, 0, 1, 3])
    assert isinstance(tree, Tree)
    assert tree.depths.tolist() == [[0, 1, 1, 2, 3]]
    assert tree.visibility.tolist() == [[0b1, 0b11, 0b101, 0b1011, 0b11011]]
    assert tree_of([-1, *range(63)]).visibility[0, 63] == -1
    with pytest.raises(ValueError, match="parent of slot 2 must be one of the slots before it, got 2"):
        tree_of([-1, 0, 2])
    with pytest.raises(ValueError, match="at most 64 slots, got 65"):
        tree_of([-1, *range(64)])
