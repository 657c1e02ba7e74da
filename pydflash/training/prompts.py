"""Where training prompts come from: text, chat and table files, and what must not be among them."""

from __future__ import annotations

import hashlib
import json
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..messages import cut, shown

NGRAM = 13  # words in a row that make two prompts near copies of each other
SHORTEST = 5  # an evaluation text of fewer words is only looked for as a whole prompt
_FIELDS = ("messages", "conversations", "turns", "prompt", "question", "text")
_ROLES = {"user": "user", "human": "user", "system": "system", "developer": "system"}
_ANSWERS = ("assistant", "gpt", "model", "bot", "chatgpt")


@dataclass(frozen=True, slots=True)
class Prompt:
    """What a user asks, turn by turn; the answers between the turns are the target's own. system: None is none."""

    turns: tuple[str, ...]
    system: str | None = None

    @property
    def text(self) -> str:
        """All that was written by people, for comparisons."""
        return "\n".join((*((self.system,) if self.system else ()), *self.turns))

    @property
    def key(self) -> int:
        """63 bits that name the prompt whatever file it came from."""
        content = json.dumps([self.system, *self.turns], ensure_ascii=False).encode()
        return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "big") >> 1


def read_prompts(path: str | Path) -> list[Prompt]:
    """The prompts of a file.

    `.txt`: one per line. `.jsonl`, `.json` (a list) and `.parquet` (needs pyarrow): records with one of the fields
    messages, conversations, turns, prompt, question, text. Chat records give their system and user turns; their
    answers are left out.

    Raises: ValueError naming the file and the record for anything else.
    """
    path = _existing(path)
    if path.suffix == ".txt":
        return [Prompt((line.strip(),)) for line in _lines(path) if line.strip()]
    return [_prompt(record, f"{path}, record {number}") for number, record in _records(path)]


def read_texts(path: str | Path) -> list[str]:
    """Every text of a file: lines of `.txt`, and all strings, at any depth, of the records of the other formats."""
    path = _existing(path)
    if path.suffix == ".txt":
        return _lines(path)
    return [text for _, record in _records(path) for text in _strings(record)]


def _existing(path: str | Path) -> Path:
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"training data: prompts must come from an existing file, got {path}")
    return path


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(f"read_prompts: {path} must be UTF-8, got {error}") from error


def _records(path: Path) -> Iterator[tuple[int, Any]]:
    if path.suffix == ".parquet":
        try:
            import pyarrow.parquet
        except ImportError as error:
            raise ImportError(f"read_prompts: {path} needs pyarrow, which is not installed") from error
        yield from enumerate(pyarrow.parquet.read_table(path).to_pylist(), 1)
    elif path.suffix in (".jsonl", ".json"):
        try:
            text = path.read_text(encoding="utf-8")
            if path.suffix == ".jsonl":
                # JSON strings may hold U+2028, at which str.splitlines would cut.
                yield from ((i, json.loads(line)) for i, line in enumerate(text.split("\n"), 1) if line.strip())
                return
            records = json.loads(text)
        except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, or nested too deep
            raise ValueError(f"read_prompts: {path} must be JSON, got {cut(str(error))}") from error
        if not isinstance(records, list):
            raise ValueError(f"read_prompts: {path} must hold a list of records, got {type(records).__name__}")
        yield from enumerate(records, 1)
    else:
        raise ValueError(f"read_prompts: file must end in .txt, .jsonl, .json or .parquet, got {path}")


