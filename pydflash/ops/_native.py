"""Registration of the native ops with torch.library: schemas, the compiled implementations, and fakes.

The functions that users call, with shapes and meanings, are in `ops.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.dlpack import to_dlpack

from . import backends

library = torch.library.Library("pydflash", "DEF")
_SCHEMAS = (
    "block_attention(Tensor q, Tensor k_cache, Tensor v_cache, Tensor k_block, Tensor v_block, Tensor lengths,"
    " Tensor visibility, Tensor depths, int window, float scale) -> Tensor",
    "cache_append(Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor k_block, Tensor v_block, Tensor index,"
    " Tensor lengths) -> ()",
    "block_conv(Tensor x, Tensor base, Tensor delta) -> Tensor",
    "path_select(Tensor logits, Tensor? hidden, Tensor? predecessor, Tensor? successor, Tensor anchors,"
    " Tensor? temperature, Tensor seeds, Tensor starts, int top_k, int vocab_size)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    "path_tree(Tensor anchors, Tensor candidates, Tensor scores, int num_nodes, Tensor? log_normalizers,"
    " Tensor? trunk) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    "path_viterbi(Tensor candidates, Tensor scores, Tensor? log_normalizers) -> (Tensor, Tensor)",
    "reject_sample(Tensor target_logits, Tensor tokens, Tensor? parents, Tensor? draft_ids, Tensor? draft_probs,"
    " Tensor temperature, Tensor top_k, Tensor top_p, Tensor min_p, Tensor seeds, Tensor starts, int vocab_size)"
    " -> (Tensor, Tensor, Tensor)",
)
for _schema in _SCHEMAS:
    library.define(_schema)


def _module(op: str, *tensors: Tensor | None) -> tuple[Any, int, int]:
    """The module, stream and device of a call; all tensors must live on the first one's device."""
    device = next(t.device for t in tensors if t is not None)
    for t in tensors:
        if t is not None and t.device != device:
            raise ValueError(f"{op}: all tensors must be on {device}, got one on {t.device}")
    backend = backends.load(backends.name_for(device.type))
    if backend.module is None:
        raise RuntimeError(f"{op}: the {backend.name} backend is not usable: {backend.reason}")
    return backend.module, _stream(device), device.index or 0


def _stream(device: torch.device) -> int:
    """The current stream of a device as the kernels take it; 0 on a CPU."""
    if device.type == "cuda":
        return torch.cuda.current_stream(device).cuda_stream
    return torch.xpu.current_stream(device).sycl_queue if device.type == "xpu" else 0


def _scratch(like: Tensor) -> Callable[[int], int]:
    """Gives a kernel working memory that lives until its call returns; work in a stream may outlive it safely."""
    held: list[Tensor] = []

    def allocate(size: int) -> int:
        held.append(torch.empty(size, dtype=torch.uint8, device=like.device))
        return held[-1].data_ptr()

    return allocate


def _int32(x: Tensor, name: str) -> Tensor:
    if x.dtype is torch.int32 and x.is_contiguous():
        return x
    narrow = _int64(x, name).to(torch.int32)
    if x.device.type == "cpu" and not torch.equal(narrow.to(torch.int64), x.to(torch.int64)):
        raise ValueError(f"{name} must fit in 32 bits, got values up to {int(x.abs().max())}")
    return narrow.contiguous()


def _int64(x: Tensor, name: str) -> Tensor:
    if x.dtype is torch.int64 and x.is_contiguous():
        return x
    if x.dtype not in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8):
        raise ValueError(f"{name} must be int32 or int64, got {x.dtype}")
    return x.to(torch.int64).contiguous()


def _float32(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float32 and x.is_contiguous() else x.to(torch.float32).contiguous()


def _rows(x: Tensor) -> Tensor:
    """Kernels take any strides but the last, which must be 1."""
    return x if x.stride(-1) == 1 or x.shape[-1] <= 1 else x.contiguous()


def _capsule(x: Tensor | None) -> object:
    return None if x is None else to_dlpack(x.detach() if x.requires_grad else x)


def _attention_out(q: Tensor) -> Tensor:
    _, heads, slots, dim = q.shape
    # [B, S, Hq, D] in memory: the output projection reads it as [B, S, Hq * D] without a copy.
    return q.new_empty_strided(q.shape, (slots * heads * dim, dim, heads * dim, 1))


def block_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k_block: Tensor,
    v_block: Tensor,
    lengths: Tensor,
    visibility: Tensor,
    depths: Tensor,
    window: int,
    scale: float,
) -> Tensor:
    module, stream, device = _module(
        "block_attention", q, k_cache, v_cache, k_block, v_block, lengths, visibility, depths
    )
    out = _attention_out(q) if q.dim() == 4 else torch.empty_like(q)
    floats = [_capsule(_rows(x)) for x in (q, k_cache, v_cache, k_block, v_block)]
    ints = (
        _capsule(_int32(lengths, "block_attention: lengths")),
        _capsule(_int64(visibility, "block_attention: visibility")),
        _capsule(_int32(depths, "block_attention: depths")),
    )
    module.block_attention(*floats, *ints, window, scale, _capsule(out), stream, device, _scratch(q))
    return out


