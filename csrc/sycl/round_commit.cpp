#include "sycl/kernels/round_commit.hpp"
#include "sycl/units.hpp"

namespace pydflash::sycl_backend {

void round_commit(const RoundCommitParams& p, Stream stream) {
  const bool moves = p.features_in != nullptr;
  const auto fits = [&](int bytes) {
    return !moves || (in_units(bytes, p.features_in, p.element_size, p.features, p.features_stride, 2) &&
                      in_units(bytes, p.features_out, p.element_size, p.features, nullptr, 0));
  };
  by_unit(p.element_size, fits, [&](auto type) {
    using Unit = decltype(type);
    const int per_unit = moves ? int(sizeof(Unit)) / p.element_size : 1, entries = moves ? p.slots : 1;
    launch<RoundCommit<Unit>>("round_commit", stream, int64_t(p.batch) * entries, 128, p.tokens, p.index,
                              p.num_accepted, p.bonus, p.active, static_cast<const Unit*>(p.features_in),
                              static_cast<Unit*>(p.features_out),
                              Strides2{p.features_stride[0] / per_unit, p.features_stride[1] / per_unit}, p.anchors,
                              p.lengths, p.starts, p.counts, p.record, p.slots, p.features / per_unit, entries);
  });
}

}  // namespace pydflash::sycl_backend
