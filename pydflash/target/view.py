"""A model's modules under another attention, so that nothing is set on the model or its config while others use it."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn

from ..protocols import ModelTarget


class ModelView:
    """The modules of a target's model once more: evaluation mode, and a config that names another attention function.

    Parameters, buffers and hooks are the model's own, also where they are exchanged later; so is what its config says
    otherwise. A module that is exchanged is noticed by `current`.
    """

    def __init__(self, target: ModelTarget, attention: str) -> None:
        """attention: a name registered with transformers' AttentionInterface."""
        self._model, self._attention = target.model, attention
        self._text_config = target.facts.text_config
        self._build()

    def current(self) -> Any:
        """The view as a model, to be called at once. Raises what a module's copy raises."""
        if any([*held.values()] != children for held, children in self._children):
            self._build()
        for config, mine in self._configs:
            vars(mine).update({k: v for k, v in vars(config).items() if v is not self._text_config})
        self._configs[0][1]._attn_implementation_internal = self._attention  # the property would reach inner configs
        return self._view

    def _build(self) -> None:
        """Modules that share everything but the list of their children, their config and their mode."""
        outer, mine = self._model.config, copy.copy(self._text_config)
        self._configs = [(self._text_config, mine)]
        if outer is not self._text_config:
            other = copy.copy(outer)
            vars(other).update({k: mine for k, v in vars(outer).items() if v is self._text_config})
            self._configs.append((outer, other))
        self._children: list[tuple[dict[str, Any], list[Any]]] = []
        self._view = self._copied(self._model, {})

    def _copied(self, module: nn.Module, done: dict[nn.Module, nn.Module]) -> nn.Module:
        if module in done:
            return done[module]
        view = done[module] = object.__new__(type(module))
        vars(view).update(vars(module))
        for config, mine in self._configs:
            vars(view).update({name: mine for name, value in vars(module).items() if value is config})
        children: dict[str, Any] = vars(module)["_modules"]
        self._children.append((children, [*children.values()]))
        copies = {name: None if child is None else self._copied(child, done) for name, child in children.items()}
        vars(view).update(_modules=copies, training=False)
        return view
