"""Asks a running router over HTTP, for commands."""

from __future__ import annotations

import os
import socket
import ssl
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import httpx
import msgspec

from tandem.base.errors import ConfigurationError, InternalError, RequestError, TandemError, Unavailable

KEY = "TANDEM_API_KEY"
ANSWER_S = 5.0

T = TypeVar("T")

# A response may take as long as a model loads. With keep-alives, a peer whose machine is gone is still noticed within a minute.
_NOTICE_SILENT_PEER = [
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
]


def key_from_environment(environ: Mapping[str, str] = os.environ) -> str | None:
    key = environ.get(KEY) or None
    if key is not None and not (key.isascii() and key.isprintable()):
        raise ConfigurationError(f"{KEY} must be letters, digits and signs in ASCII, without spaces: set it again")
    return key


def trusted(url: str) -> ssl.SSLContext | bool:
    """Returns the certificates to trust: this machine's and those in SSL_CERT_FILE. False for plain HTTP, because loading them takes
    long."""
    return ssl.create_default_context() if url.lower().startswith("https://") else False


def checked_url(url: str) -> str:
    """Returns the URL without a slash at its end. Raises ConfigurationError if it is no URL of an HTTP server."""
    try:
        parsed = httpx.URL(url.rstrip("/"))
        if parsed.scheme not in ("http", "https"):
            raise httpx.InvalidURL("it does not begin with http:// or https://")
        parsed.raw_host.decode("ascii").encode("idna")  # as the socket will, with an error that is none of httpx's
    except (httpx.InvalidURL, UnicodeError) as error:
        raise ConfigurationError(
            f"{url!r} is no URL ({error}): it must be one such as http://127.0.0.1:8000"
        ) from error
    return url.rstrip("/")


def decoded(url: str, answer: bytes, kind: type[T]) -> T:
    """Raises InternalError for an answer of another kind. `url`: whose answer it is."""
    try:
        return msgspec.json.decode(answer, type=kind)
    except msgspec.MsgspecError as error:
        raise InternalError(f"{url} did not answer like a Tandem router: {error}") from error


class ApiClient:
    def __init__(
        self,
        url: str,
        key: str | None = None,
        transport: httpx.BaseTransport | None = None,
        timeout: httpx.Timeout | float = ANSWER_S,
    ) -> None:
        self.url = checked_url(url).removesuffix("/v1")  # as OpenAI's clients are given it
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self.http = httpx.Client(
            base_url=self.url,
            headers=headers,
            timeout=timeout,
            transport=transport
            or httpx.HTTPTransport(verify=trusted(self.url), trust_env=False, socket_options=_NOTICE_SILENT_PEER),
            trust_env=False,
        )

    def get(self, path: str) -> httpx.Response:
        """Raises RequestError or Unavailable, with a message for the operator, for any response but a success."""
        return self.answered(lambda: self.http.get(path))

    def read(self, path: str, kind: type[T]) -> T:
        """Raises the same errors as `get`, and InternalError for an answer of another kind."""
        return decoded(f"{self.url}{path}", self.get(path).content, kind)

    def post(
        self, path: str, body: bytes, timeout: httpx.Timeout, more: Mapping[str, str] | None = None
    ) -> httpx.Response:
        """Raises the same errors as `get`. `more`: further headers."""
        headers = {"content-type": "application/json", **(more or {})}
        return self.answered(lambda: self.http.post(path, content=body, headers=headers, timeout=timeout))

    def answered(self, ask: Callable[[], httpx.Response]) -> httpx.Response:
        """Returns what `ask` got of `http`. Raises the same errors as `get`."""
        try:
            response = ask()
        except httpx.HTTPError as error:
            raise self.unreachable(error) from error
        if not response.is_success:
            raise self.refused(response)
        return response

    @contextmanager
    def streamed(self, method: str, path: str, **sent: Any) -> Iterator[httpx.Response]:
        """While it is entered, the answer can be read as it comes. Raises the same errors as `get`."""
        try:
            with self.http.stream(method, path, **sent) as response:
                if not response.is_success:
                    response.read()
                    raise self.refused(response)
                yield response
        except httpx.HTTPError as error:
            raise self.unreachable(error) from error

    def unreachable(self, error: httpx.HTTPError) -> Unavailable:
        if "CERTIFICATE_VERIFY_FAILED" in str(error):
            return Unavailable(
                f"{self.url} has a certificate that this machine does not trust ({error}): name the address that it was made for with "
                "--url, or its authority's file in SSL_CERT_FILE"
            )
        if isinstance(error, httpx.RemoteProtocolError) and self.url.startswith("http://"):
            return Unavailable(
                f"{self.url} ended the connection ({error}): if it serves with TLS, its address begins with https://"
            )
        if "[SSL" in str(error):
            return Unavailable(
                f"{self.url} does not answer with TLS ({error}): if it serves without, its address begins with http://"
            )
        return Unavailable(
            f"{self.url} does not answer ({error}): is `tandem serve` running there? Name another router with --url"
        )

    def refused(self, response: httpx.Response) -> TandemError:
        """Returns the error for a response that was no success. The response's body must have been read."""
        advice = f" (set {KEY} to a key of that router)" if response.status_code == 401 else ""
        text = f"{self.url} answered {response.status_code}: {_message(response)}{advice}"
        if response.has_redirect_location:
            text = f"{self.url} sends to {response.headers['location']}: name that server with --url"
        return RequestError(text) if response.is_client_error else Unavailable(text)

    def close(self) -> None:
        self.http.close()


def _message(response: httpx.Response) -> str:
    try:
        body: Any = response.json()
        return str(body["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return response.text[:300] or "no reason given"
