"""How layers are put together: what is found of each family, and that nothing else passes for it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from greedy_texts import prompt_of
from tiny_models import SLIDING_MIX, TINY, MissingFamily

from pydflash import Target
from pydflash.target.fused import FusedTarget
from pydflash.target.layers import Recognised
from pydflash.target.modules import UnknownForm
from pydflash.target.own import OwnTarget
from pydflash.target.recognise import LayerWiring
from pydflash.target.tracing import LogitForm, Wiring, trace

FACTORS = {"residual_multiplier": 0.22, "embedding_multiplier": 12.0, "logits_scaling": 16.0}


def model_of(name: str, **changes: Any) -> Any:
    try:
        return TINY[name](**changes)
    except MissingFamily as missing:
        pytest.skip(str(missing))


def found_in(model: Any) -> Wiring:
    own, ids = OwnTarget(Target(model)), prompt_of(24)
    return trace(own.target, ids, torch.arange(24)[None], own.run_at).wiring


def test_the_common_form() -> None:
    wiring = found_in(model_of("llama"))
    its = LayerWiring("self_attn", "input_layernorm", None, "mlp", "post_attention_layernorm", None)
    assert wiring.layers == (its,) * 4
    assert (wiring.final, wiring.embed_scale, wiring.logits) == ("norm", 1.0, LogitForm())


def test_norms_behind_and_two_tables() -> None:
    wiring = found_in(model_of("gemma3"))
    for layer in wiring.layers:
        assert layer[:3] == ("self_attn", "input_layernorm", "post_attention_layernorm")
        assert layer[3:7] == ("mlp", "pre_feedforward_layernorm", "post_feedforward_layernorm", 1.0)
    assert len(wiring.tables) == 2
    kinds = [wiring.tables[layer.table] for layer in wiring.layers]
    assert kinds[0] == kinds[2] != kinds[1] == kinds[3]  # as SLIDING_MIX
    assert SLIDING_MIX[0] != SLIDING_MIX[1]


def test_factors() -> None:
    wiring = found_in(model_of("granite", **FACTORS))
    assert {layer.scale for layer in wiring.layers} == {0.22}
    assert wiring.embed_scale == 12
    assert wiring.logits == LogitForm("over", 16.0)
    capped = model_of("gemma2", attn_logit_softcapping=None, final_logit_softcapping=3.0)
    assert found_in(capped).logits == LogitForm("cap", 3.0)


def test_norms_behind_alone() -> None:
    for layer in found_in(model_of("olmo2")).layers:
        assert layer[:3] == ("self_attn", None, "post_attention_layernorm")
        assert layer[3:6] == ("mlp", None, "post_feedforward_layernorm")


def test_beside_each_other() -> None:
    wiring = found_in(model_of("cohere", logit_scale=0.0625))
    assert wiring.layers == (LayerWiring("self_attn", "input_layernorm", None, "mlp", None, None, parallel=True),) * 4
    assert wiring.logits == LogitForm("times", 0.0625)


@pytest.mark.parametrize(
    ("name", "changes", "rotations"),
    [
        ("llama", {}, ["given"] * 4),
        ("glm4", {}, ["neighbours"] * 4),
        ("cohere", {}, ["given"] * 4),
        ("cohere2", {}, ["given", "none"] * 2),
        ("smollm3", {"no_rope_layers": [1, 0, 0, 1]}, ["given", "none", "none", "given"]),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotations_are_tried(name: str, changes: dict[str, Any], rotations: list[str], dtype: torch.dtype) -> None:
    target = FusedTarget(Target(model_of(name, **changes).to(dtype)))
    assert [layer.rotation for layer in target.recognised.wiring.layers] == rotations


def test_a_layer_without_a_norm_is_one_too() -> None:
    model = model_of("llama")
    model.model.layers[1].input_layernorm = torch.nn.Identity()
    target = FusedTarget(Target(model))  # and has compared its logits with the model's
    assert [layer.mixer_before for layer in target.recognised.wiring.layers] == [
        "input_layernorm",
        None,
        "input_layernorm",
        "input_layernorm",
    ]


def _patched(model: Any, change: str) -> None:
    """A model whose code does something that nothing of it says."""
    layer = model.model.layers[1]

    def scaled(module: Any, factor: float) -> None:
        inner = type(module).forward

        class Other(type(module)):  # type: ignore[misc]
            def forward(self, *args: Any, **kwargs: Any) -> Any:
                out = inner(self, *args, **kwargs)
                return out * factor if isinstance(out, torch.Tensor) else (out[0] * factor, *out[1:])

        module.__class__ = Other

    if change == "layer":
        scaled(layer, 1.001)
    if change == "final norm":
        model.model.norm = torch.nn.Sequential(model.model.norm)
    if change == "a part more":
        layer.adapter = torch.nn.Linear(4, 4)
    if change == "norm of no use":
        layer.spare_norm = torch.nn.LayerNorm(4)
    if change == "values":
        scaled(layer.self_attn.v_proj, 1.01)
    if change == "mlp":
        scaled(layer.mlp.up_proj, 1.01)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("layer", "a plain sum after the MLP in layer 1, got another"),
        ("final norm", "RMSNorm with a weight and an epsilon"),
        ("a part more", "layers of a mixer, an MLP and norms around them, got adapter"),
        ("norm of no use", "a call of each of its modules, got 0 of the spare_norm of layer 1"),
        ("values", "plain linear layers, got Other"),
        ("mlp", "plain linear layers, got Other"),
    ],
)
def test_what_else_is_done_is_refused_by_a_sentence(change: str, message: str) -> None:
    model = model_of("llama")
    _patched(model, change)
    with pytest.raises(UnknownForm) as refusal:
        FusedTarget(Target(model))
    assert message in str(refusal.value)


@pytest.mark.parametrize(
    ("name", "place", "value"),
    [
        ("granite", "scale", 1.0),
        ("gemma3", "table", 1),
        ("gemma3", "mixer_after", None),
        ("gemma3", "mlp_before", "input_layernorm"),
        ("olmo2", "mlp_after", None),
        ("olmo2", "mixer_before", "post_attention_layernorm"),
        ("glm4", "rotation", "given"),
        ("glm4", "mlp_after", None),
        ("cohere", "parallel", False),
        ("cohere2", "rotation", "none"),
        ("llama", "rotation", "neighbours"),
    ],
)
def test_another_wiring_gives_other_logits(name: str, place: str, value: Any) -> None:
    """A mutant of what was found is caught by the comparison with the model's forward."""
    model = model_of(name, **FACTORS) if name == "granite" else model_of(name)
    target = FusedTarget(Target(model))
    found = target.recognised.wiring
    changed = found.layers[2]._replace(**{place: 1 - found.layers[2].table if place == "table" else value})
    assert changed != found.layers[2]
    wiring = replace(found, layers=(*found.layers[:2], changed, *found.layers[3:]))
    target._recognised = Recognised(target.target, target.windows, wiring)
    assert "logits off by" in str(target.trial_fault())
