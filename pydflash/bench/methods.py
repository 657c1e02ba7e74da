"""The methods that `pydflash bench` compares: token ids in, token ids out, all on one target model object."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..drafter.module import Drafter
from ..speculator import Speculator
from ..target.defaults import GenerationDefaults
from ..target.generic import Target

LOOKUP_DRAFTS = 10  # what transformers itself takes where it is not told


class Answer(NamedTuple):
    """New token ids, and figures of each round after the prefill, as in `Stats`; no rounds where none are known.

    Attributes:
        accepted: Drafts kept.
        drafted: Drafts that could have been kept: the chain's, or those of a tree's longest path.
        verified: Drafts that went through the target.
    """

    ids: list[int]
    accepted: list[int]
    drafted: list[int]
    verified: list[int]


# (prompt ids, temperature, seed, most new tokens) -> Answer. Nothing but the temperature shapes the target's law.
Method = Callable[[Sequence[int], float, int, int], Answer]


class DraftPath(NamedTuple):
    """Whose drafts our loop verifies, and which of them: `path` and `num_nodes` are keywords of `Speculator`."""

    drafter: str
    path: str = "walk"
    num_nodes: int | str | None = None

    @property
    def name(self) -> str:
        """The row's name; that of the walk is the drafter's."""
        if self.path == "walk":
            return self.drafter
        return f"{self.drafter} {self.path}" + ("" if self.num_nodes is None else f" {self.num_nodes}")


def draft_paths(drafters: Sequence[str], trees: Sequence[int | str], viterbi: bool) -> dict[str, DraftPath]:
    """Rows of our loop by name: each drafter's walk, and after it what else is asked for.

    Raises: ValueError where a drafter has the name of another one's row.
    """
    found: dict[str, DraftPath] = {}
    for drafter in drafters:
        rows = [DraftPath(drafter)]
        rows += [DraftPath(drafter, "viterbi")] if viterbi else []
        rows += [DraftPath(drafter, "tree", size) for size in trees]
        for row in rows:
            if row.name in found:
                raise ValueError(f"bench: --drafter must have names of their own, got {row.name!r} for two rows")
            found[row.name] = row
    return found


@dataclass(frozen=True, slots=True)
class Ends:
    """Where an answer ends: the target's stop tokens, and its stop strings with the tokenizer that they need."""

    token_ids: list[int]
    strings: str | list[str]
    tokenizer: Any

    @classmethod
    def of(cls, target: Target, tokenizer: Any) -> Ends:
        defaults = GenerationDefaults(target.generation_config)
        end = getattr(tokenizer, "eos_token_id", None)
        ids = defaults.stop_token_ids or ([] if end is None else [end])
        return cls(ids, defaults.stop_strings, tokenizer if defaults.stop_strings else None)


def speculator_method(spec: Speculator, ends: Ends) -> Method:
    """Our loop; plain decoding where the Speculator has no drafter."""

    def answer(ids: Sequence[int], temperature: float, seed: int, limit: int) -> Answer:
        out = spec.generate(
            list(ids),
            limit,
            temperature=temperature,
            top_p=1.0,
            top_k=0,
            min_p=0.0,
            seed=seed,
            stop_token_ids=ends.token_ids,
            stop_strings=ends.strings,
        )
        return Answer(out.token_ids, out.stats.num_accepted, out.stats.num_drafted, out.stats.num_verified)

    return answer


def drafter_methods(
    target: Target,
    drafters: dict[str, Drafter],
    paths: dict[str, DraftPath],
    ends: Ends,
    *,
    argmax: Sequence[str] = (),
    draft_sampling: bool | None = None,
    **options: Any,
) -> dict[str, Method]:
    """Our loop with each of `paths`, under its name. `options` are more keywords of `Speculator`.

    Those named in `argmax` have no selector: their drafts are each slot's best token, and so are not sampled unless
    asked for. A Viterbi path is never sampled.
    """
    methods = {}
    for name, (drafter, path, num_nodes) in paths.items():
        sampling = False if drafter in argmax and draft_sampling is None else draft_sampling
        spec = Speculator(
            target,
            drafters[drafter],
            ends.tokenizer,
            path=path,
            num_nodes=num_nodes,
            draft_sampling=None if path == "viterbi" else sampling,
            **options,
        )
        methods[name] = speculator_method(spec, ends)
    return methods


