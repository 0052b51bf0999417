"""Whether the cluster is the one that a forecast is about."""

from __future__ import annotations

from collections.abc import Mapping

from tandem.cluster.pools.facts import Facts
from tandem.cluster.pools.state import ClusterState
from tandem.wire.forecasts import Forecast
from tandem.wire.nodes import ENGINE_ROLES, Role


def why_another(forecast: Forecast, state: ClusterState) -> str:
    """Returns why what comes now says nothing about the forecast; "" if it does, or will when the sizes serve."""
    wanted = sizes_in(state)
    if wanted != {role: forecast.sizes.get(role, 0) for role in ENGINE_ROLES}:
        return f"the sizes were changed again, to {words(wanted)}"
    if state.rollout is not None:
        return "a rollout began to replace nodes"
    if state.paused:
        return f"{', '.join(state.paused)} was paused"
    return ""


def why_not_serving(sizes: Mapping[Role, int], state: ClusterState, facts: Facts) -> str:
    """Returns "" if every node of these sizes serves, and none that is to leave does."""
    for role in ENGINE_ROLES:
        nodes, wanted = [record for record in state.nodes if record.role is role], sizes.get(role, 0)
        ready = sum(facts.is_ready(record.node_id) for record in nodes)
        if ready != wanted:
            return f"{ready} of {wanted} {role.value} nodes serve now"
        if leaving := next((record.node_id for record in nodes if record.leaving), ""):
            return f"{leaving} is leaving"
    return ""


def sizes_in(state: ClusterState) -> dict[Role, int]:
    """Returns how many nodes each role with an engine is to have."""
    return {role: _wanted(state, role) for role in ENGINE_ROLES}


def _wanted(state: ClusterState, role: Role) -> int:
    size = state.sizes.get(role)
    return len(state.staying(role)) if size is None else size


def words(sizes: Mapping[Role, int]) -> str:
    return ", ".join(f"{size} {role.value}" for role, size in sizes.items() if size)
