"""What a model thinks before it answers: told apart while it comes, and left alone by grammars."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from tandem.api.formats.answer_format import ModelFormat
from tandem.api.formats.harmony import MARKS, HarmonyCalls
from tandem.api.formats.reasoning import ReasoningStart
from tandem.api.formats.registry import CALLS, REASONING
from tandem.api.pieces import Piece
from tandem.api.settings import ReasoningName, ToolFormat
from tandem.api.text.tokenizer import Tokenizer
from tests.api.formats.reading import read, told
from tests.small_model import HERMES, SAID, THOUGHT


def pieces_of(written: ModelFormat, prompt: str, text: str, cuts: Sequence[int] = ()) -> list[Piece]:
    return read(written.reader(prompt, {}), text, cuts)


@pytest.mark.parametrize("name", REASONING)
@pytest.mark.parametrize("opened", [False, True])
def test_reasoning_is_told_apart_however_it_is_cut(name: ReasoningName, opened: bool) -> None:
    marks = REASONING[name]
    written = ModelFormat(calls=CALLS[ToolFormat.HERMES], reasoning=marks)
    prompt = f"...assistant\n{marks.begin}\n" if opened else "...assistant\n"
    text = ("" if opened else marks.begin) + f"\n{THOUGHT}\n{marks.end}\n\n{SAID}\n{HERMES}"
    expected = (SAID, THOUGHT, [("weather", '{"city": "Paris"}')])
    for at in range(len(text) + 1):
        found = told(pieces_of(written, prompt, text, [at]))
        assert found._replace(text=found.text.strip()) == expected, text[:at]
    whole = told(pieces_of(written, prompt, text))
    assert told(pieces_of(written, prompt, text, range(1, len(text)))) == whole


@pytest.mark.parametrize(
    ("prompt", "text", "expected"),
    [
        ("<think>\n", "still at it", ("still at it", "")),
        ("<think>\n", "", ("", "")),
        ("", "<think>cut off", ("cut off", "")),
        ("", "<think></think>so", ("", "so")),
        ("", "<thi", ("", "<thi")),
        ("", "  <b> no reasoning", ("", "  <b> no reasoning")),
        ("", "so </think> what", ("", "so </think> what")),
        ("<think>\n\n</think>\n\n", "<think> is a tag", ("", "<think> is a tag")),
        ("<think>", "a </think> b <think> c", ("a", "b <think> c")),
    ],
)
def test_where_reasoning_begins_and_ends(prompt: str, text: str, expected: tuple[str, str]) -> None:
    written = ModelFormat(calls=CALLS[ToolFormat.HERMES], reasoning=REASONING[ReasoningName.THINK])
    for cuts in ([], range(1, len(text))):
        found = told(pieces_of(written, prompt, text, cuts))
        assert (found.reasoning, found.text) == expected


@given(
    parts=st.lists(
        st.sampled_from(["<think>", "</think>", "<th", "nk>", " ", "\n", "a", HERMES, "<tool_call>"]), max_size=8
    ),
    opened=st.booleans(),
    data=st.data(),
)
def test_no_cut_changes_what_is_told(parts: list[str], opened: bool, data: st.DataObject) -> None:
    written = ModelFormat(calls=CALLS[ToolFormat.HERMES], reasoning=REASONING[ReasoningName.THINK])
    text, prompt = "".join(parts), "<think>" if opened else ""
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=8))
    assert told(pieces_of(written, prompt, text, cuts)) == told(pieces_of(written, prompt, text))


HARMONY = [
    ("<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>So.<|return|>", ("Hm.", "So.")),
    ("<|channel|>final<|message|>So.", ("", "So.")),
    ("<|channel|>analysis<|message|>Hm", ("Hm", "")),
    ("<|channel|>commentary<|message|>First.<|end|><|start|>assistant<|channel|>final<|message|>So.", ("", "First.So.")),
    ("no marks at all", ("", "no marks at all")),
    ("<|channel|>analysis", ("", "")),
]  # fmt: skip


@pytest.mark.parametrize(("text", "expected"), HARMONY)
def test_channels(text: str, expected: tuple[str, str]) -> None:
    written = ModelFormat(harmony=HarmonyCalls())
    for prompt, cuts in (("", range(1, len(text))), *(("<|start|>assistant", [at]) for at in range(len(text) + 1))):
        found = told(pieces_of(written, prompt, text, cuts))
        assert (found.reasoning, found.text) == expected


# --- grammars -------------------------------------------------------------------------------------------------


def follows(folder: str, special: Sequence[str], written: ModelFormat, prompt: str, text: str) -> bool:
    """An answer of digits alone, after the reasoning."""
    backend = tokenizers.Tokenizer.from_file(str(Path(folder) / "tokenizer.json"))
    backend.add_special_tokens(list(special))
    tokenizer = Tokenizer(backend, {})
    answer = written.answer_grammar("start: /[0-9]+/", tokenizer)
    grammar = written.after_reasoning(answer, prompt, tokenizer)
    matcher = LLMatcher(LLTokenizer(backend.to_str(), eos_token=2), LLMatcher.grammar_from_lark(grammar), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    ids = backend.encode(text, add_special_tokens=False).ids
    return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("name", REASONING)
def test_a_grammar_holds_from_the_reasonings_end(name: ReasoningName, special: bool, model_folder: str) -> None:
    marks = REASONING[name]
    written = ModelFormat(reasoning=marks)
    tokens = written.marks if special else ()

    def ok(prompt: str, text: str) -> bool:
        return follows(model_folder, tokens, written, prompt, text)

    thought = f"Let me see: is it 7?\n{marks.end}\n\n"
    assert ok(marks.begin, thought + "42")
    assert not ok(marks.begin, "42")
    assert not ok(marks.begin, thought + "forty-two")
    assert ok("", "42")
    assert ok("", marks.begin + thought + "42")
    assert not ok("", "Let me see")
    assert ok(f"{marks.begin}{marks.end}\n\n", "42")
    assert not ok(f"{marks.begin}{marks.end}\n\n", thought + "42")


def test_a_grammar_holds_on_the_final_channel(model_folder: str) -> None:
    """With the marks as tokens of their own, which those of gpt-oss always are."""
    written = ModelFormat(harmony=HarmonyCalls())
    thought = "<|channel|>analysis<|message|>Is it 7?<|end|><|start|>assistant"
    final = "<|channel|>final<|message|>42"
    for text, good in ((thought + final, True), (final, True), ("42", False), (thought + "42", False)):
        assert follows(model_folder, MARKS, written, "", text) is good


def test_the_prompt_says_where_it_leaves_the_model() -> None:
    marks = REASONING[ReasoningName.THINK]
    assert marks.start("user: <think>\nassistant:") is ReasoningStart.FREE
    assert marks.start("assistant:\n<think>\n") is ReasoningStart.OPEN
    assert marks.start("assistant:\n<think>\n\n</think>\n\n") is ReasoningStart.CLOSED
