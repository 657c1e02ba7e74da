// A stack of decoder layers with packed weights as one call; see pydflash/decoder/stack.py for what each step means.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "kernels.h"

namespace pydflash::cpu {

struct DecoderLinear {
  int in_features, out_features, panels, steps;
  const void* weight;
  const float* scales;  // or null
  const void* bias;     // or null
};

// The convolutions before and after a sublayer, [taps, hidden] each, and what makes their deltas [2, taps, groups].
struct DecoderConv {
  int taps, groups;
  const void *before, *after;
  DecoderLinear deltas;
};

struct DecoderLayer {
  const void *input_norm, *q_norm, *k_norm, *post_norm;  // those of q and k may be null
  DecoderLinear qkv, output, gate_up, down;
  int window;
  bool causal;
  std::optional<DecoderConv> attention_conv, mlp_conv;
};

struct DecoderNorm {
  float eps, weight_offset;
  bool round_first;
};

struct DecoderWeights {
  int hidden, num_heads, num_kv_heads, head_dim, rotary_dim;
  bool interleaved;
  float scale;
  DType dtype;
  DecoderNorm norm, head_norm;
  const void* final_norm;
  std::vector<DecoderLayer> layers;
};

// One forward. Keys and values of the block are written, the caches are read; strides as in BlockAttentionParams.
struct DecoderCall {
  int batch, slots;
  const void* x;                  // [batch, slots, hidden]
  void* out;                      // the same: final-normed
  const void *k_cache, *v_cache;  // [layers, batch, num_kv_heads, capacity, head_dim]
  int64_t cache_stride[4];        // [layer, batch, head, row], of both
  int64_t capacity;
  void *k_block, *v_block;  // [layers, batch, num_kv_heads, slots, head_dim], contiguous
  const float *cos, *sin;
  int64_t positions;
  const int32_t *lengths, *depths;
  const int64_t *visibility, *causal;  // causal may be null
  int64_t depths_stride, visibility_stride;
  std::vector<void*> taken;  // per layer: where its residual stream goes, or null
};

void run_decoder(const DecoderWeights& weights, const DecoderCall& call);

}  // namespace pydflash::cpu
