"""Judges nodes and routers during a rollout: which of them serve, and which new ones fail. Pure."""

from __future__ import annotations

from tandem.cluster.config import TandemConfig
from tandem.cluster.pools.facts import Facts, NodeFacts, RouterFacts
from tandem.cluster.pools.plan import is_outdated, router_places
from tandem.cluster.pools.rollouts.steps import NO_MACHINE, RolloutFacts
from tandem.cluster.pools.state import ClusterState
from tandem.cluster.pools.supervisor import MAX_START_FAILURES
from tandem.wire.nodes import Role

# A new node or router has failed when it has this many errors of its own and they are more than this share of its finished requests, and
# when another node has found so many of its blocks wrong.
LEAST_ERRORS, MOST_ERRORS = 3, 0.05


def rollout_facts(
    wanted: TandemConfig,
    config: TandemConfig,
    before: TandemConfig,
    state: ClusterState,
    facts: Facts,
    unfit_since: dict[Role, float],
) -> RolloutFacts:
    """`wanted` is the configuration as the operator gave it, `config` the one with which processes start now, and `before` the one that is
    being replaced. `unfit_since` is kept from one look to the next: since when no machine has what a pool's new nodes need."""
    number, settle_s = state.revision.number, wanted.rollout.settle_s
    ready: set[str] = set()
    idle: set[str] = set()
    failed: dict[str, str] = {}
    for record in state.nodes:
        node, name = facts.nodes.get(record.node_id), record.node_id
        if record.leaving:
            continue
        # An announced node may be serving even if this controller has not reached it yet.
        if node is None or record.info is None or node.restarts >= MAX_START_FAILURES:
            idle.add(name)
        if node is None:
            continue
        if node.served_s is not None and (record.revision != number or node.served_s >= settle_s):
            ready.add(name)
        if record.revision == number and (why := _why_failed(node) or _why_convicted(name, facts)):
            failed[name] = why
    for role in Role:
        if not state.outdated(role) or any(host.could_have(role) for host in facts.hosts):
            unfit_since.pop(role, None)
        elif facts.now - unfit_since.setdefault(role, facts.now) >= wanted.timeouts.machines_s:
            failed[role.value] = NO_MACHINE.format(role.value)
    outdated = {record.name for record in state.staying_routers if is_outdated(config, record)}
    places = _new_places(config, before, state, facts)
    settled = set()
    for new in state.staying_routers:
        router = facts.routers.get(new.name)
        if router is None or new.name in outdated or not (state.rollout and state.rollout.routers):
            continue
        places.add(new.place)
        if router.served_s is not None and router.served_s >= settle_s:
            ready.add(new.name)
            settled.add(new.place)
        if why := _why_failed_router(router):
            failed[new.name] = why
            settled.add(new.place)
    return RolloutFacts(facts, ready, idle - ready, outdated, failed, wanted.slo.ttft_s, places - settled)


def _new_places(config: TandemConfig, before: TandemConfig, state: ClusterState, facts: Facts) -> set[str]:
    """Returns the places that have a router because this rollout changed `router.placement`."""
    if state.rollout is None or not state.rollout.routers:
        return set()
    if before.router.placement is config.router.placement:
        return set()
    there = router_places(config, facts.hosts)
    return {place for place, host in there.items() if host is not None and host.name not in facts.unseen}


def _why_failed(node: NodeFacts) -> str:
    """Returns why a new node has failed; "" if it has not."""
    if node.keeps_failing:
        return f"it is {node.phase.value}: {node.detail}"
    if node.status is None:
        return ""
    totals = node.status.totals
    finished = sum(totals.requests_finished.values())
    # An older node counts no clients' errors apart, so there all count.
    errors = totals.requests_finished.get("error", 0) - totals.client_errors
    if _too_many(errors, finished):
        return f"{errors} of its {finished} requests ended with an error of its own"
    return ""


def _why_convicted(name: str, facts: Facts) -> str:
    """Returns which nodes have found the KV that a new node sent wrong, by a checksum or by computing it again; "" if none has. Where the
    same bits are required (`model.exact`), a block is wrong by one bit."""
    finders = [
        finder
        for finder, node in facts.nodes.items()
        if node.status is not None and node.status.totals.wrong_kv.get(name, 0) >= LEAST_ERRORS
    ]
    return f"the KV that it sent to {', '.join(sorted(finders))} is wrong" if finders else ""


def _why_failed_router(router: RouterFacts) -> str:
    if router.keeps_failing:
        return f"it is {router.phase.value}: {router.detail}"
    if _too_many(router.load.errors, router.load.answers):
        return f"{router.load.errors} of its {router.load.answers} responses were errors that it caused itself"
    return ""


def _too_many(errors: int, of: int) -> bool:
    return errors >= LEAST_ERRORS and errors > MOST_ERRORS * of
