"""Targets in place, fused and own: text, logits and features of each family, and what is refused or left alone."""

from __future__ import annotations

import copy
import random
import re
from typing import Any

import pytest
import tiny_models
import torch
from device_pairs import moved
from greedy_texts import EXACT_RECURRENT, RECURRENT, greedy, model_of, prompt_of
from matching import assert_matches
from target_cases import CASES, EITHER, FUSED, OLDER, ON_CPU, OWN, REFUSED, UNFIT
from tiny_models import TINY
from tree_cases import Fill, filled, mixed, random_parents, right, wrong

from pydflash import Speculator, Target
from pydflash.decoder.adjacent import joined
from pydflash.ops import backends
from pydflash.target import own as target_own
from pydflash.target.fused import FusedTarget, in_place
from pydflash.target.layers import Recognised
from pydflash.target.own import OwnTarget
from pydflash.tree import Tree, tree_of

TAPS = (2, 0)
COUNT = 16
NEAR = 2e-5  # of the norm
LENGTHS = (3, 19)  # both cross the window of 8 while they grow; the second begins behind it


def fast_of(model: Any, device: torch.device, dtype: torch.dtype = torch.float32) -> OwnTarget:
    return in_place(Target(moved(model, device).to(dtype), TAPS))


def form_of(fast: OwnTarget) -> str:
    fused = isinstance(fast, FusedTarget)
    assert fused == (fast.form == "fused layers")
    return "fused" if fused else "own"


def decode(fast: OwnTarget, prompts: list[torch.Tensor], texts: list[list[int]], fill: Fill) -> tuple[Any, Any, int]:
    """Rounds by hand, all rows at once, each under trees of its own. Returns texts, features and kept drafts."""
    draw, cache, rows = random.Random(0), fast.new_cache(len(prompts), 160), range(len(prompts))
    first = [fast.prefill(ids.to(fast.device), cache, row) for row, ids in enumerate(prompts)]
    new = [[int(out.logits[0, -1].argmax())] for out in first]
    features = [[out.features[0]] for out in first]
    kept = 0
    while any(len(a) < len(b) for a, b in zip(new, texts, strict=True)):
        nodes = draw.randrange(1, 12)
        parents = [random_parents(draw, nodes) for _ in rows]
        tokens = [filled(draw, parents[i], new[i][-1], texts[i], len(new[i]), fill) for i in rows]
        trees = [tree_of(p, fast.device) for p in parents]
        tree = Tree(*(torch.cat(parts) for parts in zip(*trees, strict=True)))
        out = fast.verify(torch.tensor(tokens, device=fast.device), cache, tree)
        index = torch.full((len(prompts), nodes + 1), -1)
        for i, best in enumerate(out.logits.argmax(-1).tolist()):
            path = [0]
            while after := [s for s, p in enumerate(parents[i]) if p == path[-1] and tokens[i][s] == best[path[-1]]]:
                path.append(after[0])
            index[i, : len(path)] = torch.tensor(path)
            kept += (len(path) - 1) * (len(new[i]) < len(texts[i]))
            new[i] += [*(tokens[i][s] for s in path[1:]), best[path[-1]]]
            features[i].append(out.features[i, path])
        fast.commit(cache, index, (index >= 0).sum(1) - 1)
    assert cache.lengths.tolist() == [p.shape[1] + len(n) - 1 for p, n in zip(prompts, new, strict=True)]
    assert int(cache.lengths.max()) <= cache.capacity
    return new, [torch.cat(rows) for rows in features], kept


@pytest.mark.parametrize("name", TINY)
def test_every_family(name: str, device: torch.device) -> None:
    """Two ragged rows under trees of any shape, and plain decoding, give the model's own text and features."""
    model = model_of(name)
    on_cpu = name in ON_CPU and backends.name_for(device.type) == "cpu"
    if name in REFUSED and (not on_cpu or (name in RECURRENT and not EXACT_RECURRENT)):
        with pytest.raises(ValueError) as refusal:
            fast_of(model, device)
        message = str(refusal.value)
        assert REFUSED[name] in message or (name in OLDER and message.startswith("Target: "))
        assert type(model).__name__ in message
        return
    fast = fast_of(model, device)
    assert name in EITHER or form_of(fast) == ("fused" if name in FUSED or on_cpu else "own")
    assert name in EITHER or name in FUSED or on_cpu or OWN[name] in fast.form
    prompts = [prompt_of(length) for length in LENGTHS]
    texts = [greedy(name, None, length, COUNT) for length in LENGTHS]
    for fill in (right, mixed, wrong) if name in ("qwen3", "gemma3", "qwen3_5", "qwen3_5_moe") else (mixed,):
        got, features, kept = decode(fast, prompts, texts, fill)
        assert [g[:COUNT] for g in got] == texts, fill.__name__
        assert (kept == 0) == (fill is wrong)
        for i, ids in enumerate(prompts):
            count = ids.shape[1] + COUNT - 1
            whole = torch.cat([ids, torch.tensor([texts[i][:-1]])], 1)
            want = Target(model, TAPS).encode(whole).features
            assert_matches(features[i][:count], want[0], NEAR)
    spec = Speculator(fast.target, None, target_path=form_of(fast))
    assert [out.token_ids for out in spec.generate([p[0] for p in prompts], COUNT)] == texts


