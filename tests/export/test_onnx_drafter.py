"""`OnnxDrafter`: alone and in the loop it drafts as the torch drafter does; what it refuses; that it needs no torch."""

from __future__ import annotations

import copy
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from exported import Exported, export, session_of
from pairs import VOCAB, build_drafter, fitted_prompts, official_drafter
from pairs import fitted as learned
from scipy import stats
from tiny_models import TINY
from tiny_tokenizer import save_tokenizer
from torch import Tensor, nn

from pydflash import Drafter, Speculator, ops
from pydflash.ops import reference

pytest.importorskip("onnx_ir", reason="onnx_ir is not installed")
pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")

from pydflash.export import OnnxDrafter, export_drafter
from pydflash.export.walk import uniform, walk

PROFILES = ("portable", "inplace")
ALPHA = 1e-4


@pytest.fixture(params=[(v, p) for v in (1, 2) for p in PROFILES], ids=lambda x: f"v{x[0]}-{x[1]}", scope="module")
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Exported:
    version, profile = request.param
    changes = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 20, "block_size": 8}
    return export(tmp_path_factory.mktemp("pair"), build_drafter(version, **changes), profile=profile)


@pytest.fixture
def v2(tmp_path: Path) -> Exported:
    return export(tmp_path, build_drafter(2))


def assert_same(got: Any, want: Any) -> None:
    """Two proposals, by torch and by ONNX Runtime."""
    assert torch.equal(torch.as_tensor(got.tokens), want.tokens)
    assert torch.equal(torch.as_tensor(got.candidates), want.candidates)
    for name in ("scores", "probs", "log_normalizers"):
        a, b = getattr(got, name), getattr(want, name)
        assert (a is None) == (b is None), name
        if b is not None:
            error = (torch.as_tensor(a) - b).norm() / b.norm()
            assert error < 1e-5, f"{name}: {error:.1e}"


# --- the loop ---------------------------------------------------------------------------------------------------


