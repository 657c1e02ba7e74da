"""What a decoder layer is made of, as data: a mixer and an MLP, each with what stands around it.

A record says how it runs over a block, which projections it packs, and what the compiled decoder needs of it. Another
kind of mixer or MLP is another record here, a kernel, and a recogniser in `pydflash.target.recognise`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from .. import ops
from .block import Forward
from .formats import WeightFormat, as_it_is
from .linear import Projection
from .prompt import prompt_attention
from .stores import KVPart, KVShape, StoreShape

if TYPE_CHECKING:
    from .program import Held

_Record = TypeVar("_Record", bound="Record")


class NoCompiledForm(ValueError):
    """The compiled decoder cannot run a layer; the message says what of it."""


class Record:
    """Part of a layer: a frozen dataclass of norms, numbers and what has `weights` and `pack`, as projections."""

    __slots__ = ()

    def weights(self) -> tuple[Tensor, ...]:
        """Those that `pack` copies."""
        held = [v.weights() if isinstance(v, Record) else v.weights for v in self._packable().values()]
        return tuple(weight for weights in held for weight in weights)

    def pack(self: _Record, format: WeightFormat) -> _Record:
        """The same with packed copies of its weights."""
        packed = {name: value.pack(format) for name, value in self._packable().items()}
        return cast("_Record", replace(cast("Any", self), **packed))

    def _packable(self) -> dict[str, Any]:
        values = {field.name: getattr(self, field.name) for field in fields(cast("Any", self))}
        return {name: value for name, value in values.items() if hasattr(value, "pack")}

    def arguments(self, held: Held) -> tuple[Any, ...]:
        """What the compiled decoder takes for it, by address. Raises: NoCompiledForm."""
        raise NoCompiledForm(f"{type(self).__name__} has no compiled form")


def gated(x: Tensor, gate: Tensor, activation: str) -> Tensor:
    """As `ops.apply_gate`; by torch on devices that have no kernel of it."""
    kernels = ops if ops.registry.has("apply_gate", x.device) else ops.reference
    return kernels.apply_gate(x, gate, activation)


class Mixer(Protocol):
    """Mixes positions. It reads and writes its layer's part of a store."""

    @property
    def store(self) -> StoreShape:
        """What its layer keeps of committed positions."""

    def __call__(self, u: Tensor, part: Any, forward: Forward) -> Tensor:
        """Rows u [B * S, H] of a block to [B * S, H]; writes the block into its part of an open store."""

    def prefill(self, u: Tensor, part: Any, forward: Forward) -> Tensor:
        """Rows u [P, H] of a prompt of one sequence to [P, H]; writes what it keeps of them into the store itself."""

    def weights(self) -> tuple[Tensor, ...]: ...
    def pack(self, format: WeightFormat) -> Mixer: ...
    def arguments(self, held: Held) -> tuple[Any, ...]: ...


class MLP(Protocol):
    """Works on each position alone."""

    def __call__(self, u: Tensor) -> Tensor:
        """Rows u [M, H] to [M, H]."""

    def weights(self) -> tuple[Tensor, ...]: ...
    def pack(self, format: WeightFormat) -> MLP: ...
    def arguments(self, held: Held) -> tuple[Any, ...]: ...


class NormKind(NamedTuple):
    """How a family computes RMSNorm; see `ops.add_rms_norm`."""

    eps: float
    weight_offset: float = 0.0
    round_first: bool = True


