"""`-o json`: a command's result as JSON is all that it prints to standard output. Also a stream that never fails, and one that logs what
libraries print."""

from __future__ import annotations

import argparse
import io
import logging
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from tandem.base.errors import TandemError


class UnfailingOutput(io.TextIOBase):
    """Drops what is written once the stream cannot be written any more (a closed pipe, a full disk, a closed terminal), so that a service does
    not end because its output is not read."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._is_lost = False

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._stream.encoding

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()

    def write(self, text: str) -> int:
        try:
            if not self._is_lost:
                self._stream.write(text)
        except OSError:
            self._lose()
        return len(text)

    def flush(self) -> None:
        try:
            if not self._is_lost:
                self._stream.flush()
        except OSError:
            self._lose()

    def _lose(self) -> None:
        self._is_lost = True
        # Without this, the interpreter would fail again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())


class LibraryOutput(io.TextIOBase):
    """Logs the lines that libraries print. Ray, for example, prints worker deaths, which the controller reports better."""

    def __init__(self, name: str) -> None:
        self._logger = logging.getLogger(name)

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        for line in text.splitlines():
            if line.strip():
                self._logger.debug("%s", line)
        return len(text)


def add_output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-o", "--format", choices=("text", "json"), default="text", help="(%(default)s)")


def wants_json(options: argparse.Namespace) -> bool:
    return str(options.format) == "json"


def print_found(options: argparse.Namespace, found: object, show: Callable[[], object] = lambda: None) -> None:
    """Prints what a command found: as JSON if the options ask for that, otherwise by `show`."""
    if wants_json(options):
        print_json(found)
    else:
        show()


def print_error(options: argparse.Namespace, error: TandemError) -> None:
    """Says why a command failed. With `-o json` its result is that, too: a script that reads standard output finds one document."""
    print(f"tandem: {error}", file=sys.stderr)
    if getattr(options, "format", "") == "json":
        print_json_line({"error": {"code": error.code, "message": str(error)}})


def print_json_line(value: object, stream: TextIO | None = None) -> None:
    """Prints one JSON document on a line of its own, to standard output unless a stream is given."""
    import msgspec

    stream = stream or sys.stdout
    stream.write(msgspec.json.encode(value).decode() + "\n")
    stream.flush()


def print_json(value: object) -> None:
    from tandem.cluster.saving import as_json

    sys.stdout.write(as_json(value).decode())
    sys.stdout.flush()
