"""Makes an answer again by its receipt, and says whether it is the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import msgspec

from tandem.base.errors import ConfigurationError
from tandem.cluster.api_client import ANSWER_S, ApiClient
from tandem.router.receipts.receipt import Receipt, read_receipt

_HEADER = "x-tandem-receipt"


class Remade(msgspec.Struct, frozen=True):
    same: bool
    tokens: int
    first: int  # where the answers part: a token from here
    last: int  # to here
    before: Receipt
    now: Receipt

    def __str__(self) -> str:
        if self.same:
            return f"same bits: {self.tokens} tokens, made again{self._computed()}"
        where = f"token {self.first}" if self.first == self.last else f"tokens {self.first} to {self.last}"
        return f"other bits: the answers part at {where} of {self.tokens}{self._computed()}"

    def _computed(self) -> str:
        said = [
            f"{name} was {before} and is {now}"
            for name, before, now in (
                ("the model's content", self.before.content, self.now.content),
                ("the version", self.before.tandem, self.now.tandem),
            )
            if before != now
        ]
        return "".join(f"; {each}" for each in said)


def remake(server: ApiClient, file: Path, request: Path, seconds: float) -> Remade:
    """Raises a TandemError for a receipt that the server's cluster did not sign, or that is of another request."""
    text = _read(file).decode("ascii", "replace").strip()
    before = read_receipt(text)
    try:
        body: Any = msgspec.json.decode(_read(request))
    except msgspec.DecodeError as error:
        raise ConfigurationError(
            f"{request} is no JSON ({error}): it must be the body of the request"
        ) from error
    if not isinstance(body, dict):
        raise ConfigurationError(f"{request} must be the body of the request, an object")
    # The router has drawn a seed if the request had none.
    again = msgspec.json.encode({**body, "stream": False, "seed": body.get("seed", before.seed)})
    headers = {"content-type": "application/json", _HEADER: text}
    try:
        answer = server.http.post(
            before.path, content=again, headers=headers, timeout=httpx.Timeout(ANSWER_S, read=seconds)
        )
    except httpx.HTTPError as error:
        raise server.unreachable(error) from error
    if answer.is_error:
        raise server.refused(answer)
    now = read_receipt(answer.headers.get(_HEADER, ""))
    difference = before.answer.parts_from(now.answer)
    first, last = (difference[0], difference[-1]) if difference is not None else (0, 0)
    return Remade(difference is None, before.answer.tokens, first, last, before, now)


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise ConfigurationError(f"{file} cannot be read: {error.strerror}") from error
