"""The store's tables: SQLite in one file, which all router processes with the same folder share.

Every change is one transaction, so a process that dies leaves none half done. A process that takes work is named in it,
and renews its lease in `workers`. Work of a process whose lease has ended is free again.
"""

from __future__ import annotations

import contextlib
import errno
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from tandem.base.errors import InternalError, TandemError, Unavailable

BUSY_S = 10.0  # how long a transaction waits for another process's

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


def connect(folder: Path) -> sqlite3.Connection:
    """Opens the database; makes it where there is none."""
    database = sqlite3.connect(
        folder / "batches.sqlite", timeout=BUSY_S, isolation_level=None, check_same_thread=False
    )
    database.row_factory = sqlite3.Row
    database.executescript("PRAGMA journal_mode = WAL; PRAGMA synchronous = FULL;" + _TABLES)
    return database


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