def cache_append(
    k_cache: Tensor, v_cache: Tensor, k_block: Tensor, v_block: Tensor, index: Tensor, lengths: Tensor
) -> None:
    module, stream, device = _module("cache_append", k_cache, v_cache, k_block, v_block, index, lengths)
    index, lengths = _int32(index, "cache_append: index"), _int32(lengths, "cache_append: lengths")
    k_block, v_block = _rows(k_block), _rows(v_block)
    capsules = [_capsule(x) for x in (k_cache, v_cache, k_block, v_block, index, lengths)]
    module.cache_append(*capsules, stream, device)


def block_conv(x: Tensor, base: Tensor, delta: Tensor) -> Tensor:
    module, stream, device = _module("block_conv", x, base, delta)
    y = x.new_empty(x.shape)
    x, base, delta = _rows(x), base.contiguous(), _rows(delta)
    module.block_conv(*[_capsule(t) for t in (x, base, delta, y)], stream, device)
    return y


def _path_outputs(logits: Tensor, hidden: Tensor | None, temperature: Tensor | None, top_k: int) -> list[Tensor]:
    batch, slots = logits.shape[:2]
    square = () if hidden is None else (top_k,)
    return [
        logits.new_empty(batch, slots, dtype=torch.int64),
        logits.new_empty(batch, slots, top_k, dtype=torch.int64),
        logits.new_empty(batch, slots, 0 if temperature is None else top_k, dtype=torch.float32),
        logits.new_empty(batch, slots, *square, top_k, dtype=torch.float32),
    ]


def path_select(
    logits: Tensor,
    hidden: Tensor | None,
    predecessor: Tensor | None,
    successor: Tensor | None,
    anchors: Tensor,
    temperature: Tensor | None,
    seeds: Tensor,
    starts: Tensor,
    top_k: int,
    vocab_size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    selector = (hidden, predecessor, successor)
    module, stream, device = _module("path_select", logits, *selector, anchors, temperature, seeds, starts)
    if logits.dim() != 3:
        raise ValueError(f"path_select: logits must be of shape [B, S-1, V], got {list(logits.shape)}")
    if top_k < 1:
        raise ValueError(f"path_select: top_k must be >= 1, got {top_k}")
    tokens, candidates, probs, scores = _path_outputs(logits, hidden, temperature, top_k)
    logits, anchors, seeds, starts = (
        _rows(logits),
        _int64(anchors, "path_select: anchors"),
        _int64(seeds, "path_select: seeds"),
        _int32(starts, "path_select: starts"),
    )
    dense = [None if t is None else t.contiguous() for t in selector]
    heat = None if temperature is None else _float32(temperature)
    module.path_select(
        _capsule(logits),
        *[_capsule(t) for t in dense],
        *[_capsule(t) for t in (anchors, heat, seeds, starts)],
        vocab_size,
        *[_capsule(t) for t in (tokens, candidates, None if temperature is None else probs, scores)],
        stream,
        device,
        _scratch(logits),
    )
    return tokens, candidates, probs, scores


def _lattice(op: str, candidates: Tensor, scores: Tensor, log_normalizers: Tensor | None) -> list[object]:
    """Capsules of a lattice; the kernels read its scores as float32."""
    if scores.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"{op}: scores must be float32, bfloat16 or float16, got {scores.dtype}")
    return [
        _capsule(_int64(candidates, f"{op}: candidates")),
        _capsule(_float32(scores)),
        _capsule(None if log_normalizers is None else _float32(log_normalizers)),
    ]


