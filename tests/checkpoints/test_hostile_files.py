"""Folders that would crash, hang or take all memory: each fails at once with a short error that names what is wrong."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import time
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tiny_drafters import (
    assert_bits_equal,
    not_loaded,
    tensors_of,
    tiny_1,
    tiny_2,
    write_checkpoint,
)

from pydflash.checkpoints.checkpoint import load_checkpoint, save_checkpoint
from pydflash.checkpoints.config import DrafterConfig
from pydflash.checkpoints.files import write_file


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_value_that_is_not_finite_is_named(tmp_path, value, dtype):
    tensors = {name: tensor.to(dtype) for name, tensor in tensors_of(tiny_1()).items()}
    tensors["layers.1.mlp.up_proj.weight"][7, 3] = value
    folder = write_checkpoint(tmp_path, tiny_1(), tensors)
    not_loaded(folder, "must be finite, got NaN or infinity (1): layers.1.mlp.up_proj.weight")
    with pytest.raises(ValueError, match=r"^save_checkpoint: tensors: .*layers\.1\.mlp\.up_proj\.weight"):
        save_checkpoint(tmp_path / "new", DrafterConfig.from_dict(tiny_1()), tensors)
    assert not (tmp_path / "new").exists()


def test_the_largest_float16_is_finite_and_the_mask_embedding_is_looked_at(tmp_path):
    tensors = {name: tensor.half() for name, tensor in tensors_of(tiny_1()).items()}
    tensors["fc.weight"][:] = 65504  # a sum would overflow
    folder = write_checkpoint(tmp_path, tiny_1(), tensors)
    assert_bits_equal(load_checkpoint(folder)[1], tensors)
    torch.save(torch.full((64,), float("nan")), folder / "mask_embedding.pt")
    not_loaded(folder, "finite", "(1): mask_embedding")
    torch.save(torch.empty(64, device="meta"), folder / "mask_embedding.pt")
    not_loaded(folder, "mask_embedding must hold values, got a meta tensor")
    with pytest.raises(ValueError, match=r"norm\.weight must hold values, got a meta tensor"):
        save_checkpoint(
            tmp_path / "new",
            DrafterConfig.from_dict(tiny_1()),
            tensors | {"norm.weight": torch.empty(64, device="meta", dtype=torch.float16)},
        )


def test_one_tensor_of_another_dtype_is_named(tmp_path):
    tensors = tensors_of(tiny_1())
    for name, dtype in (("norm.weight", torch.float64), ("layers.0.self_attn.q_norm.weight", torch.bfloat16)):
        changed = tensors | {name: tensors[name].to(dtype)}
        kind = str(dtype).removeprefix("torch.")
        not_loaded(
            write_checkpoint(tmp_path, tiny_1(), changed), f"(1): {name} must be float32 as fc.weight is, got {kind}"
        )
    whole = {name: tensor.double() for name, tensor in tensors.items()}
    assert_bits_equal(load_checkpoint(write_checkpoint(tmp_path, tiny_1(), whole))[1], whole)
    table = tensors | {"lm_head.weight": torch.randn(256, 64).bfloat16()}
    assert_bits_equal(load_checkpoint(write_checkpoint(tmp_path, tiny_1(), table))[1], table)
    table["lm_head.weight"] = table["lm_head.weight"].double()
    not_loaded(
        write_checkpoint(tmp_path, tiny_1(), table), "lm_head.weight must be float32 as fc.weight is, got float64"
    )


SIZES: tuple[tuple[dict[str, Any], str | None], ...] = (
    ({"vocab_size": 200_000_000}, None),
    ({"draft_vocab_size": 2**31 - 2, "vocab_size": 2**31 - 1}, "missing tensors (2): lm_head.weight, d2t"),
    ({"num_hidden_layers": 4096, "layer_types": None}, "missing tensors"),
    ({"num_hidden_layers": 10**9, "layer_types": None}, "at most 4096"),
    ({"hidden_size": 2**30}, "wrong shapes"),
    ({"intermediate_size": 2**31 - 1}, "wrong shapes"),
    ({"num_attention_heads": 2**30, "num_key_value_heads": 2**29}, "wrong shapes"),
    ({"max_position_embeddings": 2**31 - 1}, None),
    ({"target_hidden_size": 2**31 - 1}, "missing tensors"),
    ({"block_size": 2**31 - 1}, None),
)


def test_sizes_are_held_against_the_files_before_memory_is_taken(tmp_path):
    """In a process that may not take a gigabyte more than torch itself does, nor 20 seconds."""
    for i, (changes, _) in enumerate(SIZES):
        write_checkpoint(tmp_path / str(i), tiny_1() | changes, tensors_of(tiny_1()))
    code = (
        "import resource, sys, torch\n"
        "from pydflash.checkpoints.checkpoint import load_checkpoint\n"
        "from pydflash.drafter import Drafter\n"
        "used = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
        "resource.setrlimit(resource.RLIMIT_AS, (used + 2**30, used + 2**30))\n"
        "resource.setrlimit(resource.RLIMIT_CPU, (40, 40))\n"
        f"for i in range({len(SIZES)}):\n"
        "    try:\n"
        "        load_checkpoint(f'{sys.argv[1]}/{i}'); Drafter.from_pretrained(f'{sys.argv[1]}/{i}')\n"
        "    except ValueError as error:\n"
        "        print('refused', error)\n"
        "    else:\n"
        "        print('loaded')\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    for line, (changes, fragment) in zip(done.stdout.splitlines(), SIZES, strict=True):
        assert line.startswith("loaded" if fragment is None else "refused"), (changes, line)
        assert (fragment or "") in line


def test_many_files_and_many_names_take_linear_time(tmp_path):
    write_checkpoint(tmp_path, tiny_1(), {})
    (tmp_path / "model.safetensors").unlink()
    file = "part-{:05d}.safetensors"
    one = {"x": torch.zeros(1)}
    save_file(one, tmp_path / file.format(0))
    for i in range(1, 20_000):
        os.link(tmp_path / file.format(0), tmp_path / file.format(i))
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {f"t{i}": file.format(i) for i in range(20_000)}}))
    begun = time.process_time()
    not_loaded(tmp_path, "part-00000.safetensors", "must hold the tensors")
    assert time.process_time() - begun < 10  # 20,000 x 20,000 comparisons
    for path in [*tmp_path.glob("part-*"), index]:
        path.unlink()
    save_file({f"unexpected.{i}": torch.zeros(1) for i in range(20_000)}, tmp_path / "model.safetensors")
    begun = time.process_time()
    not_loaded(tmp_path, "unexpected tensors (20000): ", "and 19992 more")
    assert time.process_time() - begun < 5


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json", "mask_embedding.pt"])
@pytest.mark.parametrize("kind", ["fifo", "zero", "folder"])
def test_what_is_no_file_is_refused_and_never_waited_for(tmp_path, name, kind):
    write_checkpoint(tmp_path, tiny_1(), tensors_of(tiny_1()))
    if name.endswith("index.json"):
        (tmp_path / "model.safetensors").unlink()
    path = tmp_path / name
    path.unlink(missing_ok=True)
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "zero":
        path.symlink_to("/dev/zero")
    else:
        path.mkdir()
    if name.endswith("index.json"):
        with pytest.raises(FileNotFoundError, match="got neither"):
            load_checkpoint(tmp_path)
    else:
        not_loaded(tmp_path, f"{name}: must be a regular file, got a {'folder' if kind == 'folder' else 'device'}")


def test_json_that_is_deep_or_long_is_refused_in_short(tmp_path):
    path = write_checkpoint(tmp_path, tiny_1(), tensors_of(tiny_1())) / "config.json"
    for text in (
        "[" * 200_000,
        '{"a":' * 200_000,
        "[" * 200_000 + "]" * 200_000,
        '{"hidden_size": ' + "1" * 10_000 + "}",
    ):
        path.write_text(text)
        not_loaded(tmp_path, "config.json: not valid JSON")
    with path.open("wb") as file:
        file.truncate(2**40)
    not_loaded(tmp_path, "config.json: must be at most 256 MB, got 1048576 MB")
    path.write_text(json.dumps(tiny_1()))
    tensors = tensors_of(tiny_1()) | {"x" * 500_000: torch.zeros(1)}
    with pytest.raises(ValueError, match="unexpected tensors") as caught:
        load_checkpoint(write_checkpoint(tmp_path, tiny_1(), tensors))
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o027])
def test_files_are_for_whom_the_umask_lets(tmp_path, umask):
    before = os.umask(umask)
    try:
        config = DrafterConfig.from_dict(tiny_2())
        row = {"mask_embedding": torch.ones(64)}
        save_checkpoint(tmp_path / "new", config, tensors_of(tiny_2()) | row)
        save_checkpoint(tmp_path / "new", config, tensors_of(tiny_2()) | row, layout="speculators")
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "new").iterdir()}
    assert modes == dict.fromkeys(("config.json", "model.safetensors", "mask_embedding.pt"), 0o666 & ~umask)


def test_a_full_disk_is_named(tmp_path):
    path = tmp_path / "file.safetensors"
    code = (
        "import resource, signal, sys\n"
        "from pathlib import Path\n"
        "import torch\n"
        "from safetensors.torch import save_file\n"
        "from pydflash.checkpoints.files import write_file\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n"
        "try:\n"
        "    write_file(Path(sys.argv[1]), lambda p: save_file({'a': torch.zeros(9999)}, p))\n"
        "except OSError as error:\n"
        "    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, timeout=120)
    assert f"{path} cannot be written: " in done.stdout, done.stderr
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(OSError, match="cannot be written"):
        write_file(tmp_path / "no" / "file", lambda p: p.write_text("x"))
