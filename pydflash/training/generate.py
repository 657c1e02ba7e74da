"""Plain decoding of thousands of prompts at once: what training data is made with.

Rows are independent and keep their own length, temperature and random stream. A row that is finished gets the next
prompt; on a GPU every step is one replay of a captured graph, and the host looks at the rows only every few steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..ops.reference import TARGET, uniform
from ..sampling import SamplingParams
from ..target.batch import KEY_STEP, BatchForward
from ..target.generic import Target

NUCLEUS = 1024  # top-p looks for its tokens among this many best ones
LOOP = 20  # tokens that a run of one token or of a repeated n-gram must reach to count as a loop
_PREFILL_TOKENS = 32768
_SMALLEST = 32  # rows of the smallest graph
_BLOCK = 128  # ids whose weights are summed together when a token is drawn


class BatchRequest(NamedTuple):
    """One text to continue. key: anything, handed back; seed: 64 bits, signed."""

    key: Any
    ids: Sequence[int]
    temperature: float
    seed: int


class Response(NamedTuple):
    """A finished text. ids: int32 [n], the prompt first, a stop token included; finish_reason: "stop" or "length"."""

    request: BatchRequest
    ids: np.ndarray
    finish_reason: str
    loops: bool


@dataclass(slots=True)
class _Rows:
    """State on the device, one entry per row; a step only ever changes these tensors in place."""

    text: Tensor  # [B, capacity + 1]; rows that are not alive write their useless token behind their text
    total: Tensor  # [B] tokens in the text
    limit: Tensor  # [B] tokens at which it ends
    alive: Tensor  # [B] bool
    temperature: Tensor  # [B] float32
    seed: Tensor  # [B] int64

    @classmethod
    def empty(cls, rows: int, capacity: int, device: torch.device) -> _Rows:
        def zeros(dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.zeros(rows, *shape, dtype=dtype, device=device)

        whole = torch.int64
        text, total, limit = zeros(whole, capacity + 1), zeros(whole), zeros(whole)
        return cls(text, total, limit, zeros(torch.bool), zeros(torch.float32), zeros(whole))

    def tensors(self) -> list[Tensor]:
        return [self.text, self.total, self.limit, self.alive, self.temperature, self.seed]


class BatchGenerator:
    """Continues texts with a target, `batch_size` at a time.

    Args:
        target: Any target made of attention layers; greedy rows get its argmax, others a draw from its law.
        batch_size: Rows in flight.
        capacity: The longest text, prompt and response together.
        max_new_tokens: Longest response.
        stop_token_ids: Tokens that end a response; they stay in it.
        sampling: top_k, top_p and min_p of the rows with a temperature (its own temperature is not read).
            Top-p is looked up among the 1,024 best tokens, min-p alone is the fastest filter.
        attention: See `BatchForward`.
        graphs: Capture the step as CUDA graphs; False runs it eagerly, as on a CPU.
        sync_every: Steps between two looks at the rows.
    """

    def __init__(
        self,
        target: Target,
        *,
        batch_size: int,
        capacity: int,
        max_new_tokens: int,
        stop_token_ids: Sequence[int] = (),
        sampling: SamplingParams | None = None,
        attention: str = "auto",
        graphs: bool = True,
        sync_every: int = 16,
    ) -> None:
        if max_new_tokens < 1 or sync_every < 1:
            raise ValueError(
                f"BatchGenerator: max_new_tokens and sync_every must be at least 1, got {max_new_tokens}, {sync_every}"
            )
        self.forward = BatchForward(target, batch_size, capacity, attention)
        self.capacity, self.max_new_tokens, self.sync_every = capacity, max_new_tokens, sync_every
        self.sampling = SamplingParams() if sampling is None else sampling
        self.device = device = target.device
        self._stops = torch.tensor(sorted(set(stop_token_ids)), dtype=torch.int64, device=device)
        self._rows = _Rows.empty(batch_size, capacity, device)
        self._graphs: dict[tuple[int, int], torch.cuda.CUDAGraph] | None = (
            {} if graphs and device.type == "cuda" else None
        )
        self._pool: Any = torch.cuda.graph_pool_handle() if self._graphs is not None else None
        # The host's view: which rows hold a request, and no fewer tokens than each of them has.
        self._requests: list[BatchRequest | None] = [None] * batch_size
        self._most = np.zeros(batch_size, dtype=np.int64)
        self._size = 0
        self.new_tokens = 0

    def run(self, take: Callable[[int], list[BatchRequest]]) -> Iterator[list[Response]]:
        """Yield what is finished, a list every `sync_every` steps, until nothing is left.

        take: gives up to the asked number of requests; it is asked again after every list, so that a request may
        depend on an earlier response. Prompts must leave room for a token. On a GPU the consumer works while the
        next steps run. Leaving the iteration early drops what is in flight.
        """
        batch = len(self._requests)
        self._requests = [None] * batch
        self._rows.alive.zero_()
        done: Callable[[], list[Response]] | None = None
        while True:
            held = sum(request is not None for request in self._requests)
            # A prefill costs the same launches for one row as for many.
            if batch - held >= max(1, batch // 32):
                self._fill(take(batch - held))
            working = any(request is not None for request in self._requests)
            if working:
                self._shrink()
                self._advance()
            if done is not None:
                yield done()
            elif not working:
                return
            done = self._collect() if working else None

    def _fill(self, requests: list[BatchRequest]) -> None:
        if not requests:
            return
        longest = max(len(request.ids) for request in requests)
        if longest >= self.capacity or min(len(request.ids) for request in requests) == 0:
            raise ValueError(
                f"BatchGenerator: prompts must have 1 to {self.capacity - 1} tokens (room for one more within the "
                f"capacity), got up to {longest}"
            )
        free = [row for row, request in enumerate(self._requests) if request is None]
        requests = sorted(requests, key=lambda request: len(request.ids))
        while requests:
            # The group's last prompt is its longest and gives the width.
            size = len(requests)
            while size > 1 and size * len(requests[size - 1].ids) > _PREFILL_TOKENS:
                size = max(1, min(size - 1, _PREFILL_TOKENS // len(requests[size - 1].ids)))
            self._prefill(requests[:size], free[:size])
            requests, free = requests[size:], free[size:]

    def _prefill(self, requests: list[BatchRequest], places: list[int]) -> None:
        lengths = [len(request.ids) for request in requests]
        ids = np.zeros((len(requests), max(lengths)), dtype=np.int64)
        for row, request in zip(ids, requests, strict=True):
            row[: len(request.ids)] = request.ids
        limits = [min(length + self.max_new_tokens, self.capacity) for length in lengths]
        whole = self._upload(np.stack([places, lengths, limits, [request.seed for request in requests]]))
        text = self._upload(ids)
        rows, state = whole[0], self._rows
        state.text[rows, : text.shape[1]] = text
        state.total[rows], state.limit[rows], state.seed[rows] = whole[1], whole[2], whole[3]
        state.temperature[rows] = self._upload(np.array([request.temperature for request in requests], np.float32))
        state.alive[rows] = True
        if text.shape[1] > 1:  # the last token of a prompt is the first step's input
            self.forward.prefill(text[:, :-1], rows)
        for place, length, request in zip(places, lengths, requests, strict=True):
            self._requests[place], self._most[place] = request, length

    def _upload(self, array: np.ndarray) -> Tensor:
        tensor = torch.from_numpy(array)
        return tensor.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else tensor

    def _shrink(self) -> None:
        """Move the requests into the first rows where half as many rows, or fewer, would hold them all."""
        held = [row for row, request in enumerate(self._requests) if request is not None]
        size = len(self._requests)
        while size > _SMALLEST and len(held) <= -(-size // 2):
            size = max(_SMALLEST, -(-size // 2))
        self._size = size
        source = [row for row in held if row >= size]
        if not source:
            return
        inside = set(held)
        destination = [row for row in range(size) if row not in inside][: len(source)]
        both = self._upload(np.array([source, destination]))
        self.forward.move(both[0], both[1])
        for tensor in self._rows.tensors():
            tensor[both[1]] = tensor[both[0]]
        self._rows.alive[both[0]] = False
        for old, new in zip(source, destination, strict=True):
            self._requests[new], self._requests[old] = self._requests[old], None
            self._most[new] = self._most[old]

    def _advance(self) -> None:
        """Run `sync_every` steps; on a GPU this only launches them."""
        held = [row for row, request in enumerate(self._requests) if request is not None]
        self._most[held] += self.sync_every
        need = min(int(self._most[held].max()), self.forward.capacity)
        keys = self.forward.capacity if self.forward.attention == "flash" else -(-need // KEY_STEP) * KEY_STEP
        size, count = self._size, self.sync_every
        if self._graphs is None:
            for _ in range(count):
                self._step(size, keys)
            return
        if (size, keys) not in self._graphs:
            count -= self._capture(size, keys)
        for _ in range(count):
            self._graphs[size, keys].replay()

    def _capture(self, size: int, keys: int) -> int:
        """Capture the step; returns how many real steps its warm-up has done."""
        stream = torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            self._step(size, keys)
        torch.cuda.current_stream(self.device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"):
                self._step(size, keys)
        except RuntimeError as error:
            raise RuntimeError(
                "BatchGenerator: the model's forward cannot be captured as a CUDA graph (it asks the "
                f"device for a value on the way); run with graphs switched off: {error}"
            ) from error
        if self._graphs is not None:
            self._graphs[size, keys] = graph
        return 1

    @torch.no_grad()
    def _step(self, size: int, keys: int) -> None:
        text, total, limit, alive, temperature, seed = (x[:size] for x in self._rows.tensors())
        # A row that is not alive runs at position 0, where flash attention has nothing to read.
        last = (total - 1).masked_fill(~alive, 0)
        logits = self.forward.step(text.gather(1, last[:, None])[:, 0], last, keys)
        # The slots are a tensor, for a number would be copied to the device, which no graph can capture.
        u = uniform(seed, total, TARGET, torch.zeros_like(total))
        token = draw(logits, temperature, u, self.sampling)
        text.scatter_(1, total[:, None], token[:, None])
        total += alive
        alive &= (total < limit) & ~(token[:, None] == self._stops).any(1)

    def _collect(self) -> Callable[[], list[Response]]:
        """Free the rows that are finished; returns a function that waits for their texts."""
        alive = self._rows.alive.cpu().tolist()
        rows = [i for i, request in enumerate(self._requests) if request is not None and not alive[i]]
        requests = [request for i in rows if (request := self._requests[i]) is not None]
        for i in rows:
            self._requests[i] = None
        if not rows:
            return list
        index = self._upload(np.array(rows))
        text, total = self._rows.text[index], self._rows.total[index]
        starts = self._upload(np.array([len(request.ids) for request in requests]))
        ends = text.gather(1, total[:, None] - 1)
        stopped = (ends == self._stops).any(1)
        numbers = torch.stack([total, stopped.long(), has_loop(text, starts, total).long()])
        numbers, text = (x.to(torch.int32).to("cpu", non_blocking=True) for x in (numbers, text))
        event = torch.cuda.Event() if self.device.type == "cuda" else None
        if event is not None:
            event.record()

        def wait() -> list[Response]:
            if event is not None:
                event.synchronize()
            responses = []
            for request, ids, (length, stop, loops) in zip(requests, text.numpy(), numbers.T.tolist(), strict=True):
                reason = "stop" if stop else "length"
                responses.append(Response(request, ids[:length].copy(), reason, bool(loops)))
                self.new_tokens += length - len(request.ids)
            return responses

        return wait


def draw(logits: Tensor, temperature: Tensor, u: Tensor, sampling: SamplingParams) -> Tensor:
    """One token of each row: the argmax at temperature 0, else the token at `u` of the row's cumulative law.

    logits: [n, V]; temperature, u: [n] float32, u in [0, 1). Filters in the order top-k, top-p, min-p; tokens that
    tie with the last one kept by top-k or top-p are kept too. Returns [n] int64. Nothing waits for the device.
    """
    top, greedy = logits.max(-1)
    weights = logits.sub(top[:, None].float())  # float32, since one side is
    weights = weights.div_(temperature.masked_fill(temperature <= 0, 1.0)[:, None]).exp_()
    if sampling.top_k or sampling.top_p < 1:
        weights = weights.masked_fill_(weights < _threshold(weights, sampling)[:, None], 0.0)
    if sampling.min_p > 0:
        weights = torch.threshold_(weights, sampling.min_p * (1 - 1e-6), 0.0)
    vocab = weights.shape[-1]
    if vocab % _BLOCK:
        weights = torch.nn.functional.pad(weights, (0, -vocab % _BLOCK))
    blocks = weights.unflatten(-1, (-1, _BLOCK))
    # Two levels in float64: one pass over the weights, and a token of weight 0 is never hit by rounding.
    sums = blocks.sum(-1, dtype=torch.float64).cumsum(-1)
    goal = u.double()[:, None] * sums[:, -1:]
    block = torch.searchsorted(sums, goal, right=True).clamp_(max=sums.shape[-1] - 1)
    inside = blocks.gather(1, block[..., None].expand(-1, -1, _BLOCK))[:, 0].double().cumsum(-1)
    before = torch.nn.functional.pad(sums, (1, 0)).gather(1, block)
    place = torch.searchsorted(inside, (goal - before).clamp_(min=0), right=True).clamp_(max=_BLOCK - 1)
    sampled = (block * _BLOCK + place)[:, 0]
    return torch.where(temperature > 0, sampled, greedy)


def _threshold(weights: Tensor, sampling: SamplingParams) -> Tensor:
    """The smallest weight [n] that top-k and top-p keep."""
    vocab = weights.shape[-1]
    best = weights.topk(min(sampling.top_k or NUCLEUS, vocab)).values
    if sampling.top_p >= 1:
        return best[:, -1]
    mass = best.sum(-1) if sampling.top_k else weights.sum(-1)
    before = best.cumsum(-1) - best
    kept = (before < sampling.top_p * mass[:, None]).sum(-1, keepdim=True).clamp_(min=1)
    return best.gather(1, kept - 1)[:, 0]


def has_loop(text: Tensor, starts: Tensor, ends: Tensor) -> Tensor:
    """Whether a response degenerates: one token 20 times in a row, or an n-gram of up to 20 tokens repeated in a row,
    three times at least and over 20 tokens or more.

    text: [n, L] ids; the response of row i is text[i, starts[i]:ends[i]]. Returns [n] bool.
    """
    n, length = text.shape
    place = torch.arange(length, device=text.device)
    found = torch.zeros(n, dtype=torch.bool, device=text.device)
    for period in range(1, min(LOOP, length - 1) + 1):
        at = place[period:]
        equal = text[:, period:] == text[:, :-period]
        equal &= (at - period >= starts[:, None]) & (at < ends[:, None])
        broken = torch.where(equal, 0, at).cummax(-1).values
        # `run` positions equal to those one period before them: run + period tokens of the same n-gram.
        run = (at - torch.maximum(broken, torch.full_like(broken, period - 1))).amax(-1)
        found |= run + period >= max(LOOP, 3 * period)
    return found