def transformers_method(target: Target, ends: Ends) -> Method:
    """transformers' own generate. It reports no rounds."""

    def answer(ids: Sequence[int], temperature: float, seed: int, limit: int) -> Answer:
        return Answer(_generate(target, ends, ids, temperature, seed, limit), [], [], [])

    return answer


def lookup_method(target: Target, ends: Ends, drafts: int = LOOKUP_DRAFTS) -> Method:
    """transformers' prompt-lookup decoding. Its rounds are counted from outside: rows of each target forward, and the
    tokens that each brought. As in our loop, the prefill's tokens belong to no round.
    """

    def answer(ids: Sequence[int], temperature: float, seed: int, limit: int) -> Answer:
        pieces = _Pieces()
        with _watch(target.model) as forwards:
            out = _generate(
                target, ends, ids, temperature, seed, limit, prompt_lookup_num_tokens=drafts, streamer=pieces
            )
        produced = pieces.lengths[1:]  # the first piece is the prompt
        widths = [width for width, _ in forwards]
        if sum(produced) != len(out) or len(widths) != len(produced):
            raise RuntimeError(
                f"bench: prompt lookup must bring its tokens forward by forward, got {len(widths)} forwards for "
                f"{len(produced)} pieces of {sum(produced)} tokens, {len(out)} in the answer"
            )
        return Answer(out, *_rounds(produced[1:], widths[1:]))

    return answer


def official_method(target: Target, drafter: Drafter, ends: Ends, block_size: int | None = None) -> Method:
    """The loop of the official `dflash` package on the same target object and the same drafter tensors.

    It samples drafts at a temperature, whatever their version. Rounds are read off the target's forwards.

    Raises: ImportError where the package is not installed; ValueError where it cannot run this pair, with the reason.
    """
    if importlib.util.find_spec("dflash") is None:
        raise ImportError("the package is not installed (pip install --no-deps dflash)")
    official = importlib.import_module("dflash.model")
    if not hasattr(official.DynamicCache, "activate_past_recording"):
        raise ValueError("its loop needs transformers 5")
    defaults = GenerationDefaults(target.generation_config)
    if ends.strings or defaults.processor_keys:
        raise ValueError(
            "its loop knows no stop strings and logits processors, and the target's generation config does"
        )
    model = official_model(official, drafter)
    size = drafter.config.block_size if block_size is None else block_size

    def answer(ids: Sequence[int], temperature: float, seed: int, limit: int) -> Answer:
        torch.manual_seed(seed)
        prompt = torch.tensor([list(ids)], device=target.device)
        with _watch(target.model) as forwards:
            out = official.dflash_generate(
                model, target.model, prompt, limit, ends.token_ids or None, temperature, block_size=size
            )
        length = out.shape[1]
        begins = [int(position) for _, position in forwards[1:] if position is not None]
        produced = [b - a for a, b in zip(begins, [*begins[1:], length - 1], strict=False)]
        return Answer(out[0, len(ids) :].tolist(), *_rounds(produced, [width for width, _ in forwards[1:]]))

    return answer


def official_model(official: Any, drafter: Drafter) -> nn.Module:
    """`drafter` as a module of the official package `official` (its `dflash.model`); the tensors are shared.

    Raises: ValueError where the package has no place for some of the tensors.
    """
    kind = official.DFlashDraftModel if drafter.config.version == 1 else official.DFlash2DraftModel
    state = drafter.canonical()
    for name in ("predecessor_codebook", "successor_codebook"):
        if (tensor := state.pop(f"candidate_selector.{name}", None)) is not None:
            state[f"candidate_selector.{name}.weight"] = tensor
    model: nn.Module = kind(kind.config_class(**drafter.config.to_dict()))
    missing, unexpected = model.load_state_dict(state, strict=False, assign=True)
    if missing or unexpected:
        raise ValueError(f"it must have a place for every tensor of the drafter, got {[*missing, *unexpected]}")
    return model.to(drafter.device).eval()


