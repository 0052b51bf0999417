"""Jobs and their lines in a folder. Every method blocks, so callers run it in the store's thread (`StoreThread`)."""

from __future__ import annotations

import secrets
import sqlite3
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn

import msgspec

from tandem.api.batches.answer_types import ENDED, BatchMistake, BatchMistakes, BatchObject, RequestCounts, Status
from tandem.api.batches.batch_request import BatchRequest, window_s
from tandem.api.openai.served_model import NotHere
from tandem.base.errors import InvalidRequest, Overloaded
from tandem.router.batches.database import StoreFolder, page_of, transaction, translated
from tandem.router.batches.estimate import estimated_end
from tandem.router.batches.stored_files import StoredFiles

LEASE_S = 30.0  # of a worker; it renews its lease several times in this time
MOST_UNFINISHED = 100  # jobs of one owner
CLAIMED_BYTES = 32 << 20  # of lines that are claimed together, unless one is longer
OUTPUT_PURPOSE = "batch_output"
LOST_INPUT = BatchMistake("input_file_lost", "the input file is no longer there")
Form = Literal["openai", "anthropic"]


class BatchNotHere(NotHere):
    code = "not_found"


class ClaimedLine(msgspec.Struct, frozen=True):
    """One line that this process answers. No other process has it while this one's lease holds."""

    job: str
    owner: str
    endpoint: str
    number: int
    custom_id: str
    attempts: int  # this one included
    form: Form


class LineResult(msgspec.Struct, frozen=True):
    line: ClaimedLine
    well: bool
    text: bytes  # the line for the output or error file
    tokens: int = 1  # that it took


class Job(msgspec.Struct, frozen=True):
    """What work on a job as a whole must know."""

    id: str
    owner: str
    endpoint: str
    input_file: str
    status: Status
    ends_as: Status | None
    outputs_expire_s: int | None
    form: Form


