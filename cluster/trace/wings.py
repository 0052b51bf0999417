"""What `tandem why` can tell more, where a room above knows how: found by its row here, as commands are by `cluster/wings.py`."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, cast

from tandem.base.wings import find_wings

if TYPE_CHECKING:
    from tandem.cluster.trace.why import Explanation
    from tandem.router.page_state import PageState

ROWS = ("tandem.simulator.commands",)


class ExplainingWing(Protocol):
    """What such a module has. It is imported with the commands of this folder."""

    def describe_why(self, parser: argparse.ArgumentParser) -> None:
        """Adds what it can tell about one request to the options of `tandem why`."""

    def explain_more(
        self, options: argparse.Namespace, why: Explanation, state: Callable[[], PageState]
    ) -> Explanation:
        """Returns the explanation with what those options ask for."""


def wings() -> list[ExplainingWing]:
    return [cast("ExplainingWing", module) for module in find_wings(ROWS)]
