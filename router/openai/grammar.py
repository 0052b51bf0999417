"""What an answer must follow, as the nodes are told it: the one grammar that a request's fields add up to, checked before any node computes
anything, or none.
"""

from __future__ import annotations

import asyncio
import re
from collections import OrderedDict
from collections.abc import Sequence

import msgspec
from llguidance import LLMatcher, regex_to_lark

from tandem.router.formats.answer_format import AnswerFormat
from tandem.router.formats.call_grammar import CallGrammar, OfferedTool
from tandem.router.formats.lark import JsonObject, json_schema, quoted
from tandem.router.openai.chat_request import ChatRequest, NamedToolChoice, Tool
from tandem.router.openai.fields import ResponseFormat, SamplingFields, StructuredOutputs
from tandem.router.text.tokenizer import Tokenizer
from tandem.wire.errors import InvalidRequest

MAX_GRAMMAR = 256 * 1024
_REMEMBERED = 256
# Checked grammars, and what is wrong with them. Others are checked in a thread, as short as they may be: a schema of a
# few hundred characters can cost a tenth of a second.
_checked: OrderedDict[str, str | None] = OrderedDict()

_SOURCE_LINES = re.compile(r"\n\s+\d+ \|.*", re.DOTALL)
_PLACE = re.compile(r"^at \d+\(\d+\): |failed to compile JSON schema: ")


async def grammar_of_format(wanted: ResponseFormat | None) -> str | None:
    if wanted is None or wanted.type == "text":
        if wanted is not None and wanted.json_schema is not None:
            raise InvalidRequest(
                "response_format.json_schema: only with type 'json_schema'", "response_format.json_schema"
            )
        return None
    if wanted.type == "json_object":
        return f"start: %json {json_schema({'type': 'object'})}"
    if wanted.json_schema is None:
        raise InvalidRequest("response_format.json_schema: is required", "response_format.json_schema")
    grammar = f"start: %json {json_schema(wanted.json_schema.schema)}"
    await check_grammar(grammar, "response_format.json_schema.schema")
    return grammar


async def grammar_of_structured_outputs(
    wanted: StructuredOutputs | None, param: str = "structured_outputs"
) -> str | None:
    if wanted is None:
        return None
    given = [name for name in wanted.__struct_fields__ if getattr(wanted, name) is not None]
    if len(given) != 1:
        raise InvalidRequest(
            f"structured_outputs: must have one of {', '.join(wanted.__struct_fields__)}",
            "structured_outputs",
        )
    if wanted.json is not None:
        grammar = f"start: %json {json_schema(wanted.json)}"
    elif wanted.regex is not None:
        grammar = f"start: /{_regex(wanted.regex)}/"
    elif wanted.choice is not None:
        grammar = "start: " + " | ".join(map(quoted, wanted.choice))
    else:
        grammar = wanted.grammar or ""
    await check_grammar(grammar, f"{param}.{given[0]}" if param == "structured_outputs" else param)
    return grammar


def _regex(text: str) -> str:
    if "\n" in text:
        text = text.replace("\n", "\\n")
    return regex_to_lark(text, "d")


async def check_grammar(grammar: str, param: str) -> None:
    """Raises InvalidRequest, naming the field, for what no node could compile."""
    if len(grammar) > MAX_GRAMMAR:
        raise InvalidRequest(f"{param}: must be at most {MAX_GRAMMAR} characters long", param)
    if grammar in _checked:
        problem = _checked[grammar]
        _checked.move_to_end(grammar)
    else:
        problem = _checked[grammar] = await asyncio.to_thread(_problem, grammar)
        if len(_checked) > _REMEMBERED:
            _checked.popitem(last=False)
    if problem is not None:
        raise InvalidRequest(f"{param}: {problem}", param)


def _problem(grammar: str) -> str | None:
    is_error, messages = LLMatcher.validate_grammar_with_warnings(LLMatcher.grammar_from_lark(grammar))
    if not is_error:
        return None
    plain = _PLACE.sub("", _SOURCE_LINES.sub("", messages[0] if messages else "is no grammar"))
    return _PLACE.sub("", " ".join(plain.split()))[:500]


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