class BatchStore:
    """`worker` names this process. Only one thread at a time may use a store."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.time) -> None:
        self.place = StoreFolder(folder)
        self.files = StoredFiles(self.place, clock)
        self.worker = secrets.token_hex(8)
        self._clock = clock

    @property
    def _db(self) -> sqlite3.Connection:
        return self.place.database

    def close(self) -> None:
        if self.place.is_open:
            with translated(self.place.folder):
                self.give_back_all()
                self.place.close()

    def add_job(self, owner: str, request: BatchRequest, form: Form = "openai", total: int = 0) -> BatchObject:
        """Raises FileNotHere, and Overloaded when the owner has too many unfinished jobs."""
        self.files.one(request.input_file_id, owner)
        now = int(self._clock())
        prefix = "batch_" if form == "openai" else "msgbatch_"
        job_id = prefix + secrets.token_hex(16)
        expiry = request.output_expires_after
        with transaction(self._db) as db:
            unfinished = db.execute(
                f"SELECT count(*) FROM jobs WHERE owner = ? AND status NOT IN {ENDED}", (owner,)
            ).fetchone()[0]
            if unfinished >= MOST_UNFINISHED:
                raise Overloaded(
                    f"{unfinished} batches of this key have not ended, and no more than {MOST_UNFINISHED} may be: "
                    "wait for one, or cancel one"
                )
            db.execute(
                "INSERT INTO jobs (id, owner, form, endpoint, input_file, window, made, expires, outputs_expire_s, metadata, total, "
                "status, serial) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, 'validating', (SELECT coalesce(max(serial), 0) + 1 FROM jobs))",
                (
                    job_id, owner, form, request.endpoint, request.input_file_id, request.completion_window, now,
                    now + window_s(request.completion_window), expiry.seconds if expiry is not None else None,
                    msgspec.json.encode(request.metadata).decode() if request.metadata is not None else None, total,
                ),
            )  # fmt: skip
        return self.job(job_id, owner, form)

    def job(self, job_id: str, owner: str, form: Form = "openai") -> BatchObject:
        """Raises BatchNotHere, also for another owner's job."""
        row = self._db.execute(
            "SELECT * FROM jobs WHERE id = ? AND owner = ? AND form = ?", (job_id, owner, form)
        ).fetchone()
        if row is None:
            _no_job(job_id)
        batch = _batch_of(row)
        if batch.status != "in_progress" or batch.in_progress_at is None:
            return batch
        end = estimated_end(self._db, job_id, batch.in_progress_at, self._clock())
        return msgspec.structs.replace(batch, estimated_completion_at=end)

    def jobs(self, owner: str, after: str | None, limit: int, form: Form = "openai") -> tuple[list[BatchObject], bool]:
        rows, more = page_of(self._db, "jobs", "owner = ? AND form = ?", (owner, form), after, limit, newest_first=True)
        return [_batch_of(row) for row in rows], more

    def cancel(self, job_id: str, owner: str, form: Form = "openai") -> BatchObject:
        """Its lines that have no answer get none. A job that has ended stays as it is, which OpenAI's API refuses to cancel."""
        with transaction(self._db) as db:
            row = db.execute(
                "SELECT status FROM jobs WHERE id = ? AND owner = ? AND form = ?", (job_id, owner, form)
            ).fetchone()
            if row is None:
                _no_job(job_id)
            if row[0] in ("validating", "in_progress"):
                self._move(db, job_id, "cancelling", ends_as="cancelled")
            elif row[0] in ENDED:
                raise InvalidRequest(
                    f"{job_id} is {row[0]}; only a batch that has not ended can be cancelled", "batch_id"
                )
        return self.job(job_id, owner, form)

    def delete_job(self, job_id: str, owner: str, form: Form) -> None:
        """Forgets a job that has ended, and its files."""
        batch = self.job(job_id, owner, form)
        if batch.status not in ENDED:
            raise InvalidRequest(f"{job_id} is {batch.status}; cancel it first", "batch_id")
        files = [each for each in (batch.input_file_id, batch.output_file_id, batch.error_file_id) if each]
        with transaction(self._db) as db:
            db.execute("DELETE FROM jobs WHERE id = ?", (job_id,))
            db.executemany("DELETE FROM files WHERE id = ?", [(each,) for each in files])
        for each in files:
            self.files.path_of(each).unlink(missing_ok=True)

    def _move(
        self,
        db: sqlite3.Connection,
        job_id: str,
        status: Status,
        ends_as: Status | None = None,
        worker: str | None = None,
    ) -> None:
        """Changes a job's status, notes when, and lets go of the work on it as a whole."""
        db.execute(
            "UPDATE jobs SET status = ?, ends_as = coalesce(?, ends_as), worker = ?, times = json_set(times, '$.' || ?, ?) WHERE id = ?",
            (status, ends_as, worker, f"{status}_at", int(self._clock()), job_id),
        )

    # --- work

    def renew(self) -> None:
        """Renews this process's lease, and frees the work of processes whose lease has ended."""
        now = self._clock()
        with transaction(self._db) as db:
            self._sign_in(db)
            dead = [row[0] for row in db.execute("SELECT id FROM workers WHERE until < ?", (now,))]
            for worker in dead:
                self._free_work_of(db, worker)

    def _sign_in(self, db: sqlite3.Connection) -> None:
        """A process that takes work has a lease. When it ends, another process's `renew` frees the work."""
        db.execute("INSERT OR REPLACE INTO workers VALUES (?, ?)", (self.worker, self._clock() + LEASE_S))

    def give_back_all(self) -> None:
        """This process answers no more lines."""
        with transaction(self._db) as db:
            self._free_work_of(db, self.worker)

    @staticmethod
    def _free_work_of(db: sqlite3.Connection, worker: str) -> None:
        db.execute("UPDATE lines SET worker = NULL WHERE worker = ?", (worker,))
        db.execute("UPDATE jobs SET worker = NULL WHERE worker = ?", (worker,))
        db.execute("DELETE FROM workers WHERE id = ?", (worker,))

    def end_overdue(self) -> None:
        """Jobs whose window is over answer no further line."""
        with transaction(self._db) as db:
            over = db.execute(
                "SELECT id FROM jobs WHERE status IN ('validating', 'in_progress') AND expires <= ?", (self._clock(),)
            ).fetchall()
            for row in over:
                self._move(db, row[0], "finalizing", ends_as="expired")

    def take_job(self) -> Job | None:
        """Takes a job that needs work as a whole: to be read, or to have its files written. A cancelled job's lines that are
        under way are dropped, so nothing is waited for. One whose work failed comes again after the others."""
        with transaction(self._db) as db:
            row = db.execute(
                "SELECT * FROM jobs WHERE worker IS NULL AND (status IN ('validating', 'cancelling', 'finalizing') OR (status = "
                "'in_progress' AND completed + failed >= total)) ORDER BY served, serial LIMIT 1"
            ).fetchone()
            if row is None:
                return None
            self._sign_in(db)
            db.execute("UPDATE jobs SET served = ? WHERE id = ?", (self._clock(), row["id"]))
            if row["status"] == "in_progress":
                self._move(db, row["id"], "finalizing", ends_as="completed", worker=self.worker)
            else:
                db.execute("UPDATE jobs SET worker = ? WHERE id = ?", (self.worker, row["id"]))
            row = db.execute("SELECT * FROM jobs WHERE id = ?", (row["id"],)).fetchone()
        return Job(*(row[name] for name in Job.__struct_fields__))

    def begin_lines(self, job: Job) -> None:
        """Forgets what a process that died had read of the job's file."""
        with transaction(self._db) as db:
            db.execute("DELETE FROM lines WHERE job = ?", (job.id,))

    def add_lines(self, job: Job, lines: Sequence[tuple[int, int, int, str]]) -> int | None:
        """Adds lines: number, place, size and custom id of each. Returns the number of the first whose custom id another
        line has. Adds none to a job that was cancelled meanwhile."""
        with transaction(self._db) as db:
            if not self._is_mine(db, job):
                return None
            for line in lines:
                added = db.execute(
                    "INSERT OR IGNORE INTO lines (job, number, place, size, custom_id) VALUES (?, ?, ?, ?, ?)",
                    (job.id, *line),
                )
                if not added.rowcount:  # the job is rejected, and its lines are deleted then
                    return line[0]
        return None

    def lines_read(self, job: Job, total: int) -> None:
        """The job's file is good. Does nothing if the job was cancelled meanwhile."""
        with transaction(self._db) as db:
            if self._is_mine(db, job):
                db.execute("UPDATE jobs SET total = ? WHERE id = ?", (total, job.id))
                self._move(db, job.id, "in_progress")

    def reject(self, job: Job, mistakes: Sequence[BatchMistake]) -> None:
        with transaction(self._db) as db:
            if self._is_mine(db, job):
                db.execute("DELETE FROM lines WHERE job = ?", (job.id,))
                db.execute(
                    "UPDATE jobs SET mistakes = ? WHERE id = ?", (msgspec.json.encode(list(mistakes)).decode(), job.id)
                )
                self._move(db, job.id, "failed")

    def _is_mine(self, db: sqlite3.Connection, job: Job) -> bool:
        row = db.execute("SELECT status, worker FROM jobs WHERE id = ?", (job.id,)).fetchone()
        return row is not None and row["status"] == job.status and row["worker"] == self.worker

    def let_go(self, job: Job) -> None:
        with transaction(self._db) as db:
            db.execute("UPDATE jobs SET worker = NULL WHERE id = ? AND worker = ?", (job.id, self.worker))

    def claim(self, most: int) -> list[tuple[ClaimedLine, bytes]]:
        """Takes up to `most` lines of the job that was served least recently, so that all go on: fewer of long ones, because
        their texts are read into memory. Returns each with its text."""
        with transaction(self._db) as db:
            # For itself, so that a job whose texts cannot be read comes after the others.
            job = db.execute(
                "UPDATE jobs SET served = ? WHERE id = (SELECT id FROM jobs WHERE status = 'in_progress' AND EXISTS (SELECT 1 FROM "
                "lines WHERE lines.job = jobs.id AND lines.worker IS NULL AND lines.done = 0) ORDER BY served, serial LIMIT 1) "
                "RETURNING *",
                (self._clock(),),
            ).fetchone()
        if job is None:
            return []
        with transaction(self._db) as db:
            self._sign_in(db)
            numbers: list[int] = []
            size = 0
            for row in db.execute(
                "SELECT number, size FROM lines WHERE job = ? AND worker IS NULL AND done = 0 ORDER BY number LIMIT ?",
                (job["id"], most),
            ):
                size += row["size"]
                if numbers and size > CLAIMED_BYTES:
                    break
                numbers.append(row["number"])
            rows = [
                db.execute(
                    "UPDATE lines SET worker = ?, attempts = attempts + 1 WHERE job = ? AND number = ? RETURNING *",
                    (self.worker, job["id"], number),
                ).fetchone()
                for number in numbers
            ]
            try:
                # Inside, so that lines whose texts cannot be read are not claimed.
                with self.files.path_of(job["input_file"]).open("rb") as file:
                    return [self._claimed(job, row, file) for row in rows]
            except FileNotFoundError:
                self._lost_input(db, job["id"])
                return []

    def _lost_input(self, db: sqlite3.Connection, job_id: str) -> None:
        """The job's file was taken out of the folder: what has no answer gets none."""
        db.execute("UPDATE lines SET worker = NULL WHERE job = ?", (job_id,))
        db.execute("UPDATE jobs SET mistakes = ? WHERE id = ?", (msgspec.json.encode([LOST_INPUT]).decode(), job_id))
        self._move(db, job_id, "finalizing", ends_as="failed")

    @staticmethod
    def _claimed(job: sqlite3.Row, row: sqlite3.Row, file: Any) -> tuple[ClaimedLine, bytes]:
        file.seek(row["place"])
        data: bytes = file.read(row["size"])
        line = ClaimedLine(
            job["id"], job["owner"], job["endpoint"], row["number"], row["custom_id"], row["attempts"], job["form"]
        )
        return line, data

    def give_back(self, lines: Sequence[tuple[ClaimedLine, bool]]) -> None:
        """These lines get their answer later. Each with whether the attempt had begun: otherwise it does not count."""
        with transaction(self._db) as db:
            for line, begun in lines:
                db.execute(
                    "UPDATE lines SET worker = NULL, attempts = attempts - ? WHERE job = ? AND number = ? AND worker = ?",
                    (not begun, line.job, line.number, self.worker),
                )

    def record(self, answers: Sequence[LineResult]) -> int:
        """Keeps answers, and returns how many. A line that another process has taken meanwhile is not counted: that one
        answers it. Neither is one whose job answers no more lines."""
        kept = 0
        with transaction(self._db) as db:
            for answer in answers:
                line = answer.line
                done = db.execute(
                    "UPDATE lines SET done = ?, worker = NULL WHERE job = ? AND number = ? AND worker = ? AND done = 0 AND EXISTS "
                    "(SELECT 1 FROM jobs WHERE id = ? AND status = 'in_progress')",
                    (answer.tokens, line.job, line.number, self.worker, line.job),
                )
                if not done.rowcount:
                    continue
                kept += 1
                db.execute("INSERT INTO answers VALUES (?, ?, ?, ?)", (line.job, line.number, answer.well, answer.text))
                column = "completed" if answer.well else "failed"
                db.execute(f"UPDATE jobs SET {column} = {column} + 1 WHERE id = ?", (line.job,))
        return kept

    def unwanted(self, jobs: Sequence[str]) -> set[str]:
        """Returns those of the jobs that answer no more lines."""
        marks = ", ".join("?" * len(jobs))
        going = self._db.execute(f"SELECT id FROM jobs WHERE id IN ({marks}) AND status = 'in_progress'", tuple(jobs))
        return {*jobs} - {row[0] for row in going}

    def answers_after(
        self, job: Job, number: int, most: int, *, with_unanswered: bool
    ) -> list[tuple[int, str, bool, bytes | None]]:
        """Returns the next answers in the order of the lines: number, custom id, whether it is well, and its text, which is
        None for a line without an answer."""
        join = "LEFT JOIN" if with_unanswered else "JOIN"
        rows = self._db.execute(
            f"SELECT lines.number, lines.custom_id, answers.well, answers.line FROM lines {join} answers ON answers.job = lines.job "
            "AND answers.number = lines.number WHERE lines.job = ? AND lines.number > ? ORDER BY lines.number LIMIT ?",
            (job.id, number, most),
        )
        return [(row[0], row[1], bool(row[2]), row[3]) for row in rows]

    def finish(self, job: Job, output: tuple[str, int] | None, errors: tuple[str, int] | None, unanswered: int) -> None:
        """The job has ended, and these are its files: id and size of each. They lie in the folder already."""
        now = int(self._clock())
        expires = now + job.outputs_expire_s if job.outputs_expire_s is not None else None
        with transaction(self._db) as db:
            if not self._is_mine(db, job):
                return
            for column, what, made in (("output_file", "output", output), ("error_file", "error", errors)):
                if made is not None:
                    name = f"{job.id}_{what}.jsonl"
                    self.files.insert(db, made[0], job.owner, name, OUTPUT_PURPOSE, made[1], now, expires)
                    db.execute(f"UPDATE jobs SET {column} = ? WHERE id = ?", (made[0], job.id))
            db.execute("UPDATE jobs SET failed = failed + ? WHERE id = ?", (unanswered, job.id))
            self._move(db, job.id, job.ends_as or "completed")
            db.execute("DELETE FROM answers WHERE job = ?", (job.id,))
            db.execute("DELETE FROM lines WHERE job = ?", (job.id,))


def _batch_of(row: sqlite3.Row) -> BatchObject:
    mistakes = row["mistakes"]
    times = {name: at for name, at in msgspec.json.decode(row["times"]).items() if name in _TIMES}
    return BatchObject(
        id=row["id"],
        endpoint=row["endpoint"],
        input_file_id=row["input_file"],
        completion_window=row["window"],
        status=row["status"],
        created_at=row["made"],
        expires_at=row["expires"],
        errors=BatchMistakes(msgspec.json.decode(mistakes, type=list[BatchMistake])) if mistakes else None,
        output_file_id=row["output_file"],
        error_file_id=row["error_file"],
        request_counts=RequestCounts(row["total"], row["completed"], row["failed"]),
        metadata=msgspec.json.decode(row["metadata"]) if row["metadata"] is not None else None,
        **times,
    )


_TIMES = frozenset(name for name in BatchObject.__struct_fields__ if name.endswith("_at")) - {
    "created_at",
    "expires_at",
    "estimated_completion_at",
}


def _no_job(job_id: str) -> NoReturn:
    raise BatchNotHere(f"there is no batch {job_id[:100]!r} of this key")
