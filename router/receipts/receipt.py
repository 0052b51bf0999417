"""A receipt: what is needed to make an answer again, and digests by which the same answer is known. Pure."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import struct
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from tandem.base.errors import ConfigurationError

_MARKS = 128  # digests along an answer: two answers part between two of them
_MARK_BYTES = 4
LEAST_KEY_BYTES = 32


class AnswerMarks(msgspec.Struct, frozen=True):
    """Digests of an answer's beginnings."""

    tokens: int
    step: (
        int  # tokens between two marks; a power of two, so that answers of other lengths have marks at the same places
    )
    marks: str  # in hexadecimal
    digest: str  # of all of it, and why it ended

    def parts_from(self, other: AnswerMarks) -> range | None:
        """Returns the tokens among which the first differs; None for the same answer."""
        if self == other:
            return None
        step = max(self.step, other.step)
        same = 0
        while (mark := self._mark_after(same + step)) and mark == other._mark_after(same + step):
            same += step
        last = max(self.tokens, other.tokens) if not mark else same + step
        return range(same, max(same + 1, last))

    def _mark_after(self, tokens: int) -> str:
        """The mark of so many tokens, a multiple of `step`; "" beyond the last."""
        end = tokens // self.step * _MARK_BYTES * 2
        return self.marks[end - 2 * _MARK_BYTES : end] if end <= len(self.marks) else ""


class Receipt(msgspec.Struct, frozen=True):
    tandem: str  # the version of the router that signed it
    path: str
    content: str  # of the model, and how its nodes compute
    adapter: str  # its identity; "" without one
    prompt: str  # the digest of its tokens
    sampling: dict[str, Any]  # what differs from wire.sampling.SamplingParams; a grammar by its digest
    answer: AnswerMarks

    def other_request(self, other: Receipt) -> str:
        """Returns what of the request differs; "" for the same request."""
        for name in ("path", "adapter", "prompt", "sampling"):
            if getattr(self, name) != getattr(other, name):
                return name
        return ""

    @property
    def seed(self) -> int:
        return int(self.sampling.get("seed", 0))


def digest_of_tokens(tokens: Sequence[int]) -> str:
    return hashlib.sha256(struct.pack(f"<{len(tokens)}q", *tokens)).hexdigest()


def marks_of(
    tokens: Sequence[int], values: Callable[[int], tuple[Sequence[int], Sequence[float]]] | None, end: str
) -> AnswerMarks:
    """`values`: the ids and log-probabilities at each token; None if the request wants none. Floats count by their bits."""
    step = 1
    while len(tokens) > step * _MARKS:
        step *= 2
    whole, marks = hashlib.sha256(), []
    for at, token in enumerate(tokens):
        whole.update(struct.pack("<q", token))
        if values is not None:
            ids, logprobs = values(at)
            whole.update(struct.pack(f"<{len(ids)}q{len(logprobs)}d", *ids, *logprobs))
        if (at + 1) % step == 0:
            marks.append(whole.digest()[:_MARK_BYTES].hex())
    whole.update(end.encode())
    return AnswerMarks(len(tokens), step, "".join(marks), whole.hexdigest())


def signed(receipt: Receipt, key: bytes) -> str:
    """Returns the receipt as text for a header."""
    content = msgspec.json.encode(receipt)
    return f"{_text(content)}.{_text(_mac(content, key))}"


def read_receipt(text: str) -> Receipt:
    """Reads a receipt without knowing who signed it. Raises ConfigurationError for anything else."""
    try:
        return msgspec.json.decode(_parts(text)[0], type=Receipt)
    except (ValueError, binascii.Error, msgspec.DecodeError) as error:
        raise ConfigurationError(
            f"this is no receipt ({error}): it is the value of an answer's header X-Tandem-Receipt"
        ) from error


def is_signed_by(text: str, key: bytes) -> bool:
    try:
        content, mac = _parts(text)
    except (ValueError, binascii.Error):
        return False
    return hmac.compare_digest(mac, _mac(content, key))


def _parts(text: str) -> tuple[bytes, bytes]:
    content, mac = (
        base64.b64decode(part + "=" * (-len(part) % 4), altchars=b"-_", validate=True)
        for part in text.strip().split(".")
    )
    return content, mac


def _text(content: bytes) -> str:
    return base64.urlsafe_b64encode(content).decode().rstrip("=")


def _mac(content: bytes, key: bytes) -> bytes:
    return hmac.new(key, b"tandem receipt\0" + content, hashlib.sha256).digest()
