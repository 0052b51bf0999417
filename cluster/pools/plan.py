"""Decides the next change that brings nodes and routers closer to what is wanted. Pure: state and facts in, one change out. A change only says
what is recorded; processes follow the record."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from tandem.cluster.config import PoolsConfig, TandemConfig
from tandem.cluster.launcher import Host
from tandem.cluster.pools.facts import Facts
from tandem.cluster.pools.placement import place, router_config
from tandem.cluster.pools.state import ClusterState, NodePlacement, NodeRecord, RouterRecord
from tandem.cluster.pools.supervisor import ProcessPhase
from tandem.router.config import RouterConfig, RouterPlacement
from tandem.wire.nodes import Role

_ROUTER = "router"
_RANKS = {ProcessPhase.READY: 0, ProcessPhase.LEFT_OUT: 2}  # how little a node would be missed; others: 1


@dataclass(frozen=True, slots=True)
class AddNode:
    """The pool needs one more node. The node waits until a machine has room for it."""

    role: Role
    why = ""

    def apply(self, state: ClusterState) -> ClusterState:
        return state.with_new_node(self.role)


@dataclass(frozen=True, slots=True)
class PlaceNode:
    """A machine has room for a node that waits."""

    node: NodeRecord
    placement: NodePlacement
    why = ""

    def apply(self, state: ClusterState) -> ClusterState:
        return state.with_node(msgspec.structs.replace(self.node, placement=self.placement))


@dataclass(frozen=True, slots=True)
class RetireNode:
    """The node drains, is ended and then forgotten. One whose machine is gone is ended at once."""

    node: NodeRecord
    why: str = ""  # as operators are told; "": they see it for themselves

    def apply(self, state: ClusterState) -> ClusterState:
        return state.with_node(msgspec.structs.replace(self.node, leaving=True))


@dataclass(frozen=True, slots=True)
class SetRouter:
    """A router starts, leaves, or has another configuration."""

    router: RouterRecord
    why: str = ""

    def apply(self, state: ClusterState) -> ClusterState:
        return state.with_router(self.router)


Change = AddNode | PlaceNode | RetireNode | SetRouter


def as_it_runs(state: ClusterState, facts: Facts) -> ClusterState:
    """Returns the state with what nodes and routers have announced since, and which nodes were left out. Recording it may have failed
    before: the next controller would tell routers of an incarnation that has ended, and withdraw the one that serves."""
    for record in state.nodes:
        node = facts.nodes.get(record.node_id)
        if node is not None and node.phase is ProcessPhase.LEFT_OUT and not record.left_out:
            state = state.with_node(record.out_of_use(node.detail))
        elif record.leaving and record.info is None:
            continue  # it is lost, or never served
        elif node is not None and node.info is not None and node.info != record.info:
            state = state.with_node(record.serving_as(node.info))
            if record.revision == state.revision.number and not state.revision.content:
                # The first node of a revision fixes its content.
                revision = msgspec.structs.replace(state.revision, content=node.info.content)
                state = msgspec.structs.replace(state, revision=revision)
    for router in state.routers:
        known = facts.routers.get(router.name)
        if known is not None and known.info is not None and known.info != router.info:
            state = state.with_router(msgspec.structs.replace(router, info=known.info))
    return state


def retire_router(router: RouterRecord, why: str) -> SetRouter:
    """The router leaves once another one has its place, if one should, and is then ended and forgotten."""
    return SetRouter(msgspec.structs.replace(router, leaving=True), f"{router.name} {why}")


def next_change(config: TandemConfig, state: ClusterState, facts: Facts) -> Change | None:
    """Returns the next change of a node. `config` is the one with which processes start now."""
    present = {host.name for host in facts.hosts}
    for node in state.nodes:
        if not node.leaving and (why := why_lost(node, present, facts.unseen)):
            # Without `info`: the next controller does not announce it.
            return RetireNode(msgspec.structs.replace(node, info=None), f"{node.node_id} is lost: {why}")
    hosts = staying_hosts(state, facts.hosts)
    for role in Role:
        staying = state.staying(role)
        wanted = wanted_size(state, hosts, role, config.pools) + surge(config, state, role)
        if len(staying) > wanted:
            return RetireNode(max(staying, key=lambda node: _needlessness(node, state, facts)))
        if len(staying) < wanted:
            return AddNode(role)
    for node in state.nodes:
        if node.placement is None and not node.leaving:
            placement = place(config, hosts, state.nodes, node.role, state.closed)
            if placement is not None:
                return PlaceNode(node, placement)
    return None


def why_lost(node: NodeRecord, present: Container[str], unseen: Container[str]) -> str:
    """Returns why the node certainly serves no more, or never did; "" if it may."""
    if node.placement is None:
        return ""
    if gone := [part.address for part in node.placement.parts if part.host not in present]:
        return f"its machine {' and '.join(gone)} is gone"
    if node.info is None and node.placement.host in unseen:
        return f"its machine {node.placement.address} is not seen, and it never served"
    return ""


def _needlessness(node: NodeRecord, state: ClusterState, facts: Facts) -> tuple[object, ...]:
    """A pool that shrinks loses the node for which this is the largest."""
    known = facts.nodes.get(node.node_id)
    rank = _RANKS.get(known.phase, 1) if known is not None else 1
    index = int(node.node_id.rpartition("-")[2])
    return node.placement is None, rank, node.revision != state.revision.number, index


# --- routers


def router_places(config: TandemConfig, hosts: Sequence[Host]) -> Mapping[str, Host | None]:
    """Returns the machines that should have routers: the head (None), and with `router.placement: every_host` every other machine."""
    places: dict[str, Host | None] = {"": None}
    if config.router.placement is RouterPlacement.EVERY_HOST:
        heads = {host.address for host in hosts if host.head}
        for host in hosts:
            if host.address not in heads:  # the head's router has the port there
                places.setdefault(host.address, host)
    return places


def wanted_router_config(config: TandemConfig, place: str) -> RouterConfig:
    return router_config(config.router, place) if place else config.router


def starting_config(config: TandemConfig, state: ClusterState, record: RouterRecord) -> RouterConfig:
    """Returns the configuration with which the router's process starts, or is adopted. During a rollout each keeps its own."""
    return record.config if state.rollout is not None else wanted_router_config(config, record.place)


