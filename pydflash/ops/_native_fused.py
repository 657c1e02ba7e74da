"""Registration of the fused ops: schemas, the compiled implementations, plain torch in their place, and fakes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from . import backends
from . import reference_fused as reference
from ._native import _capsule, _module, _rows, library

_SCHEMAS = (
    "add_rms_norm(Tensor x, Tensor? delta, Tensor weight, float eps, float weight_offset, bool round_first)"
    " -> (Tensor, Tensor)",
    "swiglu(Tensor x) -> Tensor",
    "skinny_linear(Tensor x, Tensor[] weights, Tensor?[] biases, bool gated) -> Tensor",
    "packed_linear(Tensor x, Tensor weight, Tensor? scales, Tensor? bias, int out_features, str format) -> Tensor",
    "head_norm_rope(Tensor qkv, Tensor? q_weight, Tensor? k_weight, float eps, Tensor cos, Tensor sin,"
    " Tensor lengths, Tensor depths, Tensor(a!) k_block, Tensor(b!) v_block, int num_heads, int rotary_dim,"
    " bool interleaved, float weight_offset, bool round_first) -> Tensor",
    "context_append(Tensor kv, Tensor? k_weights, float eps, Tensor cos, Tensor sin, Tensor(a!) k_cache,"
    " Tensor(b!) v_cache, Tensor lengths, Tensor counts, int rotary_dim, bool interleaved, float weight_offset,"
    " bool round_first) -> ()",
    "round_commit(Tensor tokens, Tensor index, Tensor num_accepted, Tensor bonus, Tensor active, Tensor? features,"
    " Tensor(a!)? features_out, Tensor(b!) anchors, Tensor(c!) lengths, Tensor(d!) starts, Tensor(e!) counts,"
    " Tensor(f!) record) -> ()",
)
for _schema in _SCHEMAS:
    library.define(_schema)


def add_rms_norm(
    x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, weight_offset: float, round_first: bool
) -> tuple[Tensor, Tensor]:
    module, stream, device = _module("add_rms_norm", x, delta, weight)
    out, sum_ = _norm_outputs(x, delta)
    module.add_rms_norm(
        _capsule(_rows(x)),
        None if delta is None else _capsule(_rows(delta)),
        _capsule(weight),
        eps,
        weight_offset,
        round_first,
        _capsule(out),
        None if delta is None else _capsule(sum_),
        stream,
        device,
    )
    return out, sum_


def _norm_outputs(x: Tensor, delta: Tensor | None) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape if delta is not None else 0)


def swiglu(x: Tensor) -> Tensor:
    module, stream, device = _module("swiglu", x)
    out = _half(x)
    module.swiglu(_capsule(_rows(x)), _capsule(out), stream, device)
    return out


def _half(x: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:-1], x.shape[-1] // 2)


def skinny_linear(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], gated: bool) -> Tensor:
    module, stream, device = _module("skinny_linear", x, *weights, *biases)
    out = _linear_out(x, weights, gated)
    given = [_capsule(bias) for bias in biases]
    module.skinny_linear(
        _capsule(_rows(x)), [_capsule(w) for w in weights], given, gated, _capsule(out), stream, device
    )
    return out


def skinny_linear_balance(out_features: tuple[int, ...], in_features: int, device: torch.device) -> float:
    """The share of a GPU's time that is work in `skinny_linear`; 0 where it cannot run."""
    module, _, index = _module("skinny_linear", torch.empty(0, device=device))
    return module.skinny_linear_balance(list(out_features), in_features, index)


def _linear_out(x: Tensor, weights: Sequence[Tensor], gated: bool) -> Tensor:
    return x.new_empty(x.shape[0], weights[0].shape[0] if gated else sum(weight.shape[0] for weight in weights))


def packed_linear(
    x: Tensor, weight: Tensor, scales: Tensor | None, bias: Tensor | None, out_features: int, format: str
) -> Tensor:
    module, stream, device = _module("packed_linear", x, weight, scales, bias)
    out = _packed_out(x, weight, scales, bias, out_features, format)
    parts = packed_parts(weight, scales, bias, x.shape[-1], out_features, format)
    module.packed_linear(_capsule(_rows(x)), parts, _capsule(out), stream, device)
    return out


def packed_parts(
    weight: Tensor, scales: Tensor | None, bias: Tensor | None, in_features: int, out_features: int, format: str
) -> tuple[object, object, object, int, int, str]:
    """A packed layer as compiled code takes it; the caller keeps the tensors."""
    return _capsule(weight), _capsule(scales), _capsule(bias), in_features, out_features, format


def _packed_out(
    x: Tensor, weight: Tensor, scales: Tensor | None, bias: Tensor | None, out_features: int, format: str
) -> Tensor:
    return x.new_empty(x.shape[0], out_features)


