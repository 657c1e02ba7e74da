// The contract between the bindings and the kernels: one params struct per kernel, one launch function per
// backend. p is the target's distribution, q the drafter's, everywhere.
//
// Tensors are raw pointers with strides in elements; the last dimension is contiguous where no stride is given.
// A null pointer means "absent". All checks are done in the bindings; kernels trust what they get. `scratch` is
// working memory of scratch_bytes(params) bytes, which depend on shapes alone.
#pragma once

#include <cstdint>

namespace pydflash {

enum class DType : int { f32 = 0, bf16 = 1, f16 = 2 };

// In which bits a packed weight is kept; pydflash/decoder/formats.py says what each format is.
enum class WeightFormat : int { f32 = 0, bf16 = 1, int8 = 2 };

// The stream or queue the work goes to: null on a CPU.
struct Stream {
  void* handle = nullptr;
  int device = 0;
};

// out[b,h,i,:] = softmax_s(scale * q[b,h,i,:] . k[s]) v[s] over the keys slot i sees. Slot i stands at position
// lengths[b] + depths[i] and sees context position s < lengths[b] and the block slots j whose bit is set in
// visibility[i], both only where the distance of positions is < window (0 = no window). Context position s lives
// in cache row s % capacity, so a windowed cache may be a ring. A slot that sees nothing gets zeros.
struct BlockAttentionParams {
  int batch, num_heads, num_kv_heads, slots, head_dim, window;
  int64_t capacity;
  float scale;
  DType dtype;
  const void *q, *k_cache, *v_cache, *k_block, *v_block;
  void* out;
  // [batch, head, row] strides of each tensor; the head_dim stride is 1.
  int64_t q_stride[3], k_cache_stride[3], v_cache_stride[3], k_block_stride[3], v_block_stride[3], out_stride[3];
  const int32_t* lengths;     // [batch]
  const int64_t* visibility;  // [batch or 1, slots]
  const int32_t* depths;      // [batch or 1, slots]
  int64_t visibility_stride, depths_stride;  // 0 where one row serves the whole batch
  void* scratch;
};

// cache[layer, b, :, (lengths[b] + n) % capacity, :] = block[layer, b, :, index[b, n], :] for the n-th entry of
// index[b] that is >= 0 (the entries before the first -1). Keys and values in one launch.
struct CacheAppendParams {
  int layers, batch, num_kv_heads, slots, entries, head_dim, element_size;
  int64_t capacity;
  void *k_cache, *v_cache;
  const void *k_block, *v_block;
  // [layer, batch, head, row] strides; the head_dim stride is 1.
  int64_t k_cache_stride[4], v_cache_stride[4], k_block_stride[4], v_block_stride[4];
  const int32_t* index;    // [batch, entries]
  const int32_t* lengths;  // [batch]
};

// y[b,i,c] = sum_t (base[t,c] + delta[b,i,t,c / (channels / groups)]) * x[b,i-t,c]; x before slot 0 is zero.
struct BlockConvParams {
  int batch, slots, channels, taps, groups;
  DType dtype;
  const void *x, *base, *delta;
  void* y;
  int64_t x_stride[2];      // [batch, slot]; base is contiguous [taps, channels]; y is contiguous
  int64_t delta_stride[3];  // [batch, slot, tap]
};

// Top-k candidates of every slot, the lattice of edge scores, and the walk through it (greedy where
// temperature <= 0, else a draw from softmax(score / temperature)). Candidates are sorted by (logit, -id).
// With a selector: score[a][c] = logit[c] + sum_r predecessor[prev_a][r] * hidden[r] * successor[cand_c][r],
// prev_a being candidate a of the slot before (the anchor for every a at the first). Without: score[c] = logit[c].
struct PathSelectParams {
  int batch, slots;  // slots that draft: block_size - 1
  int vocab_size, num_candidates, rank;  // rank 0 = no selector
  int codebook_size;            // rows of the codebooks
  DType dtype, selector_dtype;
  const void* logits;        // [batch, slots, >= vocab_size]
  int64_t logits_stride[2];  // [batch, slot]
  const void *hidden, *predecessor, *successor;  // [batch, slots, rank], [codebook_size, rank] twice; contiguous
  const int64_t* anchors;                        // [batch]
  const float* temperature;                      // [batch] or null: all greedy
  const int64_t* seeds;                          // [batch]
  const int32_t* starts;                         // [batch]
  int64_t* tokens;                               // [batch, slots]
  int64_t* candidates;                           // [batch, slots, num_candidates]
  float* probs;   // [batch, slots, num_candidates] or null; one-hot in greedy rows
  float* scores;  // [batch, slots, num_candidates, num_candidates]; without a selector [batch, slots, num_candidates]
  void* scratch;
};

// A lattice of edge scores as path_select returns it. An edge's log-probability is (score - shift) - log_total.
// With log_normalizers (independent slots only) shift is the slot's and log_total 0. Without, shift is the largest
// score of the edge's row and log_total the logarithm of the row's sum of exp(score - shift): differences in float,
// exponentials and their sum in double, rounded to float once. NaN counts as -inf, in scores and in any sum.
struct Lattice {
  int batch, slots, num_candidates;
  int rows;  // of a slot: num_candidates, one for each previous candidate (row 0 at the first slot), or 1 for all
  const int64_t* candidates;      // [batch, slots, num_candidates]
  const float* scores;            // [batch, slots, rows, num_candidates]
  const float* log_normalizers;   // [batch, slots] or null
};

// The num_nodes nodes of the lattice taken best first: of all children of taken nodes the one of the highest
// cumulative log-probability, ties to the shallower, then to the earlier parent, then to the lower token id.
// Cumulative is parent + edge in float. Slot 0 is the anchor, the others stand in the order of taking: first the
// trunk, a path from the anchor, whatever its probability. A trunk token that is no candidate has -inf.
struct PathTreeParams {
  Lattice lattice;
  int num_nodes;           // at most 63 and the nodes of the lattice
  int trunk_nodes;         // at most num_nodes and the lattice's slots
  const int64_t* trunk;    // [batch, trunk_nodes] or null
  const int64_t* anchors;  // [batch]
  int64_t* tokens;         // [batch, num_nodes + 1], as all that follow
  int32_t* parents;        // -1 for the anchor
  int32_t* depths;
  int64_t* visibility;  // bit i: slot i is this slot or an ancestor
  float* log_probs;     // 0 for the anchor
  void* scratch;
};

// The path through all slots of the highest cumulative log-probability, summed from the last slot to the first.
// Ties go to the lower token id, slot by slot from the first.
struct PathViterbiParams {
  Lattice lattice;
  int64_t* tokens;   // [batch, slots]
  float* log_probs;  // [batch]
  void* scratch;
};

// Acceptance and the next token. Row i of target_logits is the target's law after slot i; tokens[i] is the draft
// in slot i (slot 0 the anchor, negative = no draft), parents[i] < i the slot it continues (null = a chain).
// The law of a row is filtered in this order: temperature, top_k, top_p, min_p (ties: lower id first).
// temperature <= 0: descend while a child carries the argmax. Without q: draw from the row and descend while a child
// carries it. With q of the first draft_slots drafts, which are a chain: accept the next of them while u * q < p, else
// draw from the residual max(p - q, 0) and descend if another child carries it; off the chain and behind it the rule
// without q goes on.
struct RejectSampleParams {
  int batch, slots, vocab_size;
  DType dtype;
  const void* logits;        // [batch, slots, >= vocab_size]
  int64_t logits_stride[2];  // [batch, slot]
  const int64_t* tokens;     // [batch, slots]
  const int32_t* parents;    // [batch, slots] or null
  const int64_t* draft_ids;  // [batch, draft_slots, num_candidates], null where q is dense or absent
  const float* draft_probs;  // [batch, draft_slots, num_candidates or vocab_size] or null
  int draft_slots, num_candidates;  // 0 draft_slots where q is absent
  int64_t draft_probs_stride[2];  // [batch, slot]
  const float *temperature, *top_p, *min_p;  // [batch]
  const int32_t* top_k;                      // [batch], 0 = off
  const int64_t* seeds;                      // [batch]
  const int32_t* starts;                     // [batch]
  int32_t* index;         // [batch, slots]: accepted slots, the anchor first, then -1
  int32_t* num_accepted;  // [batch]
  int64_t* bonus;         // [batch]
  void* scratch;
};

// What logits lose for tokens that a text holds. A token that the new text with the drafts on a slot's path (the
// anchor, slot 0, is counted already) holds n times: repetition divides positive logits and multiplies others where
// n > 0 or the prompt holds it; then presence (where n > 0) and n * frequency are taken off, and the bias added.
struct ApplyPenaltiesParams {
  int batch, slots, vocab_size;
  DType dtype;
  const void* logits;          // [batch, slots, vocab_size]
  int64_t logits_stride[2];    // [batch, slot]
  const int64_t* tokens;       // [batch, slots], negative = no draft
  const int64_t* visibility;   // [batch or 1, slots]
  int64_t visibility_stride;   // 0 where one row serves the whole batch
  const int32_t *in_prompt, *counts;  // [batch, vocab_size]: not 0 where the prompt holds the token; the new text's
  const float* bias;                  // [batch, vocab_size]
  const float *repetition, *presence, *frequency;  // [batch]
  float* out;                                      // [batch, slots, vocab_size]
};

// sum = x + delta; out = sum / rms(sum) * (weight + weight_offset). round_first: rounded before the weight as well.
struct AddRmsNormParams {
  int rows, size;
  DType dtype;
  const void *x, *delta, *weight;  // [rows, size] twice, delta null where there is none; [size]
  float eps, weight_offset;
  bool round_first;
  void *out, *sum;  // [rows, size]; sum is contiguous, null without delta, and may be x
  int64_t x_stride, delta_stride, out_stride;
};

// out = silu(first half of a row) * second half, each factor rounded before it is used.
struct SwigluParams {
  int rows, size;  // size: of a half
  DType dtype;
  const void* x;  // [rows, 2 * size]
  void* out;      // [rows, size]
  int64_t x_stride, out_stride;
};

enum class Activation : int { gelu_tanh = 0, sigmoid = 1 };

// out = x * activation(gate), the activation rounded before it is used.
struct ApplyGateParams {
  int rows, size;
  Activation activation;
  DType dtype;
  const void *x, *gate;  // [rows, size]
  void* out;             // [rows, size], contiguous
  int64_t x_stride, gate_stride;
};

// out = cap * tanh(x / cap), each step rounded.
struct SoftCapParams {
  int rows, size;
  float cap;
  DType dtype;
  const void* x;  // [rows, size]
  void* out;      // [rows, size], contiguous
  int64_t x_stride;
};

// Splits a projection into heads, normalises q and k per head where they have a weight, and rotates them: the first
// rotary_dim channels by the tables' row at lengths[b] + depths[i], in pairs (i, i + rotary_dim / 2) or (2i, 2i + 1).
struct HeadNormRopeParams {
  int batch, slots, num_heads, num_kv_heads, head_dim, rotary_dim;
  bool interleaved, round_first;
  DType dtype;
  const void* qkv;                  // [batch, slots, (num_heads + 2 num_kv_heads) * head_dim]
  int64_t qkv_stride[2];            // [batch, slot]
  const void *q_weight, *k_weight;  // [head_dim] or null
  float eps, weight_offset;
  const float *cos, *sin;  // [positions, rotary_dim / 2]
  int64_t positions;
  const int32_t *lengths, *depths;  // [batch], [batch or 1, slots]
  int64_t depths_stride;
  void *q, *k, *v;
  int64_t q_stride[3], k_stride[3], v_stride[3];  // [batch, head, slot]
};

// Keys and values of context rows, all layers in one launch: row n < counts[b] is normalised, rotated to position
// lengths[b] + n and written to cache row (lengths[b] + n) % capacity; of more than capacity rows only the last.
struct ContextAppendParams {
  int layers, batch, rows, num_kv_heads, head_dim, rotary_dim;
  bool interleaved, round_first;
  DType dtype;
  const void* kv;           // [batch, rows, layers, 2, num_kv_heads, head_dim]
  int64_t kv_stride[2];     // [batch, row]
  const void* k_weights;    // [layers, head_dim] or null
  float eps, weight_offset;
  const float *cos, *sin;  // [positions, rotary_dim / 2]
  int64_t positions;
  void *k_cache, *v_cache;
  int64_t k_cache_stride[4], v_cache_stride[4];  // [layer, batch, head, row]
  int64_t capacity;
  const int32_t *lengths, *counts;  // [batch]
};

// What follows reject_sample in a round, in place. Rows that are not active record nothing and stay as they are.
struct RoundCommitParams {
  int batch, slots, features, element_size;
  const int64_t* tokens;                // [batch, slots]
  const int32_t *index, *num_accepted;  // [batch, slots], [batch]
  const int64_t* bonus;                 // [batch]
  const int32_t* active;                // [batch], 0 or 1
  const void* features_in;              // [batch, slots, features] or null
  int64_t features_stride[2];           // [batch, slot]
  void* features_out;                   // [batch, slots, features]: the accepted slots' rows, in order
  int64_t* anchors;                     // [batch] = bonus
  int32_t *lengths, *starts;            // [batch] += num_accepted + 1
  int32_t* counts;                      // [batch] = num_accepted + 1, 0 where not active
  int64_t* record;                      // [batch, slots + 1]: new tokens, -1 behind them; their number last
};

// out[m, :] = x[m] @ weight^T (+ bias) of up to three weights [out_features[i], in_features] side by side, summed in
// float and rounded once. gated: out = silu(first) * second, each factor rounded before it is used.
struct SkinnyLinearParams {
  int rows, in_features, num_weights;
  bool gated;
  DType dtype;
  const void* x;  // [rows, in_features]
  int64_t x_stride;
  const void *weights[3], *biases[3];
  int out_features[3];
  void* out;  // [rows, sum of out_features], or [rows, out_features[0]] where gated
  int64_t out_stride;
};

// out[m, n] = sum over k of x[m, k] * weight[n, k], plus bias[n]. The weight lies in panels of 32 outputs: [panel][step]
// [2 halves][16 words][16 outputs], a word being 4 bytes of successive inputs of one output, zero beyond the weight.
// Sums in float, rounded once. int8: whole numbers of x by each row's largest magnitude, with scales of the outputs.
struct PackedLinearParams {
  int rows, in_features, out_features, panels, steps;
  WeightFormat format;
  DType dtype;  // of x, bias and out; f32 or bf16 as the weight, any with int8
  const void* x;  // [rows, in_features]
  int64_t x_stride;
  const void* weight;
  const float* scales;  // [out_features] of int8, else null
  const void* bias;     // [out_features] or null
  void* out;            // [rows, out_features]
  int64_t out_stride;
};

}  // namespace pydflash

