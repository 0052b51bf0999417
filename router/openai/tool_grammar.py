"""Calls that a model must make, written as its chat template taught it: the grammar of such an answer."""

from __future__ import annotations

from collections.abc import Sequence

from router.openai.chat_request import ChatRequest, NamedToolChoice, Tool
from router.openai.grammar import check_grammar, json_schema, quoted
from router.openai.tool_calls import Format
from router.text.tokenizer import Tokenizer
from wire.errors import InvalidRequest

_MOST_CALLS = 16


async def grammar_of_calls(
    request: ChatRequest, tool_format: Format, tokenizer: Tokenizer, answer: str | None
) -> str | None:
    """None: the model may write what it likes. With `answer` it may call, or else answer by that grammar."""
    choice = request.tool_choice
    tools = request.tools or []
    named = choice.function.name if isinstance(choice, NamedToolChoice) else None
    if named is not None:
        tools = [tool for tool in tools if tool.function.name == named]
        if not tools:
            raise InvalidRequest(
                f"tool_choice.function.name: {named!r} is none of the tools", "tool_choice.function.name"
            )
    elif choice != "required" and answer is None:
        return None
    once = named is not None or request.parallel_tool_calls is False
    rules = _rules(tools, tool_format, tokenizer, most=1 if once else _MOST_CALLS)
    if named is None and choice != "required" and answer is not None:
        rules = [f"start: calls | answer\nanswer: {answer.removeprefix('start: ')}", *rules]
    else:
        rules = ["start: calls", *rules]
    grammar = "\n".join(rules)
    await check_grammar(grammar, "tools")
    return grammar


def _rules(tools: Sequence[Tool], tool_format: Format, tokenizer: Tokenizer, most: int) -> list[str]:
    written = tool_format.written

    def literal(text: str) -> str:
        return _literal(text, tool_format, tokenizer)

    call = f"{literal(written.call_begin)} call {literal(written.call_end)}"
    more = f" ({quoted(written.between)} {call}){{0,{most - 1}}}" if most > 1 else ""
    rules = [
        f"calls: {literal(written.begin)} {call}{more} {literal(written.end)}",
        "call: " + " | ".join(f"call_{index}" for index in range(len(tools))),
    ]
    for index, tool in enumerate(tools):
        function = tool.function
        head = f'{{"name": {quoted(function.name)}, "{written.arguments}": '
        schema = {"type": "object", **(function.parameters or {})}
        rules.append(f'call_{index}: {quoted(head)} arguments_{index} "}}"')
        rules.append(f"arguments_{index}: %json {json_schema(schema, lenient=not function.strict)}")
    return rules


def _literal(text: str, tool_format: Format, tokenizer: Tokenizer) -> str:
    """The format's marks may be tokens of their own that no text spells."""
    if not text:
        return ""
    for mark in (tool_format.begin, tool_format.end):
        if mark is not None and mark in text and tokenizer.is_special(mark):
            before, _, after = text.partition(mark)
            parts = (
                quoted(before) if before else "",
                f"<[{tokenizer.token_id(mark)}]>",
                quoted(after) if after else "",
            )
            return " ".join(part for part in parts if part)
    return quoted(text)
