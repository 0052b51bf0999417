"""Builds what the controller shows of its cluster, from its state and its supervisors."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from tandem.base.errors import TandemError
from tandem.base.logs import ClusterLogs, LogPage, LogsQuery, recent_page
from tandem.cluster.config import TandemConfig
from tandem.cluster.control import (
    ClusterView,
    ControllerDecision,
    PoolView,
    RolloutView,
    RouterView,
    SupervisedNode,
)
from tandem.cluster.launcher import Host, LogSource
from tandem.cluster.pools.fleet import Fleet
from tandem.cluster.pools.node_supervisor import NodeSupervisor
from tandem.cluster.pools.plan import wanted_size
from tandem.cluster.pools.router_supervisor import RouterSupervisor
from tandem.cluster.pools.state import ClusterState, NodeRecord
from tandem.cluster.pools.supervisor import ProcessPhase
from tandem.cluster.tasks import Clock
from tandem.wire.nodes import PoolReport, Role

CONTROLLER = "controller"  # the name of the controller's own log
_LOG_LINES_AT_ONCE = 20_000  # in all processes together
_WAITING = "waiting"


def cluster_view(
    config: TandemConfig,
    state: ClusterState,
    hosts: Sequence[Host],
    fleet: Fleet,
    decisions: list[ControllerDecision],
    failure: str,
    rollout_waits: str = "",
) -> ClusterView:
    nodes = [_node(record, fleet) for record in state.nodes]
    pools = [_pool(role, config, state, hosts, nodes) for role in Role]
    return ClusterView(
        model=config.router.model_name,
        pools=[pool for pool in pools if pool.wanted or any(node.role is pool.role for node in nodes)],
        nodes=nodes,
        routers=[
            RouterView(name, router.url, router.phase.value, router.detail, router.restarts)
            for name, router in fleet.routers.items()
        ],
        decisions=decisions,
        failure=failure,
        revision=state.revision.number,
        rollout=_rollout(state, fleet, rollout_waits),
        paused=state.paused,
    )


def _rollout(state: ClusterState, fleet: Fleet, waits: str) -> RolloutView | None:
    if state.rollout is None:
        return None
    number = state.revision.number
    old_nodes = [node.node_id for node in state.nodes if node.revision != number]
    old_routers = [router.name for router in state.staying_routers if fleet.is_outdated(router)]
    leaving = {router.name for router in state.routers if router.leaving}
    new: list[NodeSupervisor | RouterSupervisor] = []
    if state.rollout.nodes:
        new += [node for node in fleet.nodes.values() if node.name not in old_nodes]
    if state.rollout.routers:
        new += [router for router in fleet.routers.values() if router.name not in {*old_routers, *leaving}]
    return RolloutView(
        number,
        sum(part.phase is ProcessPhase.READY for part in new),
        [*old_routers, *old_nodes],
        state.rollout.unix_time,
        waits,
        state.rollout.going_back,
    )


def _node(record: NodeRecord, fleet: Fleet) -> SupervisedNode:
    supervisor = fleet.nodes.get(record.node_id)
    if record.placement is None or supervisor is None:
        role = record.role.value
        detail = (
            f"no machine has room for another {role} node" if record.placement is None else "it is leaving"
        )
        return SupervisedNode(
            record.node_id, record.role, "", _WAITING if not record.leaving else "draining", detail, 0
        )
    return SupervisedNode(
        node_id=record.node_id,
        role=record.role,
        host=" + ".join(part.address for part in record.placement.parts),
        phase=supervisor.phase.value,
        detail=supervisor.detail,
        restarts=supervisor.restarts,
        status=supervisor.status,
    )


def _pool(
    role: Role,
    config: TandemConfig,
    state: ClusterState,
    hosts: Sequence[Host],
    nodes: Sequence[SupervisedNode],
) -> PoolView:
    pool = config.pools.of(role)
    mine = [node for node in nodes if node.role is role]
    return PoolView(
        role=role,
        wanted=wanted_size(state, hosts, role, config.pools),
        ready=sum(node.phase == ProcessPhase.READY for node in mine),
        min_nodes=pool.min,
        max_nodes=pool.max or 0,
        waiting_for_machines=sum(node.phase == _WAITING for node in mine),
    )


def pool_reports(
    config: TandemConfig, state: ClusterState, hosts: Sequence[Host], fleet: Fleet
) -> list[PoolReport]:
    """Returns what routers show of the pools. Nodes that leave are in no figure: they are not missed."""
    return [_pool_report(role, config, state, hosts, fleet) for role in Role]


def _pool_report(
    role: Role, config: TandemConfig, state: ClusterState, hosts: Sequence[Host], fleet: Fleet
) -> PoolReport:
    down: dict[str, str] = {}
    left_out: dict[str, str] = {}
    starting = waiting = 0
    for record in state.staying(role):
        node = fleet.nodes.get(record.node_id)
        if node is not None and node.phase is ProcessPhase.LEFT_OUT:
            left_out[record.node_id] = node.detail
        elif record.info is not None:
            if node is None or not (node.serves or node.is_announced):
                down[record.node_id] = node.detail if node is not None else "its process is not running"
        elif record.placement is None:
            waiting += 1
        else:
            starting += 1
    wanted = wanted_size(state, hosts, role, config.pools)
    return PoolReport(role, wanted, starting, waiting, down, left_out)


async def collected_logs(fleet: Fleet, query: LogsQuery, clock: Clock) -> ClusterLogs:
    """Returns the log lines of each process, the controller's own included, and for each process that did not answer the reason."""
    asked: dict[str, LogSource] = {}
    for node in fleet.nodes.values():
        for name, source in node.log_sources().items():
            if _is_named(query, name, node.name, node.config.role.value):
                asked[name] = source
    for router in fleet.routers.values():
        if _is_named(query, router.name):
            asked[router.name] = router
    # With many processes, each sends fewer lines at once.
    most = max(10, _LOG_LINES_AT_ONCE // max(len(asked), 1))
    limit_s = fleet.config.timeouts.silence_s
    answers = await asyncio.gather(
        *(
            clock.within(
                limit_s, source.log_page(query.after.get(name), query.last, most), f"reading {name}'s log"
            )
            for name, source in asked.items()
        ),
        return_exceptions=True,
    )
    pages: dict[str, LogPage] = {}
    silent: dict[str, str] = {}
    if _is_named(query, CONTROLLER):
        pages[CONTROLLER] = recent_page(query.after.get(CONTROLLER), query.last)
    for name, answer in zip(asked, answers, strict=True):
        if isinstance(answer, LogPage):
            pages[name] = answer
        elif isinstance(answer, TandemError):
            silent[name] = str(answer)
        else:
            raise answer
    return ClusterLogs(pages, silent)


def _is_named(query: LogsQuery, *names: str) -> bool:
    return not query.names or any(name in query.names for name in names)
