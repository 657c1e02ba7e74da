"""A drafter's layers as a `Decoder`: the same numbers as the module's own forward, in few launches."""

from __future__ import annotations

from torch import Tensor, nn

from ..checkpoints.config import DrafterConfig
from ..decoder.formats import Packed
from ..decoder.stack import Block, Convolution, Decoder, LayerWeights, Norm, Projection, block_masks
from ..decoder.stores import KVCache
from .layers import BlockConv, DrafterLayer


class DrafterDecoder:
    """Holds views of a drafter's parameters, copies only once packed; it must be built anew when they move."""

    def __init__(self, config: DrafterConfig, layers: list[DrafterLayer], final_norm: Tensor, fc: nn.Linear) -> None:
        self.config = config
        self.features = Projection((fc.weight.detach(),), (None,))
        self.norm = Norm(config.rms_norm_eps, round_first=False)
        weights = [_layer(layer, config.window(i), config.causal[i]) for i, layer in enumerate(layers)]
        self.decoder = Decoder(
            weights,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            config.head_dim,
            config.rope_interleaved,
            config.head_dim**-0.5,
            self.norm,
            self.norm,
            final_norm.detach(),
        )
        self._masks: dict[int, tuple[Tensor, Tensor, Tensor]] = {}

    def pack(self, kind: type[Packed]) -> None:
        """Compute with packed copies of the weights, as they are now."""
        self.features = self.features.pack(kind)
        self.decoder.pack(kind)

    def hidden(self, embeddings: Tensor, cache: KVCache, tables: tuple[Tensor, Tensor]) -> Tensor:
        """Final-normed hidden states [B, S, H] of embedded blocks [B, S, H] over their cached context."""
        config = self.config
        batch, size, _ = embeddings.shape
        if size not in self._masks:
            self._masks[size] = block_masks(size, embeddings.device)
        depths, bidirectional, causal = self._masks[size]
        shape = (config.num_layers, batch, config.num_kv_heads, size, config.head_dim)
        k, v = embeddings.new_empty(shape), embeddings.new_empty(shape)
        return self.decoder(embeddings, cache, tables, Block(bidirectional, depths, k, v, causal))[0]

    def fuse(self, features: Tensor, weight: Tensor) -> Tensor:
        """Fused features [B * C, H] of features [B, C, F * H]; weight [H] of their norm."""
        fused = self.features(features.flatten(0, 1))
        return self.norm(fused, None, weight)[0]


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


def _layer(layer: DrafterLayer, window: int, causal: bool) -> LayerWeights:
    gate, up = layer.gate_up_proj.weight.detach().chunk(2)
    return LayerWeights(
        layer.input_layernorm.weight.detach(),
        _plain(layer.qkv_proj),
        layer.q_norm.weight.detach(),
        layer.k_norm.weight.detach(),
        _plain(layer.o_proj),
        layer.post_attention_layernorm.weight.detach(),
        Projection((gate, up), (None, None), gated=True),
        _plain(layer.down_proj),
        window,
        causal,
        _convolution(layer.attention_conv),
        _convolution(layer.mlp_conv),
    )
