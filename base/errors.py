"""All errors of Tandem, as one tree. Foreign exceptions are translated into it at one seam each.

TandemError
├── RequestError            the request's fault; retrying it unchanged will not help
│   ├── InvalidRequest          400
│   │   └── InvalidImage            not an image, or not what it claims to be, or too large
│   ├── ContextLengthExceeded   400
│   └── UnknownModel            404
├── Unavailable             no node can take the request now; retry later           503
│   ├── Overloaded
│   ├── AdapterMissing          the node lacks the adapter, or has one of that name with other weights
│   └── NodeLost                the node died or stopped answering: another may take the request
├── DeadlineExceeded        the request took longer than it was allowed to          504
├── Cancelled               the client no longer wants it                           499
├── TransferError           KV did not arrive, or arrived and did not verify        502
│   └── KVLoadFailed            and the operator wants such requests to fail, not to be computed elsewhere
├── ConfigurationError      the operator's settings cannot work; says what to change
└── InternalError           a bug of ours; the message says where                   500
    └── InvalidLogits           the model computed something that is not a number
"""

from __future__ import annotations

import msgspec


class TandemError(Exception):
    """Base of the tree. `code` is stable and machine-readable; the message is for a person."""

    code: str = "internal_error"
    http_status: int = 500

    def to_wire(self) -> WireError:
        return WireError(code=self.code, message=str(self))


class RequestError(TandemError):
    code = "invalid_request"
    http_status = 400


class InvalidRequest(RequestError):
    """A field is missing, malformed or out of range. `param` names it."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class InvalidImage(InvalidRequest):
    code = "invalid_image"


class ContextLengthExceeded(RequestError):
    code = "context_length_exceeded"


class UnknownModel(RequestError):
    code = "model_not_found"
    http_status = 404


class Unavailable(TandemError):
    code = "unavailable"
    http_status = 503


class Overloaded(Unavailable):
    code = "overloaded"


class AdapterMissing(Unavailable):
    code = "adapter_missing"


class NodeLost(Unavailable):
    code = "node_lost"


class DeadlineExceeded(TandemError):
    code = "deadline_exceeded"
    http_status = 504


class Cancelled(TandemError):
    code = "cancelled"
    http_status = 499


class TransferError(TandemError):
    code = "kv_transfer_failed"
    http_status = 502


class KVLoadFailed(TransferError):
    """With `transfer.on_failure: fail`. It is the request's end: no other node computes the prompt."""

    code = "kv_load_failed"


class ConfigurationError(TandemError):
    code = "configuration_error"


class InternalError(TandemError):
    pass


class InvalidLogits(InternalError):
    code = "invalid_logits"


class WireError(msgspec.Struct, frozen=True):
    """A TandemError as a message field."""

    code: str
    message: str

    def to_exception(self) -> TandemError:
        return _BY_CODE.get(self.code, InternalError)(self.message)


def _leaves(cls: type[TandemError]) -> list[type[TandemError]]:
    return [cls, *(leaf for sub in cls.__subclasses__() for leaf in _leaves(sub))]


# Subclasses that share their parent's code (InvalidRequest) come later in the walk and win.
_BY_CODE: dict[str, type[TandemError]] = {cls.code: cls for cls in _leaves(TandemError)}
