"""A drafter's layers as a `Decoder`: the same numbers as the module's own forward, in few launches."""

from __future__ import annotations

from torch import Tensor, nn

from ..checkpoints.config import DrafterConfig
from ..decoder.block import BlockView, Table, block_masks
from ..decoder.formats import WeightFormat
from ..decoder.linear import Projection
from ..decoder.records import Attention, Convolution, GatedMLP, Layer, Norm, NormKind, Residual
from ..decoder.stack import Decoder
from ..decoder.stores import KVCache
from .layers import BlockConv, DrafterLayer


class DrafterDecoder:
    """Holds views of a drafter's parameters, copies only once packed; it must be built anew when they move."""

    def __init__(self, config: DrafterConfig, layers: list[DrafterLayer], final_norm: Tensor, fc: nn.Linear) -> None:
        self.features = Projection((fc.weight.detach(),), (None,))
        self._kind = NormKind(config.rms_norm_eps, round_first=False)
        held = [_layer(config, i, layer, self._kind) for i, layer in enumerate(layers)]
        self.decoder = Decoder(held, Norm(final_norm.detach(), self._kind))
        self._masks: dict[int, tuple[Tensor, Tensor, Tensor]] = {}

    def pack(self, format: WeightFormat) -> None:
        """Compute with packed copies of the weights, as they are now."""
        self.features = self.features.pack(format)
        self.decoder.pack(format)

    def hidden(self, embeddings: Tensor, cache: KVCache, table: Table) -> Tensor:
        """Final-normed hidden states [B, S, H] of embedded blocks [B, S, H] over their cached context."""
        size = embeddings.shape[1]
        if size not in self._masks:
            self._masks[size] = block_masks(size, embeddings.device)
        depths, bidirectional, causal = self._masks[size]
        cache.open(size)
        try:
            return self.decoder(embeddings, cache, (table,), BlockView(bidirectional, depths, causal))[0]
        finally:
            cache.discard()

    def fuse(self, features: Tensor, weight: Tensor) -> Tensor:
        """Fused features [B * C, H] of features [B, C, F * H]; weight [H] of their norm."""
        fused = self.features(features.flatten(0, 1))
        return Norm(weight, self._kind)(fused)[0]


def decoder_of(
    config: DrafterConfig, layers: list[DrafterLayer], final_norm: Tensor, fc: nn.Linear
) -> DrafterDecoder | None:
    """The decoder of a drafter, or None where a linear layer is not a plain one (quantised, or wrapped)."""
    linears = [module for layer in layers for module in layer.children() if not isinstance(module, nn.RMSNorm)]
    linears = [m.kernel_projection if isinstance(m, BlockConv) else m for m in linears] + [fc]
    if any(type(m) is not nn.Linear or hasattr(m.weight, "__tensor_flatten__") for m in linears):
        return None
    return DrafterDecoder(config, layers, final_norm, fc)


def _plain(linear: nn.Linear) -> Projection:
    return Projection((linear.weight.detach(),), (None if linear.bias is None else linear.bias.detach(),))


def _convolution(conv: BlockConv | None) -> Convolution | None:
    if conv is None:
        return None
    before, after = conv.base_kernel.detach()
    return Convolution(before, after, _plain(conv.kernel_projection))


def _layer(config: DrafterConfig, i: int, layer: DrafterLayer, kind: NormKind) -> Layer:
    def norm(module: nn.RMSNorm) -> Norm:
        return Norm(module.weight.detach(), kind)

    attention = Attention(
        _plain(layer.qkv_proj),
        _plain(layer.o_proj),
        config.num_heads,
        config.num_kv_heads,
        config.head_dim,
        config.head_dim,
        config.rope_interleaved,
        config.head_dim**-0.5,
        norm(layer.q_norm),
        norm(layer.k_norm),
        config.window(i),
        config.causal[i],
    )
    gate, up = layer.gate_up_proj.weight.detach().chunk(2)
    return Layer(
        attention,
        GatedMLP(Projection((gate, up), (None, None), gated=True), _plain(layer.down_proj)),
        Residual(norm(layer.input_layernorm), convolution=_convolution(layer.attention_conv)),
        Residual(norm(layer.post_attention_layernorm), convolution=_convolution(layer.mlp_conv)),
    )
