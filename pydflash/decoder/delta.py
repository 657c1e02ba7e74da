"""Gated DeltaNet as a mixer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .. import ops
from .block import Forward
from .delta_store import DeltaPart, DeltaShape
from .linear import Projection
from .records import Record


@dataclass(frozen=True, slots=True, eq=False)
class GatedDelta(Record):
    """A short convolution, the delta rule over heads' states, and a gated norm; see `pydflash.ops.recurrent`.

    Attributes:
        inputs: Rows of q, k and v of all heads, then of the gate [Hv * Dv], then of b and of a [Hv] each.
        conv: [T, C], the tap of the newest input first. conv_bias: [C] or None.
        a_log, dt_bias: [Hv] float32.
        norm: [Dv].
        in_order: As in `ops.delta_rule`.
    """

    inputs: Projection
    output: Projection
    conv: Tensor
    conv_bias: Tensor | None
    a_log: Tensor
    dt_bias: Tensor
    norm: Tensor
    eps: float
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    in_order: bool = False

    @property
    def store(self) -> DeltaShape:
        return DeltaShape(self.key_heads, self.value_heads, self.key_dim, self.value_dim, len(self.conv))

    def __call__(self, u: Tensor, part: DeltaPart, forward: Forward) -> Tensor:
        if part.kept is None or part.block is None:
            raise ValueError("GatedDelta: part must be of an open block, got one of a prompt")
        x, z, b, a = self._split(u, forward)
        seen = forward.view.visibility
        x = ops.short_conv(x, self.conv, self.conv_bias, part.tail, seen, part.block_x)
        numbers = (self.a_log, self.dt_bias)
        out = ops.delta_rule(x, a, b, *numbers, part.state, *part.kept, seen, *part.block, self.in_order)
        return self._leave(out, z)

    def prefill(self, u: Tensor, part: DeltaPart, forward: Forward) -> Tensor:
        inputs, z, b, a = self._split(u, forward)
        x = ops.short_conv(inputs, self.conv, self.conv_bias, part.tail)
        part.tail.copy_(torch.cat([part.tail, inputs], 1)[:, -part.tail.shape[1] :])
        out = ops.delta_prompt(x, a, b, self.a_log, self.dt_bias, part.state, self.key_heads)
        return self._leave(out, z)

    def _split(self, u: Tensor, forward: Forward) -> tuple[Tensor, ...]:
        values, heads = self.value_heads * self.value_dim, self.value_heads
        rows = self.inputs(u).unflatten(0, (forward.batch, forward.slots))
        return rows.split([self.store.channels, values, heads, heads], -1)

    def _leave(self, out: Tensor, z: Tensor) -> Tensor:
        y = ops.gated_rms_norm(out.flatten(0, 1), z.flatten(0, 1), self.norm, self.eps)
        return self.output(y.flatten(1))
