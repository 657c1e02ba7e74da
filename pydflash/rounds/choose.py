"""Which loop runs the rounds of a Speculator, and with what."""

from __future__ import annotations

from typing import Any

from ..decoder import formats
from ..drafter.module import Drafter
from ..ops import backends
from ..request import Loop
from ..target.generic import Target
from .host import HostLoop
from .paths import Paths

TARGET_PATHS = ("auto", "fast", "generic")


def choose_loop(
    target: Any,
    drafter: Any,
    backend: str,
    paths: Paths,
    block_size: int,
    draft_sampling: bool,
    *,
    target_path: str = "auto",
    quantize: str | None = None,
) -> tuple[Loop, dict[str, str]]:
    """The loop on the device where it is asked for or pays, else the loop of the host; and what it is, for people.

    On a CPU the host's loop runs a target of the common form in few calls, with packed weights, and a torch drafter so.

    Raises: ValueError where options and target do not go together.
    """
    if target_path not in TARGET_PATHS:
        names = ", ".join(map(repr, TARGET_PATHS))
        raise ValueError(f"Speculator: target_path must be one of {names}, got {target_path!r}")
    own = backend == "native"
    reason = None
    if not own or (drafter is not None and not isinstance(drafter, Drafter)):
        reason = "backend='reference'" if not own else f"a drafter of type {type(drafter).__name__}"
    if not isinstance(target, Target):
        reason = f"a target of type {type(target).__name__}"
    if target_path == "fast" and reason is not None:
        raise ValueError(f"Speculator: target_path must be 'generic' or 'auto' with {reason}, got 'fast'")
    on_cpu, on_gpu = target.device.type == "cpu", backends.accelerator(target.device) is not None
    packs = on_cpu and own and type(target) is Target  # what another kind does in its forward must not be passed over
    if quantize is not None:
        _check_quantize(quantize, target, None if packs else reason or _kind(target), target_path)
    if packs and type(drafter) is Drafter and target_path != "generic":
        from ..drafter.packed import PackedDrafter

        drafter = PackedDrafter.of(drafter, quantize) or drafter
    options: tuple[Any, ...] = (paths, block_size, draft_sampling)
    device_loop = target_path == "fast" or (target_path == "auto" and on_gpu and reason is None)
    if device_loop or (packs and target_path == "auto"):
        from ..target.fused import FastTarget

        try:
            fast = FastTarget(target, quantize)
        except ValueError as error:
            if target_path == "fast" or quantize is not None:
                raise
            reason = str(error)
        else:
            text = ", ".join(filter(None, (fast.form, fast.weights)))
            if device_loop:
                from .device import DeviceLoop

                used = drafter if block_size > 1 and isinstance(drafter, Drafter) else None
                return DeviceLoop(fast, used, *options), {"target": f"fast, {text}"}
            if fast.recognised is not None:
                return HostLoop(fast, drafter, backend, *options), {"target": text}
            reason = fast.form
    if paths.path == "tree":
        target.check_trees()
    return HostLoop(target, drafter, backend, *options), {
        "target": "generic" if reason is None else f"generic ({reason})"
    }


def _check_quantize(quantize: str, target: Any, reason: str | None, target_path: str) -> None:
    if quantize not in (names := formats.quantized()):
        raise ValueError(f"Speculator: quantize must be {' or '.join(map(repr, names))} or None, got {quantize!r}")
    if target_path == "generic":
        reason = reason or "target_path='generic'"
    if reason is not None:
        raise ValueError(f"Speculator: quantize must be None with {reason}, got {quantize!r}")


def _kind(target: Any) -> str:
    return f"a target on {target.device}" if type(target) is Target else f"a target of type {type(target).__name__}"
