"""Commands of rooms that stand on this one. This room knows each by its row here and never imports it: where such a room
was taken away, its commands are gone, and the others stay."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, cast

from tandem.base.wings import find_wings

if TYPE_CHECKING:
    from tandem.cluster.trace.why import Explanation
    from tandem.router.page_state import PageState

ROWS = ("tandem.simulator.commands",)


class Wing(Protocol):
    """What such a module has. It is imported whenever `tandem` starts, so its own imports happen when a command runs."""

    def add_commands(self, commands: Any) -> None: ...

    def describe_why(self, parser: argparse.ArgumentParser) -> None:
        """Adds what it can tell about one request to the options of `tandem why`."""
        ...

    def explain_more(
        self, options: argparse.Namespace, why: Explanation, state: Callable[[], PageState]
    ) -> Explanation:
        """Returns the explanation with what those options ask for."""
        ...


def wings() -> list[Wing]:
    return [cast("Wing", module) for module in find_wings(ROWS)]
