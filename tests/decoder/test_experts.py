"""A mixture of experts: against the model's own block, ties, rows that do not see each other, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_models import EXPERTS, TINY, MissingFamily
from torch import Tensor

from pydflash import Speculator, Target
from pydflash.decoder import formats
from pydflash.decoder.experts import Experts
from pydflash.decoder.linear import Projection
from pydflash.decoder.records import GatedMLP
from pydflash.target.fused import FusedTarget
from pydflash.target.modules import Facts, UnknownForm
from pydflash.target.recognise_experts import experts_of

FACTS = Facts(16, (), (), (), {})


def block_of(family: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """The mixture of experts of a model's first layer."""
    try:
        model = TINY[family](**changes)
    except MissingFamily as missing:
        pytest.skip(str(missing))
    block = model.model.layers[0].mlp.to(dtype)
    if not isinstance(getattr(block.experts, "gate_up_proj", None), Tensor):
        pytest.skip("experts are a module each in this transformers")
    return block


def record_of(block: Any) -> Experts:
    found = experts_of(block, 0, FACTS)
    assert found is not None
    return found


def output_of(block: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        out = block(x[None])
    return (out if isinstance(out, Tensor) else out[0])[0]


@pytest.mark.parametrize("packed", [False, True], ids=["", "packed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("qwen3_moe", {}),
        ("qwen3_moe", {"norm_topk_prob": True}),
        ("qwen3_moe", {"norm_topk_prob": False, "num_experts_per_tok": 3}),
        ("qwen3_moe", {"num_experts_per_tok": 1}),
        ("mixtral", {}),
        ("qwen3_next", {}),
    ],
    ids=str,
)
def test_it_is_the_models_own_block(family: str, changes: dict[str, Any], dtype: torch.dtype, packed: bool) -> None:
    block = block_of(family, dtype, **changes)
    record = record_of(block)
    if packed:
        format = formats.as_it_is(dtype)
        assert format is not None
        record = record.pack(format)
    for rows in (1, 2, 40):
        x = torch.randn(rows, 64, generator=torch.Generator().manual_seed(rows)).to(dtype)
        with torch.no_grad():
            chosen = block.gate(x)[-1]
        same = (record.route(x)[0] == chosen).all(-1)  # of equal probabilities torch takes any
        assert float(same.float().mean()) > (0.99 if dtype is torch.float32 else 0.9)
        got, want = record(x)[same], output_of(block, x)[same]
        near = {torch.float32: 2e-6, torch.bfloat16: 1e-2}[dtype]
        assert (got.float() - want.float()).norm() <= near * want.float().norm()


def test_ties_go_to_the_lower_id() -> None:
    expert = GatedMLP(
        Projection((torch.zeros(2, 3),) * 2, (None, None), True), Projection((torch.zeros(3, 2),), (None,))
    )
    record = Experts(Projection((torch.zeros(5, 3),), (None,)), (expert,) * 5, 3, True, torch.float32)
    ids, weights = record.route(torch.randn(4, 3))
    assert ids.tolist() == [[0, 1, 2]] * 4
    torch.testing.assert_close(weights, torch.full((4, 3), 1 / 3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_is_the_same_beside_any_others(dtype: torch.dtype) -> None:
    format = formats.as_it_is(dtype)
    assert format is not None
    record = record_of(block_of("qwen3_next", dtype)).pack(format)
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    whole = record(x)
    for rows in ([0], [5, 3], [63, 0, 17, 2, 40], list(range(33))):
        assert torch.equal(record(x[rows]), whole[rows])


def test_sums_go_by_rising_ids() -> None:
    """Summed by falling weight, which is the order of the choice, a bfloat16 row would be another one."""
    block = block_of("qwen3_moe", torch.bfloat16, **EXPERTS | {"num_experts_per_tok": 4})
    record = record_of(block)
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    ids, weights = record.route(x)
    parts = torch.stack([expert(x) for expert in record.experts], 1)  # [M, E, H]

    def summed(order: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for n in range(ids.shape[1]):
            expert = order.gather(1, torch.full((64, 1), n))
            weight = weights.gather(1, (ids == expert).long().argmax(1, keepdim=True))
            out = out + (parts.gather(1, expert[..., None].expand(-1, -1, 64))[:, 0] * weight).bfloat16()
        return out

    got = record(x)
    assert torch.equal(got, summed(ids.sort(1).values))
    assert not torch.equal(got, summed(ids))


def test_eight_bits_leave_routers_as_they_are() -> None:
    record = record_of(block_of("qwen3_next"))
    packed = record.pack(formats.of("int8"))
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(2))
    assert torch.equal(packed.route(x)[0], record.route(x)[0])
    assert (packed(x) - record(x)).norm() < 0.05 * record(x).norm()
    assert packed.experts[0].down.packed is not None


def test_whole_texts_in_eight_bits_do_not_depend_on_drafts() -> None:
    block_of("qwen3_moe")
    model = TINY["qwen3_moe"]()
    spec = Speculator(model, None, quantize="int8")
    ids = torch.arange(20)
    text = spec.generate(ids, 24).token_ids
    target = FusedTarget(Target(model), "int8")
    cache = target.new_cache(1, 64)
    target.prefill(ids[None], cache)
    logits = target.verify(torch.tensor([text]), cache).logits[0]
    assert logits.argmax(-1).tolist()[:-1] == text[1:]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("router", "a router that takes the softmax over all experts and the best of them"),
        ("bias", "experts without biases"),
        ("activation", "a gated SiLU or GELU"),
        ("output", "plain MLP in layer 0, off by"),
    ],
)
def test_what_does_otherwise_is_refused(change: str, message: str) -> None:
    block_of("qwen3_moe")
    model = TINY["qwen3_moe"]()
    block = model.model.layers[0].mlp
    if change == "router":

        class Sigmoid(type(block.gate)):  # type: ignore[misc]
            def forward(self, x: Tensor) -> Any:
                scores = (x.reshape(-1, x.shape[-1]) @ self.weight.t()).sigmoid()
                weights, ids = scores.topk(self.top_k, -1)
                return scores, weights, ids

        block.gate.__class__ = Sigmoid
    if change == "bias":
        block.experts.down_proj_bias = torch.nn.Parameter(torch.zeros(4, 64))
    if change == "activation":
        block.experts.act_fn = torch.nn.ReLU()
    if change == "output":
        inner = type(block).forward

        class Scaled(type(block)):  # type: ignore[misc]
            def forward(self, x: Tensor) -> Tensor:
                return 1.01 * inner(self, x)

        block.__class__ = Scaled
    with pytest.raises(UnknownForm, match=message):
        FusedTarget(Target(model))
