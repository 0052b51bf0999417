"""The one grammar, or none, that a request's fields make together, checked before any node computes."""

from __future__ import annotations

import asyncio
import operator
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import msgspec
from llguidance import regex_to_lark
from llguidance.gbnf_to_lark import gbnf_to_lark

from tandem.api.answer_format import CallsAsked, OfferedTool
from tandem.api.lark import ANY_TEXT, MAX_GRAMMAR, JsonObject, json_schema, quoted
from tandem.api.openai.chat_prompt import texts_are_short
from tandem.api.openai.chat_request import ChatRequest, NamedToolChoice, Tool
from tandem.api.openai.fields import ResponseFormat, SamplingFields, StructuredOutputs
from tandem.api.openai.grammar_check import GrammarChecker
from tandem.api.openai.served_model import ServedModel
from tandem.api.text.tenant_cache import CacheOwner, TenantCache
from tandem.api.text.tokenizer import Tokenizer
from tandem.base.errors import InvalidRequest
from tandem.base.shares import OneAtATime

FREE_TEXT = f"start: {ANY_TEXT}"
_REMEMBERED = 256
# Checked grammars with their problem, "" for none.
_checked: TenantCache[str, str] = TenantCache(_REMEMBERED)
_checking = OneAtATime()
_checker = GrammarChecker()
# Not one of the threads that all requests share: a schema of a few hundred characters can take a tenth of a second.
_thread = ThreadPoolExecutor(1, thread_name_prefix="grammars")


async def grammar_of_format(wanted: ResponseFormat | None, owner: CacheOwner) -> str | None:
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
    await check_grammar(grammar, "response_format.json_schema.schema", owner)
    return grammar


async def grammar_of_structured_outputs(wanted: StructuredOutputs | None, param: str, owner: CacheOwner) -> str | None:
    if wanted is None:
        return None
    given = [name for name in wanted.__struct_fields__ if getattr(wanted, name) is not None]
    if len(given) != 1:
        raise InvalidRequest(
            f"structured_outputs: must have one of {', '.join(wanted.__struct_fields__)}", "structured_outputs"
        )
    # Building a grammar of a longer text would hold up others, and it is refused in any case.
    texts = [wanted.regex or "", wanted.grammar or "", *(wanted.choice or ())]
    place = f"{param}.{given[0]}" if param == "structured_outputs" else param
    _check_length(sum(map(len, texts)), place)
    if wanted.json is not None:
        grammar = f"start: %json {json_schema(wanted.json)}"
    elif wanted.regex is not None:
        grammar = f"start: /{_regex(wanted.regex)}/"
    elif wanted.choice is not None:
        grammar = "start: " + " | ".join(map(quoted, wanted.choice))
    else:
        grammar = wanted.grammar or ""
    await check_grammar(grammar, place, owner)
    return grammar


def _regex(text: str) -> str:
    if "\n" in text:
        text = text.replace("\n", "\\n")
    return regex_to_lark(text, "d")


async def check_grammar(grammar: str, param: str, owner: CacheOwner) -> None:
    """Raises InvalidRequest, naming the field, for a grammar that no node could compile."""
    _check_length(len(grammar), param)
    problem = _checked.get(owner, grammar)
    if problem is None:
        async with _checking.turn(owner.tenant):
            problem = await asyncio.get_running_loop().run_in_executor(_thread, _checker.problem, grammar)
        _checked.put(owner, grammar, problem, 1)
    if problem:
        raise InvalidRequest(f"{param}: {problem}", param)


def _check_length(characters: int, param: str) -> None:
    if characters > MAX_GRAMMAR:
        raise InvalidRequest(f"{param}: must be at most {MAX_GRAMMAR} characters long", param)


async def completion_grammar(request: SamplingFields, owner: CacheOwner) -> str | None:
    grammar, _ = await _answers_grammar(request, owner)
    return grammar


async def _answers_grammar(request: SamplingFields, owner: CacheOwner) -> tuple[str | None, str | None]:
    """Returns the grammar of an answer, and the name of the field that it comes from unless that is response_format."""
    grammar = await grammar_of_format(request.response_format, owner)
    wanted, param = await outputs_wanted(request, owner)
    other = await grammar_of_structured_outputs(wanted, param, owner)
    if other is None:
        return grammar, None
    if grammar is not None:
        raise InvalidRequest(f"{param}: contradicts response_format; set one", param)
    return other, param


