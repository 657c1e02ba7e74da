#include "sycl/kernels/path_tree.hpp"

#include "sycl/edges.hpp"

namespace pydflash::sycl_backend {

int64_t scratch_bytes(const PathTreeParams& p) {
  char* part = nullptr;
  carve_edges(p.lattice, part);
  return part - static_cast<char*>(nullptr);
}

void path_tree(const PathTreeParams& p, Stream stream) {
  const Lattice& lattice = p.lattice;
  char* part = static_cast<char*>(p.scratch);
  const Edges edges = carve_edges(lattice, part);
  fill_edges("path_tree", stream, lattice, edges);
  launch<GrowTrees>("path_tree", stream, lattice.batch, 16, edges.value, edges.best, lattice.candidates,
                    lattice.slots, lattice.rows, lattice.num_candidates, p.num_nodes, p.trunk_nodes, p.trunk, p.anchors,
                    p.tokens, p.parents, p.depths, p.visibility, p.log_probs, Local<Nodes>{1});
}

}  // namespace pydflash::sycl_backend
