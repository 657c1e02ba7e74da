"""What only a GPU shows: graphs, streams, a second device, memory over many rounds, half precision, quantisation."""

from __future__ import annotations

import pytest
import torch
from pairs import build_drafter, fitted_prompts
from tiny_models import TINY

from pydflash import Drafter, Speculator

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")


def pair(device: str, dtype: torch.dtype = torch.float32, version: int = 2) -> tuple[torch.nn.Module, Drafter]:
    model = TINY["qwen3"](num_hidden_layers=6).to(device, dtype)
    return model, build_drafter(version).to(device, dtype)


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("options", [{}, {"path": "tree", "num_nodes": 7}, {"path": "viterbi"}])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_graph_rounds_give_the_text_of_the_generic_loop(version: int, options: dict, temperature: float) -> None:
    model, drafter = pair("cuda", version=version)
    fast = Speculator(model, drafter, **options)
    slow = Speculator(model, drafter, target_path="generic", **options)
    got = fast.generate(fitted_prompts(), 40, temperature=temperature, seed=3)
    want = [slow.generate(prompt, 40, temperature=temperature, seed=3) for prompt in fitted_prompts()]
    assert [out.token_ids for out in got] == [out.token_ids for out in want]
    assert [out.stats.num_accepted for out in got] == [out.stats.num_accepted for out in want]
    assert got[0].stats.backends["target"] == "fused layers"
    assert got[0].stats.backends["round"] == "graph"
    assert want[0].stats.backends["target"] == "generic"
    assert got[0].stats.peak_bytes is not None
    assert got[0].stats.peak_bytes > 0


def test_logits_processors_run_between_two_graphs() -> None:
    model, drafter = pair("cuda")

    def ban(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.index_fill(-1, ids[0, -3:], -torch.inf)

    outs = [
        Speculator(model, drafter, target_path=path).generate(
            fitted_prompts()[0], 30, temperature=0.0, logits_processor=[ban]
        )
        for path in ("fused", "generic")
    ]
    assert outs[0].token_ids == outs[1].token_ids
    assert outs[0].stats.backends["round"] == "graph, in pieces (processors)"


def test_a_side_stream_gives_the_same() -> None:
    model, drafter = pair("cuda")
    spec = Speculator(model, drafter)
    want = spec.generate(fitted_prompts()[0], 50, temperature=1.0, seed=1).token_ids
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        again = spec.generate(fitted_prompts()[0], 50, temperature=1.0, seed=1).token_ids  # on used buffers
        fresh = Speculator(model, drafter).generate(fitted_prompts()[0], 50, temperature=1.0, seed=1).token_ids
    assert again == want
    assert fresh == want


def test_the_second_of_two_gpus_gives_the_same() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    texts = [Speculator(*pair(f"cuda:{i}")).generate(fitted_prompts(), 50, temperature=1.0, seed=1) for i in range(2)]
    assert [out.token_ids for out in texts[0]] == [out.token_ids for out in texts[1]]
    assert torch.cuda.current_device() == 0


def test_a_drafter_on_another_device_is_refused() -> None:
    model, drafter = pair("cuda")
    with pytest.raises(ValueError, match=r"^Speculator: the drafter must be on cuda:0, got cpu$"):
        Speculator(model, drafter.to("cpu"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_keeps_its_promise(dtype: torch.dtype) -> None:
    model, drafter = pair("cuda", dtype)
    out = Speculator(model, drafter).generate(fitted_prompts()[1], 60, temperature=0.0)
    prompt = fitted_prompts()[1].tolist()
    ids = torch.tensor([prompt + out.token_ids], device="cuda")
    with torch.no_grad():
        logits = model(ids).logits[0, len(prompt) - 1 : -1].float()
    emitted = logits.gather(-1, torch.tensor(out.token_ids, device="cuda")[:, None])[:, 0]
    best = logits.amax(-1)
    ulp = torch.finfo(dtype).eps * torch.exp2(torch.floor(torch.log2(best.abs().clamp_min(1e-6))))
    assert bool((best - emitted <= torch.clamp(2 * ulp, min=0.25)).all())


def test_many_rounds_in_flat_memory() -> None:
    model, drafter = pair("cuda", torch.bfloat16)
    spec = Speculator(model, drafter)
    rounds, held = 0, []
    seed = 0
    while rounds < 20_000:
        out = spec.generate(fitted_prompts(), 400, temperature=1.0, seed=seed, stop_token_ids=[])
        rounds += sum(one.stats.rounds for one in out)
        seed += 1
        held.append(torch.cuda.memory_allocated())
    assert len(held) > 4
    assert max(held[2:]) <= held[1]


def test_a_long_prompt_leaves_no_matrix_of_logits() -> None:
    model = TINY["qwen3"](vocab_size=32_000, max_position_embeddings=4096).to("cuda")
    spec = Speculator(model, None)
    spec.generate([1, 2, 3], 4, temperature=0.0)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    spec.generate(list(range(3000)), 4, temperature=0.0)
    assert torch.cuda.max_memory_allocated() - before < 200 << 20  # 3,000 rows of logits take 384 MB


@pytest.mark.parametrize("kind", ["Int8WeightOnlyConfig", "Float8WeightOnlyConfig"])
def test_a_quantised_target_runs_in_its_own_layers(kind: str) -> None:
    torchao = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
    model, drafter = pair("cuda", torch.bfloat16)
    torchao.quantize_(model.model.layers, getattr(torchao, kind)())
    spec = Speculator(model, drafter)
    out = spec.generate(fitted_prompts()[0], 30, temperature=0.0)
    assert out.stats.backends["target"].startswith("the model's own layers (fused ones need plain linear")
    assert out.stats.backends["round"] == "graph"
    prompt = fitted_prompts()[0].tolist()
    with torch.no_grad():
        logits = model(torch.tensor([prompt + out.token_ids], device="cuda")).logits[0, len(prompt) - 1 : -1].float()
    emitted = logits.gather(-1, torch.tensor(out.token_ids, device="cuda")[:, None])[:, 0]
    assert bool((logits.amax(-1) - emitted <= 0.3).all())
