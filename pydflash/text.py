"""From prompts to token ids and from token ids back to text, with stop conditions that cut inside a block."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from .messages import cut, shown

Prompt = Any  # text, chat messages, token ids (list or tensor), or a list of these


def split_prompts(prompt: Prompt, keep_errors: bool = False) -> tuple[list[Prompt], bool]:
    """The single prompts of an argument, and whether it was a list of prompts.

    keep_errors: An item of a list that is no prompt has its ValueError as its place, where another item is one.
    """
    if isinstance(prompt, Tensor):
        if (
            prompt.dim() not in (1, 2)
            or prompt.dtype == torch.bool
            or prompt.dtype.is_floating_point
            or prompt.is_complex()
        ):
            raise ValueError(
                f"prompt: token ids must be [P] or [B, P] integers, got {list(prompt.shape)} {prompt.dtype}"
            )
        return ([prompt.tolist()], False) if prompt.dim() == 1 else (prompt.tolist(), True)
    if isinstance(prompt, Mapping):
        if "input_ids" not in prompt:
            raise ValueError(f"prompt: a mapping must have 'input_ids', got {shown(list(prompt))}")
        rows, many = split_prompts(prompt["input_ids"])
        if prompt.get("attention_mask") is not None:  # what it does not show is padding
            mask = prompt["attention_mask"]
            masks, _ = split_prompts(mask.long() if isinstance(mask, Tensor) else mask)
            if [len(row) for row in rows] != [len(mask) for mask in masks]:
                raise ValueError("prompt: attention_mask must have the shape of input_ids, got another")
            both = zip(rows, masks, strict=True)
            rows = [[i for i, seen in zip(row, mask, strict=True) if seen] for row, mask in both]
        return rows, many
    if isinstance(prompt, str):
        return [prompt], False
    if hasattr(prompt, "tolist"):  # an array
        return split_prompts(prompt.tolist())
    if not isinstance(prompt, Sequence) or isinstance(prompt, (bytes, bytearray)) or not prompt:
        raise ValueError(f"prompt: must be text, messages, token ids or a list of these, got {shown(prompt)}")
    if all(_is_id(item) for item in prompt) or all(_is_message(item) for item in prompt):
        return [list(prompt)], False
    singles: list[Prompt] = []
    errors: list[ValueError] = []
    for item in prompt:
        try:
            found, many = split_prompts(item)
            if many:
                raise ValueError(f"prompt: must be a list of single prompts, got {shown(item)} in one")
            singles += found
        except ValueError as error:
            if not keep_errors:
                raise
            singles.append(error)
            errors.append(error)
    if len(errors) == len(singles):
        raise errors[0]
    return singles, True


def _is_id(item: object) -> bool:
    return isinstance(item, Integral) and not isinstance(item, bool)


def _is_message(item: object) -> bool:
    return isinstance(item, Mapping) and "role" in item


def encode(
    prompt: Prompt,
    tokenizer: Any,
    chat_template: str | bool | None,
    vocab_size: int,
    *,
    tools: Sequence[Any] | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    continue_final_message: bool | None = None,
) -> list[int]:
    """Token ids of one prompt.

    Text is taken as a user's message where the tokenizer has a chat template, unless `chat_template` is False;
    a string replaces the tokenizer's template.

    Args:
        tools: Functions or JSON schemas, for the template.
        chat_template_kwargs: Further variables of the template, such as `enable_thinking`.
        continue_final_message: Whether the last message stays open, for the model to go on with; None does so where it
            is the assistant's, as in transformers' pipelines.

    Raises: ValueError for text without a tokenizer or that is no valid Unicode, messages that the template refuses,
        an empty prompt, or ids outside the vocabulary.
    """
    if isinstance(prompt, str) or _is_message(prompt[0] if len(prompt) else None):
        if tokenizer is None:
            raise ValueError("prompt: text and messages need a tokenizer, got a Speculator without one")
        ids = _tokenize(prompt, tokenizer, chat_template, tools, chat_template_kwargs, continue_final_message)
    else:
        ids = [int(i) for i in prompt]
    if not ids:
        raise ValueError("prompt: must have at least one token, got none")
    if min(ids) < 0 or max(ids) >= vocab_size:
        raise ValueError(f"prompt: token ids must be 0 to {vocab_size - 1}, got {shown(min(ids))} to {shown(max(ids))}")
    return ids


def _tokenize(
    prompt: str | list[dict[str, Any]],
    tokenizer: Any,
    chat_template: str | bool | None,
    tools: Sequence[Any] | None,
    template_kwargs: Mapping[str, Any] | None,
    continue_final: bool | None,
) -> list[int]:
    template = getattr(tokenizer, "chat_template", None) if chat_template in (None, True) else chat_template
    if not template:
        if chat_template is True:
            raise ValueError("chat_template: the tokenizer must have one, got True without any")
        if not isinstance(prompt, str):
            raise ValueError("prompt: messages need a chat template, got a tokenizer without one")
        for name, value in (("tools", tools), ("chat_template_kwargs", template_kwargs)):
            if value:
                raise ValueError(f"{name}: need a chat template, got {shown(value)} without one")
        return list(tokenizer(_valid(prompt))["input_ids"])
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [_plain(m) for m in prompt]
    last_is_open = messages[-1]["role"] == "assistant" if continue_final is None else continue_final
    try:
        text = tokenizer.apply_chat_template(
            messages,
            **{
                "tools": None if tools is None else list(tools),
                "chat_template": template,
                "add_generation_prompt": not last_is_open,
                "continue_final_message": last_is_open,
                "tokenize": False,
                **(template_kwargs or {}),
            },
        )
    except Exception as error:  # a template is a program of its authors
        raise ValueError(
            f"prompt: the chat template does not take these messages: {cut(str(error))}, got {shown(prompt)}"
        ) from error
    return list(tokenizer(_valid(text), add_special_tokens=False)["input_ids"])


def _plain(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message whose content is text; parts of type "text" are joined."""
    content = message.get("content")
    if isinstance(content, str) or content is None:
        return dict(message)
    parts = [content] if isinstance(content, Mapping) else content
    if not isinstance(parts, Sequence) or any(
        not isinstance(part, (str, Mapping)) or (isinstance(part, Mapping) and not isinstance(part.get("text"), str))
        for part in parts
    ):
        raise ValueError(f"prompt: a message's content must be text, or parts of type 'text', got {shown(content)}")
    return {**message, "content": "".join(part if isinstance(part, str) else part["text"] for part in parts)}


