"""Commands that a deployment may never use, in folders of this room and in rooms above it. The core knows each by its row here and never
imports it: where such a folder was deleted, its commands are gone, and the others stay."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, cast

from tandem.base.wings import find_wings

if TYPE_CHECKING:
    from tandem.cluster.commands.parser import Command

ROWS = (
    "tandem.cluster.trace.commands",
    "tandem.cluster.replay.commands",
    "tandem.cluster.bench.commands",
    "tandem.simulator.commands",
    "tandem.cluster.chaos.commands",
)


class Wing(Protocol):
    """What such a module has. It is imported whenever `tandem` starts, so its own imports happen when a command runs."""

    @property
    def COMMANDS(self) -> Sequence[Command]: ...


def commands_of_wings() -> list[Command]:
    return [command for module in find_wings(ROWS) for command in cast("Wing", module).COMMANDS]
