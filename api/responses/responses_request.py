"""The request of POST /v1/responses, and the chat that is made from it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from tandem.api.field_table import FieldRefusal, PathFields
from tandem.api.lark import JsonObject
from tandem.api.openai.chat_request import (
    ChatMessage,
    ChatRequest,
    ContentPart,
    FunctionCall,
    FunctionDefinition,
    FunctionName,
    NamedFunction,
    NamedToolChoice,
    ReasoningEffort,
    Tool,
    ToolCall,
)
from tandem.api.openai.fields import (
    CommonFields,
    JsonSchemaFormat,
    MaxTokens,
    ResponseFormat,
    SchemaName,
    StreamOptions,
)
from tandem.api.openai.prompts import PromptTooLong
from tandem.base.errors import InvalidRequest

ResponseId = Annotated[str, Meta(min_length=1, max_length=128)]


class InputPart(msgspec.Struct, frozen=True):
    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: str | None = None


class InputItem(msgspec.Struct, frozen=True):
    """Something that was said, called or answered. What it holds besides is dropped: answers are sent back as they came."""

    type: str = "message"
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: str | list[InputPart] | None = None
    summary: list[InputPart] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[InputPart] | None = None


class ItemTool(msgspec.Struct, frozen=True):
    type: str
    name: FunctionName | None = None
    description: str | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None


class NamedChoice(msgspec.Struct, frozen=True):
    type: Literal["function"]
    name: FunctionName


class TextFormat(msgspec.Struct, frozen=True):
    type: Literal["text", "json_object", "json_schema"]
    name: SchemaName | None = None
    schema: JsonObject | None = None
    description: str | None = None
    strict: bool | None = None


class TextOptions(msgspec.Struct, frozen=True):
    format: TextFormat | None = None
    verbosity: str | None = None  # without effect, as in a chat


class ReasoningOptions(msgspec.Struct, frozen=True):
    """Reasoning is shown as it is; nothing is summarized."""

    effort: ReasoningEffort | None = None
    summary: str | None = None


class ResponsesRequest(CommonFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """OpenAI's fields, and those of a chat that OpenAI's responses do not have, under their names there."""

    input: str | Annotated[list[InputItem], Meta(min_length=1)]
    instructions: str | None = None
    previous_response_id: ResponseId | None = None
    max_output_tokens: MaxTokens | None = None
    tools: Annotated[list[ItemTool], Meta(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    stream_options: StreamOptions | None = None
    background: bool | None = None
    store: bool | None = None
    metadata: dict[str, str] | None = None
    prompt_cache_key: str | None = None
    truncation: Literal["auto", "disabled"] | None = None
    include: list[str] | None = None
    conversation: JsonObject | str | None = None
    prompt: JsonObject | None = None
    enable_thinking: bool | None = None
    chat_template_kwargs: JsonObject | None = None


FIELDS = (
    PathFields(
        "/v1/responses",
        ResponsesRequest,
        generates=True,
        refused={
            "messages": FieldRefusal("send input"),
            "response_format": FieldRefusal("use text.format"),
            "max_tokens": FieldRefusal("use max_output_tokens"),
            "max_completion_tokens": FieldRefusal("use max_output_tokens"),
            "reasoning_effort": FieldRefusal("use reasoning.effort"),
            "system": FieldRefusal("use instructions"),
            "stop_sequences": FieldRefusal("use stop"),
            "lora_path": FieldRefusal("name the adapter as model"),
            "thinking": FieldRefusal("use enable_thinking and reasoning.effort"),
            **dict.fromkeys(
                (
                    "regex", "json_schema", "ebnf",
                    "guided_json", "guided_regex", "guided_choice", "guided_grammar",
                ),
                FieldRefusal("use structured_outputs"),
            ),
        },
    ),
)  # fmt: skip


# The rest of what OpenAI lets clients include is of tools that this server does not have, or encrypted.
_LOGPROBS = "message.output_text.logprobs"


def check(request: ResponsesRequest) -> None:
    for name, instead in (("conversation", "use previous_response_id"), ("prompt", "send the input itself")):
        if getattr(request, name) is not None:
            raise InvalidRequest(f"{name}: this server keeps none; {instead}", name)
    if request.background and request.store is False:
        raise InvalidRequest("background: needs store, because the answer is asked for later", "background")
    if _LOGPROBS in (request.include or ()):
        raise InvalidRequest(f"include: {_LOGPROBS} is only in chats here (logprobs, top_logprobs)", "include")
    if request.truncation == "auto":
        raise InvalidRequest(
            "truncation: must be 'disabled', because this server drops no part of a chat", "truncation"
        )


def items_of(request: ResponsesRequest) -> list[InputItem]:
    if isinstance(request.input, str):
        return [InputItem(role="user", content=request.input)]
    return request.input


# What a chat's fields are called in a request for a response.
_NAMES = {"messages": "input", "max_tokens": "max_output_tokens"}


@contextmanager
def naming_its_fields() -> Iterator[None]:
    """A refusal of the chat that was made of a request names the field that the client wrote."""
    try:
        yield
    except (InvalidRequest, PromptTooLong) as error:
        # Of one of the messages, too: which item of the input it was made of is not known here.
        if (name := _NAMES.get((error.param or "").partition("[")[0])) is None:
            raise
        text = str(error).removeprefix(f"{error.param}:").replace("tokens of messages", "tokens of input")
        raise type(error)(f"{name}:{text}", name) from error


def as_chat(request: ResponsesRequest, before: Sequence[InputItem]) -> ChatRequest:
    """Makes the chat of a request. `before`: the conversation that it continues."""
    messages = list(_messages([*before, *items_of(request)]))
    if request.instructions is not None:
        messages.insert(0, ChatMessage("system", request.instructions))
    form = request.text.format if request.text is not None else None
    choice = request.tool_choice
    common: dict[str, Any] = {name: getattr(request, name) for name in CommonFields.__struct_fields__}
    return ChatRequest(
        messages=messages,
        max_tokens=request.max_output_tokens,
        tools=[_tool(tool, at) for at, tool in enumerate(request.tools or ())] or None,
        tool_choice=NamedToolChoice("function", NamedFunction(choice.name))
        if isinstance(choice, NamedChoice)
        else choice
        if request.tools or choice == "required"  # which is refused without tools
        else None,
        parallel_tool_calls=request.parallel_tool_calls,
        response_format=_format(form) if form is not None else None,
        reasoning_effort=request.reasoning.effort if request.reasoning is not None else None,
        prompt_cache_key=request.prompt_cache_key,
        enable_thinking=request.enable_thinking,
        chat_template_kwargs=request.chat_template_kwargs,
        **common,
    )


def _format(form: TextFormat) -> ResponseFormat:
    if form.type != "json_schema":
        return ResponseFormat(form.type)
    if form.schema is None:
        raise InvalidRequest("text.format.schema: is required", "text.format.schema")
    return ResponseFormat(
        form.type, JsonSchemaFormat(form.name or "answer", form.schema, form.description, form.strict)
    )


def _tool(tool: ItemTool, at: int) -> Tool:
    if tool.type != "function":
        raise InvalidRequest(
            f"tools[{at}].type: must be 'function'; {tool.type[:100]!r} is a tool of OpenAI's servers",
            f"tools[{at}].type",
        )
    if tool.name is None:
        raise InvalidRequest(f"tools[{at}].name: is required", f"tools[{at}].name")
    return Tool("function", FunctionDefinition(tool.name, tool.description, tool.parameters, tool.strict))


class _Turn:
    """An assistant's turn, assembled from its items."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.thoughts: list[str] = []
        self.calls: list[ToolCall] = []

    def message(self) -> ChatMessage:
        return ChatMessage(
            "assistant",
            "\n".join(self.said),
            tool_calls=self.calls or None,
            reasoning_content="\n".join(self.thoughts) or None,
        )


