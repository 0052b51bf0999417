"""The format of the lines that a process logs, and the recent ones that it keeps for others to ask for."""

from __future__ import annotations

import io
import json
import logging
import sys
from collections.abc import Iterator
from datetime import datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.base import logs
from tandem.base.logs import KEPT_LINES, LONGEST_LINE, LogPosition, LogsConfig, RecentLines, TextLines, begin_logging

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


def write(ring: RecentLines, message: str, logger: str = "tandem.node.node", level: int = logging.INFO) -> None:
    ring.handle(logging.LogRecord(logger, level, "", 0, message, (), None))


def messages(ring: RecentLines, after: LogPosition | None = None, last: int = 100, most: int = 1000) -> list[str]:
    return [line.message for line in ring.page(after, last, most).lines]


def test_the_last_lines_and_what_comes_after_them() -> None:
    ring = RecentLines()
    for number in range(5):
        write(ring, str(number))
    page = ring.page(None, 2)
    assert [line.message for line in page.lines] == ["3", "4"]
    assert messages(ring, last=0) == []
    seen = LogPosition(page.process, page.lines[-1].number)
    assert messages(ring, seen) == []
    write(ring, "5")
    assert messages(ring, seen) == ["5"]
    assert messages(ring, LogPosition("another start", 4)) == ["0", "1", "2", "3", "4", "5"]


def test_a_line_names_the_request_that_it_is_about() -> None:
    ring = RecentLines()
    write(ring, f"my-id: moves ({ATTEMPT})", "tandem.router.dispatch.life")
    write(ring, f"decode-0: begins {ATTEMPT}")
    ours, theirs = ring.page(None, 9).lines
    assert (ours.request_id, ours.attempts) == ("my-id", [ATTEMPT])
    assert (theirs.request_id, theirs.attempts) == (None, [ATTEMPT])


def test_an_exception_is_part_of_its_line() -> None:
    ring = RecentLines()
    try:
        raise ValueError("a bug")
    except ValueError as error:
        found = (ValueError, error, error.__traceback__)
        ring.handle(logging.LogRecord("x", logging.ERROR, "", 0, "it failed", (), found))
    assert "ValueError: a bug" in messages(ring)[0]


def test_what_is_kept_has_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    ring = RecentLines()
    monkeypatch.setattr(logs, "KEPT_CHARS", 10 * LONGEST_LINE)
    write(ring, "x" * 10 * LONGEST_LINE)
    assert len(messages(ring)[0]) < LONGEST_LINE + 50
    for _ in range(KEPT_LINES + 10):
        write(ring, "short")
    assert len(messages(ring, last=2 * KEPT_LINES, most=2 * KEPT_LINES)) == KEPT_LINES
    for _ in range(30):
        write(ring, "y" * LONGEST_LINE)
    assert len(messages(ring)) == 10


@given(st.lists(st.integers(0, 30), max_size=20), st.integers(1, 7))
def test_a_follower_hears_every_line_once_and_of_those_that_were_lost(bursts: list[int], most: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logs, "KEPT_LINES", 20)
        ring, seen, heard, lost, written = RecentLines(), None, [], 0, 0
        for burst in bursts:
            for _ in range(burst):
                write(ring, str(written))
                written += 1
            more = True
            while more:
                page = ring.page(seen, 20, most)
                assert len(page.lines) <= most
                heard += [int(line.message) for line in page.lines]
                lost += page.lost
                more = page.more
                number = page.lines[-1].number if page.lines else (seen.number if seen is not None else 0)
                seen = LogPosition(page.process, number)
        assert heard == sorted(set(heard))
        assert len(heard) + lost >= written - 20
        assert not bursts or not written or heard[-1] == written - 1
