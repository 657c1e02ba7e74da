// One Python module per backend, compiled from this file with PYDFLASH_BACKEND = cpu | cuda | sycl_backend.
// Per op: check the arguments, fill the params, release the GIL, launch.
#include "bindings.h"

namespace pydflash {
namespace {

// Values can only be looked at where the host may read them.
void check_lengths(const char* op, const int32_t* lengths, int64_t batch) {
  if constexpr (PYDFLASH_HOST_MEMORY)
    for (int64_t b = 0; b < batch; ++b)
      if (lengths[b] < 0) refuse(text(op, ": lengths[", b, "] must be >= 0, got ", lengths[b]));
}

void block_attention(Capsule q_, Capsule k_cache_, Capsule v_cache_, Capsule k_block_, Capsule v_block_,
                     Capsule lengths_, Capsule visibility_, Capsule depths_, int64_t window, double scale,
                     Capsule out_, uintptr_t stream, int device, const Allocate& allocate) {
  const char* op = "block_attention";
  TensorView q(op, "q", q_), kc(op, "k_cache", k_cache_), vc(op, "v_cache", v_cache_), kb(op, "k_block", k_block_),
      vb(op, "v_block", v_block_), lengths(op, "lengths", lengths_), visibility(op, "visibility", visibility_),
      depths(op, "depths", depths_), out(op, "out", out_);
  q.floating().shape({-1, -1, -1, -1}, "[B, Hq, S, D]").row_contiguous();
  const int64_t batch = q.dim(0), heads = q.dim(1), slots = q.dim(2), dim = q.dim(3);
  kc.like(q).shape({batch, -1, -1, dim}, "[B, Hkv, L, D]").row_contiguous();
  const int64_t kv_heads = kc.dim(1), capacity = kc.dim(2);
  vc.like(q).shape({batch, kv_heads, capacity, dim}, "[B, Hkv, L, D]").row_contiguous();
  kb.like(q).shape({batch, kv_heads, slots, dim}, "[B, Hkv, S, D]").row_contiguous();
  vb.like(q).shape({batch, kv_heads, slots, dim}, "[B, Hkv, S, D]").row_contiguous();
  out.like(q).shape({batch, heads, slots, dim}, "[B, Hq, S, D]").row_contiguous();
  lengths.int32().shape({batch}, "[B]").contiguous();
  visibility.int64().shape({visibility.dim(0) == 1 ? 1 : batch, slots}, "[B or 1, S]").contiguous();
  depths.int32().shape({depths.dim(0) == 1 ? 1 : batch, slots}, "[B or 1, S]").contiguous();
  if (slots < 1 || slots > 64) refuse(text("block_attention: slots S must be 1 to 64, got ", slots));
  if (dim < 8 || dim > 256 || dim % 8 != 0)
    refuse(text("block_attention: head_dim D must be a multiple of 8 from 8 to 256, got ", dim));
  if (kv_heads < 1 || heads % kv_heads != 0)
    refuse(text("block_attention: Hq must be a multiple of Hkv = ", kv_heads, ", got ", heads));
  if (window < 0) refuse(text("block_attention: window must be >= 0 (0 = none), got ", window));
  if (out.empty()) return;
  check_lengths(op, data_of<int32_t>(lengths), batch);
  BlockAttentionParams p{};
  p.batch = int(batch), p.num_heads = int(heads), p.num_kv_heads = int(kv_heads), p.slots = int(slots);
  p.head_dim = int(dim), p.window = int(window), p.capacity = capacity, p.scale = float(scale);
  p.dtype = q.dtype();
  p.q = q.data(), p.k_cache = kc.data(), p.v_cache = vc.data(), p.k_block = kb.data(), p.v_block = vb.data();
  p.out = out.data();
  q.strides_to(p.q_stride, 3), kc.strides_to(p.k_cache_stride, 3), vc.strides_to(p.v_cache_stride, 3);
  kb.strides_to(p.k_block_stride, 3), vb.strides_to(p.v_block_stride, 3), out.strides_to(p.out_stride, 3);
  p.lengths = data_of<int32_t>(lengths);
  p.visibility = data_of<int64_t>(visibility), p.visibility_stride = visibility.dim(0) == 1 ? 0 : slots;
  p.depths = data_of<int32_t>(depths), p.depths_stride = depths.dim(0) == 1 ? 0 : slots;
  p.scratch = scratch_for(p, allocate);
  py::gil_scoped_release nogil;
  backend::block_attention(p, stream_of(stream, device));
}

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

void block_conv(Capsule x_, Capsule base_, Capsule delta_, Capsule y_, uintptr_t stream, int device) {
  const char* op = "block_conv";
  TensorView x(op, "x", x_), base(op, "base", base_), delta(op, "delta", delta_), y(op, "y", y_);
  x.floating().shape({-1, -1, -1}, "[B, S, C]").row_contiguous();
  const int64_t batch = x.dim(0), slots = x.dim(1), channels = x.dim(2);
  base.like(x).shape({-1, channels}, "[T, C]").contiguous();
  const int64_t taps = base.dim(0);
  delta.like(x).shape({batch, slots, taps, -1}, "[B, S, T, G]").row_contiguous();
  const int64_t groups = delta.dim(3);
  y.like(x).shape({batch, slots, channels}, "[B, S, C]").contiguous();
  if (taps < 1 || taps > 8) refuse(text("block_conv: taps T of base must be 1 to 8, got ", taps));
  if (groups < 1 || channels % groups != 0)
    refuse(text("block_conv: groups G of delta must divide C = ", channels, ", got ", groups));
  if (y.empty()) return;
  BlockConvParams p{};
  p.batch = int(batch), p.slots = int(slots), p.channels = int(channels), p.taps = int(taps);
  p.groups = int(groups), p.dtype = x.dtype();
  p.x = x.data(), p.base = base.data(), p.delta = delta.data(), p.y = y.data();
  x.strides_to(p.x_stride, 2), delta.strides_to(p.delta_stride, 3);
  py::gil_scoped_release nogil;
  backend::block_conv(p, stream_of(stream, device));
}

void path_select(Capsule logits_, MaybeCapsule hidden_, MaybeCapsule predecessor_, MaybeCapsule successor_,
                 Capsule anchors_, MaybeCapsule temperature_, Capsule seeds_, Capsule starts_, int64_t vocab_size,
                 Capsule tokens_, Capsule candidates_, MaybeCapsule probs_, Capsule scores_, uintptr_t stream, int device,
                 const Allocate& allocate) {
  const char* op = "path_select";
  TensorView logits(op, "logits", logits_), anchors(op, "anchors", anchors_), seeds(op, "seeds", seeds_),
      starts(op, "starts", starts_), tokens(op, "tokens", tokens_), candidates(op, "candidates", candidates_),
      scores(op, "scores", scores_);
  logits.floating().shape({-1, -1, -1}, "[B, S-1, V]").row_contiguous();
  const int64_t batch = logits.dim(0), slots = logits.dim(1);
  candidates.int64().shape({batch, slots, -1}, "[B, S-1, K]").contiguous();
  const int64_t top_k = candidates.dim(2);
  if (vocab_size < 1 || vocab_size > logits.dim(2))
    refuse(text("path_select: vocab_size must be 1 to V = ", logits.dim(2), ", got ", vocab_size));
  if (top_k < 1 || top_k > vocab_size || top_k > 1024)
    refuse(text("path_select: top_k must be 1 to min(vocab_size, 1024) = ",
                vocab_size < 1024 ? vocab_size : 1024, ", got ", top_k));
  anchors.int64().shape({batch}, "[B]").contiguous();
  seeds.int64().shape({batch}, "[B]").contiguous();
  starts.int32().shape({batch}, "[B]").contiguous();
  tokens.int64().shape({batch, slots}, "[B, S-1]").contiguous();
  PathSelectParams p{};
  if (hidden_) {
    TensorView hidden(op, "hidden", *hidden_), predecessor(op, "predecessor", predecessor_.value()),
        successor(op, "successor", successor_.value());
    hidden.floating().shape({batch, slots, -1}, "[B, S-1, r]").contiguous();
    if (hidden.dim(2) < 1) refuse("path_select: the rank r of hidden must be at least 1, got 0");
    predecessor.like(hidden).shape({-1, hidden.dim(2)}, "[V, r]").contiguous();
    successor.like(hidden).shape({predecessor.dim(0), hidden.dim(2)}, "[V, r]").contiguous();
    if (predecessor.dim(0) < vocab_size)
      refuse(text("path_select: the codebooks must have at least vocab_size = ", vocab_size, " rows, got ",
                  predecessor.dim(0)));
    scores.float32().shape({batch, slots, top_k, top_k}, "[B, S-1, K, K]").contiguous();
    p.rank = int(hidden.dim(2)), p.codebook_size = int(predecessor.dim(0)), p.selector_dtype = hidden.dtype();
    p.hidden = hidden.data(), p.predecessor = predecessor.data(), p.successor = successor.data();
    const int64_t* anchor = data_of<int64_t>(anchors);
    if constexpr (PYDFLASH_HOST_MEMORY)
      for (int64_t b = 0; b < batch; ++b)
        if (anchor[b] < 0 || anchor[b] >= p.codebook_size)
          refuse(text("path_select: anchors must be ids of the codebooks, 0 to ", p.codebook_size - 1, ", got ",
                      anchor[b]));
  } else {
    scores.float32().shape({batch, slots, top_k}, "[B, S-1, K]").contiguous();
  }
  if (temperature_) {
    TensorView temperature(op, "temperature", *temperature_);
    p.temperature = data_of<float>(temperature.float32().shape({batch}, "[B]").contiguous());
  }
  if (probs_) {
    TensorView probs(op, "probs", *probs_);
    p.probs = data_of<float>(probs.float32().shape({batch, slots, top_k}, "[B, S-1, K]").contiguous());
  }
  if (candidates.empty()) return;
  p.batch = int(batch), p.slots = int(slots), p.vocab_size = int(vocab_size), p.top_k = int(top_k);
  p.dtype = logits.dtype(), p.logits = logits.data();
  logits.strides_to(p.logits_stride, 2);
  p.anchors = data_of<int64_t>(anchors), p.seeds = data_of<int64_t>(seeds), p.starts = data_of<int32_t>(starts);
  p.tokens = data_of<int64_t>(tokens), p.candidates = data_of<int64_t>(candidates);
  p.scores = data_of<float>(scores);
  p.scratch = scratch_for(p, allocate);
  py::gil_scoped_release nogil;
  backend::path_select(p, stream_of(stream, device));
}

// The lattice of path_tree and path_viterbi; `candidates` and `scores` are checked here.
Lattice lattice_of(const char* op, const TensorView& candidates, const TensorView& scores,
                   const MaybeCapsule& log_normalizers_) {
  candidates.int64().shape({-1, -1, -1}, "[B, S-1, K]").contiguous();
  const int64_t batch = candidates.dim(0), slots = candidates.dim(1), top_k = candidates.dim(2);
  if (top_k < 1 || top_k > 1024) refuse(text(op, ": candidates must be 1 to 1024 a slot, got ", top_k));
  const bool edges = scores.rank() == 4;
  if (edges)
    scores.float32().shape({batch, slots, top_k, top_k}, "[B, S-1, K, K]").contiguous();
  else
    scores.float32().shape({batch, slots, top_k}, "[B, S-1, K] or [B, S-1, K, K]").contiguous();
  Lattice lattice{};
  if (log_normalizers_) {
    TensorView normalizers(op, "log_normalizers", *log_normalizers_);
    if (edges) refuse(text(op, ": log_normalizers must be None where scores are [B, S-1, K, K], got a tensor"));
    lattice.log_normalizers = data_of<float>(normalizers.float32().shape({batch, slots}, "[B, S-1]").contiguous());
  }
  lattice.batch = int(batch), lattice.slots = int(slots), lattice.rows = int(edges ? top_k : 1);
  lattice.top_k = int(top_k);
  lattice.candidates = data_of<int64_t>(candidates), lattice.scores = data_of<float>(scores);
  return lattice;
}

void path_tree(Capsule anchors_, Capsule candidates_, Capsule scores_, int64_t num_nodes, MaybeCapsule log_normalizers_,
               MaybeCapsule trunk_, Capsule tokens_, Capsule parents_, Capsule depths_, Capsule visibility_,
               Capsule log_probs_, uintptr_t stream, int device, const Allocate& allocate) {
  const char* op = "path_tree";
  TensorView anchors(op, "anchors", anchors_), candidates(op, "candidates", candidates_),
      scores(op, "scores", scores_), tokens(op, "tokens", tokens_), parents(op, "parents", parents_),
      depths(op, "depths", depths_), visibility(op, "visibility", visibility_), log_probs(op, "log_probs", log_probs_);
  PathTreeParams p{};
  p.lattice = lattice_of(op, candidates, scores, log_normalizers_);
  const int64_t batch = p.lattice.batch, slots = num_nodes + 1;
  int64_t nodes = 0, width = 1;
  for (int depth = 0; depth < p.lattice.slots && nodes < 63; ++depth) nodes += width *= p.lattice.top_k;
  const int64_t limit = nodes < 63 ? nodes : 63;
  if (num_nodes < 1 || num_nodes > limit)
    refuse(text("path_tree: num_nodes must be 1 to ", limit, " (at most 63, and the nodes of a lattice of ",
                p.lattice.slots, " slots with ", p.lattice.top_k, " candidates), got ", num_nodes));
  anchors.int64().shape({batch}, "[B]").contiguous();
  if (trunk_) {
    TensorView trunk(op, "trunk", *trunk_);
    trunk.int64().shape({batch, -1}, "[B, W]").contiguous();
    const int64_t longest = num_nodes < p.lattice.slots ? num_nodes : p.lattice.slots;
    if (trunk.dim(1) > longest)
      trunk.fail(text("of shape [B, W] with W <= min(num_nodes, S-1) = ", longest), text("W = ", trunk.dim(1)));
    p.trunk = data_of<int64_t>(trunk), p.trunk_nodes = int(trunk.dim(1));
  }
  tokens.int64().shape({batch, slots}, "[B, N+1]").contiguous();
  parents.int32().shape({batch, slots}, "[B, N+1]").contiguous();
  depths.int32().shape({batch, slots}, "[B, N+1]").contiguous();
  visibility.int64().shape({batch, slots}, "[B, N+1]").contiguous();
  log_probs.float32().shape({batch, slots}, "[B, N+1]").contiguous();
  if (tokens.empty()) return;
  p.num_nodes = int(num_nodes), p.anchors = data_of<int64_t>(anchors), p.tokens = data_of<int64_t>(tokens);
  p.parents = data_of<int32_t>(parents), p.depths = data_of<int32_t>(depths);
  p.visibility = data_of<int64_t>(visibility), p.log_probs = data_of<float>(log_probs);
  p.scratch = scratch_for(p, allocate);
  py::gil_scoped_release nogil;
  backend::path_tree(p, stream_of(stream, device));
}

void path_viterbi(Capsule candidates_, Capsule scores_, MaybeCapsule log_normalizers_, Capsule tokens_,
                  Capsule log_probs_, uintptr_t stream, int device, const Allocate& allocate) {
  const char* op = "path_viterbi";
  TensorView candidates(op, "candidates", candidates_), scores(op, "scores", scores_), tokens(op, "tokens", tokens_),
      log_probs(op, "log_probs", log_probs_);
  PathViterbiParams p{};
  p.lattice = lattice_of(op, candidates, scores, log_normalizers_);
  tokens.int64().shape({p.lattice.batch, p.lattice.slots}, "[B, S-1]").contiguous();
  log_probs.float32().shape({p.lattice.batch}, "[B]").contiguous();
  if (log_probs.empty()) return;
  p.tokens = data_of<int64_t>(tokens), p.log_probs = data_of<float>(log_probs);
  p.scratch = scratch_for(p, allocate);
  py::gil_scoped_release nogil;
  backend::path_viterbi(p, stream_of(stream, device));
}

void reject_sample(Capsule logits_, Capsule tokens_, MaybeCapsule parents_, MaybeCapsule draft_ids_,
                   MaybeCapsule draft_probs_, Capsule temperature_, Capsule top_k_, Capsule top_p_, Capsule min_p_,
                   Capsule seeds_, Capsule starts_, int64_t vocab_size, Capsule index_, Capsule num_accepted_,
                   Capsule bonus_, uintptr_t stream, int device, const Allocate& allocate) {
  const char* op = "reject_sample";
  TensorView logits(op, "target_logits", logits_), tokens(op, "tokens", tokens_),
      temperature(op, "temperature", temperature_), top_k(op, "top_k", top_k_), top_p(op, "top_p", top_p_),
      min_p(op, "min_p", min_p_), seeds(op, "seeds", seeds_), starts(op, "starts", starts_),
      index(op, "index", index_), num_accepted(op, "num_accepted", num_accepted_), bonus(op, "bonus", bonus_);
  logits.floating().shape({-1, -1, -1}, "[B, S, V]").row_contiguous();
  const int64_t batch = logits.dim(0), slots = logits.dim(1);
  if (vocab_size < 1 || vocab_size > logits.dim(2))
    refuse(text("reject_sample: vocab_size must be 1 to V = ", logits.dim(2), ", got ", vocab_size));
  if (slots < 1) refuse("reject_sample: target_logits must have at least one slot, got 0");
  tokens.int64().shape({batch, slots}, "[B, S]").contiguous();
  RejectSampleParams p{};
  if (parents_) {
    TensorView parents(op, "parents", *parents_);
    p.parents = data_of<int32_t>(parents.int32().shape({batch, slots}, "[B, S]").contiguous());
    if constexpr (PYDFLASH_HOST_MEMORY)
      for (int64_t b = 0; b < batch; ++b)
        for (int64_t i = 1; i < slots; ++i)
          if (const int32_t parent = p.parents[b * slots + i]; parent < 0 || parent >= i)
            refuse(text("reject_sample: parents[", b, ", ", i, "] must be an earlier slot, 0 to ", i - 1, ", got ",
                        parent));
  }
  if (draft_probs_) {
    TensorView probs(op, "draft_probs", *draft_probs_);
    const char* letters = draft_ids_ ? "[B, W, K]" : "[B, W, V]";
    probs.float32().shape({batch, -1, -1}, letters).row_contiguous();
    const int64_t drafts = probs.dim(1);
    if (drafts >= slots) probs.fail(text("of shape ", letters, " with W <= S-1 = ", slots - 1), text("W = ", drafts));
    if (draft_ids_) {
      TensorView ids(op, "draft_ids", *draft_ids_);
      ids.int64().shape({batch, drafts, probs.dim(2)}, "[B, W, K]").contiguous();
      p.draft_ids = data_of<int64_t>(ids);
    } else if (probs.dim(2) < vocab_size) {
      probs.fail(text("of shape [B, W, V] with V >= vocab_size = ", vocab_size), text("V = ", probs.dim(2)));
    }
    if constexpr (PYDFLASH_HOST_MEMORY)
      for (int64_t n = 0; n < (parents_ ? batch * drafts : 0); ++n) {
        const int64_t b = n / drafts, i = n % drafts + 1;
        if (const int32_t parent = p.parents[b * slots + i]; parent != i - 1)
          refuse(text("reject_sample: parents[", b, ", ", i, "] must be ", i - 1,
                      " (draft_probs holds q of slots 1 to ", drafts, ", a chain), got ", parent));
      }
    p.draft_probs = data_of<float>(probs), p.num_candidates = int(probs.dim(2)), p.draft_slots = int(drafts);
    probs.strides_to(p.draft_probs_stride, 2);
  }
  temperature.float32().shape({batch}, "[B]").contiguous();
  top_p.float32().shape({batch}, "[B]").contiguous();
  min_p.float32().shape({batch}, "[B]").contiguous();
  top_k.int32().shape({batch}, "[B]").contiguous();
  seeds.int64().shape({batch}, "[B]").contiguous();
  starts.int32().shape({batch}, "[B]").contiguous();
  index.int32().shape({batch, slots}, "[B, S]").contiguous();
  num_accepted.int32().shape({batch}, "[B]").contiguous();
  bonus.int64().shape({batch}, "[B]").contiguous();
  if (bonus.empty()) return;
  p.batch = int(batch), p.slots = int(slots), p.vocab_size = int(vocab_size);
  p.dtype = logits.dtype(), p.logits = logits.data();
  logits.strides_to(p.logits_stride, 2);
  p.tokens = data_of<int64_t>(tokens);
  p.temperature = data_of<float>(temperature), p.top_p = data_of<float>(top_p), p.min_p = data_of<float>(min_p);
  p.top_k = data_of<int32_t>(top_k), p.seeds = data_of<int64_t>(seeds), p.starts = data_of<int32_t>(starts);
  p.index = data_of<int32_t>(index), p.num_accepted = data_of<int32_t>(num_accepted);
  p.bonus = data_of<int64_t>(bonus);
  p.scratch = scratch_for(p, allocate);
  py::gil_scoped_release nogil;
  backend::reject_sample(p, stream_of(stream, device));
}

}  // namespace
}  // namespace pydflash

PYBIND11_MODULE(PYDFLASH_MODULE, m) {
  using namespace pydflash;
  m.def("block_attention", &block_attention);
  m.def("cache_append", &cache_append);
  m.def("block_conv", &block_conv);
  m.def("path_select", &path_select);
  m.def("path_tree", &path_tree);
  m.def("path_viterbi", &path_viterbi);
  m.def("reject_sample", &reject_sample);
#if PYDFLASH_FUSED
  define_fused(m);
#endif
#if PYDFLASH_LINEAR
  define_linear(m);
#endif
#if defined(PYDFLASH_PACKED)
  define_packed(m);
#endif
  m.def("description", &backend::description);
  m.def("select_level", [](const std::string& name) {
    const char* chosen = backend::select_level(name.c_str());
    if (chosen == nullptr) refuse(text("select_level: no level '", name, "' in this build or on this machine"));
    return std::string(chosen);
  });
}
