"""Tool calls in a model's text: where they begin and end, and what they ask for.

Models write calls as their chat template taught them. A call is shown once it is complete: half a call helps no
client, and only a whole one is known to be one. What turns out to be none is text, shown as it was written.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from router.config import ToolFormat
from router.text.chat_template import ChatTemplate


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
    """What the text means, in its order: one of the two."""

    text: str = ""
    call: ToolCallFound | None = None


Parse = Callable[[str], "list[ToolCallFound] | None"]  # None: it is no call


class Format(msgspec.Struct, frozen=True):
    begin: str
    end: str | None  # None: a call lasts to the end of the answer
    parse: Parse
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

    def __init__(self, tool_format: Format) -> None:
        self._format = tool_format
        self._held = ""
        self._inside = False
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
                    self._inside = True
            if not (self._read_inside(pieces) if self._inside else self._read_outside(pieces)):
                break
        return pieces

    def _read_outside(self, pieces: list[Piece]) -> bool:
        begin, held = self._format.begin, self._held
        at = held.find(begin)
        if at >= 0:
            self._say(pieces, held[:at])
            self._held = held[at + len(begin) :]
            self._inside = True
            return True
        keep = _partial_match(held, begin)
        self._say(pieces, held[:keep])
        self._held = held[keep:]
        return False

    def _read_inside(self, pieces: list[Piece]) -> bool:
        end = self._format.end
        at = self._held.find(end) if end is not None else -1
        if end is None or at < 0:
            return False
        inner, self._held = self._held[:at], self._held[at + len(end) :]
        self._inside = False
        self._conclude(pieces, inner, closed=True)
        return True

    def finish(self) -> list[Piece]:
        """The end of the answer. A call without its end mark counts, if it is one: the mark may be the stop token."""
        pieces: list[Piece] = []
        held, self._held = self._held, ""
        if self._inside:
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
    return ToolCallFound(f"call_{secrets.token_hex(12)}", value["name"], text)


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
    return _calls([_json(part) for part in re.split(r"(?<=\})\s*;\s*(?=\{)", text)])


def _parse_mistral(text: str) -> list[ToolCallFound] | None:
    """A list of objects; or, from newer models, a name and its arguments, as often as there are calls."""
    whole = _json(text)
    if isinstance(whole, list):
        return _calls(whole)
    calls: list[dict[str, Any]] = []
    for part in text.split("[TOOL_CALLS]"):
        name, brace, rest = part.partition("{")
        name = name.removesuffix("[ARGS]").strip()
        arguments = _json(brace + rest)
        if not name or not isinstance(arguments, dict):
            return None
        calls.append({"name": name, "arguments": arguments})
    return _calls(calls)


_FORMATS: dict[ToolFormat, Format] = {
    ToolFormat.HERMES: Format("<tool_call>", "</tool_call>", _parse_hermes),
    ToolFormat.MISTRAL: Format("[TOOL_CALLS]", None, _parse_mistral),
    ToolFormat.LLAMA3: Format("<|python_tag|>", None, _parse_llama3, opening="{"),
}
