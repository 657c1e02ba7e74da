// A stack of decoder layers with packed weights as one call: the records of pydflash/decoder/records.py, which say
// what each step means.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "kernels.h"

namespace pydflash::cpu {

struct DecoderLinear {
  WeightFormat format;
  int in_features, out_features, panels, steps;
  const void* weight;
  const float* scales;  // or null
  const void* bias;     // or null
};

struct DecoderNorm {
  const void* weight;  // null where there is no norm
  float eps, weight_offset;
  bool round_first;
};

// The convolutions before and after a record, [taps, hidden] each, and what makes their deltas [2, taps, groups].
struct DecoderConv {
  int taps, groups;
  const void *before, *after;
  DecoderLinear deltas;
};

// What stands around a mixer or an MLP: x + record(norm(x)).
struct DecoderAround {
  DecoderNorm norm;
  std::optional<DecoderConv> conv;
};

struct DecoderAttention {
  DecoderLinear qkv, output;
  DecoderNorm q_norm, k_norm;  // per head
  int num_heads, num_kv_heads, head_dim, rotary_dim;
  bool interleaved;
  float scale;
  int window;
  bool causal;
};

struct DecoderMLP {
  DecoderLinear gate_up, down;
};

// Of all layers num_kv_heads, head_dim and rotary_dim are the same.
struct DecoderLayer {
  DecoderAttention attention;
  DecoderMLP mlp;
  DecoderAround around_attention, around_mlp;
};

struct DecoderWeights {
  int hidden;
  DType dtype;
  DecoderNorm final_norm;
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
