"""What has to be answered to make training data, and how: settings, and the queue of prompts."""

from __future__ import annotations

import hashlib
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from ..sampling import SamplingParams
from ..target.generic import Target
from .generate import BatchRequest, Response
from .prompts import Chat, Prompt, PromptSet
from .shards import Record, ShardWriter


@dataclass(frozen=True, slots=True)
class DataSettings:
    """How training data is made.

    Attributes:
        max_new_tokens: Longest response.
        max_prompt_tokens: Prompts longer than this, under the chat template, are left out.
        samples_per_prompt: Responses to each prompt, at most one of them greedy.
        temperatures: Shared out evenly over the prompts; one that stands there twice gets twice its share.
        top_k, top_p, min_p: Filters of the rows with a temperature; 0, 1 and 0 switch them off.
        seed: Each response has a random stream of its own, made from this, its prompt and its number.
        self_prompts: Prompts that the target writes itself.
        self_prompt_tokens: Longest text of those.
        self_temperature: What they are sampled at, with the same filters.
        drop_capped: Leave out responses that reach `max_new_tokens`; else they are kept as they are.
        drop_loops: Leave out responses that repeat themselves (see `generate.has_loop`).
        batch_size: Rows in flight; None is 2048 on a GPU and 16 elsewhere.
        attention, graphs, sync_every: See `generate.BatchGenerator`.
        shard_tokens: Tokens of a shard, about.
        time_limit: Seconds after which the run stops with what it has; responses in flight are lost then.
    """

    max_new_tokens: int = 512
    max_prompt_tokens: int = 512
    samples_per_prompt: int = 1
    temperatures: tuple[float, ...] = (0.0, 0.8, 1.0)
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.03
    seed: int = 0
    self_prompts: int = 0
    self_prompt_tokens: int = 256
    self_temperature: float = 1.0
    drop_capped: bool = False
    drop_loops: bool = False
    batch_size: int | None = None
    attention: str = "auto"
    graphs: bool = True
    sync_every: int = 16
    shard_tokens: int = 2_000_000
    time_limit: float | None = None

    def __post_init__(self) -> None:
        least = dict.fromkeys(("max_new_tokens", "max_prompt_tokens", "samples_per_prompt", "self_prompt_tokens"), 1)
        least |= {"shard_tokens": 1, "sync_every": 1, "batch_size": 1, "self_prompts": 0}
        for name, low in least.items():
            value = getattr(self, name)
            if value is not None and value < low:
                raise ValueError(f"training data: {name} must be at least {low}, got {value}")
        if self.time_limit is not None and not 0 <= self.time_limit < float("inf"):
            raise ValueError(f"training data: time_limit must be a number of seconds, got {self.time_limit}")
        if not self.temperatures:
            raise ValueError("training data: temperatures must name one at least, got none")
        if self.samples_per_prompt > 1 and not any(self.temperatures):
            raise ValueError(
                "training data: samples_per_prompt must be 1 with temperature 0 alone (its responses are the same), "
                f"got {self.samples_per_prompt}"
            )
        if not self.self_temperature > 0:
            raise ValueError(f"training data: self_temperature must be above 0, got {self.self_temperature}")
        for temperature in (*self.temperatures, self.self_temperature):
            SamplingParams(temperature, self.top_k, self.top_p, self.min_p)

    @property
    def sampling(self) -> SamplingParams:
        return SamplingParams(1.0, self.top_k, self.top_p, self.min_p)

    def of_prompt(self, prompt: Prompt) -> list[float]:
        """The temperature of each sample of a prompt."""
        found: list[float] = []
        at = prompt.key
        while len(found) < self.samples_per_prompt:
            temperature = self.temperatures[at % len(self.temperatures)]
            at += 1
            if temperature > 0 or 0.0 not in found:
                found.append(temperature)
        return found

    def rows(self, device: torch.device) -> int:
        """Rows in flight on a device."""
        return self.batch_size or (2048 if device.type == "cuda" else 16)


def number_of(*parts: object) -> int:
    """A signed 64-bit number made from the parts."""
    content = "/".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "big", signed=True)


@dataclass(slots=True)
class Job:
    """One sample of a prompt; a prompt of several turns is answered turn by turn."""

    key: int
    prompt: Prompt
    temperature: float
    answers: list[str] = field(default_factory=list)
    records: list[Record] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)


class Jobs:
    """What is still to be answered, in a random order that does not depend on the run."""

    def __init__(
        self, chat: Chat, writer: ShardWriter, usable: PromptSet, settings: DataSettings, target: Target
    ) -> None:
        self._chat, self._writer, self._settings = chat, writer, settings
        self._longest = settings.max_prompt_tokens
        if target.max_length is not None:
            self._longest = min(self._longest, target.max_length - 1)
        found: list[tuple[Job, list[int]]] = []
        encoded = chat.encode([(prompt, ()) for prompt in usable.prompts])
        for prompt, ids in zip(usable.prompts, encoded, strict=True):
            if len(ids) > self._longest:
                usable.counts["too_long"] += 1
                continue
            for sample, temperature in enumerate(settings.of_prompt(prompt)):
                key = number_of(prompt.key, sample)
                if key not in writer.done:
                    found.append((Job(key, prompt, temperature), ids))
        self.left = len(found)
        several = any(len(job.prompt.turns) > 1 for job, _ in found)
        longest = self._longest if several else max((len(ids) for _, ids in found), default=1)
        self.capacity = longest + settings.max_new_tokens
        if target.max_length is not None:
            self.capacity = min(self.capacity, target.max_length)
        found.sort(key=lambda pair: pair[0].key)
        # Neighbours of like length share a prefill with little padding.
        window = 2 * settings.rows(target.device)
        parts = [sorted(found[i : i + window], key=lambda pair: len(pair[1])) for i in range(0, len(found), window)]
        self._waiting = deque(self._request(job, ids) for part in parts for job, ids in part)

    def take(self, n: int) -> list[BatchRequest]:
        return [self._waiting.popleft() for _ in range(min(n, len(self._waiting)))]

    def receive(self, response: Response) -> None:
        """Keep or drop a response, and ask the next turn where there is one."""
        job: Job = response.request.key
        settings, start = self._settings, len(response.request.ids)
        capped = response.finish_reason == "length"
        job.counts["capped"] += capped
        job.counts["loops"] += response.loops
        if len(response.ids) - start < 2 and not capped:
            job.counts["dropped_empty"] += 1
        elif response.loops and settings.drop_loops:
            job.counts["dropped_loops"] += 1
        elif capped and settings.drop_capped:
            job.counts["dropped_capped"] += 1
        else:
            job.records.append(Record(response.ids, start, job.temperature))
            job.answers.append(self._chat.decode(response.ids[start:].tolist()))
            # After a cut or looping answer a conversation would go on in a way that no user sees.
            if len(job.answers) < len(job.prompt.turns) and not capped and not response.loops:
                ids = self._chat.encode([(job.prompt, job.answers)])[0]
                if len(ids) <= self._longest:
                    self._waiting.appendleft(self._request(job, ids))
                    return
                job.counts["turns_too_long"] += 1
        self._writer.add(job.key, job.records, +job.counts)
        self.left -= 1

    def _request(self, job: Job, ids: Sequence[int]) -> BatchRequest:
        return BatchRequest(job, ids, job.temperature, number_of(self._settings.seed, job.key, len(job.answers)))
