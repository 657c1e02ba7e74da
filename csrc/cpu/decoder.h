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
  bool centred = false;        // LayerNorm, rounded once
  const void* bias = nullptr;  // of a LayerNorm, or null
};

// The convolutions before and after a record, [taps, hidden] each, and what makes their deltas [2, taps, groups].
struct DecoderConv {
  int taps, groups;
  const void *before, *after;
  DecoderLinear deltas;
};

// What stands around a mixer or an MLP: x + scale * after(record(before(x))).
struct DecoderAround {
  DecoderNorm before, after;
  float scale;
  std::optional<DecoderConv> conv;
};

struct DecoderAttention {
  DecoderLinear qkv, output;
  DecoderNorm q_norm, k_norm;  // per head, or over all heads together
  bool norm_all;
  int num_heads, num_kv_heads, head_dim, rotary_dim;
  bool interleaved;
  float scale;
  int window;
  bool causal;
  int table;
};

struct DecoderMLP {
  DecoderLinear gate_up, down;
  std::optional<Activation> gate;  // none for SiLU
};

// Of all layers num_kv_heads and head_dim are the same. Where `parallel`, the MLP reads what the mixer reads.
struct DecoderLayer {
  DecoderAttention attention;
  DecoderMLP mlp;
  DecoderAround around_attention, around_mlp;
  bool parallel;
};

struct DecoderWeights {
  int hidden;
  DType dtype;
  DecoderNorm final_norm;
  std::vector<DecoderLayer> layers;
};

// [positions, rotary_dim / 2] each.
struct DecoderTable {
  const float *cos, *sin;
  int64_t positions;
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
  std::vector<DecoderTable> tables;
  const int32_t *lengths, *depths;
  const int64_t *visibility, *causal;  // causal may be null
  int64_t depths_stride, visibility_stride;
  std::vector<void*> taken;  // per layer: where its residual stream goes, or null
};

void run_decoder(const DecoderWeights& weights, const DecoderCall& call);

}  // namespace pydflash::cpu
