"""Tool calls in a model's text: where they begin and end, and what they ask for.

Models write calls as their chat template taught them. In an answer as a whole, what turns out to be no call is text,
shown as it was written. In a stream a call is shown from where its arguments begin, which is as soon as it is known to
be one; what does not begin as calls do is held until it is complete, and then read as a whole answer would be.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from tandem.router.config import ToolFormat
from tandem.router.openai.tool_stream import BETWEEN, HEAD, CallScan, EndSearch, JsonScan, objects
from tandem.router.text.chat_template import ChatTemplate


class ToolCallFound(msgspec.Struct, frozen=True):
    id: str
    name: str
    arguments: str  # JSON

    def shown(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "function",
            "function": {"name": self.name, "arguments": self.arguments},
        }


class Piece(msgspec.Struct, frozen=True):
    """What the text means, in its order: one of the three."""

    text: str = ""
    call: ToolCallFound | None = None  # in a stream it may have no arguments yet
    arguments: str = ""  # more of the last call's


Parse = Callable[[str], "list[ToolCallFound] | None"]  # None: it is no call


class Written(msgspec.Struct, frozen=True):
    """How a model has to write calls that it is made to make. The marks are among it."""

    arguments: str  # the key that they stand under
    between: str
    begin: str = ""
    end: str = ""
    call_begin: str = ""
    call_end: str = ""


class Format(msgspec.Struct, frozen=True):
    begin: str
    end: str | None  # None: a call lasts to the end of the answer
    parse: Parse
    written: Written
    opening: str | None = None  # an answer that begins so is a call even without `begin`


def format_of(name: ToolFormat, template: ChatTemplate | None) -> Format | None:
    """AUTO reads it off the template: it shows the model how to write a call."""
    if name is not ToolFormat.AUTO:
        return _FORMATS.get(name)
    if template is None or not template.mentions_tools:
        return None
    for candidate in (ToolFormat.HERMES, ToolFormat.MISTRAL, ToolFormat.LLAMA3):
        if template.mentions(_FORMATS[candidate].begin):
            return _FORMATS[candidate]
    return _FORMATS[ToolFormat.LLAMA3] if template.mentions('"parameters"') else None


class ToolCallReader:
    """Text in, pieces out. However the text is cut, the pieces say the same."""

    def __init__(self, tool_format: Format, *, streams: bool = False) -> None:
        self._format = tool_format
        self._streams = streams
        self._scan: CallScan | None = None  # of the call that is being shown
        self._shown = False  # calls between the marks that were last begun
        self._held = ""
        self._inside = False
        self._end: EndSearch | None = None  # of what is inside
        self._begun = False  # something that is not whitespace has come
        self._space: str | None = None  # that followed a call, until it is known what comes behind it
        self.found_calls = 0

    def push(self, text: str) -> list[Piece]:
        self._held += text
        pieces: list[Piece] = []
        while self._held:
            if not self._begun:
                if not self._held.strip():
                    break
                self._begun = True
                opening = self._format.opening
                if opening is not None and self._held.lstrip().startswith(opening):
                    self._enter()
            if not (self._read_inside(pieces) if self._inside else self._read_outside(pieces)):
                break
        return pieces

    def _read_outside(self, pieces: list[Piece]) -> bool:
        begin, held = self._format.begin, self._held
        at = held.find(begin)
        if at >= 0:
            self._say(pieces, held[:at])
            self._held = held[at + len(begin) :]
            self._enter()
            return True
        keep = _partial_match(held, begin)
        self._say(pieces, held[:keep])
        self._held = held[keep:]
        return False

    def _enter(self) -> None:
        self._inside = True
        self._end = None if self._format.end is None else EndSearch(self._format.end)

    def _read_inside(self, pieces: list[Piece]) -> bool:
        if self._streams and not self._read_call(pieces):
            return False
        if self._shown:
            return self._read_behind_calls(self._format.end)
        at = self._end.find(self._held) if self._end is not None else -1
        if at < 0:
            return False
        if self._format.parse(self._held[:at].strip()) is None:
            self._close_at_first_mark(pieces)
        else:
            self._close(pieces, at)
        return True

    def _close_at_first_mark(self, pieces: list[Piece]) -> bool:
        """Of what is no call, so that what looked like a string of it is none either. False: there is no mark."""
        at = self._held.find(self._format.end) if self._format.end is not None else -1
        if at >= 0:
            self._close(pieces, at)
        return at >= 0

    def _close(self, pieces: list[Piece], at: int) -> None:
        inner, self._held = self._held[:at], self._held[at + len(self._format.end or "") :]
        self._inside = False
        self._conclude(pieces, inner, closed=True)

    def _read_call(self, pieces: list[Piece]) -> bool:
        """Shows what there is of calls that begin as they should; False while one of them is not over."""
        while True:
            if self._scan is None:
                head = HEAD.match(self._held)
                if head is None:
                    return True
                self._scan, self._shown = CallScan(), True
                self.found_calls += 1
                pieces.append(Piece(call=ToolCallFound(_new_id(), head.group(1), "")))
                self._held = self._held[head.end() :]
            arguments, taken = self._scan.take(self._held)
            self._held = self._held[taken:]
            if arguments:
                pieces.append(Piece(arguments=arguments))
            if not self._scan.over:
                return False
            self._scan = None

    def _read_behind_calls(self, end: str | None) -> bool:
        """Nothing but the end mark is wanted here, or another call, which has not wholly begun yet."""
        at = self._held.find(end) if end is not None else -1
        if end is None or at < 0:
            return False
        self._held = self._held[at + len(end) :]
        self._inside = self._shown = False
        self._space = ""
        return True

    def finish(self) -> list[Piece]:
        """The end of the answer. A call without its end mark counts, if it is one: the mark may be the stop token."""
        pieces: list[Piece] = []
        while self._inside and not self._shown and self._format.parse(self._held.strip()) is None:
            if not self._close_at_first_mark(pieces):
                break
            pieces += self.push("")
        held, self._held = self._held, ""
        if self._inside and self._shown:
            self._say(pieces, held.strip(BETWEEN))
        elif self._inside:
            self._conclude(pieces, held, closed=False)
        else:
            self._say(pieces, held)
        return pieces

    def _conclude(self, pieces: list[Piece], inner: str, *, closed: bool) -> None:
        calls = self._format.parse(inner.strip())
        if calls is None:
            opened = self._format.opening is not None and inner.lstrip().startswith(self._format.opening)
            begin = "" if opened else self._format.begin
            self._say(pieces, begin + inner + (self._format.end or "" if closed else ""))
            return
        self._space = ""
        self.found_calls += len(calls)
        pieces.extend(Piece(call=call) for call in calls)

    def _say(self, pieces: list[Piece], text: str) -> None:
        """Whitespace right behind a call belongs to the format, unless text follows."""
        if self._space is not None:
            text = self._space + text
            if not text.strip():
                self._space = text
                return
            self._space = None
        if text:
            pieces.append(Piece(text=text))


def _partial_match(text: str, mark: str) -> int:
    """Where a mark might be beginning at the text's end; its length if nowhere."""
    for at in range(max(0, len(text) - len(mark) + 1), len(text)):
        if mark.startswith(text[at:]):
            return at
    return len(text)


