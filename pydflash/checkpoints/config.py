"""The configuration of a DFlash or DFlash 2 drafter: one form for every dialect of config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..messages import shown
from .keys import LAYER_TYPES, MOST_LAYERS, VERSION_2_KEYS
from .layouts import read_config, write_speculators, write_zlab
from .rope import canonical_rope
from .values import MOST, at_least_one, boolean, fail, positive

LAYOUTS = ("zlab", "speculators")
DEFAULT_CANDIDATES = 16  # of a slot, where no selector names a number

# Fields whose name differs from the key in config.json; errors name both.
_DISK_KEYS = {
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
}
_POSITIVE_INTEGERS = (
    *("hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim"),
    *("vocab_size", "draft_vocab_size", "max_position_embeddings", "block_size"),
    *("target_hidden_size",),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterConfig:
    """Sizes and constants of one drafter; every field is checked, a wrong one raises ValueError.

    version: 1 (DFlash) or 2 (DFlash 2: block convolutions and a candidate selector).
    vocab_size: the target's; draft_vocab_size: rows of the drafter's own head where that is smaller.
    rope: `rope_type`, `rope_theta` and the numbers of the type, in transformers' spelling, for all layers.
    layer_types, causal: one entry per layer. causal: a slot sees no later slot of its block.
    sliding_window: positions a sliding layer sees, itself included; None where no layer is a sliding one.
    block_size: slots of a block, the anchor included.
    target_layer_ids: 0-based target layers whose output is captured, in the order of fc's columns.
    input_embedding_scale: factor on the raw embedding rows.
    output_multiplier, final_logit_softcapping: applied to the logits in this order.
    conv_*, selector_*: 0 in version 1.
    target_name, target_architectures: notes on the target that the speculators layout keeps; not compared.
    """

    version: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    rope: dict[str, Any] = field(hash=False)
    target_layer_ids: tuple[int, ...]
    mask_token_id: int
    block_size: int = 16
    rms_norm_eps: float = 1e-6
    attention_bias: bool = False
    rope_interleaved: bool = False
    layer_types: tuple[str, ...] = ()  # empty: all "full_attention"
    sliding_window: int | None = None
    causal: tuple[bool, ...] = ()  # empty: sliding layers are causal inside the block, full ones are not
    draft_vocab_size: int = 0  # 0: vocab_size
    target_hidden_size: int = 0  # 0: hidden_size
    num_target_layers: int | None = None
    input_embedding_scale: float = 1.0
    output_multiplier: float = 1.0
    final_logit_softcapping: float | None = None
    conv_kernel_size: int = 0
    conv_group_size: int = 0
    selector_rank: int = 0
    selector_top_k: int = 0
    target_name: str | None = field(default=None, compare=False)
    target_architectures: tuple[str, ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        if self.version not in (1, 2):
            fail("version", "1 or 2", self.version)
        if type(self.draft_vocab_size) is int and self.draft_vocab_size == 0:
            _set(self, "draft_vocab_size", self.vocab_size)
        if type(self.target_hidden_size) is int and self.target_hidden_size == 0:
            _set(self, "target_hidden_size", self.hidden_size)
        for name in _POSITIVE_INTEGERS:
            at_least_one(_label(name), getattr(self, name), MOST_LAYERS if name == "num_layers" else MOST)
        for name in ("rms_norm_eps", "input_embedding_scale", "output_multiplier"):
            _set(self, name, positive(name, getattr(self, name)))
        if (cap := self.final_logit_softcapping) is not None:
            _set(self, "final_logit_softcapping", positive("final_logit_softcapping", cap))
        for name in ("attention_bias", "rope_interleaved"):
            boolean(name, getattr(self, name))
        if not isinstance(self.rope, Mapping):
            fail("rope", "a mapping", self.rope)
        _set(self, "rope", canonical_rope(self.rope, self.max_position_embeddings))
        self._check_sizes()
        self._check_layers()
        self._check_target()
        self._check_version()

    def _check_sizes(self) -> None:
        if self.num_heads % self.num_kv_heads:
            expected = f"a divisor of {_label('num_heads')} {self.num_heads}"
            fail(_label("num_kv_heads"), expected, self.num_kv_heads)
        if self.head_dim % 2:
            fail("head_dim", "even (RoPE rotates pairs)", self.head_dim)
        if self.draft_vocab_size > self.vocab_size:
            fail("draft_vocab_size", f"at most vocab_size {self.vocab_size}", self.draft_vocab_size)
        if type(self.mask_token_id) is not int or not 0 <= self.mask_token_id < self.vocab_size:
            expected = f"an integer from 0 to {self.vocab_size - 1} (vocab_size - 1)"
            fail("mask_token_id", expected, self.mask_token_id)

    def _check_layers(self) -> None:
        _set(self, "layer_types", tuple(self.layer_types) or (LAYER_TYPES[0],) * self.num_layers)
        sliding = tuple(kind == "sliding_attention" for kind in self.layer_types)
        _set(self, "causal", tuple(self.causal) or sliding)
        for name in ("layer_types", "causal"):
            if len(getattr(self, name)) != self.num_layers:
                got = f"{len(getattr(self, name))} entries"
                fail(name, f"one entry for each of {self.num_layers} layers (num_hidden_layers)", got)
        if unknown := [kind for kind in self.layer_types if kind not in LAYER_TYPES]:
            fail("layer_types", " or ".join(map(repr, LAYER_TYPES)), unknown[0])
        if not any(sliding):
            _set(self, "sliding_window", None)
        elif type(self.sliding_window) is not int or self.sliding_window < 1:
            fail("sliding_window", "a positive integer where a layer is a sliding one", self.sliding_window)
        else:
            at_least_one("sliding_window", self.sliding_window)
        if self.causal not in (sliding, (True,) * self.num_layers, (False,) * self.num_layers):
            fail("causal", "true for all layers, for none, or for exactly the sliding ones", self.causal)

    def _check_target(self) -> None:
        if self.num_target_layers is not None:
            at_least_one("num_target_layers", self.num_target_layers)
        ids = tuple(self.target_layer_ids)
        _set(self, "target_layer_ids", ids)
        count = self.num_target_layers
        below = MOST if count is None else count
        if not ids or not all(type(i) is int and 0 <= i < below for i in ids) or len(set(ids)) != len(ids):
            limit = "" if count is None else f" to {count - 1} (num_target_layers - 1)"
            fail("target_layer_ids", f"different integers from 0{limit}, at least one", list(ids))
        if self.target_name is not None and not isinstance(self.target_name, str):
            fail("target_name", "a string", self.target_name)
        if not isinstance(self.target_architectures, list | tuple):
            fail("target_architectures", "a list of strings", self.target_architectures)
        _set(self, "target_architectures", tuple(self.target_architectures))

    def _check_version(self) -> None:
        for name in VERSION_2_KEYS:
            value = getattr(self, name)
            if self.version == 2:
                at_least_one(name, value)
            elif type(value) is not int or value != 0:
                fail(name, "0 in version 1", value)
        if self.version == 1:
            return
        if self.hidden_size % self.conv_group_size:
            fail("conv_group_size", f"a divisor of hidden_size {self.hidden_size}", self.conv_group_size)
        if self.conv_kernel_size > self.block_size:
            fail("conv_kernel_size", f"at most block_size {self.block_size}", self.conv_kernel_size)
        if self.selector_top_k > self.vocab_size:
            fail("selector_top_k", f"at most vocab_size {self.vocab_size}", self.selector_top_k)
        if self.draft_vocab_size != self.vocab_size:
            expected = f"vocab_size {self.vocab_size} (the selector's codebooks are indexed by target ids)"
            fail("draft_vocab_size", expected, self.draft_vocab_size)

    if not TYPE_CHECKING:  # a type checker would take any name then

        def __getattr__(self, name: str) -> Any:
            """Only for what is not there: transformers asks for this where a drafter is an assistant_model."""
            said = f"{type(self).__name__!r} object has no attribute {name!r}"
            if name == "get_text_config":
                said += (
                    "; a pydflash drafter is no assistant_model or model for transformers: use "
                    "pydflash.Speculator(model, drafter).generate(...)"
                )
            raise AttributeError(said, name=name, obj=self)

    @property
    def num_candidates(self) -> int:
        """Candidates of a slot: the selector's, or 16 without one, as far as the draft vocabulary has them."""
        return min(self.selector_top_k or DEFAULT_CANDIDATES, self.draft_vocab_size)

    def window(self, layer: int) -> int:
        """Positions that layer `layer` sees, itself included; 0 where it sees all."""
        return self.sliding_window or 0 if self.layer_types[layer] == "sliding_attention" else 0

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> DrafterConfig:
        """Read the content of a config.json in the Z-Lab or the speculators layout.

        Raises ValueError, naming key, expected and got, for missing or wrong values, for sibling algorithms,
        for quantised drafters, and for keys that ask for another forward pass. Warns where two keys disagree.
        """
        return cls(**read_config(raw))

    def to_dict(self, layout: str = "zlab") -> dict[str, Any]:
        """The content of config.json in `layout`, "zlab" or "speculators"; `from_dict` reads it back."""
        if layout not in LAYOUTS:
            raise ValueError(f"DrafterConfig.to_dict: layout must be 'zlab' or 'speculators', got {layout!r}")
        return write_zlab(self) if layout == "zlab" else write_speculators(self)


