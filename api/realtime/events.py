"""The events that a client sends on /v1/realtime, each with its own type, and the conversation that they
make."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from tandem.api.openai.fields import MaxTokens
from tandem.api.openai.mistakes import explain
from tandem.base.errors import InvalidRequest

EventId = Annotated[str, Meta(max_length=128)]
ItemId = Annotated[str, Meta(min_length=1, max_length=128)]
AnswerTokens = MaxTokens | Literal["inf"]


class TextPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    type: Literal["input_text", "output_text", "text"]
    text: str


class MessageItem(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    role: Literal["system", "user", "assistant"]
    content: Annotated[list[TextPart], Meta(min_length=1)]
    type: Literal["message"] = "message"
    id: ItemId | None = None
    status: str | None = None
    object: str | None = None


class SessionFields(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """None leaves a field as it was."""

    type: Literal["realtime"] = "realtime"
    model: str | None = None
    instructions: str | None = None
    output_modalities: list[Literal["text"]] | None = None
    max_output_tokens: AnswerTokens | None = None


class ResponseFields(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """OpenAI's fields, and the sampling fields of chats."""

    instructions: str | None = None
    output_modalities: list[Literal["text"]] | None = None
    max_output_tokens: AnswerTokens | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None


class _Event(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="type"):
    event_id: EventId | None = None


class SessionUpdate(_Event, frozen=True, tag="session.update"):
    session: SessionFields


class ItemCreate(_Event, frozen=True, tag="conversation.item.create"):
    item: MessageItem


class TextAppend(_Event, frozen=True, tag="input_text_buffer.append"):
    """Appends to a user's message that arrives in parts. Tandem's own event, modelled on OpenAI's audio
    buffer."""

    text: str


class TextCommit(_Event, frozen=True, tag="input_text_buffer.commit"):
    """Completes the message."""


class TextClear(_Event, frozen=True, tag="input_text_buffer.clear"):
    """Drops the message."""


class ResponseCreate(_Event, frozen=True, tag="response.create"):
    response: ResponseFields = ResponseFields()


class ResponseCancel(_Event, frozen=True, tag="response.cancel"):
    response_id: str | None = None


ClientEvent = SessionUpdate | ItemCreate | TextAppend | TextCommit | TextClear | ResponseCreate | ResponseCancel
_EVENTS: dict[str, type[_Event]] = {
    str(one.__struct_config__.tag): one
    for one in (SessionUpdate, ItemCreate, TextAppend, TextCommit, TextClear, ResponseCreate, ResponseCancel)
}


def read_event(value: dict[str, Any]) -> ClientEvent:
    kind = value.get("type")
    if not isinstance(kind, str) or kind not in _EVENTS:
        raise InvalidRequest(f"type: must be one of {', '.join(sorted(_EVENTS))}, not {kind!r}", "type")
    try:
        event: ClientEvent = msgspec.convert(value, ClientEvent)
        return event
    except msgspec.ValidationError as error:
        raise explain(str(error), _EVENTS[kind], value) from None


# Each is looked at for every answer, and takes memory besides its text.
MOST_ITEMS = 4096


class Conversation:
    """The items so far, and the message that is still arriving."""

    def __init__(self) -> None:
        self.items: list[tuple[str, str, str]] = []  # id, role, text
        self.buffer: list[str] = []

    def check_room(self) -> None:
        if len(self.items) >= MOST_ITEMS:
            raise InvalidRequest(f"a conversation has at most {MOST_ITEMS} items; begin another")

    def add(self, item_id: str, role: str, text: str) -> None:
        self.check_room()
        if any(known == item_id for known, _, _ in self.items):
            raise InvalidRequest(f"item.id: {item_id[:100]!r} is taken; leave it out or send another", "item.id")
        self.items.append((item_id, role, text))

    def take_buffer(self) -> str:
        text = "".join(self.buffer)
        if not text:
            raise InvalidRequest("input_text_buffer: is empty; append text to it first")
        self.buffer.clear()
        return text

    def messages(self, instructions: str | None, *, with_buffer: bool) -> list[dict[str, str]]:
        found = [{"role": "system", "content": instructions}] if instructions else []
        found += [{"role": role, "content": text} for _, role, text in self.items]
        if with_buffer and self.buffer:
            found.append({"role": "user", "content": "".join(self.buffer)})
        return found


def settled_tokens(prompt: list[int], continued: list[int]) -> list[int]:
    """Returns the leading tokens of a growing prompt that will hardly change: those that it shares with the
    same prompt continued by more text, but for the last one. A wrong guess only means that the prefix cache
    does not have it."""
    pairs = zip(prompt, continued, strict=False)
    count = next(
        (place for place, (mine, other) in enumerate(pairs) if mine != other), min(len(prompt), len(continued))
    )
    return prompt[: max(0, count - 1)]
