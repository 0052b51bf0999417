"""`tandem trace [REQUEST_ID]`."""

from __future__ import annotations

import sys
from pathlib import Path

from rich.console import Console

from tandem.cluster.saving import as_json, check_picture, save_picture, write_json
from tandem.cluster.trace.fetch import TraceClient
from tandem.cluster.trace.picture import draw_trace
from tandem.cluster.trace.text import show_list, show_trace
from tandem.wire.errors import ConfigurationError


def run(
    client: TraceClient, console: Console, name: str | None, picture: Path | None, json: Path | None
) -> int:
    if picture is not None:
        check_picture(picture, "--picture")
    if name is None:
        if picture is not None or json is not None:
            raise ConfigurationError(
                "--picture and --json are of one request: name it, as `tandem trace` lists it"
            )
        show_list(console, client.recent())
        return 0
    record = client.find(name)
    if json == Path("-"):
        sys.stdout.buffer.write(as_json(record))
    else:
        show_trace(console, record)
        if json is not None:
            write_json(record, json)
    if picture is not None:
        save_picture(draw_trace(record), picture)
    return 0