async def chat_grammar(
    request: ChatRequest,
    tools: Sequence[Tool] | None,
    model: ServedModel,
    owner: CacheOwner,
    *,
    any_answer: bool = False,
) -> str | None:
    """Returns the grammar of a chat's answer, without the reasoning before it, or None. `tools`: None when
    the model may not call. `any_answer`: a grammar is needed, also of an answer that may be anything."""
    written = model.format
    answer, param = await _answers_grammar(request, owner)
    if answer is not None:
        answer = written.answer_grammar(answer, model.tokenizer)
    if not tools or not written.reads_calls:
        return answer or (FREE_TEXT if any_answer else None)
    if param is not None:
        raise InvalidRequest(f"{param}: contradicts tools, unless tool_choice is 'none'", param)
    asked = _calls_asked(request, tools, any_answer=any_answer)
    # Of tools with thousands of parameters it takes long, and only then is known whether it is too long.
    make = partial(written.calls_grammar, asked, answer, model.tokenizer)
    if texts_are_short((), tools):
        grammar = make()
    else:
        async with _checking.turn(owner.tenant):
            grammar = await asyncio.to_thread(make)
    if grammar is not None:
        try:
            await check_grammar(grammar, "tools", owner)
        except InvalidRequest:
            await _check_each(request, asked, owner)
            raise
    return grammar


async def _check_each(request: ChatRequest, asked: CallsAsked, owner: CacheOwner) -> None:
    """Raises InvalidRequest, naming the function, if the parameters of one alone cannot be compiled."""
    offered = {tool.name: tool for tool in asked.tools}
    for index, tool in enumerate(request.tools or ()):
        one = offered.get(tool.function.name)
        if one is not None:
            schema = json_schema(one.parameters, lenient=not one.strict)
            await check_grammar(f"start: %json {schema}", f"tools[{index}].function.parameters", owner)


def _calls_asked(request: ChatRequest, tools: Sequence[Tool], *, any_answer: bool) -> CallsAsked:
    choice = request.tool_choice
    named = choice.function.name if isinstance(choice, NamedToolChoice) else None
    if named is not None:
        tools = [tool for tool in tools if tool.function.name == named]
        if not tools:
            raise InvalidRequest(
                f"tool_choice.function.name: {named!r} is none of the tools", "tool_choice.function.name"
            )
    return CallsAsked(
        [_offered(tool) for tool in tools],
        must=named is not None or choice == "required",
        once=named is not None or request.parallel_tool_calls is False,
        any_answer=any_answer,
    )


def _offered(tool: Tool) -> OfferedTool:
    function = tool.function
    return OfferedTool(function.name, function.parameters or {}, bool(function.strict))


# The other servers' names of the fields of StructuredOutputs.
_OTHER_NAMES = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "regex": "regex",
    "json_schema": "json",
    "ebnf": "grammar",
}


_others_of = operator.attrgetter(*_OTHER_NAMES)
_NO_OTHERS = (None,) * len(_OTHER_NAMES)


async def outputs_wanted(request: SamplingFields, owner: CacheOwner) -> tuple[StructuredOutputs | None, str]:
    """Returns `structured_outputs`, also from the single fields of other clients, and the name of the field that was used."""
    if _others_of(request) == _NO_OTHERS:
        return request.structured_outputs, "structured_outputs"
    given = [name for name in _OTHER_NAMES if getattr(request, name) is not None]
    others = given[1:] if request.structured_outputs is None else [*given[1:], "structured_outputs"]
    if others:
        raise InvalidRequest(f"{given[0]}: contradicts {others[0]}; set one", given[0])
    name, value = given[0], getattr(request, given[0])
    if _OTHER_NAMES[name] == "json" and isinstance(value, str):
        value = _object_in(value, name)
    elif name == "ebnf":
        _check_length(len(value), name)
        async with _checking.turn(owner.tenant):
            value = await asyncio.to_thread(_lark_of, value)
    return msgspec.convert({_OTHER_NAMES[name]: value}, StructuredOutputs), name


_NO_OPTIONS = "%llguidance {}\n"  # stands at the head of a whole grammar alone, and this one may become a part


def _lark_of(ebnf: str) -> str:
    try:
        return gbnf_to_lark(ebnf).removeprefix(_NO_OPTIONS)
    except Exception as error:  # the library's parser raises whatever its text leads it to
        raise InvalidRequest(
            f'ebnf: must be a grammar of rules such as \'root ::= "yes" | "no"\': {str(error)[:200]}', "ebnf"
        ) from None


def grammar_of_tokens(token_ids: Sequence[int], max_tokens: int, tokenizer: Tokenizer) -> str:
    """Returns a grammar of these tokens only. The answer ends early only if one of them ends answers."""
    largest = max(token_ids)
    if largest >= tokenizer.vocab_size:
        raise InvalidRequest(
            f"allowed_token_ids: {largest} is outside the vocabulary of {tokenizer.vocab_size} tokens",
            "allowed_token_ids",
        )
    tokens = f"<[{','.join(map(str, sorted(set(token_ids))))}]>"
    may_end = not tokenizer.end_ids.isdisjoint(token_ids)
    return f"start: ({tokens})*" if may_end else f"start: {tokens}{{{max_tokens}}}"


def _object_in(text: str, param: str) -> JsonObject:
    try:
        return msgspec.json.decode(text, type=JsonObject)
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidRequest(f"{param}: must be a JSON schema: {error}", param) from None
