"""The prompt that a chat's messages make."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Mapping, Sequence
from typing import Any

from tandem.router.formats.plain_tools import told_in_words
from tandem.router.openai.chat_request import ChatMessage, Tool, messages_for_template, tool_for_template
from tandem.router.text.chat_template import ChatTemplate
from tandem.router.text.special_text import SpecialTextGuard

# Rendering more takes milliseconds, and is worth a hop to a thread.
INLINE_ITEMS = 50


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
