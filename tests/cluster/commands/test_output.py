from __future__ import annotations

import io
import os
from typing import TextIO, cast

from rich.console import Console

from tandem.cluster.commands.output import UnfailingOutput


def test_who_stops_reading_does_not_end_who_prints() -> None:
    reading, writing = os.pipe()
    stream = os.fdopen(writing, "w")
    console = Console(file=cast("TextIO", UnfailingOutput(stream)))
    console.print("one")
    assert os.read(reading, 100) == b"one\n"
    os.close(reading)
    console.print("two")
    console.print("three")
    stream.close()  # which would fail, too, if it still led into the pipe


def test_a_full_disk_does_not_either() -> None:
    with open("/dev/full", "w") as stream:
        console = Console(file=cast("TextIO", UnfailingOutput(stream)))
        console.print("x\n" * io.DEFAULT_BUFFER_SIZE)
        console.print("more")


def test_what_is_read_is_what_was_said() -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    output = UnfailingOutput(stream)
    output.write("grün\n")
    output.flush()
    assert stream.buffer.getvalue() == "grün\n".encode()
    assert (output.encoding, output.isatty()) == ("utf-8", False)
