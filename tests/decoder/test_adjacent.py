"""Weights that follow each other in memory: what counts as one, and moving them there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_models import TINY
from torch import nn

from pydflash.decoder.adjacent import joined, lay_together


def test_views_of_one_tensor_in_order_are_joined() -> None:
    whole = torch.randn(10, 4)
    a, b, c = whole[1:3], whole[3:4], whole[4:9]
    one = joined([a, b, c])
    assert one is not None
    assert torch.equal(one, whole[1:9])
    assert one.data_ptr() == a.data_ptr()
    bias = torch.randn(6)
    assert torch.equal(joined(bias.split([1, 2, 3])), bias)  # type: ignore[arg-type]
    assert joined([a]) is a


def test_others_are_not() -> None:
    whole, wide = torch.randn(10, 4), torch.randn(6, 8)
    assert joined([whole[3:4], whole[1:3]]) is None, "another order"
    assert joined([whole[:2], whole[3:4]]) is None, "a gap"
    assert joined([whole[:2], torch.randn(2, 4)]) is None, "two storages"
    assert joined([whole[:2], whole[2:4].view(torch.int32)]) is None, "two dtypes"
    assert joined([wide[:, :4], wide[:, 4:]]) is None, "columns"
    assert joined([whole[:2], whole[2:4].view(1, 8)]) is None, "two shapes"


def layers(bias: bool = False) -> list[nn.Linear]:
    return [nn.Linear(8, rows, bias=bias) for rows in (6, 2, 2)]


@pytest.mark.parametrize("bias", [False, True])
def test_parameters_stay_what_they_are(bias: bool) -> None:
    linears = layers(bias)
    parameters = [p for linear in linears for p in linear.parameters()]
    before = [p.detach().clone() for p in parameters]
    lay_together(linears)
    after = [p for linear in linears for p in linear.parameters()]
    assert all(p is q for p, q in zip(after, parameters, strict=True))
    assert all(torch.equal(p, q) and p.requires_grad for p, q in zip(parameters, before, strict=True))
    weight = joined([linear.weight for linear in linears])
    assert weight is not None
    assert not bias or joined([linear.bias for linear in linears]) is not None
    place = weight.data_ptr()
    lay_together(linears)  # nothing left to do
    again = joined([linear.weight for linear in linears])
    assert again is not None
    assert again.data_ptr() == place
    x = torch.randn(3, 8)
    sum(linear(x).sum() for linear in linears).backward()  # type: ignore[union-attr]
    with torch.no_grad():
        linears[1].weight.add_(1)
    assert torch.equal(joined([linear.weight for linear in linears])[6:8], linears[1].weight)  # type: ignore[index]
    linears[0].weight = nn.Parameter(torch.zeros(6, 8))
    assert joined([linear.weight for linear in linears]) is None


def test_what_is_not_a_plain_parameter_stays() -> None:
    with torch.inference_mode():
        made = layers()
    lay_together(made)
    assert joined([linear.weight for linear in made]) is None
    packed = layers()
    packed[1].weight = nn.Parameter(packed[1].weight.data, requires_grad=False)
    packed[1].weight.__class__ = type("Packed", (nn.Parameter,), {})
    places = [linear.weight.data_ptr() for linear in packed]
    lay_together(packed)
    assert [linear.weight.data_ptr() for linear in packed] == places
    some = layers(bias=True)
    some[1].bias = None
    lay_together(some)
    assert joined([linear.weight for linear in some]) is not None
    assert some[1].bias is None


def test_models_with_joined_weights_are_saved_and_loaded(tmp_path: Path) -> None:
    model = TINY["qwen3"]()
    want = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for layer in model.model.layers:
        attention = layer.self_attn
        lay_together([attention.q_proj, attention.k_proj, attention.v_proj])
        lay_together([layer.mlp.gate_proj, layer.mlp.up_proj])
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    assert saved
    assert all(torch.equal(tensor, want[name]) for name, tensor in saved.items())
    model.load_state_dict({name: tensor + 1 for name, tensor in want.items()})
    first = model.model.layers[0].self_attn
    assert joined([first.q_proj.weight, first.k_proj.weight, first.v_proj.weight]) is not None
    assert torch.equal(first.k_proj.weight, want["model.layers.0.self_attn.k_proj.weight"] + 1)
