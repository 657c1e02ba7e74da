"""Checkpoints: names and shapes, every accepted spelling, round trips bit for bit, and what is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from tiny_drafters import (
    assert_bits_equal,
    nested,
    not_loaded,
    random_tensors,
    tensors_of,
    tiny_1,
    tiny_2,
    write_checkpoint,
)

from pydflash.checkpoints import checkpoint
from pydflash.checkpoints.checkpoint import expected_tensors, load_checkpoint, save_checkpoint
from pydflash.checkpoints.config import DrafterConfig

REDUCED = tiny_1(draft_vocab_size=100)
CASES = {
    "dflash": tiny_1(),
    "dflash2": tiny_2(),
    "bias": tiny_1(attention_bias=True),
    "reduced": REDUCED,
    "narrow": tiny_1(target_hidden_size=96),
}


def test_expected_tensors_of_the_tiny_drafters():
    one, two = (expected_tensors(DrafterConfig.from_dict(raw)) for raw in (tiny_1(), tiny_2()))
    assert (len(one), len(two)) == (11 * 2 + 3, 15 * 2 + 6)
    layer = "layers.1."
    assert {name: shape for name, shape in one.items() if not name.startswith("layers.0.")} == {
        "fc.weight": (64, 128), "hidden_norm.weight": (64,), "norm.weight": (64,),
        layer + "input_layernorm.weight": (64,), layer + "post_attention_layernorm.weight": (64,),
        layer + "self_attn.q_proj.weight": (64, 64), layer + "self_attn.k_proj.weight": (32, 64),
        layer + "self_attn.v_proj.weight": (32, 64), layer + "self_attn.o_proj.weight": (64, 64),
        layer + "self_attn.q_norm.weight": (16,), layer + "self_attn.k_norm.weight": (16,),
        layer + "mlp.gate_proj.weight": (128, 64), layer + "mlp.up_proj.weight": (128, 64),
        layer + "mlp.down_proj.weight": (64, 128),
    }  # fmt: skip
    added = {name: shape for name, shape in two.items() if name not in one and "layers.0." not in name}
    assert added == {
        layer + "attention_conv.base_kernel": (2, 2, 64), layer + "mlp_conv.base_kernel": (2, 2, 64),
        layer + "attention_conv.kernel_projection.weight": (16, 64),
        layer + "mlp_conv.kernel_projection.weight": (16, 64),
        "candidate_selector.predecessor_codebook": (256, 8), "candidate_selector.successor_codebook": (256, 8),
        "candidate_selector.hidden_projection.weight": (8, 64),
    }  # fmt: skip


def test_expected_tensors_of_a_published_drafter():
    sizes = {"hidden_size": 5120, "intermediate_size": 17408, "num_hidden_layers": 5, "num_attention_heads": 32}
    raw = tiny_2(**sizes, num_key_value_heads=8, head_dim=128, vocab_size=248320, num_target_layers=64)
    raw["layer_types"] = ["sliding_attention"] * 5
    raw = nested(raw, target_layer_ids=[5, 19, 33, 47, 61], mask_token_id=248070, selector_rank=256, selector_top_k=16)
    shapes = expected_tensors(DrafterConfig.from_dict(raw))
    assert len(shapes) == 81
    assert sum(map(math.prod, shapes.values())) == 1_924_404_480


def test_expected_tensors_of_drafters_with_tables_of_their_own():
    bias = expected_tensors(DrafterConfig.from_dict(CASES["bias"]))
    first = {name: shape for name, shape in bias.items() if name.startswith("layers.0.") and name.endswith(".bias")}
    rows = {"q": 64, "k": 32, "v": 32, "o": 64}
    assert first == {f"layers.0.self_attn.{name}_proj.bias": (size,) for name, size in rows.items()}
    reduced = expected_tensors(DrafterConfig.from_dict(REDUCED))
    assert (reduced["lm_head.weight"], reduced["d2t"]) == ((100, 64), (100,))
    assert "embed_tokens.weight" not in reduced
    narrow = expected_tensors(DrafterConfig.from_dict(CASES["narrow"]))
    assert (narrow["fc.weight"], narrow["embed_tokens.weight"], narrow["lm_head.weight"]) == (
        (64, 192), (256, 64), (256, 64)
    )  # fmt: skip


@pytest.mark.parametrize("layout", ["zlab", "speculators"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_round_trip_is_bit_exact(tmp_path, layout, case, dtype):
    config = DrafterConfig.from_dict(CASES[case])
    tensors = random_tensors(config, dtype)
    save_checkpoint(tmp_path / "a", config, tensors, layout=layout)
    again, loaded = load_checkpoint(tmp_path / "a")
    assert again == config
    assert_bits_equal(loaded, tensors)
    raw = json.loads((tmp_path / "a" / "config.json").read_text())
    assert raw["dtype"] == str(dtype).removeprefix("torch.")
    assert ("speculators_model_type" in raw) == (layout == "speculators")
    with safe_open(tmp_path / "a" / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
        extra = {"t2d"} if (layout, case) == ("speculators", "reduced") else set()
        assert set(file.keys()) == tensors.keys() | extra
        if extra:
            assert file.get_tensor("t2d").tolist() == [i % 2 == 1 and i < 200 for i in range(256)]
    assert sorted(p.name for p in (tmp_path / "a").iterdir()) == ["config.json", "model.safetensors"]


@pytest.mark.parametrize("layout", ["zlab", "speculators"])
@pytest.mark.parametrize("raw", [tiny_1(), tiny_2()], ids=["dflash", "dflash2"])
def test_own_tables_and_mask_embedding_are_kept(tmp_path, layout, raw):
    config = DrafterConfig.from_dict(raw)
    tensors = random_tensors(config, torch.bfloat16)
    head = torch.randn(256, 64).bfloat16()
    tensors |= {"lm_head.weight": head, "embed_tokens.weight": head, "mask_embedding": torch.randn(64).bfloat16()}
    save_checkpoint(tmp_path, config, tensors, layout=layout)
    assert_bits_equal(load_checkpoint(tmp_path)[1], tensors)
    side = torch.load(tmp_path / "mask_embedding.pt", weights_only=True)
    assert side["mask_token_id"] == 255
    del tensors["mask_embedding"]
    save_checkpoint(tmp_path, config, tensors, layout=layout)
    assert_bits_equal(load_checkpoint(tmp_path)[1], tensors)


def test_other_spellings_of_the_tensor_names(tmp_path):
    raw, tensors = tiny_2(attention_bias=True), tensors_of(tiny_2(attention_bias=True))
    other: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        new = name + ".weight" if name.endswith("codebook") else name
        new = new.replace("layers.0.", "midlayer.").replace("hidden_norm.", "encoder.output_norm_enc.")
        other["model." + ("encoder." + new if new.startswith("fc.") else new)] = tensor
    for layer in ("model.midlayer.", "model.layers.1."):
        for kind in ("weight", "bias"):
            parts = [other.pop(f"{layer}self_attn.{name}_proj.{kind}") for name in "qkv"]
            other[f"{layer}self_attn.qkv_proj.{kind}"] = torch.cat(parts)
        parts = [other.pop(f"{layer}mlp.{name}_proj.weight") for name in ("gate", "up")]
        other[f"{layer}mlp.gate_up_proj.weight"] = torch.cat(parts)
    other["model.rotary_emb.inv_freq"] = other["layers.0.self_attn.rotary_emb.cos_cached"] = torch.ones(8)
    other["verifier_lm_head.weight"] = other["verifier_norm.weight"] = torch.ones(3)
    config, loaded = load_checkpoint(write_checkpoint(tmp_path, raw, other))
    assert config == DrafterConfig.from_dict(raw)
    assert_bits_equal(loaded, tensors)


def test_wrong_tensors_are_listed_with_expected_and_got(tmp_path):
    tensors = tensors_of(tiny_1())
    not_loaded(
        write_checkpoint(tmp_path, tiny_1(), tensors | {"fc.weight": torch.ones(64, 192)}),
        "wrong shapes (1): fc.weight must be [64, 128]",
        "(2 target_layer_ids x hidden size 64 = 128 columns), got [64, 192]",
    )
    less = {name: t for name, t in tensors.items() if not name.startswith("layers.1.")}
    not_loaded(write_checkpoint(tmp_path, tiny_1(), less), "missing tensors (11): layers.1.", "and 3 more")
    not_loaded(
        write_checkpoint(tmp_path, tiny_1(), tensors | {"g_proj.weight": torch.ones(2)}),
        "unexpected tensors (1): g_proj.weight [2]",
    )
    not_loaded(write_checkpoint(tmp_path, tiny_1(), tensors | {"mask_embedding": torch.ones(64)}), "mask_embedding.pt")
    not_loaded(
        write_checkpoint(tmp_path, tiny_1(), tensors | {"norm.weight": torch.ones(64, dtype=torch.int8)}),
        "wrong dtypes (1): norm.weight must be float32, bfloat16 or float16, got int8",
    )
    float8 = tensors["fc.weight"].to(torch.float8_e4m3fn)
    not_loaded(write_checkpoint(tmp_path, tiny_1(), tensors | {"fc.weight": float8}), "got float8_e4m3fn")
    not_loaded(
        write_checkpoint(tmp_path, tiny_1(), tensors | {"model.norm.weight": torch.ones(64)}),
        "norm.weight is stored twice",
        "model.norm.weight",
    )
    fused = {"layers.0.self_attn.qkv_proj.weight": torch.ones(128, 64)}
    not_loaded(write_checkpoint(tmp_path, tiny_1(), tensors | fused), "stored twice")
    fused = {"layers.0.self_attn.qkv_proj.weight": torch.ones(127, 64)}
    with pytest.raises(ValueError, match=r"qkv_proj.weight: must have 128 rows .*got shape \[127, 64\]"):
        load_checkpoint(write_checkpoint(tmp_path, tiny_1(), tensors | fused))
    not_loaded(write_checkpoint(tmp_path, tiny_1(), tensors_of(tiny_2())), "unexpected tensors (11): ")
    not_loaded(write_checkpoint(tmp_path, tiny_2(), tensors), "missing tensors (11): ")


def test_vocabulary_maps(tmp_path):
    tensors = tensors_of(REDUCED)
    marks = torch.zeros(256, dtype=torch.bool)
    marks[1:200:2] = True

    def stored(**changes: torch.Tensor) -> Path:
        return write_checkpoint(tmp_path, REDUCED, tensors | changes)

    assert_bits_equal(load_checkpoint(stored(t2d=marks))[1], tensors)
    assert_bits_equal(load_checkpoint(stored(d2t=tensors["d2t"].int()))[1], tensors)
    ids = tensors["d2t"] + torch.arange(100)
    not_loaded(stored(d2t=ids), "d2t must hold offsets to 100 different target ids from 0 to 255", "to 298")
    not_loaded(stored(d2t=-torch.arange(100)), "got 1 different ids")
    not_loaded(stored(d2t=ids.float()), "d2t must be int64, got float32")
    not_loaded(stored(t2d=~marks), "t2d must mark the 100 target ids", "156 marks, 0 of")
    not_loaded(stored(t2d=torch.roll(marks, 1)), "t2d must mark the 100 target ids", "100 marks, 0 of")
    not_loaded(stored(t2d=marks[1:]), "t2d must be bool [256]")
    del tensors["d2t"]
    not_loaded(stored(t2d=marks), "missing tensors (1): d2t")


def test_vocabulary_maps_of_a_whole_vocabulary(tmp_path):
    tensors = tensors_of(tiny_1())
    identity = {"d2t": torch.zeros(256, dtype=torch.int64), "t2d": torch.ones(256, dtype=torch.bool)}
    assert_bits_equal(load_checkpoint(write_checkpoint(tmp_path, tiny_1(), tensors | identity))[1], tensors)
    for wrong, fragment in (
        ({"d2t": torch.arange(256)}, "d2t must be absent or zero"),
        ({"t2d": torch.arange(256) % 2 == 0}, "t2d must mark the 256 target ids"),
    ):
        not_loaded(write_checkpoint(tmp_path, tiny_1(), tensors | wrong), fragment)


def test_saving_checks_first_and_spares_other_models(tmp_path):
    config, tensors = DrafterConfig.from_dict(tiny_1()), tensors_of(tiny_1())
    with pytest.raises(ValueError, match="layout must be 'zlab' or 'speculators', got 'gguf'"):
        save_checkpoint(tmp_path / "new", config, tensors, layout="gguf")
    for wrong in ({"norm.weight": torch.ones(65)}, {"x": torch.ones(1)}, {"norm.weight": torch.ones(64).to_sparse()}):
        with pytest.raises(ValueError, match=r"^save_checkpoint: tensors: "):
            save_checkpoint(tmp_path / "new", config, tensors | wrong)
    assert not (tmp_path / "new").exists()
    save_checkpoint(tmp_path, config, tensors, layout="speculators")
    save_checkpoint(tmp_path, config, tensors)
    for name in ("model-00001-of-00002.safetensors", "model.safetensors.index.json", "pytorch_model.bin"):
        (tmp_path / name).write_text("x")
        with pytest.raises(ValueError, match=f"holds {name}"):
            save_checkpoint(tmp_path, config, tensors)
        (tmp_path / name).unlink()
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["Qwen3ForCausalLM"]}))
    with pytest.raises(ValueError, match=r"holds config\.json"):
        save_checkpoint(tmp_path, config, tensors)
    (tmp_path / "config.json").unlink()
    with pytest.raises(ValueError, match=r"holds model\.safetensors"):
        save_checkpoint(tmp_path, config, tensors)
    with pytest.raises(ValueError, match="directory must be a folder"):
        save_checkpoint(tmp_path / "model.safetensors", config, tensors)


def test_a_save_that_fails_leaves_the_old_files(tmp_path, monkeypatch):
    config, tensors = DrafterConfig.from_dict(tiny_1()), tensors_of(tiny_1())
    save_checkpoint(tmp_path, config, tensors)

    def full_disk(tensors: object, path: Path, metadata: object) -> None:
        path.write_bytes(b"half")
        raise OSError("no space left")

    monkeypatch.setattr(checkpoint, "save_file", full_disk)
    with pytest.raises(OSError, match="no space left"):
        save_checkpoint(tmp_path, config, {name: t + 1 for name, t in tensors.items()})
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    assert_bits_equal(load_checkpoint(tmp_path)[1], tensors)


def test_saving_again_does_not_touch_a_file_that_is_in_use(tmp_path):
    config, tensors = DrafterConfig.from_dict(tiny_1()), tensors_of(tiny_1())
    save_checkpoint(tmp_path, config, tensors)
    before = (tmp_path / "model.safetensors").read_bytes()
    with (tmp_path / "model.safetensors").open("rb") as in_use:
        save_checkpoint(tmp_path, config, {name: t + 1 for name, t in tensors.items()})
        assert in_use.read() == before
    assert (tmp_path / "model.safetensors").read_bytes() != before


def test_views_and_parameters_can_be_saved(tmp_path):
    config, tensors = DrafterConfig.from_dict(tiny_1()), tensors_of(tiny_1())
    fused = torch.randn(128, 64)
    views = dict(zip(("q", "k", "v"), fused.split([64, 32, 32]), strict=True))
    tensors |= {f"layers.0.self_attn.{name}_proj.weight": view for name, view in views.items()}
    tensors["fc.weight"] = torch.nn.Parameter(torch.randn(128, 64).t())
    save_checkpoint(tmp_path, config, tensors)
    assert_bits_equal(load_checkpoint(tmp_path)[1], tensors)
    assert sum(t.numel() * 4 for t in tensors.values()) < (tmp_path / "model.safetensors").stat().st_size < 400_000


@pytest.mark.parametrize(("raw", "name"), [(tiny_1(), "DFlashDraftModel"), (tiny_2(), "DFlash2DraftModel")])
def test_the_official_package_loads_what_we_save(tmp_path, raw, name):
    official = pytest.importorskip("dflash.model")
    config, tensors = DrafterConfig.from_dict(raw), tensors_of(raw)
    save_checkpoint(tmp_path / "ours", config, tensors)
    model, info = getattr(official, name).from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(info.values())
    state = model.state_dict()
    assert_bits_equal({n: state[n + ".weight" if n.endswith("codebook") else n] for n in tensors}, tensors)
    assert (model.block_size, model.mask_token_id, tuple(model.target_layer_ids)) == (4, 255, (1, 5))
    layers = [model.layers[i].self_attn for i in range(2)]
    assert [bool(layer.is_causal) for layer in layers] == list(config.causal)
    assert [layer.sliding_window or 0 for layer in layers] == [config.window(i) for i in range(2)]
    assert official.build_target_layer_ids(36, 5) == [1, 9, 17, 25, 33]
    model.save_pretrained(tmp_path / "theirs")
    again, loaded = load_checkpoint(tmp_path / "theirs")
    assert again == config
    assert_bits_equal(loaded, tensors)
    assert load_file(tmp_path / "ours" / "model.safetensors").keys() == tensors.keys()
