"""`OnnxTarget`: text without a torch forward; equal to the model's own, plainly, with drafts, and with trees."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pairs import fitted, fitted_prompts
from safetensors.torch import load_file, save_file
from tiny_models import TINY
from tiny_tokenizer import save_tokenizer
from torch import nn

from pydflash import Speculator, Target
from pydflash.tree import tree_of

pytest.importorskip("onnx_ir", reason="onnx_ir is not installed")
pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")

from pydflash.export import OnnxDrafter, OnnxTarget, export_drafter, export_target

TAPS = (0, 2)
ROPE = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "mistral": {"sliding_window": None},
    "llama-biased": {"attention_bias": True, "mlp_bias": True},
    "llama-rope": {"rope_parameters": ROPE | {"original_max_position_embeddings": 64}},
    "qwen3-tied": {"tie_word_embeddings": True},
}


def written(work: Path, model: nn.Module, layer_ids: tuple[int, ...] = TAPS, **options: Any) -> Path:
    """The model's checkpoint and its export in one folder; the folder."""
    model.save_pretrained(work / "target")
    own = Target(model, layer_ids)

    def reference(ids: Any) -> Any:
        out = own.encode(torch.from_numpy(ids))
        return out.logits.numpy(), None if out.features is None else out.features.numpy()

    folder = work / "-".join(["onnx", *map(str, options.values())])
    export_target(work / "target", layer_ids, folder, reference=reference, **options)
    return folder


@pytest.mark.parametrize("name", MODELS)
def test_blocks_prompts_and_trees_match_the_model(tmp_path: Path, name: str) -> None:
    model = TINY[name.split("-")[0]](**MODELS[name])
    ours, theirs = OnnxTarget(written(tmp_path, model)), Target(model, TAPS)
    theirs.check_trees()
    caches = ours.new_cache(1, 300), theirs.new_cache(1, 300)
    generator = torch.Generator().manual_seed(1)
    vocab = theirs.vocab_size
    assert (ours.vocab_size, ours.num_layers, ours.hidden_size) == (vocab, theirs.num_layers, theirs.hidden_size)

    def same(method: str, *arguments: Any) -> None:
        got, want = (
            getattr(target, method)(arguments[0], cache, *arguments[1:])
            for target, cache in zip((ours, theirs), caches, strict=True)
        )
        for a, b in zip(got, want, strict=True):
            assert a.shape == b.shape
            assert (a - b).norm() <= 1e-5 * b.norm()

    same("prefill", torch.randint(0, vocab, (1, 121), generator=generator))
    chain = torch.tensor([[0, 1, 2, -1, -1, -1]])
    same("verify", torch.randint(0, vocab, (1, 6), generator=generator))
    for target, cache in zip((ours, theirs), caches, strict=True):
        target.commit(cache, chain, torch.tensor([2]))
    same("verify", torch.randint(0, vocab, (1, 7), generator=generator), tree_of([-1, 0, 0, 1, 2, 2, 4]))
    for target, cache in zip((ours, theirs), caches, strict=True):
        target.commit(cache, torch.tensor([[0, 2, 4, 6, -1, -1, -1]]), torch.tensor([3]))
    assert caches[0].length == caches[1].length == 121 + 3 + 4
    same("verify", torch.randint(0, vocab, (1, 3), generator=generator))