def _tree_outputs(anchors: Tensor, num_nodes: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    kinds = (torch.int64, torch.int32, torch.int32, torch.int64, torch.float32)
    tokens, parents, depths, visibility, log_probs = (
        anchors.new_empty(anchors.shape[0], num_nodes + 1, dtype=kind) for kind in kinds
    )
    return tokens, parents, depths, visibility, log_probs


def path_tree(
    anchors: Tensor,
    candidates: Tensor,
    scores: Tensor,
    num_nodes: int,
    log_normalizers: Tensor | None,
    trunk: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    module, stream, device = _module("path_tree", anchors, candidates, scores, log_normalizers, trunk)
    if anchors.dim() != 1:
        raise ValueError(f"path_tree: anchors must be of shape [B], got {list(anchors.shape)}")
    if not 1 <= num_nodes <= 63:
        raise ValueError(f"path_tree: num_nodes must be 1 to 63, got {num_nodes}")
    outputs = _tree_outputs(anchors, num_nodes)
    ids, edges, normalizers = _lattice("path_tree", candidates, scores, log_normalizers)
    module.path_tree(
        _capsule(_int64(anchors, "path_tree: anchors")),
        ids,
        edges,
        num_nodes,
        normalizers,
        _capsule(None if trunk is None else _int64(trunk, "path_tree: trunk")),
        *[_capsule(t) for t in outputs],
        stream,
        device,
        _scratch(candidates),
    )
    return outputs


def _viterbi_outputs(candidates: Tensor) -> tuple[Tensor, Tensor]:
    batch, slots = candidates.shape[:2]
    return (
        candidates.new_empty(batch, slots, dtype=torch.int64),
        candidates.new_empty(batch, dtype=torch.float32),
    )


def path_viterbi(candidates: Tensor, scores: Tensor, log_normalizers: Tensor | None) -> tuple[Tensor, Tensor]:
    module, stream, device = _module("path_viterbi", candidates, scores, log_normalizers)
    if candidates.dim() != 3:
        raise ValueError(f"path_viterbi: candidates must be of shape [B, S-1, K], got {list(candidates.shape)}")
    outputs = _viterbi_outputs(candidates)
    lattice = _lattice("path_viterbi", candidates, scores, log_normalizers)
    module.path_viterbi(*lattice, *[_capsule(t) for t in outputs], stream, device, _scratch(candidates))
    return outputs


def _reject_outputs(tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    batch = tokens.shape[0]
    return (
        torch.empty_like(tokens, dtype=torch.int32, memory_format=torch.contiguous_format),
        tokens.new_empty(batch, dtype=torch.int32),
        tokens.new_empty(batch, dtype=torch.int64),
    )


def reject_sample(
    target_logits: Tensor,
    tokens: Tensor,
    parents: Tensor | None,
    draft_ids: Tensor | None,
    draft_probs: Tensor | None,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    starts: Tensor,
    vocab_size: int,
) -> tuple[Tensor, Tensor, Tensor]:
    params = (temperature, top_k, top_p, min_p, seeds, starts)
    module, stream, device = _module("reject_sample", target_logits, tokens, parents, draft_ids, draft_probs, *params)
    if draft_ids is not None and draft_probs is None:
        raise ValueError("reject_sample: draft_probs must be given with draft_ids, got None")
    index, num_accepted, bonus = _reject_outputs(tokens)
    inputs = (
        _rows(target_logits),
        _int64(tokens, "reject_sample: tokens"),
        None if parents is None else _int32(parents, "reject_sample: parents"),
        None if draft_ids is None else _int64(draft_ids, "reject_sample: draft_ids"),
        None if draft_probs is None else _rows(draft_probs.to(torch.float32)),
        _float32(temperature),
        _int32(top_k, "reject_sample: top_k"),
        _float32(top_p),
        _float32(min_p),
        _int64(seeds, "reject_sample: seeds"),
        _int32(starts, "reject_sample: starts"),
    )
    outputs = [_capsule(t) for t in (index, num_accepted, bonus)]
    module.reject_sample(*[_capsule(t) for t in inputs], vocab_size, *outputs, stream, device, _scratch(tokens))
    return index, num_accepted, bonus


for _name, _impl in (
    ("block_attention", block_attention),
    ("cache_append", cache_append),
    ("block_conv", block_conv),
    ("path_select", path_select),
    ("path_tree", path_tree),
    ("path_viterbi", path_viterbi),
    ("reject_sample", reject_sample),
):
    for _key in ("CPU", "CUDA", "XPU"):
        library.impl(_name, _impl, _key)

torch.library.register_fake("pydflash::block_attention", lambda q, *_: _attention_out(q), lib=library)
torch.library.register_fake("pydflash::cache_append", lambda *_: None, lib=library)
torch.library.register_fake("pydflash::block_conv", lambda x, base, delta: x.new_empty(x.shape), lib=library)
torch.library.register_fake(
    "pydflash::path_select",
    lambda logits, hidden, predecessor, successor, anchors, temperature, seeds, starts, top_k, vocab_size: tuple(
        _path_outputs(logits, hidden, temperature, top_k)
    ),
    lib=library,
)
torch.library.register_fake(
    "pydflash::path_tree",
    lambda anchors, candidates, scores, num_nodes, *_: _tree_outputs(anchors, num_nodes),
    lib=library,
)
torch.library.register_fake("pydflash::path_viterbi", lambda candidates, *_: _viterbi_outputs(candidates), lib=library)
torch.library.register_fake("pydflash::reject_sample", lambda logits, tokens, *_: _reject_outputs(tokens), lib=library)
