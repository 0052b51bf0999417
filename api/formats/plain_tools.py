"""Tools for a model whose chat template has none: described in words, called and answered in Hermes's
format."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

_TOLD = """\
You may call these functions. Each line describes one; its parameters are a JSON schema:
{functions}

To call one, write nothing but this, once for each call:
<tool_call>
{{"name": "the function's name", "arguments": {{"parameter": "value"}}}}
</tool_call>
The results come between <tool_response> and </tool_response>."""

Messages = Sequence[Mapping[str, Any]]


def told_in_words(messages: Messages, tools: Sequence[Mapping[str, Any]], *, has_system: bool) -> Messages:
    """Adds the tools' description to the messages. `has_system`: the template takes a system message;
    otherwise the first user message begins with the description."""
    functions = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    words = _TOLD.format(functions=functions)
    plain = _without_calls(messages)
    role = "system" if has_system else "user"
    first = plain[0] if plain and plain[0]["role"] == role else None
    if first is None:
        return [{"role": role, "content": words}, *plain]
    content = first["content"]
    if isinstance(content, str):
        told: Any = "\n\n".join((content, words) if has_system else (words, content))
    else:  # the parts of a message with images
        told = [{"type": "text", "text": f"{words}\n\n"}, *content]
    return [{**first, "content": told}, *plain[1:]]


def _without_calls(messages: Messages) -> list[Mapping[str, Any]]:
    """Turns calls into assistant text and results into user text; the results of several calls become one
    message."""
    plain: list[Mapping[str, Any]] = []
    after_result = False
    for message in messages:
        if message["role"] in ("tool", "function"):
            text = f"<tool_response>\n{message['content']}\n</tool_response>"
            if after_result:
                plain[-1] = {**plain[-1], "content": f"{plain[-1]['content']}\n{text}"}
            else:
                plain.append({"role": "user", "content": text})
            after_result = True
            continue
        after_result = False
        calls = [_written(call["function"]) for call in message.get("tool_calls") or ()]
        if calls:
            text = "\n".join([message["content"], *calls] if message["content"] else calls)
            message = {**{k: v for k, v in message.items() if k != "tool_calls"}, "content": text}
        plain.append(message)
    return plain


def _written(function: Mapping[str, Any]) -> str:
    call = {"name": function["name"], "arguments": function["arguments"]}
    return f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>"
