"""The form of every benchmark: flags, one report of figures, floors and tables, and how the command ends."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from benchmarks.lib.tables import Floor, floors_table, missed
from tandem.base.errors import TandemError
from tandem.cluster.saving import results_folder, write_json
from tandem.loadgen.report import MachineDescription

if TYPE_CHECKING:
    from rich.console import RenderableType


class BenchmarkReport(msgspec.Struct, frozen=True):
    """What a benchmark writes: its figures, and what makes them again."""

    made_at: str
    machine: MachineDescription
    command: str
    figures: Any
    floors: list[Floor] = []


def parser_of(doc: str | None, *, out: str = "") -> argparse.ArgumentParser:
    """Returns a parser whose help is the benchmark's docstring. `out` is the usual folder of a benchmark that keeps its servers' output."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="a file for the figures")
    if out:
        parser.set_defaults(name=Path(out).name)
        parser.add_argument(
            "--out", type=Path, default=Path(out), metavar="FOLDER", help="for what is found (%(default)s)"
        )
    return parser


def report(
    options: argparse.Namespace,
    figures: object,
    *shown: RenderableType,
    floors: Iterable[Floor] = (),
    failed: bool = False,
    width: int = 120,
) -> int:
    """Writes the figures, shows what is `shown` and the floors, and returns the command's status: 1 if it failed or a floor is missed.
    A benchmark with a folder has both there, under its own name."""
    from rich.console import Console

    floors = list(floors)
    written, texts = options.json, [sys.stdout]
    if folder := getattr(options, "out", None):
        file = results_folder(folder) / options.name
        written = written or file.with_suffix(".json")
        texts.append(file.with_suffix(".txt").open("w", encoding="utf-8"))
    if written is not None:
        write_json(report_of(figures, floors), written)
    for text in texts:
        console = Console(file=text, width=width)
        for one in (*shown, floors_table(floors)) if floors else shown:
            console.print(one, highlight=False, markup=False)
    for text in texts[1:]:
        text.close()
    return int(failed or missed(floors))


def report_of(figures: object, floors: list[Floor]) -> BenchmarkReport:
    command = shlex.join(["python", "-m", f"benchmarks.{Path(sys.argv[0]).stem}", *sys.argv[1:]])
    made_at = datetime.now(UTC).isoformat(timespec="seconds")
    return BenchmarkReport(made_at, MachineDescription.here(), command, figures, floors)


def run(main: Callable[[], int]) -> None:
    """Ends the process with the benchmark's status. A mistake is reported in one line."""
    try:
        status = main()
    except TandemError as error:
        say(str(error))
        status = 1
    except KeyboardInterrupt:
        status = 130
    sys.exit(status)


def say(what: str) -> None:
    """Says what is being done; it is no result."""
    print(what, file=sys.stderr, flush=True)
