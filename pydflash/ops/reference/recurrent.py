"""Gated DeltaNet in plain torch: the recurrence over a block or a tree, its convolution and its norm."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from .numbers import widened

_NORM_EPS = 1e-6  # of the l2 norm of queries and keys


def delta_rule(
    x: Tensor,
    a: Tensor,
    b: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    kept_k: Tensor,
    kept_u: Tensor,
    kept_g: Tensor,
    kept_count: Tensor,
    visibility: Tensor,
    block_k: Tensor,
    block_u: Tensor,
    block_g: Tensor,
    in_order: bool = True,
) -> Tensor:
    """One block over a state, and the last round's commit, in place; see `pydflash.ops.delta_rule`."""
    group = state.shape[1] // kept_k.shape[2]
    s = widened(state)
    for n in range(kept_k.shape[1]):
        live = (n < kept_count).view(-1, 1, 1, 1)
        s = torch.where(live, _step(s, kept_k[:, n], kept_u[:, n], kept_g[:, n], group), s)
    state.copy_(s)
    q, k, v, g, beta = _inputs(x, a, b, a_log, dt_bias, state, kept_k.shape[2])
    block_k.copy_(k)
    block_g.copy_(g)
    seen = visibility.expand(len(x), -1)
    out, u = (_walk if in_order else _solve)(q, k, v, g, beta, s, seen, group)
    block_u.copy_(u)
    return out.to(x.dtype)


def delta_prompt(
    x: Tensor, a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor, state: Tensor, key_heads: int
) -> Tensor:
    """A chain of any length over a state, which moves along, in place; see `pydflash.ops.delta_prompt`."""
    q, k, v, g, beta = _inputs(x, a, b, a_log, dt_bias, state, key_heads)
    s, group, outs = widened(state), state.shape[1] // key_heads, []
    for i in range(x.shape[1]):
        s, _, out = _slot(s, q[:, i], k[:, i], v[:, i], g[:, i], beta[:, i], group)
        outs.append(out)
    state.copy_(s)
    return torch.stack(outs, 1).to(x.dtype) if outs else v.to(x.dtype)


def delta_commit(
    block_k: Tensor,
    block_u: Tensor,
    block_g: Tensor,
    block_x: Tensor,
    index: Tensor,
    kept_k: Tensor,
    kept_u: Tensor,
    kept_g: Tensor,
    kept_count: Tensor,
    tail: Tensor,
) -> None:
    """The accepted slots of all layers to where the next round reads them; see `pydflash.ops.delta_commit`."""
    count = (index >= 0).long().cumprod(1).sum(1)  # before the first -1
    for b in range(len(index)):
        slots = index[b, : int(count[b])].long()
        for kept, block in ((kept_k, block_k), (kept_u, block_u), (kept_g, block_g)):
            kept[:, b, : len(slots)] = block[:, b, slots]
        inputs = torch.cat([tail[:, b], block_x[:, b, slots]], 1)
        tail[:, b] = inputs[:, inputs.shape[1] - tail.shape[2] :]
    kept_count.copy_(count)


