"""On a CPU with packed weights a token's logits are the same to the last bit whatever goes through with it."""

from __future__ import annotations

import pytest
import torch
from greedy_texts import EXACT_RECURRENT, RECURRENT, prompt_of
from tiny_models import TINY, VOCAB, MissingFamily

from pydflash import Target
from pydflash.target.fused import FusedTarget
from pydflash.tree import tree_of

FAMILIES = ("llama", "qwen3", "granite", "gemma3", "glm4", "gemma2", "olmo2", "olmo3", "cohere", "cohere2", "qwen3_5")
FAMILIES += ("qwen3_moe", "qwen3_5_moe")
CHANGES = {
    "granite": {"residual_multiplier": 0.22, "embedding_multiplier": 12.0, "logits_scaling": 16.0},
    "gemma2": {"attn_logit_softcapping": None, "final_logit_softcapping": 3.0},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FAMILIES)
def test_alone_in_a_chain_in_a_tree_and_in_a_batch(name: str, dtype: torch.dtype) -> None:
    if name in (*RECURRENT, "qwen3_moe") and not EXACT_RECURRENT:
        pytest.skip("states that cannot be continued, and experts one by one, in this transformers")
    try:
        model = TINY[name](**CHANGES.get(name, {}))
    except MissingFamily as missing:
        pytest.skip(str(missing))
    target = FusedTarget(Target(model.to(dtype), (0, 2)))
    assert "packed weights" in target.description
    start, ids = 21, prompt_of(45)

    def rounds(sizes: list[int], branches: bool, batch: int) -> torch.Tensor:
        """Logits of the tokens behind the prompt, in blocks of these sizes, with wrong slots and other rows beside."""
        cache, at, found = target.new_cache(batch, 64), start, []
        for row in range(batch):
            target.prefill(ids[:, :start], cache, row)
        for size in sizes:
            right = list(range(0, 2 * size, 2)) if branches else list(range(size))
            slots = 2 * size if branches else size
            tokens = torch.randint(0, VOCAB, (batch, slots), generator=torch.Generator().manual_seed(at))
            tokens[0, right] = ids[0, at : at + size]
            parents = [max(0, 2 * ((i - 1) // 2)) for i in range(slots)]
            logits = target.verify(tokens, cache, tree_of(parents, target.device) if branches else None).logits
            found.append(logits[0, right])
            index = torch.full((batch, slots), -1, dtype=torch.int32)
            index[:, 0], index[0, :size] = 0, torch.tensor(right, dtype=torch.int32)
            target.commit(cache, index, (index >= 0).sum(1) - 1)
            at += size
        return torch.cat(found)

    want = rounds([1] * 24, False, 1)
    assert torch.equal(rounds([8, 8, 8], False, 1), want)
    assert torch.equal(rounds([3, 8, 1, 12], True, 1), want)
    assert torch.equal(rounds([5, 8, 11], True, 3), want)
