"""Turns a completion's stream of server-sent events into its timeline."""

from __future__ import annotations

from typing import Any

import msgspec

from tandem.loadgen.timeline import RequestFailure, Timeline

_MAX_ERROR_TEXT = 300


class _Delta(msgspec.Struct):
    content: str | None = None
    role: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None  # completions
    delta: _Delta | None = None  # chat
    finish_reason: str | None = None

    @property
    def announces_only(self) -> bool:
        """The first event of a chat stream names the role and has no token. Some servers send it before they have computed the
        prompt, so it must not count as the first chunk."""
        return (
            self.delta is not None
            and self.delta.role is not None
            and not self.delta.content
            and self.finish_reason is None
        )

    @property
    def words(self) -> str:
        return self.text or (self.delta.content if self.delta is not None else None) or ""


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_DECODER = msgspec.json.Decoder(_Event)


class EventSplitter:
    """Splits a stream into events and returns their data. Names, ids and comments (keep-alives of servers) are dropped."""

    def __init__(self) -> None:
        self._buffer = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Returns the data of every event that is complete now."""
        self._buffer = (self._buffer + data).replace(b"\r\n", b"\n")
        *events, self._buffer = self._buffer.split(b"\n\n")
        return [payload for event in events if (payload := _data_of(event))]


def _data_of(event: bytes) -> bytes:
    if b"\n" not in event and event.startswith(b"data: "):
        return event[6:]
    lines = [line[5:].removeprefix(b" ") for line in event.split(b"\n") if line.startswith(b"data:")]
    return b"\n".join(lines)


class AnswerParser:
    """Fills a timeline from one response's body as it arrives. `finish` raises RequestFailure if something went wrong."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._events = EventSplitter()
        self._status = 0
        self._refusal = b""
        self._failure: RequestFailure | None = None
        self._done = False

    def begin(self, status: int) -> None:
        self._status = status

    def body(self, now: float, data: bytes) -> None:
        if self._status != 200:
            self._refusal += data
            return
        for payload in self._events.feed(data):
            if payload == b"[DONE]":
                self._done = True
            else:
                self._read(now, payload)

    def _read(self, now: float, payload: bytes) -> None:
        try:
            event = _DECODER.decode(payload)
        except msgspec.MsgspecError as error:
            self._fail("malformed", f"{error}: {payload[:_MAX_ERROR_TEXT].decode(errors='replace')}")
            return
        if event.error is not None:
            self._fail("stream_error", _error_text(payload))
        if event.usage is not None:  # some servers repeat it in every event; the last one counts
            if event.usage.prompt_tokens is not None:
                self._timeline.prompt_tokens = event.usage.prompt_tokens
            if event.usage.completion_tokens:
                self._timeline.reported_tokens = event.usage.completion_tokens
        if event.choices and not event.choices[0].announces_only:
            self._timeline.chunk_times.append(now)
            self._timeline.text.append(event.choices[0].words)

    def _fail(self, kind: str, message: str) -> None:
        if self._failure is None:
            self._failure = RequestFailure(kind, message)

    def finish(self) -> None:
        """Call this when the response has ended properly in HTTP's terms. Raises RequestFailure."""
        if self._status != 200:
            raise RequestFailure(f"http_{self._status}", _error_text(self._refusal))
        if self._failure is not None:
            raise self._failure
        if not self._timeline.chunk_times:
            raise RequestFailure("empty", "the stream ended without a token")
        if not self._done:
            raise RequestFailure("truncated", "the stream ended without [DONE]")


def _error_text(body: bytes) -> str:
    """Returns the message of OpenAI's error object; without one, the beginning of the body."""
    try:
        message = msgspec.json.decode(body)["error"]["message"]
    except (msgspec.MsgspecError, KeyError, TypeError):
        message = body.decode(errors="replace")
    return str(message)[:_MAX_ERROR_TEXT]