def test_a_prompt_longer_than_a_run_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from pydflash.export import target as module

    model = TINY["llama"]()
    ours, ids = OnnxTarget(written(tmp_path, model)), torch.arange(90)[None]
    whole = ours.prefill(ids, ours.new_cache(1, 100))
    monkeypatch.setattr(module, "CHUNK", 32)
    parts = ours.prefill(ids, cache := ours.new_cache(1, 100))
    assert cache.length == 90
    assert parts.features.shape == whole.features.shape
    for a, b in zip(parts, whole, strict=True):
        assert (a - b).norm() <= 1e-5 * b.norm()


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A target and a drafter that was taught its text, both exported into one folder."""
    work = tmp_path_factory.mktemp("pair")
    model, drafter = copy.deepcopy(fitted(2, 6, steps=120))
    drafter.save_pretrained(work / "drafter")
    folder = written(work, model)
    save_tokenizer(folder)
    export_drafter(work / "drafter", work / "target", folder)
    return {"model": model, "drafter": drafter, "folder": folder, "work": work}


@pytest.mark.grid(5)
@pytest.mark.parametrize("path", ["walk", "tree", "auto tree"])
@pytest.mark.parametrize("quantize", [None, "8bit", "4bit", "int8"])
def test_greedy_text_is_that_of_the_same_target_decoded_plainly(
    pair: dict[str, Any], quantize: str | None, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = pair["folder"] if quantize is None else written(pair["work"], pair["model"], quantize=quantize)
    monkeypatch.setattr(type(pair["model"]), "forward", None)  # no torch forward from here on
    monkeypatch.setattr(nn.Linear, "forward", None)
    target, drafter = OnnxTarget(folder), OnnxDrafter(pair["folder"])
    options: dict[str, Any] = {"path": path.split()[-1]} | ({"num_nodes": 12} if path == "tree" else {})
    spec, plain = Speculator(target, drafter, **options), Speculator(OnnxTarget(folder), None)
    accepted = []
    for prompt in [*fitted_prompts()[:3], torch.arange(30)]:
        got, want = spec.generate(prompt, 40, temperature=0.0), plain.generate(prompt, 40, temperature=0.0)
        assert got.token_ids == want.token_ids
        accepted += got.stats.num_accepted
    assert max(accepted) >= (2 if quantize != "4bit" else 1)


def test_text_is_the_torch_models(pair: dict[str, Any]) -> None:
    ours = Speculator.from_pretrained(pair["folder"], pair["folder"])
    theirs = Speculator(pair["model"], pair["drafter"])
    assert isinstance(ours.target, OnnxTarget)
    assert isinstance(ours.drafter, OnnxDrafter)
    for prompt in fitted_prompts()[:3]:
        for options in ({"temperature": 0.0}, {"temperature": 0.8, "top_p": 0.9, "seed": 4}):
            got, want = (spec.generate(prompt, 30, stop_token_ids=[], **options) for spec in (ours, theirs))
            assert got.token_ids == want.token_ids
            assert got.stats.num_accepted == want.stats.num_accepted
    assert "OnnxTarget" in ours.generate(prompt, 2).stats.backends["target"]


def test_stop_tokens_come_from_the_generation_config(pair: dict[str, Any]) -> None:
    text = Speculator.from_pretrained(pair["folder"]).generate(fitted_prompts()[0], 20, stop_token_ids=[]).token_ids
    (pair["folder"] / "generation_config.json").write_text(json.dumps({"eos_token_id": text[5]}))
    out = Speculator.from_pretrained(pair["folder"]).generate(fitted_prompts()[0], 20)
    assert out.finish_reason == "stop"
    assert out.token_ids == text[: text.index(text[5]) + 1]


def test_what_does_not_go_together_is_refused(pair: dict[str, Any]) -> None:
    target = OnnxTarget(pair["folder"])
    with pytest.raises(ValueError, match="drafter must be an exported one beside a OnnxTarget"):
        Speculator(target, pair["drafter"])
    other = OnnxTarget(written(pair["work"] / "other", pair["model"], (1, 3)))
    with pytest.raises(ValueError, match=r"features of layers \[0, 2\] .*got \[1, 3\]"):
        Speculator(other, OnnxDrafter(pair["folder"]))
    with pytest.raises(ValueError, match="target_path must be 'generic' or 'auto' with a target of type OnnxTarget"):
        Speculator(target, None, target_path="fused")
    for options in ({"device": "cuda"}, {"dtype": "bfloat16"}):
        with pytest.raises(ValueError, match="must be None for a target on ONNX Runtime"):
            Speculator.from_pretrained(pair["folder"], **options)
    cache = target.new_cache(1, 600)
    with pytest.raises(ValueError, match="tokens must end within 512 positions"):
        target.prefill(torch.zeros(1, 513, dtype=torch.long), cache)
    with pytest.raises(ValueError, match="must hold a block from verify"):
        target.commit(cache, torch.tensor([[0]]), torch.tensor([0]))
    target.verify(torch.tensor([[1, 2]]), cache)
    with pytest.raises(ValueError, match="must have its verified block committed first"):
        target.verify(torch.tensor([[1, 2]]), cache)
    with pytest.raises(ValueError, match="batch must be 1"):
        target.new_cache(2, 5)
    target.close()
    with pytest.raises(ValueError, match="target must be open"):
        target.prefill(torch.tensor([[1]]), target.new_cache(1, 5))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gemma2"}, "model_type must be one of llama, mistral, qwen2, qwen3, got 'gemma2'"),
        ({"hidden_act": "gelu"}, "hidden_act must be 'silu', got 'gelu'"),
        ({"sliding_window": 8, "use_sliding_window": True}, "sliding_window must be None, got 8"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1.0, "factor": 2.0}}, "rope_type"),
        ({"num_hidden_layers": 3}, "must hold no tensors but the graph's, got layers.3"),
        ({"num_hidden_layers": 5}, "must hold the tensors layers.4"),
    ],
)
def test_targets_that_the_graph_does_not_compute_are_refused(tmp_path: Path, changes: Any, message: str) -> None:
    TINY["llama"]().save_pretrained(tmp_path / "target")
    file = tmp_path / "target" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    with pytest.raises(ValueError, match=message):
        export_target(tmp_path / "target", TAPS, tmp_path / "onnx")
    assert not (tmp_path / "onnx" / "target.json").exists()


def test_a_graph_that_differs_from_the_model_is_not_put_in_place(tmp_path: Path) -> None:
    model = TINY["llama"]()
    folder = written(tmp_path, model)
    before = (folder / "target.onnx.data").read_bytes()
    weights = load_file(tmp_path / "target" / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"] *= 1.01
    save_file(weights, tmp_path / "target" / "model.safetensors", metadata={"format": "pt"})
    own = Target(model, TAPS)

    def reference(ids: Any) -> Any:
        out = own.encode(torch.from_numpy(ids))
        return out.logits.numpy(), None

    with pytest.raises(RuntimeError, match="must compute what the model does, it differs by"):
        export_target(tmp_path / "target", TAPS, folder, reference=reference)
    assert (folder / "target.onnx.data").read_bytes() == before
    assert OnnxTarget(folder).layer_ids == TAPS
    assert not [p for p in folder.iterdir() if p.name.startswith(".")]


@pytest.mark.parametrize("quantize", [None, "8bit", "4bit", "int8"])
def test_logits_do_not_depend_on_how_many_tokens_go_through_together(tmp_path: Path, quantize: str | None) -> None:
    """Bit by bit: what makes greedy text with drafts that of plain decoding, where activations are quantised too."""
    ours = OnnxTarget(written(tmp_path, TINY["llama"](), quantize=quantize))
    ids = np.arange(13)[None] * 7 % ours.vocab_size

    def logits(size: int) -> Any:
        cache, parts = ours.new_cache(1, 20), []
        for i in range(0, 13, size):
            part = ids[:, i : i + size]
            parts.append(ours.run(part, cache, np.arange(part.shape[1])))
            cache.length += part.shape[1]
        assert all(p[1] is not None and p[1].shape[1] == p[0].shape[1] for p in parts)
        return np.concatenate([p[0] for p in parts], 1)

    for size in (1, 2, 5):
        np.testing.assert_array_equal(logits(size), logits(13))


def test_positions_end_where_the_rotary_tables_do(tmp_path: Path) -> None:
    model = TINY["llama"](max_position_embeddings=1 << 21)
    assert OnnxTarget(written(tmp_path, model)).max_length == 1 << 20


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([[1, -1]], r"tokens must be ids from 0 to \d+, got -1 to 1"),
        ([[1, 999]], r"tokens must be ids from 0 to \d+, got 1 to 999"),
        ([[1.5, 1.0]], r"tokens must be integers \[1, S\], S at least 1, got float"),
        ([1, 2], r"tokens must be integers \[1, S\].*got int64 \[2\]"),
        ([[1, 2], [3, 4]], r"tokens must be integers \[1, S\].*got int64 \[2, 2\]"),
        ([[]], r"tokens must be integers \[1, S\]"),
        ([[0] * 513], "tokens must end within 512 positions"),
    ],
)
def test_tokens_that_do_not_fit_are_refused(pair: dict[str, Any], tokens: Any, message: str) -> None:
    """An id below 0 would be read from the table's end."""
    target = OnnxTarget(pair["folder"])
    cache = target.new_cache(1, 600)
    for op, given in (("prefill", torch.tensor(tokens)), ("verify", torch.tensor(tokens))):
        with pytest.raises(ValueError, match=f"{op}: {message}"):
            getattr(target, op)(given, cache)
    with pytest.raises(ValueError, match=f"run: {message}"):
        target.run(np.array(tokens), cache, np.array([0]))
    assert (cache.length, cache.open) == (0, 0)


