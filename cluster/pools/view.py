"""Builds what the controller shows of its cluster, from its state and facts."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from tandem.base.errors import TandemError
from tandem.base.logs import ClusterLogs, LogPage, LogsQuery, recent_page
from tandem.cluster.config import TandemConfig
from tandem.cluster.control import ClusterView, ControllerDecision, PoolView, RolloutView, RouterView, SupervisedNode
from tandem.cluster.launcher import LogSource
from tandem.cluster.pools.facts import Facts
from tandem.cluster.pools.fleet import Fleet
from tandem.cluster.pools.plan import is_outdated, wanted_size
from tandem.cluster.pools.state import ClusterState, NodeRecord
from tandem.cluster.pools.supervisor import ProcessPhase
from tandem.cluster.tasks import Clock
from tandem.wire.nodes import PoolReport, Role

CONTROLLER = "controller"  # the name of the controller's own log
_LOG_LINES_AT_ONCE = 20_000  # in all processes together
_WAITING = "waiting"


def cluster_view(
    config: TandemConfig,
    fixed: TandemConfig,
    state: ClusterState,
    facts: Facts,
    decisions: list[ControllerDecision],
    failure: str,
    rollout_waits: str = "",
) -> ClusterView:
    """`fixed` is the configuration with which processes start."""
    nodes = [_node(record, facts) for record in state.nodes]
    pools = [_pool(role, config, state, facts, nodes) for role in Role]
    return ClusterView(
        model=config.router.model_name,
        pools=[pool for pool in pools if pool.wanted or any(node.role is pool.role for node in nodes)],
        nodes=nodes,
        routers=[
            RouterView(name, router.info.url if router.info else "", router.phase.value, router.detail, router.restarts)
            for name, router in facts.routers.items()
        ],
        decisions=decisions,
        failure=failure,
        revision=state.revision.number,
        rollout=_rollout(fixed, state, facts, rollout_waits),
        paused=state.paused,
    )


def _rollout(config: TandemConfig, state: ClusterState, facts: Facts, waits: str) -> RolloutView | None:
    rollout, number = state.rollout, state.revision.number
    if rollout is None:
        return None
    old_nodes = [node.node_id for node in state.nodes if node.revision != number]
    old_routers = [router.name for router in state.staying_routers if is_outdated(config, router)]
    leaving = {router.name for router in state.routers if router.leaving}
    new = facts.nodes.keys() - {*old_nodes} if rollout.nodes else set()
    new |= facts.routers.keys() - {*old_routers, *leaving} if rollout.routers else set()
    ready = sum(facts.is_ready(name) for name in new)
    left = [*old_routers, *old_nodes]
    return RolloutView(number, ready, left, rollout.unix_time, waits, rollout.going_back)


def _node(record: NodeRecord, facts: Facts) -> SupervisedNode:
    node = facts.nodes.get(record.node_id)
    if record.placement is None or node is None:
        role = record.role.value
        detail = f"no machine has room for another {role} node" if record.placement is None else "it is leaving"
        return SupervisedNode(
            record.node_id, record.role, "", _WAITING if not record.leaving else "draining", detail, 0
        )
    host = " + ".join(part.address for part in record.placement.parts)
    return SupervisedNode(record.node_id, record.role, host, node.phase.value, node.detail, node.restarts, node.status)


def _pool(
    role: Role, config: TandemConfig, state: ClusterState, facts: Facts, nodes: Sequence[SupervisedNode]
) -> PoolView:
    pool = config.pools.of(role)
    mine = [node for node in nodes if node.role is role]
    return PoolView(
        role=role,
        wanted=wanted_size(state, facts.hosts, role, config.pools),
        ready=sum(node.phase == ProcessPhase.READY for node in mine),
        min_nodes=pool.min,
        max_nodes=pool.max or 0,
        waiting_for_machines=sum(node.phase == _WAITING for node in mine),
    )


def pool_reports(config: TandemConfig, state: ClusterState, facts: Facts) -> list[PoolReport]:
    """Returns what routers show of the pools. Nodes that leave are in no figure: they are not missed."""
    return [_pool_report(role, config, state, facts) for role in Role]


def _pool_report(role: Role, config: TandemConfig, state: ClusterState, facts: Facts) -> PoolReport:
    down: dict[str, str] = {}
    left_out: dict[str, str] = {}
    starting = waiting = 0
    for record in state.staying(role):
        node = facts.nodes.get(record.node_id)
        if node is not None and node.phase is ProcessPhase.LEFT_OUT:
            left_out[record.node_id] = node.detail
        elif record.info is not None:
            if node is None or not node.may_serve:
                down[record.node_id] = node.detail if node is not None else "its process is not running"
        elif record.placement is None:
            waiting += 1
        else:
            starting += 1
    return PoolReport(role, wanted_size(state, facts.hosts, role, config.pools), starting, waiting, down, left_out)


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
            clock.within(limit_s, source.log_page(query.after.get(name), query.last, most), f"reading {name}'s log")
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
