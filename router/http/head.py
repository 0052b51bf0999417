"""A request's head: httptools (llhttp) reads it, and what it lets pass but two readers could end differently is refused."""

from __future__ import annotations

import re
from urllib.parse import unquote

import httptools

from tandem.router.http.chunked import FramingError

END_OF_HEAD = re.compile(rb"\n\r?\n")
_BOTH = "Transfer-Encoding and Content-Length together; send one of them"
_BETTER = {  # llhttp's messages that do not say what would be right
    "Transfer-Encoding can't be present with Content-Length": _BOTH,
    "Content-Length can't be present with Transfer-Encoding": _BOTH,
}
_LENGTH = re.compile(rb"[0-9]{1,18}")


class RequestHead:
    """What the first lines of a request say. Raises FramingError for what is none."""

    def __init__(self, data: bytes | bytearray) -> None:
        self.url = b""
        self.headers: list[tuple[bytes, bytes]] = []
        self.content_length: int | None = None
        self.chunked = False
        self.expects_continue = False
        self._complete = False
        parser = httptools.HttpRequestParser(self)
        try:
            parser.feed_data(_with_one_length(data))
        except httptools.HttpParserUpgrade:
            pass  # nothing here is upgraded to, and one that offers it takes an answer in HTTP/1.1
        except httptools.HttpParserError as error:
            raise FramingError(_BETTER.get(str(error), str(error))) from None
        if not self._complete:
            raise FramingError("the header does not end where its lines do")
        self.method = parser.get_method().decode("ascii")
        self.version = parser.get_http_version()
        if self.version not in ("1.0", "1.1"):
            raise FramingError(f"HTTP/{self.version} is not spoken here; send HTTP/1.1")
        self.keep_alive = self.version == "1.1"
        self._check()

    def on_url(self, url: bytes) -> None:
        self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value.strip(b" \t")))

    def on_headers_complete(self) -> None:
        self._complete = True

    def _check(self) -> None:
        hosts = 0
        codings: list[bytes] = []
        for name, value in self.headers:
            if name == b"content-length":
                if _LENGTH.fullmatch(value) is None:
                    raise FramingError(f"Content-Length must be a number, not {value[:40]!r}")
                if self.content_length not in (None, int(value)):
                    raise FramingError("several Content-Lengths that differ; send one of them")
                self.content_length = int(value)
            elif name == b"transfer-encoding":
                codings.append(value.lower())
            elif name == b"connection":
                if b"close" in [option.strip().lower() for option in value.split(b",")]:
                    self.keep_alive = False
            elif name == b"host":
                hosts += 1
            elif name == b"expect":
                self.expects_continue = value.lower() == b"100-continue" and self.version == "1.1"
        if hosts != 1 and self.version == "1.1":
            raise FramingError("HTTP/1.1 needs exactly one Host")
        if codings:
            if self.content_length is not None:
                raise FramingError(_BOTH)
            if self.version != "1.1":
                raise FramingError("Transfer-Encoding in HTTP/1.0, which has none; send Content-Length")
            if codings != [b"chunked"]:
                raise FramingError("Transfer-Encoding must be chunked and nothing else")
            self.chunked = True

    @property
    def target(self) -> tuple[str, bytes, bytes]:
        """The decoded path, the path as it came, and the query."""
        url = self.url
        if not url.startswith(b"/"):
            url = _path_of(url)
        raw_path, _, query = url.partition(b"?")
        path = raw_path.decode("latin-1")
        return (unquote(path) if "%" in path else path), raw_path, query


def _with_one_length(data: bytes | bytearray) -> bytes | bytearray:
    """llhttp refuses a length that is said twice, also where both are the same: there it is in no doubt."""
    if data.lower().count(b"\ncontent-length:") < 2:
        return data
    lines = bytes(data).split(b"\r\n")
    kept: list[bytes] = []
    seen: set[bytes] = set()
    for line in lines:
        if line[:15].lower() == b"content-length:":
            normal = line[15:].strip(b" \t")
            if normal in seen:
                continue
            seen.add(normal)
        kept.append(line)
    return b"\r\n".join(kept)


def _path_of(url: bytes) -> bytes:
    """The path of a target that also names the host, as a proxy is asked, or that is no path."""
    try:
        parsed = httptools.parse_url(url)
    except httptools.HttpParserError:
        return url
    query = b"?" + parsed.query if parsed.query else b""
    return (parsed.path or b"/") + query
