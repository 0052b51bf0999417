"""`tandem trace [REQUEST_ID]`."""

from __future__ import annotations

import sys
from pathlib import Path

from rich.console import Console

from cluster.bench.report import as_json, write_json
from cluster.trace.fetch import TraceClient
from cluster.trace.picture import draw_trace, save_picture
from cluster.trace.text import show_list, show_trace


def run(
    client: TraceClient, console: Console, name: str | None, picture: Path | None, json: Path | None
) -> int:
    if name is None:
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
