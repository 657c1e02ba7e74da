"""From a model, a drafter and options to the loop that runs them: what fits, which code runs the target, and where.

Objects are told apart by what they offer (`pydflash.protocols`), never by their class.
"""

from __future__ import annotations

import copy
import importlib
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import nn

from .ops import backends
from .progress import step
from .protocols import (
    ChecksTarget,
    ChoosesOps,
    Described,
    DrafterLike,
    ModelTarget,
    ModuleDrafter,
    NeedsTables,
    Retappable,
    RowDrafter,
    RowTarget,
    TargetLike,
    missing,
    offers,
)
from .request import Loop
from .rounds.round import Parts
from .rounds.turns import Turns, turns_of

TARGET_PATHS = ("auto", "fused", "own", "generic")
HOST_ROUNDS = "by the host, a sequence at a time"


def check_drafter(drafter: object) -> None:
    """Raise ValueError, naming what is missing, for what is no drafter."""
    if lacking := missing(drafter, DrafterLike):
        raise ValueError(
            f"Speculator: drafter must be a Drafter or None, got {drafter!r} without {', '.join(lacking)}; a folder or "
            "hub id loads with Drafter.from_pretrained"
        )


def target_of(model: Any, drafter: DrafterLike | None, optimize: str | None) -> TargetLike:
    """The target that `model` is, or a `Target` around it, with the features that the drafter listens to."""
    layer_ids = () if drafter is None else tuple(drafter.config.target_layer_ids)
    lacking = missing(model, TargetLike)
    if not lacking:
        target = _tapped(model, drafter, layer_ids)
    elif isinstance(model, nn.Module) or "verify" in lacking:
        from .target.generic import Target

        _check_sizes(model, drafter)
        target = Target(model, layer_ids)
    else:
        raise ValueError(
            f"Speculator: model must be a transformers model or a target, got {type(model).__name__} without "
            f"{', '.join(lacking)}"
        )
    return target if optimize is None else _optimized(target, optimize)


def _check_sizes(model: Any, drafter: DrafterLike | None) -> None:
    """Refuse a model of other sizes by its sizes, before layer ids are looked at that it may not have."""
    config: Any = getattr(model, "config", None)
    text: Any = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else None
    if drafter is None or not offers(drafter, ChecksTarget) or not hasattr(text, "num_hidden_layers"):
        return
    rows = getattr(getattr(model.get_input_embeddings(), "weight", None), "shape", (text.vocab_size,))[0]
    sizes = {"hidden_size": text.hidden_size, "num_layers": text.num_hidden_layers, "vocab_size": text.vocab_size}
    cast("ChecksTarget", drafter).check_target(**sizes, embedding_rows=rows)


def _tapped(target: TargetLike, drafter: DrafterLike | None, layer_ids: tuple[int, ...]) -> TargetLike:
    if drafter is not None and target.head is None and offers(drafter, NeedsTables):
        needy = cast("NeedsTables", drafter)
        if needy.needs_tables:
            raise ValueError(
                f"Speculator: drafter must be an exported one beside a {type(target).__name__}, got a "
                f"{type(drafter).__name__}"
            )
    if tuple(target.layer_ids) == layer_ids:
        return target
    if offers(target, Retappable):
        return cast("Retappable", target).tapping(layer_ids)
    if drafter is not None:
        raise ValueError(
            f"Speculator: the target must give the features of layers {list(layer_ids)} (target_layer_ids), "
            f"got {list(target.layer_ids)}"
        )
    return target


def fitted_drafter(drafter: DrafterLike, target: TargetLike, backend: str, block_size: int) -> tuple[DrafterLike, str]:
    """The drafter on the wanted ops, once it is found to go with the target; and a line on what runs it.

    Raises: ValueError naming both sides.
    """
    if offers(drafter, ChecksTarget):
        cast("ChecksTarget", drafter).check_target(
            hidden_size=target.hidden_size,
            num_layers=target.num_layers,
            vocab_size=target.vocab_size,
            embedding_rows=target.embed_weight.shape[0],
        )
    if not offers(drafter, ChoosesOps):
        line = cast("Described", drafter).description if offers(drafter, Described) else type(drafter).__name__
        return drafter, line
    choosing = cast("ChoosesOps", drafter)
    if choosing.device != target.device:
        raise ValueError(f"Speculator: the drafter must be on {target.device}, got {choosing.device}")
    if backend == "native":
        backends.check_native(drafter.config, block_size)
    return choosing.with_backend(backend), ""


