#include "sycl/kernels/path_viterbi.hpp"

#include "sycl/edges.hpp"

namespace pydflash::sycl_backend {
namespace {

struct Workspace {
  Edges edges;
  int32_t* next;
};

Workspace carve_workspace(const PathViterbiParams& p, char*& part) {
  const Edges edges = carve_edges(p.lattice, part);
  return {edges, carve<int32_t>(part, rows_of(p.lattice))};
}

}  // namespace

int64_t scratch_bytes(const PathViterbiParams& p) {
  char* part = nullptr;
  carve_workspace(p, part);
  return part - static_cast<char*>(nullptr);
}

void path_viterbi(const PathViterbiParams& p, Stream stream) {
  const Lattice& lattice = p.lattice;
  char* part = static_cast<char*>(p.scratch);
  const Workspace w = carve_workspace(p, part);
  fill_edges("path_viterbi", stream, lattice, w.edges);
  const int64_t tails = lattice.rows > 1 ? 2 * int64_t(lattice.rows) : lattice.slots;
  launch<FindPaths>("path_viterbi", stream, lattice.batch, lattice.rows > 64 ? kThreads : 64, w.edges.value,
                    lattice.candidates, lattice.slots, lattice.rows, lattice.num_candidates, w.next, p.tokens,
                    p.log_probs,
                    Local<float>{tails > 0 ? tails : 1});
}

}  // namespace pydflash::sycl_backend
