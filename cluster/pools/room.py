"""Computes how many nodes a Ray node has room for, and checks whether a machine's cores and memory suffice for its nodes. Pure.

Only what certainly fails is refused. A machine that offers places decides by those how many nodes it takes.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from tandem.base.errors import ConfigurationError
from tandem.cluster.config import PoolsConfig, TandemConfig
from tandem.cluster.describe import counted, format_size
from tandem.cluster.labels import matches
from tandem.cluster.launcher import Needs, Offer, TakenPlace
from tandem.wire.nodes import Role

_MIB = 1 << 20
_GIB = 1 << 30

# The least that they need, so that no deployment is refused that could have served. A node: an interpreter, torch, transformers
# and Ray's worker, without weights and cache. Beside the nodes: Ray, the controller, a router.
NODE_BYTES = 384 * _MIB
AROUND_BYTES = 512 * _MIB
# The CPU kernels pack each node's copy of the weights to this share of the files' size.
_PACKED = 0.75


def check_cores(pools: PoolsConfig, cores: int) -> None:
    """Called before anything starts. Raises ConfigurationError if more nodes share the cores than `pools.nodes_per_core` allows."""
    sizes = {role: pools.of(role).last_size for role in Role}
    reason = too_many_for_cores(sizes, cores, pools.nodes_per_core)
    if reason is not None:
        raise ConfigurationError(f"{reason}: ask for fewer ({_settings(pools)})")


def too_many_for_cores(sizes: Mapping[Role, int], cores: int, nodes_per_core: int) -> str | None:
    """Returns why this many nodes are refused; None if they are not."""
    most = cores * nodes_per_core
    if not cores or sum(sizes.values()) <= most:
        return None
    nodes = " and ".join(counted(size, f"{role.value} node") for role, size in sizes.items() if size)
    return (
        f"{nodes} are too many for {counted(cores, 'core')}: nodes that share a core slow each other down, and "
        f"{nodes_per_core} per core are the most, {most} in all"
    )


def _settings(pools: PoolsConfig) -> str:
    return ", ".join(
        f"pools.{role.value}.max" if pools.of(role).last_size > pools.of(role).first_size else f"--{role.value}"
        for role in Role
        if pools.of(role).last_size
    )


def check_memory(config: TandemConfig, free: int | None, weights: int, *, on_cpu: bool) -> None:
    """Raises ConfigurationError if the nodes need more memory than is free even by a low estimate. `weights` is the size of the model's
    files in bytes, 0 if unknown. On a GPU, weights and cache are not in this memory."""
    if free is None:
        return
    counts = {role: size for role in Role if (size := config.pools.of(role).last_size)}
    nodes = sum(counts.values())
    tiers_of = {role: config.engine_of(role).cache.host_bytes_of_tiers for role in counts}
    cache_of = {
        role: (config.engine_of(role).cache.memory_bytes or 0) if on_cpu and role.runs_requests else 0
        for role in counts
    }
    with_weights = NODE_BYTES + (int(weights * _PACKED) if on_cpu else 0)
    needed = AROUND_BYTES + sum(
        size * (with_weights + tiers_of[role] + cache_of[role]) for role, size in counts.items()
    )
    if needed <= free:
        return
    # The message describes the largest node.
    cache, tiers = max(cache_of.values(), default=0), max(tiers_of.values(), default=0)
    each = f" with {format_size(cache)} of KV cache each" if cache else ""
    if tiers:
        each += f"{',' if each else ''} with {format_size(tiers)} of cache.tiers each"
    raise ConfigurationError(
        f"{counted(nodes, 'node')}{each} {'needs' if nodes == 1 else 'need'} at least {format_size(needed)} of memory, and "
        f"{format_size(free)} is free on this machine: {_what_fits(config.pools, free, nodes, with_weights + tiers, cache)}"
    )


def _what_fits(pools: PoolsConfig, free: int, nodes: int, without_cache: int, cache: int) -> str:
    room = free - AROUND_BYTES
    left_for_cache = room // nodes - without_cache
    fitting = max(0, room // (without_cache + cache))
    ways = []
    if cache and left_for_cache >= _MIB:
        ways.append(f"give each at most {_rounded_down(left_for_cache)} (--kv-memory)")
    if nodes > 1 and fitting == 1:
        ways.append("serve with one node that does both (--aggregated 1)")
    elif 1 < fitting < nodes:
        ways.append(f"ask for at most {counted(fitting, 'node')} in all ({_settings(pools)})")
    return ", or ".join(ways) or "end other processes on this machine, or serve a smaller model"


def _rounded_down(size: int) -> str:
    return f"{size * 10 // _GIB / 10:.1f}GiB" if size >= _GIB else f"{size // _MIB}MiB"


def needs_of(config: TandemConfig) -> dict[Role, Offer]:
    """Returns what a node of each role needs on each of its machines, besides one unit of the role's resource."""
    pools = config.pools
    return {role: Offer(pools.of(role).resources_per_machine, pools.of(role).label_selector) for role in Role}


