"""POST /v1/chat/completions: the request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from tandem.router.formats.lark import JsonObject
from tandem.router.openai.fields import MaxTokens, ResponseFormat, SamplingFields, TopLogprobs
from tandem.wire.errors import InvalidRequest

ReasoningEffort = Annotated[
    str, Meta(pattern="^[a-z_]{1,20}$", description="such as none, low, medium, high")
]
FunctionName = Annotated[str, Meta(pattern="^[a-zA-Z0-9_.-]{1,64}$")]


class ImageUrl(msgspec.Struct, frozen=True):
    """`detail` says how fine an image is to be read; here each model's own settings do."""

    url: str
    detail: str | None = None


class ContentPart(msgspec.Struct, frozen=True):
    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: ImageUrl | str | None = None

    @property
    def url(self) -> str | None:
        return self.image_url.url if isinstance(self.image_url, ImageUrl) else self.image_url


class FunctionCall(msgspec.Struct, frozen=True):
    name: str
    arguments: str


class ToolCall(msgspec.Struct, frozen=True):
    function: FunctionCall
    id: str | None = None
    type: Literal["function"] = "function"


class ChatMessage(msgspec.Struct, frozen=True):
    """Fields that it does not name are dropped: clients send back what other servers gave them in an answer."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None


class FunctionDefinition(msgspec.Struct, frozen=True):
    name: FunctionName
    description: str | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, frozen=True):
    type: Literal["function"]
    function: FunctionDefinition


class NamedFunction(msgspec.Struct, frozen=True):
    name: FunctionName


class NamedToolChoice(msgspec.Struct, frozen=True):
    type: Literal["function"]
    function: NamedFunction


class ChatRequest(SamplingFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    max_tokens: MaxTokens | None = None
    max_completion_tokens: MaxTokens | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    response_format: ResponseFormat | None = None
    tools: Annotated[list[Tool], Meta(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | None = None
    parallel_tool_calls: bool | None = None  # false: a call that is required is the only one
    modalities: list[Literal["text"]] | None = None
    prompt_cache_key: str | None = None  # keeps a conversation on its nodes, under session affinity
    reasoning_effort: ReasoningEffort | None = None
    enable_thinking: bool | None = None
    include_reasoning: bool | None = None  # false: the reasoning is left out of the answer
    documents: list[JsonObject] | None = None
    chat_template_kwargs: JsonObject | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


def template_variables(request: ChatRequest) -> JsonObject:
    """What the request says about reasoning, under the names that models' templates read; and its own variables."""
    variables: JsonObject = {}
    thinks = request.enable_thinking
    if request.reasoning_effort is not None:
        variables["reasoning_effort"] = request.reasoning_effort
        if thinks is None and request.reasoning_effort == "none":
            thinks = False
    if thinks is not None:
        variables["enable_thinking"] = variables["thinking"] = thinks
    return variables | (request.chat_template_kwargs or {})


class ImagePart(msgspec.Struct, frozen=True):
    """An image as a message has it."""

    url: str
    where: str


def messages_for_template(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """Plain dictionaries as chat templates expect them: contents are text, or lists of parts where there are images among them."""
    return [_plain(message, f"messages[{index}]") for index, message in enumerate(messages)]


def image_parts(messages: Sequence[ChatMessage]) -> list[ImagePart]:
    """In the order in which a template comes to them."""
    return [
        ImagePart(part.url, f"messages[{index}].content[{at}]")
        for index, message in enumerate(messages)
        if isinstance(message.content, list)
        for at, part in enumerate(message.content)
        if part.type == "image_url" and part.url is not None
    ]


def _plain(message: ChatMessage, where: str) -> dict[str, Any]:
    content = _content(message, where)
    if content is None and not message.tool_calls:
        raise InvalidRequest(
            f"{where}.content: must be text, unless an assistant's message has tool_calls", where
        )
    if message.tool_calls and message.role != "assistant":
        raise InvalidRequest(f"{where}.tool_calls: only an assistant's message has them", where)
    if message.role == "tool" and message.tool_call_id is None:
        raise InvalidRequest(f"{where}.tool_call_id: a tool's message must say which call it answers", where)
    plain: dict[str, Any] = {"role": "system" if message.role == "developer" else message.role}
    plain["content"] = content if content is not None else ""
    if message.name is not None:
        plain["name"] = message.name
    if message.tool_call_id is not None:
        plain["tool_call_id"] = message.tool_call_id
    if message.reasoning_content is not None:
        plain["reasoning_content"] = message.reasoning_content
    if message.tool_calls:
        plain["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {
                    "name": call.function.name,
                    "arguments": _arguments(call, f"{where}.tool_calls[{i}]"),
                },
            }
            for i, call in enumerate(message.tool_calls)
        ]
    return plain


def _content(message: ChatMessage, where: str) -> str | list[dict[str, Any]] | None:
    content = message.content
    if content is None or isinstance(content, str):
        return content
    if not any(part.type == "image_url" for part in content):
        return _text(content, where)
    if message.role != "user":
        raise InvalidRequest(f"{where}.content: only a user's message has images", f"{where}.content")
    parts: list[dict[str, Any]] = []
    for index, part in enumerate(content):
        if part.type != "image_url":
            parts.append({"type": "text", "text": _text([part], where, index)})
        elif part.url is None:
            raise InvalidRequest(
                f"{where}.content[{index}].image_url: must be an object with a url",
                f"{where}.content[{index}]",
            )
        else:
            parts.append({"type": "image"})
    return parts


def _text(content: Sequence[ContentPart], where: str, first: int = 0) -> str:
    pieces: list[str] = []
    for index, part in enumerate(content, first):
        text = part.refusal if part.type == "refusal" else part.text if part.type == "text" else None
        if text is None:
            raise InvalidRequest(
                f"{where}.content[{index}]: must be a part of type 'text' with a text; this model reads no {part.type!r}",
                f"{where}.content[{index}]",
            )
        pieces.append(text)
    return "\n".join(pieces)


def _arguments(call: ToolCall, where: str) -> Any:
    """As an object: templates write it out themselves. OpenAI's clients send it as JSON text."""
    try:
        return msgspec.json.decode(call.function.arguments or "{}")
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidRequest(f"{where}.function.arguments: must be JSON: {error}", where) from error


def tool_for_template(tool: Tool) -> dict[str, Any]:
    """As the client wrote it, without what it left out."""
    function = {
        name: value for name, value in msgspec.to_builtins(tool.function).items() if value is not None
    }
    return {"type": tool.type, "function": function}
