"""The address of a process with its public key: `tcp://KEY@ADDRESS:PORT`.

KEY is the public half of the listener's key pair (`wire.curve`). Any process may pass an endpoint on: a connection
to it reaches the holder of that key, or fails.
"""

from __future__ import annotations

import base64
import ipaddress
from typing import NamedTuple
from urllib.parse import urlsplit

KEY_BYTES = 32


class Endpoint(NamedTuple):
    key: str
    host: str
    port: int

    def __str__(self) -> str:
        return f"tcp://{self.key}@{self.address}"

    @property
    def address(self) -> str:
        """The endpoint without its key, for people."""
        return address_of(self.host, self.port)


def address_of(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def parse_endpoint(text: str) -> Endpoint | None:
    """Returns None for a text that is no endpoint, and for one with a host name, because a look-up might block."""
    try:
        parts = urlsplit(text)
        host, port, key = parts.hostname, parts.port, parts.username
        if parts.scheme != "tcp" or not (host and port and key) or parts.path or parts.query or parts.fragment:
            return None
        ipaddress.ip_address(host)
        key_bytes(key)
    except ValueError:
        return None
    return Endpoint(key, host, port)


def key_of(endpoint: str) -> str:
    """Raises ValueError for a text that is no endpoint."""
    parsed = parse_endpoint(endpoint)
    if parsed is None:
        raise ValueError(f"{endpoint!r} is no endpoint: it must be tcp://KEY@ADDRESS:PORT")
    return parsed.key


def shown(endpoint: str) -> str:
    """Returns the address alone, for logs and views; or the text, if it is no endpoint."""
    parsed = parse_endpoint(endpoint)
    return parsed.address if parsed is not None else endpoint


def key_text(key: bytes) -> str:
    return base64.urlsafe_b64encode(key).rstrip(b"=").decode()


def key_bytes(text: str) -> bytes:
    """Raises ValueError for a text that is no key."""
    try:
        key = base64.b64decode(text + "=", altchars=b"-_", validate=True)
    except ValueError as error:  # binascii.Error is one
        raise ValueError(f"{text!r} is no public key: {error}") from None
    if len(key) != KEY_BYTES:
        raise ValueError(f"{text!r} is no public key: it must have {KEY_BYTES} bytes, not {len(key)}")
    return key
