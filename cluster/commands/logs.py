"""`tandem logs`: the log lines of all processes, in one order.

Each process keeps its last lines, and the controller collects them. A router's line about a request has the id that its client knows and the
ids of its attempts; a node's line has an attempt's id. So one id finds a request's lines on every process.
"""

from __future__ import annotations

import asyncio
import re
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from datetime import datetime
from typing import Any

import msgspec
from rich.console import Console
from rich.markup import escape

from tandem.base.errors import ConfigurationError, TandemError
from tandem.base.logs import KEPT_LINES, ClusterLogs, LogLine, LogPosition
from tandem.cluster.commands.address import WhichCluster
from tandem.cluster.commands.operate import with_controller
from tandem.cluster.commands.output import print_json, print_json_line
from tandem.cluster.orders import LogsOrder, OperatedCluster

USUAL_LINES = 100
# How long to wait between two looks if the last one got everything.
LOOK_S = 1.0
# The most pages of one look: enough for everything that a process keeps, at the smallest page size.
_MOST_LOOKS = 600
_LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40, "critical": 50}
_STYLES = {"warning": "yellow", "error": "red", "critical": "bold red", "debug": "dim"}
# Clients choose the paths that are logged: their control characters must not reach the operator's terminal.
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


class LogFilter(msgspec.Struct, frozen=True):
    names: list[str] = []
    lines: int | None = None  # of each process; None: USUAL_LINES, or all that match `since_s` or `request`
    since_s: float | None = None
    request: str | None = None
    level: str = "debug"

    def __post_init__(self) -> None:
        if self.lines is not None and not 0 <= self.lines <= KEPT_LINES:
            raise ConfigurationError(
                f"--lines must be from 0 to {KEPT_LINES}, the number that processes keep, not {self.lines}"
            )

    @property
    def last(self) -> int:
        if self.lines is not None:
            return self.lines
        return USUAL_LINES if self.since_s is None and self.request is None else KEPT_LINES


class ShownLine(msgspec.Struct, frozen=True):
    time: float
    process: str
    level: str
    logger: str
    message: str
    request_id: str | None
    attempts: list[str]


class Remark(msgspec.Struct, frozen=True):
    """What is missing: lines that were dropped between two looks, or a process that does not answer."""

    process: str
    text: str


class LogReader:
    """Looks repeatedly, and returns each line once."""

    def __init__(self, chosen: LogFilter, time_of_day: Callable[[], float] = time.time) -> None:
        self._filter = chosen
        self._after: dict[str, LogPosition] = {}
        self._silent: dict[str, str] = {}
        self._ids = {chosen.request} if chosen.request is not None else set()
        # Lines that name only an attempt, kept until a router's line says to which request it belongs.
        self._passed: deque[ShownLine] = deque(maxlen=KEPT_LINES)
        self._oldest = time_of_day() - chosen.since_s if chosen.since_s is not None else 0.0

    async def look(self, cluster: OperatedCluster) -> tuple[list[ShownLine], list[Remark]]:
        """Returns the new lines in the order of their times, and remarks on missing ones."""
        new: list[ShownLine] = []
        remarks: list[Remark] = []
        for _ in range(_MOST_LOOKS):
            found = await cluster.ask(LogsOrder(self._filter.names, self._after, self._filter.last))
            new += self._take(found, remarks)
            if not any(page.more for page in found.pages.values()):
                break
        return sorted(self._chosen(new), key=lambda line: line.time), remarks

    def _chosen(self, new: list[ShownLine]) -> list[ShownLine]:
        known = [*self._passed, *filter(self._is_shown, new)]
        if self._ids:
            self._passed.clear()
            self._passed.extend(line for line in known if line.attempts and not self._is_of_request(line))
        return [line for line in known if self._is_of_request(line)]

    def _take(self, found: ClusterLogs, remarks: list[Remark]) -> Iterable[ShownLine]:
        for name, page in found.pages.items():
            before = self._after.get(name)
            if before is not None and before.process != page.process:
                remarks.append(Remark(name, "it was started again"))
            if page.lost:
                remarks.append(Remark(name, f"{page.lost} lines were written and dropped between two looks"))
            if page.lines or before is None or before.process != page.process:
                last = page.lines[-1].number if page.lines else 0
                self._after[name] = LogPosition(page.process, last)
            for line in page.lines:
                shown = _shown(name, line)
                # A router's line about the request names the ids of its attempts, which nodes log.
                if shown.request_id in self._ids:
                    self._ids.update(shown.attempts)
                yield shown
        for name, why in found.silent.items():
            if self._silent.get(name) != why:
                remarks.append(Remark(name, f"gives no lines: {why}"))
        self._silent = dict(found.silent)

    def _is_shown(self, line: ShownLine) -> bool:
        return line.time >= self._oldest and _LEVELS.get(line.level, 50) >= _LEVELS[self._filter.level]

    def _is_of_request(self, line: ShownLine) -> bool:
        if not self._ids:
            return True
        return line.request_id in self._ids or any(one in self._ids for one in line.attempts)


