"""Builds a controller's answers about small clusters."""

from __future__ import annotations

from tandem.cluster.control import ClusterView, PoolView, RouterView, SupervisedNode
from tandem.wire.nodes import NodeState, Role
from tandem.wire.requests import NodeCounters, NodeStatus


def status_of(name: str, role: Role, held: int = 0, free: int = 100) -> NodeStatus:
    return NodeStatus(
        node_id=name, role=role, epoch=1, state=NodeState.READY, free_blocks=free, total_blocks=100, running=0, waiting=0,
        waiting_tokens=0, transfers=0, held_blocks=held, step_age_s=0.0, counters=NodeCounters(),
    )  # fmt: skip


def node(name: str, role: Role, phase: str = "ready", **held: int) -> SupervisedNode:
    return SupervisedNode(name, role, "10.0.0.1", phase, "", 0, status_of(name, role, **held))


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
