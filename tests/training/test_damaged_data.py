"""Damaged shards and manifests, ids outside the vocabulary, full disks, logs after a resume: named, never silent."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from tiny_models import TINY, VOCAB

from pydflash.checkpoints.wheel import sha256_of
from pydflash.cli.commands import main
from pydflash.training.shards import Record, ShardReader, ShardWriter, read_manifest

IDENTITY = {"target": "tiny"}


def write(folder: Path, count: int = 40, high: int = VOCAB - 2, odd: dict[int, int] | None = None) -> Path:
    """`count` records in shards of 4; record i ends with the id `odd[i]`."""
    generator = np.random.default_rng(0)
    with ShardWriter(folder, IDENTITY, shard_tokens=80) as writer:
        for key in range(count):
            ids = generator.integers(0, high, 20).astype(np.int32)
            ids[-1] = (odd or {}).get(key, ids[-1])
            writer.add(key, [Record(ids, 5, 0.0)], Counter())
    return folder


def fit(tmp_path: Path, *more: str) -> int:
    if not (tmp_path / "target").is_dir():
        TINY["qwen3"](num_hidden_layers=6).save_pretrained(tmp_path / "target")
    settings = ["--layers", "2", "--target-layer-ids", "1,3", "--block-size", "4", "--selector-rank", "8"]
    settings += ["--mask-token-id", str(VOCAB - 1), "--device", "cpu", "--log-every", "1", "--num-anchors", "6"]
    settings += ["--batch-size", "4", "--max-steps", "4", "--save-every", "2", *more]
    data = ["--data", str(tmp_path / "data"), "--out", str(tmp_path / "out")]
    return main(["train", "fit", str(tmp_path / "target"), *data, *settings])


def damage(path: Path, kind: str) -> None:
    whole = path.read_bytes()
    if kind == "truncated":
        path.write_bytes(whole[:-7])
    elif kind == "flipped":
        path.write_bytes(whole[:-7] + bytes([whole[-7] ^ 1]) + whole[-6:])
    elif kind == "missing":
        path.unlink()
    else:
        path.unlink()
        path.mkdir()


@pytest.mark.parametrize("kind", ["truncated", "flipped", "missing", "folder"])
def test_fit_and_a_resumed_writer_see_a_damaged_shard(tmp_path, kind, capsys):
    path = write(tmp_path / "data") / "shard-00003.safetensors"
    damage(path, kind)
    assert fit(tmp_path) == 2
    assert f"error: ShardReader: {path} must be as its manifest says" in capsys.readouterr().err
    with pytest.raises(ValueError, match=r"ShardWriter: .*shard-00003\.safetensors must be as its manifest says"):
        ShardWriter(tmp_path / "data", IDENTITY)
    assert not (tmp_path / "out").exists()


def test_a_shard_whose_arrays_do_not_belong_together_is_named(tmp_path):
    folder = write(tmp_path / "data")
    path = folder / "shard-00001.safetensors"
    arrays = load_file(path)
    manifest = json.loads((folder / "manifest.json").read_text())

    def stored(message: str, **changes: Any) -> None:
        save_file({name: a for name, a in (arrays | changes).items() if a is not None}, path)
        manifest["shards"][1]["sha256"] = sha256_of(path)
        (folder / "manifest.json").write_text(json.dumps(manifest))
        reader = ShardReader(folder)
        assert len(reader[0][0]) == 20
        with pytest.raises(ValueError, match=message) as caught:
            reader[5]
        assert str(path) in str(caught.value)

    stored(r"offsets must be \[5\] as the manifest says, got \[4\]", offsets=arrays["offsets"][:-1])
    stored("offsets must rise from 0 to 80", offsets=arrays["offsets"][::-1].copy())
    stored("offsets must rise from 0 to 80", offsets=arrays["offsets"] + 1)
    stored("prompt_lengths must be 0 to the length", prompt_lengths=arrays["prompt_lengths"] + 16)
    stored(r"ids must be \[80\]", ids=arrays["ids"][:-1])
    stored("must hold ids, offsets, .* items are missing", items=None)
    path.write_bytes(b"broken")
    with pytest.raises(ValueError, match=rf"{path} must be a readable shard"):
        ShardReader(folder, verify=False)[5]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"shards": {"a": 1}}, "shards must be a list"),
        ({"shards": [3]}, r"shards\[0\].file must be a file name here, got None"),
        ({"file": "../x"}, r"shards\[1\].file must be a file name here, got '../x'"),
        ({"sha256": None}, r"shards\[1\].sha256 must be a str, got None"),
        ({"records": "4"}, r"shards\[1\].records must be a count, got '4'"),
        ({"tokens": -1}, r"shards\[1\].tokens must be a count, got -1"),
        ({"counts": []}, r"shards\[1\].counts must be a dict"),
        ({"format": "x" * 10_000_000}, "must have format 1, got 'xxx"),
    ],
)
def test_a_damaged_manifest_is_named(tmp_path, change, message):
    folder = write(tmp_path / "data")
    manifest = json.loads((folder / "manifest.json").read_text())
    (manifest if change.keys() & manifest.keys() else manifest["shards"][1]).update(change)
    (folder / "manifest.json").write_text(json.dumps(manifest))
    for use in (read_manifest, ShardReader, lambda f: ShardWriter(f, IDENTITY)):
        with pytest.raises(ValueError, match=rf"training data: .*manifest\.json.*{message}") as caught:
            use(folder)
        assert len(str(caught.value)) < 600


@pytest.mark.parametrize("content", ["[" * 200_000, "[]", "{", ""])
def test_a_manifest_that_is_no_object(tmp_path, content):
    (tmp_path / "manifest.json").write_text(content)
    with pytest.raises(ValueError, match=r"training data: folder must hold a manifest\.json"):
        read_manifest(tmp_path)


@pytest.mark.parametrize("odd", [VOCAB, -1, 2**31 - 1])
def test_ids_outside_the_vocabulary_name_file_and_record(tmp_path, odd, capsys):
    pytest.importorskip("accelerate")
    write(tmp_path / "data", odd={37: odd})
    assert fit(tmp_path) == 2
    said = capsys.readouterr().err
    assert f"token ids must be 0 to {VOCAB - 1} (the target's), got " in said
    assert f"in {tmp_path / 'data' / 'shard-00009.safetensors'}, record 1" in said


def test_a_resumed_run_repeats_no_row(tmp_path):
    """Killed between two checkpoints: the rows after the last one are computed, and written, again."""
    pytest.importorskip("accelerate")
    pytest.importorskip("matplotlib")
    write(tmp_path / "data")
    assert fit(tmp_path) == 0
    out = tmp_path / "out"
    assert [p.name for p in out.glob("step-*")] == ["step-0000002"]
    whole = [json.loads(line)["step"] for line in (out / "log.jsonl").read_text().splitlines()]
    assert whole == [1, 2, 3, 4]
    (out / "log.jsonl").write_text((out / "log.jsonl").read_text() + '{"step": 5, "half')
    assert fit(tmp_path) == 0
    again = [json.loads(line)["step"] for line in (out / "log.jsonl").read_text().splitlines()]
    assert again == [1, 2, 3, 4]


def test_weights_have_the_modes_of_the_configs_beside_them(tmp_path):
    pytest.importorskip("accelerate")
    pytest.importorskip("matplotlib")
    before = os.umask(0o022)
    try:
        write(tmp_path / "data")
        assert fit(tmp_path) == 0
    finally:
        os.umask(before)
    files = [p for p in [*(tmp_path / "out").rglob("*"), *(tmp_path / "data").iterdir()] if p.is_file()]
    assert sum(p.suffix == ".safetensors" for p in files) >= 12
    odd = {str(p): oct(stat.S_IMODE(p.stat().st_mode)) for p in files if stat.S_IMODE(p.stat().st_mode) != 0o644}
    assert odd == {}


def test_a_full_disk_names_the_shard(tmp_path):
    code = (
        "import resource, signal, sys\n"
        "from collections import Counter\n"
        "import numpy as np\n"
        "from pydflash.training.shards import Record, ShardWriter\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "writer = ShardWriter(sys.argv[1], {})\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n"
        "writer.add(0, [Record(np.zeros(5000, np.int32), 5, 0.0)], Counter())\n"
        "try:\n    writer.flush()\nexcept OSError as error:\n    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert f"{tmp_path / 'shard-00000.safetensors'} cannot be written: " in done.stdout, done.stderr[-2000:]
    assert torch.is_grad_enabled()
