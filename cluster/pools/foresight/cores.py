"""Which cores nodes share. On a machine with fewer cores than nodes a node more brings nothing where the others use theirs all the time."""

from __future__ import annotations

from collections.abc import Mapping

from tandem.cluster.config import TandemConfig
from tandem.cluster.pools.facts import Facts
from tandem.cluster.pools.placement import place
from tandem.cluster.pools.state import ClusterState, NodeRecord
from tandem.cluster.wings import NodeCores
from tandem.wire.nodes import ENGINE_ROLES, Role


def cores_of(config: TandemConfig, state: ClusterState, facts: Facts, sizes: Mapping[Role, int]) -> NodeCores:
    """The cores of the nodes that there would be: those that are there first, then as new ones would be placed. {} if one computes on a
    device, or has no machine with room."""
    nodes = [record for record in state.nodes if record.role not in ENGINE_ROLES]
    for role in ENGINE_ROLES:
        size, there = sizes.get(role, 0), [record for record in state.nodes if record.role is role]
        nodes += there[:size]
        for number in range(len(there), size):
            placement = place(config, facts.hosts, nodes, role, state.closed)
            nodes.append(NodeRecord(f"another {role.value} node {number}", role, placement))
    if any(record.placement is None or record.placement.device.startswith("cuda") for record in nodes):
        return {}
    found: dict[Role, list[frozenset[str]]] = {}
    for record in nodes:
        parts = record.placement.parts if record.placement is not None else []
        found.setdefault(record.role, []).append(
            frozenset(f"{part.host} {core}" for part in parts for core in part.cores)
        )
    return found