def short_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    tail: Tensor,
    visibility: Tensor | None = None,
    block_x: Tensor | None = None,
) -> Tensor:
    """A causal convolution along each slot's path, then SiLU; see `pydflash.ops.short_conv`."""
    taps, slots = weight.shape[0], x.shape[1]
    if block_x is not None:
        block_x.copy_(x)
    rows = torch.cat([tail, x], 1)
    place = torch.arange(slots, device=x.device).expand(len(x), -1) + taps - 1  # of tap 0 in `rows`
    if visibility is not None:
        seen = _bits(visibility.expand(len(x), -1), slots)
        # The t-th last ancestor; before the block the tail, from its end on.
        order = torch.where(seen, torch.arange(slots, device=x.device), -1).sort(-1, descending=True).values
        depth = seen.sum(-1)
    total = widened(x).new_zeros(x.shape) if bias is None else widened(bias).expand(x.shape).clone()
    for t in range(taps):
        at = place - t
        if visibility is not None:
            inside = order[:, :, min(t, slots - 1)] + taps - 1
            at = torch.where(t < depth, inside, taps - 2 - (t - depth))
        gathered = rows.gather(1, at[..., None].expand(-1, -1, x.shape[2]))
        total = total + widened(gathered) * widened(weight[t])
    return F.silu(widened(total.to(x.dtype))).to(x.dtype)


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm of each row times silu of its gate; see `pydflash.ops.gated_rms_norm`."""
    wide = widened(x)
    y = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    y = widened((widened(y.to(x.dtype)) * widened(weight)).to(x.dtype))
    return (y * F.silu(widened(gate)).view_as(x)).to(x.dtype)


def _inputs(
    x: Tensor, a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor, state: Tensor, key_heads: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """q, k [B, S, Hk, Dk] of length 1 and scaled, v [B, S, Hv, Dv], log decay and beta [B, S, Hv], all wide."""
    _, value_heads, key_dim, value_dim = state.shape
    keys = key_heads * key_dim
    q, k, v = widened(x).split((keys, keys, value_heads * value_dim), -1)
    q, k, v = q.unflatten(-1, (-1, key_dim)), k.unflatten(-1, (-1, key_dim)), v.unflatten(-1, (-1, value_dim))
    q, k = (part * torch.rsqrt(part.square().sum(-1, keepdim=True) + _NORM_EPS) for part in (q, k))
    g = -widened(a_log).exp() * F.softplus(widened(a) + widened(dt_bias))
    beta = widened(b.sigmoid())  # rounded, as the model's own line rounds it
    return q * key_dim**-0.5, k, v, g, beta


def _step(s: Tensor, k: Tensor, u: Tensor, g: Tensor, group: int) -> Tensor:
    """exp(g) S + k u^T. s: [B, Hv, Dk, Dv], k: [B, Hk, Dk], u: [B, Hv, Dv], g: [B, Hv]."""
    k, u, g = k.to(s).repeat_interleave(group, 1), u.to(s), g.to(s)
    return g.exp()[..., None, None] * s + k[..., None] * u[..., None, :]


def _slot(
    s: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, group: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The state behind a slot, what it adds along its key, and its output."""
    wide_k = k.repeat_interleave(group, 1)
    seen = ((g.exp()[..., None, None] * s) * wide_k[..., None]).sum(-2)
    u = beta[..., None] * (v - seen)
    s = _step(s, k, u, g, group)
    return s, u, (s * q.repeat_interleave(group, 1)[..., None]).sum(-2)


def _walk(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, s: Tensor, visibility: Tensor, group: int
) -> tuple[Tensor, Tensor]:
    """Slot by slot, each from its parent's state."""
    slots = q.shape[1]
    order = _bits(visibility, slots)
    ids = torch.arange(slots, device=q.device)
    parents = torch.where(order & (ids < ids[:, None]), ids, -1).amax(-1) if slots else visibility
    states, us, outs, row = [s], [], [], torch.arange(len(s), device=s.device)
    for i in range(slots):
        parent = torch.stack(states, 1)[row, parents[:, i] + 1]
        after, u, out = _slot(parent, q[:, i], k[:, i], v[:, i], g[:, i], beta[:, i], group)
        states.append(after)
        us.append(u)
        outs.append(out)
    return (torch.stack(outs, 1), torch.stack(us, 1)) if outs else (v, v)


def _solve(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, s: Tensor, visibility: Tensor, group: int
) -> tuple[Tensor, Tensor]:
    """All slots at once: a unit lower triangular system over the ancestors."""
    slots = q.shape[1]
    seen = _bits(visibility, slots)[:, None]  # [B, 1, S, S]
    q, k = (part.repeat_interleave(group, 2).transpose(1, 2) for part in (q, k))
    v, g, beta = v.transpose(1, 2), g.transpose(1, 2), beta.transpose(1, 2)
    total = (seen.to(g) @ g[..., None])[..., 0]  # log decay from the block's start
    decay = torch.where(seen, (total[..., None] - total[..., None, :]).clamp(max=0), -torch.inf).exp()
    right = beta[..., None] * (v - total.exp()[..., None] * (k @ s))
    matrix = (beta[..., None] * decay * (k @ k.transpose(-1, -2))).tril(-1)
    u = torch.linalg.solve_triangular(matrix, right, upper=False, unitriangular=True)
    out = total.exp()[..., None] * (q @ s) + (decay * (q @ k.transpose(-1, -2))) @ u
    return out.transpose(1, 2), u.transpose(1, 2)


def _bits(visibility: Tensor, slots: int) -> Tensor:
    """[B, S, S]: whether slot i sees slot j."""
    return (visibility[..., None] >> torch.arange(slots, device=visibility.device) & 1).bool()
