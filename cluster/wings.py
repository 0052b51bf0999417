"""Commands and flags that a deployment may never use, in folders of this room and in rooms above it. The core knows each by its row here
and never imports it: where such a folder was deleted, what it has is gone, and the rest stays."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, cast

from tandem.base.wings import find_wing, find_wings

if TYPE_CHECKING:
    from pathlib import Path

    from tandem.cluster.commands.parser import Command
    from tandem.cluster.config import TandemConfig
    from tandem.wire.forecasts import Forecast
    from tandem.wire.nodes import Role

ROWS = (
    "tandem.cluster.chat",
    "tandem.cluster.doctor",
    "tandem.cluster.trace.commands",
    "tandem.cluster.replay",
    "tandem.cluster.adapters",
    "tandem.cluster.bench",
    "tandem.cluster.batches",
    "tandem.simulator.commands",
    "tandem.cluster.chaos",
    "tandem.cluster.verify",
    "tandem.cluster.picker",
)
FLAGS = ("tandem.cluster.foreign_flags.flags",)
JUDGE = "tandem.cluster.verify.judge"
FORESIGHT = "tandem.simulator.before_change"


class Wing(Protocol):
    """What such a module has. It is imported whenever `tandem` starts, so its own imports happen when a command runs."""

    @property
    def COMMANDS(self) -> Sequence[Command]: ...


def commands_of_wings() -> list[Command]:
    return [command for module in find_wings(ROWS) for command in cast("Wing", module).COMMANDS]


class RolloutJudge(Protocol):
    """Knows what requests were answered before a rollout, and asks them again. Its methods wait for answers."""

    def learn(self) -> int:
        """Asks all requests, and keeps the answers. Returns how many there are. Raises a TandemError."""

    def ask_next(self) -> str:
        """Asks one of them again, and has some of the clients' own requests asked again of new nodes. Returns where an answer has other
        bits than before; "" if none has, or none came."""

    @property
    def compared(self) -> str:
        """How many of the clients' own requests were compared meanwhile."""

    def ask_all(self) -> str:
        """Asks all of them again. Raises a TandemError if one is not answered."""

    def close(self) -> None: ...


class JudgeWing(Protocol):
    def judge(self, url: str, file: Path | None) -> RolloutJudge:
        """`url`: of a router. `file`: has the requests; None: a built-in set."""


def rollout_judge(url: str, file: Path | None) -> RolloutJudge:
    # Its own imports take a while, and every command imports this file.
    from tandem.base.errors import ConfigurationError

    if module := find_wing(JUDGE):
        return cast("JudgeWing", module).judge(url, file)
    raise ConfigurationError("--verify needs cluster/verify/, which this installation does not have: leave it out")


class ForesightWing(Protocol):
    def foretell(
        self, told: Sequence[bytes], there: Mapping[Role, int], wanted: Mapping[Role, int], config: TandemConfig
    ) -> Forecast:
        """Says what these sizes would bring. `told`: what each router recalls; `there`: the sizes now. Takes seconds. Raises a TandemError
        with the reason if it cannot be said."""


def foresight() -> ForesightWing | None:
    return cast("ForesightWing | None", find_wing(FORESIGHT))


class ForeignFlags(Protocol):
    """The flags of other servers. `--help` imports such a module."""

    def add_flags(self, parser: argparse.ArgumentParser, besides: Collection[str]) -> None:
        """Adds every flag that is not among these. They collect in `foreign`."""

    def read_flags(self, given: list[Any]) -> tuple[list[tuple[str, str | None, str]], list[str]]:
        """Returns the assignments, as (setting, text, origin), and a sentence for each flag that is refused."""

    def translated(self, name: str, value: str) -> list[tuple[str, str]]:
        """Returns the settings and texts that one of our own flags means in the other server's words; [] if it has none for it."""

    def table(self) -> Iterator[str]:
        """Yields the table of the page about coming from that server."""


def foreign_flags() -> list[ForeignFlags]:
    return [cast("ForeignFlags", module) for module in find_wings(FLAGS)]