def _shown(name: str, line: LogLine) -> ShownLine:
    return ShownLine(line.unix_time, name, line.level, line.logger, line.message, line.request_id, line.attempts)


def parse_age(text: str) -> float:
    unit = _UNITS.get(text[-1:])
    try:
        seconds = float(text[:-1]) * unit if unit is not None else -1.0
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise ConfigurationError(f"--since must be such as 30s, 10m or 2h, not {text!r}")
    return seconds


def show_logs(which: WhichCluster, chosen: LogFilter, *, follow: bool, as_json: bool, url: str | None = None) -> None:
    """Shows the lines. With `follow` it runs until it is interrupted."""
    # While a cluster is joined, sys.stdout goes to the log.
    stdout = sys.stdout
    out = Console(file=stdout, highlight=False, soft_wrap=True)
    aside = Console(stderr=True, highlight=False, soft_wrap=True)
    shown: list[ShownLine] = []

    async def work(cluster: OperatedCluster) -> None:
        async for lines, remarks in looks(cluster, LogReader(chosen), follow=follow):
            for remark in remarks:
                aside.print(f"[yellow]![/] {remark.process}: {escape(remark.text)}")
            for line in lines:
                if as_json and follow:
                    print_json_line(line, stdout)
                elif as_json:
                    shown.append(line)
                else:
                    out.print(_text(line))
            stdout.flush()

    with_controller(which, work, url)
    if as_json and not follow:
        print_json(shown)


async def looks(
    cluster: OperatedCluster, reader: LogReader, *, follow: bool
) -> AsyncIterator[tuple[list[ShownLine], list[Remark]]]:
    """Yields one look, or with `follow` one after another. When following, a cluster that does not answer is asked again."""
    away = False
    while True:
        try:
            found: tuple[list[ShownLine], list[Remark]] = await reader.look(cluster)
            away = False
        except TandemError as error:
            if not follow or isinstance(error, ConfigurationError):
                raise
            found = ([], [] if away else [Remark("controller", f"does not answer; trying again: {error}")])
            away = True
        yield found
        if not follow:
            return
        await asyncio.sleep(LOOK_S)


def _text(line: ShownLine) -> str:
    at = datetime.fromtimestamp(line.time).astimezone().isoformat(timespec="milliseconds")
    style = _STYLES.get(line.level)
    level = f"[{style}]{line.level}[/]" if style is not None else line.level
    message = _CONTROLS.sub("\N{REPLACEMENT CHARACTER}", line.message)
    logger: Any = line.logger.removeprefix("tandem.")
    return f"[dim]{at}[/] [cyan]{escape(line.process)}[/] {level} [dim]{escape(logger)}[/] {escape(message)}"