@dataclass(frozen=True, slots=True, eq=False)
class Norm:
    """RMSNorm with a weight [size]."""

    weight: Tensor
    kind: NormKind

    def __call__(self, x: Tensor, delta: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(norm of x + delta, x + delta), [M, size] each."""
        return ops.add_rms_norm(x, delta, self.weight, *self.kind)

    def arguments(self, held: Held) -> tuple[Any, ...]:
        return held(self.weight), *self.kind, False, None


@dataclass(frozen=True, slots=True, eq=False)
class LayerNorm:
    """Norm around the mean, rounded once, with a weight [size] and perhaps a bias: by torch, or compiled as a whole."""

    weight: Tensor
    bias: Tensor | None
    eps: float

    def __call__(self, x: Tensor, delta: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """As of `Norm`."""
        x = x if delta is None else x + delta
        bias = None if self.bias is None else self.bias.float()
        return F.layer_norm(x.float(), self.weight.shape, self.weight.float(), bias, self.eps).to(x.dtype), x

    def arguments(self, held: Held) -> tuple[Any, ...]:
        return held(self.weight), self.eps, 0.0, False, True, None if self.bias is None else held(self.bias)


@dataclass(frozen=True, slots=True, eq=False)
class Convolution(Record):
    """The two block convolutions around a record: bases [T, H] before and after it, and what makes their deltas."""

    before: Tensor
    after: Tensor
    deltas: Projection

    def pack(self, format: WeightFormat) -> Convolution:
        """Its weights, which are small, stay as they are where they can."""
        return replace(self, deltas=self.deltas.pack(as_it_is(self.before.dtype) or format))

    def enter(self, u: Tensor, slots: int) -> tuple[Tensor, Tensor]:
        """The convolution of rows u [B * S, H] before the record, and the deltas [B, S, T, G] of the one after it."""
        taps = self.before.shape[0]
        deltas = self.deltas(u).view(-1, slots, 2, taps, self.deltas.weights[0].shape[0] // (2 * taps))
        return self._run(u, self.before, deltas[:, :, 0]), deltas[:, :, 1]

    def leave(self, y: Tensor, deltas: Tensor) -> Tensor:
        """The convolution after the record."""
        return self._run(y, self.after, deltas)

    def _run(self, x: Tensor, base: Tensor, deltas: Tensor) -> Tensor:
        return ops.block_conv(x.unflatten(0, deltas.shape[:2]), base, deltas).flatten(0, 1)

    def arguments(self, held: Held) -> tuple[Any, ...]:
        return held(self.before), held(self.after), held.linear(self.deltas)


@dataclass(frozen=True, slots=True, eq=False)
class Residual(Record):
    """What stands around a record: x + scale * after(record(before(x))), convolutions next to the record.

    before, after: None where there is no norm.
    """

    before: Norm | LayerNorm | None
    after: Norm | LayerNorm | None = None
    scale: float = 1.0
    convolution: Convolution | None = None

    def enter(self, x: Tensor, delta: Tensor | None, slots: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """What the record takes [B * S, H], x + delta, and what `leave` needs."""
        if self.before is not None:
            u, x = self.before(x, delta)
        else:
            u = x = x if delta is None else x + delta
        if self.convolution is None:
            return u, x, None
        u, deltas = self.convolution.enter(u, slots)
        return u, x, deltas

    def leave(self, y: Tensor, deltas: Tensor | None) -> Tensor:
        """What is added to x, of what the record gave."""
        if self.convolution is not None and deltas is not None:
            y = self.convolution.leave(y, deltas)
        if self.after is not None:
            y = self.after(y)[0]
        return y if self.scale == 1 else y * self.scale

    def arguments(self, held: Held) -> tuple[Any, ...]:
        before, after, convolution = (
            None if part is None else part.arguments(held) for part in (self.before, self.after, self.convolution)
        )
        return before, after, self.scale, convolution


@dataclass(frozen=True, slots=True, eq=False)
class Attention(Record):
    """Attention over the committed positions and the block.

    Attributes:
        qkv: [(num_heads + 2 num_kv_heads) * head_dim, H].
        q_norm, k_norm: Of one kind, per head or over all heads, as their sizes say; None where there are none.
        rotary_dim: Rotated channels of each head, 0 for none, in pairs (2i, 2i + 1) where interleaved.
        window: 0 where it sees everything.
        causal: Whether its slots see earlier slots only, where the view has an own visibility for that.
        table: Which of the forward's rotary tables it reads.
        gate: Of its input, [num_heads * head_dim, H]; what the heads give is multiplied by its sigmoid.
    """

    qkv: Projection
    output: Projection
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    interleaved: bool
    scale: float
    q_norm: Norm | None = None
    k_norm: Norm | None = None
    window: int = 0
    causal: bool = False
    table: int = 0
    gate: Projection | None = None

    @property
    def store(self) -> KVShape:
        return KVShape(self.num_kv_heads, self.head_dim)

    def __call__(self, u: Tensor, part: KVPart, forward: Forward) -> Tensor:
        view = forward.view
        q = self.queries(u, part, forward)
        seen = view.causal if self.causal and view.causal is not None else view.visibility
        out = ops.block_attention(q, *part, forward.lengths, seen, view.depths, self.window, self.scale)
        return self._leave(out.transpose(1, 2).reshape(len(u), -1), u)

    def prefill(self, u: Tensor, part: KVPart, forward: Forward) -> Tensor:
        q = self.queries(u, part, forward)
        return self._leave(prompt_attention(q, part.k, part.v, self.scale, self.window).reshape(len(u), -1), u)

    def _leave(self, out: Tensor, u: Tensor) -> Tensor:
        return self.output(out if self.gate is None else gated(out, self.gate(u), "sigmoid"))

    def queries(self, u: Tensor, part: KVPart, forward: Forward) -> Tensor:
        """Normalised and rotated queries [B, Hq, S, D]; the block's keys and values are written."""
        qkv, q_norm, k_norm = self.qkv(u), self.q_norm, self.k_norm
        if q_norm is not None and k_norm is not None and len(q_norm.weight) != self.head_dim:
            q, k, v = qkv.split([len(q_norm.weight), len(k_norm.weight), len(k_norm.weight)], 1)
            qkv, q_norm, k_norm = torch.cat([q_norm(q)[0], k_norm(k)[0], v], 1), None, None
        eps, weight_offset, round_first = NormKind(1e-6) if q_norm is None else q_norm.kind
        cos, sin = forward.tables[self.table] if self.rotary_dim else (x[:, :0] for x in forward.tables[self.table])
        return ops.head_norm_rope(
            qkv.unflatten(0, (forward.batch, forward.slots)),
            None if q_norm is None else q_norm.weight,
            None if k_norm is None else k_norm.weight,
            eps,
            cos,
            sin,
            forward.lengths,
            forward.view.depths,
            part.block_k,
            part.block_v,
            self.num_heads,
            self.rotary_dim,
            self.interleaved,
            weight_offset,
            round_first,
        )

    def arguments(self, held: Held) -> tuple[Any, ...]:
        if self.gate is not None:
            raise NoCompiledForm("gates behind attention have no compiled form")
        sizes = (self.num_heads, self.num_kv_heads, self.head_dim, self.rotary_dim)
        norms = [None if norm is None else norm.arguments(held) for norm in (self.q_norm, self.k_norm)]
        linears = held.linear(self.qkv), held.linear(self.output)
        return *linears, *norms, sizes, self.interleaved, self.scale, self.window, self.causal, self.table


@dataclass(frozen=True, slots=True, eq=False)
class GatedMLP(Record):
    """down(activation(gate(x)) * up(x)).

    Attributes:
        gate_up: Gated where the activation is "silu", else both side by side.
        activation: "silu" or "gelu_tanh".
    """

    gate_up: Projection
    down: Projection
    activation: str = "silu"

    def __call__(self, u: Tensor) -> Tensor:
        y = self.gate_up(u)
        if self.activation == "gelu_tanh":
            gate, up = y.chunk(2, -1)
            y = gated(up, gate, self.activation)
        return self.down(y)

    def arguments(self, held: Held) -> tuple[Any, ...]:
        return held.linear(self.gate_up), held.linear(self.down), self.activation


@dataclass(frozen=True, slots=True, eq=False)
class Layer:
    """One decoder layer, and what stands around its mixer and around its MLP.

    parallel: Whether the MLP reads what the mixer reads; then nothing is before it, and there are no convolutions.
    """

    mixer: Mixer
    mlp: MLP
    around_mixer: Residual
    around_mlp: Residual
    parallel: bool = False

    def weights(self) -> tuple[Tensor, ...]:
        """All that `pack` copies but the convolutions', which are small."""
        return *self.mixer.weights(), *self.mlp.weights()

    def pack(self, format: WeightFormat) -> Layer:
        """The same with packed copies of its weights."""
        mixer, mlp = self.mixer.pack(format), self.mlp.pack(format)
        return Layer(mixer, mlp, self.around_mixer.pack(format), self.around_mlp.pack(format), self.parallel)

    def arguments(self, held: Held) -> tuple[Any, ...]:
        """What the compiled decoder takes for it. Raises: NoCompiledForm."""
        parts = (self.mixer, self.mlp, self.around_mixer, self.around_mlp)
        return *(part.arguments(held) for part in parts), self.parallel