def test_rows_and_caches_that_do_not_fit_are_refused(pair: dict[str, Any]) -> None:
    target = OnnxTarget(pair["folder"])
    cache, ids = target.new_cache(1, 10), np.array([[1, 2]], np.int32)
    for rows in ([2], [-1], [0.0], [[0]]):
        with pytest.raises(ValueError, match=r"run: rows must be \[N\] slots from 0 to 1, got"):
            target.run(ids, cache, np.array(rows))
    assert target.run(ids, cache, [0, 1])[0].shape == (1, 2, target.vocab_size)  # type: ignore[arg-type]
    for wrong in (None, OnnxDrafter(pair["folder"]).new_cache(1, 5)):
        with pytest.raises(ValueError, match="prefill: cache must be one of new_cache, got"):
            target.prefill(torch.tensor([[1]]), wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="capacity at least 1, got 1 and 'a'"):
        target.new_cache(1, "a")  # type: ignore[arg-type]


@pytest.mark.parametrize(("content", "message"), [("{", "not valid JSON"), ("[1]", "must hold an object, got list")])
def test_a_broken_generation_config_is_named(tmp_path: Path, content: str, message: str) -> None:
    folder = written(tmp_path, TINY["llama"]())
    (folder / "generation_config.json").write_text(content)
    with pytest.raises(ValueError, match=rf"OnnxTarget: .*generation_config\.json: {message}"):
        OnnxTarget(folder)
