"""`tandem batch`: has a file of requests answered, and writes the answers."""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from tandem.base.errors import ConfigurationError
from tandem.base.flags import adder
from tandem.cluster.api_client import ApiClient, key_from_environment
from tandem.cluster.batches.job import (
    BatchClient,
    Counts,
    JobNote,
    ServersJob,
    digest_of,
    endpoint_of,
    note_beside,
    read_note,
    write_note,
)
from tandem.cluster.commands.options import add_server
from tandem.cluster.commands.output import add_output, print_json, wants_json
from tandem.cluster.commands.router_url import choose_url
from tandem.cluster.offline.own_server import OwnServer
from tandem.cluster.saving import check_file

_INTERRUPTED = 130


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = adder(parser)
    add("input", "IN.jsonl", Path, "a request per line, as in OpenAI's batches")
    add("output", "OUT.jsonl", Path, "the answers; OUT.errors.jsonl gets what failed")
    add_server(parser)
    add("--model", "MODEL", str, "start a server of this model on this machine, and end it afterwards")
    add("--window", None, "24h", "requests that are not answered within this time fail (%(default)s)")
    add_output(parser)


def run(args: argparse.Namespace) -> int:
    """Returns 0 when every request was answered, 1 when some failed, 130 when it was interrupted: the server goes on, and the
    next call with the same files follows it."""
    if not args.input.is_file():
        raise ConfigurationError(f"{args.input} is no file")
    if not args.output.resolve().parent.is_dir():
        raise ConfigurationError(f"{args.output}: there is no folder {args.output.resolve().parent}")
    if args.output.resolve() == args.input.resolve():
        raise ConfigurationError(f"{args.output} is the file of the requests: name another file for the answers")
    check_file(args.output)
    if args.model and args.url:
        raise ConfigurationError("--model starts a server, and --url names one: leave one of them out")
    digest, endpoint = digest_of(args.input), endpoint_of(args.input)
    console = Console(stderr=True)
    try:
        with _server(args, console) as url, contextlib.closing(ApiClient(url, _key(), timeout=30.0)) as api:
            return _answered(BatchClient(api), args, digest, endpoint, console)
    except KeyboardInterrupt:
        goes_on = "the next call starts a server that goes on" if args.model else "the server goes on"
        console.print(f"interrupted: {goes_on}; call again with the same files to get the answers")
        return _INTERRUPTED


def _key() -> str | None:
    return key_from_environment() or os.environ.get("OPENAI_API_KEY")


@contextlib.contextmanager
def _server(args: argparse.Namespace, console: Console) -> Iterator[str]:
    if not args.model:
        yield choose_url(args.url)
        return
    with console.status(f"starting a server of {args.model}"):
        server = OwnServer(args.model)
    try:
        yield server.url
    finally:
        server.close()


def _answered(client: BatchClient, args: argparse.Namespace, digest: str, endpoint: str, console: Console) -> int:
    note = read_note(args.output)
    found = client.look(note.batch_id) if note is not None and note.input_digest == digest else None
    if note is not None and found is not None and found.status not in ("failed", "cancelled"):
        console.print(f"going on with {note.batch_id}", highlight=False)
    else:
        note = JobNote(client.begin(args.input, endpoint, args.window), digest)
        try:
            write_note(args.output, note)
        except BaseException:  # the next call would not find the job
            client.cancel(note.batch_id)
            raise
    with _progress(console) as progress:
        task = progress.add_task("validating", total=None)

        def show(status: str, counts: Counts, end: float | None) -> None:
            done = counts.completed + counts.failed
            until = f", until about {datetime.fromtimestamp(end):%H:%M}" if end is not None else ""
            progress.update(task, description=f"{status}{until}", completed=done, total=counts.total or None)

        batch = client.follow(note.batch_id, show)
    return _fetched(client, args, batch)


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), console=console, transient=True
    )


def _fetched(client: BatchClient, args: argparse.Namespace, batch: ServersJob) -> int:
    if batch.status == "failed":
        note_beside(args.output).unlink(missing_ok=True)
        client.forget(batch)
        mistakes = batch.errors.data if batch.errors is not None else []
        raise ConfigurationError("\n".join([f"{args.input} is no batch:", *map(str, mistakes)]))
    client.fetch(batch.output_file_id, args.output)
    errors = args.output.with_name(f"{args.output.stem}.errors{args.output.suffix}")
    if batch.error_file_id:
        client.fetch(batch.error_file_id, errors)
    else:
        errors.unlink(missing_ok=True)
    client.forget(batch)
    note_beside(args.output).unlink(missing_ok=True)
    counts = batch.request_counts
    written = [str(args.output), *([str(errors)] if batch.error_file_id else [])]
    if wants_json(args):
        print_json({"status": batch.status, **msgspec.structs.asdict(counts), "files": written})
    else:
        print(f"{batch.status}: {counts.completed} of {counts.total} requests answered; {', '.join(written)}")
    return 0 if counts.completed == counts.total else 1
