"""Decides the next change that brings the pools closer to what is wanted. Pure: state and machines in, one change out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from tandem.cluster.config import PoolsConfig, TandemConfig
from tandem.cluster.launcher import Host
from tandem.cluster.pools.placement import place
from tandem.cluster.pools.state import ClusterState, NodePlacement, NodeRecord
from tandem.wire.nodes import Role

Rank = Callable[[NodeRecord], int]
"""How little a node would be missed. A pool that shrinks loses the node with the highest rank."""


@dataclass(frozen=True, slots=True)
class AddNode:
    """The pool needs one more node. The node waits until a machine has room for it."""

    role: Role

    def apply(self, state: ClusterState) -> ClusterState:
        return state.with_new_node(self.role)


@dataclass(frozen=True, slots=True)
class PlaceNode:
    """A machine has room for a node that waits."""

    node: NodeRecord
    placement: NodePlacement

    def apply(self, state: ClusterState) -> ClusterState:
        return state.with_node(msgspec.structs.replace(self.node, placement=self.placement))


@dataclass(frozen=True, slots=True)
class RetireNode:
    """The pool has more nodes than wanted."""

    node: NodeRecord

    def apply(self, state: ClusterState) -> ClusterState:
        return state.with_node(msgspec.structs.replace(self.node, leaving=True))


@dataclass(frozen=True, slots=True)
class LoseNode:
    """A machine of the node is gone, and no router hears the node."""

    node: NodeRecord

    def apply(self, state: ClusterState) -> ClusterState:
        return state.without(self.node.node_id)


Change = AddNode | PlaceNode | RetireNode | LoseNode


def next_change(
    config: TandemConfig, state: ClusterState, hosts: Sequence[Host], rank: Rank
) -> Change | None:
    present = {host.name for host in hosts}
    for node in state.nodes:
        if node.placement is not None and not present.issuperset(node.placement.hosts):
            return LoseNode(node)
    hosts = staying_hosts(state, hosts)
    for role in Role:
        staying = state.staying(role)
        wanted = wanted_size(state, hosts, role, config.pools) + surge(config, state, role)
        if len(staying) > wanted:
            return RetireNode(
                max(
                    staying,
                    key=lambda node: (
                        node.placement is None,
                        rank(node),
                        node.revision != state.revision.number,
                        _index(node),
                    ),
                )
            )
        if len(staying) < wanted:
            return AddNode(role)
    for node in state.nodes:
        if node.placement is None and not node.leaving:
            placement = place(config, hosts, state.nodes, node.role, state.closed)
            if placement is not None:
                return PlaceNode(node, placement)
    return None


def surge(config: TandemConfig, state: ClusterState, role: Role) -> int:
    """Returns how many nodes beyond its size a pool may have while a rollout replaces some. 0 for a pool that follows the machines:
    it fills them already."""
    if state.rollout is None or state.sizes.get(role, 0) is None:
        return 0
    return min(config.rollout.surge, len(state.outdated(role)))


def _index(node: NodeRecord) -> int:
    return int(node.node_id.rpartition("-")[2])


def staying_hosts(state: ClusterState, hosts: Sequence[Host]) -> list[Host]:
    """Returns the machines that are not about to go."""
    return [host for host in hosts if host.name not in state.evacuated]


def wanted_size(state: ClusterState, hosts: Sequence[Host], role: Role, pools: PoolsConfig) -> int:
    size = state.sizes.get(role, 0)  # absent in a state that an older version wrote
    if size is not None:
        return size
    hosts = staying_hosts(state, hosts)
    offered = sum(1 if host.slots is None else host.slots.get(role, 0) for host in hosts)
    present = {host.name for host in hosts}
    offered -= sum(slot.role is role and slot.host in present for slot in state.closed)
    offered //= pools.of(role).machines
    # A node whose role was changed keeps its place, and no node of the old role comes in its stead.
    moved = [
        node
        for node in state.nodes
        if node.placement is not None and node.role is not node.placement.slot and not node.leaving
    ]
    came = sum(node.role is role for node in moved)
    left = sum(node.placement is not None and node.placement.slot is role for node in moved)
    return max(0, offered + came - left)


def needed_slots(state: ClusterState, pools: PoolsConfig) -> dict[Role, int]:
    """Returns how many places of each role all nodes need together, including nodes that wait for one or are leaving."""
    needed: Counter[Role] = Counter()
    for node in state.nodes:
        if node.placement is not None:
            needed[node.placement.slot] += len(node.placement.hosts)
        else:
            needed[node.role] += pools.of(node.role).machines
    return dict(needed)
