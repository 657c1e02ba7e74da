"""The exported graph computes what the torch drafter does: every kind of config, both profiles, many shapes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from exported import Exported, export, feed_of, run, session_of
from pairs import CONFIGS, HIDDEN, VOCAB, build_drafter
from torch import nn

onnx = pytest.importorskip("onnx", reason="onnx is not installed")
pytest.importorskip("onnx_ir", reason="onnx_ir is not installed")
pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")

PROFILES = ("portable", "inplace")
TOLERANCE = 1e-5
CASES = CONFIGS | {
    "v1-interleaved": (1, {"is_neox_style": False}),
    "v1-one-layer": (1, {"num_hidden_layers": 1, "layer_types": ["full_attention"]}),
}


def close(got: Any, want: Any, what: str = "") -> None:
    """Within 1e-5, relative to the norm, shapes alike; NaN never passes.

    Both are about 4e-6 from float64 where a random DFlash 2 drafter amplifies rounding most.
    """
    assert got.shape == want.shape, f"{what}: {got.shape}, expected {want.shape}"
    error, size = np.linalg.norm(got - want), np.linalg.norm(want)
    assert error <= TOLERANCE * size, f"{what}: {error:.2e} of {size:.1e}"


def check(found: Exported, session: Any, profile: str, shape: tuple[int, int, int, int], seed: int) -> None:
    """One run against torch: hidden states, keys and values, candidates, scores, path."""
    batch, rows, past, slots = shape
    most = -(-(rows + past + slots) // 32) * 32
    feed, want = feed_of(found, profile, batch, rows, past, slots, seed, most)
    got = run(session, feed)
    close(got["hidden"], want["hidden"], "hidden")
    length = past + rows
    for layer in range(found.drafter.config.num_layers):
        for name in "kv":
            present = got[f"present.{layer}.{name}"]
            assert present.shape[2] == (most if profile == "inplace" else length)
            close(present[:, :, :length], want[name][layer], f"{name} of layer {layer}")
    np.testing.assert_array_equal(got["cand_ids"], want["candidates"])
    np.testing.assert_array_equal(got["draft_ids"], want["tokens"])
    if found.drafter.config.version == 2:
        close(got["edge_scores"], want["scores"], "edge scores")
    else:
        close(got["cand_scores"], want["scores"], "scores")
        close(got["log_normalizers"], want["log_normalizers"], "normalizers")


@pytest.fixture(params=CASES, scope="module")
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Exported]:
    version, changes = CASES[request.param]
    work = tmp_path_factory.mktemp(request.param)
    drafter = build_drafter(version, seed=len(request.param), **changes)
    return {p: export(work, drafter, profile=p, debug_outputs=True) for p in PROFILES}


@pytest.mark.grid(4)
@pytest.mark.parametrize("profile", PROFILES)
def test_every_config_matches_torch(case: dict[str, Exported], profile: str) -> None:
    found = case[profile]
    session, size = session_of(found.folder), found.drafter.config.block_size
    for seed, (batch, rows, past) in enumerate([(1, 0, 0), (1, 5, 0), (2, 1, 20), (1, 0, 45), (2, 7, 33)]):
        for slots in {1, 2, size}:
            check(found, session, profile, (batch, rows, past, slots), seed)


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("version", [1, 2])
def test_two_hundred_random_shapes(tmp_path: Path, version: int, profile: str) -> None:
    found = export(tmp_path, build_drafter(version, block_size=8), profile=profile, debug_outputs=True)
    session, rng = session_of(found.folder), np.random.default_rng(version)
    edges = [(1, 128 - 8, 0, 8), (1, 0, 120, 8), (2, 1, 127, 1), (1, 512 - 8, 0, 8), (1, 0, 503, 8)]
    shapes = edges + [
        (int(rng.integers(1, 4)), *map(int, rng.integers(0, (12, 70))), int(rng.integers(1, 9))) for _ in range(50)
    ]
    for seed, shape in enumerate(shapes):
        check(found, session, profile, shape, seed)


def test_layers_match_torch_one_by_one(tmp_path: Path) -> None:
    found = export(tmp_path, build_drafter(2), debug_outputs=True)
    outputs: list[torch.Tensor] = []
    feed, _ = feed_of(found, "portable", 1, 3, 10, 4)
    after = type(found.drafter.stack[0]).after_attention

    def record(*arguments: Any) -> torch.Tensor:
        outputs.append(after(*arguments))
        return outputs[-1]

    type(found.drafter.stack[0]).after_attention = record  # type: ignore[method-assign]
    try:
        feed, _ = feed_of(found, "portable", 1, 3, 10, 4)
    finally:
        type(found.drafter.stack[0]).after_attention = after  # type: ignore[method-assign]
    got = run(session_of(found.folder), feed)
    for layer in range(2):
        close(got[f"layer.{layer}"], outputs[layer].numpy(), f"layer {layer}")


def test_a_window_sees_the_right_keys_of_a_cache_without_its_oldest_rows(tmp_path: Path) -> None:
    drafter = build_drafter(1, layer_types=["sliding_attention"] * 2, sliding_window=9)
    found = export(tmp_path, drafter, debug_outputs=True)
    feed, want = feed_of(found, "portable", 1, 4, 30, 4)
    for layer in range(2):
        for name in "kv":
            feed[f"past.{layer}.{name}"] = feed[f"past.{layer}.{name}"][:, :, -8:]
    close(run(session_of(found.folder), feed)["hidden"], want["hidden"], "hidden")


def test_positions_of_a_long_context(tmp_path: Path) -> None:
    """The two short tables of cos and sin against torch's, which has a row for each position."""
    found = export(tmp_path, build_drafter(1), debug_outputs=True)
    drafter, first = found.drafter, 300_001
    feed, _ = feed_of(found, "portable", 1, 6, 0, 4)
    feed["pos_ctx"], feed["pos_block"] = feed["pos_ctx"] + first, feed["pos_block"] + first
    drafter.reserve(first + 32)
    with torch.inference_mode():
        fused = drafter.fuse(torch.from_numpy(feed["target_hidden"]))
        k, _ = drafter.context_keys(fused, torch.from_numpy(feed["pos_ctx"]))
    close(run(session_of(found.folder), feed)["present.0.k"], k[0].numpy(), "keys")