def shared_turns(target: TargetLike) -> Turns:
    """The turns that all Speculators over one model take."""
    return turns_of(cast("ModelTarget", target).model if offers(target, ModelTarget) else target)


def assemble(
    target: TargetLike, drafter: DrafterLike | None, parts: Parts, target_path: str, quantize: str | None
) -> tuple[Loop, dict[str, str]]:
    """The loop for a pair, and what runs, for people.

    The target runs fused or in its own layers with attention in place ("auto": the first of the two that can, on a CPU
    fused alone), else generic. Rounds run on the device, many rows at once, where the target is one of the first two,
    the drafter can, and the device is a GPU or "fused" or "own" was asked for; else by the host, a sequence at a time.
    Of those, several run together on a CPU where they can and that is faster: the line "lists" says whether and why.
    Raises: ValueError where options and target do not go together.
    """
    if target_path not in (*TARGET_PATHS, "fast"):
        names = ", ".join(map(repr, TARGET_PATHS))
        raise ValueError(f"Speculator: target_path must be one of {names}, got {target_path!r}")
    asked = target_path in ("fused", "own", "fast")
    reason = _generic_reason(target, drafter, parts.backend)
    if asked and reason is not None:
        raise ValueError(f"Speculator: target_path must be 'generic' or 'auto' with {reason}, got {target_path!r}")
    if target_path == "fast":
        warnings.warn(
            "target_path='fast' is now 'fused' (fused layers) or 'own' (the model's own); for a release it means the "
            "first of the two that can",
            FutureWarning,
            stacklevel=4,
        )
    on_cpu = target.device.type == "cpu"
    packs = on_cpu and parts.backend == "native" and _runs_elsewhere(target)
    if quantize is not None:
        _check_quantize(quantize, target, None if packs else reason, target_path)
    if packs and target_path != "generic" and drafter is not None:
        parts = replace(parts, drafter=_packed(drafter, quantize))
    on_gpu = backends.accelerator(target.device) is not None
    on_device = asked or (target_path == "auto" and on_gpu and reason is None)
    if on_device or (packs and target_path == "auto"):
        form = "fused" if not on_device else "auto" if target_path == "fast" else target_path
        try:
            return _in_place(target, parts, quantize, form, on_device)
        except ValueError as error:
            if asked or quantize is not None:
                raise
            reason = str(error)
    if parts.paths.path == "tree":
        target.check_trees()
    loop, lines = _by_host(parts, partial(_generic_rows, target, drafter, parts.backend), fused=False)
    return loop, {"target": "generic" if reason is None else f"generic ({reason})", **lines}


@step("preparing the target")
def _in_place(
    target: TargetLike, parts: Parts, quantize: str | None, form: str, on_device: bool
) -> tuple[Loop, dict[str, str]]:
    """The loop over a target whose attention is in place. Raises: ValueError where the target cannot run this way."""
    if offers(target, RowTarget):
        text = f"in place, by {type(target).__name__}"
    else:
        from .target.fused import in_place

        placed = in_place(cast("ModelTarget", target), quantize, form)
        parts, text = replace(parts, target=placed), placed.description
    if on_device:
        from .rounds.device import DeviceLoop

        return DeviceLoop(parts), {"target": text}
    loop, lines = _by_host(parts, lambda: cast("RowTarget", parts.target), fused=True)
    return loop, {"target": text, **lines}


def _by_host(parts: Parts, rows: Callable[[], RowTarget], *, fused: bool) -> tuple[Loop, dict[str, str]]:
    """The host's loop, and for several sequences the device's on the target that `rows` gives, where that is faster.

    rows: Raises ValueError where sequences cannot run together.
    """
    from .rounds.by_rows import LoopByRows, apart_reason
    from .rounds.host import HostLoop

    loop, reason = HostLoop(parts), apart_reason(parts, fused=fused)
    if reason is None:
        try:
            several = LoopByRows(loop, rows())
        except ValueError as error:
            reason = str(error)
        else:
            return several, {"round": HOST_ROUNDS, "lists": "together"}
    return loop, {"round": HOST_ROUNDS, "lists": f"one after the other ({reason})"}


