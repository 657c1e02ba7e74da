"""Training data: prompt files, what is kept out of them, shards, and runs that are cut off and go on."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tiny_models import TINY, VOCAB
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from pydflash.target.generic import Target
from pydflash.text import encode
from pydflash.training import data
from pydflash.training.generate import Response
from pydflash.training.jobs import DataSettings, Jobs
from pydflash.training.prompts import Chat, Exclusion, Prompt, PromptSet, read_prompts, read_texts
from pydflash.training.shards import Record, ShardReader, ShardWriter

END, TURN = VOCAB - 2, VOCAB - 1
TEMPLATE = (
    "{% if messages[0]['role'] != 'system' %}<turn>s be kind<end>{% endif %}"
    "{% for m in messages %}<turn>{{ m['role'][0] + ' ' + m['content'] }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<turn>a {% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """One token for each printable ASCII character, an end and a turn token: the vocabulary of the tiny models."""
    letters = ["Ġ", *(chr(i) for i in range(33, 127))]
    plain = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    plain.decoder = decoders.ByteLevel()
    plain.add_special_tokens(["<end>", "<turn>"])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=plain,
        eos_token="<end>",
        additional_special_tokens=["<turn>"],
        chat_template=TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


@pytest.fixture(scope="module")
def target() -> Target:
    """A model whose law is flat enough to end a text now and then."""
    model = TINY["llama"](num_hidden_layers=2)
    with torch.no_grad():
        model.lm_head.weight *= 0.05
    return Target(model)


def test_prompt_files(tmp_path: Path) -> None:
    files = {
        "a.txt": "one two\n\n three \n",
        "b.jsonl": '{"prompt": "p\u2028q"}\n{"question": "q?", "text": "no"}\n"plain"\n',
        "c.json": json.dumps(
            [
                {"messages": [{"role": r, "content": r[0]} for r in ("system", "user", "assistant", "user")]},
                {"conversations": [{"from": "human", "value": "h"}, {"from": "gpt", "value": "g"}]},
                {"turns": ["t1", "t2"]},
            ]
        ),
    }
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    assert read_prompts(tmp_path / "a.txt") == [Prompt(("one two",)), Prompt(("three",))]
    assert [p.turns for p in read_prompts(tmp_path / "b.jsonl")] == [("p\u2028q",), ("q?",), ("plain",)]
    assert read_prompts(tmp_path / "c.json") == [Prompt(("u", "u"), "s"), Prompt(("h",)), Prompt(("t1", "t2"))]
    assert read_texts(tmp_path / "c.json")[-2:] == ["t1", "t2"]
    for content, message in (
        ('{"id": 3}', "record 1 must have one of messages"),
        ('{"messages": [{"role": "tool", "content": "x"}]}', "each turn must be a text or have a role"),
        ('{"messages": [{"role": "assistant", "content": "x"}]}', "must have a user turn"),
        ('{"prompt": 5}', "prompt must be a text or a list of turns, got 5"),
        ('{"' + "x" * 10**6 + '": 1}', "must have one of messages"),
        ("{", "must be JSON"),
        ("[" * 200_000, "must be JSON"),
        ("caf\xe9", "must be JSON"),
    ):
        (tmp_path / "bad.jsonl").write_bytes(content.encode("latin-1"))
        with pytest.raises(ValueError, match=rf"bad\.jsonl.* {message}") as caught:
            read_prompts(tmp_path / "bad.jsonl")
        assert len(str(caught.value)) < 700
    (tmp_path / "bad.txt").write_bytes(b"caf\xe9")
    with pytest.raises(ValueError, match=r"bad\.txt must be UTF-8"):
        read_prompts(tmp_path / "bad.txt")
    with pytest.raises(ValueError, match=r"must come from an existing file, got .*a\.csv"):
        read_prompts(tmp_path / "a.csv")
    (tmp_path / "a.csv").touch()
    with pytest.raises(ValueError, match=r"must end in \.txt"):
        read_prompts(tmp_path / "a.csv")


def test_parquet_files(tmp_path: Path) -> None:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        (tmp_path / "a.parquet").touch()
        with pytest.raises(ImportError, match=r"needs pyarrow"):
            read_prompts(tmp_path / "a.parquet")
        return
    pyarrow.parquet.write_table(pyarrow.table({"prompt": ["a", "b"]}), tmp_path / "a.parquet")
    assert [p.turns for p in read_prompts(tmp_path / "a.parquet")] == [("a",), ("b",)]


def test_exclusion_and_duplicates() -> None:
    long = " ".join(f"w{i}" for i in range(30))
    usable = PromptSet(Exclusion([long, "How do I save a lot of time?", "Name it."]))
    fates = {
        "ok": "kept",
        "OK!": "duplicate",
        "how do i SAVE a lot of time": "excluded_exact",
        "Tell me: how do I save a lot of time? Thanks": "excluded_near",
        "name it": "excluded_exact",
        "Please name it now": "kept",
        "x " + " ".join(long.split()[5:18]) + " y": "excluded_near",
        " ".join(long.split()[5:17]): "kept",
        "?!": "empty",
    }
    assert {text: usable.add(Prompt((text,))) for text in fates} == {k: v == "kept" for k, v in fates.items()}
    assert usable.counts == Counter(fates.values()) + Counter(read=len(fates))
    assert not usable.add(Prompt(("fine", "how do i save a lot of time?")))


def test_chat_encodes_as_serving_does(tokenizer: Any) -> None:
    chat = Chat(tokenizer)
    one, two = Prompt(("hello",)), Prompt(("a", "b"), "sys")
    ids = chat.encode([(one, ()), (two, ["c"])])
    turns = (("system", "sys"), ("user", "a"), ("assistant", "c"), ("user", "b"))
    messages = [{"role": role, "content": content} for role, content in turns]
    assert ids == [encode("hello", tokenizer, None, VOCAB), encode(messages, tokenizer, None, VOCAB)]
    opening, closing = chat.user_opening()
    assert (tokenizer.decode(opening), closing) == ("<turn>s be kind<end><turn>u ", END)


def test_shards_round_trip_and_resume(tmp_path: Path) -> None:
    identity = {"target": {"class": "X"}, "sampling": {"seed": 0}}
    records = [Record(np.arange(n, dtype=np.int32), n // 2, n / 10) for n in range(3, 9)]
    with ShardWriter(tmp_path, identity, shard_tokens=10) as writer:
        for key, record in enumerate(records):
            writer.add(key, [record], Counter(capped=1))
        writer.add(99, [], Counter(dropped_loops=1))
        with pytest.raises(ValueError, match="key must be a new one"):
            writer.add(99, [], Counter())
        with pytest.raises(RuntimeError, match="another process"):
            ShardWriter(tmp_path, identity)
    reader = ShardReader(tmp_path, verify=True)
    assert [(ids.tolist(), n) for ids, n in reader] == [(list(range(n)), n // 2) for n in range(3, 9)]  # type: ignore[attr-defined]
    assert reader[0][0].dtype == torch.int64
    assert [round(reader.temperature(i), 4) for i in range(6)] == [r.temperature for r in records]
    counts = {"capped": 6, "dropped_loops": 1}
    totals = {"prompts": 7, "records": 6, "tokens": 33, "response_tokens": 18, "counts": counts}
    assert reader.manifest["totals"] == totals
    assert len(reader.manifest["shards"]) == 3
    (tmp_path / "shard-00003.safetensors").write_bytes(b"what a killed run has left")
    with ShardWriter(tmp_path, identity) as writer:
        assert writer.done == {*range(6), 99}
        writer.add(7, records[:2], Counter())
    assert len(ShardReader(tmp_path, verify=True)) == 8
    with pytest.raises(ValueError, match=r"sampling\.seed must be 0 .* got 1"):
        ShardWriter(tmp_path, {**identity, "sampling": {"seed": 1}})
    (tmp_path / "shard-00001.safetensors").write_bytes(b"broken")
    with pytest.raises(ValueError, match="must be as its manifest says"):
        ShardReader(tmp_path, verify=True)


def test_temperatures_are_shared_out() -> None:
    settings = DataSettings(temperatures=(0.0, 0.0, 0.8, 1.0), samples_per_prompt=3)
    picks = [settings.of_prompt(Prompt((f"prompt {i}",))) for i in range(400)]
    assert all(sorted(set(p)) == [0.0, 0.8, 1.0] or (p.count(0.0) == 1 and len(p) == 3) for p in picks)
    first = Counter(p[0] for p in picks)
    assert first[0.0] == pytest.approx(200, abs=50)
    with pytest.raises(ValueError, match="samples_per_prompt must be 1"):
        DataSettings(temperatures=(0.0,), samples_per_prompt=2)
    for name, value in (("batch_size", 0), ("sync_every", 0), ("self_prompts", -1), ("time_limit", float("nan"))):
        with pytest.raises(ValueError, match=f"training data: {name} must be"):
            DataSettings(**{name: value})  # type: ignore[arg-type]


QUICK = DataSettings(
    max_new_tokens=10,
    batch_size=6,
    sync_every=2,
    samples_per_prompt=2,
    min_p=0.0,
    temperatures=(0.0, 1.0),
    shard_tokens=60,
)


def prompt_set(count: int = 9, exclusion: Exclusion | None = None) -> PromptSet:
    usable = PromptSet(exclusion or Exclusion())
    for i in range(count):
        usable.add(Prompt((f"p{i}",) if i else ("first", "then", "last")))
    return usable


def records_of(folder: Path) -> list[tuple[list[int], int, float]]:
    reader = ShardReader(folder, verify=True)
    return sorted((reader[i][0].tolist(), reader[i][1], reader.temperature(i)) for i in range(len(reader)))


class Killed(BaseException):
    """Stands for a signal that leaves no time to clean up."""


def test_a_killed_run_goes_on(tmp_path: Path, target: Target, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = data.make_data(target, tokenizer, tmp_path / "whole", prompt_set(), QUICK)
    cut = tmp_path / "cut"
    answered = Jobs.receive
    for kill_at in (9, 5):
        seen: list[Response] = []

        def receive(self: Jobs, response: Response, seen: list[Response] = seen, kill_at: int = kill_at) -> None:
            seen.append(response)
            if len(seen) > kill_at:
                raise Killed
            answered(self, response)

        with monkeypatch.context() as patch:
            patch.setattr(Jobs, "receive", receive)
            patch.setattr(ShardWriter, "__exit__", lambda self, *_: self._lock.close())
            with pytest.raises(Killed):
                data.make_data(target, tokenizer, cut, prompt_set(), QUICK)
        assert 0 < len(ShardReader(cut, verify=True)) < 18
    manifest = data.make_data(target, tokenizer, cut, prompt_set(), QUICK)
    assert records_of(cut) == records_of(tmp_path / "whole")
    assert manifest["totals"] == whole["totals"]
    assert manifest["totals"]["prompts"] == 18
    again = data.make_data(target, tokenizer, cut, prompt_set(), QUICK)
    assert again["totals"] == manifest["totals"]
    with pytest.raises(ValueError, match=r"sampling\.max_new_tokens must be 10 "):
        data.make_data(target, tokenizer, cut, prompt_set(), replace(QUICK, max_new_tokens=11))
    other = Target(TINY["llama"](num_hidden_layers=2, seed=1))
    with pytest.raises(ValueError, match=r"target\.weights_sha256 must be"):
        data.make_data(other, tokenizer, cut, prompt_set(), QUICK)


def test_records_are_what_the_target_answers(tmp_path: Path, target: Target, tokenizer: Any) -> None:
    settings = replace(QUICK, samples_per_prompt=1, temperatures=(0.0,), max_new_tokens=24)
    model = TINY["llama"](num_hidden_layers=2, seed=2)
    stops = [*range(5), END]
    model.generation_config.eos_token_id = stops
    data.make_data(Target(model), tokenizer, tmp_path, prompt_set(10), settings)
    found = records_of(tmp_path)
    ends = 0
    for ids, prompt_length, _ in found:
        prompt = torch.tensor([ids[:prompt_length]])
        how = {"do_sample": False, "max_new_tokens": 24, "pad_token_id": END}
        want = model.generate(prompt, attention_mask=torch.ones_like(prompt), **how)
        assert ids == want[0].tolist()
        ends += ids[-1] in stops
    assert 0 < ends < len(found)


class Sink:
    """A writer that only remembers."""

    def __init__(self) -> None:
        self.done: set[int] = set()
        self.records: list[Record] = []
        self.counts: Counter[str] = Counter()

    def add(self, key: int, records: list[Record], counts: Counter[str]) -> None:
        self.records, self.counts = records, counts


def test_conversations_go_on_from_their_own_answers(target: Target, tokenizer: Any) -> None:
    sink, chat = Sink(), Chat(tokenizer)
    settings = replace(QUICK, samples_per_prompt=1, max_prompt_tokens=200)
    queue = Jobs(chat, sink, prompt_set(1), settings, target)  # type: ignore[arg-type]
    for answer in ("yes", "no", "ok"):
        (request,) = queue.take(5)
        assert not queue.take(5)
        ids = np.array([*request.ids, *tokenizer(answer)["input_ids"], END], np.int32)
        queue.receive(Response(request, ids, "stop", False))
    want = chat.encode([(Prompt(("first", "then", "last")), ["yes", "no"])])[0]
    assert (queue.left, len(sink.records)) == (0, 3)
    assert sink.records[2].ids[: sink.records[2].prompt_length].tolist() == want


@pytest.mark.parametrize("drop", [False, True])
def test_capped_and_looping_answers_are_counted(target: Target, tokenizer: Any, drop: bool) -> None:
    settings = replace(QUICK, samples_per_prompt=1, drop_capped=drop, drop_loops=drop)
    for reason, loops in (("stop", True), ("length", False), ("stop", False)):
        sink = Sink()
        queue = Jobs(Chat(tokenizer), sink, prompt_set(1), settings, target)  # type: ignore[arg-type]
        (request,) = queue.take(1)
        queue.receive(Response(request, np.array([*request.ids, 1, 2], np.int32), reason, loops))
        bad = {"dropped_loops": loops, "dropped_capped": reason == "length"} if drop else {}
        assert sink.counts == {k: 1 for k, v in (bad | {"loops": loops, "capped": reason == "length"}).items() if v}
        assert len(queue.take(1)) == (reason == "stop" and not loops)  # the conversation's next turn
        assert len(sink.records) == (not drop and (loops or reason == "length"))


def test_the_time_limit_leaves_a_valid_folder(tmp_path: Path, target: Target, tokenizer: Any) -> None:
    manifest = data.make_data(target, tokenizer, tmp_path, prompt_set(), replace(QUICK, time_limit=0.0))
    assert manifest["last_run"]["prompts_left"] > 0
    assert len(ShardReader(tmp_path, verify=True)) == manifest["totals"]["records"] < 18
    data.make_data(target, tokenizer, tmp_path, prompt_set(), QUICK)
    assert ShardReader(tmp_path).manifest["totals"]["prompts"] == 18


def test_self_written_prompts(tmp_path: Path, tokenizer: Any) -> None:
    """The same prompts whatever the batch size; a folder keeps those it has."""
    model = TINY["llama"](num_hidden_layers=2, seed=3)
    with torch.no_grad():
        model.lm_head.weight *= 0.02
    target = Target(model)
    settings = replace(
        QUICK, self_prompts=4, self_prompt_tokens=40, samples_per_prompt=1, max_new_tokens=2, temperatures=(1.0,)
    )
    texts = []
    for name, batch in (("a", 5), ("b", 32)):
        data.make_data(target, tokenizer, tmp_path / name, prompt_set(1), replace(settings, batch_size=batch))
        lines = [json.loads(line) for line in (tmp_path / name / "self_prompts.jsonl").read_text().splitlines()]
        texts.append([line["prompt"] for line in lines[1:]])
    assert texts[0] == texts[1]
    assert len(set(texts[0])) == 4
    assert all(len(tokenizer(text)["input_ids"]) < 40 for text in texts[0])
    usable = prompt_set(1, Exclusion(texts[0][:1]))
    data.make_data(target, tokenizer, tmp_path / "a", usable, replace(settings, self_prompts=5))
    assert usable.counts["excluded_exact"] == 1
    assert {p.turns[0] for p in usable.prompts[1:]} > set(texts[0][1:])
    assert len(usable.prompts) == 6
    for damaged in ("", "{}\n", "[" * 200_000, '{"attempts": 3}\n{"prom'):
        (tmp_path / "a" / "self_prompts.jsonl").write_text(damaged)
        with pytest.raises(ValueError, match=r"train data: .*self_prompts\.jsonl must be as it was written"):
            data.make_data(target, tokenizer, tmp_path / "a", prompt_set(1), replace(settings, self_prompts=6))


def test_the_command(tmp_path: Path, target: Target, tokenizer: Any, capsys: pytest.CaptureFixture[str]) -> None:
    target.model.save_pretrained(tmp_path / "target")
    tokenizer.save_pretrained(tmp_path / "target")
    (tmp_path / "prompts.txt").write_text("hello\nHELLO!\nwhat is this about here?\nbye\n")
    (tmp_path / "eval.jsonl").write_text('{"id": 1, "prompt": "What is this about here"}\n')
    parser = argparse.ArgumentParser()
    data.add_arguments(parser)
    command = (
        f"{tmp_path / 'target'} --out {tmp_path / 'out'} --prompts {tmp_path / 'prompts.txt'} --device cpu "
        f"--exclude {tmp_path / 'eval.jsonl'} --max-new-tokens 5 --temperatures 0,0.8,1.0 --batch-size 2 --top-p 0.9"
    )
    assert data.run(parser.parse_args(command.split())) == 0
    manifest = ShardReader(tmp_path / "out").manifest
    assert manifest["prompts"] == {"duplicate": 1, "excluded_exact": 1, "kept": 2, "read": 4}
    assert (manifest["totals"]["records"], manifest["sampling"]["top_p"]) == (2, 0.9)
    assert manifest["template"]["sha256"] == Chat(tokenizer).template_sha256
    out = capsys.readouterr().err
    assert "1 excluded_exact" in out
    assert "2 of 2 prompts" in out
    with pytest.raises(ValueError, match="prompts must come from"):
        data.run(parser.parse_args([str(tmp_path), "--out", str(tmp_path / "x")]))


@pytest.mark.slow
def test_smollm2_writes_prompts_and_answers(tmp_path: Path) -> None:
    from pydflash.checkpoints.smollm2 import ensure_smollm2

    folder = ensure_smollm2()
    target = Target.from_pretrained(folder, device="cpu", dtype=torch.bfloat16)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    settings = DataSettings(self_prompts=4, self_prompt_tokens=80, max_new_tokens=24, batch_size=8, sync_every=4)
    usable = prompt_set(0)
    manifest = data.make_data(target, tokenizer, tmp_path, usable, settings)
    assert manifest["totals"]["records"] == 4
    assert all(len(prompt.text.split()) >= 3 for prompt in usable.prompts)
    ids, prompt_length = ShardReader(tmp_path)[0]
    assert tokenizer.decode(ids[:prompt_length]).endswith("<|im_start|>assistant\n")
