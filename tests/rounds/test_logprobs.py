"""Log-probabilities at the accepted slots of a block."""

from __future__ import annotations

import pytest
import torch

from pydflash import ops
from pydflash.ops import reference
from pydflash.rounds.logprobs import list_logprobs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("module", [ops, reference], ids=["native", "reference"])
def test_they_are_those_of_the_accepted_slots(module: object, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    logits = (torch.randn(2, 5, 40) * 3).to(dtype)
    index = torch.tensor([[0, 2, 4, -1, -1], [0, -1, -1, -1, -1]], dtype=torch.int32)
    tokens = torch.tensor([[7, 8, 9, -1, -1], [3, -1, -1, -1, -1]])
    listed = list_logprobs(module, logits, index, tokens, 4)  # type: ignore[arg-type]
    for row, n, slot in ((0, 0, 0), (0, 1, 2), (0, 2, 4), (1, 0, 0)):
        want = logits[row, slot].double().log_softmax(-1)
        assert listed.logprobs[row, n].item() == pytest.approx(want[tokens[row, n]].item(), abs=2e-6)
        top = sorted(range(40), key=lambda i: (-want[i].item(), i))[:4]
        assert listed.top_ids[row, n].tolist() == top
        torch.testing.assert_close(listed.top_logprobs[row, n].double(), want[top], rtol=0, atol=2e-6)