def _prompt(record: Any, where: str) -> Prompt:
    if isinstance(record, str):
        record = {"prompt": record}
    if not isinstance(record, Mapping):
        raise ValueError(f"read_prompts: {where} must be a text or an object, got {type(record).__name__}")
    name = next((name for name in _FIELDS if record.get(name)), None)
    if name is None:
        raise ValueError(f"read_prompts: {where} must have one of {', '.join(_FIELDS)}, got {shown(sorted(record))}")
    value = record[name]
    turns: list[str] = []
    system: list[str] = []
    if not isinstance(value, str | list | tuple):
        raise ValueError(f"read_prompts: {where}: {name} must be a text or a list of turns, got {shown(value)}")
    for turn in [value] if isinstance(value, str) else value:
        if isinstance(turn, str):
            turns.append(turn)
            continue
        role = turn.get("role", turn.get("from")) if isinstance(turn, Mapping) else None
        content = turn.get("content", turn.get("value")) if role else None
        if role in _ANSWERS:
            continue
        if role not in _ROLES or not isinstance(content, str):
            raise ValueError(
                f"read_prompts: {where}: each turn must be a text or have a role among "
                f"{', '.join((*_ROLES, *_ANSWERS))} and a text as content, got {str(turn)[:80]}"
            )
        (turns if _ROLES[role] == "user" else system).append(content)
    turns = [turn.strip() for turn in turns if turn.strip()]
    if not turns:
        raise ValueError(f"read_prompts: {where} must have a user turn, got none in {name!r}")
    return Prompt(tuple(turns), "\n".join(system) or None)


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _strings(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _strings(item)


def words(text: str) -> tuple[str, ...]:
    """The text as a comparison sees it: lower-case words and numbers, without punctuation, spacing and markup."""
    return tuple(re.findall(r"\w+", unicodedata.normalize("NFKC", text).casefold()))


class Exclusion:
    """Finds copies of texts, evaluation prompts above all.

    A prompt is an exact copy if its words are those of a text, and a near one if it shares 13 words in a row with a
    text, or contains all of a text of 5 to 12 words.
    """

    def __init__(self, texts: Iterable[str] = ()) -> None:
        self._exact: set[tuple[str, ...]] = set()
        self._grams: dict[int, set[tuple[str, ...]]] = {}
        for text in texts:
            content = words(text)
            if not content:
                continue
            self._exact.add(content)
            size = min(NGRAM, len(content))
            if size >= SHORTEST:
                self._grams.setdefault(size, set()).update(_ngrams(content, size))

    def match(self, text: str) -> str | None:
        """ "exact", "near", or None where the text may be used."""
        content = words(text)
        if content in self._exact:
            return "exact"
        near = any(gram in grams for size, grams in self._grams.items() for gram in _ngrams(content, size))
        return "near" if near else None


def _ngrams(content: Sequence[str], size: int) -> Iterator[tuple[str, ...]]:
    return (tuple(content[i : i + size]) for i in range(len(content) - size + 1))


@dataclass(slots=True)
class PromptSet:
    """Prompts without duplicates and without what `exclusion` finds; `counts` says what became of all of them.

    Prompts with the same words are the same prompt; the first one stays.
    """

    exclusion: Exclusion
    prompts: list[Prompt] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    _seen: set[tuple[str, ...]] = field(default_factory=set)

    def add(self, prompt: Prompt) -> bool:
        """Take the prompt if it may be used; returns whether it was taken."""
        content, found = words(prompt.text), None
        if not content or content in self._seen:
            found = "duplicate" if content else "empty"
        else:
            for text in (prompt.text, *prompt.turns):
                match = self.exclusion.match(text)
                found = found or (match and f"excluded_{match}")
        self.counts["read"] += 1
        self.counts[found or "kept"] += 1
        if found is None:
            self._seen.add(content)
            self.prompts.append(prompt)
        return found is None


class Chat:
    """A tokenizer with its chat template: prompts and answers to token ids and back.

    Without a template a prompt is plain text and has one turn.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.template: str | None = getattr(tokenizer, "chat_template", None)

    @property
    def template_sha256(self) -> str:
        """Names the template in a manifest; that of no template is the hash of an empty text."""
        return hashlib.sha256((self.template or "").encode()).hexdigest()

    def encode(self, conversations: Sequence[tuple[Prompt, Sequence[str]]]) -> list[list[int]]:
        """Token ids of (prompt, answers so far): up to the place where the next answer begins.

        Raises: ValueError for several turns or a system text without a chat template.
        """
        if not conversations:
            return []
        texts = [self._text(prompt, answers) for prompt, answers in conversations]
        return [list(ids) for ids in self.tokenizer(texts, add_special_tokens=not self.template)["input_ids"]]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of an answer, without special tokens."""
        return str(self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def user_opening(self) -> tuple[list[int], int]:
        """Token ids up to where a user's first turn begins, the default system turn included, and the token that
        ends the turn.

        Raises: ValueError where the template has no such place.
        """
        mark = "\u2603user\u2603"
        before, found, after = self._text(Prompt((mark,)), ()).partition(mark) if self.template else ("", "", "")
        closing = self.tokenizer(after, add_special_tokens=False)["input_ids"] if found else []
        if not before or not closing or closing[0] not in self.tokenizer.all_special_ids:
            raise ValueError(
                "self-prompts: the tokenizer must have a chat template that opens a user's turn and closes it with a "
                f"special token, got {'no template' if not self.template else repr(before + found + after)}"
            )
        return list(self.tokenizer(before, add_special_tokens=False)["input_ids"]), int(closing[0])

    def _text(self, prompt: Prompt, answers: Sequence[str]) -> str:
        if not self.template:
            if len(prompt.turns) > 1 or prompt.system:
                raise ValueError("prompts: several turns and system texts need a chat template, got none")
            return prompt.turns[0]
        messages = [{"role": "system", "content": prompt.system}] if prompt.system else []
        for turn, answer in zip(prompt.turns, [*answers, None], strict=False):
            messages.append({"role": "user", "content": turn})
            if answer is not None:
                messages.append({"role": "assistant", "content": answer})
        text = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        return str(text)
