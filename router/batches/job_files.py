"""A job's files: the input is read and checked line by line, and output and error files are written, in parts, so that
other work of the store comes in between."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import BinaryIO

from tandem.api.batches.answer_types import BatchMistake
from tandem.api.batches.lines import LineMistake, check_line, line_id, unanswered_line
from tandem.api.batches.messages import unanswered_result
from tandem.router.batches.store import LOST_INPUT, BatchStore, Job
from tandem.router.batches.store_thread import StoreThread

MOST_LINES = 50_000  # OpenAI's limit of a batch
PART = 500  # lines in one transaction
WORK_S = 0.002  # of checking lines, and as long nothing
MOST_MISTAKES = 20  # that are told; OpenAI's clients show the list
_Place = tuple[int, int, int, str]  # a line's number, place, size and custom id
EXPIRED = ("batch_expired", "this request could not be executed before the completion window expired")


async def read_job(thread: StoreThread, job: Job, most_bytes: int) -> None:
    """Checks the job's lines, and begins it; or the job fails and says which lines are wrong."""
    try:
        await thread.do(lambda store: store.begin_lines(job))
        lines = _lines_of(thread.store.files.path_of(job.input_file), most_bytes)
        mistakes: list[BatchMistake] = []
        number = 0
        more = True
        while more and len(mistakes) < MOST_MISTAKES and number <= MOST_LINES:
            checked, wrong, more = await thread.do(
                lambda _, number=number: _next_part(lines, job.endpoint, most_bytes, number)  # type: ignore[misc]
            )
            mistakes += wrong
            number += len(checked) + len(wrong)
            if mistakes or not checked:
                continue
            twice = await thread.do(lambda store, checked=checked: store.add_lines(job, checked))  # type: ignore[misc]
            if twice is not None:
                mistakes.append(
                    BatchMistake("duplicate_custom_id", "custom_id: another line has it", twice + 1, "custom_id")
                )
        if number > MOST_LINES:
            mistakes = [BatchMistake("too_many_lines", f"the file has more than {MOST_LINES} lines; split it")]
        elif not number:
            mistakes = [BatchMistake("empty_file", "the file has no lines")]
        if mistakes:
            await thread.do(lambda store: store.reject(job, mistakes[:MOST_MISTAKES]))
        else:
            await thread.do(lambda store: store.lines_read(job, number))
    finally:
        await thread.do(lambda store: store.let_go(job))


def _lines_of(path: Path, most: int) -> Iterator[tuple[int, bytes]]:
    """Yields each line's place in the file, and the line without its end; a line longer than `most` bytes is cut there, one
    byte later. Empty lines are left out."""
    with path.open("rb") as file:
        while True:
            place = file.tell()
            line = file.readline(most + 2)
            if not line:
                return
            if stripped := line.strip():
                yield place + line.index(stripped), stripped
            while line and not line.endswith(b"\n"):
                line = file.readline(1 << 20)


def _next_part(
    lines: Iterator[tuple[int, bytes]], endpoint: str, most_bytes: int, number: int
) -> tuple[list[_Place], list[BatchMistake], bool]:
    """Reads and checks the next PART lines. Returns the good ones, what is wrong with others, and whether there may be more."""
    good: list[_Place] = []
    wrong: list[BatchMistake] = []
    rest_at = time.thread_time() + WORK_S
    try:
        for place, data in islice(lines, PART):
            if time.thread_time() > rest_at:  # the event loop waits for the interpreter meanwhile
                time.sleep(WORK_S)
                rest_at = time.thread_time() + WORK_S
            at = number + len(good) + len(wrong)
            try:
                if len(data) > most_bytes:
                    raise LineMistake(
                        "line_too_large", f"has more than the {most_bytes} bytes of router.limits.body_bytes"
                    )
                good.append((at, place, len(data), check_line(data, endpoint)))
            except LineMistake as mistake:
                wrong.append(mistake.at(at + 1))
    except FileNotFoundError:
        wrong.append(LOST_INPUT)
    return good, wrong, len(good) + len(wrong) == PART


class _Output:
    """A file that is being written, and is there whole once it is closed: until then no one knows its id."""

    def __init__(self, store: BatchStore) -> None:
        self.id, self._path = store.files.new_path()
        self._file: BinaryIO | None = None
        self._size = 0

    def add(self, line: bytes) -> None:
        if self._file is None:
            self._file = self._path.open("wb")
        self._size += self._file.write(line + b"\n")

    def close(self) -> tuple[str, int] | None:
        """Returns id and size, or None for a file without lines."""
        if self._file is None:
            return None
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        return self.id, self._size

    def drop(self) -> None:
        if self._file is not None:
            self._file.close()
            self._path.unlink(missing_ok=True)


def _drop(outputs: list[_Output]) -> None:
    for each in outputs:
        each.drop()


async def write_job(thread: StoreThread, job: Job, most_bytes: int) -> None:
    """Writes the files of a job that answers no more lines, in the order of its input, and ends it."""
    outputs: list[_Output] = []
    try:
        outputs = await thread.do(lambda store: [_Output(store), _Output(store)])
        number, unanswered, more = -1, 0, True
        while more:
            part = await thread.do(
                lambda store, number=number: _write_part(store, job, number, outputs)  # type: ignore[misc]
            )
            more = part is not None
            if part is not None:
                number, without = part
                unanswered += without
        output, errors = await thread.do(lambda _: [each.close() for each in outputs])
        await thread.do(lambda store: store.finish(job, output, errors, unanswered if job.form == "openai" else 0))
    except Exception:
        # Not when this is cancelled: `finish` may have happened. What then has no name is deleted a day later.
        await thread.do(lambda _: _drop(outputs))
        raise
    finally:
        await thread.do(lambda store: store.let_go(job))


def _write_part(store: BatchStore, job: Job, number: int, outputs: list[_Output]) -> tuple[int, int] | None:
    """Writes the answers after line `number`. Returns the last line's number and how many had no answer; None at the end.

    OpenAI's files name the lines that had no time, and leave out those that were cancelled. Anthropic's name all in one file."""
    in_one, expired = job.form == "anthropic", job.ends_as == "expired"
    answers = store.answers_after(job, number, PART, with_unanswered=in_one or expired)
    without = 0
    for at, custom_id, well, answer in answers:
        text = answer
        if text is None:
            without += 1
            text = (
                unanswered_result(custom_id, expired=expired)
                if in_one
                else unanswered_line(line_id(job.id, at), custom_id, *EXPIRED)
            )
        outputs[0 if well or in_one else 1].add(text)
    return (answers[-1][0], without) if answers else None
