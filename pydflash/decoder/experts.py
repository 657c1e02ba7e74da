"""A mixture of experts as an MLP, on a CPU: each touched expert's layers over its rows."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .formats import WeightFormat
from .linear import Projection
from .records import GatedMLP, NoCompiledForm, Record, gated

if TYPE_CHECKING:
    from .program import Held


@dataclass(frozen=True, slots=True, eq=False)
class Experts(Record):
    """A router's softmax over all experts, the best `top_k` of them, and the sum of what these give.

    A row's sum goes by rising expert ids and is rounded at each step, so that its bits do not depend on other rows. Of
    equal probabilities the lower id comes first.

    Attributes:
        router: [E, H].
        experts: One for each id.
        top_k: Experts of a row.
        renormalise: Whether the chosen probabilities are divided by their sum.
        weight_dtype: In which they are kept.
        shared: An MLP of all rows, times the sigmoid of `shared_gate` [1, H] where there is one.
    """

    router: Projection
    experts: tuple[GatedMLP, ...]
    top_k: int
    renormalise: bool
    weight_dtype: torch.dtype
    shared: GatedMLP | None = None
    shared_gate: Projection | None = None

    def weights(self) -> tuple[Tensor, ...]:
        """See `Record`; the router's are among them."""
        held = [weight for expert in self.experts for weight in expert.weights()]
        others = [*self.router.weights, *(() if self.shared_gate is None else self.shared_gate.weights)]
        return *others, *held, *(() if self.shared is None else self.shared.weights())

    def pack(self, format: WeightFormat) -> Experts:
        """See `Record`. Routers stay exact where experts are quantised: a choice is no small error."""
        small = format if not format.quantized else None
        return replace(
            self,
            router=self.router if small is None else self.router.pack(small),
            experts=tuple(expert.pack(format) for expert in self.experts),
            shared=None if self.shared is None else self.shared.pack(format),
            shared_gate=self.shared_gate if small is None or self.shared_gate is None else self.shared_gate.pack(small),
        )

    def arguments(self, held: Held) -> tuple[Any, ...]:
        raise NoCompiledForm("experts have no compiled form")

    def route(self, u: Tensor) -> tuple[Tensor, Tensor]:
        """Experts [M, top_k] of rows [M, H], best first, and their weights."""
        probs, ids = torch.softmax(self.router(u), -1, dtype=torch.float).sort(dim=-1, descending=True, stable=True)
        probs, ids = probs[:, : self.top_k], ids[:, : self.top_k]
        if self.renormalise:
            probs = probs / probs.sum(-1, keepdim=True)
        return ids, probs.to(self.weight_dtype)

    def __call__(self, u: Tensor) -> Tensor:
        ids, weights = self.route(u)
        order = ids.flatten().argsort(stable=True)
        out, at = torch.zeros_like(u), 0
        for expert, count in enumerate(torch.bincount(ids.flatten(), minlength=len(self.experts)).tolist()):
            if count:
                places = order[at : at + count]
                rows, at = places // self.top_k, at + count
                y = self.experts[expert](u[rows]) * weights.flatten()[places, None]
                out.index_add_(0, rows, y.to(u.dtype))
        if self.shared is None:
            return out
        shared = self.shared(u)
        if self.shared_gate is not None:
            shared = gated(shared, self.shared_gate(u).expand_as(shared), "sigmoid")
        return out + shared
