// The edges of a lattice in scratch memory, for path_tree and path_viterbi.
#pragma once

#include "sycl/kernels/lattice.hpp"
#include "sycl/scratch.hpp"

namespace pydflash::sycl_backend {

struct Edges {
  float *value, *best;  // [batch, slots, rows, num_candidates]; [batch, slots, rows]
};

inline int64_t rows_of(const Lattice& lattice) { return int64_t(lattice.batch) * lattice.slots * lattice.rows; }

inline Edges carve_edges(const Lattice& lattice, char*& part) {
  float* value = carve<float>(part, rows_of(lattice) * lattice.num_candidates);
  return {value, carve<float>(part, rows_of(lattice))};
}

inline void fill_edges(const char* name, Stream stream, const Lattice& lattice, const Edges& edges) {
  launch<FillEdges>(name, stream, groups_for(rows_of(lattice)), kThreads, lattice.scores, lattice.log_normalizers,
                    lattice.num_candidates, rows_of(lattice), edges.value, edges.best);
}

}  // namespace pydflash::sycl_backend
