"""POST /v1/files: the body is written to the store's folder while it arrives."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import time
from pathlib import Path
from typing import BinaryIO

from tandem.api.batches.answer_types import FileObject
from tandem.api.batches.batch_request import ExpiresAfter, check_expiry
from tandem.base.errors import Cancelled, InvalidRequest, Overloaded
from tandem.router.batches.database import DiskFull
from tandem.router.batches.form import FormReader, PartBegins
from tandem.router.batches.store import BatchStore
from tandem.router.batches.store_thread import StoreThread
from tandem.router.batches.stored_files import MOST_FILES
from tandem.router.http.errors import BodyTimeout, BodyTooLarge
from tandem.router.http.exchange import HttpExchange
from tandem.router.http.services import Services

MOST_FILE_BYTES = 200 << 20  # OpenAI's limit of a batch's file
MOST_STORED_BYTES = 64 << 30  # of all files; one key may have half of it
SPARE_BYTES = 256 << 20  # left free on the disk, for the database and the answers
UPLOAD_S = 900.0
WRITE_BYTES = 1 << 20
MOST_FIELD_BYTES = 1 << 10
LONGEST_FILENAME = 512
PURPOSES = ("batch", "user_data", "assistants", "fine-tune", "vision", "evals")


async def upload(thread: StoreThread, services: Services, exchange: HttpExchange) -> FileObject:
    """Returns the stored file. What an upload that fails has written is removed."""
    declared = exchange.header(b"content-length")
    if declared is not None and declared.isdigit() and int(declared) > MOST_FILE_BYTES + (64 << 10):
        raise BodyTooLarge(f"the body has {int(declared)} bytes; a file may have {MOST_FILE_BYTES}")
    form = _Form(FormReader((exchange.header(b"content-type") or b"").decode("latin-1")))
    owner = exchange.owner
    file_id, path = await thread.ask(lambda store: room(store, owner))
    try:
        with services.bodies.share() as share:
            share.take(owner, 2 * WRITE_BYTES)
            await _receive(thread, form, exchange, services.config.timeouts.body, path)
        name, purpose, expires = form.checked()
        return await thread.ask(lambda store: store.files.add(file_id, owner, name, purpose, form.size, expires))
    except BaseException:
        thread.soon(lambda store: store.files.drop(file_id))
        raise


def room(store: BatchStore, owner: str) -> tuple[str, Path]:
    """Returns a new file's id and path. Raises when there is no room for the largest one."""
    made = store.files.new_path()
    stored, own, files = store.files.stored_bytes(owner)
    most_own = MOST_STORED_BYTES // 2 if owner else MOST_STORED_BYTES
    if files >= MOST_FILES:
        raise Overloaded(f"this key has {files} files, and may have {MOST_FILES}: delete some")
    if stored + MOST_FILE_BYTES > MOST_STORED_BYTES or own + MOST_FILE_BYTES > most_own:
        raise DiskFull(f"files have {stored} bytes, {own} of them this key's: delete some")
    if shutil.disk_usage(store.place.folder).free < SPARE_BYTES:
        raise DiskFull(
            f"less than {SPARE_BYTES >> 20} MiB are free on the disk of {store.place.folder}, which keeps batches: delete files, or "
            "set router.batches_folder"
        )
    return made


async def _receive(thread: StoreThread, form: _Form, exchange: HttpExchange, patience_s: float, path: Path) -> None:
    """Reads the body to its end. Pieces are written by the store's thread, a megabyte at a time: a disk that hangs must
    not hold the threads that all requests share."""
    ends = asyncio.get_running_loop().time() + UPLOAD_S
    more = True
    file = await thread.ask(lambda _: path.open("xb"))
    try:
        while more:
            try:
                async with asyncio.timeout_at(min(ends, asyncio.get_running_loop().time() + patience_s)):
                    message = await exchange.receive()
            except TimeoutError:
                raise BodyTimeout(
                    f"the file did not arrive: nothing for {patience_s:g} s, or not all of it within {UPLOAD_S:g} s"
                ) from None
            if message["type"] == "http.disconnect":
                raise Cancelled("the client went away before its file was complete")
            more = message.get("more_body", False)
            form.take(message.get("body", b""))
            if form.unwritten_size >= WRITE_BYTES or not more:
                await thread.ask(lambda _: form.write_to(file))
        await thread.ask(lambda _: os.fsync(file.fileno()))  # the table that will name it survives a power cut
    finally:
        thread.soon(lambda _: file.close())


class _Form:
    """What the parts of the form say, and the file's bytes that are not written yet."""

    def __init__(self, reader: FormReader) -> None:
        self._reader = reader
        self._fields: dict[str, bytearray] = {}
        self._part = ""
        self._filename: str | None = None
        self._unwritten: list[bytes] = []
        self.unwritten_size = 0
        self.size = 0

    def take(self, data: bytes) -> None:
        for each in self._reader.feed(data):
            if isinstance(each, PartBegins):
                self._begin(each)
            elif self._part == "file":
                self._unwritten.append(each)
                self.unwritten_size += len(each)
                self.size += len(each)
                if self.size > MOST_FILE_BYTES:
                    raise BodyTooLarge(f"the file has more than the {MOST_FILE_BYTES} bytes that are kept")
            else:
                self._fields[self._part] += each
                if len(self._fields[self._part]) > MOST_FIELD_BYTES:
                    raise InvalidRequest(f"{self._part}: longer than {MOST_FIELD_BYTES} bytes", self._part)

    def _begin(self, part: PartBegins) -> None:
        self._part = part.name[:100]
        if self._part in self._fields or (self._part == "file" and self._filename is not None):
            raise InvalidRequest(f"{self._part}: given twice", self._part)
        if self._part == "file":
            self._filename = (part.filename or "file.jsonl")[:LONGEST_FILENAME]
        else:
            self._fields[self._part] = bytearray()

    def write_to(self, file: BinaryIO) -> None:
        file.write(b"".join(self._unwritten))
        file.flush()
        self._unwritten.clear()
        self.unwritten_size = 0

    def checked(self) -> tuple[str, str, int | None]:
        """Returns name, purpose, and when the file expires."""
        if not self._reader.done:
            raise InvalidRequest("the form does not end with its boundary")
        if self._filename is None:
            raise InvalidRequest("file: missing; send the file as a part of that name", "file")
        if not self.size:
            raise InvalidRequest("file: it is empty", "file")
        purpose = self._text("purpose")
        if purpose not in PURPOSES:
            raise InvalidRequest(
                f"purpose: must be batch, or another of OpenAI's ({', '.join(PURPOSES[1:])}), not {(purpose or '')[:40]!r}",
                "purpose",
            )
        return self._filename, purpose, self._expires()

    def _expires(self) -> int | None:
        anchor, seconds = self._text("expires_after[anchor]"), self._text("expires_after[seconds]")
        if anchor is None and seconds is None:
            return None
        if seconds is None or re.fullmatch("[0-9]{1,9}", seconds) is None:
            raise InvalidRequest("expires_after.seconds: must be a number of seconds", "expires_after")
        expiry = ExpiresAfter(anchor or "", int(seconds))
        check_expiry(expiry, "expires_after", "created_at")
        return int(time.time()) + expiry.seconds

    def _text(self, name: str) -> str | None:
        return self._fields[name].decode("utf-8", "replace") if name in self._fields else None