def _valid(text: str) -> str:
    """The text, which a tokenizer can take only as valid Unicode."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"prompt: text must be valid Unicode, got {text[error.start]!r} at character {error.start} "
            "(bytes of another encoding?)"
        ) from None
    return text


class _Reading:
    """The text of tokens that arrive one after the other.

    Attributes:
        text: Of the tokens so far, without a character whose bytes are not complete.
    """

    def __init__(self, tokenizer: Any, skip_special_tokens: bool) -> None:
        self._tokenizer, self._skip = tokenizer, skip_special_tokens
        self._settled = 0  # tokens whose text cannot change any more
        self._read = 0  # tokens whose text is in `text`
        self._searched = 0  # characters of the text already looked through for stop strings
        self.text = ""

    def read(self, token_ids: list[int], final: bool = False) -> str:
        """Take in all tokens; returns what is certain of an incomplete end, which is not in `text` yet."""
        held = self._decode(token_ids[self._settled : self._read])
        new = self._decode(token_ids[self._settled :])[len(held) :]
        if not new or (new.endswith("�") and not final):
            return new.rstrip("�")
        self.text += new
        self._settled, self._read = self._read, len(token_ids)
        return ""

    def end_of_first(self, stop_strings: Sequence[str], pending: str) -> int | None:
        """Where the first of the stop strings ends in the text with `pending` behind it."""
        text = self.text + pending
        found = [
            at + len(stop)
            for stop in stop_strings
            if (at := text.find(stop, max(0, self._searched - len(stop) + 1))) >= 0
        ]
        self._searched = len(self.text)
        return min(found, default=None)

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip, clean_up_tokenization_spaces=False)


class Output:
    """The new tokens of one request: grows block by block, and cuts exactly where a stop condition holds.

    Attributes:
        token_ids: New tokens only; the stop token, or the token that completes a stop string, is the last.
        text: Their text without special tokens, ending with the stop string where one was met. A stop string may
            hold special tokens, which are not part of the text.
        finish_reason: "stop", "length", or None while it grows.
        limit: The most tokens it may hold.
    """

    def __init__(
        self,
        tokenizer: Any,
        limit: int,
        stop_token_ids: Sequence[int],
        stop_strings: Sequence[str],
        *,
        criteria: Sequence[Callable[..., Any]] = (),
        max_time: float | None = None,
        prompt: Sequence[int] = (),
    ) -> None:
        """criteria: `criterion(input_ids [1, n], scores=None)`, called with `prompt` and text after every token; where
        one is true the output ends as a stop. max_time: seconds from now, after which it ends as at a limit.
        """
        if stop_strings and tokenizer is None:
            raise ValueError("stop_strings: need a tokenizer, got a Speculator without one")
        if any(not isinstance(s, str) or not s for s in stop_strings):
            raise ValueError(f"stop_strings: must be non-empty strings, got {shown(list(stop_strings))}")
        self._tokenizer = tokenizer
        self.limit = limit
        self._stop_ids = frozenset(stop_token_ids)
        self._stop_strings = tuple(stop_strings)
        self._special = _special_ids(tokenizer) if stop_strings else frozenset()
        self._shown = _Reading(tokenizer, skip_special_tokens=True)
        self._whole: _Reading | None = None  # with special tokens, once there is one
        self.token_ids: list[int] = []
        self.text = ""
        self.finish_reason: str | None = "length" if limit <= 0 else None
        self._criteria, self._prompt = tuple(criteria), list(prompt)
        self._met: list[bool] = []  # what the criteria said of the text after each new token
        self._deadline = None if max_time is None else time.monotonic() + max_time

    def extend(self, tokens: Sequence[int]) -> tuple[list[int], str]:
        """Take `tokens` up to a stop condition; returns what was taken and the text that became certain."""
        first, before = len(self.token_ids), len(self.text)
        for token in tokens:
            if self.finish_reason is not None:
                break
            self.token_ids.append(token)
            if token in self._stop_ids:
                self.finish_reason = "stop"
            elif len(self.token_ids) >= self.limit or self._too_late():
                self.finish_reason = "length"
            if self._criteria and self._is_met(self.token_ids):
                self.finish_reason = "stop"
            if self._stop_strings:
                self._read_and_search(token)
        if self._tokenizer is not None and not self._stop_strings:
            self._shown.read(self.token_ids, final=self.finish_reason is not None)
            self.text = self._shown.text
        return self.token_ids[first:], self.text[before:]

    def ends_with(self, tokens: Sequence[int]) -> bool:
        """Whether these tokens would end the output, by ids, number, criteria or strings; it stays as it is.

        To be called for each of them in turn: a criterion is asked here for the last one, and not again by `extend`.
        """
        if self.finish_reason is not None or any(token in self._stop_ids for token in tokens):
            return True
        if len(self.token_ids) + len(tokens) >= self.limit:
            return True
        if self._criteria and self._is_met([*self.token_ids, *tokens]):
            return True
        if not self._stop_strings:
            return False
        other = copy.copy(self)
        other.token_ids, other._criteria = list(self.token_ids), ()
        other._shown, other._whole = copy.copy(self._shown), copy.copy(self._whole)
        other.extend(tokens)
        return other.finish_reason is not None

    def _too_late(self) -> bool:
        return self._deadline is not None and time.monotonic() > self._deadline

    def _is_met(self, token_ids: Sequence[int]) -> bool:
        """Whether a criterion ends the text with the last of these; all of them see every token, as in transformers."""
        if len(self._met) < len(token_ids):
            ids = torch.tensor([[*self._prompt, *token_ids]])
            met = [criterion(ids, None) for criterion in self._criteria]
            if wrong := [a for a in met if not isinstance(a, (bool, Tensor)) and not hasattr(a, "any")]:
                raise ValueError(f"stopping_criteria: must return True or False, got {shown(wrong[0])}")
            self._met.append(any(bool(torch.as_tensor(answer).any()) for answer in met))
        return self._met[len(token_ids) - 1]

    def _read_and_search(self, token: int) -> None:
        """End behind the first stop string that the newest token completes; it can begin in earlier tokens."""
        final = self.finish_reason is not None
        pending = self._shown.read(self.token_ids, final)
        self.text = self._shown.text
        end = self._shown.end_of_first(self._stop_strings, pending)
        shown = self.text + pending
        if token in self._special or self._whole is not None:
            self._whole = self._whole or _Reading(self._tokenizer, skip_special_tokens=False)
            pending = self._whole.read(self.token_ids, final)
            length = len(self._whole.text) + len(pending)
            if (whole_end := self._whole.end_of_first(self._stop_strings, pending)) is not None:
                behind = 0 if token in self._special else length - whole_end
                end = min(len(shown) - behind, len(shown) if end is None else end)
        if end is not None:
            self.text = shown[:end]
            self.finish_reason = "stop"


def _special_ids(tokenizer: Any) -> frozenset[int]:
    """Tokens that have no text of their own."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    marked = [i for i, token in added.items() if getattr(token, "special", False)]
    return frozenset([*getattr(tokenizer, "all_special_ids", ()), *marked])
