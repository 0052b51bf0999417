"""The prompt that a chat's messages make."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from tandem.router.formats.plain_tools import told_in_words
from tandem.router.images.reader import PromptImages
from tandem.router.openai.chat_request import (
    ChatMessage,
    ChatRequest,
    Tool,
    image_parts,
    messages_for_template,
    template_variables,
    tool_for_template,
)
from tandem.router.openai.served_model import ServedModel
from tandem.router.text.chat_template import ChatTemplate, SpecialTextGuard
from tandem.wire.errors import InvalidRequest

# Rendering more takes milliseconds, and is worth a hop to a thread.
INLINE_ITEMS = 50


class ChatPrompt(msgspec.Struct, frozen=True):
    text: str
    images: PromptImages


async def with_images(text: str, messages: Sequence[ChatMessage], model: ServedModel) -> ChatPrompt:
    """A rendered prompt, and what stands for its messages' images."""
    parts = image_parts(messages)
    if not parts or model.images is None:
        return ChatPrompt(text, PromptImages([], []))
    images = await model.images.read(parts)
    return ChatPrompt(model.images.expanded(text, images), images)


def check_images(messages: Sequence[ChatMessage], model: ServedModel) -> None:
    """Before anything is made of them."""
    if model.images is None and (parts := image_parts(messages)):
        where = parts[0].where
        raise InvalidRequest(
            f"{where}: must be a part of type 'text' with a text; this model reads no 'image_url'", where
        )


async def chat_prompt(request: ChatRequest, model: ServedModel) -> ChatPrompt:
    """What the model's template makes of a chat."""
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
        add_generation_prompt=not continues and request.add_generation_prompt is not False,
        continue_final_message=continues,
        documents=request.documents,
        extra=template_variables(request),
    )
    return await with_images(text, request.messages, model)


def tools_to_call(request: ChatRequest) -> list[Tool] | None:
    """None when the model is to know of none."""
    return request.tools if request.tools and request.tool_choice != "none" else None


async def render_chat(
    template: ChatTemplate,
    guard: SpecialTextGuard,
    messages: Sequence[ChatMessage],
    tools: Sequence[Tool] | None,
    *,
    add_generation_prompt: bool,
    continue_final_message: bool,
    documents: Sequence[Mapping[str, Any]] | None = None,
    extra: Mapping[str, Any] | None,
) -> str:
    """A long chat does not hold up other streams."""
    render = functools.partial(
        _render,
        template,
        guard,
        messages,
        tools or (),
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final_message,
        documents=guard.plain_value(documents),
        extra=extra,
    )
    if len(messages) + len(tools or ()) <= INLINE_ITEMS:
        return render()
    return await asyncio.to_thread(render)


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
        plain, offered = told_in_words(plain, offered, has_system=template.takes_system), []
    if not template.takes_text:
        plain = [_in_parts(message) for message in plain]
    return template.render(plain, tools=offered or None, **options)


def _in_parts(message: Mapping[str, Any]) -> Mapping[str, Any]:
    content = message["content"]
    return (
        {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message
    )
