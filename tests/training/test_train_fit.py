"""`pydflash train fit` as a command: one process, two processes under torchrun, and both optimizers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pairs import VOCAB, build_drafter
from tiny_models import TINY

from pydflash import Drafter, Speculator
from pydflash.cli.commands import main
from pydflash.training.features import compiled_layers
from pydflash.training.shards import Record, ShardWriter
from pydflash.training.trainer import TrainConfig, make_optimizers

pytest.importorskip("accelerate")
pytest.importorskip("matplotlib")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target folder and a folder with 40 records of its greedy answers."""
    folder = tmp_path_factory.mktemp("fit")
    model = TINY["qwen3"](num_hidden_layers=6)
    model.save_pretrained(folder / "target")
    spec = Speculator(model, None)
    prompts = torch.randint(0, VOCAB - 1, (40, 5), generator=torch.Generator().manual_seed(3))
    with ShardWriter(folder / "records", {"target": "tiny"}) as writer:
        for key, prompt in enumerate(prompts):
            ids = [*prompt.tolist(), *spec.generate(prompt, 20).token_ids]
            writer.add(key, [Record(np.array(ids, np.int32), 5, 0.0)], Counter())
    return folder / "target", folder / "records"


def arguments(made: tuple[Path, Path], out: Path, *more: str) -> list[str]:
    target, records = made
    settings = ["--layers", "2", "--target-layer-ids", "1,3", "--block-size", "4", "--selector-rank", "8"]
    settings += ["--mask-token-id", str(VOCAB - 1), "--device", "cpu", "--log-every", "2", "--num-anchors", "6"]
    return [
        "train", "fit", str(target), "--data", str(records), "--out", str(out), *settings,
        "--batch-size", "4", "--epochs", "9", "--lr", "3e-3", *more,
    ]  # fmt: skip


def log(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(("optimizer", "lr"), [("adamw", 3e-3), ("muon", 1e-2)])
def test_the_command_learns_and_the_result_drafts(
    made: tuple[Path, Path], tmp_path: Path, optimizer: str, lr: float
) -> None:
    if optimizer == "muon" and not hasattr(torch.optim, "Muon"):
        pytest.skip("this torch has no Muon")
    assert main(arguments(made, tmp_path, "--max-steps", "24", "--optimizer", optimizer, "--lr", str(lr))) == 0
    rows = log(tmp_path)
    assert [row["step"] for row in rows] == list(range(2, 25, 2))
    assert rows[-1]["ce"] < 0.75 * rows[0]["ce"]
    assert rows[-1]["lr"] < 0.05 * lr
    model = Speculator.from_pretrained(made[0], tmp_path, device="cpu")
    plain = Speculator.from_pretrained(made[0], None, device="cpu")
    prompt = [3, 4, 5, 6, 7]
    assert model.generate(prompt, 20).token_ids == plain.generate(prompt, 20).token_ids


@pytest.mark.slow
def test_two_processes_share_the_work_and_agree(made: tuple[Path, Path], tmp_path: Path) -> None:
    """Both ranks see half of each batch; one writes. A stopped run goes on under the same command."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "pydflash"]
    for steps in ("8", "8"):
        more = arguments(made, tmp_path, "--max-steps", steps, "--save-every", "3")
        found = subprocess.run([*launch, *more], env=environment, capture_output=True, text=True, timeout=300)
        assert found.returncode == 0, found.stderr
        assert found.stdout.count("wrote the drafter") == 1
    rows = log(tmp_path)
    assert [row["step"] for row in rows] == [2, 4, 6, 8]  # the second run goes on from step 6 and writes 8 anew
    saved = json.loads((tmp_path / "step-0000006" / "trainer.json").read_text())
    assert saved["settings"]["world"] == 2
    assert len(list((tmp_path / "step-0000006").glob("random_states_*"))) == 2
    # 8 sequences a step over two processes, as the one-process run of batch 8 sees them: the same blocks are counted.
    alone = tmp_path / "alone"
    assert main([*arguments(made, alone, "--max-steps", "8"), "--batch-size", "8"]) == 0
    assert [row["epoch"] for row in log(alone)] == [row["epoch"] for row in rows[:4]]
    assert rows[3]["ce"] == pytest.approx(log(alone)[-1]["ce"], rel=0.1)
    Drafter.from_pretrained(tmp_path)


def test_muon_takes_the_matrices_of_the_layers_and_adamw_the_rest() -> None:
    if not hasattr(torch.optim, "Muon"):
        pytest.skip("this torch has no Muon")
    drafter = build_drafter(2)
    adamw, muon = make_optimizers(drafter, TrainConfig(out=Path(), optimizer="muon", weight_decay=0.1))
    names = {id(p): n for n, p in drafter.named_parameters()}
    taken = {names[id(p)] for group in muon.param_groups for p in group["params"]}
    assert "fc.weight" in taken
    assert "layers.0.mlp_conv.kernel_projection.weight" in taken
    assert not any("codebook" in n or "norm" in n or "base_kernel" in n for n in taken)
    other = [(names[id(p)], group["weight_decay"]) for group in adamw.param_groups for p in group["params"]]
    assert {n for n, _ in other} == set(names.values()) - taken
    assert {decay for _, decay in other} == {0.0}
    assert muon.param_groups[0]["weight_decay"] == 0.1
    (whole,) = make_optimizers(drafter, TrainConfig(out=Path(), weight_decay=0.1))
    decayed = {names[id(p)] for group in whole.param_groups if group["weight_decay"] for p in group["params"]}
    assert decayed == taken


def test_compiled_layers_are_put_back() -> None:
    layers = [torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)]
    own = layers[1].forward = lambda x: x  # type: ignore[method-assign, assignment]

    def fail() -> None:
        with compiled_layers(layers):
            assert all("forward" in layer.__dict__ and layer.forward is not own for layer in layers)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert "forward" not in layers[0].__dict__
    assert layers[1].__dict__["forward"] is own