@torch.inference_mode()
def test_forty_rounds_draft_as_torch_does(found: Exported) -> None:
    """Chunks of a prompt, short blocks, rounds without context, buffers that grow; greedy and sampled."""
    onnx, drafter = OnnxDrafter(found.folder, threads=1), found.drafter
    rng = np.random.default_rng(3)
    caches = onnx.new_cache(1, 1300), drafter.new_cache(1, 1300)
    tables = {"embed": found.table, "head": found.head}
    for turn in range(40):
        rows = 1100 if turn == 0 else int(rng.integers(0, 6))
        features = rng.standard_normal((1, rows, drafter.fc.in_features), np.float32)
        for start in range(0, rows, 400):
            onnx.append_context(features[:, start : start + 400], caches[0])
        if rows:
            drafter.append_context(torch.from_numpy(features), caches[1])
        anchors = rng.integers(0, VOCAB, 1)
        options: dict[str, Any] = {"block_size": int(rng.integers(1, 9)) if turn % 4 == 0 else 8}
        if turn % 3 == 1:
            options |= {"temperature": 0.8, "seeds": turn}
        if turn % 3 == 2:
            options |= {"node_temperature": 0.6}
        got = onnx.propose(anchors, caches[0], **options)
        want = drafter.propose(torch.from_numpy(anchors), caches[1], **tables, **options)
        assert_same(got, want)
        assert caches[0].length == int(caches[1].lengths) == caches[0].held
        assert caches[0].waiting == 0
    if onnx.inplace:
        assert caches[0].rows == -(-(caches[0].held + 8) // 128) * 128


@torch.inference_mode()
def test_a_batch_of_equal_lengths_and_torch_tensors(found: Exported) -> None:
    onnx, drafter = OnnxDrafter(found.folder), found.drafter
    features = torch.randn(3, 9, drafter.fc.in_features, generator=torch.Generator().manual_seed(1))
    caches = onnx.new_cache(3, 20), drafter.new_cache(3, 20)
    counts = torch.full((3,), 7)
    anchors, heat, seeds = torch.tensor([4, 9, 2]), torch.tensor([0.0, 0.7, 1.3]), torch.tensor([5, 6, -7])
    for model, cache in zip((onnx, drafter), caches, strict=True):
        model.append_context(features, cache, counts)
    options = {"temperature": heat, "seeds": seeds}
    got = onnx.propose(anchors, caches[0], **options)
    want = drafter.propose(anchors, caches[1], embed=found.table, head=found.head, **options)
    assert isinstance(got.tokens, Tensor)
    assert got.tokens.dtype == torch.int64
    assert_same(got, want)


def test_uniforms_and_walk_are_those_of_the_reference() -> None:
    rng = np.random.default_rng(0)
    seeds, starts = rng.integers(-(2**63), 2**63 - 1, 500), rng.integers(0, 2**20, 500)
    for slot in (1, 7, 15):
        want = reference.uniform(torch.from_numpy(seeds), torch.from_numpy(starts), reference.DRAFT, slot)
        np.testing.assert_array_equal(uniform(seeds, starts, slot), want.numpy())


def test_the_greedy_path_is_the_official_selectors(tmp_path: Path) -> None:
    """Full blocks of 2, 8 and 16 slots, two rows at a time."""
    for size in (2, 8, 16):
        found = export(tmp_path / str(size), build_drafter(2, block_size=size, selector_top_k=16))
        official = official_drafter(found.drafter, block_size=size, selector_top_k=16)
        onnx = OnnxDrafter(found.folder)
        for seed in range(6):
            features = torch.randn(2, 11, found.drafter.fc.in_features, generator=torch.Generator().manual_seed(seed))
            cache, anchors = onnx.new_cache(2, 11), torch.tensor([seed, 50 + seed])
            onnx.append_context(features, cache)
            got = onnx.propose(anchors, cache)
            ids = torch.full((2, size), found.drafter.config.mask_token_id)
            ids[:, 0] = anchors
            with torch.inference_mode():
                positions = torch.arange(11 + size).expand(2, -1)
                hidden = official(target_hidden=features, noise_embedding=found.table[ids], position_ids=positions)
                tokens, candidates, _ = official.propose(hidden[:, 1:], anchors, found.head, 0.0)
            assert got.tokens.tolist() == tokens.tolist()
            assert got.candidates.sort().values.tolist() == candidates.sort().values.tolist()


# --- in the Speculator -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def fitted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A tiny target, drafters that were taught its text, and their exports."""
    work = tmp_path_factory.mktemp("fitted")
    target = copy.deepcopy(learned(1, 6, steps=120)[0])
    target.save_pretrained(work / "target")
    made: dict[str, Any] = {"target": target, "work": work}
    for version in (1, 2):
        drafter = copy.deepcopy(learned(version, 6, steps=120)[1])
        drafter.save_pretrained(work / f"drafter{version}")
        made[f"torch{version}"] = drafter
        for profile in PROFILES:
            folder = work / f"{profile}{version}"
            export_drafter(work / f"drafter{version}", work / "target", folder, profile=profile)
    return made


@pytest.mark.grid(5)
@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("path", ["walk", "viterbi", "tree"])
def test_texts_and_accepted_lengths_are_those_of_the_torch_drafter(
    fitted: dict[str, Any], version: int, profile: str, path: str
) -> None:
    options: dict[str, Any] = {"path": path} | ({"num_nodes": 12} if path == "tree" else {})
    plain = Speculator(fitted["target"], None)
    ours = Speculator(fitted["target"], OnnxDrafter(fitted["work"] / f"{profile}{version}"), **options)
    theirs = Speculator(fitted["target"], fitted[f"torch{version}"], **options)
    prompts = [*fitted_prompts()[:2], torch.arange(30)]
    accepted = []
    for prompt in prompts:
        got, want = (spec.generate(prompt, 32, temperature=0.0) for spec in (ours, theirs))
        assert got.token_ids == want.token_ids == plain.generate(prompt, 32, temperature=0.0).token_ids
        assert got.stats.num_accepted == want.stats.num_accepted
        accepted += got.stats.num_accepted
        got, want = (spec.generate(prompt, 14, temperature=0.9, seed=11) for spec in (ours, theirs))
        assert got.token_ids == want.token_ids
        assert got.stats.num_accepted == want.stats.num_accepted
    assert max(accepted) >= 2
    assert "onnxruntime" in got.stats.backends["drafter"]


def test_from_pretrained_loads_an_exported_folder(fitted: dict[str, Any]) -> None:
    save_tokenizer(fitted["work"] / "target")
    folders = fitted["work"] / "target", fitted["work"] / "portable2"
    spec = Speculator.from_pretrained(*folders, dtype=torch.float32, device="cpu")
    assert isinstance(spec.drafter, OnnxDrafter)
    prompt = fitted_prompts()[0]
    want = Speculator(fitted["target"], None).generate(prompt, 20, temperature=0.0).token_ids
    assert spec.generate(prompt, 20, temperature=0.0).token_ids == want


def test_another_target_is_refused(fitted: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="num_target_layers"):
        Speculator(TINY["qwen3"](num_hidden_layers=5), OnnxDrafter(fitted["work"] / "portable1"))


# --- sampling ----------------------------------------------------------------------------------------------------

DRAWS = 40_000


def first_tokens(found: Exported, law: Tensor, reported: float) -> Tensor:
    """First emitted tokens of DRAWS blocks, sampled at T = 0.9 from K candidates, with q as the drafter reports it
    (or of another temperature), accepted against a target whose law is `law`."""
    onnx = OnnxDrafter(found.folder)
    batch = DRAWS // 4
    emitted = []
    for part in range(4):
        cache = onnx.new_cache(batch, 3)
        features = torch.randn(1, 3, found.drafter.fc.in_features, generator=torch.Generator().manual_seed(2))
        onnx.append_context(features.expand(batch, -1, -1), cache)
        anchors, seeds = torch.full((batch,), 7), torch.arange(batch) + part * batch
        proposal = onnx.propose(anchors, cache, block_size=2, temperature=0.9, seeds=seeds)
        q = proposal.probs ** (0.9 / reported)
        tokens = torch.cat([anchors[:, None], proposal.tokens], 1)
        logits = law.log().float().expand(batch, 2, -1)
        _, accepted, bonus = ops.reject_sample(
            logits, tokens, None, (proposal.candidates, q / q.sum(-1, keepdim=True)), 1.0, seeds=seeds, starts=3
        )
        emitted.append(torch.where(accepted > 0, proposal.tokens[:, 0], bonus))
    return torch.cat(emitted)


@pytest.mark.parametrize(("reported", "right"), [(0.9, True), (2.5, False)])
def test_sampled_text_follows_the_target_with_the_q_of_the_candidates(
    v2: Exported, reported: float, right: bool
) -> None:
    cache = (onnx := OnnxDrafter(v2.folder)).new_cache(1, 3)
    features = torch.randn(1, 3, v2.drafter.fc.in_features, generator=torch.Generator().manual_seed(2))
    onnx.append_context(features, cache)
    likely = onnx.propose(torch.tensor([7]), cache, block_size=2).candidates[0, 0]
    law = torch.full((VOCAB,), 1e-12).double()
    law[likely[:3]] = torch.tensor([0.5, 0.2, 0.1]).double()
    law[[i for i in range(4) if i not in likely]] = 0.05  # never proposed
    law = law / law.sum()
    counts = torch.bincount(first_tokens(v2, law, reported), minlength=VOCAB)[law > 1e-6]
    expected = law[law > 1e-6]
    p_value = stats.chisquare(counts.numpy(), (expected / expected.sum() * counts.sum()).numpy()).pvalue
    assert counts.sum() >= DRAWS - 1
    assert (p_value > ALPHA) == right


def test_walk_of_rows_that_are_greedy_or_sampled() -> None:
    candidates = np.array([[[5, 3, 8]]] * 2)
    scores = np.array([[[2.0, 1.0, 0.0]]] * 2, np.float32)
    tokens, probs = walk(candidates, scores, np.array([0, 1], np.float32), np.array([1, 1]), np.array([0, 0]))
    assert tokens[0, 0] == 5
    np.testing.assert_array_equal(probs[0, 0], [1, 0, 0])
    np.testing.assert_allclose(probs[1, 0], np.exp([2, 1, 0]) / np.exp([2, 1, 0]).sum(), rtol=1e-6)


# --- other graphs ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [1, 2])
def test_a_graph_without_embedding_takes_rows_of_the_table(tmp_path: Path, version: int) -> None:
    found = export(tmp_path, build_drafter(version, input_embedding_scale=3.0), embed=False)
    onnx, drafter = OnnxDrafter(found.folder), found.drafter
    features = torch.randn(1, 9, drafter.fc.in_features, generator=torch.Generator().manual_seed(1))
    caches, anchor = (onnx.new_cache(1, 9), drafter.new_cache(1, 9)), torch.tensor([4])
    with torch.inference_mode():
        onnx.append_context(features, caches[0])
        drafter.append_context(features, caches[1])
        with pytest.raises(ValueError, match="embed must be the target's table"):
            onnx.propose(anchor, caches[0])
        with pytest.raises(ValueError, match="embed must be the target's table"):
            onnx.propose(anchor, caches[0], embed=found.table.to("meta"))
        want = drafter.propose(anchor, caches[1], embed=found.table, head=found.head)
        assert_same(onnx.propose(anchor, caches[0], embed=found.table), want)
        table = nn.Embedding.from_pretrained(found.table)
        assert_same(onnx.propose(anchor.numpy(), caches[0], embed=table), want)
        assert_same(onnx.propose(anchor.numpy(), caches[0], embed=found.table.numpy()), want)


@pytest.mark.parametrize("quantize", ["8bit", "4bit", "int8"])
def test_quantised_graphs_leave_the_text_alone(fitted: dict[str, Any], quantize: str) -> None:
    folder = fitted["work"] / quantize
    report = export_drafter(fitted["work"] / "drafter2", fitted["work"] / "target", folder, quantize=quantize)
    assert report.parity is not None
    assert report.parity.drafts > {"8bit": 0.8, "4bit": 0.2, "int8": 0.7}[quantize]
    ours, plain = Speculator(fitted["target"], OnnxDrafter(folder)), Speculator(fitted["target"], None)
    accepted = 0
    for prompt in fitted_prompts()[:2]:
        got = ours.generate(prompt, 30, temperature=0.0)
        assert got.token_ids == plain.generate(prompt, 30, temperature=0.0).token_ids
        accepted += sum(got.stats.num_accepted)
    assert accepted > 6  # few-bit drafts depend on the processor's rounding: of one prompt alone 3 were seen
    assert quantize in got.stats.backends["drafter"]


def test_a_host_can_share_its_own_tables(tmp_path: Path) -> None:
    """Under the target's names; a head of zeros makes every logit the same, so the lowest ids are the candidates."""
    import onnxruntime

    found = export(tmp_path, build_drafter(1))
    options, zeros = onnxruntime.SessionOptions(), np.zeros((VOCAB, 64), np.float32)
    value = onnxruntime.OrtValue.ortvalue_from_numpy(zeros)
    options.add_initializer("lm_head.weight", value)
    onnx = OnnxDrafter(found.folder, session_options=options)
    cache = onnx.new_cache(1, 8)
    onnx.append_context(np.ones((1, 5, found.drafter.fc.in_features), np.float32), cache)
    assert onnx.propose(np.array([3]), cache).candidates[0].tolist() == [[*range(16)]] * 3


# --- what is refused ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "providers", ["CPUExecutionProvider", [], ["Nope"], ["Nope", "CPUExecutionProvider"], ["RknpuExecutionProvider"]]
)
def test_providers_that_are_not_there_are_refused(v2: Exported, providers: Any) -> None:
    with pytest.raises(ValueError, match=r"providers must be a list out of .*CPUExecutionProvider.*, got"):
        OnnxDrafter(v2.folder, providers=providers)


