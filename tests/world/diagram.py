"""A schedule's history as a diagram: a column for each process, a line for each message between two of them or for what happened."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import msgspec

from tests.world.schedule import Outcome

_WIDTH = 15
# Sent all the time, whatever happens
_ALWAYS = {"ping", "status", "renew", "renewed", "clock"}


@dataclasses.dataclass
class _Message:
    at: float
    source: str
    target: str
    kind: str
    about: str  # an id of a request or of a transfer
    count: int = 1


def _bodies(decoded: Any) -> Iterator[dict[str, Any]]:
    """The messages in what a frame has: letters wrap them."""
    if isinstance(decoded, dict) and "type" in decoded:
        yield decoded
    elif isinstance(decoded, list):
        for part in decoded:
            yield from _bodies(part)


def _about(body: dict[str, Any]) -> list[str]:
    match body:
        case {"request_id": str(name)} | {"transfer_id": str(name)}:
            return [name]
        case {"request_ids": [*names]}:
            return [str(name) for name in names]
        case {"chunks": [*chunks]}:
            return [str(chunk["request_id"] if isinstance(chunk, dict) else chunk[0]) for chunk in chunks]
    return [""]


class Diagram:
    """`on_frame` reads what the cluster's processes send; `on_message` takes what the control plane's world tells."""

    def __init__(self) -> None:
        self._messages: list[_Message] = []
        self._transfers: dict[str, str] = {}  # their requests

    def on_frame(self, at: float, source: str, target: str, frame: bytes) -> None:
        for body in _bodies(msgspec.msgpack.decode(frame)):
            kind = body["type"]
            if kind in _ALWAYS:
                continue
            if transfer := body.get("transfer"):
                self._transfers[transfer["transfer_id"]] = body["request_id"]
            for about in _about(body):
                self._add(_Message(at, source, target, kind, about))

    def on_message(self, at: float, source: str, target: str, text: str) -> None:
        self._add(_Message(at, source, target, text, ""))

    def _add(self, message: _Message) -> None:
        """Counts a message that follows one of its like."""
        for last in reversed(self._messages[-4:]):
            if (last.source, last.target, last.kind, last.about) == (
                message.source,
                message.target,
                message.kind,
                message.about,
            ):
                last.count += 1
                return
        self._messages.append(message)

    def drawn(self, outcome: Outcome) -> str:
        happened = [(float(line[:8]), line[9:]) for line in outcome.history if line[:8].strip()[:1].isdigit()]
        there = {name for message in self._messages for name in (message.source, message.target)}
        columns = [name for name in outcome.columns if name in there]
        rows: list[tuple[float, int, str]] = [(at, 0, f"── {text}") for at, text in happened]
        for message in self._messages:
            request = self._transfers.get(message.about, message.about)
            about = outcome.names.get(request, "")
            label = f"{message.kind} {about}".strip() + (f" ×{message.count}" if message.count > 1 else "")
            rows.append((round(message.at, 3), 1, _arrow(columns, message.source, message.target, label)))
        head = " " * 9 + "".join(name.center(_WIDTH) for name in columns)
        return "\n".join([head, *(f"{at:8.3f} {text}" for at, _, text in sorted(rows, key=lambda row: row[:2]))])


def _arrow(columns: list[str], source: str, target: str, label: str) -> str:
    if source not in columns or target not in columns:
        return f"   {source} ──▶ {target}: {label}"
    line = ["│".rjust(_WIDTH // 2 + 1).ljust(_WIDTH)] * len(columns)
    text = list("".join(line))
    start, end = (columns.index(name) * _WIDTH + _WIDTH // 2 for name in (source, target))
    low, high = min(start, end), max(start, end)
    if low == high:
        return "".join(text).rstrip() + f"  {source}: {label}"
    fits = len(label) + 4 < high - low
    text[low + 1 : high] = list((f" {label} " if fits else "").center(high - low - 1, "─"))
    if end > start:
        text[high - 1] = "▶"
    else:
        text[low + 1] = "◀"
    return "".join(text).rstrip() + ("" if fits else f"  {label}")
