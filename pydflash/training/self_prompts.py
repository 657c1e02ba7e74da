"""Prompts that the target writes itself: the chat template up to the opening of the user's turn, continued."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ..checkpoints.files import write_file
from ..messages import cut
from .generate import BatchGenerator, BatchRequest, Response
from .prompts import Chat, Prompt, PromptSet

FEWEST_TOKENS = 6
_IN_VAIN = 500  # attempts without a new prompt after which there will be none
_FILE = "self_prompts.jsonl"


class SelfPrompts:
    """Self-written prompts of a folder, kept in a file there so that a run that goes on has the same ones.

    A text is usable if it ends with the token that closes a user's turn, has at least 6 tokens before it, no other
    special token, and is neither a duplicate nor excluded (see `PromptSet`).

    Args:
        folder: Where the file is.
        chat: The target's tokenizer and template.
        usable: Judges the texts; what it takes is added to it.

    Attributes:
        attempts: Texts sampled so far.
        kept: Prompts among them.
    """

    def __init__(self, folder: Path, chat: Chat, usable: PromptSet) -> None:
        self.opening, self.closing = chat.user_opening()
        self._chat, self._usable, self._path = chat, usable, folder / _FILE
        self._lines: list[dict[str, Any]] = []
        self.attempts = 0
        if self._path.exists():
            try:
                lines = [json.loads(line) for line in self._path.read_text(encoding="utf-8").split("\n") if line]
                self.attempts = int(lines[0]["attempts"])
                prompts = [Prompt((str(line["prompt"]),)) for line in lines[1:]]
            except (ValueError, KeyError, IndexError, TypeError, RecursionError) as error:
                said = cut(f"{type(error).__name__}: {error}")
                raise ValueError(
                    f"train data: {self._path} must be as it was written, it is damaged ({said})"
                ) from error
            self._lines = [line for line, prompt in zip(lines[1:], prompts, strict=True) if usable.add(prompt)]

    @property
    def kept(self) -> int:
        return len(self._lines)

    @property
    def stop_token_ids(self) -> Sequence[int]:
        """Any special token ends a text; only the closing one makes it usable."""
        return sorted({self.closing, *self._chat.tokenizer.all_special_ids})

    def write(
        self,
        generator: BatchGenerator,
        count: int,
        temperature: float,
        seed: Callable[[int], int],
        report: Callable[[int], bool],
    ) -> None:
        """Sample texts until there are `count` prompts, or `report` says stop.

        Raises: RuntimeError where hundreds of attempts give nothing new.

        seed: the seed of an attempt. report: gets the number of prompts after every look at the rows; True stops.
        Attempts come in rounds whose texts are judged in their own order, so the prompts of a finished run do not
        depend on the batch size, and short ones, which are ready first, are not preferred.
        """
        stopped, in_vain = False, 0
        while self.kept < count and not stopped:
            share = max(self.kept / self.attempts, 0.02) if self.attempts else 0.9
            size = int((count - self.kept) / share * 1.02) + 8
            numbers = iter(range(self.attempts, self.attempts + size))
            take = partial(self._requests, numbers, temperature, seed)
            texts: dict[int, Response] = {}
            for responses in generator.run(take):
                texts.update({response.request.key: response for response in responses})
                if stopped := report(min(count - 1, self.kept + round(len(texts) * share))):
                    break
            self.attempts += size
            before = self.kept
            for attempt in sorted(texts):
                if self.kept < count:
                    self._judge(attempt, texts[attempt])
            self._save()
            in_vain = in_vain + size if self.kept == before else 0
            if in_vain > _IN_VAIN and not stopped:
                raise RuntimeError(
                    f"self-prompts: the target must write usable prompts, got {self.kept} new ones of {count} in "
                    f"{self.attempts} attempts, and none in the last {in_vain}"
                )
            stopped = stopped or report(self.kept)

    def _requests(
        self, numbers: Iterator[int], temperature: float, seed: Callable[[int], int], n: int
    ) -> list[BatchRequest]:
        return [BatchRequest(i, self.opening, temperature, seed(i)) for i in itertools.islice(numbers, n)]

    def _judge(self, attempt: int, response: Response) -> None:
        ids = response.ids[len(self.opening) :].tolist()
        if ids[-1] != self.closing or len(ids) <= FEWEST_TOKENS or response.loops:
            self._usable.counts["self_unusable"] += 1
            return
        text = self._chat.decode(ids[:-1]).strip()
        if "\ufffd" not in text and self._usable.add(Prompt((text,))):
            self._lines.append({"attempt": attempt, "prompt": text})

    def _save(self) -> None:
        lines = [{"attempts": self.attempts}, *self._lines]
        content = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
        write_file(self._path, lambda path: path.write_text(content, encoding="utf-8"))
