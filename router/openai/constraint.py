"""What holds a request's answer: the one grammar that its fields add up to, or none."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from tandem.router.openai.chat_request import ChatRequest
from tandem.router.openai.fields import SamplingFields
from tandem.router.openai.grammar import (
    JsonObject,
    StructuredOutputs,
    grammar_of_format,
    grammar_of_structured_outputs,
)
from tandem.router.openai.tool_calls import Format
from tandem.router.openai.tool_grammar import grammar_of_calls
from tandem.router.text.tokenizer import Tokenizer
from tandem.wire.errors import InvalidRequest


async def completion_grammar(request: SamplingFields) -> str | None:
    wanted, param = outputs_wanted(request)
    return await grammar_of_structured_outputs(wanted, param)


async def chat_grammar(request: ChatRequest, tool_format: Format | None, tokenizer: Tokenizer) -> str | None:
    """`tool_format` is None where the model may not call, or nothing is known of how it does."""
    answer = await grammar_of_format(request.response_format)
    wanted, param = outputs_wanted(request)
    other = await grammar_of_structured_outputs(wanted, param)
    if answer is not None and other is not None:
        raise InvalidRequest(f"{param}: contradicts response_format; set one", param)
    answer = answer or other
    if tool_format is None:
        return answer
    if other is not None:
        raise InvalidRequest(f"{param}: contradicts tools, unless tool_choice is 'none'", param)
    return await grammar_of_calls(request, tool_format, tokenizer, answer)


def outputs_wanted(request: SamplingFields) -> tuple[StructuredOutputs | None, str]:
    """`structured_outputs`, which older clients know as one field for each of its kinds; and the field's name."""
    schema = request.guided_json
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
    if not given:
        return request.structured_outputs, "structured_outputs"
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
