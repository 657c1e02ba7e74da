#include "cpu/law.h"
#include "cpu/scratch.h"

namespace pydflash::cpu::PYDFLASH_LEVEL {
namespace {

// q of one draft slot: over the whole vocabulary, or over `count` ids where `ids` is given.
struct DraftRow {
  const float* probs;
  const int64_t* ids;
  int count;

  // q(id); a NaN stays one.
  float at(int64_t id) const {
    float share = ids == nullptr ? probs[id] : 0.0f;
    if (ids != nullptr)
      for (int c = 0; c < count; ++c)
        if (ids[c] == id) share += probs[c];
    return share < 0 ? 0.0f : share;
  }
};

// A draw from max(p - q, 0) of one row, in units of weight: weight - total * q.
template <class T>
class Residual {
 public:
  // `order` has room for the candidates of a sparse q.
  Residual(Law<T>& law, DraftRow draft, int64_t vocab_size, uint64_t* order)
      : law_(law), draft_(draft), vocab_size_(vocab_size), order_(order), total_(law.total()) {
    if (draft.ids == nullptr) return;
    for (int c = 0; c < draft.count; ++c)
      if (draft.ids[c] >= 0 && draft.ids[c] < vocab_size)
        order_[candidates_++] = uint64_t(draft.ids[c]) << 32 | uint32_t(c);
    sort_descending(order_, candidates_);
  }

  // Draws from p itself where nothing is left of it.
  int64_t draw(float u) {
    alignas(64) float weights[kBlock];
    if (draft_.ids == nullptr) {
      for (int64_t b = 0; b < law_.blocks(); ++b) {
        if (!law_.alive(b)) continue;
        weigh(b, weights, 0);
        law_.set_sum(b, weights);
      }
    } else {
      for (int c = 0; c < candidates_;) {  // a block without candidates keeps its sum
        const int64_t b = block_of(c);
        c = weigh(b, weights, c);
        law_.set_sum(b, weights);
      }
    }
    law_.add_up();
    if (law_.total() > 0)
      return law_.locate(u, [this](int64_t b, float* block) {
        int c = 0;
        while (c < candidates_ && block_of(c) > b) ++c;
        weigh(b, block, c);
      });
    law_.measure();
    return law_.draw(u);
  }

 private:
  int64_t block_of(int c) const { return int64_t(order_[c] >> 32) / kBlock; }

  // The residual of block b, whose candidates start at `c` of the order; returns the first one beyond it.
  int weigh(int64_t b, float* weights, int c) const {
    float share[kBlock] = {};
    if (draft_.ids == nullptr) {
      const int64_t left = vocab_size_ - b * kBlock;
      memcpy(share, draft_.probs + b * kBlock, sizeof(float) * (left < kBlock ? left : kBlock));
    }
    for (; c < candidates_ && block_of(c) == b; ++c)
      share[(order_[c] >> 32) % kBlock] += draft_.probs[uint32_t(order_[c])];
    law_.weigh(b, weights);
    for (int j = 0; j < kBlock; ++j) {
      const float taken = share[j] > 0 ? float(share[j] * total_) : 0.0f;  // NaN takes nothing
      weights[j] = weights[j] > taken ? weights[j] - taken : 0.0f;
    }
    return c;
  }

  Law<T>& law_;
  const DraftRow draft_;
  const int64_t vocab_size_;
  uint64_t* const order_;
  const double total_;
  int candidates_ = 0;
};

// The first slot from `first` on that continues `slot` with `token`, or -1.
int child_of(const RejectSampleParams& p, int64_t b, int slot, int first, int64_t token) {
  const int64_t* tokens = p.tokens + b * p.slots;
  const int32_t* parents = p.parents == nullptr ? nullptr : p.parents + b * p.slots;
  const int end = parents == nullptr && slot + 2 < p.slots ? slot + 2 : p.slots;
  for (int i = first; i < end; ++i)
    if (tokens[i] == token && (parents == nullptr || parents[i] == slot)) return i;
  return -1;
}

template <class T>
void verify(const RejectSampleParams& p, int64_t b, Law<T> law, uint64_t* order) {
  const bool greedy = !(p.temperature[b] > 0);
  int32_t* index = p.index + b * p.slots;
  for (int i = 0; i < p.slots; ++i) index[i] = i == 0 ? 0 : -1;
  int slot = 0, depth = 0;  // of the last accepted slot; its depth counts the accepted drafts
  for (;;) {
    law.read(static_cast<const T*>(p.logits) + b * p.logits_stride[0] + slot * p.logits_stride[1]);
    const auto draw = [&](Purpose purpose) { return uniform(p.seeds[b], int64_t(p.starts[b]) + depth + 1, purpose); };
    const int64_t draft = slot + 1 < p.slots ? p.tokens[b * p.slots + slot + 1] : -1;
    int64_t token = -1;
    int next = -1;
    if (!greedy) law.filter(p.temperature[b], p.top_k[b], p.top_p[b], p.min_p[b]);
    if (!greedy && slot < p.draft_slots && draft >= 0) {
      const int64_t* ids = p.draft_ids;
      if (ids != nullptr) ids += (b * p.draft_slots + slot) * p.num_candidates;
      const DraftRow q{p.draft_probs + b * p.draft_probs_stride[0] + slot * p.draft_probs_stride[1], ids,
                       p.num_candidates};
      const bool known = draft < p.vocab_size;
      if (known && double(draw(Purpose::accept)) * q.at(draft) * law.total() < law.weight(draft)) {
        next = slot + 1;
      } else {
        token = Residual<T>(law, q, p.vocab_size, order).draw(draw(Purpose::residual));
        next = child_of(p, b, slot, slot + 2, token);  // beside the refused draft
      }
    } else {
      token = greedy ? law.argmax() : law.draw(draw(Purpose::target));
      next = child_of(p, b, slot, slot + 1, token);
    }
    if (next < 0) {
      p.num_accepted[b] = depth;
      p.bonus[b] = token;
      return;
    }
    slot = next;
    index[++depth] = slot;
  }
}

template <class T>
void run(const RejectSampleParams& p) {
  const int64_t blocks = num_blocks(p.vocab_size);
  bool bucket = false;
  for (int b = 0; b < p.batch; ++b)
    bucket = bucket || (p.temperature[b] > 0 && Law<T>::needs_bucket(p.vocab_size, p.top_k[b], p.top_p[b]));
  const int64_t tokens = bucket ? p.vocab_size : 0, candidates = p.draft_ids != nullptr ? p.num_candidates : 0;
  const int threads = threads_for(int64_t(p.batch) * p.vocab_size, 1 << 16);
  const Scratch scratch(8 * (blocks + tokens + candidates) + 256, threads);
  // One thread reads a row, which takes 40 us at 150k logits in float32.
  in_shares(p.batch, threads, [&](int64_t begin, int64_t end, int thread) {
    char* part = scratch.part(thread);
    float* maxima = carve<float>(part, blocks);
    float* sums = carve<float>(part, blocks);
    Weighted* heavy = carve<Weighted>(part, tokens);
    uint64_t* drafts = carve<uint64_t>(part, candidates);
    for (int64_t b = begin; b < end; ++b) verify<T>(p, int(b), Law<T>(p.vocab_size, {maxima, sums, heavy}), drafts);
  });
}

}  // namespace

void reject_sample(const RejectSampleParams& p, Stream) {
  by_dtype(p.dtype, [&](auto type) { run<decltype(type)>(p); });
}

}  // namespace pydflash::cpu::PYDFLASH_LEVEL