@pytest.mark.parametrize("fill", [right, mixed, wrong])
@pytest.mark.parametrize("name", ["gemma3", "glm4", "granite", "olmo2", "olmo3", "cohere", "cohere2", "smollm3"])
def test_prompts_of_many_lengths(name: str, fill: Fill, device: torch.device) -> None:
    """In front of, at and behind windows of 8, in one batch and alone."""
    fast, lengths = fast_of(model_of(name), device), (1, 7, 8, 9, 33, 70)
    assert form_of(fast) == "fused"
    prompts = [prompt_of(length) for length in lengths]
    texts = [greedy(name, None, length, COUNT) for length in lengths]
    assert [text[:COUNT] for text in decode(fast, prompts, texts, fill)[0]] == texts
    for ids, text in zip(prompts[::2], texts[::2], strict=True):
        assert decode(fast, [ids], [text], fill)[0][0][:COUNT] == text


@pytest.mark.parametrize("case", CASES)
def test_forms(case: str, device: torch.device) -> None:
    """Prefills and blocks behind one another give the logits of one plain forward, far behind windows of 8 and 30."""
    build, changes, expected = CASES[case]
    try:
        model = build(**changes)
    except (tiny_models.MissingFamily, KeyError) as missing:  # an older transformers names these settings otherwise
        pytest.skip(str(missing))
    if case in UNFIT:
        with pytest.raises(ValueError, match=re.escape(expected)):
            fast_of(model, device)
        return
    fast = fast_of(model, device)
    assert expected in (fast.form if " " in expected else form_of(fast))
    ids = prompt_of(70).to(device)
    with torch.no_grad():
        want = fast.target.model(input_ids=ids).logits[0]
    cache, got = fast.new_cache(2, 128), []
    fast.prefill(ids[:, :2], cache)  # a row beside it, at another place
    for end in (5, 25):
        got.append(fast.prefill(ids[:, int(cache.lengths[1]) : end], cache, 1).logits[0])
        assert_matches(got[-1][0], want[end - 1], NEAR)
    for end in (33, 34, 44, 70):
        block = ids[:, int(cache.lengths[1]) : end].expand(2, -1)
        out = fast.verify(block, cache)
        assert_matches(out.logits[1], want[end - block.shape[1] : end], NEAR)
        index = torch.arange(block.shape[1]).repeat(2, 1)
        index[0, 1:] = -1
        fast.commit(cache, index, torch.tensor([0, block.shape[1] - 1]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3", "granite", "ministral3"])
def test_half_precision(name: str, dtype: torch.dtype, device: torch.device) -> None:
    """No further from float32 than the model's own forward; factors near 1 are seen in spite of the rounding."""
    if name == "ministral3":
        build, changes, message = CASES["queries scaled far out"]
    elif name == "granite":
        build, changes, message = CASES["residual factor near 1"]
    else:
        build, changes, message = TINY[name], {}, "fused layers"
    try:
        model = build(**changes)
    except (tiny_models.MissingFamily, KeyError) as missing:
        pytest.skip(str(missing))
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim >= 2:
                weight.mul_(0.4)  # rounding must not grow into chaos
    ids = prompt_of(50)
    with torch.no_grad():
        exact = model(input_ids=ids).logits[0, 20:]
    fast = fast_of(copy.deepcopy(model), device, dtype)
    assert message in fast.form
    cache = fast.new_cache(1, 64)
    with torch.no_grad():
        own = fast.target.model(input_ids=ids.to(device)).logits[0, 20:].float().cpu()
    fast.prefill(ids[:, :20].to(device), cache)
    got = fast.verify(ids[:, 20:].to(device), cache).logits[0].float().cpu()
    assert (got - exact).norm() <= 1.5 * (own - exact).norm()


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3", "gpt2"])
def test_prefill_in_chunks(name: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of 7: shorter, equal and longer prompts, a row among others, and one appended to."""
    fast = fast_of(model_of(name), device)
    for length in (1, 6, 7, 8, 14, 40):
        ids = prompt_of(length).to(device)
        want, cache = fast.target.encode(ids), fast.new_cache(3, 64)
        monkeypatch.setattr(target_own, "_PREFILL_ROWS_WIDE", 7)
        chunks = list(fast.prefill_chunks(ids, cache, 1))
        assert [c.features.shape[1] for c in chunks] == [7] * (length // 7) + [length % 7] * (length % 7 > 0)
        assert cache.lengths.tolist() == [0, length, 0]
        features = torch.cat([c.features for c in chunks], 1)
        assert_matches(features, want.features, NEAR)
        assert_matches(chunks[-1].logits[0, 0], want.logits[0, -1], NEAR)
        assert not cache.stores[0].k[:, [0, 2]].any()
        assert not cache.stores[0].k[:, 1, :, length:].any()
        more = fast.prefill(prompt_of(9).to(device), cache, 1)
        both = fast.target.encode(torch.cat([ids, prompt_of(9).to(device)], 1))
        assert_matches(more.logits[0, 0], both.logits[0, -1], NEAR)
        assert_matches(more.features, both.features[:, length:], NEAR)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_blocks_may_reach_behind_the_context_limit(name: str, device: torch.device) -> None:
    model = TINY[name](max_position_embeddings=24, **({"n_positions": 24} if name == "gpt2" else {}))
    fast, ids = fast_of(model, device), prompt_of(24).to(device)
    cache = fast.new_cache(1, 64)
    fast.prefill(ids[:, :20], cache)
    block = torch.cat([ids[:, 20:], ids[:, :9]], 1)
    got = fast.verify(block, cache).logits[0, :4]
    assert_matches(got, fast.target.encode(ids).logits[0, 20:], NEAR)


def test_what_it_does_to_a_row_is_not_seen_in_another(device: torch.device) -> None:
    """NaN in one row, and behind the committed positions of all, stays there."""
    fast, ids = fast_of(model_of("qwen3"), device), prompt_of(12).to(device)
    cache = fast.new_cache(2, 32)
    for buffer in (cache.stores[0].k, cache.stores[0].v):
        buffer.fill_(torch.nan)
    fast.prefill(ids, cache, 1)
    cache.lengths[0] = 9
    out = fast.verify(ids[:, :5].expand(2, -1), cache).logits
    want = fast.target.encode(torch.cat([ids, ids[:, :5]], 1)).logits[0, 12:]
    assert_matches(out[1], want, NEAR)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_hooks_of_its_user_are_honoured(dtype: torch.dtype, device: torch.device) -> None:
    """A hook that changes what a layer gives, however little, is no plain layer."""
    model = moved(model_of("qwen3"), device)
    ids = prompt_of(9).to(device)
    with torch.no_grad():
        plain = model(input_ids=ids).logits

    def scaled(module: Any, args: Any, output: Any) -> Any:
        return 1.02 * output if isinstance(output, torch.Tensor) else (1.02 * output[0], *output[1:])

    handle = model.model.layers[1].register_forward_hook(scaled)
    try:
        fast = fast_of(copy.deepcopy(model), device, dtype)
        assert "a plain sum after the MLP in layer 1" in fast.form
        with torch.no_grad():
            want = fast.target.model(input_ids=ids).logits
        assert_matches(fast.verify(ids, fast.new_cache(1, 16)).logits, want, NEAR if dtype == torch.float32 else 0.02)
        assert (want.float() - plain).norm() > 1e-3 * plain.norm()
    finally:
        handle.remove()


# --- what the model is left with ------------------------------------------------------------------------------


def state_of(model: Any) -> Any:
    hooks = [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()]
    text = model.config.get_text_config()
    flags = [module.training for module in model.modules()]
    own = [sorted(vars(module)) for module in model.modules()]
    return hooks, flags, own, text._attn_implementation, model.config._attn_implementation, sorted(vars(text))


@pytest.mark.parametrize("name", ["qwen3", "gemma3", "gemma3_nested"])
def test_nothing_stays_on_the_model(name: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    model = moved(TINY[name](attention_dropout=0.5, attention="eager"), device)
    model.train()
    before = state_of(model)
    fast, ids = in_place(Target(model, TAPS)), prompt_of(9).to(device)
    cache = fast.new_cache(1, 64)
    for _ in range(2):  # dropout would tell them apart
        cache.lengths.zero_()
        fast.prefill(ids, cache)
        out = fast.verify(ids, cache)
        assert state_of(model) == before
    model.eval()
    assert_matches(out.logits, fast.target.encode(torch.cat([ids, ids], 1)).logits[:, 9:], NEAR)
    model.train()

    def breaks(*args: Any, **kwargs: Any) -> Any:
        assert fast.facts.text_config._attn_implementation == before[3]
        raise RuntimeError("broken")

    mlp = fast.target.layers[2].mlp
    monkeypatch.setattr(type(mlp), "forward", breaks)
    with pytest.raises(RuntimeError, match="broken"):
        fast.prefill(ids, cache)
    monkeypatch.undo()
    assert state_of(model) == before
    cache.lengths.zero_()
    fast.prefill(ids, cache)
    assert torch.equal(fast.verify(ids, cache).logits, out.logits)


def test_configs_inside_the_config_keep_their_attention(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    model = moved(TINY["gemma3"](attention="eager"), device)
    config = model.config
    inner = copy.deepcopy(config)
    monkeypatch.setattr(type(config), "sub_configs", {"inner_config": type(config)})
    config.inner_config = inner
    inner._attn_implementation = "sdpa"
    in_place(Target(model, TAPS))
    assert (config._attn_implementation, inner._attn_implementation) == ("eager", "sdpa")


@pytest.mark.parametrize("name", ["qwen3", "gemma3"])
def test_autocast_close_and_copies(name: str, device: torch.device) -> None:
    fast, ids = fast_of(model_of(name), device), prompt_of(9).to(device)
    spec = Speculator(fast.target, None, target_path=form_of(fast))
    text = greedy(name, None, 9)
    with torch.autocast(device.type, torch.bfloat16):
        assert spec.generate(ids[0], 40).token_ids == text
    other = copy.deepcopy(spec)
    assert (len(spec.loop.free), len(other.loop.free)) == (1, 0)  # type: ignore[attr-defined]
    with Speculator(Target(fast.target.model, TAPS), None, target_path=form_of(fast)) as closed:
        pass
    with pytest.raises(ValueError, match=r"(prefill|verify): target must be open, got one after close\(\)"):
        closed.generate(ids[0], 4)
    with torch.no_grad():
        next(iter(other.target.model.parameters())).zero_()
    assert spec.generate(ids[0], 40).token_ids == text
    assert other.generate(ids[0], 40).token_ids != text


def test_what_recognition_stumbles_over_runs_in_its_own_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    def stumble(*args: Any) -> None:
        raise AttributeError("no such part")

    monkeypatch.setattr(Recognised, "__init__", stumble)
    fast = in_place(Target(model_of("qwen3"), TAPS))
    assert fast.form == "the model's own layers (fused ones need AttributeError: no such part)"


def test_appending_needs_a_block(device: torch.device) -> None:
    fast = fast_of(model_of("qwen3"), device)
    cache = fast.new_cache(1, 8)
    with pytest.raises(ValueError, match="append: cache must hold a block from verify, got none"):
        fast.append(cache, torch.zeros(1, 1, dtype=torch.int32, device=device))


def test_joined_weights_are_one_product_with_the_same_numbers() -> None:
    model = copy.deepcopy(model_of("qwen2"))
    fast = FusedTarget(Target(model, TAPS))
    own = fast.recognised
    before = own.decoder.layers
    x = torch.randn(20, before[0].mixer.weights()[0].shape[1])
    parts = [(layer.mixer.qkv, layer.mlp.gate_up) for layer in before]
    want = [part(x) for pair in parts for part in pair]
    own.join_weights()
    parts = [(layer.mixer.qkv, layer.mlp.gate_up) for layer in own.decoder.layers]
    for part, numbers in zip([part for pair in parts for part in pair], want, strict=True):
        assert joined(part.weights) is not None
        assert_matches(part(x), numbers)
    assert all(joined([bias for bias in pair[0].biases if bias is not None]) is not None for pair in parts)
    attention = model.model.layers[0].self_attn
    with torch.no_grad():
        attention.k_proj.weight.zero_()
    size = attention.q_proj.out_features
    bias = attention.k_proj.bias.detach().expand(20, -1)
    assert torch.equal(parts[0][0](x)[:, size : size + bias.shape[1]], bias), "the model's own weights are used"
