"""Where targets and drafters come from: names, folders, hub ids, and the keywords that loading takes."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import tiny_models as tm
import torch
from pairs import build_drafter
from tiny_drafters import speculators, tensors_of, tiny_1, write_checkpoint
from tiny_tokenizer import save_tokenizer

from pydflash import Drafter, Speculator, Target, load_checkpoint
from pydflash.checkpoints import sources
from pydflash.checkpoints.sources import drafter_folder, split_keywords, target_source
from pydflash.target.loading import load_tokenizer

OPTIONS = tuple(inspect.signature(Speculator).parameters)


def split(device: Any = None, drafter: Any = "d", **given: Any) -> sources.Keywords:
    return split_keywords(given, OPTIONS, device=device, drafter=drafter)


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    """A target's folder without a tokenizer, and a drafter's."""
    target, drafter = tmp_path / "target", tmp_path / "drafter"
    tm.TINY["qwen3"](num_hidden_layers=6).save_pretrained(target)
    build_drafter(2).save_pretrained(drafter)
    return target, drafter


def test_keywords_go_to_whom_they_are_for():
    found = split(
        token="t", cache_dir="c", local_files_only=True, revision="r", trust_remote_code=True, device_map="auto",
        quantization_config=1, gguf_file="g", drafter_revision="dr", drafter_token="dt", block_size=4, path="walk",
    )  # fmt: skip
    shared = {"cache_dir": "c", "local_files_only": True}
    tokenizer = shared | {"token": "t", "revision": "r", "trust_remote_code": True, "gguf_file": "g"}
    assert found.tokenizer == tokenizer
    assert found.target == tokenizer | {"device_map": "auto", "quantization_config": 1}
    assert found.drafter == shared | {"token": "dt", "revision": "dr"}
    assert found.options == {"block_size": 4, "path": "walk"}


@pytest.mark.parametrize(
    ("given", "hint"),
    [
        ({"torch_dtype": "bfloat16"}, "torch_dtype is no keyword here; use dtype"),
        ({"load_in_4bit": True}, "use quantization_config=transformers.BitsAndBytesConfig(load_in_4bit=True)"),
        ({"assistant_model": "x"}, "use drafter"),
        ({"temperature": 0}, "use an argument of generate and stream"),
        ({"blok_size": 4}, "did you mean block_size?"),
        ({"drafter_revison": "x"}, "did you mean drafter_revision?"),
        ({"xyzzy": 4}, "there are attn_implementation, backend, block_size"),
    ],
)
def test_unknown_keywords_fail_before_anything_is_loaded(given, hint, monkeypatch):
    monkeypatch.setattr(Drafter, "from_pretrained", None)
    monkeypatch.setattr(Target, "from_pretrained", None)
    with pytest.raises(TypeError) as caught:
        Speculator.from_pretrained("no/where", "no/drafter", **given)
    assert str(caught.value).startswith("Speculator.from_pretrained: ")
    assert hint in str(caught.value)


def test_keywords_that_do_not_go_together():
    with pytest.raises(ValueError, match="device must be left out when device_map is given, got 'cpu'"):
        split(device="cpu", device_map="auto")
    with pytest.raises(ValueError, match="drafter_revision must be left out where drafter is None, got 'x'"):
        split(drafter=None, drafter_revision="x")


def test_every_keyword_reaches_its_loader(pair, monkeypatch):
    seen: dict[str, dict[str, Any]] = {}
    originals = {kind: kind.from_pretrained for kind in (Target, Drafter)}

    def noting(kind: Any) -> Any:
        def load(source: Any, **given: Any) -> Any:
            seen[kind.__name__] = given
            kept = {name: value for name, value in given.items() if name in ("layer_ids", "device", "dtype")}
            return originals[kind](source, **kept)

        return load

    for kind in originals:
        monkeypatch.setattr(kind, "from_pretrained", noting(kind))
    Speculator.from_pretrained(*pair, device="cpu", revision="a", drafter_revision="b", token="t", block_size=2)
    assert (seen["Target"]["revision"], seen["Target"]["token"]) == ("a", "t")
    assert seen["Drafter"] == {"revision": "b", "token": "t"}


def test_hub_keywords_of_a_drafter(tmp_path, monkeypatch):
    calls: list[Any] = []

    def snapshot(repo_id: str, **options: Any) -> str:
        calls.append(options)
        return str(write_checkpoint(tmp_path / "hub", tiny_1(), tensors_of(tiny_1())))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    Drafter.from_pretrained("a/b", revision="r", token="t", cache_dir="c", local_files_only=True)
    (options,) = calls
    options.pop("allow_patterns")
    assert options == {"revision": "r", "token": "t", "cache_dir": "c", "local_files_only": True}
    with pytest.raises(TypeError, match="load_checkpoint: tokn is no keyword here; did you mean token"):
        Drafter.from_pretrained("a/b", tokn="t")


def test_a_drafter_in_the_targets_place_and_the_reverse(pair, tmp_path):
    target, drafter = pair
    says = "must be a language model, got .* is a DFlash drafter: give the model it was made for{} as the target"
    for load in (Target.from_pretrained, Speculator.from_pretrained, load_tokenizer):
        with pytest.raises(ValueError, match=says.format("")):
            load(drafter)
    named = write_checkpoint(tmp_path / "named", speculators(tiny_1()), tensors_of(tiny_1()))
    with pytest.raises(ValueError, match=says.format(r" \(a/b\)")):
        Target.from_pretrained(named)
    with pytest.raises(ValueError, match="this is a language model: give it as the target, and a drafter"):
        Drafter.from_pretrained(target)
    (tmp_path / "exported").mkdir()
    (tmp_path / "exported" / "draft.json").write_text("{}")
    with pytest.raises(ValueError, match="which holds an exported drafter"):
        Target.from_pretrained(tmp_path / "exported")
    with pytest.raises(ValueError, match=r"an exported drafter: pydflash\.export\.OnnxDrafter or Speculator"):
        Drafter.from_pretrained(tmp_path / "exported")


@pytest.mark.parametrize("load", [Target.from_pretrained, Speculator.from_pretrained, load_tokenizer, load_checkpoint])
def test_a_folder_that_is_missing_is_said_to_be(load, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner").mkdir()
    for missing in (tmp_path / "none", str(tmp_path / "none"), "./none", "../none/x", "owner/none", "a/b/c"):
        with pytest.raises(
            FileNotFoundError, match=r"must be a folder or a hub id 'owner/name', got .*: no such folder"
        ):
            load(missing)
    for odd in ("", "\0", "x" * 1_000_000):
        with pytest.raises(FileNotFoundError, match="must be a folder or a hub id") as caught:
            load(odd)
        assert len(str(caught.value)) < 400
    (tmp_path / "file").write_text("x")
    with pytest.raises(FileNotFoundError, match="got the file"):
        load(tmp_path / "file")
    with pytest.raises(ValueError, match=r"got a GGUF file: give .*'m\.gguf'"):
        load("m.gguf")


def test_a_hub_id_that_cannot_be_had_says_both(monkeypatch):
    from transformers import AutoConfig

    seen: dict[str, Any] = {}

    def refuse(source: str, **given: Any) -> None:
        seen.update(given)
        raise OSError("We cannot connect\nand so on " + "x" * 1000)

    monkeypatch.setattr(AutoConfig, "from_pretrained", refuse)
    where = {"revision": "r", "token": "t", "cache_dir": "c", "local_files_only": True, "gguf_file": "g"}
    with pytest.raises(OSError, match=r"^Target: there is no folder 'no/where' here, and as a hub id .*connect$"):
        Target.from_pretrained("no/where", device_map="cpu", **where)
    assert seen == where | {"trust_remote_code": False}


def test_smollm2_is_a_name_on_both_sides(monkeypatch, pair):
    monkeypatch.setattr(sources, "ensure_smollm2", lambda: pair[0])
    assert target_source("smollm2") == str(pair[0])
    assert Target.from_pretrained("smollm2", device="cpu").num_layers == 6
    assert Speculator.from_pretrained("smollm2", device="cpu").target.num_layers == 6
    assert load_checkpoint("smollm2")[0].num_target_layers == 30
    assert drafter_folder("smollm2").name == "smollm2-135m-instruct-dflash2"


def test_a_target_without_a_tokenizer_takes_token_ids(pair):
    spec = Speculator.from_pretrained(*pair, device="cpu")
    assert spec.tokenizer is None
    assert len(spec.generate([1, 2, 3], 5, stop_token_ids=[]).token_ids) == 5
    with pytest.raises(ValueError, match="text and messages need a tokenizer"):
        spec.generate("text", 5)
    with pytest.raises(FileNotFoundError, match=r"load_tokenizer: .*target must hold a tokenizer \(tokenizer\.json"):
        load_tokenizer(pair[0])
    (pair[0] / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match=r"the tokenizer of tokenizer\.json cannot be loaded"):
        Speculator.from_pretrained(*pair, device="cpu")
    (pair[0] / "tokenizer.json").unlink()
    save_tokenizer(pair[0])
    assert Speculator.from_pretrained(*pair, device="cpu").tokenizer is not None


def test_code_of_a_checkpoint_is_neither_run_nor_asked_for(tmp_path):
    """`yes` on standard input would say yes to transformers' question."""
    (tmp_path / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    auto = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model", "AutoTokenizer": ["own.Tokenizer", None]}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "of_its_own", "auto_map": auto}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"auto_map": auto}))
    code = (
        "import sys\n"
        "from pydflash.target.loading import load_model, load_tokenizer\n"
        "for load in (load_model, load_tokenizer):\n"
        "    try:\n"
        "        load(sys.argv[1])\n"
        "    except ValueError as error:\n"
        "        print('refused', 'trust_remote_code' in str(error))\n"
    )
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "cache")}
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        input="y\n" * 100, capture_output=True, text=True, timeout=120, env=environment,
    )  # fmt: skip
    assert done.stdout.split("\n")[0] == "refused True", done.stderr[-2000:]
    assert "refused" in done.stdout.split("\n")[1]
    assert "[y/N]" not in done.stdout + done.stderr
    assert not (tmp_path / "ran").exists()


def test_a_known_model_with_code_beside_it_loads_without_the_code(pair):
    config = pair[0] / "config.json"
    raw = json.loads(config.read_text()) | {"auto_map": {"AutoModelForCausalLM": "own.Model"}}
    config.write_text(json.dumps(raw))
    assert type(Target.from_pretrained(pair[0], device="cpu").model).__name__ == "Qwen3ForCausalLM"


def test_a_targets_config_that_is_no_file_is_not_waited_for(pair):
    (pair[0] / "config.json").unlink()
    os.mkfifo(pair[0] / "config.json")
    with pytest.raises(ValueError, match=r"Target: .*config\.json: must be a regular file"):
        Target.from_pretrained(pair[0])
    (pair[0] / "config.json").unlink()
    (pair[0] / "config.json").write_text("[" * 200_000)
    with pytest.raises(ValueError, match=r"Target: .*config\.json: not valid JSON"):
        Target.from_pretrained(pair[0])
    assert torch.get_default_dtype() == torch.float32
