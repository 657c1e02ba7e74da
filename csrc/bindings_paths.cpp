// Candidates, lattices, trees and paths.
#include "bindings.h"

namespace pydflash {
namespace {

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
  const int64_t num_candidates = candidates.dim(2);
  if (vocab_size < 1 || vocab_size > logits.dim(2))
    refuse(text("path_select: vocab_size must be 1 to V = ", logits.dim(2), ", got ", vocab_size));
  if (num_candidates < 1 || num_candidates > vocab_size || num_candidates > 1024)
    refuse(text("path_select: top_k must be 1 to min(vocab_size, 1024) = ",
                vocab_size < 1024 ? vocab_size : 1024, ", got ", num_candidates));
  anchors.int64().shape({batch}, "[B]").contiguous();
  seeds.int64().shape({batch}, "[B]").contiguous();
  starts.int32().shape({batch}, "[B]").contiguous();
  tokens.int64().shape({batch, slots}, "[B, S-1]").contiguous();
  PathSelectParams p{};
  if (hidden_) {
    if (!predecessor_ || !successor_)
      refuse("path_select: predecessor and successor must be given with hidden, got None");
    TensorView hidden(op, "hidden", *hidden_), predecessor(op, "predecessor", predecessor_.value()),
        successor(op, "successor", successor_.value());
    hidden.floating().shape({batch, slots, -1}, "[B, S-1, r]").contiguous();
    if (hidden.dim(2) < 1) refuse("path_select: the rank r of hidden must be at least 1, got 0");
    predecessor.like(hidden).shape({-1, hidden.dim(2)}, "[V, r]").contiguous();
    successor.like(hidden).shape({predecessor.dim(0), hidden.dim(2)}, "[V, r]").contiguous();
    if (predecessor.dim(0) < vocab_size)
      refuse(text("path_select: the codebooks must have at least vocab_size = ", vocab_size, " rows, got ",
                  predecessor.dim(0)));
    scores.float32().shape({batch, slots, num_candidates, num_candidates}, "[B, S-1, K, K]").contiguous();
    p.rank = int(hidden.dim(2)), p.codebook_size = int(predecessor.dim(0)), p.selector_dtype = hidden.dtype();
    p.hidden = hidden.data(), p.predecessor = predecessor.data(), p.successor = successor.data();
    const int64_t* anchor = data_of<int64_t>(anchors);
    if constexpr (PYDFLASH_HOST_MEMORY)
      for (int64_t b = 0; b < batch; ++b)
        if (anchor[b] < 0 || anchor[b] >= p.codebook_size)
          refuse(text("path_select: anchors must be ids of the codebooks, 0 to ", p.codebook_size - 1, ", got ",
                      anchor[b]));
  } else {
    scores.float32().shape({batch, slots, num_candidates}, "[B, S-1, K]").contiguous();
  }
  if (temperature_) {
    TensorView temperature(op, "temperature", *temperature_);
    p.temperature = data_of<float>(temperature.float32().shape({batch}, "[B]").contiguous());
  }
  if (probs_) {
    TensorView probs(op, "probs", *probs_);
    p.probs = data_of<float>(probs.float32().shape({batch, slots, num_candidates}, "[B, S-1, K]").contiguous());
  }
  if (candidates.empty()) return;
  p.batch = int(batch), p.slots = int(slots), p.vocab_size = int(vocab_size), p.num_candidates = int(num_candidates);
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
  const int64_t batch = candidates.dim(0), slots = candidates.dim(1), num_candidates = candidates.dim(2);
  if (num_candidates < 1 || num_candidates > 1024)
    refuse(text(op, ": candidates must be 1 to 1024 a slot, got ", num_candidates));
  const bool edges = scores.rank() == 4;
  if (edges)
    scores.float32().shape({batch, slots, num_candidates, num_candidates}, "[B, S-1, K, K]").contiguous();
  else
    scores.float32().shape({batch, slots, num_candidates}, "[B, S-1, K] or [B, S-1, K, K]").contiguous();
  Lattice lattice{};
  if (log_normalizers_) {
    TensorView normalizers(op, "log_normalizers", *log_normalizers_);
    if (edges) refuse(text(op, ": log_normalizers must be None where scores are [B, S-1, K, K], got a tensor"));
    lattice.log_normalizers = data_of<float>(normalizers.float32().shape({batch, slots}, "[B, S-1]").contiguous());
  }
  lattice.batch = int(batch), lattice.slots = int(slots), lattice.rows = int(edges ? num_candidates : 1);
  lattice.num_candidates = int(num_candidates);
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
  for (int depth = 0; depth < p.lattice.slots && nodes < 63; ++depth) nodes += width *= p.lattice.num_candidates;
  const int64_t limit = nodes < 63 ? nodes : 63;
  if (num_nodes < 1 || num_nodes > limit)
    refuse(text("path_tree: num_nodes must be 1 to ", limit, " (at most 63, and the nodes of a lattice of ",
                p.lattice.slots, " slots with ", p.lattice.num_candidates, " candidates), got ", num_nodes));
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

}  // namespace

PYDFLASH_BIND(path_select)
PYDFLASH_BIND(path_tree)
PYDFLASH_BIND(path_viterbi)

}  // namespace pydflash
