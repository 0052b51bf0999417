"""The format of the lines that a process logs."""

from __future__ import annotations

import io
import json
import logging
import sys
from collections.abc import Iterator
from datetime import datetime

import pytest

from tandem.base.logs import LogsConfig, TextLines, begin_logging

ATTEMPT = "req-" + "0af3" * 8


@pytest.fixture(autouse=True)
def _loggers_as_they_were() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def written(config: LogsConfig, logger: str, message: str, *args: object, level: int = logging.INFO) -> list[str]:
    out = io.StringIO()
    logging.getLogger().handlers.clear()
    begin_logging(config, "decode-0", out)
    logging.getLogger(logger).log(level, message, *args, exc_info=sys.exc_info()[0] is not None)
    return out.getvalue().splitlines()


def test_lines_for_people_are_as_they_always_were() -> None:
    [line] = written(LogsConfig(), "tandem.router.pool", "node %s left", "d0")
    assert line.endswith("INFO tandem.router.pool: node d0 left")


def test_lines_for_machines_have_the_requests_ids_as_fields() -> None:
    [line] = written(LogsConfig(format="json"), "tandem.router.dispatch.life", "%s: moves (%s)", "my-id", ATTEMPT)
    told = json.loads(line)
    assert (told["component"], told["level"], told["request_id"]) == ("decode-0", "info", "my-id")
    assert told["attempts"] == [ATTEMPT]
    [line] = written(LogsConfig(format="json"), "router.access", "%s %s %s %s", "my-id", "POST", "/v1/completions", 200)
    assert json.loads(line)["request_id"] == "my-id"
    [line] = written(LogsConfig(format="json"), "tandem.kvtransfer.protocol", "%s: the thread died", "decode-0")
    assert "request_id" not in json.loads(line), "a node is no request"


def test_a_line_is_one_line_whatever_it_says() -> None:
    try:
        raise ValueError("two\nlines")
    except ValueError:
        [line] = written(LogsConfig(format="json"), "tandem.node.loop", "it failed\nbadly")
    told = json.loads(line)
    assert told["message"] == "it failed\nbadly"
    assert "ValueError: two\nlines" in told["exception"]


def test_the_level_is_the_least_that_is_written() -> None:
    for level, lines in {"debug": 1, "info": 1, "warning": 0, "error": 0}.items():
        assert len(written(LogsConfig(level=level), "tandem.node", "hello")) == lines  # type: ignore[arg-type]


def test_a_lines_date_is_of_iso_8601_with_its_zone() -> None:
    record = logging.LogRecord("tandem.x", logging.INFO, "", 0, "hello", (), None)
    record.created, record.msecs = 1_800_000_000.25, 250.0
    date, _, rest = TextLines().format(record).partition(" ")
    assert rest == "INFO tandem.x: hello"
    assert datetime.fromisoformat(date).timestamp() == 1_800_000_000.25
    assert datetime.fromisoformat(date).tzinfo is not None
