// What goes into the caches, and what a round leaves behind.
#include "bindings.h"

namespace pydflash {
namespace {

void cache_append(Capsule k_cache_, Capsule v_cache_, Capsule k_block_, Capsule v_block_, Capsule index_,
                  Capsule lengths_, uintptr_t stream, int device) {
  const char* op = "cache_append";
  TensorView kc(op, "k_cache", k_cache_), vc(op, "v_cache", v_cache_), kb(op, "k_block", k_block_),
      vb(op, "v_block", v_block_), index(op, "index", index_), lengths(op, "lengths", lengths_);
  kc.floating().shape({-1, -1, -1, -1, -1}, "[Ly, B, Hkv, L, D]").row_contiguous();
  const int64_t layers = kc.dim(0), batch = kc.dim(1), heads = kc.dim(2), capacity = kc.dim(3), dim = kc.dim(4);
  vc.like(kc).shape({layers, batch, heads, capacity, dim}, "[Ly, B, Hkv, L, D]").row_contiguous();
  kb.like(kc).shape({layers, batch, heads, -1, dim}, "[Ly, B, Hkv, S, D]").row_contiguous();
  const int64_t slots = kb.dim(3);
  vb.like(kc).shape({layers, batch, heads, slots, dim}, "[Ly, B, Hkv, S, D]").row_contiguous();
  index.int32().shape({batch, -1}, "[B, N]").contiguous();
  lengths.int32().shape({batch}, "[B]").contiguous();
  if (kb.empty() || index.empty()) return;
  if (capacity < 1) refuse("cache_append: the capacity L of k_cache must be >= 1, got 0");
  check_lengths(op, data_of<int32_t>(lengths), batch);
  if constexpr (PYDFLASH_HOST_MEMORY)
    for (int64_t i = 0; i < batch * index.dim(1); ++i)
      if (const int32_t row = data_of<int32_t>(index)[i]; row >= slots)
        refuse(text("cache_append: index must hold rows of the block, at most ", slots - 1, ", got ", row));
  CacheAppendParams p{};
  p.layers = int(layers), p.batch = int(batch), p.num_kv_heads = int(heads), p.slots = int(slots);
  p.entries = int(index.dim(1)), p.head_dim = int(dim), p.element_size = kc.element_size();
  p.capacity = capacity;
  p.k_cache = kc.data(), p.v_cache = vc.data(), p.k_block = kb.data(), p.v_block = vb.data();
  kc.strides_to(p.k_cache_stride, 4), vc.strides_to(p.v_cache_stride, 4);
  kb.strides_to(p.k_block_stride, 4), vb.strides_to(p.v_block_stride, 4);
  p.index = data_of<int32_t>(index), p.lengths = data_of<int32_t>(lengths);
  py::gil_scoped_release nogil;
  backend::cache_append(p, stream_of(stream, device));
}

void context_append(Capsule kv_, MaybeCapsule k_weights_, double eps, Capsule cos_, Capsule sin_, Capsule k_cache_,
                    Capsule v_cache_, Capsule lengths_, Capsule counts_, int64_t rotary_dim, bool interleaved,
                    double weight_offset, bool round_first, uintptr_t stream, int device) {
  const char* op = "context_append";
  TensorView kv(op, "kv", kv_), cos(op, "cos", cos_), sin(op, "sin", sin_), kc(op, "k_cache", k_cache_),
      vc(op, "v_cache", v_cache_), lengths(op, "lengths", lengths_), counts(op, "counts", counts_);
  kc.floating().shape({-1, -1, -1, -1, -1}, "[Ly, B, Hkv, L, D]").row_contiguous();
  const int64_t layers = kc.dim(0), batch = kc.dim(1), heads = kc.dim(2), capacity = kc.dim(3), dim = kc.dim(4);
  vc.like(kc).shape({layers, batch, heads, capacity, dim}, "[Ly, B, Hkv, L, D]").row_contiguous();
  kv.like(kc).shape({batch, -1, layers * 2 * heads * dim}, "[B, C, Ly * 2 * Hkv * D]").row_contiguous();
  lengths.int32().shape({batch}, "[B]").contiguous();
  counts.int32().shape({batch}, "[B]").contiguous();
  if (dim % 8 != 0 || dim > 256) kc.fail("of a head_dim that is a multiple of 8 up to 256", text(dim));
  ContextAppendParams p{};
  p.positions = check_tables(op, cos, sin, rotary_dim, dim);
  p.k_weights = maybe_weight(op, "k_weights", k_weights_, kc, {layers, dim}, "[Ly, D]");
  if (kv.empty() || capacity == 0) return;
  check_lengths(op, data_of<int32_t>(lengths), batch);
  check_values(op, "counts", data_of<int32_t>(counts), batch, kv.dim(1));
  p.layers = int(layers), p.batch = int(batch), p.rows = int(kv.dim(1)), p.num_kv_heads = int(heads);
  p.head_dim = int(dim), p.rotary_dim = int(rotary_dim), p.interleaved = interleaved, p.round_first = round_first;
  p.dtype = kc.dtype(), p.kv = kv.data(), kv.strides_to(p.kv_stride, 2);
  p.eps = float(eps), p.weight_offset = float(weight_offset);
  p.cos = data_of<float>(cos), p.sin = data_of<float>(sin);
  p.k_cache = kc.data(), p.v_cache = vc.data(), p.capacity = capacity;
  kc.strides_to(p.k_cache_stride, 4), vc.strides_to(p.v_cache_stride, 4);
  p.lengths = data_of<int32_t>(lengths), p.counts = data_of<int32_t>(counts);
  py::gil_scoped_release nogil;
  backend::context_append(p, stream_of(stream, device));
}

void round_commit(Capsule tokens_, Capsule index_, Capsule num_accepted_, Capsule bonus_, Capsule active_,
                  MaybeCapsule features_in_, MaybeCapsule features_out_, Capsule anchors_, Capsule lengths_,
                  Capsule starts_, Capsule counts_, Capsule record_, uintptr_t stream, int device) {
  const char* op = "round_commit";
  TensorView tokens(op, "tokens", tokens_), index(op, "index", index_), num_accepted(op, "num_accepted", num_accepted_),
      bonus(op, "bonus", bonus_), active(op, "active", active_), anchors(op, "anchors", anchors_),
      lengths(op, "lengths", lengths_), starts(op, "starts", starts_), counts(op, "counts", counts_),
      record(op, "record", record_);
  tokens.int64().shape({-1, -1}, "[B, S]").contiguous();
  const int64_t batch = tokens.dim(0), slots = tokens.dim(1);
  index.int32().shape({batch, slots}, "[B, S]").contiguous();
  for (const TensorView* view : {&num_accepted, &active, &lengths, &starts, &counts})
    view->int32().shape({batch}, "[B]").contiguous();
  for (const TensorView* view : {&bonus, &anchors}) view->int64().shape({batch}, "[B]").contiguous();
  record.int64().shape({batch, slots + 1}, "[B, S + 1]").contiguous();
  RoundCommitParams p{};
  if (features_in_) {
    if (!features_out_) refuse("round_commit: features_out must be given with features, got None");
    TensorView in(op, "features", *features_in_), out(op, "features_out", *features_out_);
    in.floating().shape({batch, slots, -1}, "[B, S, F]").row_contiguous();
    out.like(in).shape({batch, slots, in.dim(2)}, "[B, S, F]").contiguous();
    p.features = int(in.dim(2)), p.element_size = in.element_size();
    p.features_in = in.data(), in.strides_to(p.features_stride, 2), p.features_out = out.data();
  }
  if (tokens.empty()) return;
  if constexpr (PYDFLASH_HOST_MEMORY)
    for (int64_t b = 0; b < batch; ++b)
      if (data_of<int32_t>(active)[b] != 0) {
        const int32_t accepted = data_of<int32_t>(num_accepted)[b];
        const int32_t length = data_of<int32_t>(lengths)[b], start = data_of<int32_t>(starts)[b];
        check_values(op, "num_accepted", &accepted, 1, slots - 1);
        check_values(op, "index", data_of<int32_t>(index) + b * slots, accepted + 1, slots - 1);
        if (length > INT32_MAX - 1 - accepted || start > INT32_MAX - 1 - accepted)
          refuse(text(op, ": lengths and starts must stay below 2^31, got ", length, " and ", start));
      }
  p.batch = int(batch), p.slots = int(slots);
  p.tokens = data_of<int64_t>(tokens), p.index = data_of<int32_t>(index);
  p.num_accepted = data_of<int32_t>(num_accepted), p.bonus = data_of<int64_t>(bonus);
  p.active = data_of<int32_t>(active), p.anchors = data_of<int64_t>(anchors);
  p.lengths = data_of<int32_t>(lengths), p.starts = data_of<int32_t>(starts);
  p.counts = data_of<int32_t>(counts), p.record = data_of<int64_t>(record);
  py::gil_scoped_release nogil;
  backend::round_commit(p, stream_of(stream, device));
}

}  // namespace

PYDFLASH_BIND(cache_append)
PYDFLASH_BIND(context_append)
PYDFLASH_BIND(round_commit)

}  // namespace pydflash
