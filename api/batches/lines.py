"""One line of an input file, and the lines of output and error files."""

from __future__ import annotations

from typing import Any

import msgspec

from tandem.api.batches.answer_types import BatchMistake

LONGEST_CUSTOM_ID = 512
MOST_DEPTH = 100  # more than any body may have, and less than what the decoder can read wherever it is called


class _InputLine(msgspec.Struct, frozen=True):
    custom_id: str
    method: str
    url: str
    body: dict[str, Any]


class _RawLine(msgspec.Struct, frozen=True):
    custom_id: str
    body: msgspec.Raw


_checked = msgspec.json.Decoder(_InputLine)
_raw = msgspec.json.Decoder(_RawLine)


class LineMistake(Exception):
    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code, self.param = code, param

    def at(self, line: int) -> BatchMistake:
        return BatchMistake(self.code, str(self), line, self.param)


def check_line(data: bytes, endpoint: str) -> str:
    """Returns the line's custom id. Raises LineMistake for one that no server could answer; what is wrong in its body is
    found when it is answered, as in any other request."""
    try:
        line = _checked.decode(data)
    except msgspec.ValidationError as error:
        raise LineMistake("invalid_request", f"must have custom_id, method, url and body: {error}") from None
    except msgspec.DecodeError as error:
        raise LineMistake("invalid_json_line", f"this line is not JSON: {error}") from None
    except RecursionError:
        raise _too_deep() from None
    if data.count(b"[") + data.count(b"{") > MOST_DEPTH and _is_deep(line.body):
        raise _too_deep()
    if not 1 <= len(line.custom_id) <= LONGEST_CUSTOM_ID:
        raise LineMistake("invalid_custom_id", f"custom_id: must have 1 to {LONGEST_CUSTOM_ID} characters", "custom_id")
    if line.method != "POST":
        raise LineMistake("invalid_method", f"method: must be POST, not {line.method[:20]!r}", "method")
    if line.url != endpoint:
        raise LineMistake(
            "mismatched_url", f"url: must be the batch's endpoint, {endpoint}, not {line.url[:100]!r}", "url"
        )
    return line.custom_id


def _too_deep() -> LineMistake:
    return LineMistake("invalid_json_line", f"this line is nested deeper than {MOST_DEPTH} levels")


def _is_deep(body: dict[str, Any]) -> bool:
    level: list[Any] = [body]
    for _ in range(MOST_DEPTH):
        inner = (child for each in level for child in (each.values() if isinstance(each, dict) else each))
        level = [child for child in inner if isinstance(child, dict | list)]
        if not level:
            return False
    return True


def body_of_line(data: bytes) -> bytes:
    """Returns the body of a line that `check_line` has accepted."""
    return bytes(_raw.decode(data).body)


def answer_line(line_id: str, custom_id: str, status: int, request_id: str, body: bytes) -> bytes:
    """A line of an output file, or of an error file if the status is an error's. `body` is JSON."""
    return msgspec.json.encode(
        {
            "id": line_id,
            "custom_id": custom_id,
            "response": {"status_code": status, "request_id": request_id, "body": msgspec.Raw(body)},
            "error": None,
        }
    )


def unanswered_line(line_id: str, custom_id: str, code: str, message: str) -> bytes:
    """A line of an error file for a request that was never answered."""
    return msgspec.json.encode(
        {"id": line_id, "custom_id": custom_id, "response": None, "error": {"code": code, "message": message}}
    )


def line_id(job_id: str, number: int) -> str:
    return f"batch_req_{job_id[-16:]}{number:08x}"
