"""Builds a controller's answers about small clusters."""

from __future__ import annotations

from tandem.cluster.control import ClusterView, PoolView, RouterView, SupervisedNode
from tandem.wire.nodes import Role
from tests.cluster.pools.helpers import status_of


def node(name: str, role: Role, phase: str = "ready", held: int = 0, free: int = 100) -> SupervisedNode:
    status = status_of(name, role, held_blocks=held, free_blocks=free)
    return SupervisedNode(name, role, "10.0.0.1", phase, "", 0, status)


def cluster(
    prefill: int = 2, decode: int = 2, routers: int = 1, nodes: list[SupervisedNode] | None = None
) -> ClusterView:
    if nodes is None:
        nodes = [node(f"prefill-{number}", Role.PREFILL) for number in range(prefill)]
        nodes += [node(f"decode-{number}", Role.DECODE) for number in range(decode)]
    listening = [
        RouterView(f"router-{number}", f"http://127.0.0.1:{8000 + number}", "ready", "", 0) for number in range(routers)
    ]
    pools = [PoolView(Role.PREFILL, prefill, prefill, 0, 0), PoolView(Role.DECODE, decode, decode, 0, 0)]
    return ClusterView("tiny", pools, nodes, listening, [])
