"""Anthropic's message batches in the terms of files and lines."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, Literal

import msgspec

from tandem.api.batches.answer_types import BatchObject
from tandem.api.field_table import PathFields
from tandem.base.errors import InvalidRequest

ENDPOINT = "/v1/messages"
LONGEST_CUSTOM_ID = 64


class BatchedMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    custom_id: str
    params: dict[str, Any]


class MessageBatchRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    requests: list[BatchedMessage]

    def lines(self) -> bytes:
        """Returns the requests as an input file. Raises InvalidRequest."""
        if not self.requests:
            raise InvalidRequest("requests: must not be empty", "requests")
        seen: set[str] = set()
        lines: list[bytes] = []
        for index, each in enumerate(self.requests):
            if not 1 <= len(each.custom_id) <= LONGEST_CUSTOM_ID or each.custom_id in seen:
                raise InvalidRequest(
                    f"requests[{index}].custom_id: must have 1 to {LONGEST_CUSTOM_ID} characters, and be no other request's",
                    "requests",
                )
            seen.add(each.custom_id)
            lines.append(
                msgspec.json.encode(
                    {"custom_id": each.custom_id, "method": "POST", "url": ENDPOINT, "body": each.params}
                )
            )
        return b"\n".join(lines) + b"\n"


class MessageCounts(msgspec.Struct, frozen=True):
    processing: int
    succeeded: int
    errored: int
    canceled: int
    expired: int


class MessageBatch(msgspec.Struct, frozen=True):
    id: str
    processing_status: Literal["in_progress", "canceling", "ended"]
    request_counts: MessageCounts
    created_at: str
    expires_at: str
    ended_at: str | None
    cancel_initiated_at: str | None
    results_url: str | None
    archived_at: str | None = None
    type: Literal["message_batch"] = "message_batch"


class MessageBatchList(msgspec.Struct, frozen=True):
    data: list[MessageBatch]
    first_id: str | None
    last_id: str | None
    has_more: bool


class MessageBatchDeleted(msgspec.Struct, frozen=True):
    id: str
    type: Literal["message_batch_deleted"] = "message_batch_deleted"


def shown(batch: BatchObject) -> MessageBatch:
    """The batch as Anthropic's API has it. The results' address has no host, so that it is right behind any proxy; Anthropic's
    clients ask the server that they know."""
    counts = batch.request_counts
    has_ended = batch.status in ("completed", "cancelled", "expired", "failed")
    left = counts.total - counts.completed - counts.failed
    return MessageBatch(
        id=batch.id,
        processing_status=("ended" if has_ended else "canceling" if batch.cancelling_at is not None else "in_progress"),
        request_counts=MessageCounts(
            processing=0 if has_ended else left,
            succeeded=counts.completed,
            errored=counts.failed if batch.status != "failed" else counts.total,
            canceled=left if batch.status == "cancelled" else 0,
            expired=left if batch.status == "expired" else 0,
        ),
        created_at=_time(batch.created_at) or "",
        expires_at=_time(batch.expires_at) or "",
        ended_at=_time(batch.completed_at or batch.cancelled_at or batch.expired_at or batch.failed_at),
        cancel_initiated_at=_time(batch.cancelling_at),
        results_url=f"/v1/messages/batches/{batch.id}/results" if has_ended else None,
    )


def _time(at: int | None) -> str | None:
    return datetime.fromtimestamp(at, UTC).isoformat().replace("+00:00", "Z") if at is not None else None


def result_line(custom_id: str, status: int, body: bytes) -> bytes:
    """A line of the results. `body` is JSON in Anthropic's form."""
    result: dict[str, Any] = (
        {"type": "succeeded", "message": msgspec.Raw(body)}
        if status == 200
        else {"type": "errored", "error": msgspec.Raw(body)}
    )
    return msgspec.json.encode({"custom_id": custom_id, "result": result})


def unanswered_result(custom_id: str, *, expired: bool) -> bytes:
    result = {"type": "expired" if expired else "canceled"}
    return msgspec.json.encode({"custom_id": custom_id, "result": result})


FIELDS = (PathFields("/v1/messages/batches", MessageBatchRequest),)
