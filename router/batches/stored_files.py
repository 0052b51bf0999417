"""Files in a store's folder, each its owner's. Every method blocks, so callers run it in the store's thread."""

from __future__ import annotations

import secrets
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tandem.api.batches.answer_types import ENDED, FileObject
from tandem.api.openai.served_model import NotHere
from tandem.base.errors import InvalidRequest
from tandem.router.batches.database import StoreFolder, page_of, transaction

MOST_FILES = 10_000  # of one owner


class FileNotHere(NotHere):
    code = "not_found"


class StoredFiles:
    def __init__(self, place: StoreFolder, clock: Callable[[], float] = time.time) -> None:
        self._place = place
        self._clock = clock

    def path_of(self, file_id: str) -> Path:
        return self._place.folder / "files" / file_id

    def new_path(self) -> tuple[str, Path]:
        """Returns a new file's id, and where its bytes are to be written before `add`."""
        self._place.database  # noqa: B018 (makes the folder)
        file_id = f"file-{secrets.token_hex(16)}"
        return file_id, self.path_of(file_id)

    def stored_bytes(self, owner: str) -> tuple[int, int, int]:
        """Returns how many bytes all owners' files have, how many this one's, and how many files those are."""
        found = self._place.database.execute(
            "SELECT coalesce(sum(size), 0), coalesce(sum(CASE WHEN owner = ? THEN size END), 0), sum(owner = ?) FROM files",
            (owner, owner),
        ).fetchone()
        return found[0], found[1], found[2] or 0

    def add(self, file_id: str, owner: str, name: str, purpose: str, size: int, expires: int | None) -> FileObject:
        now = int(self._clock())
        with transaction(self._place.database) as db:
            self.insert(db, file_id, owner, name, purpose, size, now, expires)
        return FileObject(file_id, size, now, name, purpose, expires)

    @staticmethod
    def insert(db: sqlite3.Connection, *values: Any) -> None:
        db.execute(
            "INSERT INTO files VALUES (?, ?, ?, ?, ?, ?, ?, (SELECT coalesce(max(serial), 0) + 1 FROM files))", values
        )

    def one(self, file_id: str, owner: str) -> FileObject:
        """Raises FileNotHere, also for another owner's file."""
        row = self._place.database.execute(
            "SELECT * FROM files WHERE id = ? AND owner = ? AND (expires IS NULL OR expires >= ?)",
            (file_id, owner, self._clock()),
        ).fetchone()
        if row is None:
            raise FileNotHere(f"there is no file {file_id[:100]!r} of this key")
        return _file_of(row)

    def page(
        self, owner: str, after: str | None, limit: int, purpose: str | None, *, newest_first: bool
    ) -> tuple[list[FileObject], bool]:
        condition, values = "owner = ?", [owner]
        if purpose is not None:
            condition, values = f"{condition} AND purpose = ?", [*values, purpose]
        rows, more = page_of(self._place.database, "files", condition, values, after, limit, newest_first=newest_first)
        return [_file_of(row) for row in rows], more

    def delete(self, file_id: str, owner: str) -> None:
        """Raises FileNotHere, and InvalidRequest while a job reads the file."""
        self.one(file_id, owner)
        with transaction(self._place.database) as db:
            reader = db.execute(
                f"SELECT id FROM jobs WHERE input_file = ? AND status NOT IN {ENDED}", (file_id,)
            ).fetchone()
            if reader is not None:
                raise InvalidRequest(
                    f"{file_id}: {reader[0]} still reads this file; cancel that batch first", "file_id"
                )
            db.execute("DELETE FROM files WHERE id = ?", (file_id,))
        self.path_of(file_id).unlink(missing_ok=True)

    def drop(self, file_id: str) -> None:
        """Removes what there is of a file whose upload failed."""
        with transaction(self._place.database) as db:
            db.execute("DELETE FROM files WHERE id = ?", (file_id,))
        self.path_of(file_id).unlink(missing_ok=True)

    def forget_expired(self) -> int:
        """Deletes the files whose time is over, and those that a process wrote without naming them before it died."""
        now = self._clock()
        with transaction(self._place.database) as db:
            over = db.execute(
                f"DELETE FROM files WHERE expires < ? AND id NOT IN (SELECT input_file FROM jobs WHERE status NOT IN {ENDED}) "
                "RETURNING id",
                (now,),
            ).fetchall()
            named = {row[0] for row in db.execute("SELECT id FROM files")}
        for row in over:
            self.path_of(row[0]).unlink(missing_ok=True)
        for path in (self._place.folder / "files").iterdir():
            if path.name not in named and path.stat().st_mtime < now - 86400:
                path.unlink(missing_ok=True)
        return len(over)


def _file_of(row: sqlite3.Row) -> FileObject:
    return FileObject(row["id"], row["size"], row["made"], row["name"], row["purpose"], row["expires"])
