"""The building blocks of the drafter: one pre-norm decoder layer, its convolutions, and the candidate selector."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..checkpoints.config import DrafterConfig
from ..decoder.linear import Projection
from .rope import RotaryTable

Convolve = Callable[[Tensor, Tensor, Tensor], Tensor]


class BlockConv(nn.Module):
    """The two grouped dynamic convolutions around one sublayer; a single projection feeds both.

    A fresh module is the exact identity: base 1 at tap 0, everything else 0.
    """

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.taps = config.conv_kernel_size
        self.groups = config.hidden_size // config.conv_group_size
        self.base_kernel = nn.Parameter(torch.zeros(2, self.taps, config.hidden_size))
        self.kernel_projection = nn.Linear(config.hidden_size, 2 * self.taps * self.groups, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.base_kernel.zero_()
            self.base_kernel[:, 0] = 1
            self.kernel_projection.weight.zero_()

    def project(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The deltas [B, S, T, G] of the convolutions before and after the sublayer, from its input x [B, S, H]."""
        before, after = self.kernel_projection(x).unflatten(-1, (2, self.taps, self.groups)).unbind(2)
        return before, after


class DrafterLayer(nn.Module):
    """One pre-norm layer in two halves: between them the caller attends, and decides which keys are seen."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
        hidden, bias, eps = config.hidden_size, config.attention_bias, config.rms_norm_eps
        self.sizes = (heads, kv_heads, kv_heads)
        self.head_dim = dim
        self.input_layernorm = nn.RMSNorm(hidden, eps)
        self.qkv_proj = nn.Linear(hidden, sum(self.sizes) * dim, bias=bias)
        self.q_norm = nn.RMSNorm(dim, eps)
        self.k_norm = nn.RMSNorm(dim, eps)
        self.o_proj = nn.Linear(heads * dim, hidden, bias=bias)
        self.post_attention_layernorm = nn.RMSNorm(hidden, eps)
        self.gate_up_proj = nn.Linear(hidden, 2 * config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, hidden, bias=False)
        convolved = config.conv_kernel_size > 0
        self.attention_conv = BlockConv(config) if convolved else None
        self.mlp_conv = BlockConv(config) if convolved else None

    def before_attention(
        self, x: Tensor, rotary: RotaryTable, cos: Tensor, sin: Tensor, convolve: Convolve
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """q, k and v [B, h, S, D] of x [B, S, H], and the delta for the convolution after attention."""
        u, after = self.input_layernorm(x), None
        if self.attention_conv is not None:
            before, after = self.attention_conv.project(u)
            u = convolve(u, self.attention_conv.base_kernel[0], before)
        q, k, v = self.qkv_proj(u).unflatten(-1, (-1, self.head_dim)).split(self.sizes, 2)
        q, k = rotary.rotate(self.q_norm(q), cos, sin), rotary.rotate(self.k_norm(k), cos, sin)
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), after

    def after_attention(self, x: Tensor, attended: Tensor, after: Tensor | None, convolve: Convolve) -> Tensor:
        """The rest of the layer: x [B, S, H] and attention's output [B, Hq, S, D] to [B, S, H]."""
        y = self.o_proj(attended.transpose(1, 2).flatten(2))
        if self.attention_conv is not None and after is not None:
            y = convolve(y, self.attention_conv.base_kernel[1], after)
        x = x + y
        u = self.post_attention_layernorm(x)
        if self.mlp_conv is not None:
            before, after = self.mlp_conv.project(u)
            u = convolve(u, self.mlp_conv.base_kernel[0], before)
        gate, up = self.gate_up_proj(u).chunk(2, -1)
        y = self.down_proj(F.silu(gate) * up)
        if self.mlp_conv is not None and after is not None:
            y = convolve(y, self.mlp_conv.base_kernel[1], after)
        return x + y


def check_context(layers: list[DrafterLayer]) -> None:
    """Raise ValueError where a projection cannot be cut into rows, or would be passed over, as an adapter's."""
    for i, layer in enumerate(layers):
        linear = layer.qkv_proj
        if type(linear) is not nn.Linear or hasattr(linear.weight, "__tensor_flatten__"):
            got = f"{type(linear).__name__} of {type(getattr(linear, 'weight', None)).__name__}"
            raise ValueError(f"Drafter: layers.{i}.qkv_proj must be a plain nn.Linear, unquantised, got {got}")


def stack_context(layers: list[DrafterLayer]) -> tuple[Projection, Tensor]:
    """The k and v rows of every layer's qkv projection as one weight, and the norms of k [layers, D]: copies."""
    linears, first = [layer.qkv_proj for layer in layers], layers[0].sizes[0] * layers[0].head_dim
    weight = torch.cat([linear.weight[first:] for linear in linears])
    bias = torch.cat([linear.bias[first:] for linear in linears]) if linears[0].bias is not None else None
    return Projection((weight,), (bias,)), torch.stack([layer.k_norm.weight for layer in layers])


class CandidateSelector(nn.Module):
    """The low-rank edge scores of DFlash 2. Fresh, its successors are zero: every path is the per-slot argmax."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        shape = (config.vocab_size, config.selector_rank)
        self.predecessor_codebook = nn.Parameter(torch.empty(shape))
        self.successor_codebook = nn.Parameter(torch.empty(shape))
        self.hidden_projection = nn.Linear(config.hidden_size, config.selector_rank, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.predecessor_codebook.normal_(0, 0.02)
            self.successor_codebook.zero_()
            self.hidden_projection.weight.normal_(0, 0.02)