def _messages(items: Sequence[InputItem]) -> Iterable[ChatMessage]:
    turn: _Turn | None = None
    for at, item in enumerate(items):
        where = f"input[{at}]"
        if item.type in ("function_call", "reasoning") or (item.type == "message" and item.role == "assistant"):
            turn = turn or _Turn()
            _add(turn, item, where)
            continue
        if turn is not None:
            yield turn.message()
            turn = None
        if item.type == "function_call_output":
            if item.call_id is None:
                raise InvalidRequest(f"{where}.call_id: is required", f"{where}.call_id")
            yield ChatMessage("tool", _text(item.output, f"{where}.output"), tool_call_id=item.call_id)
        elif item.type == "message":
            if item.role is None:
                raise InvalidRequest(f"{where}.role: is required", f"{where}.role")
            yield ChatMessage(item.role, _said(item.content, f"{where}.content"))
        else:
            raise InvalidRequest(
                f"{where}.type: must be message, function_call, function_call_output or reasoning, not "
                f"{item.type[:100]!r}",
                f"{where}.type",
            )
    if turn is not None:
        yield turn.message()


def _add(turn: _Turn, item: InputItem, where: str) -> None:
    if item.type == "reasoning":
        parts = item.content if item.content is not None else item.summary
        turn.thoughts.append(_text(parts or "", f"{where}.content"))
    elif item.type == "function_call":
        if item.name is None or item.call_id is None:
            missing = "name" if item.name is None else "call_id"
            raise InvalidRequest(f"{where}.{missing}: is required", f"{where}.{missing}")
        turn.calls.append(ToolCall(FunctionCall(item.name, item.arguments or "{}"), id=item.call_id))
    else:
        turn.said.append(_text(item.content, f"{where}.content"))


