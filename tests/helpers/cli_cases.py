"""The command line called in this process, and the config of a drafter small enough for it."""

from __future__ import annotations

import pytest
from tiny_tokenizer import VOCAB

from pydflash.checkpoints.config import DrafterConfig
from pydflash.cli import commands as cli


def tiny_drafter_config(**changes: object) -> DrafterConfig:
    values: dict = {
        "version": 2,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_layers": 1,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "vocab_size": VOCAB,
        "max_position_embeddings": 512,
        "rope": {"rope_type": "default", "rope_theta": 10000.0},
        "target_layer_ids": (0, 2),
        "num_target_layers": 4,
        "mask_token_id": 257,
        "block_size": 4,
        "conv_kernel_size": 2,
        "conv_group_size": 16,
        "selector_rank": 8,
        "selector_top_k": 8,
    }
    return DrafterConfig(**(values | changes))


def run(capsys: pytest.CaptureFixture[str], *argv: object) -> tuple[int, str, str]:
    code = cli.main([str(part) for part in argv])
    captured = capsys.readouterr()
    return code, captured.out, captured.err