def _generic_rows(target: TargetLike, drafter: DrafterLike | None, backend: str) -> RowTarget:
    """A generic target that runs several sequences together. Raises: ValueError where they cannot."""
    if (reason := _generic_reason(target, drafter, backend)) is not None:
        raise ValueError(reason)
    if offers(target, RowTarget):
        return cast("RowTarget", target)
    from .target.rows import GenericRows

    return GenericRows(cast("ModelTarget", target))


def _generic_reason(target: TargetLike, drafter: DrafterLike | None, backend: str) -> str | None:
    """Why rounds cannot run on the device, or None."""
    if offers(target, ModelTarget) and (mixes := cast("ModelTarget", target).facts.mixes_rows):
        return mixes
    if not (_runs_elsewhere(target) or offers(target, RowTarget)):
        return f"a target of type {type(target).__name__}"
    if backend != "native":
        return f"backend={backend!r}"
    if drafter is not None and not offers(drafter, RowDrafter):
        return f"a drafter of type {type(drafter).__name__}"
    return None


def _runs_elsewhere(target: TargetLike) -> bool:
    """Whether other code may run the model in the target's place."""
    if not offers(target, ModelTarget):
        return False
    model_target = cast("ModelTarget", target)
    return model_target.replaceable and not model_target.facts.mixes_rows


def _check_quantize(quantize: str, target: TargetLike, reason: str | None, target_path: str) -> None:
    from .decoder import formats

    if quantize not in (names := formats.quantized()):
        raise ValueError(f"Speculator: quantize must be {' or '.join(map(repr, names))} or None, got {quantize!r}")
    if reason is None and not _runs_elsewhere(target):
        reason = f"a target of type {type(target).__name__}"
    if reason is None and target.device.type != "cpu":
        reason = f"a target on {target.device}"
    if reason is None and target_path in ("generic", "own"):
        reason = f"target_path={target_path!r}"
    if reason is not None:
        raise ValueError(f"Speculator: quantize must be None with {reason}, got {quantize!r}")


def _packed(drafter: DrafterLike, quantize: str | None) -> DrafterLike:
    """The drafter with packed weights where they can be."""
    from .drafter.packed import PackedDrafter

    if not (offers(drafter, ModuleDrafter) and cast("ModuleDrafter", drafter).replaceable):
        return drafter
    return PackedDrafter.of(cast("Any", drafter), quantize) or drafter


def exported_pair(target: Any, drafter: Any, device: Any, dtype: Any) -> tuple[TargetLike, DrafterLike | None]:
    """An exported target and drafter, which may lie in one folder, on ONNX Runtime."""
    from .export import OnnxDrafter, OnnxTarget

    for name, value, allowed in (("device", device, (None, "cpu")), ("dtype", dtype, (None, "float32", torch.float32))):
        if value not in allowed:
            raise ValueError(f"Speculator: {name} must be None for a target on ONNX Runtime, got {value!r}")
    threads = torch.get_num_threads()
    loaded = None if drafter is None else OnnxDrafter(drafter, threads=threads)
    return OnnxTarget(target, threads=threads), loaded


def _optimized(target: TargetLike, optimize: str) -> TargetLike:
    """The target on a copy of its model that intel-extension-for-pytorch has changed; its own stays as it is."""
    if optimize != "ipex":
        raise ValueError(f"Speculator: optimize must be 'ipex' or None, got {optimize!r}")
    if not offers(target, ModelTarget):
        raise ValueError(f"Speculator: optimize must be None with a target of type {type(target).__name__}, got 'ipex'")
    try:
        ipex = importlib.import_module("intel_extension_for_pytorch")
    except ImportError as error:
        raise RuntimeError(
            f"Speculator: optimize='ipex' needs intel-extension-for-pytorch (pip install 'pydflash[ipex]'): {error}"
        ) from error
    from .target.generic import Target

    narrow = {} if target.dtype == torch.float32 else {"dtype": target.dtype}
    model = copy.deepcopy(cast("ModelTarget", target).model).eval()
    return Target(ipex.optimize(model, inplace=True, **narrow), target.layer_ids)