# --- formats --------------------------------------------------------------------------------------------------


def _call(value: Any) -> ToolCallFound | None:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    text = arguments if isinstance(arguments, str) else msgspec.json.encode(arguments).decode()
    return ToolCallFound(_new_id(), value["name"], text)


def _new_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def _calls(values: Iterable[Any]) -> list[ToolCallFound] | None:
    calls = [_call(value) for value in values]
    found = [call for call in calls if call is not None]
    return found if found and len(found) == len(calls) else None


def _json(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return None


def _parse_hermes(text: str) -> list[ToolCallFound] | None:
    return _calls([_json(text)])


def _parse_llama3(text: str) -> list[ToolCallFound] | None:
    """One object, or several between semicolons."""
    whole = _json(text)
    if whole is not None:
        return _calls(whole if isinstance(whole, list) else [whole])
    return _calls(map(_json, objects(text)))


def _parse_mistral(text: str) -> list[ToolCallFound] | None:
    """A list of objects; or, from newer models, a name and its arguments, as often as there are calls."""
    whole = _json(text)
    if isinstance(whole, list):
        return _calls(whole)
    calls: list[dict[str, Any]] = []
    at = 0
    while at < len(text):
        brace = text.find("{", at)
        end = JsonScan().until(text, brace, 0) if brace >= 0 else None
        if end is None:
            return None
        head = text[at:brace].strip()
        if calls and not head.startswith("[TOOL_CALLS]"):
            return None
        name = (head.removeprefix("[TOOL_CALLS]") if calls else head).removesuffix("[ARGS]").strip()
        arguments = _json(text[brace:end])
        if not name or not isinstance(arguments, dict):
            return None
        calls.append({"name": name, "arguments": arguments})
        at = end
    return _calls(calls)


_FORMATS: dict[ToolFormat, Format] = {
    ToolFormat.HERMES: Format(
        "<tool_call>",
        "</tool_call>",
        _parse_hermes,
        Written("arguments", between="\n", call_begin="<tool_call>\n", call_end="\n</tool_call>"),
    ),
    ToolFormat.MISTRAL: Format(
        "[TOOL_CALLS]",
        None,
        _parse_mistral,
        Written("arguments", between=", ", begin="[TOOL_CALLS][", end="]"),
    ),
    ToolFormat.LLAMA3: Format(
        "<|python_tag|>", None, _parse_llama3, Written("parameters", between="; "), opening="{"
    ),
}
