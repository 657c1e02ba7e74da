"""From prompts to token ids and from token ids back to text, with stop conditions that cut inside a block."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any

from torch import Tensor

Prompt = Any  # text, chat messages, token ids (list or tensor), or a list of these


def split_prompts(prompt: Prompt) -> tuple[list[Prompt], bool]:
    """The single prompts of an argument, and whether it was a list of prompts."""
    if isinstance(prompt, Tensor):
        if prompt.dim() not in (1, 2) or prompt.is_floating_point():
            raise ValueError(
                f"prompt: token ids must be [P] or [B, P] integers, got {list(prompt.shape)} {prompt.dtype}"
            )
        return ([prompt.tolist()], False) if prompt.dim() == 1 else (prompt.tolist(), True)
    if isinstance(prompt, Mapping):
        if "input_ids" not in prompt:
            raise ValueError(f"prompt: a mapping must have 'input_ids', got {sorted(prompt)}")
        rows, many = split_prompts(prompt["input_ids"])
        if "attention_mask" in prompt:  # what it does not show is padding
            masks, _ = split_prompts(prompt["attention_mask"])
            both = zip(rows, masks, strict=True)
            rows = [[i for i, seen in zip(row, mask, strict=True) if seen] for row, mask in both]
        return rows, many
    if isinstance(prompt, str):
        return [prompt], False
    if hasattr(prompt, "tolist"):  # an array
        return split_prompts(prompt.tolist())
    if not isinstance(prompt, Sequence) or not prompt:
        raise ValueError(f"prompt: must be text, messages, token ids or a list of these, got {prompt!r}")
    if all(_is_id(item) for item in prompt) or all(_is_message(item) for item in prompt):
        return [list(prompt)], False
    singles = [split_prompts(item) for item in prompt]
    if any(many for _, many in singles):
        raise ValueError("prompt: lists of prompts must not be nested deeper")
    return [single for (single,), _ in singles], True


def token_ids_of(name: str, value: Any) -> list[int]:
    """Token ids of a number, a list, an array or a tensor, as a list of int.

    Raises: ValueError naming the argument for anything else.
    """
    items = value.tolist() if hasattr(value, "tolist") else value
    items = [items] if isinstance(items, Integral) else items
    if not isinstance(items, Iterable) or isinstance(items, str):
        raise ValueError(f"{name}: must be token ids, got {value!r}")
    found = [item.item() if hasattr(item, "item") else item for item in items]
    if not all(_is_id(item) for item in found):
        raise ValueError(f"{name}: must be token ids, got {value!r}")
    return [int(item) for item in found]


def _is_id(item: object) -> bool:
    return isinstance(item, Integral) and not isinstance(item, bool)


def _is_message(item: object) -> bool:
    return isinstance(item, Mapping) and "role" in item


def encode(prompt: Prompt, tokenizer: Any, chat_template: str | bool | None, vocab_size: int) -> list[int]:
    """Token ids of one prompt.

    Text is taken as a user's message where the tokenizer has a chat template, unless `chat_template` is False;
    a string replaces the tokenizer's template.

    Raises: ValueError for text without a tokenizer, an empty prompt, or ids outside the vocabulary.
    """
    if isinstance(prompt, str) or _is_message(prompt[0] if len(prompt) else None):
        if tokenizer is None:
            raise ValueError("prompt: text and messages need a tokenizer, got a Speculator without one")
        ids = _tokenize(prompt, tokenizer, chat_template)
    else:
        ids = [int(i) for i in prompt]
    if not ids:
        raise ValueError("prompt: must have at least one token, got none")
    if min(ids) < 0 or max(ids) >= vocab_size:
        raise ValueError(f"prompt: token ids must be 0 to {vocab_size - 1}, got {min(ids)} to {max(ids)}")
    return ids


def _tokenize(prompt: str | list[dict[str, Any]], tokenizer: Any, chat_template: str | bool | None) -> list[int]:
    template = getattr(tokenizer, "chat_template", None) if chat_template in (None, True) else chat_template
    if isinstance(prompt, str) and not template:
        if chat_template is True:
            raise ValueError("chat_template: the tokenizer must have one, got True without any")
        return list(tokenizer(prompt)["input_ids"])
    if not template:
        raise ValueError("prompt: messages need a chat template, got a tokenizer without one")
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    text = tokenizer.apply_chat_template(messages, chat_template=template, add_generation_prompt=True, tokenize=False)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


class Output:
    """The new tokens of one request: grows block by block, and cuts exactly where a stop condition holds.

    Attributes:
        token_ids: New tokens only; the stop token, or the token that completes a stop string, is the last.
        text: Their text without special tokens, ending with the stop string where one was met.
        finish_reason: "stop", "length", or None while it grows.
        limit: The most tokens it may hold.
    """

    def __init__(self, tokenizer: Any, limit: int, stop_token_ids: Sequence[int], stop_strings: Sequence[str]) -> None:
        if stop_strings and tokenizer is None:
            raise ValueError("stop_strings: need a tokenizer, got a Speculator without one")
        if any(not isinstance(s, str) or not s for s in stop_strings):
            raise ValueError(f"stop_strings: must be non-empty strings, got {list(stop_strings)!r}")
        self._tokenizer = tokenizer
        self.limit = limit
        self._stop_ids = frozenset(stop_token_ids)
        self._stop_strings = tuple(stop_strings)
        self._searched = 0  # characters of the text already looked through for stop strings
        self._settled = 0  # tokens whose text cannot change any more
        self._read = 0  # tokens whose text is in `text`
        self.token_ids: list[int] = []
        self.text = ""
        self.finish_reason: str | None = "length" if limit <= 0 else None

    def extend(self, tokens: Sequence[int]) -> tuple[list[int], str]:
        """Take `tokens` up to a stop condition; returns what was taken and the text that became certain."""
        first, before = len(self.token_ids), len(self.text)
        for token in tokens:
            if self.finish_reason is not None:
                break
            self.token_ids.append(token)
            if token in self._stop_ids:
                self.finish_reason = "stop"
            elif len(self.token_ids) >= self.limit:
                self.finish_reason = "length"
            if self._stop_strings:
                self._decode(final=self.finish_reason is not None)
        if self._tokenizer is not None and not self._stop_strings:
            self._decode(final=self.finish_reason is not None)
        return self.token_ids[first:], self.text[before:]

    def _decode(self, final: bool = False) -> None:
        """Append the text of unread tokens, holding back a character whose bytes are not complete."""
        held = self._text(self._settled, self._read)
        whole = self._text(self._settled, len(self.token_ids))
        new = whole[len(held) :]
        if new and (final or not new.endswith("�")):
            self.text += new
            self._settled, self._read = self._read, len(self.token_ids)
            self._cut_at_stop_string()
        elif self._stop_strings and (certain := new.rstrip("�")):
            # The token that brings half a character can complete a stop string before it.
            before = self.text
            self.text += certain
            if not self._cut_at_stop_string():
                self.text, self._searched = before, len(before)

    def _text(self, start: int, stop: int) -> str:
        ids = self.token_ids[start:stop]
        return self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def _cut_at_stop_string(self) -> bool:
        """End the text behind the first stop string, if there is one; it can begin in what an earlier token brought."""
        found = [
            at + len(stop)
            for stop in self._stop_strings
            if (at := self.text.find(stop, max(0, self._searched - len(stop) + 1))) >= 0
        ]
        self._searched = len(self.text)
        if found:
            self.text = self.text[: min(found)]
            self.finish_reason = "stop"
        return bool(found)
