"""A tokenizer with one token per byte, for tiny models."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
END, MASK = len(BYTES), len(BYTES) + 1
VOCAB = len(BYTES) + 2


def save_tokenizer(folder: Path) -> None:
    """Write the tokenizer as transformers reads it: 256 bytes, an end token, a mask token, a chat template."""
    vocabulary = {letter: i for i, letter in enumerate(BYTES)} | {"<end>": END, "<mask>": MASK}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>", "<mask>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    template = "{% for m in messages %}{{ m['role'][0] + m['content'] + '/' }}{% endfor %}"
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
