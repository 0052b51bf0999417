"""A node's supervisor: asks it twice a second how it is, and tells the routers whether to use it."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence

import msgspec

from tandem.cluster.describe import ranges
from tandem.cluster.launcher import Host, NodeHandle
from tandem.cluster.pools.supervisor import ProcessPhase, ProcessSupervisor, Surroundings
from tandem.cluster.pools.unseen_node import UnseenNode
from tandem.cluster.tasks import first_of
from tandem.node.config import NodeConfig
from tandem.wire.errors import ConfigurationError, TandemError, Unavailable
from tandem.wire.nodes import NodeInfo, NodeState, Role
from tandem.wire.requests import NodeStatus

logger = logging.getLogger(__name__)

# Every change of the keys is a call to every node, so changes are gathered: so long for each node that there is.
_GATHER_S = 0.001

Admit = Callable[[NodeInfo], Awaitable[None]]
"""Keeps what will be announced, for the next controller. Raises ConfigurationError for a node that must not join."""

KeepLeftOut = Callable[[str, str], Awaitable[None]]
"""Keeps, for the next controller, that this node is left out, and why."""


AdapterPlaces = Mapping[str, str]
"""Where each adapter is, by name: a folder, or owner/name on the hub."""


@dataclasses.dataclass(frozen=True)
class WantedAdapters:
    """`of` a node, by its id; None: its configuration has no room for any. `changing` is held while nodes are told others."""

    of: Callable[[str], AdapterPlaces | None]
    changing: asyncio.Lock = dataclasses.field(default_factory=asyncio.Lock)


class NodeSupervisor(ProcessSupervisor[NodeHandle, NodeInfo]):
    def __init__(
        self,
        config: NodeConfig,
        host: Host,
        slot: Role,
        needs: Mapping[str, float],
        around: Surroundings,
        admit: Admit,
        keep_left_out: KeepLeftOut,
        adapters: WantedAdapters,
        info: NodeInfo | None = None,  # what an earlier controller announced
        seen: asyncio.Event | None = None,  # its machine, which was never seen so far
        beside: Sequence[Host] = (),  # the other machines of its ranks
    ) -> None:
        super().__init__(config.node_id, around)
        self.config = config
        self.host = host
        self.slot = slot
        self._beside = beside
        self._needs = needs  # of its machine, besides that place
        self.info = info
        self._has_worked = info is not None
        self.status: NodeStatus | None = None  # its last answer
        self._vouched = ""  # what was said of its silence
        self._admit = admit
        self._keep_left_out = keep_left_out
        self._adapters = adapters
        self._adapters_told: AdapterPlaces | None = (
            None  # those that it has taken or refused; None: not known
        )
        self._unseen = UnseenNode(info, seen, self._launch_now) if info and seen else None
        self._told = -1  # the revision of the membership whose keys it has
        self._offered = -1  # the last one that it was told, whether or not it answered
        self._role_change = (
            asyncio.Event()
        )  # the process is drained, `config` is for another role than it has

    @property
    def machines(self) -> set[str]:
        """By name."""
        return {host.name for host in (self.host, *self._beside)}

    # --- starting

    def _launch(self) -> NodeHandle:
        self._role_change.clear()  # whatever starts now starts in the role that is wanted
        unseen, self._unseen = self._unseen, None
        return unseen or self._launch_now()

    def _launch_now(self) -> NodeHandle:
        launcher = self._around.launcher
        return launcher.launch_node(self.config, self.host, self.slot, self._needs, self._beside)

    async def _start(self, handle: NodeHandle) -> NodeInfo:
        began = self._clock.now()
        info = await handle.start(self.report)
        # One that was announced before was adopted: what its start took was measured by an earlier controller.
        start_s = self.info.start_s if self.info is not None else round(self._clock.now() - began, 3)
        if info.role is not self.config.role:
            # Adopted from a controller that was killed while it changed the role.
            if not await handle.drain(self._timeouts.nodes.drain_s):
                raise Unavailable(f"it still works as a {info.role.value} node")
            info = await handle.change_role(self.config, self.report)
        info = msgspec.structs.replace(info, start_s=start_s)
        await self._tell_adapters(handle, is_member=info == self.info)
        with contextlib.suppress(TandemError):  # it is told again when it answers
            await self._tell_keys(handle)  # before a router or another node speaks to it
        return await self._announce(info)

    async def _tell_keys(self, handle: NodeHandle) -> None:
        revision = self._offered = self._around.membership.revision
        await handle.admit(self._around.membership.keys)
        self._told = revision

    async def _tell_adapters(self, handle: NodeHandle, *, is_member: bool) -> None:
        """One that routers know already serves on, whatever it says of it."""
        self._adapters_told = None
        wanted = self._adapters.of(self.name)
        if wanted is not None and not is_member:
            await self._set_adapters(handle, wanted, self._timeouts.start_s)

    async def _set_adapters(
        self, handle: NodeHandle, wanted: AdapterPlaces, limit_s: float
    ) -> dict[str, str]:
        """`limit_s` is for the node's step loop to take them, once they are loaded. The caller limits the wait."""
        self._adapters_told = None
        digests = await handle.set_adapters(wanted, limit_s, self.report)
        self._adapters_told = dict(wanted)
        return digests

    async def _mend_adapters(self, handle: NodeHandle) -> None:
        """Tells it what is wanted where that is not known to have reached it: a change was not finished, or it started meanwhile."""
        wanted = self._adapters.of(self.name)
        if wanted is None or wanted == self._adapters_told or self._adapters.changing.locked():
            return
        try:
            # Not as long as it progresses: the node must be asked how it is. What it loads meanwhile it has the next time.
            limit_s = self._timeouts.silence_s
            telling = self._set_adapters(handle, wanted, limit_s)
            await self._clock.within(limit_s, telling, f"telling {self.name} its adapters")
        except ConfigurationError as error:
            self._adapters_told = dict(wanted)
            self._events.trouble(self.name, f"lacks an adapter that others have: {error}")
        except TandemError as error:
            logger.warning("%s: %s", self.name, error)

    async def _announce(self, info: NodeInfo) -> NodeInfo:
        await self._admit(info)
        self.info = info
        await self._around.membership.announce(info)
        return info

    def _describe(self, info: NodeInfo) -> str:
        device = self.config.engine.model.device
        where = "" if device == "auto" else f" on {device}"
        cores = f", cores {ranges(self.config.cores)}" if self.config.cores else ""
        return f"{info.role.value}{where}{cores}"

    async def _left_out(self) -> None:
        await self._keep_left_out(self.name, self.detail)

    async def _lost(self) -> None:
        self.status = None
        if self.info is not None:
            info, self.info = self.info, None
            await self._around.membership.withdraw(info)

    # --- watching

    async def _watch(self, handle: NodeHandle, info: NodeInfo) -> str:
        """A failure that it admits gets it replaced, an engine that is stuck, or a long silence that routers confirm.
        Until then it stays a member: routers hear from it themselves, and notice a silence sooner."""
        timeouts = self._timeouts
        silence = self._new_silence()
        while True:
            if self._role_change.is_set():
                self._role_change.clear()
                try:
                    info = await self._in_its_role(handle, info)
                except TandemError as error:
                    return f"it did not become a {self.config.role.value} node: {error}"
            try:
                status = await self._clock.within(
                    timeouts.silence_s, self._ask(handle), f"{self.name}'s status"
                )
            except TandemError as error:
                if not silence.seconds:
                    self._events.trouble(self.name, f"does not answer: {error}")
                silence.not_answered()
                if silence.seconds >= timeouts.unresponsive_s:
                    reason = await self._as_routers_see_it(info, silence.seconds)
                    if reason is not None:
                        return reason
            else:
                silence.answered()
                self._say_vouched("")
                reason = self._unfit(status.epoch, status.state, status.step_age_s, status.detail, info)
                if reason is not None:
                    return reason
                self.status = status
                await self._mend_adapters(handle)
            await self._beat()

    async def _as_routers_see_it(self, info: NodeInfo, silent_s: float) -> str | None:
        """Why it must be replaced; None while it serves, and while no router can be asked."""
        seen = await self._around.witnesses.of_node(info)
        if seen is None:
            self._say_vouched("does not answer, and no router can be asked about it: it is left as it is")
            return None
        if seen.silent_s >= self._timeouts.unresponsive_s:
            return f"it has not answered for {silent_s:.0f} s, and routers have not heard it for {seen.silent_s:.0f} s"
        self._say_vouched("does not answer, but routers hear it: it is left as it is")
        if seen.state is None:
            return None
        return self._unfit(seen.epoch, seen.state, seen.step_age_s, seen.detail, info)

    def _say_vouched(self, what: str) -> None:
        """Once for each change."""
        if what != self._vouched:
            self._vouched = what
            if what:
                self._events.trouble(self.name, what)

    async def _ask(self, handle: NodeHandle) -> NodeStatus:
        if self._told != self._around.membership.revision:
            await self._tell_keys(handle)
        return await handle.status()

    async def _beat(self) -> None:
        """Until it is time to look after the node, or there is something new to tell it. One that did not answer is told
        again with the next look."""
        membership = self._around.membership
        with contextlib.suppress(TandemError):
            await self._clock.within(
                self._timeouts.heartbeat_s,
                first_of(self._role_change.wait(), membership.newer_than(self._offered)),
                "a heartbeat",
            )
        if not self._role_change.is_set() and self._offered != membership.revision:
            await self._clock.sleep(_GATHER_S * len(membership.members))

    async def _in_its_role(self, handle: NodeHandle, info: NodeInfo) -> NodeInfo:
        if info.role is self.config.role:
            return info
        await self._around.membership.withdraw(info)
        new = await self._while_it_progresses(
            handle.change_role(self.config, self.report), f"changing the role of {self.name}"
        )
        new = msgspec.structs.replace(new, start_s=info.start_s)
        self.status = None
        await self._announce(new)
        self._enter(ProcessPhase.READY, "")
        self._events.ready(self.name, self._describe(new))
        self._settled.set()
        return new

    def _unfit(
        self, epoch: int, state: NodeState, step_age_s: float, detail: str, info: NodeInfo
    ) -> str | None:
        if epoch != info.epoch:
            return "it answers as another incarnation than the one that was started"
        if state is NodeState.FAILED:
            return f"it failed: {detail or 'it does not say why'}"
        if step_age_s > self._timeouts.step_s:
            return f"its engine has been in one step for {step_age_s:.0f} s"
        return None

    # --- what it is told

    async def leave(self, limit_s: float) -> bool:
        """Nothing new comes to it, what runs is finished or, after the limit, moved by the routers. True when all of
        it was finished here. The process is not ended, but when it ends it is not replaced."""
        self._leaving = True
        if self.phase is ProcessPhase.STARTING and self.info is not None:
            await self.settled()  # adopted, and it may have work
        if self.phase not in (ProcessPhase.READY, ProcessPhase.DRAINING):
            return True
        self._enter(ProcessPhase.DRAINING, "it goes")
        finished = await self.drain(limit_s)
        await self._withdraw(self.info)
        return finished

    async def change_role(self, config: NodeConfig, limit_s: float) -> None:
        """Returns when it is ready in the new role; raises Unavailable when it is left out instead. A process that
        does not come to rest in time is replaced by a new one."""
        if self.phase is ProcessPhase.READY:
            draining = self.info  # it may die meanwhile, and be there again as another incarnation
            self._enter(ProcessPhase.DRAINING, f"it becomes a {config.role.value} node")
            if not await self.drain(limit_s):
                await self._withdraw(draining)
                await self.drain(self._timeouts.stop_s)
        if self.phase in (ProcessPhase.LEFT_OUT, ProcessPhase.STOPPED):
            raise Unavailable(f"{self.name} is {self.phase.value}: {self.detail}")
        self._settled.clear()
        self.config = config
        if self.phase in (ProcessPhase.READY, ProcessPhase.DRAINING):
            self._role_change.set()
        await self.settled()
        if self.phase is not ProcessPhase.READY:
            raise Unavailable(f"{self.name} did not start as a {config.role.value} node: {self.detail}")

    async def set_adapters(self, wanted: AdapterPlaces) -> dict[str, str]:
        """The digests of what it serves then. Raises errors of `wire.errors`; what it has is not known then, but after ConfigurationError."""
        if self.handle is None:
            raise Unavailable("it does not run")
        return await self._while_it_progresses(
            self._set_adapters(self.handle, wanted, self._timeouts.start_s),
            f"telling {self.name} its adapters",
        )

    async def reset_cache(self) -> bool:
        """False when it does not answer, or not in time."""
        handle, limit_s = self.handle, self._timeouts.unresponsive_s
        if handle is None:
            return False
        try:
            return await self._clock.within(
                limit_s + self._timeouts.silence_s,
                handle.reset_cache(limit_s),
                f"emptying {self.name}'s cache",
            )
        except TandemError as error:
            logger.warning("%s", error)
            return False

    async def _withdraw(self, info: NodeInfo | None) -> None:
        if info is not None:
            await self._around.membership.withdraw(info)

    async def drain(self, limit_s: float) -> bool:
        handle = self.handle
        if handle is None:
            return True
        try:
            return await self._clock.within(
                limit_s + self._timeouts.stop_s, handle.drain(limit_s), f"draining {self.name}"
            )
        except TandemError as error:
            logger.warning("%s", error)
            return False