def is_outdated(config: TandemConfig, record: RouterRecord) -> bool:
    """Returns whether a new router in its place would start with another configuration."""
    return as_it_serves(record.config) != as_it_serves(wanted_router_config(config, record.place))


def as_it_serves(config: RouterConfig) -> RouterConfig:
    """Returns the configuration without what a running router can change: its tokenizer's folder, the number and placement of routers."""
    return msgspec.structs.replace(config, tokenizer_path="-", processes=1, placement=RouterPlacement.HEAD)


def new_router(config: TandemConfig, state: ClusterState, facts: Facts, place: str) -> SetRouter | None:
    """None: it must wait, because its machine has not been seen yet or an earlier router of the place is still ending."""
    host = router_places(config, facts.hosts).get(place)
    ending = (old for old in state.routers if old.leaving and old.name not in facts.routers)
    if (host is not None and host.name in facts.unseen) or any(old.place == place for old in ending):
        return None
    name, taken = f"{_ROUTER}-{place}" if place else _ROUTER, {router.name for router in state.routers}
    names = (name if number == 1 else f"{name}~{number}" for number in itertools.count(1))
    free = next(each for each in names if each not in taken)
    return SetRouter(RouterRecord(free, place, wanted_router_config(config, place)))


def router_changes(config: TandemConfig, state: ClusterState, facts: Facts) -> list[SetRouter]:
    """Returns what brings each place to `router.processes` routers. A rollout replaces the outdated ones, and removes the surplus that it
    makes."""
    places, wanted = router_places(config, facts.hosts), config.router.processes
    addresses = {"", *(host.address for host in facts.hosts)}
    changes: list[SetRouter] = []
    staying: dict[str, list[RouterRecord]] = {place: [] for place in places}
    for record in state.staying_routers:
        router = facts.routers.get(record.name)
        if record.place not in addresses:
            changes.append(retire_router(record, f"is lost: its machine {record.place} is gone"))
        elif record.place not in places:
            why = "drains and ends: router.placement has no router on its machine"
            changes.append(retire_router(record, why))
        elif router is not None and router.load.is_ending:
            changes.append(retire_router(record, "got SIGTERM: another router takes its place"))
        else:
            staying[record.place].append(record)
            if (config_now := starting_config(config, state, record)) != record.config:
                # An earlier controller started it with another configuration.
                changes.append(SetRouter(msgspec.structs.replace(record, config=config_now)))
    for where, there in staying.items():
        # The second and later ones get the listening socket from one that serves.
        may_listen = not there or any(facts.serves(record.name) for record in there)
        if len(there) < wanted and may_listen and (new := new_router(config, state, facts, where)):
            changes.append(new)
        if state.rollout is None:
            # The last ones go: the first have the plain names.
            changes += [
                retire_router(record, f"drains and ends: router.processes is {wanted}") for record in there[wanted:]
            ]
    return changes


# --- sizes


def surge(config: TandemConfig, state: ClusterState, role: Role) -> int:
    """Returns how many nodes beyond its size a pool may have while a rollout replaces some. 0 for a pool that follows the machines:
    it fills them already."""
    if state.rollout is None or state.sizes.get(role, 0) is None:
        return 0
    return min(config.rollout.surge, len(state.outdated(role)))


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
