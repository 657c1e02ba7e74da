// Acceptance and the next token.
#include "bindings.h"

namespace pydflash {
namespace {

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

void apply_penalties(Capsule logits_, Capsule tokens_, Capsule visibility_, Capsule in_prompt_, Capsule counts_,
                     Capsule bias_, Capsule repetition_, Capsule presence_, Capsule frequency_, Capsule out_,
                     uintptr_t stream, int device) {
  const char* op = "apply_penalties";
  TensorView logits(op, "logits", logits_), tokens(op, "tokens", tokens_), visibility(op, "visibility", visibility_),
      in_prompt(op, "in_prompt", in_prompt_), counts(op, "counts", counts_), bias(op, "bias", bias_),
      repetition(op, "repetition", repetition_), presence(op, "presence", presence_),
      frequency(op, "frequency", frequency_), out(op, "out", out_);
  logits.floating().shape({-1, -1, -1}, "[B, S, V]").row_contiguous();
  const int64_t batch = logits.dim(0), slots = logits.dim(1), vocab_size = logits.dim(2);
  if (slots > 64) logits.fail("of at most 64 slots", text(slots));
  tokens.int64().shape({batch, slots}, "[B, S]").contiguous();
  visibility.int64().shape({-1, slots}, "[B or 1, S]").contiguous();
  if (visibility.dim(0) != batch && visibility.dim(0) != 1)
    visibility.fail(text("of shape [B or 1, S] with B = ", batch), text("B = ", visibility.dim(0)));
  in_prompt.int32().shape({batch, vocab_size}, "[B, V]").contiguous();
  counts.int32().shape({batch, vocab_size}, "[B, V]").contiguous();
  bias.float32().shape({batch, vocab_size}, "[B, V]").contiguous();
  repetition.float32().shape({batch}, "[B]").contiguous();
  presence.float32().shape({batch}, "[B]").contiguous();
  frequency.float32().shape({batch}, "[B]").contiguous();
  out.float32().shape({batch, slots, vocab_size}, "[B, S, V]").contiguous();
  if (out.empty()) return;
  ApplyPenaltiesParams p{};
  p.batch = int(batch), p.slots = int(slots), p.vocab_size = int(vocab_size);
  p.dtype = logits.dtype(), p.logits = logits.data();
  logits.strides_to(p.logits_stride, 2);
  p.tokens = data_of<int64_t>(tokens), p.visibility = data_of<int64_t>(visibility);
  p.visibility_stride = visibility.dim(0) == 1 ? 0 : slots;
  p.in_prompt = data_of<int32_t>(in_prompt), p.counts = data_of<int32_t>(counts), p.bias = data_of<float>(bias);
  p.repetition = data_of<float>(repetition), p.presence = data_of<float>(presence);
  p.frequency = data_of<float>(frequency), p.out = static_cast<float*>(out.data());
  py::gil_scoped_release nogil;
  backend::apply_penalties(p, stream_of(stream, device));
}

}  // namespace

PYDFLASH_BIND(reject_sample)
PYDFLASH_BIND(apply_penalties)

}  // namespace pydflash
