"""Writes the trace of this node's scheduler, if `scheduler.trace_folder` says where, to a file of bounded size, in a thread of its own."""

from __future__ import annotations

import contextlib
import logging
import mmap
import queue
import threading
from pathlib import Path
from typing import BinaryIO

import msgspec

from tandem.engine.core import Engine
from tandem.node.step_trace.records import RecordsLost, StepTrace
from tandem.node.wings import PartContext, ServicePart

logger = logging.getLogger(__name__)

MAX_QUEUED = 4096  # lines that may wait for the disk; further lines are dropped and counted
CLOSE_WITHIN_S = 5.0


class TraceFile:
    def __init__(self, folder: Path, node_id: str, max_bytes: int) -> None:
        """Opens no file: the thread does, and logs an error if the folder cannot be written."""
        self._path = folder / f"{node_id}.jsonl"
        self._old = folder / f"{node_id}.old.jsonl"
        self._most = max(max_bytes // 2, 1)
        self._queue: queue.Queue[bytes | None] = queue.Queue(MAX_QUEUED)
        self._lost = 0
        self._header = b""
        self._thread = threading.Thread(target=self._run, name="scheduler-trace", daemon=True)
        self._thread.start()

    def write(self, line: bytes) -> None:
        """Queues a line. Called by the step thread; never waits. The first line is the header, which is repeated in each new file."""
        self._header = self._header or line
        try:
            if self._lost:
                self._queue.put_nowait(msgspec.json.encode(RecordsLost(self._lost)) + b"\n")
                self._lost = 0
            self._queue.put_nowait(line)
        except queue.Full:
            self._lost += 1

    def close(self) -> None:
        """Waits up to `CLOSE_WITHIN_S` twice for the queued lines to be written: once for room in the queue, once for the thread."""
        try:
            self._queue.put(None, timeout=CLOSE_WITHIN_S)
        except queue.Full:
            return  # the thread is a daemon, and ends with the process
        self._thread.join(CLOSE_WITHIN_S)

    def _run(self) -> None:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._cut_half_line()
            self._write_all()
        except OSError as error:
            logger.error("the scheduler trace ends, because %s cannot be written: %s", self._path, error)
            # The step thread goes on writing lines: take and drop them.
            while self._queue.get() is not None:
                pass

    def _cut_half_line(self) -> None:
        """Cuts what a killed process, or a full disk, left of a line: the next line would be joined to it, and be no record."""
        with contextlib.suppress(FileNotFoundError), self._path.open("r+b") as file:
            if file.seek(0, 2):
                with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                    whole = content.rfind(b"\n") + 1
                file.truncate(whole)

    def _write_all(self) -> None:
        is_next, ended = False, False
        while not ended:
            with self._path.open("ab") as file:
                if is_next:
                    file.write(self._header)
                ended = self._fill(file)
            if not ended:
                self._path.replace(self._old)
                is_next = True

    def _fill(self, file: BinaryIO) -> bool:
        """Writes lines until the file is full (returns False) or the trace is closed (returns True)."""
        while file.tell() < self._most:
            line = self._queue.get()
            if line is None:
                return True
            file.write(line)
            if self._queue.empty():
                file.flush()
        return False


def make(context: PartContext) -> ServicePart | None:
    config, engine, settings = context.config, context.engine, context.config.engine.scheduler
    if not isinstance(engine, Engine) or not settings.trace_folder:
        return None
    file = TraceFile(Path(settings.trace_folder), config.node_id, settings.trace_bytes)
    engine.scheduler.watch_with(StepTrace(config.node_id, file.write))
    return StepTracePart(file)


class StepTracePart(ServicePart):
    def __init__(self, file: TraceFile) -> None:
        self._file = file

    def stop(self) -> None:
        self._file.close()
