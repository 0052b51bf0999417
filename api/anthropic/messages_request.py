"""The request of POST /v1/messages, and the chat that is made from it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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
    NamedFunction,
    NamedToolChoice,
    ReasoningEffort,
    ThinkingOptions,
    Tool,
    ToolCall,
)
from tandem.api.openai.fields import JsonSchemaFormat, MaxTokens, ResponseFormat, StopString, Temperature, TopK, TopP
from tandem.base.errors import InvalidRequest


class ImageSource(msgspec.Struct, frozen=True):
    type: str
    media_type: str | None = None
    data: str | None = None
    url: str | None = None


class Block(msgspec.Struct, frozen=True):
    """Part of a message, of any type. What it holds besides is dropped: clients send back what they were given."""

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: JsonObject | None = None
    tool_use_id: str | None = None
    content: str | list[Block] | None = None
    source: ImageSource | None = None


Content = str | list[Block]


class Message(msgspec.Struct, frozen=True):
    role: Literal["user", "assistant", "system"]
    content: Content


class ToolDefinition(msgspec.Struct, frozen=True):
    name: Annotated[str, Meta(min_length=1, max_length=128)]
    input_schema: JsonObject | None = None
    description: str | None = None
    strict: bool | None = None
    type: str | None = None


class ToolChoice(msgspec.Struct, frozen=True):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class OutputFormat(msgspec.Struct, frozen=True):
    type: Literal["json_schema"]
    schema: JsonObject


class OutputConfig(msgspec.Struct, frozen=True):
    effort: ReasoningEffort | None = None
    format: OutputFormat | None = None


class CountRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What both endpoints take: POST /v1/messages/count_tokens is asked for nothing else."""

    messages: Annotated[list[Message], Meta(min_length=1)]
    model: str | None = None
    system: Content | None = None
    tools: Annotated[list[ToolDefinition], Meta(max_length=128)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: ThinkingOptions | None = None
    output_config: OutputConfig | None = None


class MessagesRequest(CountRequest, frozen=True, kw_only=True, forbid_unknown_fields=True):
    max_tokens: MaxTokens
    stream: bool | None = None
    stop_sequences: Annotated[list[StopString], Meta(max_length=16)] | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None


FIELDS = (
    PathFields(
        "/v1/messages",
        MessagesRequest,
        generates=True,
        refused={
            "response_format": FieldRefusal("use output_config.format"),
            "max_completion_tokens": FieldRefusal("use max_tokens"),
            "max_output_tokens": FieldRefusal("use max_tokens"),
            "stop": FieldRefusal("use stop_sequences", ([], "")),
            "reasoning_effort": FieldRefusal("use output_config.effort"),
            "enable_thinking": FieldRefusal("use thinking"),
            "thinking_token_budget": FieldRefusal("use thinking.budget_tokens"),
            "instructions": FieldRefusal("use system"),
            "lora_path": FieldRefusal("name the adapter as model"),
        },
        accepted={"prompt_cache_key": "use the header x-session-id"},
    ),
    PathFields("/v1/messages/count_tokens", CountRequest),
)


def as_chat(request: CountRequest) -> ChatRequest:
    """Makes the chat of a request. Raises InvalidRequest, naming the field, for what a chat cannot have."""
    messages = [one for at, message in enumerate(request.messages) for one in _chat_messages(message, at)]
    if request.system is not None:
        messages.insert(0, ChatMessage("system", _text(request.system, "system")))
    choice, config = request.tool_choice, request.output_config or OutputConfig()
    last = request.messages[-1]
    fields: dict[str, Any] = {}
    if isinstance(request, MessagesRequest):
        fields = {
            "max_tokens": request.max_tokens,
            "stream": request.stream,
            "stop": request.stop_sequences,
            "temperature": request.temperature,
            "top_p": request.top_p,
            "top_k": request.top_k,
        }
    return ChatRequest(
        model=request.model,
        messages=messages,
        tools=[_tool(tool, at) for at, tool in enumerate(request.tools or ())] or None,
        tool_choice=_tool_choice(choice) if request.tools or _must_call(choice) else None,
        parallel_tool_calls=False if choice is not None and choice.disable_parallel_tool_use else None,
        thinking=request.thinking,
        reasoning_effort=config.effort,
        response_format=None if config.format is None else _format(config.format),
        # A last message of the assistant is the beginning of the answer.
        continue_final_message=(last.role == "assistant" and messages[-1].role == "assistant") or None,
        **fields,
    )


def _format(wanted: OutputFormat) -> ResponseFormat:
    return ResponseFormat("json_schema", JsonSchemaFormat("answer", wanted.schema))


def _tool(tool: ToolDefinition, at: int) -> Tool:
    if tool.type not in (None, "custom"):
        raise InvalidRequest(
            f"tools[{at}].type: {tool.type[:100]!r} is a tool of Anthropic's servers; only functions of the "
            "client's own (type 'custom') can be called here",
            f"tools[{at}].type",
        )
    return Tool("function", FunctionDefinition(tool.name, tool.description, tool.input_schema, tool.strict))


def _must_call(choice: ToolChoice | None) -> bool:
    return choice is not None and choice.type in ("any", "tool")


def _tool_choice(choice: ToolChoice | None) -> Any:
    if choice is None:
        return None
    if choice.type == "tool":
        if choice.name is None:
            raise InvalidRequest("tool_choice.name: is required with type 'tool'", "tool_choice.name")
        return NamedToolChoice("function", NamedFunction(choice.name))
    return {"auto": "auto", "any": "required", "none": "none"}[choice.type]


def _chat_messages(message: Message, at: int) -> Iterable[ChatMessage]:
    """Yields a message's chat messages. Tool results are messages of their own, before the user's text."""
    where = f"messages[{at}].content"
    if isinstance(message.content, str):
        yield ChatMessage(message.role, message.content)
        return
    if message.role == "assistant":
        yield _assistant(message.content, where)
        return
    said: list[Block] = []
    for index, block in enumerate(message.content):
        if block.type != "tool_result":
            said.append(block)
            continue
        if block.tool_use_id is None:
            raise InvalidRequest(f"{where}[{index}].tool_use_id: is required", where)
        result = _text(block.content or "", f"{where}[{index}].content")
        yield ChatMessage("tool", result, tool_call_id=block.tool_use_id)
    if said or not message.content:
        yield ChatMessage(message.role, _said(said, where))


def _said(blocks: Sequence[Block], where: str) -> str | list[ContentPart]:
    if not any(block.type == "image" for block in blocks):
        return _text(blocks, where)
    parts: list[ContentPart] = []
    for index, block in enumerate(blocks):
        if block.type != "image":
            parts.append(ContentPart("text", _text([block], where, index)))
            continue
        source = block.source or ImageSource("none")
        url = f"data:{source.media_type};base64,{source.data}" if source.type == "base64" else source.url
        if url is None:
            raise InvalidRequest(f"{where}[{index}].source: must have a type 'base64', a media_type and data", where)
        parts.append(ContentPart("image_url", image_url=url))
    return parts


def _assistant(blocks: Sequence[Block], where: str) -> ChatMessage:
    said: list[Block] = []
    thoughts: list[str] = []
    calls: list[ToolCall] = []
    for index, block in enumerate(blocks):
        if block.type == "thinking":
            thoughts.append(block.thinking or "")
        elif block.type == "tool_use":
            if block.name is None:
                raise InvalidRequest(f"{where}[{index}].name: is required", where)
            arguments = msgspec.json.encode(block.input or {}).decode()
            calls.append(ToolCall(FunctionCall(block.name, arguments), id=block.id))
        elif block.type != "redacted_thinking":
            said.append(block)
    return ChatMessage(
        "assistant", _text(said, where), tool_calls=calls or None, reasoning_content="\n".join(thoughts) or None
    )


def _text(content: str | Sequence[Block], where: str, first: int = 0) -> str:
    if isinstance(content, str):
        return content
    for index, block in enumerate(content, first):
        if block.type != "text" or block.text is None:
            raise InvalidRequest(
                f"{where}[{index}]: must be a block of type 'text' with a text; this model reads no "
                f"{block.type[:100]!r}",
                f"{where}[{index}]",
            )
    return "\n".join(block.text or "" for block in content)