def check_target(
    config: DrafterConfig, *, hidden_size: int, num_layers: int, vocab_size: int, embedding_rows: int
) -> None:
    """Raise ValueError unless the drafter fits a target; it names the config key, expected and got.

    hidden_size, num_layers, vocab_size: the target's. embedding_rows: rows of the table that the block's
    input is taken from, which may be padded beyond vocab_size.
    """
    if config.target_hidden_size != hidden_size:
        key = "hidden_size" if config.target_hidden_size == config.hidden_size else "target_hidden_size"
        _misfit(key, f"{hidden_size} (the target's hidden size)", config.target_hidden_size)
    if config.num_target_layers not in (None, num_layers):
        _misfit("num_target_layers", f"{num_layers} (the target's layers)", config.num_target_layers)
    if max(config.target_layer_ids) >= num_layers:
        ids = list(config.target_layer_ids)
        _misfit("target_layer_ids", f"below {num_layers} (the target's layers)", ids)
    if config.vocab_size not in (vocab_size, embedding_rows):
        padded = "" if vocab_size == embedding_rows else f" or {embedding_rows} (padded)"
        _misfit("vocab_size", f"{vocab_size}{padded}, as the target's", config.vocab_size)
    if config.mask_token_id >= embedding_rows:
        rows = f"{embedding_rows} (the target's embedding rows)"
        _misfit("mask_token_id", f"below {rows}", config.mask_token_id)


def _misfit(key: str, expected: str, got: object) -> None:
    raise ValueError(f"check_target: {key} of the drafter must be {expected}, got {shown(got)}")


def _label(name: str) -> str:
    return f"{name} ({_DISK_KEYS[name]})" if name in _DISK_KEYS else name


def _set(config: DrafterConfig, name: str, value: object) -> None:
    object.__setattr__(config, name, value)
