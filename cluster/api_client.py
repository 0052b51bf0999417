"""A running router, asked over HTTP by a command."""

from __future__ import annotations

import os
import socket
import ssl
from collections.abc import Mapping
from typing import Any

import httpx

from tandem.wire.errors import ConfigurationError, RequestError, TandemError, Unavailable

KEY = "TANDEM_API_KEY"
ANSWER_S = 5.0

# An answer may take as long as a model takes to load. A peer whose machine is gone is noticed within a minute all the same.
_NOTICE_SILENT_PEER = [
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
]


def key_from_environment(environ: Mapping[str, str] = os.environ) -> str | None:
    key = environ.get(KEY) or None
    if key is not None and not (key.isascii() and key.isprintable()):
        raise ConfigurationError(
            f"{KEY} must be letters, digits and signs in ASCII, without spaces: set it again"
        )
    return key


def trusted(url: str) -> ssl.SSLContext | bool:
    """Which certificates are believed: those that this machine believes, and those of SSL_CERT_FILE. To read them all takes long, so
    only where they are needed."""
    return ssl.create_default_context() if url.startswith("https://") else False


class ApiClient:
    def __init__(
        self,
        url: str,
        key: str | None = None,
        transport: httpx.BaseTransport | None = None,
        timeout: httpx.Timeout | float = ANSWER_S,
    ) -> None:
        self.url = url.rstrip("/")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        try:
            if httpx.URL(self.url).scheme not in ("http", "https"):
                raise httpx.InvalidURL("it does not begin with http:// or https://")
            self.http = httpx.Client(
                base_url=self.url,
                headers=headers,
                timeout=timeout,
                transport=transport
                or httpx.HTTPTransport(
                    verify=trusted(self.url), trust_env=False, socket_options=_NOTICE_SILENT_PEER
                ),
                trust_env=False,
            )
        except httpx.InvalidURL as error:
            raise ConfigurationError(
                f"{url!r} is no URL ({error}): it must be one such as http://127.0.0.1:8000"
            ) from error

    def get(self, path: str) -> httpx.Response:
        """Raises what an operator can read for everything but a good answer."""
        try:
            response = self.http.get(path)
        except httpx.HTTPError as error:
            raise self.unreachable(error) from error
        if response.is_error:
            raise self.refused(response)
        return response

    def post(self, path: str, body: bytes, timeout: httpx.Timeout) -> httpx.Response:
        """Raises the same."""
        headers = {"content-type": "application/json"}
        try:
            response = self.http.post(path, content=body, headers=headers, timeout=timeout)
        except httpx.HTTPError as error:
            raise self.unreachable(error) from error
        if response.is_error:
            raise self.refused(response)
        return response

    def unreachable(self, error: httpx.HTTPError) -> Unavailable:
        if "CERTIFICATE_VERIFY_FAILED" in str(error):
            return Unavailable(
                f"{self.url} has a certificate that this machine does not trust ({error}): name the address that it was made for with "
                "--url, or its authority's file in SSL_CERT_FILE"
            )
        return Unavailable(
            f"{self.url} does not answer ({error}): is `tandem serve` running there? Name another with --url"
        )

    def refused(self, response: httpx.Response) -> TandemError:
        """The answer must have been read."""
        advice = f" ({KEY} holds the key that commands show)" if response.status_code == 401 else ""
        text = f"{self.url} answered {response.status_code}: {_message(response)}{advice}"
        return RequestError(text) if response.is_client_error else Unavailable(text)

    def close(self) -> None:
        self.http.close()


def _message(response: httpx.Response) -> str:
    try:
        body: Any = response.json()
        return str(body["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return response.text[:300] or "no reason given"
