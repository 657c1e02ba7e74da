"""Stand-ins for a model: a target whose logits are a function of position and last token, and a byte tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from pairs import HIDDEN, VOCAB
from torch import Tensor, nn

from pydflash import Target
from pydflash.protocols import TargetOutput


@dataclass
class FakeCache:
    """Committed and open positions of one request; `rows` lists the position and token of every row run."""

    length: int = 0
    open: int = 0
    rows: list[tuple[int, int]] = field(default_factory=list)


class FakeTarget(Target):
    """A target without a model: `law(position, token)` gives the logits [V] that follow a token at a position.

    Features are random rows of (token, position), so that drafters see every position and every token apart.
    """

    generation_config: Any = None  # a plain attribute, where the real one looks at the model

    def __init__(
        self,
        law: Callable[[int, int], Tensor],
        layer_ids: Sequence[int] = (),
        *,
        vocab_size: int = VOCAB,
        num_layers: int = 6,
        max_length: int | None = None,
        generation_config: Any = None,
    ) -> None:
        generator = torch.Generator().manual_seed(0)
        self.law, self.layer_ids, self.max_length = law, tuple(layer_ids), max_length
        self.vocab_size, self.hidden_size, self.num_layers = vocab_size, HIDDEN, num_layers
        self.embed_weight = torch.randn(vocab_size, HIDDEN, generator=generator)
        self.head = nn.Linear(HIDDEN, vocab_size, bias=False)
        with torch.no_grad():
            self.head.weight.copy_(torch.randn(vocab_size, HIDDEN, generator=generator))
        self.device, self.dtype = torch.device("cpu"), torch.float32
        self.generation_config = generation_config
        self.caches: list[FakeCache] = []

    def new_cache(self, batch: int, capacity: int) -> Any:
        self.caches.append(FakeCache())
        return self.caches[-1]

    def prefill(self, ids: Tensor, cache: Any) -> TargetOutput:
        out = self.verify(ids, cache)
        cache.length, cache.open = cache.length + cache.open, 0
        return TargetOutput(out.logits[:, -1:], out.features)

    def verify(self, tokens: Tensor, cache: Any, tree: Any = None) -> TargetOutput:
        assert cache.open == 0, "a block is open"
        block = tokens[0].tolist()
        cache.open = len(block)
        rows = list(enumerate(block, cache.length))
        cache.rows += rows
        logits = torch.stack([self.law(position, token) for position, token in rows])[None]
        positions = torch.tensor([position for position, _ in rows], dtype=torch.float32)
        waves = torch.cos(positions[:, None] * torch.linspace(0.1, 2, HIDDEN))
        features = (self.embed_weight[tokens] + waves).repeat(1, 1, len(self.layer_ids))
        return TargetOutput(logits, features if self.layer_ids else None)

    def commit(self, cache: Any, index: Tensor, num_accepted: Tensor) -> None:
        kept = int(num_accepted) + 1
        size = index.shape[1]
        assert index[0].tolist() == [*range(kept), *[-1] * (size - kept)]
        cache.length, cache.open = cache.length + kept, 0

    def close(self) -> None:
        self.law = _closed


def _closed(position: int, token: int) -> Tensor:
    raise ValueError("verify: target must be open, got one after close()")


def scripted(text: Sequence[int], vocab_size: int = VOCAB) -> Callable[[int, int], Tensor]:
    """The law of a target that says `text` by heart, whatever came before: all mass on text[position + 1]."""

    def law(position: int, token: int) -> Tensor:
        logits = torch.full((vocab_size,), -torch.inf)
        logits[text[(position + 1) % len(text)]] = 3.0
        return logits

    return law


def markov(table: Tensor) -> Callable[[int, int], Tensor]:
    """The law of a target that looks at the last token only; table: logits [V, V]."""
    return lambda position, token: table[token]


def byte_tokenizer(template: str | None = None) -> Any:
    """256 tokens, one a byte, then <eos> (256) and, where asked for, a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    # ByteLevel's own printable letter of each byte.
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [b for b in range(256) if b not in printable]
    letters = {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(hidden)}
    tokenizer = Tokenizer(models.BPE({letters[b]: b for b in range(256)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")
    fast.chat_template = template
    return fast
