"""Tool calls in the format of each family of models: the readers parse them while they stream, and grammars enforce the same formats."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from tandem.api.answer_format import OfferedTool
from tandem.api.formats.call_grammar import CallGrammar
from tandem.api.formats.calls import CallReader
from tandem.api.formats.harmony import HarmonyCalls, HarmonyReader
from tandem.api.formats.registry import CALLS
from tandem.api.pieces import AnswerReader, Arguments, Piece
from tandem.api.settings import ToolFormat
from tandem.api.text.tokenizer import Tokenizer
from tests.api.formats.reading import read, told

PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "exact": {"type": "boolean"},
        "where": {
            "type": "object",
            "properties": {"at": {"type": "array", "items": {"type": "number"}}},
            "required": ["at"],
            "additionalProperties": False,
        },
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
NOTHING: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
TOOLS = {"weather": PARAMETERS, "now": NOTHING}
WEATHER = ("weather", {"city": "Þórshöfn, east", "days": 2, "exact": True, "where": {"at": [62.5, -7]}})
NOW: tuple[str, dict[str, Any]] = ("now", {})
JSON = '{"city": "Þórshöfn, east", "days": 2, "exact": true, "where": {"at": [62.5, -7]}}'
PYTHON = 'weather(city="Þórshöfn, east", days=2, exact=True, where={"at": [62.5, -7]})'

# For each format: two calls, one after the other, as its family writes them.
WRITTEN: dict[ToolFormat, str] = {
    ToolFormat.HERMES: '<tool_call>\n{"name": "weather", "arguments": JSON}\n</tool_call>\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
    ToolFormat.LLAMA3: '{"name": "weather", "parameters": JSON}; {"name": "now", "parameters": {}}',
    ToolFormat.MISTRAL: '[TOOL_CALLS][{"name": "weather", "arguments": JSON}, {"name": "now", "arguments": {}}]',
    ToolFormat.MISTRAL_NAMED: "[TOOL_CALLS]weather[ARGS]JSON[TOOL_CALLS]now[ARGS]{}",
    ToolFormat.GRANITE: '<|tool_call|>[{"name": "weather", "arguments": JSON}, {"name": "now", "arguments": {}}]',
    ToolFormat.PHI4: 'functools[{"name": "weather", "arguments": JSON}, {"name": "now", "arguments": {}}]',
    ToolFormat.MINIMAX_M1: '<tool_calls>\n{"name": "weather", "arguments": JSON}\n{"name": "now", "arguments": {}}\n</tool_calls>',
    ToolFormat.PYTHONIC: "[PYTHON, now()]",
    ToolFormat.LFM2: "<|tool_call_start|>[PYTHON, now()]<|tool_call_end|>",
    ToolFormat.OLMO3: "<function_calls>\nPYTHON\nnow()\n</function_calls>",
    ToolFormat.DEEPSEEK_V3: "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\nJSON\n```<｜tool▁call▁end｜>\n"
    "<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ToolFormat.DEEPSEEK_V31: "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>JSON<｜tool▁call▁end｜>"
    "<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ToolFormat.DEEPSEEK_V32: '<｜DSML｜function_calls>\n<｜DSML｜invoke name="weather">\n<｜DSML｜parameter name="city" string="true">Þórshöfn, east</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="days" string="false">2</｜DSML｜parameter>\n<｜DSML｜parameter name="exact" string="false">true</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="where" string="false">{"at": [62.5, -7]}</｜DSML｜parameter>\n</｜DSML｜invoke>\n<｜DSML｜invoke name="now">\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
    ToolFormat.KIMI_K2: "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>JSON<|tool_call_end|>"
    "<|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
    ToolFormat.QWEN3_CODER: "<tool_call>\n<function=weather>\n<parameter=city>\nÞórshöfn, east\n</parameter>\n<parameter=days>\n2\n</parameter>\n"
    '<parameter=exact>\ntrue\n</parameter>\n<parameter=where>\n{"at": [62.5, -7]}\n</parameter>\n</function>\n</tool_call>\n'
    "<tool_call>\n<function=now>\n</function>\n</tool_call>",
    ToolFormat.SEED_OSS: "<seed:tool_call>\n<function=weather>\n<parameter=city>Þórshöfn, east</parameter>\n<parameter=days>2</parameter>\n"
    '<parameter=exact>true</parameter>\n<parameter=where>{"at": [62.5, -7]}</parameter>\n</function>\n</seed:tool_call>\n'
    "<seed:tool_call>\n<function=now>\n</function>\n</seed:tool_call>",
    ToolFormat.GLM: "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Þórshöfn, east</arg_value>\n<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n"
    '<arg_key>exact</arg_key>\n<arg_value>true</arg_value>\n<arg_key>where</arg_key>\n<arg_value>{"at": [62.5, -7]}</arg_value>\n</tool_call>\n'
    "<tool_call>now\n</tool_call>",
    ToolFormat.MINIMAX: '<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">Þórshöfn, east</parameter>\n<parameter name="days">2</parameter>\n'
    '<parameter name="exact">true</parameter>\n<parameter name="where">{"at": [62.5, -7]}</parameter>\n</invoke>\n<invoke name="now">\n</invoke>\n</minimax:tool_call>',
    ToolFormat.FUNCTION_GEMMA: '<start_function_call>call:weather{city:<escape>Þórshöfn, east<escape>,days:2,exact:true,where:{"at":[62.5,-7]}}<end_function_call>'
    "<start_function_call>call:now{}<end_function_call>",
    ToolFormat.GEMMA4: '<|tool_call>call:weather{city:<|"|>Þórshöfn, east<|"|>,days:2,exact:true,where:{"at":[62.5,-7]}}<tool_call|>'
    "<|tool_call>call:now{}<tool_call|>",
    ToolFormat.HARMONY: "<|channel|>analysis<|message|>Where is it?<|end|><|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>JSON<|call|>",
}  # fmt: skip
WRITTEN = {name: text.replace("JSON", JSON).replace("PYTHON", PYTHON) for name, text in WRITTEN.items()}


def reader_of(name: ToolFormat, *, must_call: bool = False) -> AnswerReader:
    if name is ToolFormat.HARMONY:
        return HarmonyReader(calls=True, must_call=must_call)
    return CallReader(CALLS[name], TOOLS, must_call=must_call)


def pieces_of(
    name: ToolFormat, text: str, cuts: Sequence[int] = (), *, cut: bool = False, must_call: bool = False
) -> list[Piece]:
    """`cut`: the answer was cut off at the text's end."""
    return read(reader_of(name, must_call=must_call), text, cuts, cut=cut)


