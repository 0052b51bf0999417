"""The prompt of a chat: its messages rendered by the model's template, with the images' placeholders."""

from __future__ import annotations

import asyncio
import functools
import operator
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import msgspec

from tandem.api import wings
from tandem.api.lark import JsonObject
from tandem.api.openai.chat_request import ChatMessage, ChatRequest, ContentPart, ImagePart, Tool, ToolCall, thinks
from tandem.api.openai.prompts import long_texts, too_many_characters
from tandem.api.openai.served_model import ServedModel
from tandem.api.openai.text_request import TokenizeRequest
from tandem.api.text.chat_template import ChatTemplate, SpecialTextGuard, in_parts
from tandem.api.text.tokenizer import Tokenizer
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
        raise InvalidRequest(f"{where}.content: must be text, unless an assistant's message has tool_calls", where)
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
                "function": {"name": call.function.name, "arguments": _arguments(call, f"{where}.tool_calls[{i}]")},
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
                f"{where}.content[{index}].image_url: must be an object with a url", f"{where}.content[{index}]"
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
    function = {name: value for name, value in msgspec.to_builtins(tool.function).items() if value is not None}
    return {"type": tool.type, "function": function}


# Rendering more takes milliseconds, so a thread does it.
INLINE_ITEMS = 50
INLINE_CHAT_CHARACTERS = 16 << 10


@functools.cache
def _text_fields(kind: type[msgspec.Struct]) -> tuple[str, ...]:
    return tuple(name for name in kind.__struct_fields__ if name != "image_url")


def _text_lengths(*values: Any) -> Iterator[int]:
    """Yields the lengths of all texts within the values of a request, however deep, and 1 for each other value.
    Images' addresses are no text of the prompt."""
    open_values: list[Iterator[Any]] = [iter(values)]
    while open_values:
        for value in open_values[-1]:
            if value is None:
                continue
            if isinstance(value, str):
                yield len(value)
            elif isinstance(value, msgspec.Struct):
                open_values.append(map(functools.partial(getattr, value), _text_fields(type(value))))
                break
            elif isinstance(value, list | tuple):
                open_values.append(iter(value))
                break
            elif isinstance(value, Mapping):
                open_values.append(chain.from_iterable(value.items()))
                break
            else:
                yield 1
        else:
            open_values.pop()


_others_of = operator.attrgetter("name", "tool_calls", "tool_call_id", "reasoning_content")
_NO_OTHERS = (None,) * 4
_VALUE_COST = 8  # in characters: a value costs time, too


def texts_are_short(messages: Sequence[ChatMessage], *others: Any) -> bool:
    """Whether the values are few and their texts short. Takes no longer for longer ones."""
    left = INLINE_CHAT_CHARACTERS
    rest = [value for value in others if value]
    for one in messages:
        if type(one.content) is str and _others_of(one) == _NO_OTHERS:  # nearly every message
            left -= len(one.content) + 3 * _VALUE_COST  # the message, its role and its content
        else:
            rest.append(one)
    for length in _text_lengths(*rest) if rest and left >= 0 else ():
        left -= length + _VALUE_COST
        if left < 0:
            return False
    return left >= 0


def _check_characters(tokenizer: Tokenizer, context: int, *values: Any) -> None:
    """Refuses a chat whose texts certainly do not fit. Stops counting there."""
    most = left = tokenizer.most_characters(context)
    for length in _text_lengths(*values):
        left -= length
        if left < 0:
            raise too_many_characters(
                "messages", "the characters of the chat, its tools and documents are", context, most
            )


class TemplateInput(msgspec.Struct, frozen=True):
    messages: Sequence[ChatMessage]
    tools: Sequence[Tool] | None = None
    documents: Sequence[JsonObject] | None = None
    variables: JsonObject | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False

    @classmethod
    def of(
        cls, request: ChatRequest | TokenizeRequest, tools: Sequence[Tool] | None, variables: JsonObject | None
    ) -> TemplateInput:
        continues, adds = bool(request.continue_final_message), request.add_generation_prompt
        if continues and adds:
            raise InvalidRequest("continue_final_message: contradicts add_generation_prompt", "continue_final_message")
        adds = not continues and adds is not False
        return cls(request.messages or (), tools, request.documents, variables, adds, continues)


async def chat_prompt(
    model: ServedModel, chat: TemplateInput, context: int | None, tenant: str
) -> tuple[str, wings.PromptImages | None]:
    """Renders a chat with the model's template, and expands its images' placeholders. Raises InvalidRequest.
    `context`: None when any length is allowed."""
    parts = image_parts(chat.messages)
    if parts and model.images is None:
        where = parts[0].where
        raise InvalidRequest(
            f"{where}: must be a part of type 'text' with a text; this model reads no 'image_url'", where
        )
    if model.template is None:
        raise InvalidRequest("messages: this model has no chat template; send a prompt to /v1/completions", "messages")
    text = await render_chat(model.template, model.guard, model.tokenizer, chat, context, tenant)
    if not parts or model.images is None:
        return text, None
    images = await model.images.read(parts, tenant)
    return images.expanded(text), images


def tools_to_call(request: ChatRequest) -> list[Tool] | None:
    """Returns the tools that the model is told of, or None."""
    return request.tools if request.tools and request.tool_choice != "none" else None


async def render_chat(
    template: ChatTemplate,
    guard: SpecialTextGuard,
    tokenizer: Tokenizer,
    chat: TemplateInput,
    context: int | None,
    tenant: str,
) -> str:
    """Renders a chat, a long one in a thread, so that other streams go on, and those of one key in turn. A chat whose texts certainly do not fit
    into the context is refused before anything looks into them. `context`: None when any length is allowed."""

    given = (chat.messages, chat.tools, chat.documents, chat.variables)
    is_short = len(chat.messages) + len(chat.tools or ()) <= INLINE_ITEMS and texts_are_short(*given)
    # What is short has fewer characters than most contexts hold, so they need not be counted again.
    surely_fits = is_short and tokenizer.most_characters(context or 0) >= INLINE_CHAT_CHARACTERS

    def render() -> str:
        if context is not None and not surely_fits:
            _check_characters(tokenizer, context, *given)
        return _render(template, guard, chat)

    if is_short:
        return render()
    async with long_texts.turn(tenant):
        return await asyncio.to_thread(render)


def _render(template: ChatTemplate, guard: SpecialTextGuard, chat: TemplateInput) -> str:
    plain: Sequence[Mapping[str, Any]] = [guard.plain_message(one) for one in messages_for_template(chat.messages)]
    offered = [tool_for_template(tool) for tool in chat.tools or ()]
    if offered and not template.mentions_tools:
        plain, offered = wings.told_in_words(plain, offered, has_system=template.takes_system), []
    if not template.takes_text:
        plain = [in_parts(message) for message in plain]
    return template.render(
        plain,
        tools=offered or None,
        documents=guard.plain_value(chat.documents),
        extra=chat.variables,
        add_generation_prompt=chat.add_generation_prompt,
        continue_final_message=chat.continue_final_message,
    )


def template_variables(request: ChatRequest) -> JsonObject:
    """Returns the request's own template variables, and what it says about reasoning under the names that
    models' templates read."""
    variables: JsonObject = {}
    wanted = thinks(request)
    if request.reasoning_effort is not None:
        variables["reasoning_effort"] = request.reasoning_effort
        if wanted is None and request.reasoning_effort == "none":
            wanted = False
    if wanted is not None:
        variables["enable_thinking"] = variables["thinking"] = wanted
    return variables | (request.chat_template_kwargs or {})
