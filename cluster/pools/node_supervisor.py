"""A node's supervisor: asks for the node's status twice a second, and announces the node to routers or withdraws it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping, Sequence

import msgspec

from tandem.base.errors import ConfigurationError, TandemError, Unavailable
from tandem.cluster.describe import ranges
from tandem.cluster.launcher import Host, LogSource, NodeHandle
from tandem.cluster.pools.supervisor import AdapterPlaces, ProcessPhase, ProcessSupervisor, SupervisorContext
from tandem.cluster.pools.unseen_node import UnseenNode
from tandem.cluster.tasks import first_of
from tandem.node.config import NodeConfig
from tandem.wire.nodes import NodeInfo, NodeState, Role
from tandem.wire.requests import NodeStatus, SickDevice

logger = logging.getLogger(__name__)

# A change of keys is a call to every node, so changes are collected first: for this long per node of the cluster.
_GATHER_S = 0.001


class NodeSupervisor(ProcessSupervisor[NodeHandle, NodeInfo]):
    def __init__(
        self,
        config: NodeConfig,
        host: Host,
        slot: Role,
        needs: Mapping[str, float],
        context: SupervisorContext,
        info: NodeInfo | None = None,  # as an earlier controller announced it
        seen: asyncio.Event | None = None,  # set when its machine is seen; None: it has been
        beside: Sequence[Host] = (),  # the other machines of its ranks
    ) -> None:
        super().__init__(config.node_id, context, info)
        self.config = config
        self.host = host
        self.slot = slot
        self._beside = beside
        self._needs = needs  # what it takes of its machine besides the place
        self._has_worked = info is not None
        self.status: NodeStatus | None = None  # the last one that it reported
        self.sick: tuple[SickDevice, ...] = ()  # its devices that must not compute any more, as it once reported
        self._vouched = ""  # the last report about its silence, so that each is made once
        # The set that it last took or refused; None: unknown
        self._adapters_told: AdapterPlaces | None = None
        self._unseen = UnseenNode(info, seen, self._launch_now, context.launcher.end) if info and seen else None
        self._told = -1  # the membership revision whose keys it has confirmed
        self._offered = -1  # the membership revision that was last sent to it, confirmed or not
        self.changes_role = False  # it is withdrawn for that, so no router hears it
        # Set when the process is drained and `config` has another role than the node
        self._role_change = asyncio.Event()

    def log_sources(self) -> dict[str, LogSource]:
        return super().log_sources() | (dict(self.handle.keepers) if self.handle is not None else {})

    @property
    def served_s(self) -> float | None:
        return self._served_s(self.ready_since)

    @property
    def machines(self) -> set[str]:
        """The names of its machines."""
        return {host.name for host in (self.host, *self._beside)}

    # --- starting

    def _launch(self) -> NodeHandle:
        self._role_change.clear()  # a process that starts now starts with the wanted role
        unseen, self._unseen = self._unseen, None
        return unseen or self._launch_now()

    def _launch_now(self) -> NodeHandle:
        launcher, confirm = self._context.launcher, self._context.recorder.confirm
        return launcher.launch_node(self.config, self.host, self.slot, self._needs, confirm, self._beside)

    async def _start(self, handle: NodeHandle) -> NodeInfo:
        began = self._clock.now()
        info = await handle.start(self.report)
        # If an earlier controller announced it, it was adopted, and that controller measured how long its start took.
        start_s = self.info.start_s if self.info is not None else round(self._clock.now() - began, 3)
        if info.role is not self.config.role:
            # Adopted from a controller that died while it changed the role.
            if not await handle.drain(self._timeouts.nodes.drain_s):
                raise Unavailable(f"it is still busy as a {info.role.value} node")
            info = await handle.change_role(self.config, self.report)
        info = msgspec.structs.replace(info, start_s=start_s)
        await self._tell_adapters(handle, is_member=info == self.info)
        with contextlib.suppress(TandemError):  # the keys are sent again with the next status
            await self._tell_keys(handle)  # before any router or other node connects to it
        return await self._announce(info)

    async def _tell_keys(self, handle: NodeHandle) -> None:
        revision = self._offered = self._context.membership.revision
        await handle.admit(self._context.membership.keys)
        self._told = revision

    async def _tell_adapters(self, handle: NodeHandle, *, is_member: bool) -> None:
        """Sends the adapters before the node is announced. A node that routers already use keeps serving without that."""
        self._adapters_told = None
        wanted = self._context.recorder.adapters_of(self.name)
        if wanted is not None and not is_member:
            await self._set_adapters(handle, wanted, self._timeouts.start_s)

    async def _set_adapters(self, handle: NodeHandle, wanted: AdapterPlaces, limit_s: float) -> dict[str, str]:
        """`limit_s` is how long the node's step loop may take after the adapters have been loaded. The caller limits the whole call."""
        self._adapters_told = None
        digests = await handle.set_adapters(wanted, limit_s, self.report)
        self._adapters_told = dict(wanted)
        return digests

    async def _mend_adapters(self, handle: NodeHandle) -> None:
        """Sends the wanted adapters again if the node may not have them: a change was interrupted, or the node started during one."""
        wanted = self._context.recorder.adapters_of(self.name)
        if wanted is None or wanted == self._adapters_told or self._context.recorder.changing_adapters.locked():
            return
        try:
            # With a limit, because the node's status must be asked for, too. What it loads in that time it keeps for the next try.
            limit_s = self._timeouts.silence_s
            telling = self._set_adapters(handle, wanted, limit_s)
            await self._clock.within(limit_s, telling, f"telling {self.name} its adapters")
        except ConfigurationError as error:
            self._adapters_told = dict(wanted)
            self._events.trouble(self.name, f"lacks an adapter that others have: {error}")
        except TandemError as error:
            logger.warning("%s: %s", self.name, error)

    async def _announce(self, info: NodeInfo) -> NodeInfo:
        self._context.recorder.check(info)
        self.info = info
        await self._context.recorder.record(f"{self.name} serves")
        await self._context.membership.announce(info)
        return info

    def _describe(self, info: NodeInfo) -> str:
        device = self.config.engine.model.device
        where = "" if device == "auto" else f" on {device}"
        cores = f", cores {ranges(self.config.cores)}" if self.config.cores else ""
        return f"{info.role.value}{where}{cores}"

    async def _left_out(self) -> None:
        await self._context.recorder.record(f"{self.name} is left out")

    async def _lost(self) -> None:
        self.status = None
        if self.info is not None:
            info, self.info = self.info, None
            await self._context.membership.withdraw(info)

    # --- watching

    async def _watch(self, handle: NodeHandle, info: NodeInfo) -> str:
        """Returns why the node must be replaced: it reports a failure, its engine is stuck in a step, or it has been silent for long and
        routers confirm that. Until then it stays a member: routers notice a silence themselves, and sooner."""
        timeouts = self._timeouts
        silence = self._new_silence()
        while True:
            if self._role_change.is_set():
                self._role_change.clear()
                try:
                    info = await self._in_its_role(handle, info)
                except TandemError as error:
                    return f"its role could not be changed to {self.config.role.value}: {error}"
            try:
                status = await self._clock.within(timeouts.silence_s, self._ask(handle), f"{self.name}'s status")
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
                self.answered_at = self._clock.now()
                self._say_vouched("")
                self.sick = status.sick or self.sick
                reason = self._unfit(status.epoch, status.state, status.step_age_s, status.detail, info)
                if reason is not None:
                    return reason
                self.status = status
                await self._mend_adapters(handle)
            await self._beat()

    async def _as_routers_see_it(self, info: NodeInfo, silent_s: float) -> str | None:
        """Returns why the node must be replaced; None if routers hear it, or if no router can be asked."""
        seen = await self._context.witnesses.of_node(info)
        if seen is None:
            self._say_vouched("does not answer the controller, and no router can be asked about it: it is kept")
            return None
        if seen.silent_s >= self._timeouts.unresponsive_s:
            return f"it has not answered for {silent_s:.0f} s, and routers have not heard from it for {seen.silent_s:.0f} s"
        self._say_vouched("does not answer the controller, but routers hear it: it is kept")
        if seen.state is None:
            return None
        return self._unfit(seen.epoch, seen.state, seen.step_age_s, seen.detail, info)

    def _say_vouched(self, what: str) -> None:
        """Reports `what` if it differs from the last report."""
        if what != self._vouched:
            self._vouched = what
            if what:
                self._events.trouble(self.name, what)

    async def _ask(self, handle: NodeHandle) -> NodeStatus:
        if self._told != self._context.membership.revision:
            await self._tell_keys(handle)
        return await handle.status()

    async def _beat(self) -> None:
        """Waits until the next heartbeat, a change of role, or new keys. Keys that the node did not confirm are sent again then."""
        membership = self._context.membership
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
        await self._context.membership.withdraw(info)
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

    def _unfit(self, epoch: int, state: NodeState, step_age_s: float, detail: str, info: NodeInfo) -> str | None:
        if epoch != info.epoch:
            return "another incarnation than the one that was started answers in its name"
        if state is NodeState.FAILED:
            return f"it failed: {detail or 'it reported no reason'}"
        if step_age_s > self._timeouts.step_s:
            return f"its engine has been in one step for {step_age_s:.0f} s"
        return None

    # --- orders from the controller

    async def leave(self, limit_s: float) -> bool:
        """Withdraws the node's capacity: routers send it nothing new, its requests finish or, after the limit, continue elsewhere.
        Returns True when all of them finished here. Does not end the process; when the process ends it is not replaced."""
        self._leaving = True
        if not self.serves and self.may_serve:
            await self.settled()  # it was adopted, so it may have requests
        if not self.serves:
            return True
        self._enter(ProcessPhase.DRAINING, "it is leaving")
        finished = await self.drain(limit_s)
        await self._withdraw(self.info)
        return finished

    async def change_role(self, config: NodeConfig, limit_s: float) -> None:
        """Returns when the node is ready in the new role. Raises Unavailable if it is left out instead. A process that does not finish
        its requests in time is replaced by a new one."""
        self.changes_role = True
        try:
            await self._change_role(config, limit_s)
        finally:
            self.changes_role = False

    async def _change_role(self, config: NodeConfig, limit_s: float) -> None:
        if self.phase is ProcessPhase.READY:
            # Kept: the process may die during the drain and return as another incarnation
            draining = self.info
            self._enter(ProcessPhase.DRAINING, f"its role changes to {config.role.value}")
            if not await self.drain(limit_s):
                await self._withdraw(draining)
                await self.drain(self._timeouts.stop_s)
        self.config = config  # also of one that an operator must start again
        if self.phase in (ProcessPhase.LEFT_OUT, ProcessPhase.STOPPED):
            raise Unavailable(f"{self.name} is {self.phase.value}: {self.detail}")
        self._settled.clear()
        if self.phase in (ProcessPhase.READY, ProcessPhase.DRAINING):
            self._role_change.set()
        await self.settled()
        if self.phase is not ProcessPhase.READY:
            raise Unavailable(f"{self.name} did not start as a {config.role.value} node: {self.detail}")

    async def set_adapters(self, wanted: AdapterPlaces) -> dict[str, str]:
        """Returns the digests of the adapters that the node serves now. Raises errors of `base.errors`. After any but a
        ConfigurationError it is unknown which adapters the node has."""
        if self.handle is None:
            raise Unavailable("its process is not running")
        return await self._while_it_progresses(
            self._set_adapters(self.handle, wanted, self._timeouts.start_s), f"telling {self.name} its adapters"
        )

    async def reset_cache(self) -> bool:
        """Returns False when the node does not answer, or cannot empty its cache in time."""
        handle, limit_s = self.handle, self._timeouts.unresponsive_s
        if handle is None:
            return False
        emptied = handle.reset_cache(limit_s)
        return await self._asked(limit_s + self._timeouts.silence_s, emptied, f"emptying {self.name}'s cache", False)

    async def _withdraw(self, info: NodeInfo | None) -> None:
        if info is not None:
            await self._context.membership.withdraw(info)

    async def drain(self, limit_s: float) -> bool:
        if self.handle is None:
            return True
        drained = self.handle.drain(limit_s)
        return await self._asked(limit_s + self._timeouts.stop_s, drained, f"draining {self.name}", False)
