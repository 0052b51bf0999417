"""How a benchmark's command ends: with its own status, with a mistake reported in one line, or as interrupted."""

from __future__ import annotations

from collections.abc import Callable

from rich.console import Console

from tandem.base.errors import TandemError


def exit_status(run: Callable[[], int], console: Console) -> int:
    try:
        return run()
    except TandemError as error:
        console.print(str(error), style="red", markup=False)
        return 1
    except KeyboardInterrupt:
        return 130