def test_providers_may_fall_back_where_that_is_asked_for(v2: Exported) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        onnx = OnnxDrafter(v2.folder, providers=["RknpuExecutionProvider", ("CPUExecutionProvider", {})])
    assert onnx.providers == ["CPUExecutionProvider"]


def test_the_graph_itself_refuses_rows_beyond_the_buffer(tmp_path: Path) -> None:
    from exported import feed_of

    found = export(tmp_path, build_drafter(1), profile="inplace")
    feed, _ = feed_of(found, "inplace", 1, 2, 10, 4, most=15)  # 16 rows are to be written
    with pytest.raises(Exception, match="TensorScatter"):
        session_of(found.folder).run(None, feed)


# --- without torch -----------------------------------------------------------------------------------------------

WITHOUT_TORCH = """
import importlib.abc, sys
class Refuse(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "transformers", "onnx", "onnx_ir", "safetensors", "scipy"):
            raise ImportError(f"{name} is not to be imported")
sys.meta_path.insert(0, Refuse())
import numpy as np
from pydflash.export import OnnxDrafter
drafter = OnnxDrafter(sys.argv[1], providers=["CPUExecutionProvider"])
cache = drafter.new_cache(1, 40)
drafter.append_context(np.load(sys.argv[2]), cache)
for options in ({}, {"temperature": 1.0, "seeds": 5}):
    print(*drafter.propose(np.array([7]), cache, **options).tokens[0])
"""


def test_it_runs_without_torch(v2: Exported, tmp_path: Path) -> None:
    features = np.random.default_rng(0).standard_normal((1, 30, v2.drafter.fc.in_features), np.float32)
    np.save(tmp_path / "features.npy", features)
    command = [sys.executable, "-c", WITHOUT_TORCH, str(v2.folder), str(tmp_path / "features.npy")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    drafter: Drafter = v2.drafter
    with torch.inference_mode():
        cache = drafter.new_cache(1, 40)
        drafter.append_context(torch.from_numpy(features), cache)
        tables = {"embed": v2.table, "head": v2.head}
        want = [
            drafter.propose(torch.tensor([7]), cache, **tables, **more).tokens
            for more in ({}, {"temperature": 1.0, "seeds": 5})
        ]
    assert done.stdout.split() == [str(token) for tokens in want for token in tokens[0].tolist()]
