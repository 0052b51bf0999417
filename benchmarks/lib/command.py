"""How a benchmark's command is read, how it ends, and where its figures go."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from tandem.base.errors import TandemError

if TYPE_CHECKING:
    from rich.console import Console, RenderableType


def parser_of(doc: str | None, *, out: str = "", json: bool = True) -> argparse.ArgumentParser:
    """Returns a parser whose help is the benchmark's docstring. `out` is the usual folder of a benchmark that writes several files."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    if out:
        parser.add_argument(
            "--out", type=Path, default=Path(out), metavar="FOLDER", help="for what is found (%(default)s)"
        )
    elif json:
        parser.add_argument("--json", type=Path, metavar="FILE", help="a file for the figures")
    return parser


def write_figures(figures: object, file: Path | None) -> None:
    if file is not None:
        file.write_bytes(msgspec.json.format(msgspec.json.encode(figures), indent=2) + b"\n")


def write_text(shown: Callable[[Console], None], file: Path, width: int) -> None:
    """Writes what `shown` prints, and prints it."""
    from rich.console import Console

    shown(Console(width=width))
    with file.open("w", encoding="utf-8") as text:
        shown(Console(file=text, width=width))


def show(*shown: RenderableType, width: int = 120) -> None:
    from rich.console import Console

    console = Console(width=width)
    for one in shown:
        console.print(one, highlight=False)


def exit_status(run: Callable[[], int], console: Console) -> int:
    """Returns the status of a benchmark that ends by itself, with a mistake that is reported in one line, or interrupted."""
    try:
        return run()
    except TandemError as error:
        console.print(str(error), style="red", markup=False)
        return 1
    except KeyboardInterrupt:
        return 130


def command_line(name: str) -> str:
    """Returns the command that makes these figures again."""
    return shlex.join(["python", "-m", f"benchmarks.{name}", *sys.argv[1:]])


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
