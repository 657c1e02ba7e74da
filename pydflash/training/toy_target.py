"""The target of `pydflash train toy`: a small language, a tokenizer for it, and a tiny Llama that learns it."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from .progress import Progress
from .prompts import Chat, Prompt

VOCAB = 480
END, PAD, MASK = "<|im_end|>", "<|pad|>", "<|mask|>"
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LETTERS = "abcdefghijklmnopqrstuvwxyz"
ANIMALS = ("fox", "cat", "hare", "crow", "mole", "toad", "wolf", "goat", "lynx", "swan", "bear", "duck")
PLACES = ("river", "hill", "barn", "lake", "wood", "bridge", "field", "tower")
THINGS = ("apples", "stones", "shells", "nuts", "coins", "pears")
LOOKS = ("small", "brave", "quiet", "clever")
ENDS = "They ate until night.", "They went home.", "It slept well."


class Lesson(NamedTuple):
    """What a user says, and an answer to it."""

    prompt: str
    answer: str


def _count(rng: random.Random) -> Lesson:
    start, length, down = rng.randint(1, 30), rng.randint(6, 14), rng.random() < 0.4
    numbers = range(start, start + length)[:: -1 if down else 1]
    task = f"ount {'down' if down else 'up'} from {numbers[0]} to {numbers[-1]}"
    return Lesson(f"C{task}.", f"I c{task}: {', '.join(map(str, numbers))}. Done.")


def _letters(rng: random.Random) -> Lesson:
    start, length = rng.randint(0, 18), rng.randint(5, 12)
    part, back = LETTERS[start : start + length], rng.random() < 0.4
    part = part[::-1] if back else part
    task = f"the letters {'back ' if back else ''}from {part[0]} to {part[-1]}"
    return Lesson(f"Say {task}.", f"I say {task}: after {part[0]} comes {', then '.join(part[1:])}.")


def _sums(rng: random.Random) -> Lesson:
    more, numbers = rng.randint(2, 9), rng.sample(range(1, 30), rng.randint(2, 4))
    task = f"dd {more} to {', '.join(map(str, numbers[:-1]))} and {numbers[-1]}"
    answer = " ".join(f"{n} + {more} = {n + more}." for n in numbers)
    return Lesson(f"A{task}.", f"I a{task}. {answer} The last one is {numbers[-1] + more}.")


def _story(rng: random.Random) -> Lesson:
    hero, friend = rng.sample(ANIMALS, 2)
    thing, place, first, more = rng.choice(THINGS), rng.choice(PLACES), rng.randint(2, 20), rng.randint(2, 9)
    look, end = rng.choices(LOOKS, (4, 3, 2, 1))[0], rng.choices(ENDS, (3, 2, 1))[0]
    task = f"ell of a {hero}, a {friend}, {first} {thing} and the {place}"
    answer = (
        f"I t{task}. A {look} {hero} by the {place} had {first} {thing}. Then the {friend} gave it {more} more. "
        f"{first} + {more} = {first + more}, so the {hero} had {first + more} {thing}. {end}"
    )
    return Lesson(f"T{task}.", answer)


KINDS: tuple[Callable[[random.Random], Lesson], ...] = (_count, _letters, _sums, _story)


def lessons(seed: int, without: Sequence[str] = ()) -> Iterator[Lesson]:
    """Endless lessons of all kinds in turn, none with a prompt of `without`."""
    rng, banned = random.Random(seed), set(without)
    while True:
        for kind in KINDS:
            lesson = kind(rng)
            while lesson.prompt in banned:
                lesson = kind(rng)
            yield lesson


def prompts(count: int, seed: int, without: Sequence[str] = ()) -> list[str]:
    """`count` different prompts of all kinds, none of `without`."""
    found: dict[str, None] = {}
    source = lessons(seed, without)
    while len(found) < count:
        found[next(source).prompt] = None
    return list(found)


def build_tokenizer(texts: Sequence[str], vocab_size: int) -> Any:
    """A byte-level BPE tokenizer trained on `texts`, with a chat template and a token for masked slots."""
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|im_start|>", END, PAD, MASK],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    core.train_from_iterator(texts, trainer)
    tokenizer: Any = transformers.PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token=END, pad_token=PAD, mask_token=MASK
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def build_model(tokenizer: Any, hidden_size: int, num_layers: int, seed: int) -> Any:
    """A Llama with random weights for the tokenizer's vocabulary."""
    import transformers

    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        initializer_range=0.08,  # at so small a width the usual 0.02 learns several times slower
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return transformers.LlamaForCausalLM(config)


def teach(
    model: Any, tokenizer: Any, source: Iterator[Lesson], *, steps: int, batch_size: int, lr: float, progress: Progress
) -> float:
    """Train the model on the answers of `source`, `steps` times `batch_size` of them; returns the last loss."""
    chat, tokens, loss = Chat(tokenizer), 0, torch.zeros(())
    optimizer = torch.optim.AdamW(model.parameters(), lr, betas=(0.9, 0.95), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, steps, pct_start=0.05)
    progress.start("teaching the target", steps, 0)
    model.train()
    for step in range(steps):
        ids, labels = _batch(chat, [next(source) for _ in range(batch_size)])
        logits = model(ids[:, :-1]).logits
        loss = F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        tokens += ids.numel()
        progress.update(step + 1, tokens)
    model.eval()
    return float(loss.detach())


def _batch(chat: Chat, part: Sequence[Lesson]) -> tuple[Tensor, Tensor]:
    """Token ids [B, P], padded on the right, and labels [B, P]: the answers' tokens, -100 elsewhere."""
    openings = chat.encode([(Prompt((lesson.prompt,)), ()) for lesson in part])
    answers = chat.tokenizer([lesson.answer + END for lesson in part], add_special_tokens=False)["input_ids"]
    rows = [torch.tensor([*a, *b]) for a, b in zip(openings, answers, strict=True)]
    labels = [torch.tensor([-100] * len(a) + b) for a, b in zip(openings, answers, strict=True)]
    pad = torch.nn.utils.rnn.pad_sequence
    return pad(rows, True, chat.tokenizer.pad_token_id), pad(labels, True, -100)


def make_target(
    folder: Path,
    without: Sequence[str],
    *,
    hidden_size: int,
    num_layers: int,
    steps: int,
    batch_size: int,
    lr: float,
    seed: int,
    progress: Progress,
) -> float:
    """Teach a new target the language, its prompts `without` apart, and save it with its tokenizer as `folder`.

    The folder appears in one step when everything is in it. Returns the last loss, in nats per answer token.
    """
    source = lessons(seed, without)
    some = [text for _ in range(2000) for text in next(source)]
    numbers = " " + " ".join(map(str, range(50)))  # every number becomes a token of its own
    tokenizer = build_tokenizer([*some, *[numbers] * 300], VOCAB)
    model = build_model(tokenizer, hidden_size, num_layers, seed)
    loss = teach(model, tokenizer, source, steps=steps, batch_size=batch_size, lr=lr, progress=progress)
    part = folder.with_name(folder.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    model.save_pretrained(part)
    for path in part.glob("*.safetensors"):  # safetensors writes for the owner alone
        shutil.copymode(part / "config.json", path)
    tokenizer.save_pretrained(part)
    os.replace(part, folder)
    return loss
