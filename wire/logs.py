"""A process's log: its level, and lines for people or for machines. The same for nodes, routers and the controller.

By custom a line about a request begins with its id ("ID: what happened"), and names the ids that nodes know it by as they are
(`req-...`). Lines for machines carry both as fields, so that one search finds a request in every component.
"""

from __future__ import annotations

import logging
import re
import sys
from datetime import UTC, datetime
from typing import Annotated, Any, Literal, TextIO

import msgspec

from tandem.wire.settings import about

LINE = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_SUBJECT = re.compile(r"([A-Za-z0-9._:-]{1,128})(?:: | [A-Z]+ /)")
_ATTEMPT = re.compile(r"\breq-[0-9a-f]{32}\b")


LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["text", "json"]


class LogsConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    level: Annotated[
        LogLevel,
        about(
            "the least that the logs of nodes, routers and the controller hold; `debug` has a line for each request on each node"
        ),
    ] = "info"
    format: Annotated[
        LogFormat,
        about("lines for people, or a JSON object a line, with the ids of requests as fields"),
    ] = "text"


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
        # Only a router knows requests by their callers' ids; elsewhere a line begins with the name of a node.
        if (found := _SUBJECT.match(message)) is not None and _is_of_router(record.name):
            line["request_id"] = found[1]
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line).decode()


def _is_of_router(logger: str) -> bool:
    return logger.removeprefix("tandem.").partition(".")[0] == "router"


def begin_logging(config: LogsConfig, component: str, stream: TextIO | None = None) -> None:
    """Where the process has none yet. `component` is its name."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonLines(component) if config.format == "json" else logging.Formatter(LINE))
    logging.basicConfig(level=config.level.upper(), handlers=[handler])
    # A line for each export or question is no news.
    logging.getLogger("httpx").setLevel(logging.WARNING)
