"""Whether the cluster is the one that a forecast is about."""

from __future__ import annotations

from collections.abc import Mapping

from tandem.cluster.pools.facts import Facts
from tandem.cluster.pools.state import ClusterState
from tandem.wire.forecasts import Forecast
from tandem.wire.nodes import ENGINE_ROLES, Role


def why_another(forecast: Forecast, state: ClusterState) -> str:
    """Returns why what comes now says nothing about the forecast; "" if it does, or will when the sizes serve."""
    wanted = {role: _wanted(state, role) for role in ENGINE_ROLES}
    if wanted != {role: forecast.sizes.get(role, 0) for role in ENGINE_ROLES}:
        return f"the sizes were changed again, to {_words(wanted)}"
    if state.rollout is not None:
        return "a rollout began to replace nodes"
    if state.paused:
        return f"{', '.join(state.paused)} was paused"
    return ""


def serves(forecast: Forecast, state: ClusterState, facts: Facts) -> bool:
    """Whether every node that the forecast counts serves, and none that left does."""
    for role in ENGINE_ROLES:
        nodes = [record for record in state.nodes if record.role is role]
        ready = sum(facts.is_ready(record.node_id) for record in nodes)
        if any(record.leaving for record in nodes) or ready != forecast.sizes.get(role, 0):
            return False
    return True


def _wanted(state: ClusterState, role: Role) -> int:
    size = state.sizes.get(role)
    return len(state.staying(role)) if size is None else size


def _words(sizes: Mapping[Role, int]) -> str:
    return ", ".join(f"{size} {role.value}" for role, size in sizes.items() if size)
