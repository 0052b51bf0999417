"""`tandem logs` prints the lines of all processes in one order, each once, and says which lines are missing."""

from __future__ import annotations

import asyncio
import json
import logging
from datetime import datetime
from typing import Any

import pytest

from tandem.base.errors import ConfigurationError, Unavailable
from tandem.base.logs import ClusterLogs, LogsQuery, RecentLines
from tandem.cluster.commands import logs
from tandem.cluster.commands.address import WhichCluster
from tandem.cluster.commands.logs import LogFilter, LogReader, looks, parse_age, show_logs
from tests.cluster.direct_cluster import DirectCluster

ATTEMPT = "req-" + "0af3" * 8


class Processes(DirectCluster):
    """A cluster that has logs."""

    def __init__(self, *names: str) -> None:
        self.rings = {name: RecentLines() for name in names}
        self.silent: dict[str, str] = {}
        self.away = False
        self.at = 0.0

    def write(self, name: str, message: str, logger: str = "tandem.node.node", level: int = logging.INFO) -> None:
        record = logging.LogRecord(logger, level, "", 0, message, (), None)
        record.created = self.at
        self.at += 1.0
        self.rings[name].handle(record)

    async def logs(self, query: LogsQuery) -> ClusterLogs:
        if self.away:
            raise Unavailable("no controller")
        pages = {
            name: ring.page(query.after.get(name), query.last, 3)
            for name, ring in self.rings.items()
            if name not in self.silent
        }
        return ClusterLogs(pages, self.silent)


def look(cluster: Processes, reader: LogReader) -> tuple[list[str], list[str]]:
    lines, remarks = asyncio.run(reader.look(cluster))
    return [f"{line.process}: {line.message}" for line in lines], [f"{one.process}: {one.text}" for one in remarks]


def test_lines_come_in_one_order_and_each_once() -> None:
    cluster, reader = Processes("router", "decode-0"), LogReader(LogFilter())
    for number in range(8):
        cluster.write("router" if number % 2 else "decode-0", str(number))
    assert look(cluster, reader)[0] == [f"{'router' if number % 2 else 'decode-0'}: {number}" for number in range(8)]
    assert look(cluster, reader) == ([], [])
    cluster.write("router", "new")
    assert look(cluster, reader)[0] == ["router: new"]


def test_a_process_that_starts_again_or_falls_silent_is_named_once() -> None:
    cluster, reader = Processes("decode-0", "decode-1"), LogReader(LogFilter())
    cluster.write("decode-0", "before")
    look(cluster, reader)
    cluster.rings["decode-0"] = RecentLines()
    cluster.write("decode-0", "after")
    cluster.silent["decode-1"] = "it does not run"
    assert look(cluster, reader) == (
        ["decode-0: after"],
        ["decode-0: it was started again", "decode-1: gives no lines: it does not run"],
    )
    assert look(cluster, reader) == ([], [])


def test_one_id_finds_a_request_in_every_process() -> None:
    cluster, reader = Processes("router", "decode-0"), LogReader(LogFilter(request="my-id"))
    cluster.write("decode-0", f"{ATTEMPT}: begins")
    cluster.write("decode-0", "something else")
    cluster.write("router", f"my-id POST /v1/completions 200 {ATTEMPT}", "tandem.router.access")
    cluster.write("router", "other POST /v1/completions 200", "tandem.router.access")
    assert look(cluster, reader)[0] == [
        f"decode-0: {ATTEMPT}: begins",
        f"router: my-id POST /v1/completions 200 {ATTEMPT}",
    ]


def test_levels_and_ages_are_left_out() -> None:
    cluster = Processes("decode-0")
    cluster.write("decode-0", "old", level=logging.ERROR)
    cluster.write("decode-0", "fine")
    cluster.write("decode-0", "bad", level=logging.WARNING)
    assert look(cluster, LogReader(LogFilter(level="warning")))[0] == ["decode-0: old", "decode-0: bad"]
    since = LogReader(LogFilter(since_s=1.5, level="warning"), lambda: 2.0)
    assert look(cluster, since)[0] == ["decode-0: bad"]


def test_an_age_is_read_and_one_that_is_none_or_too_many_lines_are_refused() -> None:
    ages = {"30s": 30.0, "10m": 600.0, "1.5h": 5400.0, "2d": 172800.0}
    assert {text: parse_age(text) for text in ages} == ages
    for text in ("", "m", "10", "-3m", "infh", "10 weeks"):
        with pytest.raises(ConfigurationError, match="30s, 10m or 2h"):
            parse_age(text)
    with pytest.raises(ConfigurationError, match="--lines must be from 0 to 5000"):
        LogFilter(lines=5001)


async def test_a_cluster_that_is_followed_may_be_away_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "LOOK_S", 0.0)
    cluster = Processes("decode-0")

    heard: list[Any] = []
    async for lines, remarks in looks(cluster, LogReader(LogFilter()), follow=True):
        heard.append(([line.message for line in lines], [one.text for one in remarks]))
        cluster.away = len(heard) in (1, 2)
        if len(heard) == 2:
            cluster.write("decode-0", "meanwhile")
        if len(heard) == 4:
            break
    first, away, still, back = heard
    assert first == ([], [])
    assert away[0] == []
    assert "trying again: no controller" in away[1][0]
    assert still == ([], [])
    assert back == (["meanwhile"], [])


async def test_without_following_an_absent_cluster_is_an_error() -> None:
    cluster = Processes()
    cluster.away = True
    with pytest.raises(Unavailable):
        async for _ in looks(cluster, LogReader(LogFilter()), follow=False):
            pass


def test_it_is_shown_to_people_and_to_machines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster = Processes("decode-0")
    cluster.silent["decode-1"] = "it does not run"
    cluster.write("decode-0", "serves [/] markup", level=logging.WARNING)
    monkeypatch.setattr(logs, "with_controller", lambda which, work, url: asyncio.run(work(cluster)))
    show_logs(WhichCluster(), LogFilter(), follow=False, as_json=False)
    said = capsys.readouterr()
    assert "decode-0 warning node.node serves [/] markup" in said.out
    assert datetime.fromisoformat(said.out.split()[0]).tzinfo is not None
    assert "decode-1: gives no lines: it does not run" in said.err
    show_logs(WhichCluster(), LogFilter(), follow=False, as_json=True)
    [line] = json.loads(capsys.readouterr().out)
    assert (line["process"], line["message"]) == ("decode-0", "serves [/] markup")
    cluster.write("decode-0", "GET /\x1b[2J\x9b2J")
    show_logs(WhichCluster(), LogFilter(), follow=False, as_json=False)
    said = capsys.readouterr()
    assert "GET /" in said.out
    assert not {"\x1b", "\x9b"} & {*said.out}, "no line steers the terminal"


def test_lines_of_a_request_are_found_that_came_before_the_router_said_whose_they_are() -> None:
    cluster, reader = Processes("router", "decode-0"), LogReader(LogFilter(request="my-id"))
    cluster.write("decode-0", f"begins {ATTEMPT}")
    cluster.write("decode-0", f"begins req-{'1234' * 8}")
    assert look(cluster, reader)[0] == []
    cluster.write("router", f"my-id: ended ({ATTEMPT})", "tandem.router.dispatch.life")
    assert look(cluster, reader)[0] == [f"decode-0: begins {ATTEMPT}", f"router: my-id: ended ({ATTEMPT})"]
    assert look(cluster, reader)[0] == []