def calls_of(pieces: Sequence[Piece]) -> list[tuple[str, Any]]:
    return [(name, json.loads(arguments)) for name, arguments in told(pieces).calls]


def expected_of(name: ToolFormat) -> list[tuple[str, Any]]:
    return [WEATHER] if name is ToolFormat.HARMONY else [WEATHER, NOW]


def test_every_format_has_its_text() -> None:
    assert set(WRITTEN) == {*CALLS, ToolFormat.HARMONY}


@pytest.mark.parametrize("name", WRITTEN)
def test_calls_are_read_however_they_are_cut(name: ToolFormat) -> None:
    text = WRITTEN[name]
    whole = told(pieces_of(name, text))
    assert calls_of(pieces_of(name, text)) == expected_of(name)
    assert whole[0] == ""
    for at in range(1, len(text)):
        assert told(pieces_of(name, text, [at])) == whole, text[:at]
    reader, pieces, came = reader_of(name), list[Piece](), list[int]()
    for at, letter in enumerate(text):
        now = reader.push(letter)
        pieces += now
        if any(isinstance(piece, Arguments) for piece in now):
            came.append(at)
    assert told(pieces + reader.finish()) == whole
    assert text.index("weather") < came[0] < text.index("62.5"), "arguments come while they are written"
    assert len(came) > 4


@pytest.mark.parametrize("name", WRITTEN)
def test_an_answer_that_is_cut_anywhere_shows_no_mark_of_a_call(name: ToolFormat) -> None:
    text = WRITTEN[name]
    for end in range(len(text)):
        written = text[:end]
        forced = told(pieces_of(name, written, cut=True, must_call=True))
        assert forced[0] == "", written
        free = told(pieces_of(name, written, cut=True))
        assert forced[1:] == free[1:], written
        begun = [call for call, _ in free[2]]
        assert begun == [call for call, _ in expected_of(name)][: len(begun)], "nothing before the cut is lost"
        # What is left is too short for a mark, or may be something else, as a list or an object may.
        opening = "{[" if name in (ToolFormat.LLAMA3, ToolFormat.PYTHONIC) else ""
        left = free[0].strip()
        assert len(left) < 3 or left[0] in opening or left.isalnum(), (written, free[0])
        assert not (free[2] and left), (written, free[0])
        if end % 7 == 0:  # letter by letter
            assert told(pieces_of(name, written, range(1, end), cut=True)) == free, written


WHOLE_ANSWERS = (ToolFormat.LLAMA3, ToolFormat.PYTHONIC, ToolFormat.HARMONY)  # their calls are the whole answer


@pytest.mark.parametrize("name", [name for name in WRITTEN if name not in WHOLE_ANSWERS])
def test_text_before_a_call_that_is_cut_off_stays(name: ToolFormat) -> None:
    text = WRITTEN[name]
    for end in range(3, len(text)):
        said = told(pieces_of(name, "I look. " + text[:end], cut=True))[0].strip()
        assert said in ("I look.", "I look. " + text[:end]), said
        assert said == "I look." or text[:end].isalnum()


