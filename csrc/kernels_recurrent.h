// The params of the kernels of Gated DeltaNet layers; see kernels.h, which includes it.
#pragma once

namespace pydflash {

// Rows of a convolution's output, [q | k | v] of heads, and what makes each slot's decay and weight:
// g = -exp(a_log) * softplus(a + dt_bias), beta = sigmoid(b) rounded to the dtype. q and k are brought to length 1 in
// float, and q scaled by key_dim^-0.5. Value head h reads key head h / (value_heads / key_heads).
struct DeltaInputs {
  int batch, slots, key_heads, value_heads, key_dim, value_dim;
  DType dtype;
  const void *x, *a, *b;                        // [batch, slots, channels], [batch, slots, value_heads] twice
  int64_t x_stride[2], a_stride[2], b_stride[2];  // [batch, slot]
  const float *a_log, *dt_bias;                 // [value_heads]
  void* out;                                    // [batch, slots, value_heads, value_dim]
};

// First state[b, h] = exp(kept_g) state + kept_k kept_u^T for the first kept_count[b] entries in order, written back.
// Then from each slot's parent's state: S = exp(g) S_parent, u = beta (v - S^T k), S_slot = S + k u^T,
// out = S_slot^T q; the state stays. visibility: the ancestors of each slot and itself, a chain or a tree.
struct DeltaRuleParams {
  DeltaInputs in;
  int kept;         // entries that there is room for
  bool in_order;    // a slot's bits depend on its path alone; a kernel may do so always
  float* state;     // [batch, value_heads, key_dim, value_dim]
  int64_t state_stride;  // [batch]
  const float *kept_k, *kept_u, *kept_g;  // [batch, kept, key_heads, key_dim], [.., value_heads, value_dim], [.., value_heads]
  int64_t kept_k_stride, kept_u_stride, kept_g_stride;  // [batch]
  const int32_t* kept_count;                            // [batch]
  const int64_t* visibility;                            // [batch or 1, slots]
  int64_t visibility_stride;                            // 0 where one row serves the whole batch
  float *block_k, *block_u, *block_g;                   // as the kept ones, of slots entries; written
  int64_t block_k_stride, block_u_stride, block_g_stride;
  void* scratch;
};

// A chain of any length; the state goes along.
struct DeltaPromptParams {
  DeltaInputs in;
  float* state;
  int64_t state_stride;
  void* scratch;
};

// kept[layer, b, n] = block[layer, b, index[b, n]] for the entries before the first -1, whose number is
// kept_count[b]; tail[layer, b] = the last rows of the tail and the accepted slots' inputs in order.
struct DeltaCommitParams {
  int layers, batch, slots, entries, tail_rows;
  int element_size;  // of block_x and tail
  int64_t k_size, u_size, g_size, x_bytes;  // floats, and bytes of block_x, of one slot
  const float *block_k, *block_u, *block_g;
  const void* block_x;
  float *kept_k, *kept_u, *kept_g;
  void* tail;  // [layers, batch, tail_rows, channels]
  // [layer, batch, slot]
  int64_t block_k_stride[3], block_u_stride[3], block_g_stride[3], block_x_stride[3];
  int64_t kept_k_stride[3], kept_u_stride[3], kept_g_stride[3], tail_stride[3];
  const int32_t* index;  // [batch, entries]
  int32_t* kept_count;   // [batch]
};

// out = silu(round(bias + sum over t of weight[t] * the t-th row of the slot's path, counted from itself)), where
// the committed inputs stand before the path.
struct ShortConvParams {
  int batch, slots, channels, taps;
  DType dtype;
  const void *x, *weight, *bias, *tail;  // [batch, slots, channels], [taps, channels], [channels] or null, [batch, taps - 1, channels]
  int64_t x_stride[2], tail_stride[2];   // [batch, slot]
  const int64_t* visibility;             // [batch or 1, slots], null: a chain
  int64_t visibility_stride;
  void* block_x;  // [batch, slots, channels], becomes x, or null
  int64_t block_x_stride[2];
  void* out;  // [batch, slots, channels]
};

// out = round(round(x / rms(x)) * weight) * silu(gate), per head.
struct GatedRmsNormParams {
  int rows, heads, size;
  DType dtype;
  const void *x, *gate, *weight;  // [rows, heads, size], [rows, heads * size], [size]
  int64_t gate_stride;
  float eps;
  void* out;
};

#define PYDFLASH_KERNELS_RECURRENT(apply)    \
  apply(delta_rule, DeltaRuleParams)         \
  apply(delta_prompt, DeltaPromptParams)     \
  apply(delta_commit, DeltaCommitParams)     \
  apply(short_conv, ShortConvParams)         \
  apply(gated_rms_norm, GatedRmsNormParams)

}  // namespace pydflash
