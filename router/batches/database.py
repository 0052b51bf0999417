"""The store's tables: SQLite in one file, which all router processes with the same folder share.

Every change is one transaction, so a process that dies leaves none half done. A process that takes work is named in it,
and renews its lease in `workers`. Work of a process whose lease has ended is free again.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sqlite3
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tandem.base.errors import InternalError, InvalidRequest, TandemError, Unavailable

BUSY_S = 10.0  # how long a transaction waits for another process's

# `done` of a line: 0 while it has no answer, then the tokens that it took.
_TABLES = """
CREATE TABLE IF NOT EXISTS files (
    id TEXT PRIMARY KEY, owner TEXT NOT NULL, name TEXT NOT NULL, purpose TEXT NOT NULL, size INTEGER NOT NULL,
    made INTEGER NOT NULL, expires INTEGER, serial INTEGER
);
CREATE TABLE IF NOT EXISTS jobs (
    id TEXT PRIMARY KEY, owner TEXT NOT NULL, form TEXT NOT NULL, endpoint TEXT NOT NULL, input_file TEXT NOT NULL,
    window TEXT NOT NULL, made INTEGER NOT NULL, expires INTEGER NOT NULL, outputs_expire_s INTEGER, metadata TEXT,
    status TEXT NOT NULL, ends_as TEXT, mistakes TEXT, output_file TEXT, error_file TEXT, times TEXT NOT NULL DEFAULT '{}',
    total INTEGER NOT NULL DEFAULT 0, completed INTEGER NOT NULL DEFAULT 0, failed INTEGER NOT NULL DEFAULT 0,
    worker TEXT, served REAL NOT NULL DEFAULT 0, serial INTEGER
);
CREATE TABLE IF NOT EXISTS lines (
    job TEXT NOT NULL, number INTEGER NOT NULL, place INTEGER NOT NULL, size INTEGER NOT NULL, custom_id TEXT NOT NULL,
    worker TEXT, attempts INTEGER NOT NULL DEFAULT 0, done INTEGER NOT NULL DEFAULT 0,
    PRIMARY KEY (job, number)
) WITHOUT ROWID;
CREATE UNIQUE INDEX IF NOT EXISTS ids_of_lines ON lines (job, custom_id);
CREATE INDEX IF NOT EXISTS free_lines ON lines (job, number) WHERE worker IS NULL AND done = 0;
CREATE INDEX IF NOT EXISTS taken_lines ON lines (worker) WHERE worker IS NOT NULL;
CREATE TABLE IF NOT EXISTS answers (
    job TEXT NOT NULL, number INTEGER NOT NULL, well INTEGER NOT NULL, line BLOB NOT NULL, PRIMARY KEY (job, number)
);
CREATE TABLE IF NOT EXISTS workers (id TEXT PRIMARY KEY, until REAL NOT NULL);
"""


class DiskFull(TandemError):
    """The store's disk has no room. What was being written is undone."""

    code = "insufficient_storage"
    http_status = 507


class StoreUnavailable(Unavailable):
    code = "batch_store_unavailable"


@contextlib.contextmanager
def translated(folder: Path) -> Iterator[None]:
    """The seam for errors of SQLite and of the file system."""
    try:
        yield
    except sqlite3.Error as error:
        if error.sqlite_errorcode == sqlite3.SQLITE_FULL if hasattr(error, "sqlite_errorcode") else False:
            raise _full(folder) from error
        if isinstance(error, sqlite3.OperationalError | sqlite3.DatabaseError):
            raise StoreUnavailable(
                f"the store of batches in {folder} cannot be used: {error} (router.batches_folder)"
            ) from error
        raise InternalError(f"the store of batches: {error}") from error
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise _full(folder) from error
        raise StoreUnavailable(
            f"the store of batches in {folder} cannot be used: {error.strerror} (router.batches_folder)"
        ) from error


def _full(folder: Path) -> DiskFull:
    return DiskFull(
        f"no room is left on the disk of {folder}, which keeps batches: delete files, or set router.batches_folder"
    )


class StoreFolder:
    """The folder and its database, which is opened, and made, with its first use."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._database: sqlite3.Connection | None = None

    @property
    def is_open(self) -> bool:
        return self._database is not None

    @property
    def exists(self) -> bool:
        """Whether anything was ever stored here. Asking makes nothing."""
        return self._database is not None or (self.folder / "batches.sqlite").exists()

    @property
    def database(self) -> sqlite3.Connection:
        if self._database is None:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            (self.folder / "files").mkdir(exist_ok=True, mode=0o700)
            file = self.folder / "batches.sqlite"
            # The folder may have been made by others, and be open to all. The files beside it that SQLite makes have its mode.
            os.close(os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
            database = sqlite3.connect(file, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
            database.row_factory = sqlite3.Row
            database.executescript("PRAGMA journal_mode = WAL; PRAGMA synchronous = FULL;" + _TABLES)
            self._database = database  # not before it has its tables: a disk may be full for a while
        return self._database

    def close(self) -> None:
        if self._database is not None:
            self._database.close()
            self._database = None


@contextlib.contextmanager
def transaction(database: sqlite3.Connection) -> Iterator[sqlite3.Connection]:
    """Everything inside happens, or nothing. Other processes see it at its end."""
    database.execute("BEGIN IMMEDIATE")
    try:
        yield database
        database.execute("COMMIT")
    except BaseException:
        with contextlib.suppress(sqlite3.Error):
            database.execute("ROLLBACK")
        raise


def page_of(
    database: sqlite3.Connection,
    table: str,
    condition: str,
    values: Sequence[Any],
    after: str | None,
    limit: int,
    *,
    newest_first: bool,
) -> tuple[list[sqlite3.Row], bool]:
    """Returns a page of a table's rows that begins after the row with this id, and whether more follow."""
    order, beyond = ("DESC", "<") if newest_first else ("ASC", ">")
    if after is not None:
        found = database.execute(f"SELECT serial FROM {table} WHERE id = ?", (after,)).fetchone()
        if found is None:
            raise InvalidRequest(f"after: there is no {after[:100]!r}; give the last id of the page before", "after")
        condition, values = f"{condition} AND serial {beyond} ?", [*values, found[0]]
    rows = database.execute(
        f"SELECT * FROM {table} WHERE {condition} ORDER BY serial {order} LIMIT ?", (*values, limit + 1)
    ).fetchall()
    return rows[:limit], len(rows) > limit