def head_norm_rope(
    qkv: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    lengths: Tensor,
    depths: Tensor,
    k_block: Tensor,
    v_block: Tensor,
    num_heads: int,
    rotary_dim: int,
    interleaved: bool,
    weight_offset: float,
    round_first: bool,
) -> Tensor:
    inputs = (qkv, q_weight, k_weight, cos, sin, lengths, depths, k_block, v_block)
    module, stream, device = _module("head_norm_rope", *inputs)
    q = _heads_out(qkv, k_block, num_heads)
    module.head_norm_rope(
        _capsule(_rows(qkv)),
        _capsule(q_weight),
        _capsule(k_weight),
        eps,
        *[_capsule(t) for t in (cos, sin, lengths, depths, q, k_block, v_block)],
        rotary_dim,
        interleaved,
        weight_offset,
        round_first,
        stream,
        device,
    )
    return q


def _heads_out(qkv: Tensor, k_block: Tensor, num_heads: int) -> Tensor:
    return qkv.new_empty(qkv.shape[0], num_heads, *k_block.shape[2:])


def context_append(
    kv: Tensor,
    k_weights: Tensor | None,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    lengths: Tensor,
    counts: Tensor,
    rotary_dim: int,
    interleaved: bool,
    weight_offset: float,
    round_first: bool,
) -> None:
    module, stream, device = _module("context_append", kv, k_weights, cos, sin, k_cache, v_cache, lengths, counts)
    module.context_append(
        _capsule(_rows(kv)),
        _capsule(k_weights),
        eps,
        *[_capsule(t) for t in (cos, sin, k_cache, v_cache, lengths, counts)],
        rotary_dim,
        interleaved,
        weight_offset,
        round_first,
        stream,
        device,
    )


def round_commit(
    tokens: Tensor,
    index: Tensor,
    num_accepted: Tensor,
    bonus: Tensor,
    active: Tensor,
    features: Tensor | None,
    features_out: Tensor | None,
    anchors: Tensor,
    lengths: Tensor,
    starts: Tensor,
    counts: Tensor,
    record: Tensor,
) -> None:
    arguments = (tokens, index, num_accepted, bonus, active, features, features_out)
    state = (anchors, lengths, starts, counts, record)
    module, stream, device = _module("round_commit", *arguments, *state)
    module.round_commit(*[_capsule(t) for t in (*arguments, *state)], stream, device)


def compiled(x: Tensor) -> bool:
    """Whether the fused ops run compiled for such a tensor; on a CPU plain torch takes float64, and stands in."""
    if x.device.type != "cpu":
        return True
    return x.dtype is not torch.float64 and backends.load(backends.name_for("cpu")).module is not None


def _on_cpu(impl: Callable[..., Any], plain: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *arguments: (impl if compiled(arguments[0]) else plain)(*arguments)


def _reference_norm(
    x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, weight_offset: float, round_first: bool
) -> tuple[Tensor, Tensor]:
    out, total = reference.add_rms_norm(x, delta, weight, eps, weight_offset, round_first)
    return out, x.new_empty(0) if delta is None else total


for _name, _impl, _plain in (
    ("add_rms_norm", add_rms_norm, _reference_norm),
    ("swiglu", swiglu, reference.swiglu),
    ("head_norm_rope", head_norm_rope, reference.head_norm_rope),
    ("context_append", context_append, reference.context_append),
    ("round_commit", round_commit, reference.round_commit),
):
    for _key in ("CUDA", "XPU"):
        library.impl(_name, _impl, _key)
    library.impl(_name, _on_cpu(_impl, _plain), "CPU")
library.impl("packed_linear", _on_cpu(packed_linear, reference.packed_linear), "CPU")
library.impl("skinny_linear", skinny_linear, "CUDA")
library.impl("skinny_linear", reference.skinny_linear, "CPU")

torch.library.register_fake("pydflash::add_rms_norm", lambda x, delta, *_: _norm_outputs(x, delta), lib=library)
torch.library.register_fake("pydflash::swiglu", _half, lib=library)
torch.library.register_fake(
    "pydflash::skinny_linear", lambda x, weights, biases, gated: _linear_out(x, weights, gated), lib=library
)
torch.library.register_fake("pydflash::packed_linear", _packed_out, lib=library)
torch.library.register_fake(
    "pydflash::head_norm_rope", lambda qkv, *rest: _heads_out(qkv, rest[7], rest[9]), lib=library
)
torch.library.register_fake("pydflash::context_append", lambda *_: None, lib=library)
torch.library.register_fake("pydflash::round_commit", lambda *_: None, lib=library)