def test_own_tables_a_smaller_vocabulary_and_a_mask_embedding(tmp_path: Path) -> None:
    drafter = build_drafter(1, draft_vocab_size=48, final_logit_softcapping=5.0)
    generator = torch.Generator().manual_seed(1)
    tensors = drafter.canonical() | {
        "embed_tokens.weight": torch.randn(VOCAB, HIDDEN, generator=generator),
        "lm_head.weight": torch.randn(48, HIDDEN, generator=generator),
        "d2t": torch.arange(48) + 1,
        "mask_embedding": torch.randn(HIDDEN, generator=generator),
    }
    drafter.load_canonical(tensors)
    found = export(tmp_path, drafter, debug_outputs=True)
    check(found, session_of(found.folder), "portable", (2, 3, 10, 4), 0)
    names = {t.name for t in onnx.load(found.folder / "draft.onnx", load_external_data=False).graph.initializer}
    assert {"drafter.embed_tokens.weight", "drafter.lm_head.weight"} <= names
    assert not names & {"model.embed_tokens.weight", "lm_head.weight"}


@pytest.mark.parametrize("quantize", [None, "8bit", "4bit", "int8"])
def test_tied_and_padded_tables_are_stored_once_under_the_targets_name(tmp_path: Path, quantize: str | None) -> None:
    found = export(tmp_path, build_drafter(1), tied=True, rows=VOCAB + 7, quantize=quantize, debug_outputs=True)
    model = onnx.load(found.folder / "draft.onnx", load_external_data=False)
    stored = [t.name for t in model.graph.initializer if (VOCAB + 7) in t.dims]
    wanted = (
        ["model.embed_tokens.weight"]
        if quantize is None
        else ["model.embed_tokens.weight.q", "model.embed_tokens.weight.scales"]
    )
    assert sorted(stored) == wanted
    feed, want = feed_of(found, "portable", 2, 3, 10, 4)
    got = run(session_of(found.folder), feed)
    assert got["cand_ids"].max() < VOCAB
    error = np.abs(got["hidden"] - want["hidden"]).max() / np.abs(want["hidden"]).max()
    assert error < {None: 1e-5, "8bit": 0.06, "4bit": 0.6, "int8": 0.12}[quantize]
    cosine = (got["hidden"] * want["hidden"]).sum() / np.linalg.norm(got["hidden"]) / np.linalg.norm(want["hidden"])
    assert cosine > {None: 0.9999999, "8bit": 0.9995, "4bit": 0.95, "int8": 0.998}[quantize]


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("quantize", [None, "int8"])
def test_the_checker_passes_the_graph(tmp_path: Path, version: int, profile: str, quantize: str | None) -> None:
    found = export(tmp_path, build_drafter(version), profile=profile, quantize=quantize)
    onnx.checker.check_model(str(found.folder / "draft.onnx"), full_check=True)
    model = onnx.load(found.folder / "draft.onnx", load_external_data=False)
    assert {o.domain: o.version for o in model.opset_import} == {"": {"portable": 23, "inplace": 24}[profile]}
    places = {e.value for t in model.graph.initializer for e in t.external_data if e.key == "location"}
    assert places == {"draft.onnx.data"}


