"""The machines that nodes can run on, as the controller sees them. Ray's cluster is one answer, this machine another."""

from __future__ import annotations

from typing import Protocol

import msgspec

from tandem.wire.nodes import Role


class Host(msgspec.Struct, frozen=True):
    """One machine. Its name is new whenever the machine (or its Ray) has been started anew."""

    name: str  # what a launcher finds it by
    address: str  # where routers and other nodes reach what runs there
    cores: tuple[int, ...] = ()  # those that nodes may compute on, no more than its quota; empty: unknown
    gpus: int = 0
    # How many nodes of each role it offers room for; a role that is missing: none. None: as many as anyone asks for.
    slots: dict[Role, int] | None = None
    head: bool = False  # where the controller's router runs


class Hosts(Protocol):
    async def present(self) -> list[Host]:
        """The machines that are there now, in an order that does not change while they stay."""
        ...

    async def changed(self, timeout_s: float) -> None:
        """Returns when machines may have come or gone, or after this long."""
        ...

    async def want(self, slots: dict[Role, int]) -> None:
        """How much room is needed in all, so that whoever can add and remove machines does. Replaces what was said
        before; there is one owner of it: the controller, which says it again and again. Nothing happens where nobody
        can."""
        ...


class StateStore(Protocol):
    """Where the controller keeps what it must know after it was killed. Outlives its process."""

    async def load(self) -> bytes | None: ...

    async def save(self, state: bytes) -> None: ...
