"""Prompts into token ids, and token ids back into text with stop conditions, token by token."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fakes import byte_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken

from pydflash.text import Output, encode, split_prompts

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
USER = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return byte_tokenizer()


def ids_of(text: str) -> list[int]:
    return list(text.encode())


# --- prompts ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "singles", "many"),
    [
        ("hi", ["hi"], False),
        (["hi", "you"], ["hi", "you"], True),
        ([3, 4], [[3, 4]], False),
        ((3, 4), [[3, 4]], False),
        ([[3, 4], [5]], [[3, 4], [5]], True),
        (torch.tensor([3, 4]), [[3, 4]], False),
        (torch.tensor([[3, 4], [5, 6]]), [[3, 4], [5, 6]], True),
        ([torch.tensor([3, 4]), torch.tensor([5])], [[3, 4], [5]], True),
        (USER, [USER], False),
        ([USER, "hi", [7]], [USER, "hi", [7]], True),
        ({"input_ids": [3, 4]}, [[3, 4]], False),
        ({"input_ids": torch.tensor([[3, 4]]), "attention_mask": torch.ones(1, 2, dtype=torch.long)}, [[3, 4]], True),
        ({"input_ids": [[0, 0, 5], [6, 7, 8]], "attention_mask": [[0, 0, 1], [1, 1, 1]]}, [[5], [6, 7, 8]], True),
        ({"input_ids": torch.tensor([5, 6, 0]), "attention_mask": torch.tensor([True, True, False])}, [[5, 6]], False),
    ],
)
def test_what_a_prompt_may_be(prompt: Any, singles: list[Any], many: bool) -> None:
    assert split_prompts(prompt) == (singles, many)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "must be text, messages, token ids or a list of these, got []"),
        (None, "must be text, messages, token ids or a list of these, got None"),
        (b"3", "must be text, messages, token ids or a list of these, got b'3'"),
        (7, "must be text, messages, token ids or a list of these, got 7"),
        ([3, True], "got True|got 3"),
        ([[["a"]]], "must be a list of single prompts, got ['a'] in one"),
        ([{"content": "no role"}], "a mapping must have 'input_ids', got ['content']"),
        (torch.zeros(1, 2, 3, dtype=torch.long), "must be [P] or [B, P] integers, got [1, 2, 3]"),
        (torch.tensor([True, False]), "must be [P] or [B, P] integers, got [2] torch.bool"),
        (torch.zeros(2, dtype=torch.complex64), "must be [P] or [B, P] integers, got [2] torch.complex64"),
        ({"input_ids": [[1, 2], [3, 4]], "attention_mask": [[1, 1]]}, "attention_mask must have the shape"),
        ({"input_ids": [[1, 2]], "attention_mask": [[1]]}, "attention_mask must have the shape"),
        (torch.tensor([1.5, 2.0]), "must be [P] or [B, P] integers, got [2] torch.float32"),
    ],
)
def test_what_a_prompt_may_not_be(prompt: Any, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        split_prompts(prompt)
    assert str(caught.value).startswith("prompt: ")
    assert any(part in str(caught.value) for part in message.split("|"))


def test_the_chat_template_wraps_text_unless_told_otherwise() -> None:
    plain, chat = byte_tokenizer(), byte_tokenizer(TEMPLATE)
    assert encode("hi", plain, None, 257) == ids_of("hi")
    assert encode("hi", chat, None, 257) == ids_of("<user>hi<assistant>")
    assert encode("hi", chat, True, 257) == ids_of("<user>hi<assistant>")
    assert encode("hi", chat, False, 257) == ids_of("hi")
    assert encode(USER, chat, None, 257) == ids_of("<user>hi<assistant>")
    assert encode("hi", plain, "[{{ messages[0]['content'] }}]", 257) == ids_of("[hi]")
    assert encode(USER, chat, "[{{ messages[0]['content'] }}]", 257) == ids_of("[hi]")
    assert encode([104, 105], chat, None, 257) == ids_of("hi")


@pytest.mark.parametrize(
    ("prompt", "with_tokenizer", "template", "message"),
    [
        ("hi", False, None, "prompt: text and messages need a tokenizer"),
        (USER, False, None, "prompt: text and messages need a tokenizer"),
        (USER, True, None, "prompt: messages need a chat template"),
        (USER, True, False, "prompt: messages need a chat template"),
        ("hi", True, True, "chat_template: the tokenizer must have one"),
        ("", True, None, "prompt: must have at least one token, got none"),
        ([3, 97], True, None, "prompt: token ids must be 0 to 96, got 3 to 97"),
        ([-1, 5], False, None, "prompt: token ids must be 0 to 96, got -1 to 5"),
    ],
)
def test_encode_errors(prompt: Any, with_tokenizer: bool, template: Any, message: str, tokenizer: Any) -> None:
    with pytest.raises(ValueError) as caught:
        encode(prompt, tokenizer if with_tokenizer else None, template, 97)
    assert str(caught.value).startswith(message)


# --- output -----------------------------------------------------------------------------------------------------


def feed(output: Output, tokens: list[int], sizes: list[int]) -> list[tuple[list[int], str]]:
    """Give the tokens in blocks of the given sizes, cyclically, until the output has ended."""
    pieces, at, i = [], 0, 0
    while at < len(tokens) and output.finish_reason is None:
        size = sizes[i % len(sizes)]
        pieces.append(output.extend(tokens[at : at + size]))
        at, i = at + size, i + 1
    return pieces


@pytest.mark.parametrize("size", [1, 2, 3, 5, 50])
def test_limits_cut_inside_a_block(size: int, tokenizer: Any) -> None:
    for limit in (1, 4, 5):
        output = Output(tokenizer, limit, [], [])
        feed(output, ids_of("hello world"), [size])
        assert output.token_ids == ids_of("hello world")[:limit]
        assert output.text == "hello world"[:limit]
        assert output.finish_reason == "length"
    assert Output(tokenizer, 0, [], []).finish_reason == "length"


def test_a_stop_token_ends_the_text_and_is_included() -> None:
    tokenizer = byte_tokenizer()
    output = Output(tokenizer, 50, [256], [])
    assert output.extend([*ids_of("abc"), 256, *ids_of("def")]) == ([*ids_of("abc"), 256], "abc")
    assert output.finish_reason == "stop"
    assert output.extend(ids_of("more")) == ([], "")
    assert output.ends_with([])  # it has ended, whatever comes
    assert output.ends_with(ids_of("more"))
    # A stop token that is also the last one allowed is a stop.
    output = Output(tokenizer, 2, [256], [])
    output.extend([97, 256])
    assert output.finish_reason == "stop"


@pytest.mark.parametrize("size", [1, 2, 3, 4, 50])
@pytest.mark.parametrize(
    ("text", "stops", "kept"),
    [
        ("one two three", [" two"], "one two"),
        ("one two three", ["o"], "o"),
        ("one two three", ["three", "tw"], "one tw"),
        ("aaab", ["aab"], "aaab"),
        ("abcabd", ["abd", "zz"], "abcabd"),
        ("xéy", ["éy"], "xéy"),
        ("über", ["ü"], "ü"),
        ("nothing here", ["absent"], "nothing here"),
        ("the end", ["end"], "the end"),
    ],
)
def test_stop_strings_across_tokens_and_blocks(
    text: str, stops: list[str], kept: str, size: int, tokenizer: Any
) -> None:
    """One token is one byte: each stop string spans several tokens, and blocks end inside it."""
    output = Output(tokenizer, 100, [], stops)
    pieces = feed(output, ids_of(text), [size])
    assert output.text == "".join(piece for _, piece in pieces) == kept
    assert output.token_ids == [t for tokens, _ in pieces for t in tokens] == ids_of(kept)
    assert output.finish_reason == ("stop" if any(s in text for s in stops) else None)


def test_text_behind_a_stop_string_in_the_same_token_is_cut() -> None:
    class Words:
        def decode(self, ids: list[int], **_: Any) -> str:
            return "".join(["alpha", "beta", "gamma"][i] for i in ids)

    output = Output(Words(), 10, [], ["abe"])
    assert output.extend([0, 1, 2]) == ([0, 1], "alphabe")
    assert output.finish_reason == "stop"
    # Of two stop strings in one token, the one that ends first.
    output = Output(Words(), 10, [], ["mma", "am"])
    output.extend([2, 0])
    assert output.text == "gam"


@pytest.mark.parametrize("stops", [[], ["never"]])
def test_incomplete_characters_are_held_back(stops: list[str], tokenizer: Any) -> None:
    text = "aé€😀z"
    output = Output(tokenizer, 100, [], stops)
    shown = [output.extend([byte])[1] for byte in text.encode()]
    assert shown == ["a", "", "é", "", "", "€", "", "", "", "😀", "z"]


def test_an_incomplete_character_at_the_end_is_given_out(tokenizer: Any) -> None:
    output = Output(tokenizer, 3, [], [])
    assert output.extend([97, *"😀".encode()[:2]]) == ([97, 0xF0, 0x9F], "a" + tokenizer.decode([0xF0, 0x9F]))
    output = Output(tokenizer, 10, [256], [])
    assert output.extend([0xC3])[1] == ""
    assert output.extend([256])[1] == "�"


@pytest.mark.parametrize("stops", [[], ["absent"]])
def test_spaces_between_pieces_stay(stops: list[str]) -> None:
    """A tokenizer that drops the space before the first piece it is given, as SentencePiece ones do."""

    class Pieces:
        def decode(self, ids: list[int], **_: Any) -> str:
            return "".join([" one", " two", "-", " three"][i] for i in ids).removeprefix(" ")

    output = Output(Pieces(), 10, [], stops)
    assert [output.extend([i])[1] for i in (0, 1, 2, 3)] == ["one", " two", "-", " three"]
    output = Output(Pieces(), 10, [], stops)
    assert output.extend([0, 1])[1] + output.extend([2, 3])[1] == "one two- three"


def test_special_tokens_have_no_text(tokenizer: Any) -> None:
    output = Output(tokenizer, 10, [], [])
    assert [output.extend([t])[1] for t in (97, 256, 256, 98)] == ["a", "", "", "b"]
    assert output.text == "ab"


def test_without_a_tokenizer_there_is_no_text() -> None:
    output = Output(None, 3, [9], [])
    assert output.extend([1, 2]) == ([1, 2], "")
    assert output.extend([9]) == ([9], "")
    with pytest.raises(ValueError, match="stop_strings: need a tokenizer"):
        Output(None, 3, [], ["x"])


@pytest.mark.parametrize("stops", [[""], [3], ["ok", None]])
def test_stop_strings_must_be_strings_with_text(stops: list[Any], tokenizer: Any) -> None:
    with pytest.raises(ValueError, match="stop_strings: must be non-empty strings"):
        Output(tokenizer, 3, [], stops)


@settings(max_examples=100, deadline=None)
@given(
    text=st.text(alphabet="ab é€😀", max_size=24),
    stop=st.text(alphabet="ab é", min_size=1, max_size=3),
    sizes=st.lists(st.integers(1, 7), min_size=1, max_size=5),
    limit=st.integers(1, 60),
)
def test_any_blocks_give_the_text_of_single_tokens(text: str, stop: str, sizes: list[int], limit: int) -> None:
    """However the tokens arrive, with and without stop strings: the same ids, text and reason, and no piece changes."""
    tokenizer = SHARED
    for stops in ([], [stop]):
        one, many = (Output(tokenizer, limit, [], stops) for _ in range(2))
        feed(one, ids_of(text), [1])
        pieces = feed(many, ids_of(text), sizes)
        assert many.token_ids == one.token_ids == [t for tokens, _ in pieces for t in tokens]
        assert many.text == "".join(piece for _, piece in pieces)
        assert many.finish_reason == one.finish_reason
        if many.finish_reason is not None or ids_of(text)[-1:] <= [0x7F]:  # else a character may be incomplete
            assert many.text == one.text
        if stops and stop in text and len(text[: text.index(stop)].encode() + stop.encode()) <= limit:
            assert many.text == text[: text.index(stop) + len(stop)]


SHARED = byte_tokenizer()


# --- stop strings with special tokens ---------------------------------------------------------------------------


class Marked:
    """Words as tokens; 3 is the special token <end>, 4 another that transformers lists only among the added ones."""

    all_special_ids = (3,)
    added_tokens_decoder = {4: AddedToken("<turn>", special=True), 5: AddedToken("<plain>", special=False)}  # noqa: RUF012
    words = ("alpha ", "beta", "\n", "<end>", "<turn>", "<plain>")

    def decode(self, ids: list[int], skip_special_tokens: bool, **_: Any) -> str:
        return "".join(self.words[i] for i in ids if not (skip_special_tokens and i in (3, 4)))


@pytest.mark.parametrize("size", [1, 2, 50])
@pytest.mark.parametrize(
    ("stop", "tokens", "count", "text"),
    [
        ("<end>", [0, 1, 3, 1], 3, "alpha beta"),
        ("<turn>", [0, 4, 3, 1], 2, "alpha "),
        ("beta<end>", [1, 0, 1, 3, 0], 4, "betaalpha beta"),
        ("<end>\n", [0, 3, 1, 3, 2, 0], 5, "alpha beta\n"),
        ("<end>al", [1, 3, 0, 1], 3, "betaal"),
        ("d>al", [1, 3, 0, 1], 3, "betaal"),
        ("<plain>", [0, 5, 1], 2, "alpha <plain>"),
        ("ha be", [0, 3, 1, 1], 3, "alpha be"),  # in the text as it is shown, special tokens do not part words
        ("<turn><end>", [4, 1, 4, 3, 0], 4, "beta"),
    ],
)
def test_stop_strings_that_hold_special_tokens(stop: str, tokens: list[int], count: int, text: str, size: int) -> None:
    output = Output(Marked(), 100, [], [stop])
    pieces = feed(output, tokens, [size])
    assert output.finish_reason == "stop"
    assert output.token_ids == tokens[:count]
    assert output.text == text
    assert "".join(piece for _, piece in pieces) == text


def test_a_special_stop_string_that_never_comes_changes_nothing() -> None:
    output = Output(Marked(), 5, [], ["<end>x"])
    feed(output, [0, 3, 1, 4, 2], [2])
    assert (output.text, output.finish_reason) == ("alpha beta\n", "length")


# --- messages ---------------------------------------------------------------------------------------------------


def test_content_in_parts_is_joined_and_other_parts_are_refused() -> None:
    chat = byte_tokenizer(TEMPLATE)
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    assert encode([{"role": "user", "content": parts}], chat, None, 257) == ids_of("<user>hi<assistant>")
    picture = [{"type": "image", "url": "x.png"}, *parts]
    with pytest.raises(ValueError, match="content must be text, or parts of type 'text', got"):
        encode([{"role": "user", "content": picture}], chat, None, 257)


def test_an_open_last_message_goes_on() -> None:
    """The default is that of transformers' pipelines: the assistant's own last message is continued."""
    chat = byte_tokenizer("{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}!{% endfor %}"
                          "{% if add_generation_prompt %}<assistant>{% endif %}")  # fmt: skip
    talk = [*USER, {"role": "assistant", "content": "We"}]
    assert encode(talk, chat, None, 257) == ids_of("<user>hi!<assistant>We")
    assert encode(talk, chat, None, 257, continue_final_message=False) == ids_of("<user>hi!<assistant>We!<assistant>")
    assert encode(USER, chat, None, 257, continue_final_message=True) == ids_of("<user>hi")


def test_tools_and_variables_reach_the_template() -> None:
    chat = byte_tokenizer("{{ tools[0]['function']['name'] }}{{ mood }}{{ messages[0]['content'] }}")
    tool = {"type": "function", "function": {"name": "add", "parameters": {}}}
    assert encode("hi", chat, None, 257, tools=[tool], chat_template_kwargs={"mood": "+"}) == ids_of("add+hi")
    with pytest.raises(ValueError, match="tools: need a chat template, got"):
        encode("hi", byte_tokenizer(), None, 257, tools=[tool])


def test_a_template_that_refuses_and_text_that_is_no_unicode() -> None:
    chat = byte_tokenizer("{{ raise_exception('System role not supported') }}")
    with pytest.raises(ValueError, match="prompt: the chat template does not take these messages: System role not"):
        encode(USER, chat, None, 257)
    for tokenizer in (byte_tokenizer(), byte_tokenizer(TEMPLATE)):
        with pytest.raises(ValueError, match=r"prompt: text must be valid Unicode, got '\\ud800' at character"):
            encode("ok \ud800 bad", tokenizer, None, 257)


@pytest.mark.parametrize(
    "template", ["{{ 1 // 0 }}", "{{ range(10**10) | list }}", "{{ cycler() }}", "{{ messages.x.y }}"]
)
def test_what_a_template_raises_is_an_error_of_the_prompt(template: str) -> None:
    with pytest.raises(ValueError, match=r"^prompt: the chat template does not take these messages: "):
        encode("hi", byte_tokenizer(template), None, 257)
