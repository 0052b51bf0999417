"""The prompt of a chat: its messages rendered by the model's template, with the images' placeholders."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import msgspec

from tandem.api import wings
from tandem.api.lark import JsonObject
from tandem.api.openai.chat_request import (
    ChatMessage,
    ChatRequest,
    Tool,
    thinks,
)
from tandem.api.openai.prompts import too_many_characters
from tandem.api.openai.served_model import ServedModel
from tandem.api.openai.template_messages import image_parts, messages_for_template, tool_for_template
from tandem.api.text.chat_template import ChatTemplate, SpecialTextGuard
from tandem.api.text.tokenizer import Tokenizer
from tandem.base.errors import InvalidRequest

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


def _is_short(*values: Any) -> bool:
    """Whether the values are few and their texts short. Takes no longer for longer ones."""
    left = INLINE_CHAT_CHARACTERS
    for length in _text_lengths(*values):
        left -= length + 8  # a value costs time, too
        if left < 0:
            return False
    return True


def _check_characters(tokenizer: Tokenizer, context: int, *values: Any) -> None:
    """Refuses a chat whose texts certainly do not fit. Stops counting there."""
    most = left = tokenizer.most_characters(context)
    for length in _text_lengths(*values):
        left -= length
        if left < 0:
            raise too_many_characters(
                "messages", "the characters of the chat, its tools and documents are", context, most
            )


async def with_images(
    text: str, messages: Sequence[ChatMessage], model: ServedModel
) -> tuple[str, wings.PromptImages | None]:
    """Reads the messages' images and expands their placeholders in the rendered prompt."""
    parts = image_parts(messages)
    if not parts or model.images is None:
        return text, None
    images = await model.images.read(parts)
    return images.expanded(text), images


def check_images(messages: Sequence[ChatMessage], model: ServedModel) -> None:
    """Raises InvalidRequest for an image when the model reads none. Must be called before rendering."""
    if model.images is None and (parts := image_parts(messages)):
        where = parts[0].where
        raise InvalidRequest(
            f"{where}: must be a part of type 'text' with a text; this model reads no 'image_url'", where
        )


async def chat_prompt(
    request: ChatRequest, model: ServedModel, context: int | None
) -> tuple[str, wings.PromptImages | None]:
    """Renders a chat with the model's template. Raises InvalidRequest. `context`: None when any length is
    allowed."""
    check_images(request.messages, model)
    if model.template is None:
        raise InvalidRequest("messages: this model has no chat template; use /v1/completions", "messages")
    continues = bool(request.continue_final_message)
    if continues and request.add_generation_prompt:
        raise InvalidRequest(
            "continue_final_message: contradicts add_generation_prompt", "continue_final_message"
        )
    text = await render_chat(
        model.template,
        model.guard,
        request.messages,
        tools_to_call(request),
        tokenizer=model.tokenizer,
        context=context,
        add_generation_prompt=not continues and request.add_generation_prompt is not False,
        continue_final_message=continues,
        documents=request.documents,
        extra=template_variables(request),
    )
    return await with_images(text, request.messages, model)


def tools_to_call(request: ChatRequest) -> list[Tool] | None:
    """Returns the tools that the model is told of, or None."""
    return request.tools if request.tools and request.tool_choice != "none" else None


async def render_chat(
    template: ChatTemplate,
    guard: SpecialTextGuard,
    messages: Sequence[ChatMessage],
    tools: Sequence[Tool] | None,
    *,
    tokenizer: Tokenizer,
    context: int | None,
    add_generation_prompt: bool,
    continue_final_message: bool,
    documents: Sequence[Mapping[str, Any]] | None = None,
    extra: Mapping[str, Any] | None,
) -> str:
    """Renders a chat, a long one in a thread, so that other streams go on. A chat whose texts certainly do not fit
    into the context is refused before anything looks into them. `context`: None when any length is allowed."""

    given = (messages, tools, documents, extra)
    is_short = len(messages) + len(tools or ()) <= INLINE_ITEMS and _is_short(*given)
    # What is short has fewer characters than most contexts hold, so they need not be counted again.
    surely_fits = is_short and tokenizer.most_characters(context or 0) >= INLINE_CHAT_CHARACTERS

    def render() -> str:
        if context is not None and not surely_fits:
            _check_characters(tokenizer, context, *given)
        return _render(
            template,
            guard,
            messages,
            tools or (),
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            documents=guard.plain_value(documents),
            extra=extra,
        )

    return render() if is_short else await asyncio.to_thread(render)


def _render(
    template: ChatTemplate,
    guard: SpecialTextGuard,
    messages: Sequence[ChatMessage],
    tools: Sequence[Tool],
    **options: Any,
) -> str:
    plain: Sequence[Mapping[str, Any]] = [guard.plain_message(one) for one in messages_for_template(messages)]
    offered = [tool_for_template(tool) for tool in tools]
    if offered and not template.mentions_tools:
        plain, offered = wings.told_in_words(plain, offered, has_system=template.takes_system), []
    if not template.takes_text:
        plain = [_in_parts(message) for message in plain]
    return template.render(plain, tools=offered or None, **options)


def _in_parts(message: Mapping[str, Any]) -> Mapping[str, Any]:
    content = message["content"]
    return (
        {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message
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
