"""Shows operators what starts and what goes wrong: live rows on a terminal, lines elsewhere."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from tandem.base.progress import Report, without_amount


class StartStep(msgspec.Struct, frozen=True):
    name: str
    what: str
    began_s: float  # since the command began
    seconds: float


class Display:
    """Implements `cluster.events.Events`. Between `start` and `stop` each starting process has a row."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._began = time.monotonic()
        self._lock = threading.Lock()
        self._rows: dict[str, TaskID] = {}
        self._last: dict[str, str] = {}
        self._changes: list[
            tuple[str, str, float, bool]
        ] = []  # a name, what it does from then on, whether it has finished
        self._live: Progress | None = None

    def start(self) -> None:
        if self.console.is_terminal:
            self._live = Progress(
                SpinnerColumn(finished_text="[green]✓"),
                TextColumn("{task.fields[name]:<12}"),
                TextColumn("{task.description}"),
                TimeElapsedColumn(),
                console=self.console,
            )
            self._live.start()

    def stop(self) -> None:
        """Idempotent. The rows stay on the screen; later events are printed as lines."""
        with self._lock:
            live, self._live = self._live, None
            self._rows.clear()
        if live is not None:
            live.stop()

    def progress(self, name: str, what: str, fraction: float) -> None:
        if fraction >= 1:
            return  # `ready` follows and says more
        done = f" ({fraction:.0%})" if fraction > 0 else ""
        self._row(name, f"{what}{done}", finished=False, line=without_amount(what))

    def ready(self, name: str, what: str) -> None:
        self._row(name, what, finished=True, line=f"ready: {what}")

    def trouble(self, name: str, what: str) -> None:
        self._forget_row(name)
        self._print(f"[yellow]![/] {escape(name)}: {escape(what)}")

    def gave_up(self, name: str, why: str) -> None:
        self._forget_row(name)
        self._print(f"[red]✗[/] {escape(name)} is left out: {escape(why)}")

    @contextmanager
    def step(self, name: str, what: str, done: str) -> Iterator[Report]:
        """Shows a step of this command. Yields the function that reports its progress."""
        self.progress(name, what, 0.0)
        yield lambda what, fraction: self.progress(name, what, fraction)
        self.ready(name, done)

    def _row(self, name: str, text: str, *, finished: bool, line: str) -> None:
        with self._lock:
            elapsed = time.monotonic() - self._began
            is_new = self._last.get(name) != line
            if is_new:
                self._last[name] = line
                self._changes.append((name, line, elapsed, finished))
            if self._live is None:
                # Without rows, each new activity is one line; its progress is not shown.
                if is_new:
                    self._print(f"[dim]{elapsed:5.1f} s[/]  {escape(name)}: {escape(line)}")
                return
            row = self._rows.get(name)
            if row is None:
                row = self._rows[name] = self._live.add_task(escape(text), total=1, name=escape(name))
            self._live.update(row, description=escape(text), completed=1 if finished else 0)

    def steps(self) -> list[StartStep]:
        """What has been shown so far, in the order of its beginnings."""
        with self._lock:
            changes, now = list(self._changes), time.monotonic() - self._began
        found = []
        for index, (name, what, began, finished) in enumerate(changes):
            if not finished:
                end = next((at for other, _, at, _ in changes[index + 1 :] if other == name), now)
                found.append(StartStep(name, what, round(began, 2), round(end - began, 2)))
        return found

    def _print(self, line: str) -> None:
        self.console.print(line, highlight=False, soft_wrap=True)

    def _forget_row(self, name: str) -> None:
        with self._lock:
            row = self._rows.pop(name, None)
            if row is not None and self._live is not None:
                self._live.remove_task(row)