def add_peers(
    methods: dict[str, Method],
    asked: Sequence[str] | None,
    target: Target,
    drafters: dict[str, Drafter],
    ends: Ends,
    prompt: Sequence[int],
    block_size: int | None = None,
) -> dict[str, str]:
    """Add the methods of other packages to `methods`, each tried on the first tokens of an answer to `prompt`.

    Args:
        asked: Names among "transformers", "lookup" and "dflash", or None for all that are there.
        drafters: What the official loop runs, one row each.

    Returns: what is missing, with the reason.

    Raises: ValueError where one that was asked for is missing.
    """
    makers: dict[str, dict[str, Callable[[], Method]]] = {
        "transformers": {"transformers": partial(transformers_method, target, ends)},
        "lookup": {"prompt lookup": partial(lookup_method, target, ends)},
        "dflash": {
            official_name(name, drafters): partial(official_method, target, drafter, ends, block_size)
            for name, drafter in drafters.items()
        },
    }
    missing: dict[str, str] = {}
    for peer in makers if asked is None else asked:
        for name, make in makers[peer].items():
            try:
                method = make()
                method(prompt, 0.0, 0, 4)
            except Exception as error:  # whatever another package raises
                if asked is not None:
                    raise ValueError(f"bench: peer {peer!r} must work where it is asked for, got: {error}") from error
                missing[name] = str(error)
            else:
                methods[name] = method
    return missing


def official_name(drafter: str, drafters: Sequence[str] | dict[str, Drafter]) -> str:
    """The name of the official loop's row for a drafter."""
    return "official dflash" if len(drafters) == 1 else f"official dflash, {drafter}"


class _Pieces:
    """A streamer that keeps how many tokens each call brought."""

    def __init__(self) -> None:
        self.lengths: list[int] = []

    def put(self, tokens: Tensor) -> None:
        self.lengths.append(tokens.numel())

    def end(self) -> None:
        pass


def _rounds(produced: Sequence[int], widths: Sequence[int]) -> tuple[list[int], list[int], list[int]]:
    """Accepted, drafted and verified counts of rounds that brought `produced` tokens from blocks of `widths` rows.

    The end cuts the last round, and what it cut was neither accepted nor drafted.
    """
    accepted = [n - 1 for n in produced]
    verified = [width - 1 for width in widths]
    drafted = [*verified[:-1], *accepted[-1:]]
    return accepted, drafted, verified


@contextmanager
def _watch(model: Any) -> Iterator[list[tuple[int, Tensor | None]]]:
    """Rows, and first position where it is given, of every forward of `model` meanwhile."""
    seen: list[tuple[int, Tensor | None]] = []

    def note(_: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        ids = given[0] if given else named["input_ids"]
        positions = named.get("position_ids")
        seen.append((ids.shape[1], None if positions is None else positions[0, 0]))

    hook = model.register_forward_pre_hook(note, with_kwargs=True)
    try:
        yield seen
    finally:
        hook.remove()


def _generate(
    target: Target, ends: Ends, ids: Sequence[int], temperature: float, seed: int, limit: int, **options: Any
) -> list[int]:
    torch.manual_seed(seed)
    prompt = torch.tensor([list(ids)], device=target.device)
    if temperature > 0:  # filters off, also the top_k of 50 that transformers takes where none is named
        options |= {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    else:
        options["do_sample"] = False
    if ends.tokenizer is not None:
        options["tokenizer"] = ends.tokenizer
    if ends.token_ids:
        options |= {"eos_token_id": ends.token_ids, "pad_token_id": ends.token_ids[0]}
    out = target.model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=limit, **options)
    return out[0, len(ids) :].tolist()