@pytest.mark.grid(3)
@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("quantize", [None, "int8"])
def test_openvino_runs_the_portable_graph(tmp_path: Path, version: int, quantize: str | None) -> None:
    openvino = pytest.importorskip("openvino", reason="openvino is not installed")
    found = export(tmp_path, build_drafter(version), quantize=quantize, debug_outputs=True)
    core = openvino.Core()
    model = core.compile_model(found.folder / "draft.onnx", "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    session = session_of(found.folder)
    for seed, shape in enumerate([(1, 5, 20, 4), (1, 1, 0, 2), (2, 3, 9, 3), (1, 0, 30, 4)]):
        feed, want = feed_of(found, "portable", shape[0], *shape[1:], seed)
        got = {next(iter(k.names)): v for k, v in model(feed).items()}
        np.testing.assert_array_equal(got["draft_ids"], run(session, feed)["draft_ids"])
        if quantize is None:
            close(got["hidden"], want["hidden"], "hidden")
            np.testing.assert_array_equal(got["draft_ids"], want["tokens"])


@pytest.mark.slow
def test_torch_onnx_makes_a_graph_that_computes_the_same(tmp_path: Path) -> None:
    """Another way from the same weights to hidden states: the builder's mistakes are not in it."""
    pytest.importorskip("onnxscript", reason="onnxscript is not installed")
    from pydflash.export import export_drafter

    changes = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 9, "is_causal": None}
    found = export(tmp_path, build_drafter(2, **changes))
    report = export_drafter(tmp_path / "drafter", tmp_path / "target", found.folder, cross_check=True)
    assert report.cross_check is not None
    assert 0 < report.cross_check < TOLERANCE


def test_head_with_a_bias(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    from pydflash.export import export_drafter

    found = export(tmp_path, build_drafter(1))
    tensors = load_file(tmp_path / "target" / "model.safetensors")
    tensors["lm_head.bias"] = torch.randn(VOCAB, generator=torch.Generator().manual_seed(2))
    save_file(tensors, tmp_path / "target" / "model.safetensors")
    export_drafter(tmp_path / "drafter", tmp_path / "target", found.folder, debug_outputs=True)
    head = nn.Linear(HIDDEN, VOCAB)
    head.weight, head.bias = found.head.weight, nn.Parameter(tensors["lm_head.bias"])
    check(found._replace(head=head), session_of(found.folder), "portable", (1, 3, 10, 4), 0)
