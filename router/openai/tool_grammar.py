"""Calls that a model must make, or must make right, written as its chat template taught it: the grammar of such an answer."""

from __future__ import annotations

from collections.abc import Sequence

from tandem.router.openai.chat_request import ChatRequest, NamedToolChoice, Tool
from tandem.router.openai.grammar import check_grammar, json_schema, quoted
from tandem.router.openai.tool_calls import Format
from tandem.router.text.tokenizer import Tokenizer
from tandem.wire.errors import InvalidRequest

_MOST_CALLS = 16


async def grammar_of_calls(
    request: ChatRequest, tool_format: Format, tokenizer: Tokenizer, answer: str | None
) -> str | None:
    """None: the model may write what it likes. With `answer` it may call, or else answer by that grammar.

    Left to its own choice, it is held to the tools from where it begins a call, if one of them is strict.
    """
    choice = request.tool_choice
    tools = request.tools or []
    named = choice.function.name if isinstance(choice, NamedToolChoice) else None
    if named is not None:
        tools = [tool for tool in tools if tool.function.name == named]
        if not tools:
            raise InvalidRequest(
                f"tool_choice.function.name: {named!r} is none of the tools", "tool_choice.function.name"
            )
    must_call = named is not None or choice == "required"
    if not must_call and answer is None and not any(tool.function.strict for tool in tools):
        return None
    once = named is not None or request.parallel_tool_calls is False
    written = _Writer(tool_format, tokenizer, most=1 if once else _MOST_CALLS)
    if must_call:
        start = ["start: calls", written.calls()]
    elif answer is not None:
        start = [f"start: calls | answer\nanswer: {answer.removeprefix('start: ')}", written.calls()]
    else:
        start = written.text_with_calls()
    grammar = "\n".join([*start, *_rules_of_call(tools, tool_format.written.arguments)])
    await check_grammar(grammar, "tools")
    return grammar


class _Writer:
    """How calls stand in an answer. `call` is one of them, without its marks."""

    def __init__(self, tool_format: Format, tokenizer: Tokenizer, most: int) -> None:
        self._format = tool_format
        self._written = tool_format.written
        self._tokenizer = tokenizer
        self._most = most

    def calls(self) -> str:
        return (
            f"calls: {self._literal(self._written.begin + self._written.call_begin)} {self._rest(self._most)}"
        )

    def text_with_calls(self) -> list[str]:
        """Text as the model likes, which ends where it begins a call as the reader of calls would find it."""
        mark, written = self._format.begin, self._written
        text = r"TEXT: /(.|\n)*/" if self._format.opening is None else r"TEXT: /\s*([^\s{](.|\n)*)?/"
        if self._tokenizer.is_special(mark):
            lead = f"lead: TEXT {self._literal(mark)}"  # which no text spells
        else:
            lead = f"lead[lazy]: TEXT {quoted(mark)}"
        begin = self._literal((written.begin + written.call_begin).removeprefix(mark))
        if self._format.end is None:  # calls last to the end of the answer
            called = f"called: lead {begin} {self._rest(self._most)}"
            unmarked = "" if self._format.opening is None else f" | {begin} {self._rest(self._most)}"
            return [f"start: called | TEXT{unmarked}", called, lead, text]
        start = "start: called | TEXT" if self._most == 1 else "start: called* TEXT"
        return [start, f"called: lead {begin} {self._rest(1)}", lead, text]

    def _rest(self, most: int) -> str:
        """From the first call's end on, with the call."""
        written = self._written
        end = self._literal(written.call_end)
        again = f"{quoted(written.between)} {self._literal(written.call_begin)} call {end}"
        more = f" ({again}){{0,{most - 1}}}" if most > 1 else ""
        return f"call {end}{more} {self._literal(written.end)}"

    def _literal(self, text: str) -> str:
        """The format's marks may be tokens of their own that no text spells."""
        if not text:
            return ""
        for mark in (self._format.begin, self._format.end):
            if mark is not None and mark in text and self._tokenizer.is_special(mark):
                before, _, after = text.partition(mark)
                parts = (
                    quoted(before) if before else "",
                    f"<[{self._tokenizer.token_id(mark)}]>",
                    quoted(after) if after else "",
                )
                return " ".join(part for part in parts if part)
        return quoted(text)


def _rules_of_call(tools: Sequence[Tool], arguments_key: str) -> list[str]:
    rules = ["call: " + " | ".join(f"call_{index}" for index in range(len(tools)))]
    for index, tool in enumerate(tools):
        function = tool.function
        head = f'{{"name": {quoted(function.name)}, "{arguments_key}": '
        schema = {"type": "object", **(function.parameters or {})}
        rules.append(f'call_{index}: {quoted(head)} arguments_{index} "}}"')
        rules.append(f"arguments_{index}: %json {json_schema(schema, lenient=not function.strict)}")
    return rules
