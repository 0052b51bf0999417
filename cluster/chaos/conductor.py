"""Carries out a plan. The next blow comes only when the cluster is whole again after the one before."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

import msgspec

from tandem.base.errors import DeadlineExceeded, TandemError
from tandem.cluster.chaos.plan import Blow, ProcessKind, Strike, processes_of
from tandem.cluster.control import ClusterView
from tandem.wire.nodes import NodeState

WHOLE_WITHIN_S = 180.0
QUIET_WITHIN_S = 60.0
_LOOK_EVERY_S = 0.5
_MOST_LEFT = 8


class Victim(Protocol):
    """A process, as told from the one that takes its place."""

    @property
    def pid(self) -> int: ...
    @property
    def started(self) -> int: ...


V = TypeVar("V", bound=Victim)


class ProcessAccess(Protocol[V]):
    """How the conductor reaches the cluster's processes."""

    async def view(self) -> ClusterView: ...

    async def find(self, name: str) -> V: ...

    async def send(self, victim: V, number: signal.Signals, wake_after_s: float | None) -> None: ...


class BlowReport(msgspec.Struct, frozen=True):
    at_s: float
    blow: Blow
    kind: ProcessKind
    name: str
    machine: str
    stop_s: float
    whole_after_s: float | None  # None: not within WHOLE_WITHIN_S
    # Of any answer before the cluster was whole; None for a cluster's own traffic, which is not timed
    longest_gap_s: float | None = None
    detail: str = ""


class Conductor(Generic[V]):
    def __init__(
        self, access: ProcessAccess[V], say: Callable[[str], None], look_every_s: float = _LOOK_EVERY_S
    ) -> None:
        self._access = access
        self._say = say
        self._look_every_s = look_every_s
        self.struck: list[BlowReport] = []
        self.began = 0.0  # when the plan began, on this process's monotonic clock
        self.failure = ""  # why a blow could not be dealt; "" if all were

    async def run(self, plan: Sequence[Strike]) -> None:
        """Ends early if the cluster does not become whole or a blow cannot be dealt, because further blows would prove nothing."""
        self.began = began = time.monotonic()
        for strike in plan:
            await asyncio.sleep(max(0.0, began + strike.at_s - time.monotonic()))
            try:
                struck = await self._strike(strike, began)
            except TandemError as error:
                self.failure = f"the {strike.blow.value} after {strike.at_s:.0f} s could not be dealt: {error}"
                self._say(f"{self.failure}; no more blows")
                return
            self.struck.append(struck)
            if struck.whole_after_s is None:
                self._say(f"{struck.name}: {struck.detail}; no more blows")
                return
            self._say(f"{struck.name}: whole again after {struck.whole_after_s:.1f} s")

    async def _strike(self, strike: Strike, began: float) -> BlowReport:
        view = await self._access.view()
        name = strike.choose(processes_of(view)[strike.kind])
        victim = await self._access.find(name)
        kill = strike.blow is Blow.KILL
        self._say(f"{name}: killed" if kill else f"{name}: stopped for {strike.stop_s:g} s")
        hit_at = time.monotonic()
        number = signal.SIGKILL if kill else signal.SIGSTOP
        await self._access.send(victim, number, None if kill else strike.stop_s)
        stop_s = 0.0 if kill else strike.stop_s
        struck = BlowReport(hit_at - began, strike.blow, strike.kind, name, machine_of(view, name), stop_s, None)
        if not kill:
            await asyncio.sleep(strike.stop_s)
        try:
            await self._until_whole(view, victim if kill else None, name, hit_at + strike.stop_s + WHOLE_WITHIN_S)
        except TandemError as error:
            return msgspec.structs.replace(struck, detail=str(error))
        return msgspec.structs.replace(struck, whole_after_s=time.monotonic() - hit_at)

    async def _until_whole(self, before: ClusterView, gone: V | None, name: str, deadline: float) -> None:
        async def is_whole() -> bool:
            if gone is not None:
                now = await self._access.find(name)
                if (now.pid, now.started) == (gone.pid, gone.started):
                    return False
            return missing_in(await self._access.view(), before) == ""

        why = "the controller never showed it whole"
        while time.monotonic() < deadline:
            try:
                if await is_whole():
                    return
                why = missing_in(await self._access.view(), before) or why
            except TandemError as error:  # the controller may be the victim
                why = str(error)
            await asyncio.sleep(self._look_every_s)
        raise DeadlineExceeded(f"not whole again within {WHOLE_WITHIN_S:.0f} s: {why}")

    async def until_quiet(self, within_s: float = QUIET_WITHIN_S) -> tuple[float | None, list[str]]:
        """Call this after the traffic has ended. Returns how long it took until every block was free; else None and what was left where."""
        began = time.monotonic()
        left: list[str] = []
        while time.monotonic() - began < within_s:
            try:
                left = left_behind(await self._access.view())
                if not left:
                    return time.monotonic() - began, []
            except TandemError as error:
                left = [str(error)]
            await asyncio.sleep(self._look_every_s)
        return None, left[:_MOST_LEFT]


def missing_in(view: ClusterView, before: ClusterView) -> str:
    """Returns which processes the cluster had before and lacks now; "" if none."""
    there, wanted = processes_of(view), processes_of(before)
    missing = [
        f"{len(wanted[kind]) - len(there.get(kind, []))} {kind.value}"
        for kind in wanted
        if len(there.get(kind, [])) < len(wanted[kind])
    ]
    return f"missing: {', '.join(missing)}" if missing else ""


def machine_of(view: ClusterView, name: str) -> str:
    return next((node.host for node in view.nodes if node.node_id == name), "")


def left_behind(view: ClusterView) -> list[str]:
    """Returns, for each idle node that still holds something, what it holds."""
    found = []
    for node in view.nodes:
        status = node.status
        if status is None or status.state is not NodeState.READY:
            found.append(f"{node.node_id} did not report what it holds")
            continue
        left = {name: getattr(status, name) for name in ("running", "waiting", "transfers", "held_blocks")}
        left["blocks not free"] = status.total_blocks - status.room_blocks
        left |= {name: getattr(status, name) for name in status.__struct_fields__ if "quarantine" in name}
        if any(left.values()):
            counts = ", ".join(f"{name.replace('_', ' ')} {count}" for name, count in left.items() if count)
            found.append(f"{node.node_id}: {counts}")
    return found
