"""A process's log: its level, and its lines, for people or for machines. Nodes, routers and the controller all use it.

By custom a line about a request begins with the request's id ("ID: what happened"), and also names the ids by which
nodes know it (`req-...`). Lines for machines carry both as fields, so that one search finds a request in every
component.
"""

from __future__ import annotations

import itertools
import logging
import re
import secrets
import sys
from collections import deque
from datetime import UTC, datetime
from typing import Annotated, Any, Literal, TextIO

import msgspec

from tandem.base.settings import about

LINE = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_SUBJECT = re.compile(r"([A-Za-z0-9._:-]{1,128})(?:: | [A-Z]+ /)")
_ATTEMPT = re.compile(r"\breq-[0-9a-f]{32}\b")


LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["text", "json"]


class LogsConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    # fmt: off
    level: Annotated[LogLevel, about(
        "the least that the logs of nodes, routers and the controller hold; `debug` has a line for each request on each node"
    )] = "info"
    format: Annotated[LogFormat, about("lines for people, or a JSON object a line, with the ids of requests as fields")] = "text"
    # fmt: on


# How much of its log a process keeps for other processes that ask. All of it goes to its standard error.
KEPT_LINES = 5_000
KEPT_CHARS = 1 << 20
LONGEST_LINE = 8_000
PAGE_LINES = 1_000


class LogLine(msgspec.Struct, frozen=True):
    number: int  # counts the process's lines
    unix_time: float
    level: str
    logger: str
    message: str

    @property
    def request_id(self) -> str | None:
        """The request's id, as its client knows it. Only a router's lines have it."""
        found = _SUBJECT.match(self.message) if _is_of_router(self.logger) else None
        return found[1] if found is not None else None

    @property
    def attempts(self) -> list[str]:
        """The ids by which nodes know the request."""
        return list(dict.fromkeys(_ATTEMPT.findall(self.message)))


class LogPosition(msgspec.Struct, frozen=True):
    """The last line that a reader has seen of a process."""

    process: str  # names one start of the process
    number: int


class LogPage(msgspec.Struct, frozen=True):
    process: str
    lines: list[LogLine]
    lost: int = 0  # lines after the last seen one that are no longer kept
    more: bool = False  # there are newer lines


class LogsQuery(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """`names`: processes, or pools, which mean all of their nodes; empty: all. A process that is not in `after`
    returns its `last` lines."""

    names: list[str] = []
    after: dict[str, LogPosition] = {}
    last: Annotated[int, msgspec.Meta(ge=0, le=KEPT_LINES)] = 100


class ClusterLogs(msgspec.Struct, frozen=True):
    pages: dict[str, LogPage]
    silent: dict[str, str]  # processes that returned no lines, and why


class RecentLines(logging.Handler):
    """Keeps the last lines of this process's log, numbered."""

    def __init__(self) -> None:
        super().__init__()
        self.process = secrets.token_hex(4)
        self._lines: deque[LogLine] = deque()
        self._chars = 0
        self._numbers = itertools.count(1)
        self._exceptions = logging.Formatter()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            # If lines are for people, the handler before this one has made the message.
            message = record.__dict__.get("message") or record.getMessage()
            if record.exc_info:
                message += "\n" + self._exceptions.formatException(record.exc_info)
        except Exception:
            self.handleError(record)
            return
        if len(message) > LONGEST_LINE:
            message = f"{message[:LONGEST_LINE]} … ({len(message)} characters)"
        line = LogLine(next(self._numbers), record.created, record.levelname.lower(), record.name, message)
        self._lines.append(line)
        self._chars += len(message)
        while len(self._lines) > KEPT_LINES or self._chars > KEPT_CHARS:
            self._chars -= len(self._lines.popleft().message)

    def page(self, after: LogPosition | None, last: int, most: int = PAGE_LINES) -> LogPage:
        self.acquire()
        try:
            kept = list(self._lines)
        finally:
            self.release()
        lost = 0
        if after is None:
            kept = kept[len(kept) - last :] if last < len(kept) else kept
        elif after.process == self.process:
            kept = [line for line in kept if line.number > after.number]
            lost = kept[0].number - after.number - 1 if kept else 0
        return LogPage(self.process, kept[:most], lost, more=len(kept) > most)


_recent = RecentLines()


def recent_page(after: LogPosition | None, last: int, most: int = PAGE_LINES) -> LogPage:
    """Returns the lines of this process's log after the last seen one, or the last lines."""
    return _recent.page(after, last, most)


class TextLines(logging.Formatter):
    """Formats `LINE` with a date of ISO 8601. The text of a second is made once, for all lines in it."""

    def __init__(self) -> None:
        super().__init__(LINE)
        self._second, self._date, self._zone = -1, "", ""

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:
        second = int(record.created)
        if second != self._second:
            date = datetime.fromtimestamp(second).astimezone().isoformat()
            self._second, self._date, self._zone = second, date[:19], date[19:]
        return f"{self._date}.{int(record.msecs):03d}{self._zone}"

    def format(self, record: logging.LogRecord) -> str:
        if record.exc_info or record.exc_text or record.stack_info:
            return super().format(record)
        record.message = record.getMessage()
        return f"{self.formatTime(record)} {record.levelname} {record.name}: {record.message}"


class JsonLines(logging.Formatter):
    def __init__(self, component: str) -> None:
        super().__init__()
        self._component = component

    def format(self, record: logging.LogRecord) -> str:
        message = record.getMessage()
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "component": self._component,
            "logger": record.name,
            "message": message,
        }
        attempts = list(dict.fromkeys(_ATTEMPT.findall(message)))
        if attempts:
            line["attempts"] = attempts
        # Only routers know requests by their clients' ids; elsewhere a line begins with a node's name.
        if (found := _SUBJECT.match(message)) is not None and _is_of_router(record.name):
            line["request_id"] = found[1]
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line).decode()


def _is_of_router(logger: str) -> bool:
    return logger.removeprefix("tandem.").partition(".")[0] == "router"


def begin_logging(config: LogsConfig, component: str, stream: TextIO | None = None) -> None:
    """Sets the process's logging up, unless it has some. `component` is its name."""
    # No line names its thread, its process or its place in the code, and to find those takes a good part of a line's time.
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    logging._srcfile = None
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonLines(component) if config.format == "json" else TextLines())
    logging.basicConfig(level=config.level.upper(), handlers=[handler])
    if _recent not in logging.getLogger().handlers:
        logging.getLogger().addHandler(_recent)
    # A line for each export or question is of no use to the reader.
    logging.getLogger("httpx").setLevel(logging.WARNING)