def test_other_text_that_is_cut_off_stays() -> None:
    a_mark = "<tool_call> is what a model writes before a call"
    for text in ("if a <", "2 < 3", "<b>bold", a_mark, '{"name": "Bob'):
        for name in (ToolFormat.HERMES, ToolFormat.LLAMA3):
            assert told(pieces_of(name, text, cut=True))[0] == text


@pytest.mark.parametrize("name", WRITTEN)
def test_text_around_calls_stays(name: ToolFormat) -> None:
    written = WRITTEN[name]
    if name is ToolFormat.HARMONY:
        written = "<|channel|>commentary<|message|>I look. <|end|><|start|>assistant" + written
    else:
        mark = CALLS[name].begins[0] if CALLS[name].opening is not None else ""
        written = f"\n\nI look. {mark}{written}"
    text, _, _ = told(pieces_of(name, written))
    assert text.strip() == "I look."
    assert calls_of(pieces_of(name, written)) == expected_of(name)
    assert text == told(pieces_of(name, written, range(1, len(written))))[0]


@pytest.mark.parametrize("name", CALLS)
def test_what_is_no_call_is_text_as_it_was_written(name: ToolFormat) -> None:
    mark = CALLS[name].begins[0]
    for said in ("no call", "a < b [1] {x}", mark, f"{mark} and so on", f"see {mark}{{", "  \n", ""):
        for cuts in ([], range(1, len(said))):
            assert told(pieces_of(name, said, cuts)) == (said, "", [])


@settings(max_examples=150)
@given(name=st.sampled_from(list(WRITTEN)), data=st.data())
def test_nothing_that_a_model_writes_breaks_a_reader(name: ToolFormat, data: st.DataObject) -> None:
    """Fragments of calls in any order are read the same, however the text is cut."""
    text = WRITTEN[name]
    at = st.integers(0, len(text))
    fragment = st.tuples(at, at).map(lambda edges: text[min(edges) : max(edges)])
    noise = st.sampled_from([" ", "\n", '"', "\\", "{", "}", "[", "]", "(", ")", ",", "=", "x", "é", text[:12]])
    said = "".join(data.draw(st.lists(fragment | noise, max_size=6)))
    cuts = data.draw(st.lists(st.integers(0, len(said)), max_size=8))
    assert told(pieces_of(name, said, cuts)) == told(pieces_of(name, said))


# --- enforced -------------------------------------------------------------------------------------------------


class EnforcedFormat:
    """Answers under a format's grammar, with its marks as tokens of their own or spelt."""

    def __init__(self, name: ToolFormat, folder: str, *, special: bool) -> None:
        self._writing = HarmonyCalls() if name is ToolFormat.HARMONY else CALLS[name]
        backend = tokenizers.Tokenizer.from_file(str(Path(folder) / "tokenizer.json"))
        if special:
            backend.add_special_tokens(list(self._writing.layout.marks))
        self._tokenizer = Tokenizer(backend, {})
        self._backend = LLTokenizer(backend.to_str(), eos_token=1)
        self._encode = backend

    def follows(self, text: str, *, once: bool = False, must: bool = True) -> bool:
        tools = [OfferedTool(name, schema, strict=True) for name, schema in TOOLS.items()]
        grammars = CallGrammar(self._writing, tools, self._tokenizer, once=once)
        grammar = grammars.must_call() if must else grammars.text_with_calls()
        matcher = LLMatcher(self._backend, LLMatcher.grammar_from_lark(grammar), log_level=0)
        assert not matcher.is_error(), f"{matcher.get_error()}\n{grammar}"
        ids = self._encode.encode(text, add_special_tokens=False).ids
        return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())


def enforced_text(name: ToolFormat) -> str:
    """The enforced text, without the part before the call and without a stop token."""
    if name is ToolFormat.HARMONY:
        return WRITTEN[name].partition("<|start|>assistant")[2].removesuffix("<|call|>")
    return WRITTEN[name].replace("functions.now:1", "functions.now:0")


@pytest.mark.parametrize("special", [False, True], ids=["spelt", "special"])
@pytest.mark.parametrize("name", WRITTEN)
def test_calls_are_written_in_the_models_own_format(name: ToolFormat, special: bool, model_folder: str) -> None:
    enforced, text = EnforcedFormat(name, model_folder, special=special), enforced_text(name)
    assert enforced.follows(text)
    assert calls_of(pieces_of(name, text)) == expected_of(name)
    assert not enforced.follows("It will rain.")
    assert not enforced.follows(text.replace("weather", "whether"))
    assert not enforced.follows(text.replace("2", '"two"').replace("6", "two"))
    if name is not ToolFormat.HARMONY:
        assert not enforced.follows(text, once=True)
        # Text may come before calls that are not required.
        assert enforced.follows(text, must=False)
        assert enforced.follows("It will rain.", must=False)
        assert not enforced.follows(text.replace("weather", "whether"), must=False)
