"""What is declared once stands everywhere: functions, schemas, definitions, kernels; and who refuses what it lacks."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from devices import unusable

from pydflash import ops
from pydflash.ops import backends, native, reference, registry

EVERY = sorted(registry.ops())


def test_all_ops_are_found() -> None:
    assert len(EVERY) >= 14
    assert {"block_attention", "reject_sample", "packed_linear"} <= set(EVERY)
    assert "packed_linear" not in registry.ops(backend="cuda")
    assert "skinny_linear" not in registry.ops(backend="sycl")
    assert set(registry.ops(backend="sycl")) < set(registry.ops(backend="cpu"))
    assert "delta_rule" not in registry.ops(backend="cuda")


@pytest.mark.parametrize("name", EVERY)
def test_an_op_its_schema_and_its_definition_take_the_same(name: str) -> None:
    op, public = registry.ops()[name], inspect.signature(getattr(ops, name))
    assert getattr(reference, name) is op.reference
    assert list(public.parameters) == list(inspect.signature(op.reference).parameters)
    inner = inspect.signature(getattr(inspect.getmodule(getattr(ops, name)), f"_{name}", getattr(ops, name)))
    schema = getattr(torch.ops.pydflash, name).default._schema
    assert [a.name for a in schema.arguments] == list(inner.parameters)
    for argument in schema.arguments:  # torch leaves out arguments that equal the schema's default
        if argument.has_default_value():
            assert inner.parameters[argument.name].default == argument.default_value, argument.name


@pytest.mark.parametrize("backend", backends.NAMES)
def test_a_module_has_the_kernels_that_are_declared(backend: str) -> None:
    if reason := unusable(backend):
        pytest.skip(reason)
    module: Any = backends.load(backend).module
    assert set(module.kernels) == set(registry.ops(backend=backend))
    assert set(module.kernels) <= set(dir(module))


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("kind", ["cpu", "cuda", "xpu", "mps"])
def test_a_missing_backend_is_refused_with_the_reason(kind: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "load", lambda backend: backends.Backend(backend, None, "it went away"))
    backend = backends.name_for(kind)
    want = f"the {backend} backend is not usable: it went away"
    if backend not in registry.ops()[name].backends:
        want = f"the {backend} backend does not have it, only" if backend in backends.NAMES else "no backend runs on"

    class Somewhere(torch.Tensor):
        device = torch.device(kind)  # type: ignore[assignment]

    like: Any = torch.Tensor._make_subclass(Somewhere, torch.zeros(1))
    with pytest.raises(RuntimeError, match=f"^{name}: {want}"):
        native.module_for(name, like)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_nothing_runs_plain_torch_in_silence(mode: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    wide = torch.ones(2, 8, dtype=torch.float64)
    with mode():
        with pytest.raises(ValueError, match=r"^swiglu: x must be float32, bfloat16 or float16, got float64$"):
            ops.swiglu(wide)
        with pytest.raises(ValueError, match=r"^add_rms_norm: x must be float32, bfloat16 or float16, got float64$"):
            ops.add_rms_norm(wide, None, wide[0], 1e-6)
        monkeypatch.setattr(backends, "load", lambda backend: backends.Backend(backend, None, "it went away"))
        with pytest.raises(RuntimeError, match=r"^swiglu: the cpu backend is not usable: it went away$"):
            ops.swiglu(wide.float())
        assert reference.swiglu(wide).dtype == torch.float64
