"""The recogniser of experts behind a softmax router."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from ..decoder.experts import Experts
from ..decoder.linear import Projection
from ..decoder.records import GatedMLP
from .modules import Facts, parts_of, projection_of, unknown
from .recognise_mlp import activation_of, gated_mlp_of

_PARTS = {"gate", "experts"}
_SHARED = {"shared_expert", "shared_expert_gate"}
_PROBE = 64  # rows that a router is tried on


def experts_of(module: Any, i: int, facts: Facts) -> Experts | None:
    parts = parts_of(module)
    if not _PARTS <= set(parts) <= _PARTS | _SHARED:
        return None
    router, experts = parts["gate"], parts["experts"]
    held = [getattr(experts, name, None) for name in ("gate_up_proj", "down_proj")]
    if not all(isinstance(weight, Tensor) and weight.dim() == 3 for weight in held):
        unknown("experts whose weights are stacked in gate_up_proj and down_proj", type(experts).__name__)
    gate_up, down = (cast("Tensor", weight).detach() for weight in held)
    if {name for name, _ in experts.named_parameters()} != {"gate_up_proj", "down_proj"}:
        unknown("experts without biases", [name for name, _ in experts.named_parameters()])
    if gate_up.device.type != "cpu":
        unknown("experts on a CPU", f"some on {gate_up.device}")
    count, width = len(gate_up), gate_up.shape[1] // 2
    if down.shape[2] != width or getattr(router.weight, "shape", ())[:1] != (count,):
        unknown("gate and up of each expert, one behind the other", [tuple(x.shape) for x in (gate_up, down)])
    activation = activation_of(experts)
    mlps = tuple(_expert(gate_up[e], down[e], width, activation) for e in range(count))
    shared = None if "shared_expert" not in parts else gated_mlp_of(parts["shared_expert"], i, facts)
    gate = None if "shared_expert_gate" not in parts else projection_of([parts["shared_expert_gate"]])
    top_k = next((int(k) for m in (router, module) if (k := getattr(m, "top_k", None)) is not None), 0)
    weight = Projection((router.weight.detach(),), (None,))
    return _as_routed(Experts(weight, mlps, top_k, True, torch.float, shared, gate), router)


def _expert(gate_up: Tensor, down: Tensor, width: int, activation: str) -> GatedMLP:
    both = Projection(tuple(gate_up.split(width)), (None, None), activation == "silu")
    return GatedMLP(both, Projection((down,), (None,)), activation)


def _as_routed(found: Experts, router: Any) -> Experts:
    """With the numbers by which the router's own choices come out. Raises: UnknownForm."""
    weight = found.router.weights[0]
    x = torch.randn(_PROBE, weight.shape[1], generator=torch.Generator().manual_seed(0)).to(weight.dtype)
    with torch.no_grad():
        given = router(x)
        if not isinstance(given, tuple) or len(given) != 3:
            unknown("a router that gives logits, weights and ids", type(given).__name__)
        _, wanted, ids = given
        tried = [replace(found, renormalise=each, weight_dtype=wanted.dtype) for each in (True, False)]
        fits = [one for one in tried if ids.shape == (_PROBE, one.top_k) and _agree(one.route(x), (ids, wanted))]
    if not fits:
        unknown("a router that takes the softmax over all experts and the best of them", type(router).__name__)
    return fits[0]


def _agree(got: tuple[Tensor, Tensor], wanted: tuple[Tensor, Tensor]) -> bool:
    """Whether choices and weights are the same, but for near ties, which rounding may turn."""
    same = (got[0] == wanted[0]).all(-1)
    return float(same.float().mean()) > 0.9 and torch.allclose(got[1][same].float(), wanted[1][same].float(), rtol=0.02)
