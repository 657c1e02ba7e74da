"""The rotary embedding of a drafter's config: every spelling of it, brought to one flat dict."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..messages import shown
from .keys import LAYER_TYPES, Keys
from .values import at_least_one, boolean, fail, positive, warn

_REQUIRED: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}
_YARN_OPTIONAL = ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate")


def canonical_rope(rope: Mapping[str, Any], max_position_embeddings: int) -> dict[str, Any]:
    """A flat rope dict in its one spelling: `rope_type`, `rope_theta` and the numbers that the type needs.

    Types: default, linear, yarn, llama3 (those whose angles do not depend on the length reached). Raises
    ValueError for any other type or key, and for a rotation of part of the head. `mrope` keys are dropped:
    with one position per token that rotation is the plain one.
    """
    left = {key: value for key, value in rope.items() if value is not None}
    old_name = left.pop("type", None)
    kind = left.pop("rope_type", old_name or "default")
    if old_name not in (None, kind):
        fail("rope_parameters.type", f"the same as rope_type ({kind!r})", old_name)
    kind = "default" if kind == "mrope" else kind
    if not isinstance(kind, str) or kind not in _REQUIRED:
        fail("rope_parameters.rope_type", " or ".join(map(repr, _REQUIRED)), kind)
    if (part := left.pop("partial_rotary_factor", 1)) != 1:
        fail("rope_parameters.partial_rotary_factor", "1 (the whole head is rotated)", part)
    for name in ("mrope_section", "mrope_interleaved"):
        left.pop(name, None)
    if "rope_theta" not in left:
        fail("rope_theta", "given (the rotary base, at the top level or in rope_parameters)", None)
    result: dict[str, Any] = {"rope_type": kind}
    for name in ("rope_theta", *_REQUIRED[kind]):
        result[name] = positive(f"rope_parameters.{name}", left.pop(name, None))
    original = left.pop("original_max_position_embeddings", max_position_embeddings)
    if kind in ("yarn", "llama3"):
        name = "original_max_position_embeddings"
        result[name] = at_least_one(f"rope_parameters.{name}", original)
    for name in _YARN_OPTIONAL if kind == "yarn" else ():
        value = left.pop(name, None)
        if name == "truncate" and value is not None:
            result[name] = boolean("rope_parameters.truncate", value)
        elif value is not None and not (name.startswith("mscale") and value == 0):  # 0 switches mscale off
            result[name] = positive(f"rope_parameters.{name}", value)
    for name, value in left.items():
        fail(f"rope_parameters.{name}", f"absent (rope_type {kind!r} has no such key)", value)
    return result


def read_rope(keys: Keys, layer_types: tuple[str, ...]) -> dict[str, Any]:
    """The rope of a config: rope_parameters (flat or per layer type), else rope_theta and rope_scaling."""
    limit = keys.integer("max_position_embeddings", "the longest position")
    theta = keys.get("rope_theta")
    original = keys.get("original_max_position_embeddings")
    ropes: list[tuple[str, dict[str, Any]]] = []
    for name in ("rope_parameters", "rope_scaling"):
        if not keys.get(name):
            continue
        flat = _flat_rope(keys.label(name), keys.get(name), layer_types)
        known = flat.get("original_max_position_embeddings")
        if None not in (original, known) and original != known:
            fail("original_max_position_embeddings", f"that of {name} ({known})", original)
        base = theta if theta is not None or not ropes else ropes[0][1]["rope_theta"]
        shared = {"rope_theta": base, "original_max_position_embeddings": original}
        ropes.append((keys.label(name), canonical_rope({**shared, **flat}, limit)))
    if not ropes:
        return canonical_rope({"rope_theta": theta}, limit)
    label, rope = ropes[0]
    for other_label, other in ropes[1:]:
        if other != rope:
            warn(f"{label} = {shown(rope)} is used, {other_label} = {shown(other)} is not")
    if keys.in_file("rope_theta") and theta != (used := rope["rope_theta"]):
        warn(f"{label}.rope_theta = {used!r} is used, {keys.label('rope_theta')} = {theta!r} is not")
    return rope


def _flat_rope(label: str, rope: Any, layer_types: tuple[str, ...]) -> dict[str, Any]:
    """One rope for all layers: from dicts per layer type, the sliding layers' entry where there is one."""
    if not isinstance(rope, Mapping):
        fail(label, "a mapping", rope)
    if not any(isinstance(value, Mapping) for value in rope.values()):
        return {key: value for key, value in rope.items() if value is not None}
    for name, value in rope.items():
        if name not in LAYER_TYPES or not (value is None or isinstance(value, Mapping)):
            fail(f"{label}.{name}", "a mapping under a layer type", value)
    chosen = next(name for name in reversed(LAYER_TYPES) if rope.get(name) is not None)
    for name, other in rope.items():
        if name in layer_types and other is not None and other != rope[chosen]:
            warn(f"{label}.{chosen} = {shown(rope[chosen])} is used, {label}.{name} = {shown(other)} is not")
    return {key: value for key, value in rope[chosen].items() if value is not None}