def needed_by(role: Role, needs: Needs) -> Offer:
    need = needs.get(role, Offer({}))
    return Offer({role.value: 1.0, **need.resources}, need.labels)


def places(machine: Offer, needs: Needs) -> dict[Role, int]:
    """Returns for how many nodes of each role the machine has room; a role with none is missing."""
    found = {}
    for role in Role:
        wanted = needed_by(role, needs)
        room = min(int(machine.resources.get(name, 0) // amount) for name, amount in wanted.resources.items())
        if room and matches(machine.labels, wanted.labels):
            found[role] = room
    return found


def places_left(machine: Offer, needs: Needs, taken: Sequence[TakenPlace]) -> dict[Role, int]:
    """Like `places`, but counts the places that are taken on this machine, and what is left beside them. Nodes keep their places when
    their pool's needs change; new nodes get what those leave."""
    if all(place.needed == needed_by(place.slot, needs) for place in taken):
        return places(machine, needs)
    left = dict(machine.resources)
    for place in taken:
        for name, amount in place.needed.resources.items():
            left[name] = round(max(0.0, left.get(name, 0.0) - amount), 4)  # Ray counts to four decimals
    more = places(Offer(left, machine.labels), needs)
    return dict(Counter(place.slot for place in taken) + Counter(more))


def nodes_on(places_of: Sequence[int], machines: int, most: int) -> int:
    """Returns how many nodes find room, at most `most`, if each needs a place on `machines` of these machines."""
    if machines == 1:
        return min(sum(places_of), most)
    return max(n for n in range(most + 1) if sum(min(room, n) for room in places_of) >= n * machines)


def lacking(config: TandemConfig, machines: Iterable[Offer]) -> list[str]:
    """Returns a sentence for each pool for which the machines do not suffice."""
    needs = needs_of(config)
    offers = [places(machine, needs) for machine in machines]
    sentences = []
    for role in Role:
        pool = config.pools.of(role)
        wanted = 1 if pool.nodes is None else pool.nodes
        there = nodes_on([offer.get(role, 0) for offer in offers], pool.machines, wanted)
        if there < wanted and (pool.nodes is not None or role.writes_answers):
            needed = needed_by(role, needs)
            offer = json.dumps({name: round(amount) for name, amount in needed.resources.items()})
            labels = ", ".join(f"{key}: {condition}" for key, condition in needed.labels.items())
            labelled = f", with the labels {{{labels}}}" if labels else ""
            room = f"room for {there}" if there else "no room for any"
            spread = f" on {counted(pool.machines, 'machine')} each" if pool.machines > 1 else ""
            sentences.append(
                f"pools.{role.value} wants {counted(wanted, 'node')}{spread}, but the cluster's machines have {room}: waiting "
                f"for machines that offer {offer}{labelled} (ray start --resources '{offer}'"
                f"{' --labels KEY=VALUE' if labels else ''}, or an autoscaler)"
            )
    return sentences
