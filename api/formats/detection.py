"""Finds a model's format, from a call that its own chat template writes, if it writes one."""

from __future__ import annotations

import json
import logging
from typing import Any

from tandem.api.formats.answer_format import ModelFormat
from tandem.api.formats.calls import CallFormat, CallReader
from tandem.api.formats.harmony import HarmonyCalls, HarmonyReader
from tandem.api.formats.registry import CALLS, MENTIONED, REASONING
from tandem.api.pieces import AnswerReader, Arguments, CallBegins
from tandem.api.settings import ReasoningName, ToolFormat
from tandem.api.text.chat_template import ChatTemplate
from tandem.base.errors import InvalidRequest

logger = logging.getLogger(__name__)

_NAME = "look_up_weather"
_ARGUMENTS = {"city": "Reykjavik", "days": 3}
_PROPERTIES = {"city": {"type": "string"}, "days": {"type": "integer"}}
_TOOL = {
    "type": "function",
    "function": {
        "name": _NAME,
        "description": "what the weather will be",
        "parameters": {"type": "object", "properties": _PROPERTIES, "required": ["city", "days"]},
    },
}
_ASK: dict[str, Any] = {"role": "user", "content": "What will the weather be?"}
_CALL: dict[str, Any] = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "abcdefghi", "type": "function", "function": {"name": _NAME, "arguments": _ARGUMENTS}}],
}
_RESULT: dict[str, Any] = {"role": "tool", "tool_call_id": "abcdefghi", "name": _NAME, "content": "rain"}


def format_of(tool_format: ToolFormat, reasoning_format: ReasoningName, template: ChatTemplate | None) -> ModelFormat:
    """Returns the formats that the operator named or, for AUTO, those that the template shows. A template
    without tools, and one whose tools fit no known format, gets Hermes's."""
    if tool_format is ToolFormat.AUTO:
        tool_format = detected_calls(template)
    if reasoning_format is ReasoningName.AUTO:
        reasoning_format = _detected_reasoning(template, tool_format)
    logger.info("tool calls are read as %s, reasoning as %s", tool_format, reasoning_format)
    if ToolFormat.HARMONY in (tool_format, reasoning_format):  # equal texts: it is one format
        return ModelFormat(harmony=HarmonyCalls())
    return ModelFormat(calls=CALLS.get(tool_format), reasoning=REASONING.get(reasoning_format))


def detected_calls(template: ChatTemplate | None) -> ToolFormat:
    if template is None or not template.mentions_tools:
        return ToolFormat.HERMES
    written = _written_call(template)
    if written is not None:
        for name, calls in [*CALLS.items(), (ToolFormat.HARMONY, None)]:
            if _reads(calls, written) and (calls is None or _is_written(calls, written)):
                return name
        if _NAME in written:
            logger.warning("the chat template writes tool calls in an unknown format: set router.tool_format")
    for name, marks in MENTIONED:
        if all(template.mentions(mark) for mark in marks):
            return name
    return ToolFormat.HERMES


def _written_call(template: ChatTemplate) -> str | None:
    """Returns how the template writes an assistant's call, from where the model would begin to write it, or
    None."""
    for history in ([_ASK, _CALL], [_ASK, _CALL, _RESULT]):
        try:
            asked = template.render([_ASK], tools=[_TOOL])
            full = template.render(history, tools=[_TOOL], add_generation_prompt=False)
        except InvalidRequest:
            continue
        same = next((at for at, pair in enumerate(zip(asked, full, strict=False)) if pair[0] != pair[1]), None)
        return full[min(len(asked), len(full)) if same is None else same :]
    return None


def _reads(calls: CallFormat | None, written: str) -> bool:
    reader: AnswerReader
    reader = HarmonyReader(calls=True) if calls is None else CallReader(calls, {_NAME: {"properties": _PROPERTIES}})
    pieces = reader.push(written) + reader.finish()
    names = [piece.name for piece in pieces if isinstance(piece, CallBegins)]
    arguments = "".join(piece.text for piece in pieces if isinstance(piece, Arguments))
    try:
        return names == [_NAME] and json.loads(arguments) == _ARGUMENTS
    except ValueError:
        return False


def _is_written(calls: CallFormat, written: str) -> bool:
    """Whether the template's call has the opening marks that this format's grammar writes. Several formats
    may read the same call."""
    begin = calls.layout.begin + calls.layout.call_begin
    return "".join(begin.split()) in "".join(written.split())


def _detected_reasoning(template: ChatTemplate | None, calls: ToolFormat) -> ReasoningName:
    if template is None:
        return ReasoningName.NONE
    if calls is ToolFormat.HARMONY or template.mentions("<|channel|>analysis"):
        return ReasoningName.HARMONY
    # <think> comes last, because other families' templates mention it, too.
    for name, marks in sorted(REASONING.items(), key=lambda row: row[0] is ReasoningName.THINK):
        if template.mentions(marks.end.strip()) or template.mentions(marks.begin.strip()):
            return name
    return ReasoningName.NONE
