"""What a Ray cluster offers for nodes to run on, read from the resources of its machines. Pure."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping

from tandem.cluster.config import TandemConfig
from tandem.cluster.describe import counted
from tandem.wire.nodes import Role

ROLES = (Role.PREFILL, Role.DECODE, Role.AGGREGATED)

Needs = Mapping[Role, Mapping[str, float]]
"""What one node of a role takes besides one of the role's own resource, such as {"GPU": 1}."""


def needs_of(config: TandemConfig) -> dict[Role, dict[str, float]]:
    return {role: config.pools.of(role).resources for role in Role}


def needed_by(role: Role, needs: Needs) -> dict[str, float]:
    return {role.value: 1.0, **needs.get(role, {})}


def places(resources: Mapping[str, float], needs: Needs) -> dict[Role, int]:
    """How many nodes of each role a machine with these resources has room for. One that lacks something has none."""
    found = {}
    for role in ROLES:
        wanted = needed_by(role, needs)
        room = min(int(resources.get(name, 0) // amount) for name, amount in wanted.items())
        if room:
            found[role] = room
    return found


def lacking(config: TandemConfig, machines: Iterable[Mapping[str, float]]) -> list[str]:
    """A sentence for each pool that the machines which are there now are too few for."""
    needs = needs_of(config)
    offered: Counter[Role] = Counter()
    for resources in machines:
        offered.update(places(resources, needs))
    sentences = []
    for role in ROLES:
        pool = config.pools.of(role)
        wanted = 1 if pool.nodes is None else pool.nodes
        if offered[role] < wanted and (pool.nodes is not None or role is Role.DECODE):
            offer = json.dumps({name: round(amount) for name, amount in needed_by(role, needs).items()})
            room = f"room for {offered[role]}" if offered[role] else "no room for any"
            sentences.append(
                f"pools.{role.value} wants {counted(wanted, 'node')}, and the cluster's machines have {room}: waiting "
                f"for machines that offer {offer} (ray start --resources '{offer}', or an autoscaler)"
            )
    return sentences