def _said(content: str | Sequence[InputPart] | None, where: str) -> str | list[ContentPart]:
    if content is None or isinstance(content, str) or not any(part.type == "input_image" for part in content):
        return _text(content, where)
    parts: list[ContentPart] = []
    for at, part in enumerate(content):
        if part.type != "input_image":
            parts.append(ContentPart("text", _text([part], where, at)))
        elif part.image_url is None:
            raise InvalidRequest(f"{where}[{at}].image_url: is required, as a data URL", f"{where}[{at}]")
        else:
            parts.append(ContentPart("image_url", image_url=part.image_url))
    return parts


def _text(content: str | Sequence[InputPart] | None, where: str, first: int = 0) -> str:
    if content is None:
        raise InvalidRequest(f"{where}: is required", where)
    if isinstance(content, str):
        return content
    texts: list[str] = []
    for at, part in enumerate(content, first):
        text = part.refusal if part.type == "refusal" else part.text
        if text is None or not (part.type == "refusal" or part.type.endswith("text")):
            raise InvalidRequest(
                f"{where}[{at}]: must be a part with a text; this model reads no {part.type[:100]!r}", f"{where}[{at}]"
            )
        texts.append(text)
    return "\n".join(texts)


def shown_fields(request: ResponsesRequest, model: str) -> dict[str, Any]:
    """Returns the request's fields that an answer repeats."""
    form = request.text.format if request.text is not None else None
    reasoning = request.reasoning or ReasoningOptions()
    return {
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "model": model,
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "previous_response_id": request.previous_response_id,
        "reasoning": {"effort": reasoning.effort, "summary": None},
        "store": request.store is not False,
        "background": bool(request.background),
        "temperature": request.temperature,
        "text": {"format": {"type": "text"} if form is None else _given(form)},
        "tool_choice": _given(request.tool_choice)
        if isinstance(request.tool_choice, NamedChoice)
        else request.tool_choice or "auto",
        "tools": [{"parameters": None, "strict": None, **_given(tool)} for tool in request.tools or ()],
        "top_p": request.top_p,
        "truncation": "disabled",
        "metadata": request.metadata or {},
    }


def _given(value: msgspec.Struct) -> dict[str, Any]:
    return {name: found for name, found in msgspec.to_builtins(value).items() if found is not None}
