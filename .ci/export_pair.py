"""Usage: export_pair.py FOLDER. Writes a tiny target and drafter as ONNX models, and the target's own greedy text."""

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "helpers"))

import torch
from tiny_drafters import nested, tiny_2
from tiny_models import TINY
from tiny_tokenizer import MASK, VOCAB, save_tokenizer

from pydflash import Drafter, DrafterConfig, Speculator
from pydflash.cli import main

pair = Path(sys.argv[1])
torch.manual_seed(3)
with tempfile.TemporaryDirectory() as work:
    target, drafter = Path(work, "target"), Path(work, "drafter")
    TINY["llama"](vocab_size=VOCAB, max_position_embeddings=512).save_pretrained(target)
    save_tokenizer(target)
    raw = nested(tiny_2(vocab_size=VOCAB, num_target_layers=4), mask_token_id=MASK, target_layer_ids=[0, 2])
    Drafter(DrafterConfig.from_dict(raw)).save_pretrained(drafter)
    options = ["--target", str(target), "-o", str(pair), "--profile", "inplace", "--with-target"]
    assert main(["export", str(drafter), *options]) == 0
    spec = Speculator.from_pretrained(target, None)
    prompt = spec.tokenizer("abc")["input_ids"]
    found = spec.generate(prompt, 20, temperature=0.0, stop_token_ids=[]).token_ids
    (pair / "text").write_text(spec.tokenizer.decode(prompt + found), encoding="utf-8")
