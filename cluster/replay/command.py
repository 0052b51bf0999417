"""`tandem replay TRACE`: steps through a scheduler trace, or prints the steps that were asked for."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
from rich.console import Console

from tandem.base.errors import ConfigurationError
from tandem.cluster.commands.output import add_output, wants_json
from tandem.cluster.replay.reading import TracedStep, TraceReader
from tandem.cluster.replay.text import one_line, show_step

_HELP = "Enter: next   b: back   p: next preemption   r ID: next step with it   N: step N   q: end"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("trace", type=Path, metavar="TRACE", help="a node's file, or a folder with one node's")
    parser.add_argument("--step", type=int, metavar="N", help="this step, whole")
    parser.add_argument("--request", metavar="ID", help="only steps that this request had a part in")
    parser.add_argument("--preemptions", action="store_true", help="only steps that took blocks from requests")
    add_output(parser)


def run(
    options: argparse.Namespace,
    console: Console | None = None,
    ask: Callable[[str], str] = input,
    *,
    interactive: bool | None = None,
) -> int:
    console = console or Console()
    reader = TraceReader(options.trace)
    if not len(reader):
        raise ConfigurationError(f"{options.trace} has no whole step yet")
    if options.step is not None:
        places = [reader.place_of(options.step)]
    else:
        places = [place for place in range(len(reader)) if _is_wanted(reader[place], options)]
    if wants_json(options):
        for place in places:
            _print_json(reader[place])
        return 0
    by_hand = sys.stdin.isatty() and sys.stdout.isatty() if interactive is None else interactive
    chosen = options.step is not None or options.request is not None or options.preemptions
    if by_hand and not chosen:
        return _step_through(reader, console, ask)
    whole = options.step is not None
    for place in places:
        if whole:
            show_step(console, reader[place], place, len(reader))
        else:
            console.print(one_line(reader[place]), highlight=False, soft_wrap=True)
    if not places:
        console.print("No step matches.", highlight=False)
    return 0


def _is_wanted(step: TracedStep, options: argparse.Namespace) -> bool:
    if options.request is not None and not step.names(options.request):
        return False
    return not options.preemptions or bool(step.decision.preempted)


def _print_json(step: TracedStep) -> None:
    """Prints one line per step."""
    records = [step.snapshot, *step.prefixes, step.decision]
    sys.stdout.write(msgspec.json.encode(records).decode() + "\n")


def _step_through(reader: TraceReader, console: Console, ask: Callable[[str], str]) -> int:
    place = 0
    while True:
        show_step(console, reader[place], place, len(reader))
        console.print(f"[dim]{_HELP}[/]", highlight=False)
        try:
            words = ask("> ").split()
        except (EOFError, KeyboardInterrupt):
            return 0
        if words[:1] == ["q"]:
            return 0
        found = _next_place(reader, place, words)
        if isinstance(found, str):
            console.print(f"[yellow]![/] {found}", highlight=False)
        else:
            place = found


def _next_place(reader: TraceReader, place: int, words: list[str]) -> int | str:
    """Returns the next place to show, or why there is none."""
    match words:
        case [] | ["n"]:
            return place + 1 if place + 1 < len(reader) else "this is the last step"
        case ["b"]:
            return place - 1 if place else "this is the first step"
        case ["p"]:
            found = reader.find(lambda step: bool(step.decision.preempted), place)
            return found if found is not None else "no request is preempted after this step"
        case ["r", request_id]:
            found = reader.find(lambda step: step.names(request_id), place)
            return found if found is not None else f"{request_id} has no part in any step after this one"
        case [number] if number.isdigit():
            try:
                return reader.place_of(int(number))
            except ConfigurationError as error:
                return str(error)
    return f"that is not a command: {_HELP}"
