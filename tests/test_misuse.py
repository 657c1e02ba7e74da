"""A drafter or a Speculator where transformers wants a model of its own: a sentence says what to use."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import transformers
from fakes import byte_tokenizer
from pairs import build_drafter
from tiny_models import TINY

from pydflash import Drafter, Speculator

MODEL = "it is no model for transformers' pipeline or assistant_model: call its generate or stream"
DRAFTER = (
    "a pydflash drafter is no assistant_model or model for transformers: use "
    "pydflash.Speculator(model, drafter).generate(...)"
)


@pytest.fixture(scope="module")
def parts() -> tuple[Any, Drafter, Speculator]:
    model = TINY["llama"]()
    drafter = build_drafter(2, num_target_layers=4)
    return model, drafter, Speculator(model, drafter)


@pytest.mark.parametrize("options", [{}, {"do_sample": True}], ids=str)
def test_as_an_assistant_model(parts: tuple[Any, Drafter, Speculator], options: dict[str, Any]) -> None:
    model, drafter, spec = parts
    for assistant, want in ((drafter, DRAFTER), (spec, MODEL)):
        with pytest.raises(AttributeError) as caught:
            model.generate(torch.tensor([[1, 2, 3]]), assistant_model=assistant, max_new_tokens=3, **options)
        assert str(caught.value).endswith(f"; {want}")


@pytest.mark.parametrize("device", [None, "cpu", -1])
def test_in_a_pipeline(parts: tuple[Any, Drafter, Speculator], device: Any) -> None:
    model, drafter, spec = parts
    where = {} if device is None else {"device": device}
    with pytest.raises(AttributeError) as caught:
        transformers.pipeline("text-generation", model=spec, tokenizer=byte_tokenizer(), **where)
    assert str(caught.value).endswith(f"; {MODEL}")
    with pytest.raises(AttributeError) as caught:
        transformers.pipeline(
            "text-generation", model=model, tokenizer=byte_tokenizer(), assistant_model=drafter, **where
        )
    assert str(caught.value).endswith(f"; {DRAFTER}")


def test_other_names_are_missing_as_ever(parts: tuple[Any, Drafter, Speculator]) -> None:
    _, drafter, spec = parts
    for thing, name in ((spec, "config"), (spec, "device"), (drafter.config, "get_text_config")):
        assert not hasattr(thing, name)
        assert name not in dir(thing)
    for thing in (spec, drafter.config):
        with pytest.raises(AttributeError, match=r"^'\w+' object has no attribute 'genrate'$") as caught:
            thing.genrate  # noqa: B018
        assert (caught.value.name, caught.value.obj) == ("genrate", thing)


def test_copies_and_pickles_work(parts: tuple[Any, Drafter, Speculator]) -> None:
    _, drafter, spec = parts
    assert pickle.loads(pickle.dumps(drafter.config)) == drafter.config == copy.deepcopy(drafter.config)
    assert copy.copy(spec).generate([1, 2], 5).token_ids == spec.generate([1, 2], 5).token_ids
