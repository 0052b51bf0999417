"""What holds a request's answer: the one grammar that its fields add up to, or none."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from tandem.router.formats.answer_format import AnswerFormat
from tandem.router.formats.call_grammar import CallGrammar, OfferedTool
from tandem.router.formats.lark import JsonObject
from tandem.router.openai.chat_request import ChatRequest, NamedToolChoice, Tool
from tandem.router.openai.fields import SamplingFields
from tandem.router.openai.grammar import (
    StructuredOutputs,
    check_grammar,
    grammar_of_format,
    grammar_of_structured_outputs,
)
from tandem.router.text.tokenizer import Tokenizer
from tandem.wire.errors import InvalidRequest


async def completion_grammar(request: SamplingFields) -> str | None:
    wanted, param = outputs_wanted(request)
    return await grammar_of_structured_outputs(wanted, param)


async def chat_grammar(
    request: ChatRequest, tools: Sequence[Tool] | None, written: AnswerFormat, tokenizer: Tokenizer
) -> str | None:
    """Without what the model may think before. `tools` is None where the model may not call."""
    answer = await grammar_of_format(request.response_format)
    wanted, param = outputs_wanted(request)
    other = await grammar_of_structured_outputs(wanted, param)
    if answer is not None and other is not None:
        raise InvalidRequest(f"{param}: contradicts response_format; set one", param)
    answer = answer or other
    if answer is not None:
        answer = written.answer_grammar(answer, tokenizer)
    if not tools or written.call_writing is None:
        return answer
    if other is not None:
        raise InvalidRequest(f"{param}: contradicts tools, unless tool_choice is 'none'", param)
    return await _grammar_with_calls(request, tools, written, tokenizer, answer)


async def _grammar_with_calls(
    request: ChatRequest,
    tools: Sequence[Tool],
    written: AnswerFormat,
    tokenizer: Tokenizer,
    answer: str | None,
) -> str | None:
    """None: the model may write what it likes. With `answer` it may call, or else answer by that grammar.

    Left to its own choice, it is held to the tools from where it begins a call, if one of them is strict.
    """
    choice = request.tool_choice
    named = choice.function.name if isinstance(choice, NamedToolChoice) else None
    if named is not None:
        tools = [tool for tool in tools if tool.function.name == named]
        if not tools:
            raise InvalidRequest(
                f"tool_choice.function.name: {named!r} is none of the tools", "tool_choice.function.name"
            )
    must_call = named is not None or choice == "required"
    strict = any(tool.function.strict for tool in tools) and written.harmony is None
    writing = written.call_writing
    if writing is None or not (must_call or answer is not None or strict):
        return None
    once = named is not None or request.parallel_tool_calls is False
    grammars = CallGrammar(writing, [_offered(tool) for tool in tools], tokenizer, once=once)
    if must_call:
        grammar = grammars.must_call()
    else:
        grammar = grammars.call_or(answer) if answer is not None else grammars.text_with_calls()
    await check_grammar(grammar, "tools")
    return grammar


def _offered(tool: Tool) -> OfferedTool:
    function = tool.function
    return OfferedTool(function.name, function.parameters or {}, bool(function.strict))


def outputs_wanted(request: SamplingFields) -> tuple[StructuredOutputs | None, str]:
    """`structured_outputs`, which older clients know as one field for each of its kinds; and the field's name."""
    schema = request.guided_json
    if (
        schema is None
        and request.guided_regex is None
        and request.guided_choice is None
        and request.guided_grammar is None
    ):
        return request.structured_outputs, "structured_outputs"
    older = {
        "json": _object_in(schema) if isinstance(schema, str) else schema,
        "regex": request.guided_regex,
        "choice": request.guided_choice,
        "grammar": request.guided_grammar,
    }
    given = {name: value for name, value in older.items() if value is not None}
    names = [f"guided_{name}" for name in given]
    if request.structured_outputs is not None:
        names.append("structured_outputs")
    if len(names) > 1:
        raise InvalidRequest(f"{names[0]}: contradicts {names[1]}; set one", names[0])
    return msgspec.convert(given, StructuredOutputs), names[0]


def grammar_of_tokens(token_ids: Sequence[int], max_tokens: int, tokenizer: Tokenizer) -> str:
    """An answer of these tokens alone. It ends early only if one of them ends answers."""
    largest = max(token_ids)
    if largest >= tokenizer.vocab_size:
        raise InvalidRequest(
            f"allowed_token_ids: {largest} is outside the vocabulary of {tokenizer.vocab_size} tokens",
            "allowed_token_ids",
        )
    tokens = f"<[{','.join(map(str, sorted(set(token_ids))))}]>"
    may_end = not tokenizer.end_ids.isdisjoint(token_ids)
    return f"start: ({tokens})*" if may_end else f"start: {tokens}{{{max_tokens}}}"


def _object_in(text: str) -> JsonObject:
    try:
        return msgspec.json.decode(text, type=JsonObject)
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidRequest(f"guided_json: must be a JSON schema: {error}", "guided_json") from None
