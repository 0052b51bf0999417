"""A job at a server, and the note beside the output file by which a later run finds it again."""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import httpx
import msgspec

from tandem.base.errors import ConfigurationError, RequestError, TandemError, Unavailable
from tandem.cluster.api_client import ApiClient, decoded
from tandem.machine.digests import write_whole

ENDED = ("completed", "failed", "expired", "cancelled")
LOOK_S = 1.0
PATIENCE_S = 120.0  # a router that restarts is waited for
UPLOAD = httpx.Timeout(30.0, read=900.0, write=900.0)


class JobNote(msgspec.Struct, frozen=True):
    """What a later run must know."""

    batch_id: str
    input_digest: str  # of the input file; another one is another job


class _First(msgspec.Struct):
    url: str = ""


class Counts(msgspec.Struct, frozen=True):
    total: int = 0
    completed: int = 0
    failed: int = 0


class _UploadedFile(msgspec.Struct):
    id: str


class JobMistake(msgspec.Struct):
    message: str
    line: int | None = None

    def __str__(self) -> str:
        return f"line {self.line}: {self.message}" if self.line else self.message


class _JobMistakes(msgspec.Struct):
    data: list[JobMistake] = []


class ServersJob(msgspec.Struct):
    """The job, as the server tells of it."""

    id: str
    status: str
    request_counts: Counts = Counts()
    input_file_id: str | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    errors: _JobMistakes | None = None
    estimated_completion_at: float | None = None


def digest_of(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while data := file.read(1 << 20):
            digest.update(data)
    return digest.hexdigest()


def endpoint_of(path: Path) -> str:
    """Returns the url of the file's first line. Raises ConfigurationError."""
    with path.open("rb") as file:
        for line in file:
            if line.strip():
                try:
                    return msgspec.json.decode(line, type=_First).url
                except msgspec.DecodeError as error:
                    raise ConfigurationError(
                        f"{path}: the first line must be an object with custom_id, method, url and body: {error}"
                    ) from error
    raise ConfigurationError(f"{path} has no lines")


class BatchClient:
    def __init__(self, api: ApiClient) -> None:
        self._api = api

    def begin(self, path: Path, endpoint: str, window: str) -> str:
        """Sends the file and asks for the job. Returns its id."""
        try:
            with path.open("rb") as file:
                response = self._api.http.post(
                    "/v1/files", files={"file": (path.name, file)}, data={"purpose": "batch"}, timeout=UPLOAD
                )
        except httpx.HTTPError as error:
            raise self._api.unreachable(error) from error
        if not response.is_success:
            raise self._api.refused(response)
        file_id = decoded(f"{self._api.url}/v1/files", response.content, _UploadedFile).id
        body = {
            "input_file_id": file_id,
            "endpoint": endpoint,
            "completion_window": window,
            "metadata": {"input": path.name[:512]},
        }
        try:
            made = self._api.post("/v1/batches", msgspec.json.encode(body), httpx.Timeout(30.0))
        except RequestError:
            self._forget([file_id])
            raise
        return decoded(f"{self._api.url}/v1/batches", made.content, ServersJob).id

    def cancel(self, batch_id: str) -> None:
        with contextlib.suppress(TandemError):
            self._api.post(f"/v1/batches/{batch_id}/cancel", b"{}", httpx.Timeout(30.0))

    def look(self, batch_id: str) -> ServersJob | None:
        """Returns the job as it is now, or None for one that the server does not have."""
        try:
            return self._api.read(f"/v1/batches/{batch_id}", ServersJob)
        except RequestError as error:
            if " answered 404" in str(error):
                return None
            raise

    def follow(
        self,
        batch_id: str,
        show: Callable[[str, Counts, float | None], None],
        sleep: Callable[[float], None] = time.sleep,
    ) -> ServersJob:
        """Waits for the job's end, and returns it. A server that does not answer is waited for. `show` is told the status,
        how many lines are answered, and when all are expected to be."""
        silent_since: float | None = None
        while True:
            try:
                batch = self.look(batch_id)
            except Unavailable:
                now = time.monotonic()
                silent_since = silent_since or now
                if now > silent_since + PATIENCE_S:
                    raise
                sleep(LOOK_S)
                continue
            silent_since = None
            if batch is None:
                raise Unavailable(f"the server has no batch {batch_id} any more: call again to begin another")
            show(batch.status, batch.request_counts, batch.estimated_completion_at)
            if batch.status in ENDED:
                return batch
            sleep(LOOK_S)

    def fetch(self, file_id: str | None, target: Path) -> None:
        """Writes the file, whole or not at all. Without an id, an empty one."""
        part = target.with_name(f".{target.name}.part")
        try:
            with part.open("wb") as out:
                if file_id is not None:
                    self._stream_to(file_id, out.write)
                out.flush()
                os.fsync(out.fileno())
            part.replace(target)
        except OSError as error:
            raise ConfigurationError(f"{target} cannot be written: {error.strerror}") from error
        finally:
            part.unlink(missing_ok=True)

    def _stream_to(self, file_id: str, write: Callable[[bytes], object]) -> None:
        try:
            with self._api.http.stream("GET", f"/v1/files/{file_id}/content", timeout=UPLOAD) as response:
                if not response.is_success:
                    response.read()
                    raise self._api.refused(response)
                for data in response.iter_bytes():
                    write(data)
        except httpx.HTTPError as error:
            raise self._api.unreachable(error) from error

    def forget(self, batch: ServersJob) -> None:
        """Deletes the job's files at the server, which are here now."""
        self._forget([batch.input_file_id, batch.output_file_id, batch.error_file_id])

    def _forget(self, file_ids: Iterable[str | None]) -> None:
        for file_id in filter(None, file_ids):
            with contextlib.suppress(httpx.HTTPError):
                self._api.http.delete(f"/v1/files/{file_id}")


def note_beside(output: Path) -> Path:
    return output.with_name(f".{output.name}.batch")


def read_note(output: Path) -> JobNote | None:
    try:
        return msgspec.json.decode(note_beside(output).read_bytes(), type=JobNote)
    except (OSError, msgspec.DecodeError):
        return None


def write_note(output: Path, note: JobNote) -> None:
    path = note_beside(output)
    try:
        write_whole(path, msgspec.json.encode(note))
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be written: {error.strerror}") from error
