"""A chat's messages and tools, checked, as chat templates expect them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from tandem.api.openai.chat_request import (
    ChatMessage,
    ContentPart,
    ImagePart,
    Tool,
    ToolCall,
)
from tandem.base.errors import InvalidRequest


def messages_for_template(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """Returns plain dictionaries as chat templates expect them. A content is text, or a list of parts if it
    has images."""
    return [_plain(message, f"messages[{index}]") for index, message in enumerate(messages)]


def image_parts(messages: Sequence[ChatMessage]) -> list[ImagePart]:
    """Returns the messages' images in the order in which a template writes them."""
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
    """Returns a call's arguments as an object, because templates write it themselves. OpenAI's clients send
    JSON text."""
    try:
        return msgspec.json.decode(call.function.arguments or "{}")
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidRequest(f"{where}.function.arguments: must be JSON: {error}", where) from error


def tool_for_template(tool: Tool) -> dict[str, Any]:
    """Returns the tool as the client wrote it, without fields that it left out."""
    function = {
        name: value for name, value in msgspec.to_builtins(tool.function).items() if value is not None
    }
    return {"type": tool.type, "function": function}
