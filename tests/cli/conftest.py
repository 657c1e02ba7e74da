"""A tiny target and drafter in folders, for the commands."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from cli_cases import tiny_drafter_config
from tiny_models import TINY
from tiny_tokenizer import VOCAB, save_tokenizer

from pydflash.drafter.module import Drafter


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Folders of a random target (4 layers, hidden 64, one token per byte, fp32) and of a drafter for it."""
    root = tmp_path_factory.mktemp("pair")
    target, drafter = root / "target", root / "drafter"
    torch.manual_seed(3)
    TINY["llama"](vocab_size=VOCAB).save_pretrained(target)
    save_tokenizer(target)
    Drafter(tiny_drafter_config()).save_pretrained(drafter)
    return target, drafter