#include "kernels_recurrent.h"

namespace pydflash {

// The kernels of each backend, each with its params. Declarations, the CPU's dispatch, the Python modules and their
// `kernels` come from these lists; a kernel of a list that is written nowhere, or bound nowhere, does not link.
#define PYDFLASH_KERNELS_OF_ALL(apply)           \
  apply(block_attention, BlockAttentionParams)   \
  apply(cache_append, CacheAppendParams)         \
  apply(context_append, ContextAppendParams)     \
  apply(round_commit, RoundCommitParams)         \
  apply(path_select, PathSelectParams)           \
  apply(path_tree, PathTreeParams)               \
  apply(path_viterbi, PathViterbiParams)         \
  apply(reject_sample, RejectSampleParams)       \
  apply(apply_penalties, ApplyPenaltiesParams)   \
  apply(add_rms_norm, AddRmsNormParams)          \
  apply(swiglu, SwigluParams)                    \
  apply(head_norm_rope, HeadNormRopeParams)      \
  apply(block_conv, BlockConvParams)

#define PYDFLASH_KERNELS_NOT_ON_CUDA(apply) \
  PYDFLASH_KERNELS_RECURRENT(apply)         \
  apply(apply_gate, ApplyGateParams)        \
  apply(soft_cap, SoftCapParams)

#define PYDFLASH_KERNELS_cpu(apply)     \
  PYDFLASH_KERNELS_OF_ALL(apply)        \
  PYDFLASH_KERNELS_NOT_ON_CUDA(apply)   \
  apply(packed_linear, PackedLinearParams)
#define PYDFLASH_KERNELS_cuda(apply) \
  PYDFLASH_KERNELS_OF_ALL(apply)     \
  apply(skinny_linear, SkinnyLinearParams)
#define PYDFLASH_KERNELS_sycl_backend(apply) \
  PYDFLASH_KERNELS_OF_ALL(apply)             \
  PYDFLASH_KERNELS_NOT_ON_CUDA(apply)

// What all backends have alike.
#define PYDFLASH_DECLARE(name, Params) void name(const Params& params, Stream stream);
#define PYDFLASH_DECLARE_BACKEND(kernels)                                                        \
  kernels(PYDFLASH_DECLARE)                                                                      \
  const char* description(); /* the instruction set in use, or how or for what it is compiled */ \
  const char* select_level(const char* name); /* forces an instruction set (tests); null where there is no such */
// The memory that a call works in, by shapes alone; on a CPU none. The bindings of a kernel that takes scratch do not
// compile without its line here.
#define PYDFLASH_DECLARE_SCRATCH()                           \
  int64_t scratch_bytes(const BlockAttentionParams& params); \
  int64_t scratch_bytes(const PathSelectParams& params);     \
  int64_t scratch_bytes(const PathTreeParams& params);       \
  int64_t scratch_bytes(const PathViterbiParams& params);    \
  int64_t scratch_bytes(const RejectSampleParams& params);

namespace cpu {
PYDFLASH_DECLARE_BACKEND(PYDFLASH_KERNELS_cpu)
template <class Params>
int64_t scratch_bytes(const Params&) {
  return 0;
}
}  // namespace cpu

namespace cuda {
PYDFLASH_DECLARE_BACKEND(PYDFLASH_KERNELS_cuda)
PYDFLASH_DECLARE_SCRATCH()
float skinny_linear_balance(const SkinnyLinearParams& params, int device);  // 1: all multiprocessors work all the time
}  // namespace cuda

// Not "sycl", which inside pydflash would hide SYCL's own namespace.
namespace sycl_backend {
PYDFLASH_DECLARE_BACKEND(PYDFLASH_KERNELS_sycl_backend)
PYDFLASH_DECLARE_SCRATCH()
int64_t scratch_bytes(const DeltaRuleParams& params);
int64_t scratch_bytes(const DeltaPromptParams& params);
}  // namespace sycl_backend
#undef PYDFLASH_DECLARE_BACKEND
#undef PYDFLASH_DECLARE_SCRATCH
#undef PYDFLASH_DECLARE

}  // namespace pydflash
