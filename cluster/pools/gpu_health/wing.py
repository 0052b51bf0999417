"""A node with a sick card leaves, and its pool gets another one elsewhere."""

from __future__ import annotations

import logging
from collections.abc import Collection

import msgspec

from tandem.base.errors import TandemError
from tandem.cluster.launcher import Host
from tandem.cluster.pools.node_supervisor import NodeSupervisor
from tandem.cluster.pools.state import ClosedSlot, ClusterState, NodeRecord
from tandem.cluster.pools.wings import Joints
from tandem.wire.requests import SickDevice

logger = logging.getLogger(__name__)


def join(joints: Joints) -> None:
    joints.begin.append(SickNodes(joints).begin)


class SickNodes:
    def __init__(self, joints: Joints) -> None:
        self._pools, self._clock, self._tasks = joints.pools, joints.clock, joints.tasks
        self._runs = False

    def begin(self) -> None:
        if not self._runs:
            self._runs = True
            self._tasks.spawn(self.run(), "replace sick nodes")

    async def run(self) -> None:
        while True:
            await self._clock.sleep(self._pools.config.timeouts.heartbeat_s)
            for node in [each for each in self._pools.fleet.nodes.values() if each.sick]:
                try:
                    await self._replace(node)
                except TandemError as error:
                    logger.warning("%s cannot leave yet: %s", node.name, error)

    async def _replace(self, node: NodeSupervisor) -> None:
        pools = self._pools
        async with pools.writing():
            record = pools.state.find(node.name)
            if record is None or record.leaving:
                return
            await pools.change_to(leaving_for_good(pools.state, record, node.sick, pools.machines))
        reasons = "; ".join(f"{each.device}: {each.why}" for each in node.sick)
        pools.note(
            f"{node.name} leaves {node.host.address}, and another node takes its place elsewhere: {reasons}. The card's place stays empty "
            f"until `tandem scale` sizes the {record.role.value} pool"
        )


def leaving_for_good(
    state: ClusterState, record: NodeRecord, sick: Collection[SickDevice], machines: Collection[Host]
) -> ClusterState:
    """Returns the state in which this node leaves, its pool keeps its size, and nothing is placed on its sick devices."""
    new = state.with_node(msgspec.structs.replace(record, leaving=True))
    if record.placement is None:
        return new
    host, slot = record.placement.host, record.placement.slot
    # Where machines offer places, Ray chooses the card for each, so one place less is used there.
    by_places = any(machine.name == host and machine.slots is not None for machine in machines)
    closed = [ClosedSlot(host, slot)] if by_places else [ClosedSlot(host, slot, each.device) for each in sick]
    return msgspec.structs.replace(new, closed=[*new.closed, *closed])
